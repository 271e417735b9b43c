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
