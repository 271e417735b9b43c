"""``jaxprims.explain``: which ops of a function run as kernels, which as reference and why, and what each moves.

The function is traced, not run, and the jaxpr is walked with everything inside it (``jit``, ``scan``, ``while``,
``cond``, ``shard_map``, ``remat``, custom derivatives).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jaxprims.core.checks import short
from jaxprims.core.primitive import REGISTRY


@dataclass(frozen=True)
class Ceilings:
    """What one GPU reaches at best: bytes/s of a copy, FLOP/s per kind of arithmetic."""

    name: str
    copy: float
    bf16: float
    tf32: float
    f32: float


# Measured ceilings, not the vendor's: a large device copy, and the best dense matrix products.
GPUS = {"H200": Ceilings("H200", copy=4.26e12, bf16=790e12, tf32=370e12, f32=55e12)}
ARITHMETIC = ("f32", "tf32")


def _ceilings(gpu: str | Ceilings) -> Ceilings:
    if isinstance(gpu, Ceilings):
        return gpu
    known = f"give one of {sorted(GPUS)} or your own (from jaxprims.explain import Ceilings)"
    if not isinstance(gpu, str):
        raise TypeError(f"gpu={short(gpu)} must be a name or Ceilings, not {type(gpu).__name__}; {known}.")
    if gpu not in GPUS:
        raise ValueError(f"gpu={gpu!r} is not known; {known}.")
    return GPUS[gpu]


def _arithmetic(float32: str) -> str:
    if float32 not in ARITHMETIC:
        raise ValueError(
            f"float32={short(float32)} is not known; give one of {', '.join(map(repr, ARITHMETIC))}: what float32 ops compute in."
        )
    return float32


@dataclass(frozen=True)
class Row:
    """One op of the program. `flops`, `bytes` and `workspace` are of one call."""

    op: str
    kernel: str | None  # the kernel that runs on an NVIDIA GPU, or None: the reference runs
    reason: str | None  # why it is the reference
    operands: tuple[str, ...]  # "f32[8,32,32,3]"
    results: tuple[str, ...]
    dtype: str
    flops: int
    bytes: int
    workspace: int
    times: int = 1  # calls, by the trip counts of the scans around it
    choice: str | None = None  # which of the op's kernels, where the library tells
    inside: tuple[str, ...] = ()  # "scan x10", "while (per turn)", "cond (one of 2)", "shard_map (per device)"

    def seconds(self, gpu: str | Ceilings, float32: Literal["f32", "tf32"] = "f32") -> float:
        """Roofline time of one call on a GPU, by name or by its `Ceilings`: the larger of bytes / copy and FLOPs / peak."""
        top, kind = _ceilings(gpu), _arithmetic(float32)
        peak = top.bf16 if self.dtype in ("float16", "bfloat16") else getattr(top, kind)
        return max(self.bytes / top.copy, self.flops / peak)


@dataclass(frozen=True)
class Explanation:
    """The rows in program order; ``print`` it for a table. `others` counts the equations that are not of jaxprims."""

    rows: tuple[Row, ...]
    others: dict[str, int]
    gpu: Ceilings | None = None
    float32: Literal["f32", "tf32"] = "f32"

    def on(self, gpu: str | Ceilings, float32: Literal["f32", "tf32"] = "f32") -> Explanation:
        """The same with roofline times for a GPU, by name or by your own `Ceilings`.

        `float32` says which arithmetic float32 ops are measured against.

        Raises:
          ValueError: an unknown name or arithmetic. TypeError: a GPU that is neither a name nor `Ceilings`.
        """
        _arithmetic(float32)
        return dataclasses.replace(self, gpu=_ceilings(gpu), float32=float32)

    @property
    def kernels(self) -> int:
        """How many rows run as kernels on an NVIDIA GPU."""
        return sum(row.kernel is not None for row in self.rows)

    def __str__(self) -> str:
        head = ["op", "runs as", "operands -> results", "calls", "FLOPs", "bytes", "workspace"]
        if self.gpu:
            head.append(f"{self.gpu.name} roofline")
        table = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        reasons = {row.op: row.reason for row in self.rows if row.kernel is None}
        lines += [f"reference for {op}: {reason}" for op, reason in reasons.items()]
        flops = sum(row.flops * row.times for row in self.rows)
        moved = sum(row.bytes * row.times for row in self.rows)
        total = (
            f"{len(self.rows)} ops of jaxprims, {self.kernels} as kernels on an NVIDIA GPU; {_unit(flops, 'FLOP')}, "
        )
        total += f"{_unit(moved, 'B')} moved, largest workspace {_unit(max((r.workspace for r in self.rows), default=0), 'B')}"
        if self.gpu:
            total += f", roofline {_time(sum(r.seconds(self.gpu, self.float32) * r.times for r in self.rows))}"
        lines += [total, f"{sum(self.others.values())} other equations go to XLA"]
        return "\n".join(lines)

    def _cells(self, row: Row) -> list[str]:
        shapes = f"{' '.join(row.operands)} -> {' '.join(row.results)}"
        calls = str(row.times) + "".join(f" in {place}" for place in row.inside)
        runs = f"{row.kernel}: {row.choice}" if row.choice else row.kernel or "reference"
        cells = [row.op, runs, shapes, calls]
        cells += [_unit(row.flops, ""), _unit(row.bytes, "B"), _unit(row.workspace, "B")]
        return [*cells, _time(row.seconds(self.gpu, self.float32))] if self.gpu else cells


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Tell what ``fn(*args, **kwargs)`` runs: per op the kernel or why the reference runs, FLOPs, bytes and workspace.

    Args:
      fn: any function that JAX can trace, such as ``jax.grad(loss)`` or a jitted training step. It is not run.
      *args: arrays, pytrees or ``jax.ShapeDtypeStruct``. Anything else is closed over by the caller.
      **kwargs: the same by name.

    Returns:
      An `Explanation`: ``.rows``, ``.others``, ``print(...)`` for a table, ``.on("H200")`` for roofline times.
      "kernel" means: on an NVIDIA GPU with the library loaded (``python -m jaxprims doctor``); any other platform runs
      the reference. Bytes are each operand read once and each result written once. Inside ``shard_map`` they are of one
      device, and inside ``while`` of one turn. ``choice`` says which of its kernels a convolution gets, where a library is:
      on this machine's GPU, or, where there is none, on a Hopper one.

    Example:
      >>> import jax, jax.numpy as jnp, jaxprims
      >>> x = jax.ShapeDtypeStruct((8, 32), jnp.float32)
      >>> report = jaxprims.explain(lambda x: jaxprims.softmax(x).sum(), x)
      >>> [(row.op, row.operands, row.bytes) for row in report.rows]
      [('softmax', ('f32[8,32]',), 2048)]
    """
    if not callable(fn):
        raise TypeError(
            f"fn={short(fn)} must be callable, not {type(fn).__name__}: explain(f, x) traces f(x); do not call f yourself."
        )
    jaxpr = jax.make_jaxpr(lambda args, kwargs: fn(*args, **kwargs))(args, kwargs)
    others: dict[str, int] = {}
    rows = tuple(_walk(jaxpr.jaxpr, others, 1, ()))
    return Explanation(rows, others)


def _walk(jaxpr: Any, others: dict[str, int], times: int, inside: tuple[str, ...]) -> Iterator[Row]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in REGISTRY:
            yield _row(eqn, times, inside)
            continue
        bodies = [body for value in eqn.params.values() for body in _bodies(value)]
        if not bodies:
            others[name] = others.get(name, 0) + 1
            continue
        place: tuple[str, ...] = ()
        count = times
        if name == "scan":
            length = eqn.params["length"]
            place, count = (f"scan x{length}",), times * length
        elif name == "while":
            place = ("while (per turn)",)
        elif name == "cond":
            place = (f"cond (one of {len(eqn.params['branches'])})",)
        elif name == "shard_map":
            place = ("shard_map (per device)",)
        for body in bodies:
            yield from _walk(body, others, count, (*inside, *place))


def _bodies(value: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameter: open, closed, or a sequence of them."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _bodies(item)
        return
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
        yield inner


def _row(eqn: Any, times: int, inside: tuple[str, ...]) -> Row:
    avals = [var.aval for var in eqn.invars]
    decision = REGISTRY[eqn.primitive.name].decide(eqn.params, avals)
    return Row(
        op=eqn.primitive.name,
        kernel=decision.kernel,
        reason=decision.reason,
        operands=tuple(aval.str_short(short_dtypes=True) for aval in avals),
        results=tuple(var.aval.str_short(short_dtypes=True) for var in eqn.outvars),
        dtype=str(avals[0].dtype),
        flops=decision.flops,
        bytes=decision.bytes,
        workspace=decision.workspace,
        choice=decision.choice,
        times=times,
        inside=inside,
    )


def _unit(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{value:.3g} T{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
