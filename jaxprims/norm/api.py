"""Normalisation: batch, layer, RMS, group, instance and local response norms.

Common to all: any layout (name the axes), scale and bias of x's dtype or float32, float32 arithmetic with one rounding
at the end, statistics from deviations (never E[x^2] - E[x]^2), an activation fused behind. float64 stays float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxprims.core.checks import as_number, canonical_axes, canonical_axis, canonical_int
from jaxprims.core.sharding import unsplit
from jaxprims.norm import layout
from jaxprims.norm.batch import batch_norm, batch_norm_inference
from jaxprims.norm.lrn import LrnParams, lrn_op
from jaxprims.norm.params import Axes

Ints = int | Sequence[int]


def _axes(x: jax.Array, axis: Ints, feature_axes: Ints | None) -> tuple[Axes, Axes]:
    reduce = canonical_axes(axis, x.ndim)
    if not reduce:
        raise ValueError(f"axis={axis!r} names no axis; give the axes that the statistics are taken over.")
    return reduce, reduce if feature_axes is None else canonical_axes(feature_axes, x.ndim, "feature_axes")


def _row_norm(
    kind: str,
    x: Any,
    scale: Any,
    bias: Any,
    axis: Ints,
    feature_axes: Ints | None,
    eps: Any,
    activation: Any,
    residual: Any,
    mask: Any,
) -> Any:
    x = layout.check_input(x, "layer_norm" if kind == "moments" else "rms_norm")
    reduce, feature = _axes(x, axis, feature_axes)
    scale = layout.check_param(scale, "scale", x, feature)
    bias = layout.check_param(bias, "bias", x, feature)
    residual = layout.check_residual(residual, x)
    h = x if residual is None else x + residual
    y = layout.normalise(
        h, scale, bias, reduce=reduce, feature=feature, eps=layout.check_eps(eps), kind=kind, activation=activation,
        mask=layout.check_mask(mask, x),
    )[0]  # fmt: skip
    return y if residual is None else (y, h)


def layer_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: Ints = -1,
    feature_axes: Ints | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Any = None,
    mask: Any = None,
) -> Any:
    """Layer normalisation: ``y = act((h - mean(h)) / sqrt(var(h) + eps) * scale + bias)`` with ``h = x + residual``.

    Args:
      x: any shape. axis: the axis or axes that the statistics are taken over (Flax's ``reduction_axes``).
      scale, bias: one value per index of ``feature_axes`` (default: ``axis``), in ascending order of axes; absent: 1 and 0.
        Arrays of that shape: scalars are not broadcast.
      eps: added to the biased variance; 1e-6 as in Flax (PyTorch: 1e-5).
      activation: name of a fused activation, or None.
      residual: [x.shape], added before the normalisation, as transformer blocks do; the sum is returned too.
      mask: broadcastable to x; elements where it is 0 do not count for the statistics. Where none counts, mean and var
        are 0 (Flax: NaN).

    Returns:
      y as x; with ``residual`` the pair (y, h), h rounded to x's dtype.

    Numerics: variance of deviations; the mean is held in two float32: x = 1e4 + i * 1e-3 in float32 is right to 1e-3.
      A constant row gives exactly bias.

    Raises:
      ValueError: an axis out of range or named twice, a scale of another shape, an unknown activation.
      TypeError: an x that is not floating.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.layer_norm(jnp.array([[1.0, 3.0]]), jnp.array([2.0, 2.0]), eps=0.0))
      [[-2.  2.]]
    """
    return _row_norm("moments", x, scale, bias, axis, feature_axes, eps, activation, residual, mask)


def rms_norm(
    x: Any,
    scale: Any = None,
    *,
    axis: Ints = -1,
    feature_axes: Ints | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Any = None,
    mask: Any = None,
) -> Any:
    """Root-mean-square normalisation: ``y = act(h / sqrt(mean(h^2) + eps) * scale)`` with ``h = x + residual``.

    Arguments, results, numerics and errors as :func:`layer_norm`, which it is without mean and bias.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.rms_norm(jnp.array([[3.0, 4.0, 0.0, 0.0]]), eps=0.0))
      [[1.2 1.6 0.  0. ]]
    """
    return _row_norm("rms", x, scale, None, axis, feature_axes, eps, activation, residual, mask)


def group_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    num_groups: int | None = None,
    group_size: int | None = None,
    axis: int = -1,
    reduction_axes: Ints | None = None,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Any = None,
    mask: Any = None,
) -> jax.Array:
    """Group normalisation: channels in groups of neighbours, statistics over each group and every axis but the first.

    ``y = act((x - mean) / sqrt(var + eps) * scale + bias + residual)``

    Args:
      x: [N, ..., C] or, with axis=1, [N, C, ...]. scale, bias: [C], not scalars; absent: 1 and 0.
      num_groups: number of groups (32 where neither is given), or group_size: channels of a group; one of the two.
      axis: the axis of the channels.
      reduction_axes: the axes that statistics are taken over, the channels' among them; default: all but the first.
      eps: added to the biased variance; 1e-6 as in Flax (PyTorch: 1e-5).
      activation: name of a fused activation ("silu" in UNets), or None. residual: [x.shape], added before it.
      mask: broadcastable to x; elements where it is 0 do not count for the statistics. Where none counts, mean and var
        are 0 (Flax: NaN).

    Returns:
      y, as x.

    Raises:
      ValueError: channels not divisible by the groups, both or an impossible one of num_groups and group_size, axes.
      TypeError: an x that is not floating.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.group_norm(jnp.array([[1.0, 3.0, 5.0, 5.0]]), num_groups=2, eps=0.0))
      [[-1.  1.  0.  0.]]
    """
    x = layout.check_input(x, "group_norm")
    if x.ndim < 2:
        raise ValueError(
            f"x of shape {tuple(x.shape)} has no batch axis; group_norm needs [N, ..., C] (add one with x[None])."
        )
    c = canonical_axis(axis, x.ndim)
    channels = x.shape[c]
    if num_groups is not None and group_size is not None:
        raise ValueError(f"num_groups={num_groups} and group_size={group_size} are both given; give one of them.")
    if group_size is not None:
        size = canonical_int(group_size, "group_size", low=1)
        if channels % size:
            raise ValueError(f"group_size={size} does not divide the {channels} channels (axis {c}); give a divisor.")
        groups = channels // size
    else:
        groups = canonical_int(32 if num_groups is None else num_groups, "num_groups", low=1)
        if channels % groups:
            raise ValueError(f"num_groups={groups} does not divide the {channels} channels (axis {c}); give a divisor.")
        size = channels // groups
    if reduction_axes is None:
        reduce = tuple(sorted({*range(1, x.ndim), c}))
    else:
        reduce = canonical_axes(reduction_axes, x.ndim, "reduction_axes")
        if c not in reduce:
            raise ValueError(f"reduction_axes={reduction_axes!r} must hold the channels' axis {c}.")
    scale = layout.check_param(scale, "scale", x, (c,))
    bias = layout.check_param(bias, "bias", x, (c,))
    residual = layout.check_residual(residual, x)
    masked = layout.check_mask(mask, x)

    def split(a: jax.Array, at: int) -> jax.Array:
        return unsplit(a, at).reshape(*a.shape[:at], groups, size, *a.shape[at + 1 :])

    if masked is not None:
        m, axes = masked
        new = tuple(a if a < c else a + 1 for a in axes)
        if c in axes:
            at = axes.index(c)
            m, new = split(m, at), (*new[:at], c, *new[at:])
        masked = m, new
    y = layout.normalise(
        split(x, c),
        None if scale is None else split(scale, 0),
        None if bias is None else split(bias, 0),
        reduce=tuple(a if a < c else a + 1 for a in reduce),  # of the pair (groups, size) the size alone
        feature=(c, c + 1),
        eps=layout.check_eps(eps),
        activation=activation,
        residual=None if residual is None else split(residual, c),
        mask=masked,
    )[0]
    return y.reshape(x.shape)


def instance_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: Ints = -1,
    eps: float = 1e-6,
    activation: str | None = None,
    residual: Any = None,
    mask: Any = None,
) -> jax.Array:
    """Instance normalisation: statistics of every example and channel, over the axes between.

    ``y = act((x - mean) / sqrt(var + eps) * scale + bias + residual)``

    Args:
      x: [N, ..., C] or, with axis=1, [N, C, ...]. scale, bias: [C], not scalars; absent: 1 and 0.
      axis: the axis (or axes) of the channels, as Flax's ``feature_axes``; statistics are over all others but the first.
      eps, activation, residual, mask: as :func:`group_norm`.

    Returns:
      y, as x. Raises: as :func:`group_norm`.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.instance_norm(jnp.array([[[1.0], [3.0]]]), eps=0.0)[0, :, 0])
      [-1.  1.]
    """
    x = layout.check_input(x, "instance_norm")
    feature = canonical_axes(axis, x.ndim)
    if 0 in feature:
        raise ValueError(f"axis={axis!r} names the batch axis 0; instance_norm keeps it apart: x is [N, ..., C].")
    reduce = tuple(a for a in range(1, x.ndim) if a not in feature)
    if not reduce:
        raise ValueError(
            f"x of shape {tuple(x.shape)} has no axis between batch and channels {feature} to normalise over."
        )
    return layout.normalise(
        x,
        layout.check_param(scale, "scale", x, feature),
        layout.check_param(bias, "bias", x, feature),
        reduce=reduce,
        feature=feature,
        eps=layout.check_eps(eps),
        activation=activation,
        residual=layout.check_residual(residual, x),
        mask=layout.check_mask(mask, x),
    )[0]


def local_response_norm(
    x: Any,
    *,
    size: int = 5,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
    axis: int = -1,
    divide_by_size: bool = True,
) -> jax.Array:
    """Local response normalisation across channels: ``y_c = x_c / (k + a * sum_{j near c} x_j^2)^beta``.

    The sum runs over the ``size`` channels from ``c - size // 2`` to ``c + (size - 1) // 2`` that exist (even sizes reach
    one further down, as in PyTorch). Two conventions of alpha are in use: ``a = alpha / size`` (``divide_by_size=True``:
    Caffe, PyTorch, cuDNN) and ``a = alpha`` (``False``: the AlexNet paper, TensorFlow, whose ``depth_radius`` r is size 2r + 1).

    Args:
      x: any layout, channels at ``axis``. size: channels of a window. alpha, beta, k: constants of the formula.
      divide_by_size: whether alpha is divided by the window's size.

    Returns:
      y, as x; differentiable to any order.

    Numerics: float32 arithmetic, one rounding.

    Raises:
      ValueError: size below 1, an axis out of range, alpha, beta or k not finite, k not positive. TypeError: an x that is not floating.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> print(jaxprims.local_response_norm(jnp.ones((1, 3)), size=3, alpha=3.0, beta=1.0))
      [[0.33333334 0.25       0.33333334]]
    """
    x = layout.check_input(x, "local_response_norm")
    c = canonical_axis(axis, x.ndim)
    size = canonical_int(size, "size", low=1)
    alpha, beta, k = (as_number(v, name) for v, name in ((alpha, "alpha"), (beta, "beta"), (k, "k")))
    for name, value in (("alpha", alpha), ("beta", beta), ("k", k)):
        if not math.isfinite(value):
            raise ValueError(f"{name}={value} must be finite; the usual ones are alpha=1e-4, beta=0.75, k=1 or 2.")
    if k <= 0:
        raise ValueError(f"k={k} must be positive, or zeros in x divide by zero; the usual ones are 1 and 2.")
    full = tuple(range(x.ndim))
    a = alpha / size if divide_by_size else alpha
    params = LrnParams(c, size, a, beta, k, x.ndim, full, out_axes=full)
    return lrn_op(params, x)[0]


__all__ = [
    "batch_norm",
    "batch_norm_inference",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "rms_norm",
]
