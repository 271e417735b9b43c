"""Batch normalisation: statistics over every axis but the channels', of one device's batch or of all devices'."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core.checks import as_index, canonical_axes, is_many, short
from jaxprims.norm import layout
from jaxprims.norm.params import NormParams, stat_dtype
from jaxprims.norm.primitive import combine, stats_op


def batch_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Any = None,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    mask: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch normalisation in training: ``y = act((x - mean) / sqrt(var + eps) * scale + bias + residual)``.

    mean and var are those of the batch, over every axis but ``axis``; var is the biased variance (Flax's convention:
    ``running = momentum * running + (1 - momentum) * var``; PyTorch's running variance is ``var * n / (n - 1)``, which
    n = 1 does not have). One element alone gives var 0 and y = act(bias + residual); an empty batch has mean 0 and var 0.

    Under ``jit`` with x split over devices the statistics are those of the whole batch. Inside ``shard_map``, ``pmap`` or
    ``vmap`` they are local unless ``axis_name`` is given.

    Args:
      x: [..., C] or any layout: [N, H, W, C] with axis=-1, [N, C, H, W] with axis=1.
      scale, bias: [C], of x's dtype or float32; absent: 1 and 0. A scalar is not broadcast: jnp.full(C, value).
      axis: the axis (or axes) of the channels, as Flax's ``axis``.
      eps: added to the variance.
      activation: name of a fused activation, or None.
      residual: [x.shape], added before the activation.
      axis_name: mapped axis (or axes) over whose members the statistics are taken together: counts, means and squared
        deviations are combined, so that unequal masked counts come out right.
      axis_index_groups: groups of members of ``axis_name`` that take statistics together, as ``jax.lax.psum``'s.
      mask: broadcastable to x; elements where it is 0 do not count for mean and var (all of x is normalised). A channel
        without any element has mean 0 and var 0.

    Returns:
      (y, mean, var): y as x; mean and var [C] in float32 (float64 for float64). All three are differentiable.

    Numerics: float32 arithmetic, variance from deviations, never E[x^2] - E[x]^2; the mean is held in two float32 so
      that a mean of 1e4 and a deviation of 1e-2 still give deviations right to 1e-3. A constant channel gives exactly bias.

    Raises:
      ValueError: an axis out of range, a scale of another shape, a mask that does not broadcast, an unknown activation.
      TypeError: an x that is not floating.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> y, mean, var = jaxprims.batch_norm(jnp.array([[1.0, 5.0], [3.0, 5.0]]), eps=0.0)
      >>> print(y, mean, var)
      [[-1.  0.]
       [ 1.  0.]] [2. 5.] [1. 0.]
    """
    x = layout.check_input(x, "batch_norm")
    feature = canonical_axes(axis, x.ndim)
    reduce = tuple(a for a in range(x.ndim) if a not in feature)
    eps = layout.check_eps(eps)
    scale = layout.check_param(scale, "scale", x, feature)
    bias = layout.check_param(bias, "bias", x, feature)
    residual = layout.check_residual(residual, x)
    masked = layout.check_mask(mask, x)
    if axis_name is None:
        if axis_index_groups is not None:
            raise ValueError(
                f"axis_index_groups={axis_index_groups!r} needs axis_name; name the mapped axis they are groups of."
            )
        y, mean, var, _ = layout.normalise(
            x, scale, bias, reduce=reduce, feature=feature, eps=eps, activation=activation, residual=residual, mask=masked,
            joint=True,
        )  # fmt: skip
        return y, mean, var
    terms = [("x", tuple(range(x.ndim))), *([("mask", masked[1])] if masked else [])]
    params = NormParams(
        rank=x.ndim,
        reduce=reduce,
        operands=tuple(terms),
        results=tuple((n, feature, stat_dtype(x.dtype)) for n in ("mean", "var", "low", "count")),
        eps=eps,
    )
    local = stats_op(params, x, *(masked[:1] if masked else ()))
    mean, var, low, _ = combine(local, _sum_over(axis_name, axis_index_groups))
    y = layout.apply(
        x,
        mean,
        var,
        low,
        scale,
        bias,
        feature=feature,
        stats=feature,
        eps=eps,
        activation=activation,
        residual=residual,
    )
    return y, mean + low, var


def _sum_over(axis_name: Any, groups: Any) -> Callable[[Any], Any]:
    """psum over the members of ``axis_name``, or over those of this member's group.

    Groups are done by hand, each member adding into its group's row: psum's own groups work neither under vmap nor, with
    groups of unequal size, elsewhere. Statistics are small.
    """
    if groups is None:
        return lambda v: jax.lax.psum(v, axis_name)
    groups = _check_groups(groups, axis_name, jax.lax.axis_size(axis_name))
    index = jax.lax.axis_index(axis_name)

    def one(v: jax.Array) -> jax.Array:
        return _own_row(groups, index, jax.lax.psum(_in_own_row(groups, index, v), axis_name))

    return lambda v: jax.tree.map(one, v)


def _check_groups(groups: Any, axis_name: Any, size: int) -> tuple[tuple[int, ...], ...]:
    if not is_many(groups) or not all(is_many(g) and not isinstance(g, str) for g in groups):
        raise TypeError(
            f"axis_index_groups={short(groups)} must be a sequence of groups, each a sequence of indices of "
            f"axis_name={axis_name!r}: give e.g. [[0, 1], [2, 3]]."
        )
    found = tuple(
        tuple(as_index(m, f"axis_index_groups[{i}][{j}]") for j, m in enumerate(g)) for i, g in enumerate(groups)
    )
    if sorted(m for g in found for m in g) != list(range(size)):
        raise ValueError(
            f"axis_index_groups={short(groups)} must hold every index of axis_name={axis_name!r} once, 0 to {size - 1}."
        )
    return found


# jit: an eager call moves no constant to the device.


def _row(groups: tuple[tuple[int, ...], ...], index: jax.Array) -> jax.Array:
    table = {m: g for g, group in enumerate(groups) for m in group}
    return jnp.asarray([table[m] for m in range(len(table))], jnp.int32)[index]


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _in_own_row(groups: tuple[tuple[int, ...], ...], index: jax.Array, v: jax.Array) -> jax.Array:
    row = jnp.arange(len(groups), dtype=jnp.int32) == _row(groups, index)
    return jnp.where(row.reshape(-1, *(1,) * v.ndim), v[None], 0)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _own_row(groups: tuple[tuple[int, ...], ...], index: jax.Array, rows: jax.Array) -> jax.Array:
    return rows[_row(groups, index)]


def batch_norm_inference(
    x: Any,
    mean: Any,
    var: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Any = None,
) -> jax.Array:
    """Batch normalisation with given statistics: ``y = act((x - mean) / sqrt(var + eps) * scale + bias + residual)``.

    Args:
      x: any layout; mean, var, scale, bias: [C] for the channels at ``axis`` (float32, or x's dtype); scale and bias
        may be absent. residual: [x.shape], added before the activation.
      axis, eps, activation: as :func:`batch_norm`.

    Returns:
      y, as x; differentiable in every array. Numerics: float32 arithmetic, one rounding at the end.

    Raises:
      ValueError, TypeError: as :func:`batch_norm`.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.batch_norm_inference(jnp.array([[1.0, 5.0]]), jnp.array([0.0, 3.0]), jnp.ones(2), eps=0.0))
      [[1. 2.]]
    """
    x = layout.check_input(x, "batch_norm_inference")
    feature = canonical_axes(axis, x.ndim)
    mean = layout.check_param(mean, "mean", x, feature)
    var = layout.check_param(var, "var", x, feature)
    if mean is None or var is None:
        raise TypeError("mean and var must be arrays; batch_norm computes them from x.")
    return layout.apply(
        x, mean, var, None,
        layout.check_param(scale, "scale", x, feature),
        layout.check_param(bias, "bias", x, feature),
        feature=feature, stats=feature, eps=layout.check_eps(eps), activation=activation,
        residual=layout.check_residual(residual, x),
    )  # fmt: skip


__all__ = ["batch_norm", "batch_norm_inference"]
