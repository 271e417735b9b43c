"""Softmax, activations and layout in plain JAX: the definition of right. Half types compute in float32 and round once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxprims.core.activations import activation_slope, apply_activation
from jaxprims.core.checks import as_float32

if TYPE_CHECKING:
    from jaxprims.act.primitive import BiasActParams, LayoutParams, SoftmaxParams


def _axes(p: SoftmaxParams, ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim + p.axis, ndim + p.axis + p.axes))


def _shifted(p: SoftmaxParams, x: jax.Array) -> jax.Array:
    # The maximum only scales numerator and denominator alike, so no derivative goes through it.
    if not p.accurate:
        return x
    return x - jax.lax.stop_gradient(jnp.max(x, _axes(p, x.ndim), keepdims=True, initial=-jnp.inf))


def softmax(p: SoftmaxParams, x: jax.Array) -> tuple[jax.Array]:
    e = jnp.exp(_shifted(p, as_float32(x)))
    return ((e / jnp.sum(e, _axes(p, x.ndim), keepdims=True)).astype(x.dtype),)


def log_softmax(p: SoftmaxParams, x: jax.Array) -> tuple[jax.Array]:
    s = _shifted(p, as_float32(x))
    return ((s - jnp.log(jnp.sum(jnp.exp(s), _axes(p, x.ndim), keepdims=True))).astype(x.dtype),)


def _expand(x: jax.Array, batch: tuple[tuple[bool, ...], ...], operand: int) -> jax.Array:
    """Size-one axes for the leading batch axes that this operand does not have."""
    return jnp.expand_dims(x, tuple(k for k, flags in enumerate(batch) if not flags[operand])) if batch else x


def _pair(p: SoftmaxParams, y: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    y, t = as_float32(_expand(y, p.batch, 0)), as_float32(_expand(t, p.batch, 1))
    return y, t, _axes(p, y.ndim)


def softmax_jvp(p: SoftmaxParams, y: jax.Array, t: jax.Array) -> tuple[jax.Array]:
    a, b, axes = _pair(p, y, t)
    return ((a * (b - jnp.sum(a * b, axes, keepdims=True))).astype(t.dtype),)


def log_softmax_jvp(p: SoftmaxParams, y: jax.Array, t: jax.Array) -> tuple[jax.Array]:
    a, b, axes = _pair(p, y, t)
    return ((b - jnp.sum(jnp.exp(a) * b, axes, keepdims=True)).astype(t.dtype),)


def log_softmax_bwd(p: SoftmaxParams, y: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    a, b, axes = _pair(p, y, g)
    return ((b - jnp.exp(a) * jnp.sum(b, axes, keepdims=True)).astype(g.dtype),)


def _preactivation(p: BiasActParams, arrays: tuple[jax.Array, ...], first: int) -> jax.Array:
    """z = x + bias + residual of operands ``first``, ... in the arithmetic type."""
    z = as_float32(_expand(arrays[0], p.batch, first))
    at = 1
    if p.has_bias:
        z = z + _bias_below(p, _expand(arrays[at], p.batch, first + at).astype(z.dtype))
        at += 1
    if p.has_residual:
        z = z + as_float32(_expand(arrays[at], p.batch, first + at))
    return z


def _bias_below(p: BiasActParams, b: jax.Array) -> jax.Array:
    """(batch axes, C) -> (batch axes, 1, ..., C, ..., 1), to line up with x below its batch axes."""
    lead = b.shape[:-1]
    return b.reshape(*lead, *(1,) * (p.rank + p.axis), b.shape[-1], *(1,) * (-1 - p.axis))


def bias_act(p: BiasActParams, *arrays: jax.Array) -> tuple[jax.Array]:
    return (apply_activation(p.activation, _preactivation(p, arrays, 0)).astype(arrays[0].dtype),)


def bias_act_jvp(p: BiasActParams, t: jax.Array, *arrays: jax.Array) -> tuple[jax.Array]:
    slope = activation_slope(p.activation, _preactivation(p, arrays, 1))
    return ((slope * as_float32(_expand(t, p.batch, 0))).astype(t.dtype),)


def transpose_layout(p: LayoutParams, x: jax.Array) -> tuple[jax.Array]:
    n = x.ndim - p.a - p.b
    return (jnp.transpose(x, (*range(n), *range(n + p.a, x.ndim), *range(n, n + p.a))),)
