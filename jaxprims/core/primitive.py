"""``define_primitive``: the one place where an op of jaxprims meets JAX's extension API.

An op is data: its static options (one frozen dataclass), its shape rule, a reference in plain ``jax.numpy``, the struct
that its CUDA kernel takes, and one rule each for differentiation, transposition, batching and sharding. This file turns
that into a JAX primitive whose default lowering is the reference and whose CUDA lowering is the custom call
``jaxprims_<name>``, on every transformation that JAX has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import prim_requires_devices_during_lowering  # the one private name: see _needs_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxprims.core import ffi, settings
from jaxprims.core.sharding import Rule, call_attributes, match_explicit, meshed, partitioned, result_specs

REGISTRY: dict[str, Op] = {}


@dataclass(frozen=True)
class Decision:
    """What runs for one call of an op: ``kernel`` where CUDA takes it, else ``reason``. Sizes in bytes, arithmetic in FLOPs."""

    kernel: str | None
    reason: str | None
    flops: int
    bytes: int
    workspace: int
    choice: str | None = None  # which of its kernels, in words


@dataclass(frozen=True, eq=False)
class Op:
    """A primitive with all its rules; call it as ``op(params, *arrays) -> tuple of arrays``."""

    name: str
    params: type
    shape: Callable[..., Sequence[tuple[tuple[int, ...], Any]]]
    reference: Callable[..., Sequence[jax.Array]]
    supports: Callable[..., str | None]
    config: Callable[..., dict[str, Any]]
    workspace: Callable[..., int] | None
    choice: Callable[..., str | None] | None
    jvp: Callable[..., Any] | str
    linear: tuple[int, ...]
    bilinear: tuple[int, int] | None
    transpose: Callable[..., Any] | None
    batch: Callable[..., Any]
    sharding: Callable[..., Rule | None]
    collective: Callable[..., Any] | None
    cost: Callable[..., int] | None
    primitive: Primitive = field(repr=False)
    eager: Callable[..., Any] = field(repr=False)

    @property
    def target(self) -> str:
        return f"jaxprims_{self.name}"

    def __call__(self, params: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        backend = settings.backend()
        arrays = self._match_shardings(params, match_vma(*arrays))
        if backend == "cuda":
            reason = self.limit(params, [jax.typeof(x) for x in arrays])
            if reason:
                raise NotImplementedError(
                    f"jaxprims.use('cuda'): {self.name} has no kernel for this case: {reason}. Under use('auto') the reference runs."
                )
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            return tuple(self.primitive.bind(*arrays, params=params, backend=backend))
        return tuple(self.eager(*arrays, params=params, backend=backend))  # jit's dispatch is 3x faster than bind's

    def _match_shardings(self, params: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        avals = [jax.typeof(x) for x in arrays]
        if all(a.sharding.mesh.empty for a in avals):
            return arrays
        ranks = [len(s) for s, _ in self.shape(params, *avals)]
        return match_explicit(_rule(self, params, avals, ranks), ranks, *arrays)

    def limit(self, params: Any, avals: Sequence[Any]) -> str | None:
        """The limit of the kernel that this case is past, or None."""
        return self.supports(params, *avals)

    def decide(self, bound: dict[str, Any], avals: Sequence[Any]) -> Decision:
        """What a GPU runs for an equation of this primitive, given the equation's parameters."""
        params, backend = bound["params"], bound["backend"]
        results = self.shape(params, *avals)
        sizes = [(a.shape, a.dtype) for a in avals] + list(results)
        moved = sum(math.prod(s) * np.dtype(d).itemsize for s, d in sizes)
        flops = int(self.cost(params, *avals)) if self.cost else 0
        reason = "use('reference') is in force" if backend == "reference" else self.limit(params, avals)
        if reason is None and _empty(avals, [s for s, _ in results]):
            reason = "an operand or result is empty"
        space = int(self.workspace(params, *avals)) if self.workspace and reason is None else 0
        choice = self.choice(params, space, *avals) if self.choice and reason is None else None
        return Decision(None if reason else self.target, reason, flops, int(moved), space, choice)


def define_primitive(
    name: str,
    *,
    params: type,
    shape: Callable[..., Sequence[tuple[tuple[int, ...], Any]]],
    reference: Callable[..., Sequence[jax.Array]],
    supports: Callable[..., str | None],
    config: Callable[..., dict[str, Any]],
    batch: Callable[..., Any],
    sharding: Callable[..., Rule | None],
    jvp: Callable[..., Any] | str = "reference",
    linear: tuple[int, ...] = (),
    bilinear: tuple[int, int] | None = None,
    transpose: Callable[..., Any] | None = None,
    workspace: Callable[..., int] | None = None,
    choice: Callable[..., str | None] | None = None,
    collective: Callable[..., Any] | None = None,
    cost: Callable[..., int] | None = None,
) -> Op:
    """Make the JAX primitive ``name`` and register every rule of it.

    Args:
      name: stem of the primitive, the FFI target and the C symbol ``jaxprims_<name>``.
      params: the frozen dataclass of static options.
      shape: ``shape(params, *avals)`` -> ((shape, dtype), ...), one per result.
      reference: ``reference(params, *arrays)`` -> results, in plain JAX: the definition of right, and the default lowering.
      supports: ``supports(params, *avals)`` -> why the kernel does not take the case, or None.
      config: ``config(params, *avals)`` -> the C++ struct as a dict of ints, bools, floats and tuples of ints.
      batch: ``batch(params, args, dims, size)`` -> (results, dims).
      sharding: ``sharding(params, *avals)`` -> the :class:`Rule`, or None (never split).
      jvp: "reference", or ``jvp(params, primals, tangents)`` -> (results, tangents) with None for zero.
      linear: operands in which the op is jointly linear; bilinear: two in each of which it is linear.
      transpose: ``transpose(params, cts, operands, wanted)`` -> cotangents, for a linear or bilinear op.
      workspace: bytes of an extra result of the custom call. choice: ``choice(params, workspace, *avals)`` -> which kernel the
        library takes, in words, or None. collective: ``collective(params, axes)`` -> a function of local
        operands for a split over mesh axes that the results are not sums over. cost: FLOPs.
    """
    prim = Primitive(name)
    prim.multiple_results = True
    prim.def_impl(functools.partial(xla.apply_primitive, prim))
    eager = jax.jit(
        lambda *arrays, params, backend: prim.bind(*arrays, params=params, backend=backend),
        static_argnames=("params", "backend"),
    )
    op = Op(
        name, params, shape, reference, supports, config, workspace, choice, jvp, linear, bilinear, transpose, batch, sharding,
        collective, cost, prim, eager,
    )  # fmt: skip
    prim.def_abstract_eval(functools.partial(_abstract_eval, op))
    ad.primitive_jvps[prim] = functools.partial(_jvp, op)
    if transpose is not None:
        ad.primitive_transposes[prim] = functools.partial(_transpose, op)
    batching.primitive_batchers[prim] = functools.partial(_batch, op)
    mlir.register_lowering(prim, functools.partial(_lower_reference, op))
    mlir.register_lowering(prim, functools.partial(_lower_cuda, op), platform="cuda")
    prim_requires_devices_during_lowering.add(prim)
    ffi.register(op.target)
    REGISTRY[name] = op
    return op


# --- tracing ----------------------------------------------------------------------------------------------------------


def match_vma(*arrays: Any) -> tuple[Any, ...]:
    """Bring operands of one op to the same set of varying manual axes (shard_map); a no-op elsewhere."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset().union(*varying)
    if all(v == axes for v in varying):
        return arrays
    return tuple(
        jax.lax.pcast(x, tuple(a for a in axes if a not in v), to="varying") if v != axes else x
        for x, v in zip(arrays, varying, strict=True)
    )


def _rule(op: Op, params: Any, avals: Sequence[Any], ranks: Sequence[int]) -> Rule | None:
    rule = op.sharding(params, *avals)
    if rule is not None:
        rule.check(len(avals), [*(len(a.shape) for a in avals), *ranks])
    return rule


def _abstract_eval(op: Op, *avals: Any, params: Any, backend: str) -> list[Any]:
    if not isinstance(params, op.params):
        raise TypeError(f"{op.name} takes {op.params.__name__}, got {type(params).__name__}")
    results = op.shape(params, *avals)
    ranks = [len(s) for s, _ in results]
    specs = result_specs(_rule(op, params, avals, ranks), avals, ranks)
    like = meshed(avals)
    return [
        like.update(shape=tuple(s), dtype=np.dtype(d), weak_type=False, sharding=like.sharding.update(spec=spec))
        for (s, d), spec in zip(results, specs, strict=True)
    ]


# jit: an eager derivative moves no zero to the device.
zeros_like = jax.jit(jnp.zeros_like, inline=True)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _zeros(aval: Any) -> Any:
    return ad.instantiate_zeros(ad.Zero(aval))


# --- differentiation ----------------------------------------------------------------------------------------------------


def _jvp(op: Op, primals: Sequence[Any], tangents: Sequence[Any], *, params: Any, backend: str) -> tuple[Any, Any]:
    dots = [None if type(t) is ad.Zero else t for t in tangents]
    with settings.use(backend):
        if callable(op.jvp):
            outs, out_dots = op.jvp(params, primals, dots)
        else:
            outs = op(params, *primals)
            out_dots = _automatic_tangents(op, params, primals, dots, outs)
    out_dots = [
        ad.Zero(jax.typeof(y).to_tangent_aval()) if t is None else t for y, t in zip(outs, out_dots, strict=True)
    ]
    return list(outs), out_dots


def _automatic_tangents(op: Op, params: Any, primals: Sequence[Any], dots: list[Any], outs: Sequence[Any]) -> list[Any]:
    """Linear operands: the op applied to their tangents. The others: the JVP of the reference."""
    parts: list[Sequence[Any]] = []
    linear = [i for i in op.linear if dots[i] is not None]
    if linear:
        args = [(zeros_like(x) if dots[i] is None else dots[i]) if i in op.linear else x for i, x in enumerate(primals)]
        parts.append(op(params, *args))
    for i in op.bilinear or ():
        if dots[i] is not None:
            parts.append(op(params, *[dots[i] if j == i else x for j, x in enumerate(primals)]))
    covered = {*op.linear, *(op.bilinear or ())}
    rest = [i for i, t in enumerate(dots) if t is not None and i not in covered]
    if rest:
        parts.append(reference_tangents(op, params, tuple(rest), tuple(primals), tuple(dots[i] for i in rest)))
    floating = [jnp.issubdtype(y.dtype, jnp.inexact) for y in outs]
    if not parts:
        return [None] * len(outs)
    return [
        functools.reduce(jnp.add, column) if f else None
        for f, column in zip(floating, zip(*parts, strict=True), strict=True)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)  # jit: eagerly, no constant moves to the device
def reference_tangents(
    op: Op, params: Any, rest: tuple[int, ...], primals: tuple[Any, ...], dots: tuple[Any, ...]
) -> Any:
    """The tangents of the reference's results for tangents of the operands ``rest``."""

    def of_rest(*some: Any) -> tuple[Any, ...]:
        args = list(primals)
        for i, x in zip(rest, some, strict=True):
            args[i] = x
        return tuple(op.reference(params, *args))

    return jax.jvp(of_rest, tuple(primals[i] for i in rest), dots)[1]


def _transpose(op: Op, cts: Sequence[Any], *operands: Any, params: Any, backend: str) -> list[Any]:
    wanted = tuple(ad.is_undefined_primal(x) for x in operands)
    if all(type(ct) is ad.Zero for ct in cts):
        return [ad.Zero(x.aval) if w else None for x, w in zip(operands, wanted, strict=True)]
    cts = [_zeros(ct.aval) if type(ct) is ad.Zero else ct for ct in cts]
    args = [x.aval if w else x for x, w in zip(operands, wanted, strict=True)]
    assert op.transpose is not None  # only then is this rule registered
    with settings.use(backend):
        grads = op.transpose(params, cts, args, wanted)
    return [g if w else None for g, w in zip(grads, wanted, strict=True)]


# --- batching -----------------------------------------------------------------------------------------------------------


def _batch(op: Op, args: Sequence[Any], dims: Sequence[Any], *, params: Any, backend: str) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    if isinstance(size, int) and size == 0:  # a batch of none: folded into N, N could not be told from 0 * N
        members = [
            jax.ShapeDtypeStruct(x.shape if d is None else x.shape[:d] + x.shape[d + 1 :], x.dtype)
            for x, d in zip(args, dims, strict=True)
        ]
        results = op.shape(params, *members)
        return [jnp.zeros((0, *s), d) for s, d in results], [0] * len(results)
    with settings.use(backend):
        outs, out_dims = op.batch(params, list(args), list(dims), size)
    return list(outs), list(out_dims)


def move_to_front(x: jax.Array, dim: int) -> jax.Array:
    """The batch axis first; no operation where it is."""
    return jnp.moveaxis(x, dim, 0) if dim else x


# --- lowering -----------------------------------------------------------------------------------------------------------


def _empty(avals: Sequence[Any], shapes: Sequence[tuple[Any, ...]]) -> bool:
    return any(isinstance(d, int) and d == 0 for s in (*(a.shape for a in avals), *shapes) for d in s)


def _needs_partitioning(ctx: Any) -> bool:
    """An automatic or explicit mesh of several devices; not in export, which cannot hold custom_partitioning's callback."""
    context = ctx.module_context.axis_context
    several = getattr(context, "num_devices", 1) or 1
    return several > 1 and not _in_shard_map(ctx) and not ctx.module_context.lowering_parameters.for_export


def _in_shard_map(ctx: Any) -> bool:
    return isinstance(ctx.module_context.axis_context, mlir.SPMDAxisContext)


def _may_be_split(ctx: Any) -> bool:
    """Where XLA may still split a custom call that custom_partitioning does not wrap: see call_attributes."""
    context = ctx.module_context.axis_context
    if _in_shard_map(ctx):
        return set(context.manual_axes) != set(context.mesh.axis_names)
    return (getattr(context, "num_devices", 1) or 1) > 1


def _rule_in(op: Op, ctx: Any, params: Any) -> Rule | None:
    return _rule(op, params, ctx.avals_in, [len(a.shape) for a in ctx.avals_out])


def _lower_reference(op: Op, ctx: Any, *operands: Any, params: Any, backend: str) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    if backend == "cuda" and "cuda" not in platforms:
        raise NotImplementedError(
            f"jaxprims.use('cuda'): {op.name} is lowered for {', '.join(platforms)}, which has no kernels. "
            "Use 'auto' here, or run on an NVIDIA GPU."
        )
    rule = _rule_in(op, ctx, params) if _needs_partitioning(ctx) and "tpu" not in platforms else None
    if rule is not None:
        return mlir.lower_fun(partitioned(op, params, backend, rule), multiple_results=True)(ctx, *operands)
    # Types of shard_map have been checked by now; without them the reference may use jax.linear_transpose and the like.
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
    return mlir.lower_fun(lambda *x: tuple(op.reference(params, *x)), multiple_results=True)(ctx, *operands)


def _lower_cuda(op: Op, ctx: Any, *operands: Any, params: Any, backend: str) -> Any:
    if (
        backend == "reference"
        or op.limit(params, ctx.avals_in)
        or _empty(ctx.avals_in, [a.shape for a in ctx.avals_out])
    ):
        return _lower_reference(op, ctx, *operands, params=params, backend=backend)
    if not (ffi.usable() or (backend == "cuda" and not ffi.gpu_present())):  # cross-lowering needs no library
        if backend == "cuda":
            reason, remedy = ffi.why_not() or ("", "")
            raise RuntimeError(f"jaxprims.use('cuda'): {reason}. Mend it with: {remedy}")
        return _lower_reference(op, ctx, *operands, params=params, backend=backend)
    rule = _rule_in(op, ctx, params)
    if rule is not None and _needs_partitioning(ctx):
        return mlir.lower_fun(partitioned(op, params, backend, rule), multiple_results=True)(ctx, *operands)
    extra = None
    if rule is not None and _may_be_split(ctx):
        extra = call_attributes(rule, [a.shape for a in (*ctx.avals_in, *ctx.avals_out)])
    config = {k: _attribute(v) for k, v in op.config(params, *ctx.avals_in).items()}
    # A call that XLA may split has no workspace: the rule names every result, and the workspace is not to be cut.
    space = op.workspace(params, *ctx.avals_in) if op.workspace and not extra else 0
    results = len(ctx.avals_out)
    if not isinstance(space, int) or space:
        ctx = ctx.replace(avals_out=[*ctx.avals_out, jax.core.ShapedArray((space,), np.dtype(np.uint8))])
    options: dict[str, Any] = {"extra_attributes": extra} if extra else {}
    lowering = jax.ffi.ffi_lowering(op.target, **options)
    return list(lowering(ctx, *operands, config=config))[:results]


def _attribute(value: Any) -> Any:
    if isinstance(value, tuple):
        return np.asarray(value, np.int64)
    return int(value) if isinstance(value, (bool, np.integer)) else value
