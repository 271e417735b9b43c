"""Softmax, activations, bias and layout: the functions a user calls. Softmax takes the arguments of ``jax.nn``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.act import primitive as prim
from jaxprims.core import checks
from jaxprims.core.activations import check_activation

__all__ = ["activation", "bias_act", "log_softmax", "softmax", "transpose_layout"]

ALGORITHMS = ("accurate", "fast")


def _floating(x: Any, name: str) -> jax.Array:
    x = checks.as_array(x, name)
    checks.check_float(x, name)
    return x


@functools.partial(jax.jit, static_argnums=2, inline=True)  # jit: an eager call moves no constant to the device
def _filled(keep: jax.Array, x: jax.Array, value: float) -> jax.Array:
    return jnp.where(keep, x, value)


def _along(op: Any, x: Any, axis: Any, where: Any, algorithm: str, masked: float) -> jax.Array:
    """``op`` along ``axis``, with ``masked`` where the mask is False."""
    x = _floating(x, "x")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r} is not known; give 'accurate' (subtracts the maximum) or 'fast'.")
    scalar = x.ndim == 0  # one row of one element
    axes = checks.canonical_axes(tuple(range(x.ndim)) if axis is None else axis, x.ndim, scalar=True)
    if not axes and not scalar:
        raise ValueError("axis=() names no axis; give an int or a non-empty tuple of ints.")
    if where is not None:
        where = checks.as_array(where, "where")
        if where.dtype != jnp.bool_:
            raise TypeError(f"where has dtype {where.dtype}; it must be bool: write jnp.asarray(where) != 0.")
        try:
            fits = jnp.broadcast_shapes(where.shape, x.shape) == x.shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"where of shape {where.shape} does not broadcast to x of shape {x.shape}; reshape it to that."
            )
        where = jnp.broadcast_to(where, x.shape)
        x = _filled(where, x, -math.inf)
    if scalar:
        x, axes = x.reshape(1), (0,)
    apart = axes[-1] - axes[0] + 1 != len(axes)
    if apart:  # the kernel reads one stretch of axes: bring these together
        front = tuple(range(axes[0], axes[0] + len(axes)))
        x = jnp.moveaxis(x, axes, front)
    params = prim.SoftmaxParams(axis=axes[0] - x.ndim, axes=len(axes), accurate=algorithm == "accurate")
    (y,) = op(params, x)
    if apart:
        y = jnp.moveaxis(y, front, axes)
    if scalar:
        y = y.reshape(())
    return y if where is None else _filled(where, y, masked)


def softmax(
    x: Any,
    axis: int | Sequence[int] | None = -1,
    where: Any = None,
    initial: Any = None,
    *,
    algorithm: str = "accurate",
) -> jax.Array:
    """``y_i = exp(x_i - m) / sum_j exp(x_j - m)`` along ``axis``, with ``m`` the maximum.

    Args:
      x: any shape, floating.
      axis: the axis, or several (None: all). Any axis is read in place; several that are not adjacent cost a transpose.
      where: bool, broadcasts to ``x``: entries left out of maximum and sum, 0 in the result.
      initial: taken for ``jax.nn``'s signature; it has no effect.
      algorithm: "accurate", or "fast", which takes m = 0: it overflows where some x is above 88 (float32).

    Numerics: float32 inside for half types, one rounding. A row with NaN or +inf, or of -inf alone, becomes NaN.

    Raises:
      TypeError: an integer ``x``, a ``where`` that is not bool. ValueError: a bad axis, algorithm or shape of ``where``.

    >>> import jax.numpy as jnp, jaxprims
    >>> jaxprims.softmax(jnp.array([1e30, -1e30, 1e30]))
    Array([0.5, 0. , 0.5], dtype=float32)
    """
    return _along(prim.softmax, x, axis, where, algorithm, 0.0)


def log_softmax(
    x: Any,
    axis: int | Sequence[int] | None = -1,
    where: Any = None,
    initial: Any = None,
    *,
    algorithm: str = "accurate",
) -> jax.Array:
    """``y_i = x_i - m - log(sum_j exp(x_j - m))`` along ``axis``: the logarithm of :func:`softmax`, same arguments.

    Entries that ``where`` leaves out are -inf in the result.

    >>> import jax.numpy as jnp, jaxprims
    >>> jaxprims.log_softmax(jnp.array([1e30, 0.0]))
    Array([ 0.e+00, -1.e+30], dtype=float32)
    """
    return _along(prim.log_softmax, x, axis, where, algorithm, -math.inf)


def activation(x: Any, name: str | None) -> jax.Array:
    """The activation ``name`` of every element: "relu", "silu", "gelu", ... (formulas and slopes of ``jax.nn``).

    Raises ValueError, listing the known names, for an unknown one; TypeError for an integer ``x``.

    >>> import jax.numpy as jnp, jaxprims
    >>> jaxprims.activation(jnp.array([-1.0, 2.0]), "relu")
    Array([0., 2.], dtype=float32)
    """
    return bias_act(x, None, name)


def bias_act(
    x: Any, bias: Any = None, activation: str | None = None, axis: int = -1, residual: Any = None
) -> jax.Array:
    """``act(x + bias + residual)`` in one pass.

    Args:
      x: any shape, floating.
      bias: shape ``(x.shape[axis],)`` (a scalar is not broadcast) or None; x's dtype or float32. Added along ``axis``.
      activation: a name as in :func:`activation`, or None.
      axis: the axis of ``x`` that the bias runs along: -1 for NHWC, 1 for NCHW.
      residual: x's shape and dtype, or None.

    Numerics: float32 inside for half types, one rounding; at a kink the slope is that of ``jax.nn``.

    Raises:
      TypeError: an integer ``x`` or other dtypes than said. ValueError: a shape, axis or name that does not fit.

    >>> import jax.numpy as jnp, jaxprims
    >>> jaxprims.bias_act(jnp.array([[1.0, -3.0]]), jnp.array([1.0, 1.0]), "relu")
    Array([[2., 0.]], dtype=float32)
    """
    x = _floating(x, "x")
    name = check_activation(activation)
    at = checks.canonical_axis(axis, x.ndim, scalar=True)
    arrays = [x]
    if bias is not None:
        bias = _floating(bias, "bias")
        if bias.dtype not in (x.dtype, jnp.float32):
            raise TypeError(f"bias has dtype {bias.dtype}, x {x.dtype}; {checks.cast('bias', x.dtype)}.")
        if x.ndim == 0:
            raise ValueError(f"bias of shape {bias.shape}: x is a scalar and has no axis for it; reshape x to (1,).")
        if bias.shape != (x.shape[at],):
            raise ValueError(
                f"bias of shape {bias.shape} must have shape ({x.shape[at]},), the size of axis={axis} of x {x.shape}."
            )
        arrays.append(bias)
    if residual is not None:
        residual = _floating(residual, "residual")
        checks.check_same_dtype({"x": x, "residual": residual})
        if residual.shape != x.shape:
            raise ValueError(
                f"residual of shape {residual.shape} must have x's shape {x.shape}; broadcast it with jnp.broadcast_to."
            )
        arrays.append(residual)
    if name is None and len(arrays) == 1:
        return x
    if x.ndim == 0:
        arrays = [a.reshape(1) for a in arrays]
    rank = max(x.ndim, 1)
    params = prim.BiasActParams(name, bias is not None, residual is not None, at - rank, rank)
    (y,) = prim.bias_act(params, *arrays)
    return y if x.ndim else y.reshape(())


def transpose_layout(x: Any, source: str, target: str) -> jax.Array:
    """``x`` laid out as ``target`` instead of ``source``: "NHWC" and "NCHW", or their 1-D and 3-D spellings.

    Args:
      x: three to five axes, any dtype.
      source, target: "NHWC" or "NCHW" (which stand for any rank), "NWC", "NCW", "NDHWC", "NCDHW".

    Raises:
      ValueError: an unknown layout, or one that names another number of axes than ``x`` has.

    >>> import jax.numpy as jnp, jaxprims
    >>> jaxprims.transpose_layout(jnp.ones((8, 32, 32, 3)), "NHWC", "NCHW").shape
    (8, 3, 32, 32)
    """
    x = checks.as_array(x, "x")
    was = checks.check_layout(source, x.ndim, "source")
    now = checks.check_layout(target, x.ndim, "target")
    if was == now:
        return x
    spatial = x.ndim - 2
    params = prim.LayoutParams(1, spatial) if was == 1 else prim.LayoutParams(spatial, 1)
    return prim.transpose_layout(params, x)[0]
