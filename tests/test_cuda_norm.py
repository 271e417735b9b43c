"""Norms along columns on a GPU (mark gpu): on chip in one launch, in sweeps, in the general kernels, at the sizes where they hand over.

Results and gradients against NumPy in float64; twice the same bits; exact where it can be.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims

pytestmark = pytest.mark.gpu
EPS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# (kind, shape, groups): few rows, one cluster of 1 to 16 blocks, strips of whole groups, too large for the chip, odd widths
CASES = [
    ("batch", (16, 7, 7, 2048), 0),
    ("batch", (64, 14, 14, 256), 0),
    ("batch", (2, 3, 3, 64), 0),
    ("batch", (300, 29, 27, 24), 0),
    ("batch", (5, 41, 43, 1032), 0),
    ("batch", (9, 31, 37, 333), 0),
    ("group", (3, 33, 31, 320), 32),
    ("group", (2, 64, 64, 320), 32),
    ("group", (5, 9, 11, 96), 4),
    ("group", (2, 130, 130, 512), 2),
    ("group", (7, 61, 67, 318), 6),
    ("instance", (3, 65, 63, 40), 0),
    ("instance", (2, 128, 130, 64), 0),
    ("instance", (2, 300, 310, 16), 0),
]


def call(kind, groups, activation, x, scale, bias, residual=None):
    options = {"activation": activation, "eps": 1e-5, "residual": residual}
    if kind == "batch":
        return jaxprims.batch_norm(x, scale, bias, **options)
    if kind == "instance":
        return (jaxprims.instance_norm(x, scale, bias, **options),)
    return (jaxprims.group_norm(x, scale, bias, num_groups=groups, **options),)


def oracle(kind, groups, activation, x, scale, bias, dy, residual=0.0):
    x, scale, bias, dy, residual = (np.asarray(v).astype(np.float64) for v in (x, scale, bias, dy, residual))
    channels = x.shape[-1]
    groups = groups or channels
    split = (1 if kind == "batch" else x.shape[0], -1, groups, channels // groups)
    v, g = x.reshape(split), dy.reshape(split)
    scale, bias = scale.reshape(1, 1, *split[2:]), bias.reshape(1, 1, *split[2:])
    mean = v.mean((1, 3), keepdims=True)
    var = np.square(v - mean).mean((1, 3), keepdims=True)
    rstd = 1 / np.sqrt(var + 1e-5)
    xhat = (v - mean) * rstd
    z = xhat * scale + bias + (residual.reshape(split) if residual.ndim else 0)
    if activation == "relu":
        y, slope = np.maximum(z, 0), z > 0
    elif activation == "silu":
        s = 1 / (1 + np.exp(-z))
        y, slope = z * s, s * (1 + z * (1 - s))
    else:
        y, slope = z, 1.0
    h = g * slope
    k = h * scale
    dx = rstd * (k - k.mean((1, 3), keepdims=True) - xhat * (k * xhat).mean((1, 3), keepdims=True))
    sums = [(h * xhat).sum((0, 1)).ravel(), h.sum((0, 1)).ravel()]
    near = (
        np.abs(z.reshape(x.shape)) < 1e-3 if activation == "relu" else np.zeros(x.shape, bool)
    )  # either side of the kink
    return [y.reshape(x.shape), dx.reshape(x.shape), *sums, mean.ravel(), var.ravel()], near


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("kind, shape, groups", CASES)
def test_columns(kind, shape, groups, dtype, activation):
    rng = np.random.default_rng(len(kind) + sum(shape))
    x, dy, residual = (jnp.asarray(rng.standard_normal(shape, np.float32) * 2 + 1, dtype) for _ in range(3))
    scale, bias = (jnp.asarray(1 + 0.3 * rng.standard_normal(shape[-1]), jnp.float32) for _ in range(2))
    for more in (None, residual):

        @jax.jit
        def run(x, scale, bias, dy, more):
            y, back = jax.vjp(
                lambda x, scale, bias: call(kind, groups, activation, x, scale, bias, more)[0], x, scale, bias
            )
            return (y, *back(dy), *call(kind, groups, activation, x, scale, bias, more)[1:])

        with jaxprims.use("cuda"):
            got, again = ([np.asarray(v) for v in run(x, scale, bias, dy, more)] for _ in range(2))
        want, near = oracle(kind, groups, activation, x, scale, bias, dy, 0.0 if more is None else more)
        for name, a, b, w in zip(("y", "dx", "dscale", "dbias", "mean", "var"), got, again, want, strict=False):
            assert (a == b).all(), name
            whole = name in ("y", "dx")
            eps = EPS[dtype if whole else "float32"]
            tol = 3 if whole and dtype != "float32" else 16 if whole else 64
            error = np.abs(a.astype(np.float64) - w)
            if name == "dx":
                error = np.where(near, 0, error)
            if name in ("dscale", "dbias"):  # cancellation, and elements at the kink
                tol += 2 * np.sqrt(np.prod(shape[:-1]))
                eps += near.sum() * 1e-6
            assert error.max() <= tol * eps * np.abs(w).max(), (name, error.max() / np.abs(w).max() / eps)


@pytest.mark.parametrize("kind", ["batch", "group", "instance"])
@pytest.mark.parametrize("shape", [(8, 14, 14, 64), (4, 200, 210, 64), (600, 30, 30, 64)])
def test_constants_give_the_bias(kind, shape):
    bias = jnp.arange(shape[-1]) / 7.0
    with jaxprims.use("cuda"):
        y = call(kind, 32, None, jnp.full(shape, 10000.003, jnp.float32), jnp.full(shape[-1], 3.0), bias)[0]
    np.testing.assert_array_equal(np.asarray(y), np.broadcast_to(np.asarray(bias), shape))


@pytest.mark.parametrize("shape", [(8, 14, 14, 64), (300, 30, 30, 64)])
def test_a_large_mean(shape):
    """1e4 + i * 1e-3 in float32: the mean is held in two numbers."""
    x = (1e4 + np.arange(np.prod(shape)).reshape(shape) % 977 * 1e-3).astype(np.float32)
    ones = np.ones(shape[-1], np.float32)
    with jaxprims.use("cuda"):
        y = call("batch", 0, None, jnp.asarray(x), jnp.asarray(ones), jnp.zeros_like(ones))[0]
    want = oracle("batch", 0, None, x, ones, 0 * ones, x)[0][0]
    np.testing.assert_allclose(np.asarray(y), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", list(EPS))
def test_nan_stays_in_its_statistic(dtype):
    x = np.random.default_rng(0).standard_normal((4, 16, 16, 64)).astype(np.float32)
    x[1, 3, 5, 20] = np.nan
    with jaxprims.use("cuda"):
        y, mean, _ = (
            np.asarray(v) for v in call("batch", 0, "relu", jnp.asarray(x, dtype), jnp.ones(64), jnp.zeros(64))
        )
        z = np.asarray(call("group", 16, None, jnp.asarray(x, dtype), jnp.ones(64), jnp.zeros(64))[0])
    assert np.isnan(y[..., 20]).all() and np.isnan(y).sum() == y[..., 20].size and np.isnan(mean).sum() == 1
    assert np.isnan(z[1, ..., 20:24]).all() and np.isnan(z).sum() == z[1, ..., 20:24].size


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("shape", [(3, 5, 7, 96), (11, 8), (70, 2, 3, 256), (5, 13), (4, 4)])
def test_local_response_norm(shape, beta, dtype):
    rng = np.random.default_rng(shape[-1])
    x, dy = (jnp.asarray(rng.standard_normal(shape) * 2, dtype) for _ in range(2))
    with jaxprims.use("cuda"):
        y, back = jax.vjp(lambda x: jaxprims.local_response_norm(x, size=5, alpha=0.5, beta=beta), x)
        got = [np.asarray(v).astype(np.float64) for v in (y, back(dy)[0])]
    x, dy = (np.asarray(v).astype(np.float64) for v in (x, dy))

    def window(v):
        padded = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(2, 2)])
        return sum(padded[..., i : i + v.shape[-1]] for i in range(5))

    d = 1 + 0.1 * window(x * x)
    want = x * d**-beta, dy * d**-beta - 0.2 * beta * x * window(dy * x * d ** (-beta - 1))
    np.testing.assert_allclose(
        got[0], want[0], rtol=8 * EPS[dtype] if dtype == "float32" else 1.01 * EPS[dtype], atol=1e-7
    )
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=4 * EPS[dtype] * np.abs(want[1]).max())
