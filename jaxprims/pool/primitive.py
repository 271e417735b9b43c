"""The primitives of the pooling family, all described by one :class:`PoolParams`.

    y, place = max_pool(x)              max or min; place: which place of its window each output came from (``indices``:
                                        without it y alone, until a derivative asks for the places)
    y  = max_pool_gather(t, place)      y[o] = t[element of o at place[o]]: the tangent of max_pool, linear in t
    dx = max_pool_scatter(dy, place)    dx[i] = sum of the dy[o] whose place is element i: its transpose
    y  = avg_pool(x)                    sum or average, linear
    dx = avg_pool_dx(dy)                its transpose

Every derivative of these is one of these, so that any order in both modes stays in the table. Arrays are
(N, *spatial, C) or (N, C, *spatial). ``place`` is uint8 up to 256 places, uint16 up to 65536, int32 beyond; with
``flat`` it is the int32 index of the element among the spatial axes instead, as users see it. An index that is not in
its output's window (users can write such) picks 0 and receives nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxprims.core.checks import INT32_MAX, is_static
from jaxprims.core.primitive import Op, define_primitive, move_to_front
from jaxprims.core.sharding import Rule
from jaxprims.pool import reference
from jaxprims.pool.window import PoolParams, index_dtype

MAX_BATCH_AXES = 4  # of a gather or scatter one operand of which is not batched; kMaxBatchAxes in cuda/pool/params.h
DIVISORS = ("none", "window", "valid")


# --- what the kernels take and are told -----------------------------------------------------------------------------


def _supports(p: PoolParams, *avals: Any) -> str | None:
    if avals[0].dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"the pool kernels take float32, float16 and bfloat16, not {avals[0].dtype}"
    channels = avals[0].shape[-1 if p.channels_last else -1 - p.rank]
    image = max(math.prod(p.in_size), math.prod(p.out_size)) * (
        channels if p.channels_last and is_static(channels) else 1
    )
    if image > INT32_MAX:
        return f"one image of {image} elements is past the pool kernels' limit of 2^31 - 1"
    reach = [max(abs(a.pad), a.out * a.stride, a.window * a.dilation) + a.size for a in p.axes()]
    if max(reach) > INT32_MAX or p.places > INT32_MAX:
        return "strides, dilations or padding reach past 2^31 - 1"
    if len(p.data_axes) > MAX_BATCH_AXES:
        return f"{len(p.data_axes)} nested batch axes of one operand alone; the pool kernels take {MAX_BATCH_AXES}"
    return None


def _mask(flags: Sequence[bool]) -> int:
    return sum(1 << i for i, f in enumerate(flags) if f)


def _config(p: PoolParams, *_avals: Any) -> dict[str, Any]:
    return {
        "in_size": p.in_size,
        "out_size": p.out_size,
        "window": p.window,
        "strides": p.strides,
        "padding": p.padding,
        "dilation": p.dilation,
        "adaptive": int(p.adaptive),
        "channels_last": int(p.channels_last),
        "minimum": int(p.minimum),
        "flat": int(p.flat),
        "divisor": DIVISORS.index(p.divisor),
        "batch_axes": len(p.data_axes),
        "data_mask": _mask(p.data_axes),
        "index_mask": _mask(p.index_axes),
    }


# --- shape, sharding, cost ------------------------------------------------------------------------------------------


def _resized(p: PoolParams, a: Any, size: tuple[int, ...]) -> tuple[Any, ...]:
    return p.image(a.shape, size, a.shape[:1])


def _lead(p: PoolParams, data: Any, place: Any) -> tuple[Any, ...]:
    """Batch axes and N of a gather's or scatter's result."""
    i = j = 0
    lead = []
    for d, q in zip(p.data_axes, p.index_axes, strict=True):
        lead.append(data.shape[i] if d else place.shape[j])
        i, j = i + d, j + q
    return (*lead, data.shape[i])


def _names(p: PoolParams, side: str, axes: Sequence[bool] = ()) -> str:
    lead = [f"b{i}" for i, there in enumerate(axes) if there] + ["n"]
    spatial = [f"{side}{k}" for k in range(p.rank)]
    return " ".join([*lead, *spatial, "c"] if p.channels_last else [*lead, "c", *spatial])


def _whole(p: PoolParams) -> tuple[str, ...]:
    return tuple(f"{side}{k}" for side in "io" for k in range(p.rank))


def _dense_rule(source: str, *results: str) -> Any:
    def rule(p: PoolParams, *_avals: Any) -> Rule:
        return Rule(f"{_names(p, source)} -> {', '.join(_names(p, r) for r in results)}", _whole(p))

    return rule


def _pair_rule(source: str, result: str) -> Any:
    def rule(p: PoolParams, *_avals: Any) -> Rule:
        operands = f"{_names(p, source, p.data_axes)}, {_names(p, 'o', p.index_axes)}"
        return Rule(f"{operands} -> {_names(p, result, (True,) * len(p.data_axes))}", _whole(p))

    return rule


def _cost(p: PoolParams, x: Any, *_rest: Any) -> int:
    """One operation for each window place of each output."""
    n = math.prod(x.shape[: x.ndim - p.rank - 1]) * x.shape[-1 if p.channels_last else -1 - p.rank]
    return n * math.prod(p.out_size) * p.places


def _pair_cost(p: PoolParams, data: Any, place: Any) -> int:
    return math.prod(_lead(p, data, place)) * data.shape[-1 if p.channels_last else -1 - p.rank] * math.prod(p.out_size)


# --- batching -------------------------------------------------------------------------------------------------------


def _merged(x: Any) -> Any:
    """The two leading axes as one."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _batch_dense(op: Any) -> Any:
    """Everything has N in front: one more batch axis is more images."""

    def rule(p: PoolParams, args: Sequence[Any], dims: Sequence[Any], size: int) -> tuple[Any, Any]:
        x = move_to_front(args[0], dims[0])
        n = x.shape[1]
        outs = op()(p, _merged(x))
        return tuple(y.reshape(size, n, *y.shape[1:]) for y in outs), (0,) * len(outs)

    return rule


def _batch_pair(op: Any) -> Any:
    """Both operands batched: more images. One alone: a batch axis that the other operand does not have."""

    def rule(p: PoolParams, args: Sequence[Any], dims: Sequence[Any], size: int) -> tuple[Any, Any]:
        flags = tuple(d is not None for d in dims)
        same = all(flags) if not p.data_axes else flags == (p.data_axes[0], p.index_axes[0])
        args = [x if d is None else move_to_front(x, d) for x, d in zip(args, dims, strict=True)]
        if same:  # merges with the axis behind it
            n = args[flags.index(True)].shape[1]
            (y,) = op()(p, *(_merged(x) if f else x for x, f in zip(args, flags, strict=True)))
            return (y.reshape(size, n, *y.shape[1:]),), (0,)
        q = replace(p, data_axes=(flags[0], *p.data_axes), index_axes=(flags[1], *p.index_axes))
        return op()(q, *args), (0,)

    return rule


# --- the primitives -------------------------------------------------------------------------------------------------


def _max_pool_jvp(p: PoolParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    # dy[o] = dx[the element that won]
    y, place = max_pool(replace(p, indices=True), primals[0])
    dot = None if tangents[0] is None else max_pool_gather(replace(p, minimum=False), tangents[0], place)[0]
    return ((y, place), (dot, None)) if p.indices else ((y,), (dot,))


def _pair_transpose(op: Any) -> Any:
    """Gather and scatter are each other's transposes; summed over batch axes that the operand does not have."""

    def rule(p: PoolParams, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, None]:
        q = replace(p, data_axes=(True,) * len(p.data_axes))
        (g,) = op()(q, cts[0], operands[1])
        missing = tuple(i for i, there in enumerate(p.data_axes) if not there)
        return (g.sum(missing) if missing else g), None

    return rule


max_pool: Op = define_primitive(
    "max_pool",
    params=PoolParams,
    shape=lambda p, x: ((s := _resized(p, x, p.out_size), x.dtype), (s, index_dtype(p)))[: 1 + p.indices],
    reference=lambda p, x: reference.max_pool(p, x)[: 1 + p.indices],
    supports=_supports,
    config=_config,
    jvp=_max_pool_jvp,
    batch=_batch_dense(lambda: max_pool),
    sharding=lambda p, x: _dense_rule("i", *"oo"[: 1 + p.indices])(p, x),
    cost=_cost,
)

max_pool_gather: Op = define_primitive(
    "max_pool_gather",
    params=PoolParams,
    shape=lambda p, t, place: ((p.image(t.shape, p.out_size, _lead(p, t, place)), t.dtype),),
    reference=reference.max_pool_gather,
    supports=_supports,
    config=_config,
    linear=(0,),
    transpose=_pair_transpose(lambda: max_pool_scatter),
    batch=_batch_pair(lambda: max_pool_gather),
    sharding=_pair_rule("i", "o"),
    cost=_pair_cost,
)

max_pool_scatter: Op = define_primitive(
    "max_pool_scatter",
    params=PoolParams,
    shape=lambda p, dy, place: ((p.image(dy.shape, p.in_size, _lead(p, dy, place)), dy.dtype),),
    reference=reference.max_pool_scatter,
    supports=_supports,
    config=_config,
    linear=(0,),
    transpose=_pair_transpose(lambda: max_pool_gather),
    batch=_batch_pair(lambda: max_pool_scatter),
    sharding=_pair_rule("o", "i"),
    cost=_pair_cost,
)

avg_pool: Op = define_primitive(
    "avg_pool",
    params=PoolParams,
    shape=lambda p, x: ((_resized(p, x, p.out_size), x.dtype),),
    reference=reference.avg_pool,
    supports=_supports,
    config=_config,
    linear=(0,),
    transpose=lambda p, cts, operands, wanted: avg_pool_dx(p, cts[0]),
    batch=_batch_dense(lambda: avg_pool),
    sharding=_dense_rule("i", "o"),
    cost=_cost,
)

avg_pool_dx: Op = define_primitive(
    "avg_pool_dx",
    params=PoolParams,
    shape=lambda p, dy: ((_resized(p, dy, p.in_size), dy.dtype),),
    reference=reference.avg_pool_dx,
    supports=_supports,
    config=_config,
    linear=(0,),
    transpose=lambda p, cts, operands, wanted: avg_pool(p, cts[0]),
    batch=_batch_dense(lambda: avg_pool_dx),
    sharding=_dense_rule("o", "i"),
    cost=_cost,
)

__all__ = ["avg_pool", "avg_pool_dx", "max_pool", "max_pool_gather", "max_pool_scatter"]
