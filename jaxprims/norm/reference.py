"""The norm ops in plain jax.numpy: the definition of right, and what runs where no kernel does.

Arithmetic is float32 for half types (float64 for float64), with one rounding at the end. Statistics are taken of
``x - p``, p one of the elements, which float32 holds nearly exactly however large the mean is; then two passes, the mean
corrected by the mean of what is left. A constant input gives variance 0 and deviations of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core.activations import activation_slope, apply_activation
from jaxprims.core.checks import as_float32, promote
from jaxprims.norm.params import Axes, NormParams, sizes_of, summed_over

Named = dict[str, Any]


def named(params: NormParams, arrays: Sequence[jax.Array]) -> Named:
    """Operands by name, in the arithmetic type, with all axes of the index space (size 1 where one is missing)."""
    out: Named = {}
    for (name, axes), a in zip(params.operands, arrays, strict=True):
        a = jnp.expand_dims(a, tuple(i for i in range(params.rank) if i not in axes))
        out[name] = a if a.dtype == jnp.bool_ else as_float32(a)
    dtype = promote(*(a.dtype for a in out.values() if a.dtype != jnp.bool_))
    return {n: a if a.dtype == jnp.bool_ else a.astype(dtype) for n, a in out.items()}


def collect(params: NormParams, arrays: Sequence[Any], each: Named, totals: Named) -> tuple[jax.Array, ...]:
    """Results in order. ``each`` holds values per element or statistic, ``totals`` terms of sums over the missing axes."""
    sizes = sizes_of(params, arrays)
    out = []
    for name, axes, dtype in params.results:
        missing = tuple(i for i in range(params.rank) if i not in axes)
        if name in totals:
            v = jnp.sum(jnp.broadcast_to(totals[name], sizes), missing)
        else:
            v = jnp.broadcast_to(jnp.squeeze(each[name], missing), tuple(sizes[i] for i in axes))
        out.append(v.astype(dtype))
    return tuple(out)


def summed_statistics(params: NormParams, arrays: Sequence[Any], each: Named) -> Named:
    """Tangents of statistics summed over the batch axes that the result lacks: under vmap the transpose of a shared cmean."""
    sizes, out = sizes_of(params, arrays), dict(each)
    for name in ("tmean", "tvar"):
        if name in each and (over := summed_over(params, name)):
            shape = tuple(s if i in over else e for i, (s, e) in enumerate(zip(sizes, each[name].shape, strict=True)))
            out[name] = jnp.sum(jnp.broadcast_to(each[name], shape), over, keepdims=True)
    return out


# --- statistics ------------------------------------------------------------------------------------------------------------


def mean_over(v: jax.Array, axes: Axes, mask: jax.Array | None) -> jax.Array:
    """Mean of ``v`` over ``axes``, over the elements where ``mask`` holds; 0 where there are none. Keeps the axes."""
    if mask is None:
        if any(isinstance(v.shape[a], int) and v.shape[a] == 0 for a in axes):
            return jnp.sum(v, axes, keepdims=True)
        return jnp.mean(v, axes, keepdims=True)
    weight = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, v.shape))
    n = jnp.sum(weight, axes, keepdims=True, dtype=v.dtype)
    return jnp.sum(jnp.where(weight, v, 0), axes, keepdims=True) / jnp.maximum(n, 1)


def spread_mean(v: jax.Array, like: jax.Array, axes: Axes, mask: jax.Array | None) -> jax.Array:
    """Transpose of ``mean_over``: ``v`` divided by the count, at every element that was counted."""
    if mask is None:
        ones = jnp.ones(tuple(s if a in axes else 1 for a, s in enumerate(like.shape)), v.dtype)
        return v / jnp.maximum(jnp.sum(ones, axes, keepdims=True), 1)
    weight = jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, like.shape))
    n = jnp.sum(weight, axes, keepdims=True, dtype=v.dtype)
    return jnp.where(weight, v / jnp.maximum(n, 1), 0)


def moments(x: jax.Array, axes: Axes, mask: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(mean, low, var) with the axes kept: the mean is mean + low, var is the biased variance."""
    if mask is None:
        index = tuple(slice(0, 1) if a in axes else slice(None) for a in range(x.ndim))
        pivot = x[index]
        if any(isinstance(x.shape[a], int) and x.shape[a] == 0 for a in axes):
            pivot = jnp.sum(x, axes, keepdims=True)
    else:
        pivot = jnp.max(jnp.where(mask, x, -jnp.inf), axes, keepdims=True, initial=-jnp.inf)
        pivot = jnp.where(jnp.isneginf(pivot), 0, pivot)
    d = x - pivot
    m = mean_over(d, axes, mask)
    e = d - m
    rest = mean_over(e, axes, mask)
    var = mean_over(jnp.square(e - rest), axes, mask)
    shift = m + rest
    mean = pivot + shift
    back = mean - pivot
    low = (pivot - (mean - back)) + (shift - back)  # two-sum: what the rounding of `mean` lost
    return mean, jnp.where(jnp.isfinite(low), low, 0), var


def statistics(params: NormParams, a: Named) -> Named:
    mask = a.get("mask")
    if params.kind == "rms":
        return {"var": mean_over(jnp.square(a["x"]), params.reduce, mask)}
    mean, low, var = moments(a["x"], params.reduce, mask)
    return {"mean": mean, "low": low, "var": var}


def _rstd(params: NormParams, var: jax.Array) -> jax.Array:
    """1 / sqrt(var + eps); 0 where that is a division by zero, so that a constant input gives beta at eps = 0 too."""
    v = var + params.eps
    zero = v == 0
    return jnp.where(zero, 0, 1 / jnp.sqrt(jnp.where(zero, 1, v)))


def _normal(params: NormParams, a: Named) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(xhat, rstd, z): the normalised input and the pre-activation."""
    c = a["x"]
    if "mean" in a:
        c = c - a["mean"]
    if "low" in a:
        c = c - a["low"]
    rstd = _rstd(params, a["var"])
    xhat = c * rstd
    z = xhat
    if "scale" in a:
        z = z * a["scale"]
    if "bias" in a:
        z = z + a["bias"]
    if "residual" in a:
        z = z + a["residual"]
    return xhat, rstd, z


# --- the ops ------------------------------------------------------------------------------------------------------------------


def norm_stats(params: NormParams, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """x, [mask] -> mean, var, low, count of the local elements."""
    a = named(params, arrays)
    out = statistics(params, a)
    ones = jnp.ones(jnp.broadcast_shapes(a["x"].shape, a["mask"].shape if "mask" in a else ()), out["var"].dtype)
    if "mask" in a:
        ones = jnp.where(a["mask"], ones, 0)
    out["count"] = jnp.sum(ones, params.reduce, keepdims=True)
    return collect(params, arrays, out, {})


def norm_apply(params: NormParams, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """x, mean, var, [low], [scale], [bias], [residual] -> y = act((x - mean) / sqrt(var + eps) * scale + bias + residual)."""
    _, _, z = _normal(params, named(params, arrays))
    return collect(params, arrays, {"y": apply_activation(params.activation, z)}, {})


def norm(params: NormParams, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """x, [scale], [bias], [residual], [mask] -> y and the statistics it was made with."""
    a = named(params, arrays)
    stats = statistics(params, a)
    _, _, z = _normal(params, {**a, **stats})
    return collect(params, arrays, {"y": apply_activation(params.activation, z), **stats}, {})


def norm_jvp(params: NormParams, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Tangent of norm (or, ``fixed``, of norm_apply), linear in the tangents given.

    yd = act'(z) * (scale * rstd * (xd - m1 - xhat * m2) + scaled * xhat + biasd + residuald)
    with m1 = mean(xd), m2 = mean(xhat * xd); fixed: m1 = meand, m2 = rstd * vard / 2.
    """
    a = named(params, arrays)
    xhat, rstd, z = _normal(params, a)
    mask, axes = a.get("mask"), params.reduce
    each: Named = {}
    zd: Any = 0
    if params.fixed:
        if "xd" in a:
            zd = zd + a["xd"] * rstd
        if "meand" in a:
            zd = zd - a["meand"] * rstd
        if "vard" in a:
            zd = zd - xhat * (0.5 * rstd * rstd * a["vard"])
    elif "xd" in a:
        m1 = 0 if params.kind == "rms" else mean_over(a["xd"], axes, mask)
        m2 = mean_over(xhat * a["xd"], axes, mask)
        zd = rstd * (a["xd"] - m1 - xhat * m2)
        if params.wants("tmean"):
            c = (a["x"] - a["mean"]) - a["low"]
            each = {"tmean": m1, "tvar": 2 * mean_over(c * a["xd"], axes, mask)}
    elif params.wants("tmean"):
        each = {"tmean": jnp.zeros_like(a["var"]), "tvar": jnp.zeros_like(a["var"])}
    if "scale" in a:
        zd = zd * a["scale"]
    if "scaled" in a:
        zd = zd + a["scaled"] * xhat
    if "biasd" in a:
        zd = zd + a["biasd"]
    if "residuald" in a:
        zd = zd + a["residuald"]
    each["yd"] = activation_slope(params.activation, z) * zd
    lacks = [ax for n, ax, _ in params.results if n == "yd" and len(ax) < params.rank]
    totals = {"yd": each.pop("yd")} if lacks else {}
    each = summed_statistics(params, arrays, each)
    return collect(params, arrays, each, totals)


def norm_bwd(params: NormParams, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Transpose of norm_jvp: with h = dy * act'(z), g = h * scale,

    dx = rstd * (g - (sum(g) + xhat * sum(g * xhat)) / n) + (cmean + 2 * (x - mean) * cvar) / n  (/ n at counted elements),
    fixed: dx = rstd * g, dmean = -sum(rstd * g), dvar = -sum(g * xhat * rstd^2) / 2;
    dscale = sum(h * xhat), dbias = sum(h), dresidual = h.
    """
    a = named(params, arrays)
    xhat, rstd, z = _normal(params, a)
    mask, axes = a.get("mask"), params.reduce
    h = a["dy"] * activation_slope(params.activation, z)
    g = h * a["scale"] if "scale" in a else h
    totals: Named = {"dscale": h * xhat, "dbias": h, "dresidual": h}
    if params.fixed:
        totals |= {"dx": rstd * g, "dmean": -rstd * g, "dvar": -0.5 * rstd * rstd * g * xhat}
    elif params.wants("dx"):
        g = jnp.broadcast_to(g, jnp.broadcast_shapes(g.shape, xhat.shape))
        back = xhat * jnp.sum(g * xhat, axes, keepdims=True)
        if params.kind == "moments":
            back = back + jnp.sum(g, axes, keepdims=True)
        dx = rstd * (g - spread_mean(back, xhat, axes, mask))
        if "cmean" in a:
            c = (a["x"] - a["mean"]) - a["low"]
            dx = dx + spread_mean(a["cmean"] + 2 * c * a["cvar"], xhat, axes, mask)
        totals["dx"] = dx
    return collect(params, arrays, {}, totals)
