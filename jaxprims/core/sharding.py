"""How an op may be split over devices: one rule text, and the routes by which XLA learns of it.

A :class:`Rule` names every axis of every operand and result: ``"n h w c, r s c k -> n p q k"``. Axes with one name (a
*factor*) have one size and are split together. A factor in ``whole`` is never split (XLA gathers it first); any other
may be. Where a result lacks a factor that is split, every device holds a part of that result, and the parts are summed.

Routes (facts measured on jax 0.10 to 0.12):

* automatic and explicit meshes: ``custom_partitioning`` inside the op's lowering, with the rule as its Shardy rule;
* inside ``shard_map`` with every axis manual: nothing to do, operands are local already;
* partially manual regions and multi-device export, where custom_partitioning cannot go: ops whose operands and results
  all lead with the same factor carry the rule as attributes of the custom call instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jaxprims.core.primitive import Op

Factors = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """Which axes of an op belong together. ``text`` is "operand, operand -> result, result", axes by name."""

    text: str
    whole: tuple[str, ...] = ()

    @cached_property
    def operands(self) -> tuple[Factors, ...]:
        return _parse(self.text.split("->")[0])

    @cached_property
    def results(self) -> tuple[Factors, ...]:
        return _parse(self.text.split("->")[1])

    @cached_property
    def reductions(self) -> Factors:
        """Factors that may be split and are in no result."""
        seen = {f for r in self.results for f in r}
        names = dict.fromkeys(f for o in self.operands for f in o)
        return tuple(f for f in names if f not in seen and f not in self.whole)

    def check(self, n_operands: int, ranks: Sequence[int]) -> None:
        got = [len(f) for f in (*self.operands, *self.results)]
        if len(self.operands) != n_operands or got != list(ranks):
            raise AssertionError(f"sharding rule {self.text!r} does not fit ranks {list(ranks)}")

    @property
    def leading(self) -> bool:
        """True where all operands and results lead with one factor that may be split."""
        firsts = {f[0] if f else None for f in (*self.operands, *self.results)}
        return len(firsts) == 1 and None not in firsts and not firsts & set(self.whole)


def _parse(side: str) -> tuple[Factors, ...]:
    return tuple(tuple(part.split()) for part in side.split(",")) if side.strip() else ()


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def assign(
    rule: Rule, specs: Sequence[Any], shapes: Sequence[tuple[int, ...]], mesh_shape: Any
) -> dict[str, tuple[str, ...]]:
    """Mesh axes of every factor, from the specs that operands and results arrive with (the first to name one wins)."""
    axes: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for factors, spec, shape in zip((*rule.operands, *rule.results), specs, shapes, strict=True):
        for factor, entry, size in zip(factors, (*spec, *(None,) * (len(factors) - len(spec))), shape, strict=True):
            names = _mesh_axes(entry)
            if not names or factor in axes or factor in rule.whole or used & set(names):
                continue
            parts = 1
            for name in names:
                parts *= mesh_shape[name]
            if size % parts:
                continue  # padded shards would enter sums: keep the axis whole
            axes[factor] = names
            used |= set(names)
    return axes


def spec_of(factors: Factors, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
    entries = [axes.get(f) for f in factors]
    return PartitionSpec(*(e[0] if e is not None and len(e) == 1 else e for e in entries))


def meshed(avals: Sequence[Any]) -> Any:
    """The aval whose sharding names the mesh: the first that has one (a constant has none), else the first."""
    return next((a for a in avals if not a.sharding.mesh.empty), avals[0])


def explicit_axes(rule: Rule | None, avals: Sequence[Any], ranks: Sequence[int]) -> dict[str, tuple[str, ...]] | None:
    """Mesh axes of every factor as the operands' types say on an explicit mesh; None where no operand is split by type."""
    specs = [a.sharding.spec for a in avals]
    if all(e is None for s in specs for e in s):
        return None
    if rule is None:
        return {}
    padded = [*specs, *(PartitionSpec() for _ in ranks)]
    shapes = [*(a.shape for a in avals), *((0,) * r for r in ranks)]
    return assign(rule, padded, shapes, dict(meshed(avals).sharding.mesh.shape))


def result_specs(rule: Rule | None, avals: Sequence[Any], ranks: Sequence[int]) -> list[PartitionSpec]:
    """Explicit-mesh shardings of the results, from those of the operands (all None on an automatic mesh)."""
    axes = explicit_axes(rule, avals, ranks)
    if rule is None or axes is None:
        return [PartitionSpec(*(None,) * r) for r in ranks]
    return [spec_of(f, axes) for f in rule.results]


def match_explicit(rule: Rule | None, ranks: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
    """On an explicit mesh, bring operands to the shardings that the op computes with, by a reshard that JAX can transpose."""
    avals = [jax.typeof(x) for x in arrays]
    axes = explicit_axes(rule, avals, ranks)
    if axes is None:
        return arrays
    mesh = meshed(avals).sharding.mesh
    factors = rule.operands if rule is not None else [("",) * len(a.shape) for a in avals]
    specs = [spec_of(f, axes) for f in factors]
    return tuple(
        x if _same_spec(a.sharding.spec, s) else jax.sharding.reshard(x, NamedSharding(mesh, s))
        for x, a, s in zip(arrays, avals, specs, strict=True)
    )


def _same_spec(a: Any, b: Any) -> bool:
    n = max(len(a), len(b))
    return all(
        _mesh_axes(x) == _mesh_axes(y)
        for x, y in zip((*a, *(None,) * (n - len(a))), (*b, *(None,) * (n - len(b))), strict=True)
    )


def sum_over(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """psum with half types summed in float32 and rounded once."""
    if x.dtype in (jnp.float16, jnp.bfloat16):
        return jax.lax.psum(x.astype(jnp.float32), names).astype(x.dtype)
    return jax.lax.psum(x, names)


def partitioned(op: Op, params: Any, backend: str, rule: Rule) -> Callable[..., tuple[jax.Array, ...]]:
    """The op as a function that XLA's partitioner can split by ``rule``; goes inside the lowering of the op itself."""

    def body(*operands):
        return tuple(op.primitive.bind(*operands, params=params, backend=backend))

    def partition(mesh, arg_infos, result_infos):
        infos = (*arg_infos, *result_infos)
        if not all(isinstance(i.sharding, NamedSharding) for i in infos):
            # Nothing in the program is split by a named mesh, so XLA speaks of none: all of the op on every device.
            devices = sorted(infos[0].sharding.device_set, key=lambda d: d.id)
            mesh = Mesh(np.array(devices), ("devices",))
            specs = [PartitionSpec()] * len(infos)
        else:
            specs = [i.sharding.spec for i in infos]
        axes = assign(rule, specs, [i.shape for i in infos], mesh.shape)

        def local(*operands):
            # XLA runs this per device: a mesh in the context would make psum a reduction it cannot lower.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                missing = [
                    tuple(n for f, names in axes.items() if f not in factors for n in names) for factors in rule.results
                ]
                if op.collective is not None and any(missing):
                    names = tuple(dict.fromkeys(n for m in missing for n in m))
                    return tuple(op.collective(params, names)(*operands))
                return tuple(sum_over(y, m) if m else y for y, m in zip(body(*operands), missing, strict=True))

        out = tuple(NamedSharding(mesh, spec_of(f, axes)) for f in rule.results)
        args = tuple(NamedSharding(mesh, spec_of(f, axes)) for f in rule.operands)
        return mesh, local, out, args

    call = custom_partitioning(body)
    call.def_partition(
        partition=partition,
        sharding_rule=_shardy_text(rule),
        need_replication_factors=tuple(
            _shardy_name(f) for f in _names(rule) if f in rule.whole
        ),  # in order of first use
        reduction_factors=tuple(_shardy_name(f) for f in rule.reductions),
    )
    return call


def _names(rule: Rule) -> dict[str, None]:
    return dict.fromkeys(f for part in (*rule.operands, *rule.results) for f in part)


def _shardy_name(factor: str) -> str:
    return f"f_{factor}"


def _shardy_text(rule: Rule) -> str:
    sides = [", ".join(" ".join(map(_shardy_name, f)) for f in side) for side in (rule.operands, rule.results)]
    return " -> ".join(sides)


def call_attributes(rule: Rule, shapes: Sequence[tuple[Any, ...]]) -> dict[str, Any] | None:
    """Attributes that let XLA split the custom call itself along the leading axis; None where the rule does not allow it."""
    if not rule.leading or not all(isinstance(d, int) for s in shapes for d in s):
        return None
    parts = (*rule.operands, *rule.results)
    sizes = {f: d for factors, shape in zip(parts, shapes, strict=True) for f, d in zip(factors, shape, strict=True)}
    letters = {f: _letter(i) for i, f in enumerate(sizes)}

    def side(group: tuple[Factors, ...]) -> str:
        return ", ".join("[" + ", ".join(letters[f] for f in factors) + "]" for factors in group)

    listed = ", ".join(f"{letters[f]}={d}" for f, d in sizes.items())
    fixed = [letters[f] for f in sizes if f != parts[0][0]]
    replicate = f" need_replication={{{', '.join(fixed)}}}" if fixed else ""
    text = f"#sdy.op_sharding_rule<({side(rule.operands)})->({side(rule.results)}) {{{listed}}}{replicate}, custom>"
    return {
        "mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": "1"}),
        "sdy.sharding_rule": mlir.ir.Attribute.parse(text),
    }


def _letter(i: int) -> str:
    return chr(ord("i") + i) if i < 18 else f"z_{i - 17}"


def unsplit(x: Any, axis: int) -> Any:
    """``x`` with ``axis`` not split by type, before a reshape that an explicit mesh would refuse. No operation elsewhere."""
    sharding = jax.typeof(x).sharding
    entries = [*sharding.spec, *(None,) * (jnp.ndim(x) - len(sharding.spec))]
    if entries[axis] is None:
        return x
    entries[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*entries)))


def with_out_sharding(y: jax.Array, out_sharding: Any) -> jax.Array:
    """``y`` with the sharding that an argument ``out_sharding`` asks for: what JAX's own functions take, and refuse, there."""
    if out_sharding is None or (isinstance(out_sharding, NamedSharding) and out_sharding.mesh.empty):
        return y
    given = f"out_sharding={out_sharding!r}"
    if not isinstance(out_sharding, (NamedSharding, PartitionSpec)):
        raise TypeError(
            f"{given} must be None, a jax.sharding.PartitionSpec or a jax.sharding.NamedSharding, not {type(out_sharding).__name__}."
        )
    current = jax.sharding.get_abstract_mesh()
    if isinstance(out_sharding, PartitionSpec):
        if current.empty:
            raise ValueError(
                f"{given}: no mesh is set; set one with jax.set_mesh, or give a jax.sharding.NamedSharding."
            )
        mesh, spec = current, NamedSharding(current, out_sharding).spec  # which refuses names that the mesh lacks
    else:
        mesh, spec = out_sharding.mesh.abstract_mesh, out_sharding.spec
        if mesh != current and not current.empty and not (mesh.are_all_axes_auto and current.are_all_axes_auto):
            raise ValueError(
                f"{given} is of another mesh than the one that is set, {current}; give a sharding of that one."
            )
    if spec.unreduced or spec.reduced:
        raise NotImplementedError(f"{given}: a convolution's result is neither unreduced nor reduced; leave these out.")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for entry in spec:
        for name in (entry,) if entry is PartitionSpec.UNCONSTRAINED else _mesh_axes(entry):
            if kinds.get(name) != AxisType.Explicit:
                raise ValueError(
                    f"{given}: {name} is no explicit axis of the mesh; under automatic axes use jax.lax.with_sharding_constraint."
                )
    if len(spec) > y.ndim:
        raise ValueError(f"{given} has {len(spec)} entries for a result of shape {y.shape}; give at most {y.ndim}.")
    for axis, entry in enumerate(spec):
        parts = math.prod(mesh.shape[name] for name in _mesh_axes(entry))
        if isinstance(y.shape[axis], int) and y.shape[axis] % parts:
            raise ValueError(
                f"{given} cuts axis {axis} of the result, of shape {y.shape}, into {parts} parts of unequal size."
            )
    if AxisType.Explicit not in kinds.values():
        return y
    return jax.sharding.reshard(y, NamedSharding(mesh, PartitionSpec(*spec, *(None,) * (y.ndim - len(spec)))))
