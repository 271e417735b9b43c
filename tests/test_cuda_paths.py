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


# A warp's lanes, a block, a cluster, too long; no multiple of a vector: 1001 to 8191, then the general kernels.
LANES = (8, 64, 72, 128, 136, 256, 264, 512, 520, 768, 1024)
BLOCKS = (1032, 2048, 2056, 4096, 5120, 8192, 8200, 12288, 16384, 16392)
ODD_LENGTHS = (65, 100, 1001, 2047, 2049, 4097, 4225, 8191, 8193)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (*LANES, *BLOCKS, *ODD_LENGTHS, 32768, 40000, 65536, 65544))
def test_norm_rows(n, dtype):
    """Layer norm and RMS norm with their gradients against float64; rows that do not fill the last block."""
    rng = np.random.default_rng(n)
    rows = 1037 if n <= 1024 else 301 if n <= 8200 else 37
    eps, single = EPS[dtype], EPS["float32"]

    def values(shape, *, scale=1.0, offset=0.0):
        return np.asarray(jnp.asarray(rng.standard_normal(shape) * scale + offset, dtype)).astype(np.float64)

    x, dy = values((rows, n), offset=1.5), values((rows, n))
    w, b = values(n, scale=0.5, offset=1.0), values(n)
    for mean in (True, False):

        def fn(x, w, b, mean=mean):
            return jaxprims.layer_norm(x, w, b) if mean else jaxprims.rms_norm(x, w)

        def both(x, w, b, dy, fn=fn):
            y, back = jax.vjp(fn, x, w, b)
            return y, *back(dy)

        with jaxprims.use("cuda"):
            got = jax.jit(both)(*(jnp.asarray(a, dtype) for a in (x, w, b, dy)))
            again = jax.jit(both)(*(jnp.asarray(a, dtype) for a in (x, w, b, dy)))
        for one, two in zip(got, again, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
        y, dx, dw, db = (np.asarray(a).astype(np.float64) for a in got)
        m = x.mean(1, keepdims=True) if mean else 0.0
        rstd = 1 / np.sqrt(((x - m) ** 2).mean(1, keepdims=True) + 1e-6)
        xhat, g = (x - m) * rstd, dy * w
        want = xhat * w + (b if mean else 0)
        np.testing.assert_allclose(y, want, rtol=eps / 2 + 2 * single, atol=8 * single * np.abs(want).max())
        want = rstd * (g - (g.mean(1, keepdims=True) if mean else 0) - xhat * (g * xhat).mean(1, keepdims=True))
        np.testing.assert_allclose(dx, want, rtol=eps / 2 + 2 * single, atol=16 * single * np.abs(want).max())
        sums = [(dw, dy * xhat), *([(db, dy)] if mean else [])]
        for sum_, terms in sums:
            tol = (eps / 2) * np.abs(terms.sum(0)) + 16 * single * np.abs(terms).sum(0)
            assert (np.abs(sum_ - terms.sum(0)) <= tol).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (48, 128, 1000, 4096, 4097, 8191, 8193, 16384, 24576, 65536))
def test_norm_of_constants(n, dtype):
    """A row of one value gives exactly beta; NaN and infinity stay in their rows."""
    beta = jnp.arange(n, dtype=dtype)
    for value in (3.14159, 1e4 + 0.25, 1e-3, -65504.0):
        x = jnp.full((5, n), value, dtype)
        with jaxprims.use("cuda"):
            y = jaxprims.layer_norm(x, jnp.full(n, 2.0, dtype), beta)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(jnp.broadcast_to(beta, x.shape)))
    x = np.random.default_rng(n).standard_normal((6, n))
    x[1, n - 1], x[4, 0] = np.nan, np.inf
    with jaxprims.use("cuda"):
        y = np.asarray(jaxprims.layer_norm(jnp.asarray(x, dtype))).astype(np.float64)
    assert np.isnan(y[[1, 4]]).all() and np.isfinite(y[[0, 2, 3, 5]]).all()


def test_small_slopes():
    """float32 slopes of sigmoid and tanh far from 0 to 8 ulp; finite pre-activations beyond float16's range give a slope."""
    z = np.asarray(jnp.linspace(-40, 40, 4096, dtype=jnp.float32)).astype(np.float64)
    slopes = {"sigmoid": 1 / (np.exp(z) + 2 + np.exp(-z)), "tanh": 1 / np.cosh(z) ** 2}

    def slope(name, z, bias=None):
        with jaxprims.use("cuda"):
            _, back = jax.vjp(lambda v: jaxprims.bias_act(v, bias, name), z)
            return np.asarray(back(jnp.ones_like(z))[0]).astype(np.float64)

    for name, want in slopes.items():
        normal = want > 2.0**-120
        got = slope(name, jnp.asarray(z, jnp.float32))
        np.testing.assert_allclose(got[normal], want[normal], rtol=8 * EPS["float32"])
    far = jnp.asarray([[6e4, -6e4] * 8] * 3, jnp.float16)
    for name in ("silu", "gelu", "gelu_exact", "mish"):
        np.testing.assert_array_equal(slope(name, far, far[0]), np.tile([1.0, 0.0], (3, 8)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, n", [(1, 1_000_003), (3, 300_001), (64, 70_000), (2, 1 << 20)])
def test_softmax_of_few_long_rows(rows, n, dtype):
    """A block for each chunk of a row."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal((rows, n)) * 4
    x[0, :20000] = -np.inf
    x = np.asarray(jnp.asarray(x, dtype)).astype(np.float64)
    e = np.exp(x - x.max(1, keepdims=True))
    s = e.sum(1, keepdims=True)
    with jaxprims.use("cuda"):
        p = np.asarray(jaxprims.softmax(jnp.asarray(x, dtype))).astype(np.float64)
        log_p = np.asarray(jaxprims.log_softmax(jnp.asarray(x, dtype))).astype(np.float64)
    np.testing.assert_allclose(p, e / s, rtol=EPS[dtype] + 2.0**-14, atol=2.0**-24)
    np.testing.assert_allclose(log_p, x - x.max(1, keepdims=True) - np.log(s), rtol=EPS[dtype], atol=1e-4)
    if rows == 1:
        x[0, n - 1] = np.nan
        with jaxprims.use("cuda"):
            assert np.isnan(np.asarray(jaxprims.softmax(jnp.asarray(x, dtype)))).all()


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
