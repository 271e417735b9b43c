"""Convolution in plain jax.lax: the definition of right, and what runs wherever there is no kernel.

The two derivatives are convolutions too (the index arithmetic is that of the transposed matrix product):
    dx  slides the reversed kernel over dy, whose elements stand ``strides`` apart, by steps of ``lhs_dilation``;
    dw  slides dy, dilated by ``strides``, over x as though it were the kernel, by steps of ``rhs_dilation``.

Half types are computed in float32 and rounded once. Negative padding never reaches XLA: it is cut off the operand first
(XLA on CPU reads out of bounds otherwise). A convolution of no elements is zeros, without asking XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprims.conv.params import (
    ConvParams,
    Spec,
    dilated,
    dw_shape,
    gather,
    leading,
    scatter,
    x_shape,
    y_shape,
)
from jaxprims.core.activations import apply_activation
from jaxprims.core.checks import is_static, promote, wide_dtype

Pads = Sequence[tuple[Any, Any]]


def conv(p: ConvParams, x: jax.Array, w: jax.Array) -> tuple[jax.Array]:
    """y of x and w."""
    shape = leading((x, p.x_batched), (w, p.w_batched)) + y_shape(p, x, w)
    return (_run(_forward, p, (x, p.x_batched), (w, p.w_batched), shape),)


def conv_dx(p: ConvParams, dy: jax.Array, w: jax.Array) -> tuple[jax.Array]:
    """The transpose of conv in x: the image whose inner product with x is that of dy with conv(x, w)."""
    shape = leading((dy, p.y_batched), (w, p.w_batched)) + x_shape(p, dy, w)
    return (_run(_input_gradient, p, (dy, p.y_batched), (w, p.w_batched), shape),)


def conv_dw(p: ConvParams, x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    """The transpose of conv in w."""
    shape = dw_shape(p, x, dy)
    return (_run(_kernel_gradient, p, (x, p.x_batched), (dy, p.y_batched), shape),)


def conv_fused(p: ConvParams, x: jax.Array, w: jax.Array, *rest: jax.Array) -> tuple[jax.Array]:
    """act(conv(x, w) + bias + residual), rounded once at the end."""
    wide = wide_dtype(p.result_dtype(x))
    (z,) = conv(p.linear(wide), x, w)
    extra = list(rest)
    channel = p.out_spec[1] - len(p.out_spec)
    if p.has_bias:
        bias = extra.pop(0).astype(wide)
        z = _add(
            z, align_bias(bias, p.bias_batched, len(p.out_spec), channel), p.x_batched or p.w_batched, p.bias_batched
        )
    if p.has_residual:
        z = _add(z, extra.pop(0).astype(wide), p.x_batched or p.w_batched or p.bias_batched, p.residual_batched)
    return (apply_activation(p.activation, z).astype(p.result_dtype(x)),)


def align_bias(bias: jax.Array, batched: bool, ndim: int, channel: int) -> jax.Array:
    """(K,) or (B, K) with ones for the other axes of y; ``channel`` counts from the end."""
    ones = [1] * ndim
    ones[channel] = bias.shape[-1]
    return bias.reshape((*bias.shape[:1], *ones) if batched else tuple(ones))


def _add(z: jax.Array, term: jax.Array, z_batched: bool, term_batched: bool) -> jax.Array:
    z = z[None] if term_batched and not z_batched else z
    term = term[None] if z_batched and not term_batched else term
    return z + term


def _run(
    body: Callable[..., jax.Array],
    p: ConvParams,
    a: tuple[jax.Array, bool],
    b: tuple[jax.Array, bool],
    shape: tuple[Any, ...],
) -> jax.Array:
    """``body`` at the arithmetic dtype, over the batch axis where there is one, rounded to the result's dtype."""
    (left, left_batched), (right, right_batched) = a, b
    dtype = p.result_dtype(left)
    if any(is_static(n) and n == 0 for n in (*left.shape, *right.shape, *shape)):
        return jnp.zeros(shape, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        left, right = left.astype(dtype), right.astype(dtype)
    else:  # float64 stays; an integer operand with a floating result is computed in that type
        wide = promote(wide_dtype(left.dtype), wide_dtype(dtype))
        left, right = left.astype(wide), right.astype(wide)
    run = lambda u, v: body(p, u, v)  # noqa: E731
    axis = left.shape[0] if left_batched else right.shape[0] if right_batched else 1
    if not is_static(axis):  # vmap of a convolution makes groups of the batch, which must be static ones
        pick = lambda a, batched, i: lax.dynamic_index_in_dim(a, i, keepdims=False) if batched else a  # noqa: E731
        each = lambda i: run(pick(left, left_batched, i), pick(right, right_batched, i))  # noqa: E731
        return lax.map(each, jnp.arange(axis)).astype(dtype)
    if left_batched or right_batched:
        run = jax.vmap(run, in_axes=(0 if left_batched else None, 0 if right_batched else None))
    return run(left, right).astype(dtype)


def _forward(p: ConvParams, x: jax.Array, w: jax.Array) -> jax.Array:
    if p.flip:
        w = lax.rev(w, p.rhs_spec[2:])
    return _convolve(
        x, w, p.strides, p.padding, p.lhs_dilation, p.rhs_dilation, (p.lhs_spec, p.rhs_spec, p.out_spec),
        p.groups, p.batch_groups, p.precision,
    )  # fmt: skip


def _reaches(p: ConvParams) -> list[tuple[Any, Any, Any]]:
    """Dilated extents of x, w and y along each axis."""
    return [
        (dilated(i, ld), dilated(k, rd), dilated(o, s))
        for i, k, o, s, ld, rd in zip(
            p.x_spatial, p.w_spatial, p.y_spatial, p.strides, p.lhs_dilation, p.rhs_dilation, strict=True
        )
    ]


def _swap(spec: Spec) -> Spec:
    return (spec[1], spec[0], *spec[2:])


def _input_gradient(p: ConvParams, dy: jax.Array, w: jax.Array) -> jax.Array:
    pads = [(k - 1 - lo, i - o + lo) for (i, k, o), (lo, _) in zip(_reaches(p), p.padding, strict=True)]
    if not p.flip:
        w = lax.rev(w, p.rhs_spec[2:])
    groups = max(p.groups, p.batch_groups)
    if groups > 1:  # the groups move from the kernel's K axis to its C axis, which is now the produced one
        w = move_groups(w, p.rhs_spec[0], p.rhs_spec[1], groups)
    dx = _convolve(
        dy, w, p.lhs_dilation, pads, p.strides, p.rhs_dilation, (p.out_spec, _swap(p.rhs_spec), p.lhs_spec),
        groups, 1, p.precision,
    )  # fmt: skip
    if p.batch_groups > 1:  # a group of channels of dx belongs to a group of images
        dx = move_groups(dx, p.lhs_spec[1], p.lhs_spec[0], groups)
    return dx


def _kernel_gradient(p: ConvParams, x: jax.Array, dy: jax.Array) -> jax.Array:
    pads = [(lo, o + k - 1 - i - lo) for (i, k, o), (lo, _) in zip(_reaches(p), p.padding, strict=True)]
    dw = _convolve(
        x, dy, p.rhs_dilation, pads, p.lhs_dilation, p.strides, (_swap(p.lhs_spec), _swap(p.out_spec), _swap(p.rhs_spec)),
        p.batch_groups, p.groups, p.precision,
    )  # fmt: skip
    return lax.rev(dw, p.rhs_spec[2:]) if p.flip else dw


def move_groups(a: jax.Array, axis: int, into: int, groups: int) -> jax.Array:
    """Splits ``groups`` off the axis ``axis``, as its outer part, and makes them the outer part of the axis ``into``."""
    shape = a.shape
    a = a.reshape((*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :]))
    a = jnp.moveaxis(a, axis, into)
    shape = a.shape
    return a.reshape((*shape[:into], shape[into] * shape[into + 1], *shape[into + 2 :]))


def _convolve(
    x: jax.Array, w: jax.Array, strides: Spec, pads: Pads, lhs_dilation: Spec, rhs_dilation: Spec, specs: tuple[Spec, Spec, Spec],
    groups: int, batch_groups: int, precision: Any,
) -> jax.Array:  # fmt: skip
    """lax's convolution with what negative padding cuts off cut off beforehand."""
    lhs_spec, _, _ = specs
    if not is_static(*(n for pair in pads for n in pair), *gather(x.shape, lhs_spec, 0)[2:]):
        # Symbolic sizes: lax's convolution takes no symbolic padding, its pad does.
        config = [(0, 0, 0)] * x.ndim
        for axis, (lo, hi), d in zip(lhs_spec[2:], pads, lhs_dilation, strict=True):
            config[axis] = (lo, hi, d - 1)
        x = lax.pad(x, jnp.zeros((), x.dtype), config)
        pads, lhs_dilation = ((0, 0),) * len(pads), (1,) * len(pads)
    whole, kept = x, []
    for axis, (lo, hi), d in zip(lhs_spec[2:], pads, lhs_dilation, strict=True):
        if lo >= 0 and hi >= 0:
            kept.append((lo, hi))
            continue
        size = x.shape[axis]
        # One element stands every d positions: cutting `-lo` positions takes ceil(-lo / d) elements and leaves zeros.
        first, last = max(-(lo // d), 0), max(-(hi // d), 0)
        if first + last >= size > 0:  # nothing is left but zeros
            return _zeros(whole, w, strides, pads, lhs_dilation, rhs_dilation, specs, batch_groups)
        x = lax.slice_in_dim(x, first, size - last, axis=axis)
        kept.append((lo + first * d, hi + last * d))
    return lax.conv_general_dilated(
        x, w, strides, kept, lhs_dilation, rhs_dilation,
        lax.ConvDimensionNumbers(*specs),
        feature_group_count=groups, batch_group_count=batch_groups, precision=precision,
    )  # fmt: skip


def _zeros(
    x: jax.Array, w: jax.Array, strides: Spec, pads: Pads, lhs_dilation: Spec, rhs_dilation: Spec,
    specs: tuple[Spec, Spec, Spec], batch_groups: int,
) -> jax.Array:  # fmt: skip
    lhs_spec, rhs_spec, out_spec = specs
    size = lambda a, axis: a.shape[axis]  # noqa: E731
    spatial = tuple(
        max((dilated(size(x, i), ld) + lo + hi - dilated(size(w, k), rd)) // s + 1, 0)
        for i, k, s, (lo, hi), ld, rd in zip(
            lhs_spec[2:], rhs_spec[2:], strides, pads, lhs_dilation, rhs_dilation, strict=True
        )
    )
    n = size(x, lhs_spec[0]) // batch_groups
    return jnp.zeros(scatter((n, size(w, rhs_spec[0]), *spatial), out_spec), x.dtype)
