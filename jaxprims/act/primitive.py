"""The primitives of the act family.

    y = softmax(x), log_softmax(x)         along one axis, or several adjacent ones
    softmax_jvp(y, t)     = y * (t - sum(y * t))         linear in t, its own transpose
    log_softmax_jvp(y, t) = t - sum(exp(y) * t)          linear in t; the transpose is
    log_softmax_bwd(y, g) = g - exp(y) * sum(g)          and the other way round
    y = bias_act(x[, bias][, residual])    = act(z),  z = x + bias + residual
    bias_act_jvp(t, x[, bias][, residual]) = act'(z) * t linear in t, its own transpose
    y = transpose_layout(x)                (..., A, B) -> (..., B, A), linear, the inverse is its transpose

Axes are counted from the end, so that a batch axis in front changes nothing. Where one operand alone is batched, the
axis is a batch axis of the op (``batch``: for each leading axis of the result, outermost first, which operands have it)
and the kernel reads the others again instead of having them copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.act import reference
from jaxprims.core.activations import activation_code
from jaxprims.core.checks import promote
from jaxprims.core.primitive import Op, define_primitive, move_to_front
from jaxprims.core.sharding import Rule

Flags = tuple[tuple[bool, ...], ...]
MAX_BATCH_AXES = 6  # kMaxBatchAxes in cuda/act/params.h


@dataclass(frozen=True)
class SoftmaxParams:
    """``axes`` adjacent axes from ``axis`` (negative) on."""

    axis: int
    axes: int = 1
    accurate: bool = True
    batch: Flags = ()


@dataclass(frozen=True)
class BiasActParams:
    """The bias runs along ``axis`` (negative) of x, which has ``rank`` axes below ``batch``."""

    activation: str | None
    has_bias: bool = False
    has_residual: bool = False
    axis: int = -1
    rank: int = 1
    batch: Flags = ()


@dataclass(frozen=True)
class LayoutParams:
    """How many axes A and B are, the last two groups of the operand."""

    a: int
    b: int


# --- batch axes that some operands lack ---------------------------------------------------------------------------------


def _lead(batch: Flags, avals: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of the result's leading batch axes."""
    at = [0] * len(avals)
    sizes = []
    for flags in batch:
        owner = flags.index(True)
        sizes.append(avals[owner].shape[at[owner]])
        at = [i + f for i, f in zip(at, flags, strict=True)]
    return tuple(sizes)


def _core(batch: Flags, aval: Any, operand: int) -> tuple[Any, ...]:
    """An operand's shape below its batch axes."""
    return aval.shape[sum(flags[operand] for flags in batch) :]


def _pack(batch: Flags) -> dict[str, int]:
    """Four bits for each batch axis, outermost lowest; bit i: operand i has it."""
    packed = sum(f << (4 * k + i) for k, flags in enumerate(batch) for i, f in enumerate(flags))
    return {"batch_axes": len(batch), "batch": packed}


def _lead_names(batch: Flags, operand: int) -> list[str]:
    return [f"v{k}" for k, flags in enumerate(batch) if flags[operand]]


def _batch(op: Callable[[], Op], follows: Callable[[Any], tuple[bool, ...]]) -> Any:
    """``follows(params)``: which operands take one more leading axis as one more axis of the same arrays."""

    def rule(p: Any, args: Sequence[Any], dims: Sequence[Any], size: int) -> tuple[Any, Any]:
        args = [x if d is None else move_to_front(x, d) for x, d in zip(args, dims, strict=True)]
        flags = tuple(d is not None for d in dims)
        if p.batch or flags != follows(p):
            p = replace(p, batch=(flags, *p.batch))
        elif isinstance(p, BiasActParams):
            p = replace(p, rank=p.rank + 1)
        return op()(p, *args), (0,)

    return rule


def _self_transpose(op: Callable[[], Op], linear: int) -> Any:
    """The cotangent of the ``linear`` operand: ``op`` applied to ct in its place, summed over batch axes it lacks."""

    def rule(p: Any, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, ...]:
        full = tuple(tuple(f or i == linear for i, f in enumerate(flags)) for flags in p.batch)
        args = [cts[0] if i == linear else x for i, x in enumerate(operands)]
        (g,) = op()(replace(p, batch=full), *args)
        missing = tuple(k for k, flags in enumerate(p.batch) if not flags[linear])
        if missing:
            g = jnp.sum(g, missing)
        return tuple(g if i == linear else None for i in range(len(operands)))

    return rule


# --- limits of the kernels ------------------------------------------------------------------------------------------------


def _supports(p: Any, *avals: Any) -> str | None:
    dtype = avals[0].dtype
    if dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"the act kernels take float32, float16 and bfloat16, not {dtype}"
    if any(a.dtype != dtype for a in avals) and not isinstance(p, BiasActParams):
        return "operands of two dtypes"
    if len(p.batch) > MAX_BATCH_AXES:
        return f"{len(p.batch)} nested batch axes of one operand alone; the act kernels take {MAX_BATCH_AXES}"
    return None


# --- softmax ------------------------------------------------------------------------------------------------------------


def _softmax_config(p: SoftmaxParams, *_avals: Any) -> dict[str, Any]:
    return {"axis": p.axis, "axes": p.axes, "accurate": p.accurate, **_pack(p.batch)}


def _softmax_rule(p: SoftmaxParams, *avals: Any) -> Rule:
    n = len(_core(p.batch, avals[0], 0))
    core = [f"a{i}" for i in range(n)]
    whole = tuple(core[n + p.axis : n + p.axis + p.axes])
    operands = ", ".join(" ".join([*_lead_names(p.batch, i), *core]) for i in range(len(avals)))
    lead = [f"v{k}" for k in range(len(p.batch))]
    return Rule(f"{operands} -> {' '.join([*lead, *core])}", whole)


def _pair_shape(p: SoftmaxParams, y: Any, t: Any) -> Any:
    return (((*_lead(p.batch, (y, t)), *_core(p.batch, y, 0)), t.dtype),)


def _both(_p: Any) -> tuple[bool, ...]:
    return (True, True)


def _size(a: Any) -> int:
    return math.prod(a.shape)


def _softmax_jvp(p: SoftmaxParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # dy = y * (dx - sum(y * dx))
    (y,) = softmax(p, *primals)
    return (y,), softmax_jvp(p, y, tangents[0])


def _log_softmax_jvp(p: SoftmaxParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # dy = dx - sum(softmax(x) * dx), and softmax(x) = exp(y)
    (y,) = log_softmax(p, *primals)
    return (y,), log_softmax_jvp(p, y, tangents[0])


softmax: Op = define_primitive(
    "softmax",
    params=SoftmaxParams,
    shape=lambda p, x: ((x.shape, x.dtype),),
    reference=reference.softmax,
    supports=_supports,
    config=_softmax_config,
    jvp=_softmax_jvp,
    batch=_batch(lambda: softmax, lambda p: (True,)),
    sharding=_softmax_rule,
    cost=lambda p, x: 4 * _size(x),
)

log_softmax: Op = define_primitive(
    "log_softmax",
    params=SoftmaxParams,
    shape=lambda p, x: ((x.shape, x.dtype),),
    reference=reference.log_softmax,
    supports=_supports,
    config=_softmax_config,
    jvp=_log_softmax_jvp,
    batch=_batch(lambda: log_softmax, lambda p: (True,)),
    sharding=_softmax_rule,
    cost=lambda p, x: 4 * _size(x),
)

softmax_jvp: Op = define_primitive(
    "softmax_jvp",
    params=SoftmaxParams,
    shape=_pair_shape,
    reference=reference.softmax_jvp,
    supports=_supports,
    config=_softmax_config,
    linear=(1,),
    transpose=_self_transpose(lambda: softmax_jvp, 1),
    batch=_batch(lambda: softmax_jvp, _both),
    sharding=_softmax_rule,
    cost=lambda p, y, t: 4 * math.prod(_pair_shape(p, y, t)[0][0]),
)

log_softmax_jvp: Op = define_primitive(
    "log_softmax_jvp",
    params=SoftmaxParams,
    shape=_pair_shape,
    reference=reference.log_softmax_jvp,
    supports=_supports,
    config=_softmax_config,
    linear=(1,),
    transpose=_self_transpose(lambda: log_softmax_bwd, 1),
    batch=_batch(lambda: log_softmax_jvp, _both),
    sharding=_softmax_rule,
    cost=lambda p, y, t: 4 * math.prod(_pair_shape(p, y, t)[0][0]),
)

log_softmax_bwd: Op = define_primitive(
    "log_softmax_bwd",
    params=SoftmaxParams,
    shape=_pair_shape,
    reference=reference.log_softmax_bwd,
    supports=_supports,
    config=_softmax_config,
    linear=(1,),
    transpose=_self_transpose(lambda: log_softmax_jvp, 1),
    batch=_batch(lambda: log_softmax_bwd, _both),
    sharding=_softmax_rule,
    cost=lambda p, y, t: 4 * math.prod(_pair_shape(p, y, t)[0][0]),
)


# --- bias and activation --------------------------------------------------------------------------------------------------


def _roles(p: BiasActParams, tangent: bool) -> tuple[bool, ...]:
    """For each operand: does it have x's shape (x, residual, tangent), or is it the bias."""
    return (True,) * (1 + tangent) + (False,) * p.has_bias + (True,) * p.has_residual


def _bias_act_config(p: BiasActParams, *_avals: Any) -> dict[str, Any]:
    return {
        "activation": activation_code(p.activation),
        "has_bias": p.has_bias,
        "has_residual": p.has_residual,
        "axis": p.axis,
        **_pack(p.batch),
    }


def _bias_act_shape(p: BiasActParams, *avals: Any) -> Any:
    return (((*_lead(p.batch, avals), *_core(p.batch, avals[0], 0)), avals[0].dtype),)


def _bias_act_rule(tangent: bool) -> Any:
    def rule(p: BiasActParams, *avals: Any) -> Rule:
        core = [f"a{i}" for i in range(p.rank)]
        operands = ", ".join(
            " ".join([*_lead_names(p.batch, i), *(core if like_x else [core[p.axis]])])
            for i, like_x in enumerate(_roles(p, tangent))
        )
        lead = [f"v{k}" for k in range(len(p.batch))]
        return Rule(f"{operands} -> {' '.join([*lead, *core])}")

    return rule


def _axes_of(p: BiasActParams, operand: int, rank: int) -> list[int]:
    """Which axes of the result (of ``rank`` axes) an operand has, in its order."""
    dims = [k for k, flags in enumerate(p.batch) if flags[operand]]
    below = list(range(len(p.batch), rank))
    return dims + ([below[p.axis]] if p.has_bias and operand == 1 else below)


def _along(p: BiasActParams, t: jax.Array, operand: int, out: Any) -> jax.Array:
    """An operand's tangent at the result's shape and dtype. The sum that transposes this runs in the wider of the dtypes."""
    dims = _axes_of(p, operand, len(out.shape))
    wide = promote(t.dtype, jnp.float32)
    if len(dims) == len(out.shape):
        return t.astype(out.dtype)
    return jax.lax.broadcast_in_dim(t.astype(wide), out.shape, dims).astype(out.dtype)


def _bias_act_jvp(p: BiasActParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # dy = act'(z) * (dx + dbias + dresidual), z recomputed from the operands by the kernel that multiplies
    (y,) = bias_act(p, *primals)
    parts = [_along(p, t, i, y) for i, t in enumerate(tangents) if t is not None]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    if p.activation is None:
        return (y,), (total,)
    batch = tuple((True, *flags) for flags in p.batch)
    return (y,), bias_act_jvp(replace(p, batch=batch), total, *primals)


def _bias_act_transpose(p: BiasActParams, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]) -> Any:
    # without an activation y is a sum: each term's cotangent is ct, summed over the axes that the term lacks
    if p.activation is not None:
        raise NotImplementedError(f"bias_act with activation={p.activation!r} is not linear: it has no transpose.")
    ct = cts[0]
    grads: list[Any] = []
    for i, (x, needed) in enumerate(zip(operands, wanted, strict=True)):
        has = _axes_of(p, i, ct.ndim)
        lacks = tuple(a for a in range(ct.ndim) if a not in has)
        g = jnp.sum(ct.astype(promote(ct.dtype, jnp.float32)), lacks) if needed and lacks else ct
        grads.append(g.astype(x.dtype) if needed else None)
    return tuple(grads)


bias_act: Op = define_primitive(
    "bias_act",
    params=BiasActParams,
    shape=_bias_act_shape,
    reference=reference.bias_act,
    supports=_supports,
    config=_bias_act_config,
    jvp=_bias_act_jvp,
    transpose=_bias_act_transpose,
    batch=_batch(lambda: bias_act, lambda p: _roles(p, False)),
    sharding=_bias_act_rule(False),
    cost=lambda p, *avals: 4 * math.prod(_bias_act_shape(p, *avals)[0][0]),
)

bias_act_jvp: Op = define_primitive(
    "bias_act_jvp",
    params=BiasActParams,
    shape=_bias_act_shape,
    reference=reference.bias_act_jvp,
    supports=_supports,
    config=_bias_act_config,
    linear=(0,),
    transpose=_self_transpose(lambda: bias_act_jvp, 0),
    batch=_batch(lambda: bias_act_jvp, lambda p: _roles(p, True)),
    sharding=_bias_act_rule(True),
    cost=lambda p, *avals: 8 * math.prod(_bias_act_shape(p, *avals)[0][0]),
)


# --- layout -----------------------------------------------------------------------------------------------------------


def _turned(p: LayoutParams, axes: Sequence[Any]) -> tuple[Any, ...]:
    n = len(axes) - p.a - p.b
    return (*axes[:n], *axes[n + p.a :], *axes[n : n + p.a])


_LAYOUT_DTYPES = (  # bytes_of in cuda/act/handlers.cu
    *("bool", "int8", "uint8"),
    *("int16", "uint16", "float16", "bfloat16"),
    *("int32", "uint32", "float32"),
    *("int64", "uint64", "float64", "complex64"),
)


def _layout_supports(_p: LayoutParams, x: Any) -> str | None:
    if x.dtype.name in _LAYOUT_DTYPES:
        return None
    return f"the layout kernel does not take {x.dtype}"


def _layout_rule(p: LayoutParams, x: Any) -> Rule:
    names = [f"a{i}" for i in range(len(x.shape))]
    return Rule(f"{' '.join(names)} -> {' '.join(_turned(p, names))}")


def _layout_batch(p: LayoutParams, args: Sequence[Any], dims: Sequence[Any], size: int) -> tuple[Any, Any]:
    return transpose_layout(p, move_to_front(args[0], dims[0])), (0,)


transpose_layout: Op = define_primitive(
    "transpose_layout",
    params=LayoutParams,
    shape=lambda p, x: ((_turned(p, x.shape), x.dtype),),
    reference=reference.transpose_layout,
    supports=_layout_supports,
    config=lambda p, x: {"a": p.a, "b": p.b},
    linear=(0,),
    transpose=lambda p, cts, operands, wanted: transpose_layout(LayoutParams(p.b, p.a), cts[0]),
    batch=_layout_batch,
    sharding=_layout_rule,
    cost=lambda p, x: 0,
)
