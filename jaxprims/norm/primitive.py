"""The norm primitives: forward, tangent and backward, closed under differentiation and transposition.

    norm(x, ...)         -> y, mean, var, low     its tangent is norm_jvp with the statistics as functions of x
    norm_stats(x, ...)   -> mean, var, low, count  of the local elements (a device's share of a batch)
    norm_apply(x, mean, var, ...) -> y             its tangent is norm_jvp with ``fixed``
    norm_jvp(tangents, x, ...)   -> yd, ...        linear in the tangents; its transpose is norm_bwd
    norm_bwd(cotangents, x, ...) -> dx, ...        linear in the cotangents; its transpose is norm_jvp

Pre-activations are computed again in the backward pass, never stored: it keeps x, the mean and the variance, and a residual
only where the activation's slope cannot be read off the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core.checks import as_float32
from jaxprims.core.primitive import Op, define_primitive
from jaxprims.norm import reference
from jaxprims.norm.params import (
    SUMS,
    Axes,
    NormParams,
    batch_rule,
    config,
    cost,
    linear_jvp,
    shape,
    sharding,
    stat_dtype,
    supports,
    workspace,
)

TANGENTS = {"x": "xd", "scale": "scaled", "bias": "biasd", "residual": "residuald", "mean": "meand", "var": "vard"}
GRADIENTS = {
    "xd": "dx",
    "scaled": "dscale",
    "biasd": "dbias",
    "residuald": "dresidual",
    "meand": "dmean",
    "vard": "dvar",
}
COTANGENTS = {"yd": "dy", "tmean": "cmean", "tvar": "cvar"}
BACK = {v: k for k, v in GRADIENTS.items()}
JOINTLY = {v: k for k, v in COTANGENTS.items()}


@functools.partial(jax.checkpoint, prevent_cse=False)
def _where_positive(y: jax.Array, *parts: jax.Array) -> jax.Array:
    """ReLU's slope times the sum of ``parts``; ``y`` is all that a derivative keeps."""
    total = sum(parts[1:], parts[0])
    return jax.lax.select(jnp.broadcast_to(y > 0, total.shape), total, jnp.zeros_like(total)).astype(y.dtype)


def _residuals(params: NormParams) -> tuple[str, ...]:
    """Operands of the forward pass that its derivatives read again."""
    keep = ["x", "scale", *(("bias", "residual") if params.activation else ()), *(() if params.fixed else ("mask",))]
    return tuple(n for n in keep if params.has(n))


def _tangent_call(
    params: NormParams, values: dict[str, Any], axes: dict[str, Axes], dots: dict[str, Any], y: Any, out: Any
) -> Any:
    """norm_jvp of a forward op: ``values`` are its operands and statistics by name, ``dots`` the tangents that are not zero.

    ReLU behind a residual: its slope is read off the result, so that the residual need not be kept. The result is what
    the next layer keeps in any case; slope and residual stay outside of the op, where they join whatever adds cotangents.
    """
    if params.activation == "relu" and params.has("residual"):
        rest, residuald = {**dots, "residual": None}, dots["residual"]
        got: tuple[Any, ...] = ()
        if any(t is not None for t in rest.values()):
            got = _tangent_call(replace(params, activation=None), values, axes, rest, y, out)
        parts = [*got[:1]]
        if residuald is not None:
            parts.append(jnp.expand_dims(residuald, tuple(i for i, a in enumerate(y[1]) if a not in axes["residual"])))
        return (_where_positive(out, *parts), *got[1:])
    terms = [(TANGENTS[n], axes[n]) for n in TANGENTS if dots.get(n) is not None]
    keep = (*_residuals(params), *(n for n in ("mean", "var", "low") if n in axes))
    results = [("yd", y[1], y[2])]
    if params.joint:
        kind = stat_dtype(values["x"].dtype)
        results += [("tmean", axes["mean"], kind), ("tvar", axes["var"], kind)]
    new = replace(params, operands=(*terms, *((n, axes[n]) for n in keep)), results=tuple(results))
    return jvp_op(new, *(dots[n] for n in TANGENTS if dots.get(n) is not None), *(values[n] for n in keep))


@functools.partial(jax.jit, static_argnums=0, inline=True)  # an eager call moves no constant to the device
def stat_tangents(params: NormParams, x: Any, mask: Any, mean: Any, low: Any, xd: Any) -> tuple[Any, Any]:
    """Tangents of mean and var (None and that of the mean square for "rms") in plain jnp."""
    names = {n: a for n, a in params.operands if n in ("x", "mask")}

    def up(v: Any, axes: Axes) -> Any:
        return jnp.expand_dims(v, tuple(i for i in range(params.rank) if i not in axes))

    kept = next(a for n, a, _ in params.results if n == "var")
    xs, ds = as_float32(up(x, names["x"])), as_float32(up(xd, names["x"]))
    m = up(mask, names["mask"]) if mask is not None else None
    missing = tuple(i for i in range(params.rank) if i not in kept)
    c = xs if mean is None else (xs - up(mean, kept)) - up(low, kept)
    vard = 2 * jnp.squeeze(reference.mean_over(c * ds, params.reduce, m), missing)
    meand = None if mean is None else jnp.squeeze(reference.mean_over(ds, params.reduce, m), missing)
    return meand, vard


# --- forward ops ----------------------------------------------------------------------------------------------------------


def _norm_jvp_rule(params: NormParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    outs = norm_op(params, *primals)
    names = [n for n, _ in params.operands]
    values = dict(zip(names, primals, strict=True))
    dots = dict(zip(names, tangents, strict=True))
    axes = dict(params.operands)
    for (name, ax, _), v in zip(params.results[1:], outs[1:], strict=True):
        values[name], axes[name] = v, ax
    if all(t is None for t in tangents):
        return outs, (None,) * len(outs)
    got = _tangent_call(params, values, axes, dots, params.results[0], outs[0])
    by_name: dict[str, Any] = {"y": got[0]}
    if dots["x"] is not None:
        if params.joint:
            by_name["mean"], by_name["var"] = got[1:]
        else:
            by_name["mean"], by_name["var"] = stat_tangents(
                params, values["x"], values.get("mask"), values.get("mean"), values.get("low"), dots["x"]
            )
    return outs, tuple(by_name.get(n) for n, _, _ in params.results)


def _stats_jvp_rule(params: NormParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    outs = stats_op(params, *primals)
    if tangents[0] is None:
        return outs, (None,) * 4
    mask = primals[1] if params.has("mask") else None
    return outs, (*stat_tangents(params, primals[0], mask, outs[0], outs[2], tangents[0]), None, None)


def _apply_jvp_rule(params: NormParams, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    outs = apply_op(params, *primals)
    if all(t is None for t in tangents):
        return outs, (None,)
    names = [n for n, _ in params.operands]
    dots = dict(zip(names, tangents, strict=True))
    values = dict(zip(names, primals, strict=True))
    return outs, _tangent_call(params, values, dict(params.operands), dots, params.results[0], outs[0])


# --- tangent and backward: each the transpose of the other ------------------------------------------------------------------


def _split(params: NormParams, operands: Sequence[Any], wanted: Sequence[bool], linear: Sequence[str]) -> Any:
    """(terms of the other operands, their values, terms of the linear ones with their avals)."""
    named = list(zip(params.operands, operands, wanted, strict=True))
    for (name, _), _, w in named:
        if w and name not in linear:
            raise NotImplementedError(f"the norm tangent is not linear in {name}")
    rest = [(t, x) for t, x, _ in named if t[0] not in linear]
    lin = [(t, x, w) for t, x, w in named if t[0] in linear]
    return [t for t, _ in rest], [x for _, x in rest], lin


def _jvp_transpose(
    params: NormParams, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]
) -> tuple[Any, ...]:
    rest, values, lin = _split(params, operands, wanted, list(GRADIENTS))
    asked = [(GRADIENTS[n], axes, str(x.dtype)) for (n, axes), x, w in lin if w]
    results = list(asked)
    if params.joint and not any(r[0] in ("dscale", "dbias") for r in results):
        # A result that is a sum over the batch, so that a batch split over devices is known to need communication.
        results.append(
            ("dbias", dict(rest)["var"], stat_dtype(dict(zip([n for n, _ in rest], values, strict=True))["x"].dtype))
        )
    ops = [(COTANGENTS[n], axes) for n, axes, _ in params.results]
    grads = bwd_op(replace(params, operands=(*ops, *rest), results=tuple(results)), *cts, *values)
    by_name = dict(zip([r[0] for r in asked], grads, strict=False))
    return tuple(by_name[GRADIENTS[n]] if w else None for (n, _), w in zip(params.operands, wanted, strict=True))


def _bwd_transpose(
    params: NormParams, cts: Sequence[Any], operands: Sequence[Any], wanted: Sequence[bool]
) -> tuple[Any, ...]:
    rest, values, lin = _split(params, operands, wanted, list(JOINTLY))
    results = tuple((JOINTLY[n], axes, str(x.dtype)) for (n, axes), x, _ in lin)
    ops = [(BACK[n], axes) for n, axes, _ in params.results]
    got = jvp_op(replace(params, operands=(*ops, *rest), results=results), *cts, *values)
    by_name = dict(zip([t[0] for t, _, _ in lin], got, strict=True))
    return tuple(by_name[n] if w else None for (n, _), w in zip(params.operands, wanted, strict=True))


# --- statistics of a batch split over devices ------------------------------------------------------------------------------


def combine(parts: Sequence[Any], psum: Callable[[Any], Any]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(mean, var, low, count) of the union of parts, from ``parts``, this part's own; ``psum`` sums over the parts.

    Counts are combined, not means: the mean is sum(n_k mean_k) / sum(n_k), and the squared deviations of the parts are
    moved to it before they are added, so that unequal and empty parts come out right.
    """
    mean, var, low, count = parts
    total = psum(count)
    share = _share(count, total)
    whole = psum(share * mean)
    d = (mean - whole) + low
    rest, square = psum((share * d, share * (var + jnp.square(d))))
    return whole, _variance(square, rest), jax.lax.stop_gradient(rest), total


# jit: an eager call moves no constant to the device.


@functools.partial(jax.jit, inline=True)
def _share(count: jax.Array, total: jax.Array) -> jax.Array:
    return count / jnp.maximum(total, 1)


@functools.partial(jax.jit, inline=True)
def _variance(square: jax.Array, rest: jax.Array) -> jax.Array:
    var = square - jnp.square(rest)
    # Rounding may leave it below 0. At 0 itself (a constant channel) every derivative is that of var: no maximum's tie.
    return jnp.where(var < 0, jnp.zeros_like(var), var)


def _stats_of(params: NormParams, x: Any, mask: Any) -> tuple[Any, ...]:
    axes = dict(params.operands)
    terms = [(n, axes[n]) for n in ("x", "mask") if n in axes]
    kept = next(a for n, a, _ in params.results if n == "mean")
    kind = stat_dtype(x.dtype)
    new = NormParams(
        params.rank,
        params.reduce,
        tuple(terms),
        tuple((n, kept, kind) for n in ("mean", "var", "low", "count")),
        params.eps,
    )
    return stats_op(new, *([x] if mask is None else [x, mask]))


def _norm_collective(params: NormParams, names: tuple[str, ...]) -> Callable[..., Any]:
    def local(*operands: Any) -> tuple[Any, ...]:
        a = dict(zip([n for n, _ in params.operands], operands, strict=True))
        axes = dict(params.operands)
        mean, var, low, _ = combine(_stats_of(params, a["x"], a.get("mask")), _reduced(names))
        stats = {"mean": mean, "var": var, "low": low}
        kept = {n: ax for n, ax, _ in params.results if n in stats}
        order = [n for n in ("scale", "bias", "residual") if n in a]
        new = replace(
            params, fixed=True, joint=False, results=params.results[:1],
            operands=(("x", axes["x"]), *kept.items(), *((n, axes[n]) for n in order)),
        )  # fmt: skip
        (y,) = apply_op(new, a["x"], *(stats[n] for n in kept), *(a[n] for n in order))
        return (y, *(stats[n].astype(d) for n, _, d in params.results[1:]))

    return local


def _reduced(names: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda v: jax.lax.psum(v, names)


def _jvp_collective(params: NormParams, names: tuple[str, ...]) -> Callable[..., Any]:
    """Local means of the tangents, combined by count, then the elementwise tangent with statistics given."""

    def local(*operands: Any) -> tuple[Any, ...]:
        a = dict(zip([n for n, _ in params.operands], operands, strict=True))
        axes = dict(params.operands)
        psum = _reduced(names)
        kept = tuple(i for i in params.stat_axes if any(i in axes.get(n, ()) for n in ("x", "mask", "xd")))
        drop = tuple(i for i in range(params.rank) if i not in kept)
        md: dict[str, Any] = {}
        if "xd" in a:
            full = reference.named(params, operands)
            c, xd = (full["x"] - full["mean"]) - full["low"], full["xd"]
            weight = jnp.broadcast_to(full["mask"], xd.shape) if "mask" in full else jnp.ones_like(xd)
            n = jnp.maximum(psum(jnp.sum(weight, params.reduce, keepdims=True, dtype=xd.dtype)), 1)
            sums = psum(
                (
                    jnp.sum(weight * xd, params.reduce, keepdims=True),
                    jnp.sum(weight * c * xd, params.reduce, keepdims=True),
                )
            )
            md = {"meand": jnp.squeeze(sums[0] / n, drop), "vard": jnp.squeeze(2 * sums[1] / n, drop)}
        terms = [(t, v) for t, v in params.operands if t != "mask"]
        new = replace(
            params, fixed=True, joint=False, results=params.results[:1],
            operands=(*((n, kept) for n in md), *terms),
        )  # fmt: skip
        (yd,) = jvp_op(new, *md.values(), *(a[n] for n, _ in terms))
        zero = jnp.zeros((1,) * params.rank, a["var"].dtype)
        each = {t: jnp.expand_dims(md[n], drop) if md else zero for t, n in (("tmean", "meand"), ("tvar", "vard"))}
        each = reference.summed_statistics(params, operands, each)
        return (yd, *reference.collect(replace(params, results=params.results[1:]), operands, each, {}))

    return local


def _bwd_collective(params: NormParams, names: tuple[str, ...]) -> Callable[..., Any]:
    """The local sums by norm_bwd with statistics given, added over the devices; then dx from them, rounded once."""

    def plain(*operands: Any) -> tuple[Any, ...]:
        """Statistics of one device, or given: the results are sums, added in float32."""
        wide = tuple((n, ax, stat_dtype(d) if n in SUMS else d) for n, ax, d in params.results)
        outs = bwd_op(replace(params, results=wide), *operands)
        return tuple(
            jax.lax.psum(v, names).astype(d) if n in SUMS else v
            for (n, _, d), v in zip(params.results, outs, strict=True)
        )

    def local(*operands: Any) -> tuple[Any, ...]:
        psum = _reduced(names)
        a = dict(zip([n for n, _ in params.operands], operands, strict=True))
        terms = [t for t in params.operands if t[0] not in ("mask", "cmean", "cvar")]
        kind = str(a["var"].dtype)
        sums = [("dmean", params.stat_axes, kind), ("dvar", params.stat_axes, kind)]
        own = [(n, ax, kind if n in ("dscale", "dbias") else d) for n, ax, d in params.results if n != "dx"]
        new = replace(params, fixed=True, joint=False, operands=tuple(terms), results=(*sums, *own))
        dmean, dvar, *rest = bwd_op(new, *(a[n] for n, _ in terms))
        out = {
            n: (psum(v) if n in ("dscale", "dbias") else v).astype(d)
            for (n, _, d), v in zip([r for r in params.results if r[0] != "dx"], rest, strict=True)
        }
        if params.wants("dx"):
            full = reference.named(params, operands)
            xhat, rstd, z = reference._normal(params, full)
            h = full["dy"] * reference.activation_slope(params.activation, z)
            g = h * full["scale"] if "scale" in full else h
            shape_ = tuple(i for i in range(params.rank) if i not in params.stat_axes)
            s1, s2 = (jnp.expand_dims(v, shape_) for v in psum((dmean, dvar)))
            if "cmean" in full:
                s1, s2 = s1 + full["cmean"], s2 + full["cvar"]
            weight = full.get("mask", jnp.ones((1,) * params.rank, bool))
            weight = jnp.broadcast_to(weight, xhat.shape).astype(xhat.dtype)
            n = jnp.maximum(psum(jnp.sum(weight, params.reduce, keepdims=True)), 1)
            c = (full["x"] - full["mean"]) - full["low"]
            dx = rstd * g + weight / n * (s1 + 2 * c * s2)
            result = next(r for r in params.results if r[0] == "dx")
            (out["dx"],) = reference.collect(replace(params, results=(result,)), operands, {}, {"dx": dx})
        return tuple(out[n] for n, _, _ in params.results)

    return local if params.joint else plain


# --- definitions ----------------------------------------------------------------------------------------------------------------


def _define(name: str, ref: Callable[..., Any], jvp: Any, transpose: Any = None, collective: Any = None) -> Op:
    return define_primitive(
        name,
        params=NormParams,
        shape=shape,
        reference=ref,
        supports=supports,
        config=config,
        workspace=workspace,
        jvp=jvp,
        transpose=transpose,
        batch=batch_rule(lambda: OPS[name]),
        sharding=sharding,
        collective=collective,
        cost=cost,
    )


OPS: dict[str, Op] = {}
norm_op = OPS["norm"] = _define("norm", reference.norm, _norm_jvp_rule, collective=_norm_collective)
stats_op = OPS["norm_stats"] = _define("norm_stats", reference.norm_stats, _stats_jvp_rule)
apply_op = OPS["norm_apply"] = _define("norm_apply", reference.norm_apply, _apply_jvp_rule)
jvp_op = OPS["norm_jvp"] = _define(
    "norm_jvp", reference.norm_jvp, linear_jvp(lambda: jvp_op, tuple(GRADIENTS)), _jvp_transpose, _jvp_collective
)
bwd_op = OPS["norm_bwd"] = _define(
    "norm_bwd", reference.norm_bwd, linear_jvp(lambda: bwd_op, tuple(JOINTLY)), _bwd_transpose, _bwd_collective
)
