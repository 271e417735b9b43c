"""How the norm ops describe their arrays: every operand and result names the axes it has of one index space.

The index space is that of the normalised array, with a leading axis for every ``vmap``. ``x`` of a batch norm on NHWC has
the axes (0, 1, 2, 3), its scale (3,), its mean (3,); the axes (0, 1, 2) are reduced. A transformation changes these
lists and never the data: under ``vmap`` a batched operand gains axis 0, an unbatched one stays as it is, so no weight is
ever copied; a gradient has its operand's axes, and is summed over all others.

Names: ``x scale bias residual mask`` operands; ``mean var low`` statistics (the mean is ``mean + low``: two float32 hold
it to 2^-48); ``xd scaled biasd residuald meand vard`` tangents; ``dy`` and ``cmean cvar`` cotangents of the results;
``dx dscale dbias dresidual dmean dvar`` gradients; ``yd tmean tvar`` tangents of the results; ``count`` of a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxprims.core.activations import activation_code
from jaxprims.core.checks import is_static
from jaxprims.core.primitive import Op, move_to_front, reference_tangents, zeros_like
from jaxprims.core.sharding import Rule

Axes = tuple[int, ...]
Result = tuple[str, Axes, str]

# The codes of cuda/norm/params.h, in this order.
NAMES = (
    "x scale bias residual mask mean var low dy xd scaled biasd residuald meand vard cmean cvar "
    "y count dx dscale dbias dresidual dmean dvar yd tmean tvar"
).split()
STATS = ("mean", "var", "low", "count")  # results that depend on x and mask alone
SUMS = ("dscale", "dbias", "dmean", "dvar")  # results that are sums over the axes they lack
WORKSPACE = 1 << 20
WORKSPACE_MOST = {"forward": 8 << 20, "backward": 18 << 20}


@dataclass(frozen=True)
class NormParams:
    """Static options of every norm op. ``operands`` and ``results`` give (name, axes) and (name, axes, dtype) in order."""

    rank: int  # axes of the index space
    reduce: Axes  # the axes that a statistic is taken over
    operands: tuple[tuple[str, Axes], ...]
    results: tuple[Result, ...]
    eps: float
    kind: str = "moments"  # or "rms": no mean, var is the mean square
    activation: str | None = None
    fixed: bool = False  # mean and var are given, not functions of x
    joint: bool = False  # statistics are of the whole batch: the reduced axes may be split over devices

    def axes(self, name: str) -> Axes | None:
        return dict(self.operands).get(name)

    def has(self, name: str) -> bool:
        return name in dict(self.operands)

    def wants(self, name: str) -> bool:
        return any(r[0] == name for r in self.results)

    @property
    def stat_axes(self) -> Axes:
        return tuple(a for a in range(self.rank) if a not in self.reduce)


def stat_dtype(dtype: Any) -> str:
    return "float64" if np.dtype(dtype) == np.float64 else "float32"


def sizes_of(params: NormParams, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of the axes of the index space, from the operands' shapes."""
    out: list[Any] = [1] * params.rank
    for (_, axes), a in zip(params.operands, arrays, strict=True):
        for axis, size in zip(axes, a.shape, strict=True):
            out[axis] = size
    return tuple(out)


def shape(params: NormParams, *avals: Any) -> tuple[tuple[tuple[Any, ...], Any], ...]:
    sizes = sizes_of(params, avals)
    return tuple((tuple(sizes[a] for a in axes), np.dtype(dtype)) for _, axes, dtype in params.results)


def summed_over(params: NormParams, name: str) -> Axes:
    """The kept axes that a tangent of a statistic is summed over: those it lacks and its terms have."""
    axes = next(a for n, a, _ in params.results if n == name)
    terms = {a for n, has in params.operands if n in ("x", "mask", "xd", "mean") for a in has}
    return tuple(a for a in params.stat_axes if a in terms and a not in axes)


# --- what the kernels take -----------------------------------------------------------------------------------------------


def runs(axes: Axes) -> list[tuple[int, int]]:
    """Maximal runs of adjacent axes as (first, last)."""
    out: list[tuple[int, int]] = []
    for a in axes:
        if out and out[-1][1] == a - 1:
            out[-1] = (out[-1][0], a)
        else:
            out.append((a, a))
    return out


def _pattern_ok(kept: Axes, rank: int) -> bool:
    """True where the index space is [S0, R0, S1, R1] with the kept axes in S0 and S1."""
    words = "".join("s" if a in kept else "r" for a in range(rank))
    short = "".join(c for i, c in enumerate(words) if i == 0 or words[i - 1] != c)
    return short in ("", "s", "r", "sr", "rs", "srs", "rsr", "srsr")


def supports(params: NormParams, *avals: Any) -> str | None:
    half = next(a.dtype for (n, _), a in zip(params.operands, avals, strict=True) if n == "x")
    if half not in (jnp.float32, jnp.float16, jnp.bfloat16):
        return f"x has dtype {half}; the kernels take float32, float16 and bfloat16"
    for (name, axes), a in zip(params.operands, avals, strict=True):
        if a.dtype not in (half, jnp.float32, jnp.bool_):
            return f"{name} has dtype {a.dtype} beside x of {half}"
        if len(runs(axes)) > 2:
            return f"{name} lies over more than two runs of adjacent axes"
    if not _pattern_ok(params.stat_axes, params.rank):
        return "the reduced axes cannot be merged into two runs that follow the kept ones"
    for name, axes, _ in params.results:
        if len(runs(axes)) > 2:
            return f"{name} lies over more than two runs of adjacent axes"
        if name in SUMS and not _pattern_ok(axes, params.rank):
            return f"the axes that {name} is summed over cannot be merged into two runs"
        summed = name in ("tmean", "tvar") and summed_over(params, name)
        if summed or (name in ("y", "dx", "dresidual", "yd") and len(axes) != params.rank):
            return f"{name} is a sum over a batch axis"
    return None


def config(params: NormParams, *_: Any) -> dict[str, Any]:
    def flat(terms: Sequence[Any]) -> tuple[int, ...]:
        return tuple(v for t in terms for v in (NAMES.index(t[0]), len(t[1]), *t[1]))

    return {
        "rank": params.rank,
        "reduce": params.reduce,
        "operands": flat(params.operands),
        "results": flat(params.results),
        "eps": float(params.eps),
        "rms": params.kind == "rms",
        "activation": activation_code(params.activation),
        "fixed": params.fixed,
    }


def workspace(params: NormParams, *avals: Any) -> int:
    """Room for partial results: chunks of a statistic over many elements, and each block's sums of ``dscale`` and ``dbias``.

    Small problems need none; large ones get no more than x itself has in half precision.
    """
    sizes = sizes_of(params, avals)
    if not is_static(*sizes):
        return WORKSPACE
    n = math.prod(sizes)
    most = WORKSPACE_MOST["backward" if params.has("dy") else "forward"]
    return 0 if n < 1 << 14 else max(WORKSPACE, min(2 * n, most))


def cost(params: NormParams, *avals: Any) -> int:
    return 10 * math.prod(sizes_of(params, avals))


# --- transformations ------------------------------------------------------------------------------------------------------


def batch_rule(op: Callable[[], Op]) -> Callable[..., Any]:
    """vmap: one more leading axis of the index space, which batched operands have and others lack."""

    def batch(params: NormParams, args: list[Any], dims: list[Any], _: int) -> tuple[Any, Any]:
        arrays = [a if d is None else move_to_front(a, d) for a, d in zip(args, dims, strict=True)]
        batched = {n for (n, _), d in zip(params.operands, dims, strict=True) if d is not None}

        def up(axes: Axes, has: bool) -> Axes:
            return (*((0,) if has else ()), *(a + 1 for a in axes))

        def gains(name: str) -> bool:
            return bool(batched & {"x", "mask"}) if name in STATS else True

        new = replace(
            params,
            rank=params.rank + 1,
            reduce=up(params.reduce, False),
            operands=tuple((n, up(axes, n in batched)) for n, axes in params.operands),
            results=tuple((n, up(axes, gains(n)), dtype) for n, axes, dtype in params.results),
        )
        return op()(new, *arrays), tuple(0 if gains(n) else None for n, _, _ in params.results)

    return batch


def sharding(params: NormParams, *_avals: Any) -> Rule:
    """Axes of statistics are free; reduced ones are whole, unless the statistics are joint ones of the batch."""

    def term(axes: Axes) -> str:
        return " ".join(f"a{a}" for a in axes)

    left = ", ".join(term(axes) for _, axes in params.operands)
    right = ", ".join(term(axes) for _, axes, _ in params.results)
    whole = set() if params.fixed or params.joint else set(params.reduce)
    sums = {n for n, _, _ in params.results if n in SUMS}
    gradient = bool(sums) or params.wants("dx") or params.wants("dresidual") or params.wants("yd")
    # An axis that only some of the gradients are sums over (one of vmap's) stays whole: collectives sum all alike.
    for a in range(params.rank):
        lacking = {n for n, axes, _ in params.results if a not in axes and n not in ("tmean", "tvar")}
        if gradient and lacking and lacking != sums:
            whole.add(a)
    for name, axes, _ in params.results:  # not sums over what they lack
        if name in (*STATS, "tmean", "tvar"):
            whole |= {a for a in range(params.rank) if a not in axes and a not in params.reduce}
    return Rule(f"{left} -> {right}", tuple(f"a{a}" for a in sorted(whole)))


def linear_jvp(op: Callable[[], Op], linear: tuple[str, ...]) -> Callable[..., Any]:
    """JVP of an op that is jointly linear in the operands named: itself on their tangents, plus the reference's JVP in the rest."""

    def jvp(params: NormParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        names = [n for n, _ in params.operands]
        outs = op()(params, *primals)
        parts = []
        if any(t is not None for n, t in zip(names, tangents, strict=True) if n in linear):
            args = [
                x if n not in linear else zeros_like(x) if t is None else t
                for n, x, t in zip(names, primals, tangents, strict=True)
            ]
            parts.append(op()(params, *args))
        rest = [i for i, (n, t) in enumerate(zip(names, tangents, strict=True)) if n not in linear and t is not None]
        if rest:
            parts.append(
                reference_tangents(op(), params, tuple(rest), tuple(primals), tuple(tangents[i] for i in rest))
            )
        if not parts:
            return outs, (None,) * len(outs)
        return outs, tuple(sum(c[1:], c[0]) for c in zip(*parts, strict=True))

    return jvp
