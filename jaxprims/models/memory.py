"""What a model keeps between its forward and its backward pass, and ``memory="recompute"``.

Between two convolutions of a network stand a norm, its activation, perhaps an addition or a pool. Differentiated as they
are, they keep two arrays for each convolution: its output (the norm reads it again) and the activated, normalised array
(the next convolution's weight gradient reads it). The second is a function of the first, cheap to compute again: a pass
over memory and no matrix product.

In recompute mode a model marks the output of every convolution and matrix product by :func:`keep`, and runs the stretches
between by :func:`recompute`. What is marked is kept; everything else of a stretch is computed again in the backward pass,
right before the gradient that reads it, and freed after it. A convolution is never computed twice. Stretches may nest: an
outer one over two residual blocks lets go of the block output between them too, an inner one from each convolution's output
to the next holds its own part back until the gradient arrives there.

The results are those of the default mode: the same operations on the same values, some of them twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import linen
from jax.ad_checkpoint import checkpoint_name

MODES = ("default", "recompute")
KEPT = "jaxprims_kept"
_NAMED = jax.checkpoint_policies.save_only_these_names(KEPT)
_STATISTICS = ("reduce_sum", "reduce_max", "norm_stats")  # results of reductions: small, and a whole pass to make again


def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
    """jax.checkpoint's question whether a value is kept: yes for what :func:`keep` marked, and for statistics."""
    return _NAMED(primitive, *avals, **params) or primitive.name in _STATISTICS


def keep(x: jax.Array) -> jax.Array:
    """Mark the output of a convolution or matrix product; without :func:`recompute` around it this does nothing."""
    return checkpoint_name(x, KEPT)


def recompute(module: linen.Module, mode: str, stretch: Callable[..., Any], *arrays: Any) -> Any:
    """``stretch(module, *arrays)``; in mode "recompute" its unmarked values are computed again in the backward pass.

    ``module`` is the linen module whose compact method calls this; layers made inside the stretch are its own.
    """
    if mode not in MODES:
        raise ValueError(f"memory={mode!r} is not known; give one of {', '.join(map(repr, MODES))}.")
    if mode == "default":
        return stretch(module, *arrays)
    return linen.remat(stretch, policy=policy)(module, *arrays)


def saved_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes of the arrays that reverse-mode differentiation of ``fn`` keeps, its arguments apart; nothing is computed.

    ``args``: arrays or ShapeDtypeStructs. The count is of JAX's own residuals, before XLA: exact, and the same on every
    machine. XLA may keep less, where it prefers to compute elementwise code again.

    >>> import jax.numpy as jnp
    >>> saved_bytes(lambda x: jnp.sin(jnp.sin(x)), jax.ShapeDtypeStruct((10,), jnp.float32))  # cos(x), cos(sin(x))
    80
    """
    kept: list[Any] = []

    def trace(*args: Any) -> Any:
        given = {id(a) for a in jax.tree.leaves(args)}
        out, pullback = jax.vjp(fn, *args)
        leaves = {id(a): a for a in jax.tree.leaves(pullback) if id(a) not in given}
        kept.extend(leaves.values())
        return out

    jax.eval_shape(trace, *args)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in kept)
