"""float32 convolutions of general form on tensor cores (mark gpu): TF32, and three products of TF32 for float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprims

pytestmark = pytest.mark.gpu

SHAPES = [  # n, c, h, k, window, groups, layout
    (64, 30, 20, 50, 3, 1, "NHWC"),
    (32, 64, 28, 96, 3, 2, "NHWC"),
    (32, 64, 28, 64, 3, 1, "NCHW"),
]


def gradients(precision, n, c, h, k, window, groups, layout):
    """Forward, input and weight gradient, beside the exact ones and those of the absolute values."""
    rng = np.random.default_rng(0)
    filters = "HWIO" if layout == "NHWC" else "OIHW"
    shape = {"N": n, "C": c, "H": h, "W": h}
    x = rng.standard_normal([shape[a] for a in layout]).astype(np.float32)
    w = rng.standard_normal([{"H": window, "W": window, "I": c // groups, "O": k}[a] for a in filters]).astype(
        np.float32
    )
    dy = rng.standard_normal([shape[a] if a != "C" else k for a in layout]).astype(np.float32)

    def conv(x, w):
        numbers = (layout, filters, layout)
        return jaxprims.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups, precision=precision
        )

    def three(x, w, dy):
        y, back = jax.vjp(conv, x, w)
        return (y, *back(dy))

    with jaxprims.use("cuda"):
        got = [np.asarray(v, np.float64) for v in jax.jit(three)(x, w, dy)]
    cpu = jax.devices("cpu")[0]
    with jax.enable_x64(True), jaxprims.use("reference"), jax.default_device(cpu):
        wide = [a.astype(np.float64) for a in (x, w, dy)]
        want = [np.asarray(v) for v in jax.jit(three)(*wide)]
        most = [np.asarray(v) for v in jax.jit(three)(*map(np.abs, wide))]
    return got, want, most


@pytest.mark.parametrize("case", SHAPES)
def test_tf32(case):
    """Each operand is rounded to 11 bits, to the nearest: a product is off by at most 2^-11 of itself."""
    for got, want, most in zip(*gradients(lax.Precision.DEFAULT, *case), strict=True):
        assert np.all(np.abs(got - want) <= (2**-11 + 2**-16) * most + 1e-30)


@pytest.mark.parametrize("case", [*SHAPES, (64, 128, 28, 64, 3, 1, "NHWC")])
def test_float32(case):
    """Three products lose no more than float32 sums do; the last case sums 50176 terms."""
    for got, want, _ in zip(*gradients(lax.Precision.HIGHEST, *case), strict=True):
        assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("precision", [lax.Precision.DEFAULT, lax.Precision.HIGHEST])
def test_infinities(precision):
    """An infinity, a NaN and the largest numbers give what IEEE arithmetic gives, and nothing else is touched."""
    x = np.ones((64, 16, 16, 62), np.float32)
    x[0, 0, 0, 0], x[1, 1, 1, 1], x[2, 2, 2, 2] = np.inf, np.nan, -np.inf
    x[3, 3, 3, 3] = 3e38
    w = np.full((62, 64), 0.5, np.float32)
    want = np.full((64, 16, 16, 64), 31, np.float32)
    want[0, 0, 0], want[1, 1, 1], want[2, 2, 2], want[3, 3, 3] = np.inf, np.nan, -np.inf, 1.5e38
    with jaxprims.use("cuda"):
        y = jax.jit(lambda x, w: jaxprims.conv(x, w[None, None], precision=precision))(x, jnp.asarray(w))
    np.testing.assert_allclose(np.asarray(y), want, rtol=2**-10)
