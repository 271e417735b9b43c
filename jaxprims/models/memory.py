"""What a model keeps between its forward and its backward pass, and ``memory="recompute"``.

Between two convolutions of a network stand a norm, its activation, perhaps an addition or a pool. Differentiated as they
are, they keep two arrays for each convolution: its output (the norm reads it again) and the activated, normalised array
(the next convolution's weight gradient reads it). The second is a function of the first, cheap to compute again: passes
over memory and no matrix product.

In recompute mode a model runs such stretches by :func:`recompute`, each from one convolution's output to the next one's.
The results of convolutions, matrix products and sums are kept; everything else of a stretch is computed again in the
backward pass, after the gradient has arrived there and before what reads it, and freed behind it. No convolution is computed
twice. Stretches nest: an outer one over two residual blocks lets go of the block output between them too, and the inner
ones still hold their own part back until the gradient reaches them.

The results are those of the default mode: the same operations on the same values, some of them twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen

MODES = ("default", "recompute")
KEPT = (
    "conv", "conv_fused", "conv_general_dilated", "dot_general",  # too dear to compute again
    "norm_stats", "reduce_sum", "reduce_max",  # statistics: small, and a pass over their operand to make
)  # fmt: skip


def policy(primitive: Any, *_: Any, **__: Any) -> bool:
    """The answer to jax.checkpoint, whether the results of a primitive are kept."""
    return primitive.name in KEPT


def recompute(module: linen.Module, mode: str, stretch: Callable[..., Any], *arrays: Any) -> Any:
    """``stretch(module, *arrays)``; in mode "recompute" it keeps the results of the primitives KEPT alone.

    ``module`` is the linen module whose compact method calls this; layers made inside the stretch are its own.
    """
    if mode not in MODES:
        raise ValueError(f"memory={mode!r} is not known; give one of {', '.join(map(repr, MODES))}.")
    if mode == "default":
        return stretch(module, *arrays)
    return linen.remat(stretch, policy=policy)(module, *arrays)


def _open(jaxpr: Any) -> Any:
    return jaxpr if hasattr(jaxpr, "eqns") else jaxpr.jaxpr


def _origin(jaxpr: Any, var: Any) -> tuple[Any, Any]:
    """Where a value of a program is made, seen through inner functions and copies: (the program, the variable)."""
    eqn = next((e for e in jaxpr.eqns if any(v is var for v in e.outvars)), None)
    if eqn is None:
        return jaxpr, var
    if eqn.primitive.name in ("reduce_precision", "name"):
        return _origin(jaxpr, eqn.invars[0])
    if "jaxpr" in eqn.params:
        inner = _open(eqn.params["jaxpr"])
        at = next(i for i, v in enumerate(eqn.outvars) if v is var)
        where, found = _origin(inner, inner.outvars[at])
        given = [i for i, v in enumerate(inner.invars) if v is found] if where is inner else []
        return _origin(jaxpr, eqn.invars[given[0]]) if given else (eqn, found)
    return jaxpr, var


def saved_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the arrays that reverse-mode differentiation of ``fn`` keeps, its arguments apart; nothing is computed.

    ``args``: arrays or ShapeDtypeStructs. The count is of JAX's own residuals, before XLA: exact, and the same on every
    machine; an array that is kept for several readers counts once. XLA may keep less, where it prefers to compute
    elementwise code again.

    >>> import jax.numpy as jnp
    >>> saved_bytes(lambda x: jnp.sin(jnp.sin(x)), jax.ShapeDtypeStruct((10,), jnp.float32))  # cos(x), cos(sin(x))
    80
    """
    program = _open(jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fn, *args)[1]))(*args))
    kept: dict[Any, int] = {}
    for var in program.outvars:
        where, found = _origin(program, var)
        if not any(found is v for v in program.invars):
            kept[id(where), id(found)] = math.prod(var.aval.shape) * var.aval.dtype.itemsize
    return sum(kept.values())
