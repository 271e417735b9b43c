"""Local response normalisation across channels (AlexNet): primitives ``lrn``, its tangent and its backward.

    d_c = k + a * sum over j in [c - size // 2, c + (size - 1) // 2] of x_j^2,   y_c = x_c * d_c^-beta

``lrn_jvp`` and ``lrn_bwd`` are linear in the tangent and the cotangent and transposes of each other:

    yd_c = xd_c d_c^-beta - 2 a beta x_c d_c^(-beta-1) sum_{j in window(c)} x_j xd_j
    dx_j = dy_j d_j^-beta - 2 a beta x_j sum_{c: j in window(c)} dy_c x_c d_c^(-beta-1)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core.checks import as_float32, is_static
from jaxprims.core.primitive import Op, define_primitive, move_to_front
from jaxprims.core.sharding import Rule
from jaxprims.core.windows import fold_windows

MAX_SIZE = 2048  # cuda/norm/lrn.cu, tiling


@dataclass(frozen=True)
class LrnParams:
    """``x_axes`` and ``d_axes``: the axes of the index space that x and the tangent (or cotangent) have."""

    axis: int  # of the channels in the index space
    size: int
    alpha: float  # the factor of the sum
    beta: float
    k: float
    rank: int
    x_axes: tuple[int, ...]
    d_axes: tuple[int, ...] = ()
    out_axes: tuple[int, ...] = ()


def _operand_axes(params: LrnParams) -> tuple[tuple[int, ...], ...]:
    return (params.x_axes, params.d_axes) if params.d_axes else (params.x_axes,)


def _shape(params: LrnParams, *avals: Any) -> tuple[Any, ...]:
    sizes = [1] * params.rank
    for axes, a in zip(_operand_axes(params), avals, strict=True):
        for axis, s in zip(axes, a.shape, strict=True):
            sizes[axis] = s
    return ((tuple(sizes[a] for a in params.out_axes), avals[0].dtype),)


def _window_sum(v: jax.Array, params: LrnParams, *, mirror: bool = False) -> jax.Array:
    """Sum over the window of channels (``mirror``: over the channels whose window holds this one)."""
    lo, hi = params.size // 2, (params.size - 1) // 2
    if mirror:
        lo, hi = hi, lo
    n = v.shape[params.axis]
    if is_static(n):  # what is further away than the channels reach adds nothing
        lo, hi = min(lo, max(n - 1, 0)), min(hi, max(n - 1, 0))
    padded = jnp.pad(v, [(lo, hi) if i == params.axis else (0, 0) for i in range(v.ndim)])
    return fold_windows((padded,), lambda a, b: (a[0] + b[0],), params.axis, n, lo + hi + 1)[0]


def _expand(a: jax.Array, axes: tuple[int, ...], rank: int) -> jax.Array:
    return jnp.expand_dims(as_float32(a), tuple(i for i in range(rank) if i not in axes))


def _collect(v: jax.Array, params: LrnParams, *arrays: jax.Array) -> tuple[jax.Array]:
    """To the result's axes: summed over those it lacks."""
    missing = tuple(i for i in range(params.rank) if i not in params.out_axes)
    return (jnp.sum(v, missing).astype(arrays[0].dtype),)


def _reference(params: LrnParams, x: jax.Array) -> tuple[jax.Array, ...]:
    v = as_float32(x)
    d = params.k + params.alpha * _window_sum(v * v, params)
    return ((v * d**-params.beta).astype(x.dtype),)


# jit: derivatives are taken of these two, and an eager call moves no constant to the device.


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _reference_jvp(params: LrnParams, x: jax.Array, xd: jax.Array) -> tuple[jax.Array, ...]:
    v, t = _expand(x, params.x_axes, params.rank), _expand(xd, params.d_axes, params.rank)
    d = params.k + params.alpha * _window_sum(v * v, params)
    slope = 2 * params.alpha * params.beta * v * d ** (-params.beta - 1)
    return _collect(t * d**-params.beta - slope * _window_sum(v * t, params), params, x, xd)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _reference_bwd(params: LrnParams, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
    v, t = _expand(x, params.x_axes, params.rank), _expand(dy, params.d_axes, params.rank)
    d = params.k + params.alpha * _window_sum(v * v, params)
    back = _window_sum(t * v * d ** (-params.beta - 1), params, mirror=True)
    return _collect(t * d**-params.beta - 2 * params.alpha * params.beta * v * back, params, x, dy)


def _supports(params: LrnParams, *avals: Any) -> str | None:
    if params.size > MAX_SIZE:
        return f"size={params.size}; the kernels stage windows of up to {MAX_SIZE} channels in shared memory"
    for a in avals:
        if a.dtype not in (jnp.float32, jnp.float16, jnp.bfloat16):
            return f"dtype {a.dtype}; the kernels take float32, float16 and bfloat16"
        if a.dtype != avals[0].dtype:
            return f"dtypes {avals[0].dtype} and {a.dtype} differ"
    if len(params.out_axes) != params.rank:
        return "the result is a sum over a batch axis"
    for axes in _operand_axes(params):
        if axes != tuple(range(params.rank - len(axes), params.rank)):
            return "an operand lacks an inner batch axis"
    return None


def _config(params: LrnParams, *_: Any) -> dict[str, Any]:
    return {
        "axis_from_end": params.rank - params.axis,
        "size": params.size,
        "alpha": float(params.alpha),
        "beta": float(params.beta),
        "k": float(params.k),
    }


def _sharding(params: LrnParams, *_: Any) -> Rule:
    terms = [" ".join(f"a{a}" for a in axes) for axes in _operand_axes(params)]
    right = " ".join(f"a{a}" for a in params.out_axes)
    return Rule(f"{', '.join(terms)} -> {right}", (f"a{params.axis}",))


def _batch(op: Callable[[], Op]) -> Callable[..., Any]:
    def batch(params: LrnParams, args: list[Any], dims: list[Any], _: int) -> tuple[Any, Any]:
        arrays = [a if d is None else move_to_front(a, d) for a, d in zip(args, dims, strict=True)]

        def up(axes: tuple[int, ...], has: bool) -> tuple[int, ...]:
            return (*((0,) if has else ()), *(a + 1 for a in axes))

        new = replace(
            params,
            axis=params.axis + 1,
            rank=params.rank + 1,
            x_axes=up(params.x_axes, dims[0] is not None),
            d_axes=up(params.d_axes, dims[1] is not None) if params.d_axes else (),
            out_axes=up(params.out_axes, True),
        )
        return op()(new, *arrays), (0,)

    return batch


def _jvp(params: LrnParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (x,), (xd,) = primals, tangents
    out = lrn_op(params, x)
    return out, (None,) if xd is None else lrn_jvp_op(replace(params, d_axes=params.x_axes), x, xd)


def _transposed(op: Callable[[], Op]) -> Callable[..., Any]:
    def transpose(
        params: LrnParams, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        if wanted[0]:
            raise NotImplementedError("the tangent of lrn is not linear in x")
        new = replace(params, d_axes=params.out_axes, out_axes=params.d_axes)
        return None, op()(new, operands[0], cts[0])[0]

    return transpose


def _define(name: str, ref: Callable[..., Any], transpose: Any = None) -> Op:
    return define_primitive(
        name,
        params=LrnParams,
        shape=_shape,
        reference=ref,
        supports=_supports,
        config=_config,
        jvp=_jvp if transpose is None else "reference",
        linear=() if transpose is None else (1,),
        transpose=transpose,
        batch=_batch(lambda: OPS[name]),
        sharding=_sharding,
        cost=lambda params, *avals: (params.size + 12) * _count(avals[0].shape),
    )


def _count(sizes: Sequence[Any]) -> Any:
    n = 1
    for s in sizes:
        n *= s
    return n


OPS: dict[str, Op] = {}
lrn_op = OPS["lrn"] = _define("lrn", _reference)
lrn_jvp_op = OPS["lrn_jvp"] = _define("lrn_jvp", _reference_jvp, _transposed(lambda: lrn_bwd_op))
lrn_bwd_op = OPS["lrn_bwd"] = _define("lrn_bwd", _reference_bwd, _transposed(lambda: lrn_jvp_op))
