"""The convolution primitives.

    conv        (x, w)  -> y       bilinear
    conv_dx     (dy, w) -> dx      its transpose in x
    conv_dw     (x, dy) -> dw      its transpose in w
    conv_fused  (x, w[, bias][, residual]) -> act(conv(x, w) + bias + residual)

The first three are one trilinear form, <y', conv(x, w)>, with one slot left open; so the transpose of any in any operand is
another of the three, and derivatives of every order stay among them. Operands of a transposed call are brought to the wider
of the dtypes involved, and its result takes the dtype of the operand it is the gradient of: nothing is rounded twice.

Batching. A vmapped image folds into N. A vmapped kernel (or a vmapped dw, where N is summed) becomes a leading batch axis B
of the operands that have it: a grid axis of the kernels, never a convolution of B groups, and what is not mapped is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.conv import reference, workspace
from jaxprims.conv.choice import conv_choice
from jaxprims.conv.params import ALGORITHMS, ConvParams, allows_tf32, dw_shape, flops, leading, x_shape, y_shape
from jaxprims.core.activations import activation_code, activation_slope, apply_activation
from jaxprims.core.checks import is_static, promote, wide_dtype
from jaxprims.core.primitive import define_primitive, move_to_front
from jaxprims.core.sharding import Rule

# --- shapes ---------------------------------------------------------------------------------------------------------------


def _y_result(p: ConvParams, *avals: Any) -> tuple[tuple[tuple[Any, ...], Any]]:
    x, w = avals[:2]
    rest = zip(avals[2:], _rest_flags(p), strict=True)
    return ((leading((x, p.x_batched), (w, p.w_batched), *rest) + y_shape(p, x, w), p.result_dtype(x)),)


def _x_result(p: ConvParams, dy: Any, w: Any) -> tuple[tuple[tuple[Any, ...], Any]]:
    return ((leading((dy, p.y_batched), (w, p.w_batched)) + x_shape(p, dy, w), p.result_dtype(dy)),)


def _w_result(p: ConvParams, x: Any, dy: Any) -> tuple[tuple[tuple[Any, ...], Any]]:
    return ((dw_shape(p, x, dy), p.result_dtype(x)),)


def _rest_flags(p: ConvParams) -> tuple[bool, ...]:
    return (p.bias_batched,) * p.has_bias + (p.residual_batched,) * p.has_residual


# --- derivatives ----------------------------------------------------------------------------------------------------------


def _apply(
    op: Any, p: ConvParams, a: jax.Array, b: jax.Array, ct: Any, wanted: Any, flags: tuple[str, str, str]
) -> jax.Array:
    """``op`` on (a, b), giving the gradient of an operand like ``wanted``.

    ``flags`` name the batched flags of a, b and the result. An operand without the batch axis takes the sum over it.
    """
    wide = promote(a.dtype, b.dtype, ct.dtype)
    in_a, in_b, out = flags
    summed = (getattr(p, in_a) or getattr(p, in_b)) and not getattr(p, out)
    partial_dtype = wide_dtype(wide) if summed else wanted.dtype
    q = replace(p.linear(partial_dtype), **{out: getattr(p, out) or summed})
    (g,) = op(q, a.astype(wide), b.astype(wide))
    return jnp.sum(g, axis=0).astype(wanted.dtype) if summed else g


def _transpose(
    slots: str, p: ConvParams, cts: Sequence[jax.Array], operands: Sequence[Any], wanted: Sequence[bool]
) -> tuple:
    """<ct, op(a, b)> is <y', conv(x, w)> with ct in the slot of the result: the op that lacks the wanted slot.

    ``slots``: which of x, w, y the two operands and the result are.
    """
    if all(wanted):
        raise NotImplementedError(
            "a convolution is linear in x and in w, but not in both at once: transpose it in one."
        )
    out: list[jax.Array | None] = [None, None]
    for i, want in enumerate(wanted):
        if want:
            filled = {slots[1 - i]: operands[1 - i], slots[2]: cts[0]}
            op, first, second = {"y": (conv, "x", "w"), "x": (conv_dx, "y", "w"), "w": (conv_dw, "x", "y")}[slots[i]]
            flags = f"{first}_batched", f"{second}_batched", f"{slots[i]}_batched"
            out[i] = _apply(op, p, filled[first], filled[second], cts[0], operands[i], flags)
    return tuple(out)


# Derivative of the activation written in y, for those where the rounded y tells it to the last digits. It does not for elu,
# sigmoid or tanh: near their asymptotes y is rounded to the asymptote itself.
_SLOPE_FROM_Y: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda y: (y > 0).astype(y.dtype),
    "relu6": lambda y: ((y > 0) & (y < 6)).astype(y.dtype),
    "leaky_relu": lambda y: jnp.where(jnp.signbit(y), 0.01, 1.0).astype(y.dtype),  # y may have underflowed to -0
    "softplus": lambda y: -jnp.expm1(-y),
    "log_sigmoid": lambda y: -jnp.expm1(y),
}


def _fused_jvp(p: ConvParams, primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[tuple, tuple]:
    """dy = act'(z) * (conv(dx, w) + conv(x, dw) + dbias + dresidual), z = conv(x, w) + bias + residual.

    The terms are added in float32 (so that the bias gradient, a sum over every position, is summed in float32). Where the
    slope needs z, the one convolution gives z, rounded to y's dtype, and y is the activation of that: z is kept, y is not.
    """
    x, w = primals[:2]
    dx, dw, *drest = tangents
    dtype = p.result_dtype(x)
    wide = wide_dtype(dtype)
    linear = replace(p.linear(dtype), y_batched=p.x_batched or p.w_batched)
    terms = []
    if dx is not None:
        terms.append((conv(linear, dx, w)[0], linear.y_batched))
    if dw is not None:
        terms.append((conv(linear, x, dw)[0], linear.y_batched))
    if p.has_bias and (dbias := drest.pop(0)) is not None:
        channel = p.out_spec[1] - len(p.out_spec)
        terms.append(
            (reference.align_bias(dbias.astype(wide), p.bias_batched, len(p.out_spec), channel), p.bias_batched)
        )
    if p.has_residual and (dresidual := drest.pop(0)) is not None:
        terms.append((dresidual, p.residual_batched))
    if not terms:
        return conv_fused(p, *primals), (None,)
    parts = (t.astype(wide) if batched or not p.y_batched else t.astype(wide)[None] for t, batched in terms)
    dz = reduce(jnp.add, parts)
    if p.activation in (None, *_SLOPE_FROM_Y):
        (y,) = conv_fused(p, *primals)
        return (y,), (_times_slope(p.activation, y, dz),)
    (z,) = conv_fused(replace(p, activation=None), *primals)
    return (_activated(p.activation, z),), (_times_slope(p.activation, z, dz),)


@partial(jax.checkpoint, static_argnums=0, prevent_cse=False)
@partial(jax.jit, static_argnums=0)  # also where nothing else is: constants are then no transfers
def _times_slope(activation: str | None, at: jax.Array, dz: jax.Array) -> jax.Array:
    """act'(z) * dz at y's shape and dtype. ``at``, from which the slope is found, is all that a derivative keeps."""
    if activation is not None:
        known = at.astype(dz.dtype)
        of_y = _SLOPE_FROM_Y.get(activation)
        dz = (of_y(known) if of_y else activation_slope(activation, known)) * dz
    return jnp.broadcast_to(dz, at.shape).astype(at.dtype)


@partial(jax.jit, static_argnums=0)
def _activated(activation: str | None, z: jax.Array) -> jax.Array:
    """act(z), computed in float32 at least and rounded to z's dtype."""
    return apply_activation(activation, z.astype(wide_dtype(z.dtype))).astype(z.dtype)


def _fused_transpose(p: ConvParams, cts: Sequence[jax.Array], operands: Sequence[Any], wanted: Sequence[bool]) -> tuple:
    """Without an activation the op is affine in x (or w), bias and residual: what is not asked for is a constant."""
    if p.activation is not None:
        raise NotImplementedError(
            f"a convolution with activation={p.activation!r} is not linear: there is no transpose (use jax.vjp or jax.linearize)."
        )
    (ct,) = cts
    out = [*_transpose("xwy", p.linear(p.result_dtype(operands[0])), cts, operands[:2], wanted[:2])]
    wide = ct.astype(wide_dtype(ct.dtype))
    rest = [("bias", p.bias_batched)] * p.has_bias + [("residual", p.residual_batched)] * p.has_residual
    for (name, batched), operand, want in zip(rest, operands[2:], wanted[2:], strict=True):
        keep = {p.y_batched + p.out_spec[1]} if name == "bias" else set(range(p.y_batched, ct.ndim))
        keep |= {0} if batched else set()
        dims = tuple(i for i in range(ct.ndim) if i not in keep)
        out.append((jnp.sum(wide, dims) if dims else wide).astype(operand.dtype) if want else None)
    return tuple(out)


# --- batching -------------------------------------------------------------------------------------------------------------


def _fold(a: jax.Array, dim: int, batched: bool, axis: int) -> jax.Array:
    """Merges axis ``dim`` into the axis ``axis`` of an operand, as its outer part; both counted as if unbatched."""
    a = jnp.moveaxis(a, dim, batched + axis)
    i = batched + axis
    return a.reshape((*a.shape[:i], a.shape[i] * a.shape[i + 1], *a.shape[i + 2 :]))


def _unfold(a: jax.Array, size: Any, batched: bool, axis: int) -> tuple[jax.Array, int]:
    i = batched + axis
    return a.reshape((*a.shape[:i], size, a.shape[i] // size, *a.shape[i + 1 :])), i


def _batch_axis(
    op: Any,
    p: ConvParams,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    size: Any,
    flags: Sequence[str],
    out: str,
) -> tuple[tuple, tuple]:
    """The mapped axis becomes the batch axis B, or merges with the one that is there."""
    old = [getattr(p, f) for f in flags]
    new = [d is not None for d in dims]
    q = replace(p, **{f: a or b for f, a, b in zip(flags, old, new, strict=True)}, **{out: True})
    fronted = [a if d is None else move_to_front(a, d) for a, d in zip(args, dims, strict=True)]
    if not any(old):
        return op(q, *fronted), (0,)
    inner = next(a.shape[n] for a, o, n in zip(fronted, old, new, strict=True) if o)
    merged = []
    for a, o, n in zip(fronted, old, new, strict=True):
        if o or n:
            rest = a.shape[o + n :]
            a = a if n else a[None]
            a = a if o else a[:, None]
            a = jnp.broadcast_to(a, (size, inner, *rest)).reshape(
                (size * inner, *rest)
            )  # no copy where it has both axes
        merged.append(a)
    (y,) = op(q, *merged)
    return (y.reshape((size, inner, *y.shape[1:])),), (0,)


def _image_batch(name: str, slot: str, out: str, p: ConvParams, args: Any, dims: Any, size: Any) -> tuple[tuple, tuple]:
    """conv and conv_dx: an image alone folds into N."""
    op = {"conv": conv, "conv_dx": conv_dx}[name]
    specs = {"x": p.lhs_spec, "y": p.out_spec}
    if dims[1] is None and p.batch_groups == 1:
        (y,) = op(p, _fold(args[0], dims[0], getattr(p, f"{slot}_batched"), specs[slot][0]), args[1])
        y, dim = _unfold(y, size, getattr(p, f"{out}_batched"), specs[out][0])
        return (y,), (dim,)
    return _batch_axis(op, p, args, dims, size, (f"{slot}_batched", "w_batched"), f"{out}_batched")


def _kernel_batch(p: ConvParams, args: Any, dims: Any, size: Any) -> tuple[tuple, tuple]:
    return _batch_axis(conv_dw, p, args, dims, size, ("x_batched", "y_batched"), "w_batched")


def _fused_batch(p: ConvParams, args: Any, dims: Any, size: Any) -> tuple[tuple, tuple]:
    """Folds into N where the image and the residual (if any) are mapped and nothing else is."""
    flags = ("x_batched", "w_batched", *("bias_batched",) * p.has_bias, *("residual_batched",) * p.has_residual)
    images = [f in ("x_batched", "residual_batched") for f in flags]
    if [d is not None for d in dims] == images and p.batch_groups == 1:
        axis = {"x_batched": p.lhs_spec[0], "residual_batched": p.out_spec[0]}
        folded = [
            a if d is None else _fold(a, d, getattr(p, f), axis[f]) for a, d, f in zip(args, dims, flags, strict=True)
        ]
        y, dim = _unfold(conv_fused(p, *folded)[0], size, p.y_batched, p.out_spec[0])
        return (y,), (dim,)
    return _batch_axis(conv_fused, p, args, dims, size, flags, "y_batched")


# --- sharding -------------------------------------------------------------------------------------------------------------

_X_AXES, _W_AXES, _Y_AXES = "dhw", "trs", "opq"


def _factors(p: ConvParams) -> dict[str, str]:
    """Factor names of each operand, in the order of its axes; distinct names where groups make the sizes differ."""

    def spell(spec: Sequence[int], batch_feature: str, spatial: str, batched: bool) -> str:
        names = [""] * len(spec)
        for axis, name in zip(spec, batch_feature + spatial[3 - p.rank :], strict=True):
            names[axis] = name
        return " ".join([*(["b"] if batched else []), *names])

    return {
        "x": spell(p.lhs_spec, "nc", _X_AXES, p.x_batched),
        "w": spell(p.rhs_spec, "ki" if p.groups > 1 else "kc", _W_AXES, p.w_batched),
        "y": spell(p.out_spec, "mk" if p.batch_groups > 1 else "nk", _Y_AXES, p.y_batched),
        "bias": "b k" if p.bias_batched else "k",
        "residual": spell(p.out_spec, "mk" if p.batch_groups > 1 else "nk", _Y_AXES, p.residual_batched),
    }


def _sharding(slots: Sequence[str], result: str, p: ConvParams, *_avals: Any) -> Rule | None:
    """Images, and without groups channels, may be sharded; what the result lacks is summed over the devices."""
    if p.rank > 3:
        return None
    slots = (*slots, *("bias",) * p.has_bias, *("residual",) * p.has_residual)
    names = _factors(p)
    text = f"{', '.join(names[s] for s in slots)} -> {names[result]}"
    whole = set(_X_AXES + _W_AXES + _Y_AXES)
    if p.groups > 1:
        whole |= set("cik")
    if p.batch_groups > 1:
        whole |= set("nmk")
    if p.activation is not None or p.has_bias or p.has_residual:
        whole |= {"c"}  # the sum over c must be complete before what follows it
    return Rule(text, whole=tuple(f for f in dict.fromkeys(text) if f in whole))  # in order of first use


# --- the kernels ----------------------------------------------------------------------------------------------------------

_KERNEL_DTYPES = ("float32", "float16", "bfloat16")
_EXTENT_LIMIT = (
    2**31 - 1024
)  # cuda/conv/problem.h has the same two: 32-bit indices of one image, plus a tile, must not wrap
_REACH_LIMIT = 2**30


def _supports(shape: Callable[..., Any], p: ConvParams, *avals: Any) -> str | None:
    """None if the CUDA kernels take the case, else the limit that it is past."""
    if not 1 <= p.rank <= 3:
        return f"{p.rank} spatial axes; the kernels take 1 to 3"
    result = jax.ShapeDtypeStruct(*shape(p, *avals)[0])
    for a in (*avals, result):
        if jnp.dtype(a.dtype).name not in _KERNEL_DTYPES:
            return f"dtype {jnp.dtype(a.dtype).name}; the kernels take {', '.join(_KERNEL_DTYPES)}"
    if not is_static(*p.x_spatial, *p.w_spatial):
        return "symbolic spatial sizes"
    sizes = [d for a in (*avals, result) for d in a.shape if is_static(d)]
    spatial = p.x_spatial, p.w_spatial, p.y_spatial
    if max(*sizes, *map(math.prod, spatial)) > _EXTENT_LIMIT:
        return f"an axis, or an image, of more than {_EXTENT_LIMIT} elements"
    for i, o, k, s, ld, rd, (lo, _) in zip(
        p.x_spatial, p.y_spatial, p.w_spatial, p.strides, p.lhs_dilation, p.rhs_dilation, p.padding, strict=True
    ):
        reach = max((o - 1) * s, (i - 1) * ld) + (k - 1) * rd + abs(lo)
        if max(reach, i, o, k, s, ld, rd) >= _REACH_LIMIT:
            return f"a spatial axis that reaches over {reach} positions; the kernels take fewer than {_REACH_LIMIT}"
    return None


def _config(p: ConvParams, *_avals: Any) -> dict[str, Any]:
    return {
        "lhs_spec": p.lhs_spec,
        "rhs_spec": p.rhs_spec,
        "out_spec": p.out_spec,
        "strides": p.strides,
        "padding_low": tuple(lo for lo, _ in p.padding),
        "lhs_dilation": p.lhs_dilation,
        "rhs_dilation": p.rhs_dilation,
        "flip": p.flip,
        "groups": p.groups,
        "batch_groups": p.batch_groups,
        "x_batched": p.x_batched,
        "w_batched": p.w_batched,
        "y_batched": p.y_batched,
        "activation": activation_code(p.activation),
        "has_bias": p.has_bias,
        "has_residual": p.has_residual,
        "bias_batched": p.bias_batched,
        "residual_batched": p.residual_batched,
        "algorithm": ALGORITHMS[p.algorithm],
        "tf32": allows_tf32(p.precision),
    }


def _flops(slots: str, shape: Callable[..., Any], p: ConvParams, *avals: Any) -> int:
    """The three ops cost the same: every pair of an output position and a tap is one multiplication and one addition."""
    have = dict(zip(slots, (*avals[:2], jax.ShapeDtypeStruct(*shape(p, *avals)[0])), strict=True))
    batch = leading(*((have[s], getattr(p, f"{s}_batched")) for s in "xwy"))
    dy, w = have["y"].shape[p.y_batched :], have["w"].shape[p.w_batched :]
    return flops((*batch, *dy), w, p)


# --- the table ------------------------------------------------------------------------------------------------------------

conv = define_primitive(
    "conv",
    params=ConvParams,
    shape=_y_result,
    reference=reference.conv,
    supports=partial(_supports, _y_result),
    config=_config,
    choice=partial(conv_choice, "conv", _y_result, _config),
    workspace=workspace.conv,
    bilinear=(0, 1),
    transpose=partial(_transpose, "xwy"),
    batch=partial(_image_batch, "conv", "x", "y"),
    sharding=partial(_sharding, "xw", "y"),
    cost=partial(_flops, "xwy", _y_result),
)
conv_dx = define_primitive(
    "conv_dx",
    params=ConvParams,
    shape=_x_result,
    reference=reference.conv_dx,
    supports=partial(_supports, _x_result),
    config=_config,
    choice=partial(conv_choice, "conv_dx", _x_result, _config),
    bilinear=(0, 1),
    transpose=partial(_transpose, "ywx"),
    batch=partial(_image_batch, "conv_dx", "y", "x"),
    sharding=partial(_sharding, "yw", "x"),
    cost=partial(_flops, "ywx", _x_result),
)
conv_dw = define_primitive(
    "conv_dw",
    params=ConvParams,
    shape=_w_result,
    reference=reference.conv_dw,
    supports=partial(_supports, _w_result),
    config=_config,
    choice=partial(conv_choice, "conv_dw", _w_result, _config),
    workspace=workspace.conv_dw,
    bilinear=(0, 1),
    transpose=partial(_transpose, "xyw"),
    batch=_kernel_batch,
    sharding=partial(_sharding, "xy", "w"),
    cost=partial(_flops, "xyw", _w_result),
)
conv_fused = define_primitive(
    "conv_fused",
    params=ConvParams,
    shape=_y_result,
    reference=reference.conv_fused,
    supports=partial(_supports, _y_result),
    config=_config,
    choice=partial(conv_choice, "conv_fused", _y_result, _config),
    workspace=workspace.conv,
    jvp=_fused_jvp,
    transpose=_fused_transpose,
    batch=_fused_batch,
    sharding=partial(_sharding, ("x", "w"), "y"),
    cost=partial(_flops, "xwy", _y_result),
)
