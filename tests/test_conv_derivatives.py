"""Derivatives of the fused convolution: exact slopes, one forward convolution in a training step, transposes of affine maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from jaxprims.conv.api import conv, conv_transpose

# Slopes without cancellation, in float64; e = exp(-|z|).
SLOPES = {
    "relu": lambda z, e: (z > 0) * 1.0,
    "leaky_relu": lambda z, e: np.where(z > 0, 1, 0.01),
    "elu": lambda z, e: np.where(z > 0, 1, e),
    "selu": lambda z, e: 1.0507009873554805 * np.where(z > 0, 1, 1.6732632423543772 * e),
    "sigmoid": lambda z, e: e / (1 + e) ** 2,
    "tanh": lambda z, e: 4 * e**2 / (1 + e**2) ** 2,
    "softplus": lambda z, e: np.where(z < 0, e, 1) / (1 + e),
    "log_sigmoid": lambda z, e: np.where(z > 0, e, 1) / (1 + e),
}


def ints(rng, shape):
    return jnp.asarray(rng.integers(-4, 5, shape), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", SLOPES)
def test_slopes_keep_their_digits_at_both_asymptotes(activation, dtype):
    """Within two units of the dtype, those of its subnormals included, and as bias_act, which finds the slope from z."""
    sizes = np.concatenate([np.geomspace(1e-6, 20, 700), np.linspace(0.01, 20, 1200)])
    z = jnp.unique(jnp.asarray(np.concatenate([-sizes, sizes]), dtype))[None, :, None]
    one = jnp.ones((1, 1, 1), dtype)
    got = jax.grad(lambda x: jnp.sum(conv(x, one, activation=activation).astype("float32")))(z)
    exact = np.asarray(z, np.float64)
    want = SLOPES[activation](exact, np.exp(-np.abs(exact)))
    info = jnp.finfo(dtype)
    unit = (
        np.maximum(float(info.eps) * want, float(info.smallest_subnormal)) + 4 * 2.0**-23 * want
    )  # exp and expm1: float32
    np.testing.assert_array_less(np.abs(np.asarray(got, np.float64) - want), 2 * unit + 1e-37)
    plain = jax.grad(lambda x: jnp.sum(jaxprims.activation(x, activation).astype("float32")))(z)
    np.testing.assert_array_less(np.abs(np.asarray(plain, np.float64) - want), 2 * unit + 1e-37)


def test_slopes_of_a_vanishing_leaky_relu():
    z = jnp.asarray([-6e-8, -1e-6, 6e-8], jnp.float16)[None, :, None]  # 0.01 z is no float16
    dx = jax.grad(lambda x: jnp.sum(conv(x, jnp.ones((1, 1, 1), jnp.float16), activation="leaky_relu")))(z)
    np.testing.assert_array_equal(dx.ravel(), jnp.asarray([0.01, 0.01, 1], jnp.float16))


@pytest.mark.parametrize("activation", ["silu", "tanh", "elu", "gelu", "relu", "softplus"])
def test_a_training_step_holds_one_forward_convolution(activation):
    x, w, b = jnp.ones((2, 5, 3)), jnp.ones((3, 3, 4)), jnp.ones(4)

    def loss(x, w, b):
        return jnp.sum(conv(x, w, b, activation=activation) ** 2)

    names = [e.primitive.name for e in jax.make_jaxpr(jax.value_and_grad(loss, (0, 1, 2)))(x, w, b).eqns]
    assert [n for n in names if n in ("conv", "conv_fused", "conv_dx", "conv_dw")] == [
        "conv_fused",
        "conv_dw",
        "conv_dx",
    ]
    hessian_vector = jax.make_jaxpr(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a) ** 2)))(x, w, b)
    assert [e.primitive.name for e in hessian_vector.eqns].count("conv_fused") == 1


@pytest.mark.parametrize("f", [conv, lambda x, w, **k: conv_transpose(x, w, 2, "SAME", **k)])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "silu", None])
def test_an_eager_derivative_transfers_nothing(f, activation):
    x, w, b = jnp.ones((1, 4, 3)), jnp.ones((3, 3, 3)), jnp.ones(3)
    ct = jnp.ones_like(f(x, w))
    with jax.transfer_guard("disallow"):
        y, vjp = jax.vjp(lambda x, w, b: f(x, w, bias=b, activation=activation), x, w, b)
        vjp(ct)


def test_affine_convolutions_transpose():
    rng = np.random.default_rng(12)
    x, w, b, r = (ints(rng, s) for s in ((2, 5, 3), (3, 3, 4), (4,), (2, 5, 4)))
    ct = ints(rng, r.shape)
    (want,) = jax.linear_transpose(lambda x: conv(x, w), x)(ct)
    for f in (lambda x: conv(x, w, residual=r), lambda x: conv(x, w, b), lambda x: conv(x, w, b, residual=r)):
        np.testing.assert_array_equal(jax.linear_transpose(f, x)(ct)[0], want)
    (dw,) = jax.linear_transpose(lambda w: conv(x, w, b), w)(ct)
    np.testing.assert_array_equal(dw, jax.linear_transpose(lambda w: conv(x, w), w)(ct)[0])
    db, dr = jax.linear_transpose(lambda b, r: conv(x, w, b, residual=r), b, r)(ct)
    np.testing.assert_array_equal(db, jnp.sum(ct, (0, 1)))
    np.testing.assert_array_equal(dr, ct)
    both = lambda x, b, r: conv(x, w, b, residual=r)  # noqa: E731
    for axes in ((0, 0, 0), (None, 0, None), (None, None, 0), (0, None, None)):
        args = [jnp.stack([a, 2 * a]) if i == 0 else a for a, i in zip((x, b, r), axes, strict=True)]
        mapped = jax.vmap(both, axes)
        cts = jnp.stack([ct, -3 * ct])
        _, vjp = jax.vjp(mapped, *args)
        for got, expected in zip(jax.linear_transpose(mapped, *args)(cts), vjp(cts), strict=True):
            np.testing.assert_array_equal(got, expected)
    with pytest.raises(NotImplementedError, match="activation='relu'.*not linear"):
        jax.linear_transpose(lambda x: conv(x, w, activation="relu"), x)(ct)
    with pytest.raises(NotImplementedError, match="not in both"):
        jax.linear_transpose(lambda v: conv(v, v, b[:3], padding="VALID"), w[..., :3])(ct[:1, :1, :3].repeat(3, 0))
