"""float32 convolutions on a GPU (mark gpu), both precisions: shapes that Hopper's kernels take, exactness, values that are not finite."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprims

pytestmark = pytest.mark.gpu
COUNT = int(os.environ.get("JAXPRIMS_FUZZ", "24"))
NHWC = ("NHWC", "HWIO", "NHWC")


def relative(got: Any, want: Any) -> float:
    want = np.asarray(want, np.float64)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30))


def in_float64(fn, *operands):
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jaxprims.use("reference"), jax.default_device(cpu):
        return fn(*(jax.device_put(np.asarray(a, np.float64), cpu) for a in operands))


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("precision, limit", [("highest", 1e-6), ("default", 1e-3)])
def test_random_shapes(seed: int, precision: str, limit: float):
    """Channels last, multiples of 4: value, epilogue and input gradient against float64, three runs of the same bits."""
    rng = np.random.default_rng([seed, precision == "default"])
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    c, k = (4 * int(np.exp(rng.uniform(np.log(4), np.log(60)))) for _ in range(2))
    window = tuple(int(rng.choice([1, 1, 3, 3, 5])) for _ in range(rank))
    strides = tuple(int(rng.choice([1, 1, 1, 2, 3])) for _ in range(rank))
    dilation = tuple(int(rng.choice([1, 1, 2])) for _ in range(rank))
    padding = tuple((int(rng.integers(0, w + 1)), int(rng.integers(0, w + 1))) for w in window)
    n = int(np.exp(rng.uniform(0, np.log(80))))
    side = int(np.clip((4e8 / (c * k * np.prod(window) * 2 * n)) ** (1 / rank), 9, 40))
    sizes = tuple(max(9, side + int(rng.integers(-3, 4))) for _ in range(rank))
    activation = rng.choice(np.array([None, None, "relu"], object))
    x = rng.standard_normal((n, *sizes, c)).astype(np.float32)
    w = (rng.standard_normal((*window, c, k)) / np.sqrt(c * np.prod(window))).astype(np.float32)
    b = rng.standard_normal(k).astype(np.float32)
    options: dict[str, Any] = dict(strides=strides, padding=padding, kernel_dilation=dilation)
    y_shape = jax.eval_shape(partial(jaxprims.conv, **options), x, w).shape
    dy = rng.standard_normal(y_shape).astype(np.float32)
    r = rng.standard_normal(y_shape).astype(np.float32) if rng.random() < 0.4 else None

    def fn(x, w, b, dy, *r, precision):
        fused = jaxprims.conv(
            x, w, b, residual=r[0] if r else None, activation=activation, precision=precision, **options
        )
        plain, vjp = jax.vjp(lambda x: jaxprims.conv(x, w, precision=precision, **options), x)
        return fused, plain, vjp(dy)[0]

    operands = (x, w, b, dy, *(() if r is None else (r,)))
    jitted = jax.jit(partial(fn, precision=precision))
    with jaxprims.use("cuda"):
        got = jitted(*operands)
        again = [jitted(*operands) for _ in range(2)]
    want = in_float64(partial(fn, precision="highest"), *operands)
    for name, a, b, *others in zip(("fused", "plain", "dx"), got, want, *again, strict=True):
        assert relative(a, b) < limit, f"{name} of x {x.shape} w {w.shape} {options}"
        for other in others:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(other))


@pytest.mark.parametrize("c, k", [(64, 128), (64, 64), (32, 256)])
def test_highest_is_float32(c: int, k: int):
    """1 + 2^-13 times 1 is not 1: forward and input gradient, in either operand."""
    value = np.float32(1.0001220703125)
    x, w = np.zeros((4, 16, 16, c), np.float32), np.zeros((1, 1, c, k), np.float32)
    for a, b in ((value, 1), (1, value)):
        x[..., 0], w[0, 0, 0, :] = a, b
        with jaxprims.use("cuda"):
            y = jax.jit(partial(jaxprims.conv, precision=lax.Precision.HIGHEST))(x, w)
            dx = jax.jit(lambda x, w, dy: jax.vjp(lambda x: jaxprims.conv(x, w, precision="highest"), x)[1](dy)[0])(
                x, w, np.asarray(x[..., :1] * (np.arange(k) == 0), np.float32)
            )
        np.testing.assert_array_equal(np.asarray(y), value)
        np.testing.assert_array_equal(np.asarray(dx[..., 0]), value)


@pytest.mark.parametrize("precision", ["highest", "default"])
@pytest.mark.parametrize(
    "a, b", [(np.inf, 1), (1, np.inf), (-np.inf, 1.1), (1.1, -np.inf), (np.inf, np.inf), (np.nan, 1), (1, np.nan)]
)
def test_not_finite(precision: str, a: float, b: float):
    """A sum that has an infinite term is infinite, as in float32 arithmetic; NaN stays NaN."""
    rng = np.random.default_rng(3)
    x, w = (
        rng.uniform(0.5, 1, (4, 16, 16, 64)).astype(np.float32),
        rng.uniform(0.5, 1, (1, 1, 64, 128)).astype(np.float32),
    )
    x[2, 3, 4, 5], w[0, 0, 5, 6] = a, b
    with jaxprims.use("cuda"):
        y = np.asarray(jax.jit(partial(jaxprims.conv, precision=precision))(x, w))
    want = np.einsum("nhwc,ck->nhwk", x.astype(np.float64), w[0, 0].astype(np.float64))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(y), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(y), np.isneginf(want))


@pytest.mark.parametrize("precision", [lax.Precision.DEFAULT, lax.Precision.HIGHEST])
@pytest.mark.parametrize(
    "n, size, c, k, r, padding",
    [
        (16, 14, 256, 256, 3, 1),
        (16, 28, 64, 256, 1, 0),
        (16, 13, 384, 384, 3, 0),
        (16, 16, 128, 128, 7, 0),
        (16, 28, 64, 64, 3, 1),
    ],
)
def test_error_is_that_of_xla(precision, n: int, size: int, c: int, k: int, r: int, padding: int):
    """At most 1.5 times the error of jax.lax at the same precision against float64, forward and input gradient; 20 runs alike."""
    rng = np.random.default_rng(r)
    x = rng.standard_normal((n, size, size, c)).astype(np.float32)
    w = (rng.standard_normal((r, r, c, k)) / np.sqrt(c * r * r)).astype(np.float32)

    def fn(conv, precision, x, w, dy):
        options = dict(
            window_strides=(1, 1), padding=[(padding, padding)] * 2, dimension_numbers=NHWC, precision=precision
        )
        y, vjp = jax.vjp(lambda x: conv(x, w, **options), x)
        return y, vjp(dy)[0]

    out = size + 2 * padding - r + 1
    dy = rng.standard_normal((n, out, out, k)).astype(np.float32)
    want = in_float64(partial(fn, jaxprims.conv_general_dilated, lax.Precision.HIGHEST), x, w, dy)
    ours = jax.jit(partial(fn, jaxprims.conv_general_dilated, precision))
    with jaxprims.use("cuda"):
        got = ours(x, w, dy)
        for _ in range(20):
            for a, b in zip(got, ours(x, w, dy), strict=True):
                assert bool(jnp.all(a == b))
    rival = jax.jit(partial(fn, lax.conv_general_dilated, precision))(x, w, dy)
    for a, b, exact in zip(got, rival, want, strict=True):
        # Where the rival takes an algorithm without TF32 (FFT), the rounding of two operands to 11 bits is the measure.
        floor = 3e-4 if precision is lax.Precision.DEFAULT else 0.0
        assert relative(a, exact) <= 1.5 * max(relative(b, exact), floor)
