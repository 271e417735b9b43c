"""From what a user gives a norm to the arrays and parameters of its primitives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core.activations import check_activation
from jaxprims.core.checks import as_array, as_number, cast, check_float
from jaxprims.norm.params import Axes, NormParams, stat_dtype
from jaxprims.norm.primitive import apply_op, norm_op


def check_input(x: Any, op: str) -> jax.Array:
    x = as_array(x, "x")
    check_float(x, "x")
    if x.ndim == 0:
        raise ValueError(f"x of shape () has no axis to normalise; {op} needs at least one.")
    return x


def check_eps(eps: Any) -> float:
    value = as_number(eps, "eps")
    if value < 0:
        raise ValueError(f"eps={value} must not be negative; it is added to the variance: give a small number as 1e-5.")
    if not math.isfinite(value):
        raise ValueError(f"eps={value} must be finite; it is added to the variance: give a small number as 1e-5.")
    return value


def check_param(p: Any, name: str, x: jax.Array, axes: Axes, shape: tuple[Any, ...] | None = None) -> jax.Array | None:
    """scale, bias, mean or var: float32 or x's dtype, one value for each index of ``axes`` of x."""
    if p is None:
        return None
    p = as_array(p, name)
    want = tuple(x.shape[a] for a in axes) if shape is None else shape
    if tuple(p.shape) != want:
        raise ValueError(
            f"{name} has shape {tuple(p.shape)}; x of shape {tuple(x.shape)} needs {want} (its axes {axes})."
        )
    if p.dtype not in (x.dtype, jnp.float32):
        raise TypeError(f"{name} has dtype {p.dtype}; it must be float32 or x's {x.dtype}: {cast(name, x.dtype)}.")
    return p


def check_residual(r: Any, x: jax.Array) -> jax.Array | None:
    if r is None:
        return None
    r = as_array(r, "residual")
    if tuple(r.shape) != tuple(x.shape):
        raise ValueError(f"residual has shape {tuple(r.shape)}; it must have x's, {tuple(x.shape)}.")
    if r.dtype != x.dtype:
        raise TypeError(f"residual has dtype {r.dtype}; it must be x's: {cast('residual', x.dtype)}.")
    return r


def check_mask(mask: Any, x: jax.Array) -> tuple[jax.Array, Axes] | None:
    """The mask as bool without its axes of size one, and the axes of x it keeps."""
    if mask is None:
        return None
    mask = as_array(mask, "mask")
    sizes = (1,) * (x.ndim - mask.ndim) + tuple(mask.shape)
    if mask.ndim > x.ndim or any(m != 1 and m != s for m, s in zip(sizes, x.shape, strict=True)):
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to x's shape {tuple(x.shape)}.")
    axes = tuple(a for a, m in enumerate(sizes) if m != 1)
    return mask.astype(bool).reshape(tuple(sizes[a] for a in axes)), axes


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    reduce: Axes,
    feature: Axes,
    eps: float,
    kind: str = "moments",
    activation: str | None = None,
    residual: jax.Array | None = None,
    mask: tuple[jax.Array, Axes] | None = None,
    joint: bool = False,
) -> tuple[jax.Array, ...]:
    """Bind ``norm``: (y, mean, var, low), or (y, mean square) for "rms"."""
    full = tuple(range(x.ndim))
    values: list[tuple[str, Any, Axes]] = [("x", x, full), ("scale", scale, feature), ("bias", bias, feature)]
    values += [("residual", residual, full), ("mask", *(mask or (None, ())))]
    values = [v for v in values if v[1] is not None]
    kept = tuple(a for a in full if a not in reduce)
    kind_ = stat_dtype(x.dtype)
    stats = ("var",) if kind == "rms" else ("mean", "var", "low")
    params = NormParams(
        rank=x.ndim,
        reduce=reduce,
        operands=tuple((n, a) for n, _, a in values),
        results=(("y", full, str(x.dtype)), *((n, kept, kind_) for n in stats)),
        eps=eps,
        kind=kind,
        activation=check_activation(activation),
        joint=joint,
    )
    return norm_op(params, *(v for _, v, _ in values))


def apply(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    low: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    feature: Axes,
    stats: Axes,
    eps: float,
    activation: str | None,
    residual: jax.Array | None,
) -> jax.Array:
    """Bind ``norm_apply``."""
    full = tuple(range(x.ndim))
    values = [("x", x, full), ("mean", mean, stats), ("var", var, stats), ("low", low, stats)]
    values += [("scale", scale, feature), ("bias", bias, feature), ("residual", residual, full)]
    values = [v for v in values if v[1] is not None]
    params = NormParams(
        rank=x.ndim,
        reduce=tuple(a for a in full if a not in stats),
        operands=tuple((n, a) for n, _, a in values),
        results=(("y", full, str(x.dtype)),),
        eps=eps,
        activation=check_activation(activation),
        fixed=True,
    )
    return apply_op(params, *(v for _, v, _ in values))[0]
