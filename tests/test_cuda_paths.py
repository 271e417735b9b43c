"""The kernels that select.h keeps for common pools and rows (mark gpu), at the sizes where they start, end and hand over.

The oracle of pools is the reference on the same operands: bit for bit where the result is a choice (maximum, place,
gradients of small integers), to rounding for averages. Softmax is compared with NumPy in float64, activations with the
reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "bfloat16", "float16")
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Channels by vectors and one by one; strips that end early, columns that hang over, images smaller than the window.
IMAGES = (((3, 9, 11, 16), "NHWC"), ((2, 37, 8, 5), "NHWC"), ((300, 21, 20, 24), "NHWC"), ((4, 3, 35, 20), "NCHW"))
POOLS = [
    (window, stride, padding)
    for window, stride in ((3, 2), (3, 1), (2, 2))
    for padding in ("SAME", ((1, 1), (0, 1)), ((window - 1, window - 1), (1, 0)))
]


def both_ways(fn, *args):
    out = []
    for how in ("cuda", "reference"):
        with jaxprims.use(how):
            out.append([np.asarray(v).astype(np.float64) for v in jax.tree.leaves(jax.jit(fn)(*args))])
    return zip(*out, strict=True)


def with_gradient(fn):
    def call(x, seed=1):
        y, back = jax.vjp(fn, x)
        ct = np.random.default_rng(seed).integers(-8, 9, y.shape)
        return y, back(jnp.asarray(ct, y.dtype))[0]

    return call


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, stride, padding", POOLS)
def test_max_pool(window, stride, padding, dtype):
    rng = np.random.default_rng(window + stride)
    for i, (shape, layout) in enumerate(IMAGES):
        x = rng.integers(-3, 4, shape).astype(np.float32)  # ties
        x[rng.random(shape) < 0.3] = -np.inf
        x[0][rng.random(shape[1:]) < 0.05] = np.nan
        for pool in (jaxprims.max_pool, jaxprims.min_pool)[: 2 if i == 0 else 1]:

            def fn(x, pool=pool, layout=layout):
                return pool(x, (window, window), strides=(stride, stride), padding=padding, layout=layout)

            for got, want in both_ways(with_gradient(fn), jnp.asarray(x, dtype)):
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window, stride, padding", POOLS)
def test_avg_pool(window, stride, padding, dtype):
    for i, (shape, layout) in enumerate(IMAGES):
        x = jnp.asarray(np.random.default_rng(window).standard_normal(shape), dtype)
        for pads_count in (True, False) if i == 0 else (i == 1,):

            def fn(x, pads_count=pads_count, layout=layout):
                return jaxprims.avg_pool(x, (window, window), (stride, stride), padding, pads_count, layout=layout)

            for got, want in both_ways(with_gradient(fn), x):
                atol = (4 if dtype == "float32" else 1) * EPS[dtype] * np.nanmax(np.abs(want))
                np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 7, 7, 512), (2000, 5, 9, 33), (3, 4, 4, 8)])
def test_global_avg_pool(shape, dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape) + 1, dtype)
    for got, want in both_ways(with_gradient(jaxprims.global_avg_pool), x):
        np.testing.assert_allclose(got, want, rtol=0, atol=4 * EPS[dtype] * np.abs(want).max())


LENGTHS = (33, 64, 250, 255, 256, 257, 1000, 1017, 1024, 1025, 2048, 2049, 3001, 4096, 4097, 8192, 8193, 16384, 16385)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (*LENGTHS, 32768, 32769, 50257, 131072))
def test_softmax_rows(n, dtype):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((11, n)) * 4
    x[1, rng.random(n) < 0.9] = -np.inf
    x[2] = -np.inf
    x[3, n // 2] = np.nan
    x[4, n - 1] = np.inf
    x[5] -= 80
    x[6, 0] = 60
    x = np.asarray(jnp.asarray(x, dtype)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(1, keepdims=True))
        p = e / e.sum(1, keepdims=True)
        log_p = x - x.max(1, keepdims=True) - np.log(e.sum(1, keepdims=True))
    g = np.asarray(jnp.asarray(rng.standard_normal(x.shape), dtype)).astype(np.float64)

    def run(fn):
        with jaxprims.use("cuda"):
            y, back = jax.jit(lambda x, g: (lambda r: (r[0], r[1](g)[0]))(jax.vjp(fn, x)))(
                jnp.asarray(x, dtype), jnp.asarray(g, dtype)
            )
        return np.asarray(y).astype(np.float64), np.asarray(back).astype(np.float64)

    eps = EPS[dtype]
    single = EPS["float32"]
    good = np.array([0, 1, 5, 6, 7, 8, 9, 10])
    y, dx = run(jaxprims.softmax)
    assert np.isnan(y[[2, 3, 4]]).all()
    np.testing.assert_allclose(y[good], p[good], rtol=eps + 64 * single, atol=1e-7)
    yg = np.where(np.isnan(y), 0, y)
    want = yg * (g - (yg * g).sum(1, keepdims=True))
    scale = np.abs(want[good]).max(1, keepdims=True)
    assert (np.abs(dx[good] - want[good]) <= (eps + 256 * single) * scale + 1e-7).all()
    y, dx = run(jaxprims.log_softmax)
    assert np.isnan(y[[2, 3, 4]]).all()
    np.testing.assert_allclose(y[good], log_p[good], rtol=eps + 8 * single, atol=1e-5)
    want = g - np.exp(y) * g.sum(1, keepdims=True)
    tol = (eps + 64 * single) * (np.abs(g[good]) + np.exp(y[good]) * np.abs(g[good]).sum(1, keepdims=True)) + 1e-6
    assert (np.abs(dx[good] - want[good]) <= tol).all()
    with jaxprims.use("cuda"):  # a tangent of one row's shape along a batch that only y has
        f = jax.jit(jax.vmap(lambda x, t: jax.jvp(jaxprims.log_softmax, (x,), (t,))[1], (0, None)))
        got = np.asarray(f(jnp.asarray(x, dtype), jnp.asarray(g[0], dtype))).astype(np.float64)
    want = g[0] - (np.exp(y) * g[0]).sum(1, keepdims=True)
    scale = np.abs(want[good]).max()
    assert (np.abs(got[good] - want[good]) <= (eps + 1024 * single) * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [None, "relu", "silu", "gelu", "gelu_exact"])
def test_bias_act(name, dtype):
    rng = np.random.default_rng(5)
    for shape, axis in (((7, 30, 64), -1), ((7, 30, 64), 1), ((1025, 24), -1), ((5, 33), -1)):
        x = rng.standard_normal(shape) * rng.choice([1.0, 12.0, 200.0], shape)
        c = shape[axis]
        operands = [jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal(c), dtype), jnp.asarray(x[::-1] / 2, dtype)]
        for count, bias_dtype in ((1, dtype), (2, dtype), (3, "float32")):
            args = [a.astype(bias_dtype) if i == 1 else a for i, a in enumerate(operands[:count])]

            def fn(x, bias=None, residual=None, axis=axis):
                return jaxprims.bias_act(x, bias, name, axis=axis, residual=residual)

            def call(*args, fn=fn):
                first, *rest = args
                y, back = jax.vjp(lambda v: fn(v, *rest), first)
                return y, back(jnp.cos(args[0].astype(jnp.float32)).astype(y.dtype))[0]

            rtol = (16 if dtype == "float32" else 1) * EPS[dtype]
            for got, want in both_ways(call, *args):  # atol: 1 + tanh of the reference's gelu cancels
                np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-5)
