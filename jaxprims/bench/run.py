"""The benchmark's command line and its loop: check an item against a rival, time all contenders in turn, write the line.

Whatever fails (a row, a rival) is written into its line and the run goes on, unless the GPU's context itself is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxprims.bench import report, rows
from jaxprims.bench.options import parser
from jaxprims.bench.rows import DTYPES, ConvRow, Item, MemRow

NEEDS = {"rich": "rich", "matplotlib": "matplotlib"}
# |ours - rival| / |rival|: both round bf16, f16 or tf32 operands' products to their own results; f32 rivals may be FFT or Winograd.
TOLERANCE = {"bf16": 3e-2, "f16": 5e-3, "tf32": 5e-3, "f32": 1e-3}
L2 = 64e6  # where PyTorch is not there to tell the cache's size


@dataclass
class Settings:
    """How a run measures."""

    cpu: bool = False
    quick: bool = False
    torch: Any = None
    compiled: bool = False  # torch.compile too
    errors: bool = False  # against float64
    gemm: bool = False  # our algorithm="gemm" beside the rest
    l2: float = L2

    @property
    def samples(self) -> int:
        return 2 if self.cpu else 5 if self.quick else 7

    @property
    def sample_seconds(self) -> float:
        return 1e-3 if self.cpu else 4e-3 if self.quick else 6e-3


@dataclass
class Result:
    """One line: what was timed and how it went. `ms` by contender; "jaxprims" is ours."""

    item: Item
    ms: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0  # (max - min) / median of our samples
    runs_as: str = ""
    workspace: int = 0
    sets: int = 0
    cold: bool = False
    check: str = ""  # "xla 1.2e-03": against whom, and the relative difference
    errors: dict[str, float] = field(default_factory=dict)  # by contender, against float64
    failed: bool = False  # ours: an error, or a wrong result
    notes: list[str] = field(default_factory=list)


class ContextLost(RuntimeError):
    """The GPU answers no more: every later row would fail for this row's fault."""


def measure_ceilings(dtypes: Sequence[str], settings: Settings) -> dict[str, float]:
    """This run's ceilings: {"copy": bytes/s, dtype: FLOP/s of a large matrix product}, the best of XLA and PyTorch."""
    from jaxprims.bench import timing, torch_rival

    size, n = (1 << 22, 128) if settings.cpu else (1 << 31, 8192)
    torch = settings.torch
    ceilings: dict[str, float] = {}
    jobs: list[tuple[str, Callable[[], float]]] = [("copy", lambda: timing.copy_rate(size))]
    if torch is not None:
        jobs.append(("copy", lambda: torch_rival.copy_rate(torch, size)))
    for dtype in dtypes:
        # XLA tunes such a product for many seconds and lands on the same library.
        job = (lambda d: lambda: torch_rival.matmul_rate(torch, d, n)) if torch is not None else (
            lambda d: lambda: timing.matmul_rate(d, DTYPES[d], n)
        )  # fmt: skip
        jobs.append((dtype, job(dtype)))
    for name, job in jobs:
        try:
            ceilings[name] = max(ceilings.get(name, 0.0), job())
        except Exception as error:
            print(f"ceiling {name}: {short(error)}", file=sys.stderr)
    torch_rival.release(torch)
    return ceilings


def run_item(item: Item, settings: Settings) -> Result:
    """Checks and times one item. Raises ContextLost, nothing else."""
    result = Result(item)
    try:
        _run_item(item, settings, result)
    except Exception as error:
        result.failed = True
        result.notes.append(f"jaxprims: {short(error)}")
        _check_context(item)
    _release(settings)
    return result


def _release(settings: Settings) -> None:
    """Gives PyTorch's unused memory back, so that JAX can have it."""
    from jaxprims.bench import torch_rival

    torch_rival.release(settings.torch)


def _run_item(item: Item, settings: Settings, result: Result) -> None:
    from jaxprims.bench import programs, rivals, timing, torch_rival

    moved = item.moved()
    result.sets = timing.set_count(moved, settings.l2, settings.cpu)
    result.cold = result.sets * moved >= 1.5 * settings.l2
    sets = timing.random_sets(programs.operands(item), result.sets, seed=len(item.id))
    runners: dict[str, Any] = {}
    errors: dict[str, Exception] = {}

    def attempt(name: str, make: Callable[[], Any]) -> None:
        try:
            runners[name] = make()
            if runners[name].note:
                result.notes.append(f"{name}: {runners[name].note}")
        except Exception as error:
            errors[name] = error
            result.notes.append(f"{name}: {short(error)}")
            _check_context(item)

    ours = programs.ours(item)
    attempt("jaxprims", lambda: timing.JaxRunner(ours, sets))
    for name, program in rivals.xla(item).items():
        attempt(name, lambda program=program: timing.JaxRunner(program, sets))
    if settings.torch is not None:
        torch_programs: dict[str, Any] = {}
        try:
            torch_programs = torch_rival.programs(settings.torch, item, settings.compiled)
        except Exception as error:
            result.notes.append(f"torch: {short(error)}")
        for name, program in torch_programs.items():
            make = lambda program=program: torch_rival.TorchRunner(settings.torch, program, sets, item.dtype)  # noqa: E731
            attempt(name, make)
    if settings.gemm and (patches := programs.by_patches(item)):
        attempt("gemm", lambda: timing.JaxRunner(patches, sets))
    if "jaxprims" in runners:
        _describe(ours, sets[0], result)
    _check(item, runners, result)
    if settings.errors:
        _measure_errors(item, sets[0], runners, result)
    row = item.row
    if isinstance(row, ConvRow) and row.batch and "jaxprims" in runners:
        plain = Item(row.unbatched() or row, item.dtype, item.direction)

        def unbatched() -> Any:
            return timing.JaxRunner(
                programs.ours(plain), timing.random_sets(programs.operands(plain), result.sets, seed=1)
            )

        attempt("unbatched", unbatched)
    for runner in runners.values():
        runner.drop_outputs()
    times: dict[str, list[float]] = {}
    try:
        times = timing.interleaved(runners, settings.samples, settings.sample_seconds)
    except Exception as error:  # one at a time then, so that the others are not lost
        result.notes.append(f"timing: {short(error)}")
        _check_context(item)
        for name, runner in runners.items():
            try:
                times |= timing.interleaved({name: runner}, settings.samples, settings.sample_seconds)
            except Exception as again:
                result.notes.append(f"{name}: {short(again)}")
                _check_context(item)
    for name, values in times.items():
        result.ms[name] = statistics.median(values) * 1e3
        if name == "jaxprims":
            result.spread = (max(values) - min(values)) / statistics.median(values)
        share = getattr(runners[name], "enqueue_share", 0.0)
        if share > 0.9 and not settings.cpu:
            result.notes.append(f"{name}: bound by the host's launches")
    if "unbatched" in result.ms and "jaxprims" in result.ms:
        result.notes.append(
            f"{result.ms['jaxprims'] / result.ms['unbatched']:.2f} x the time of the same arithmetic unbatched"
        )
    result.failed = result.failed or "jaxprims" not in result.ms


def _describe(program: Any, operands: tuple[Any, ...], result: Result) -> None:
    """Which kernels run, or that the reference does, and the workspace."""
    import jaxprims
    from jaxprims.core import ffi

    args = program.prepare(*operands) if program.prepare else operands
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = jaxprims.explain(program.fn, *args)
    usable = ffi.gpu_present() and ffi.why_not() is None
    names = [
        row.kernel.removeprefix("jaxprims_") + (f" ({row.choice})" if row.choice else "")
        if row.kernel and usable
        else f"{row.op} by reference"
        for row in told.rows
    ]
    result.runs_as = "+".join(dict.fromkeys(names)) or "XLA alone"
    result.workspace = max((row.workspace for row in told.rows), default=0)


def _outputs(item: Item, runner: Any) -> list[Any]:
    """The comparable results: y, or the gradients, or both (not the statistics beside y)."""
    import jax

    if hasattr(runner, "outputs"):
        return runner.outputs()
    out = runner.first
    if isinstance(item.row, MemRow) and item.direction == "fwd":
        return jax.tree.leaves(out[0])
    if isinstance(item.row, MemRow) and item.direction == "fwd+bwd":
        return jax.tree.leaves((out[0], out[2]))
    return jax.tree.leaves(out)


def _check(item: Item, runners: dict[str, Any], result: Result) -> None:
    """Compares ours with the first rival that works, and the other rivals with that one; who is wrong is not timed."""
    from jaxprims.bench import timing

    judges = [name for name in runners if name != "jaxprims"]
    if not judges:
        result.notes.append("not checked: no rival ran")
        return
    judge = judges[0]
    want = _outputs(item, runners[judge])
    for name in [n for n in runners if n != judge]:
        try:
            error = timing.difference(_outputs(item, runners[name]), want)
            fine = error <= TOLERANCE[item.dtype]
            text = f"{error:.1e}"
        except Exception as problem:
            fine, text = False, short(problem)
            _check_context(item)
        if name == "jaxprims":
            result.check = f"{judge} {text}"
        if not fine:
            result.notes.append(f"{name}: differs from {judge} by {text}, not timed")
            result.failed = result.failed or name == "jaxprims"
            del runners[name]


def _measure_errors(item: Item, operands: tuple[Any, ...], runners: dict[str, Any], result: Result) -> None:
    """Of convolutions: how far from float64 each contender is on a block of the result."""
    from jaxprims.bench import exact

    if not isinstance(item.row, ConvRow) or item.row.transposed:
        return
    try:
        block = exact.Block(item.row, item.direction, operands)
        result.errors = {name: block.error(_outputs(item, runner)[0]) for name, runner in runners.items()}
    except Exception as error:
        result.notes.append(f"float64: {short(error)}")
        _check_context(item)
        return
    ours, xla = result.errors.get("jaxprims"), result.errors.get("xla")
    if ours is not None and xla is not None and not ours <= 1.5 * xla:
        result.notes.append(f"jaxprims: error against float64 {ours:.2e}, XLA's {xla:.2e}")


def _check_context(item: Item) -> None:
    import jax
    import jax.numpy as jnp

    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except Exception as error:
        raise ContextLost(f"the GPU answers no more after {item.id}: {short(error)}") from error


def short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


# --- command line ---------------------------------------------------------------------------------------------------------


def _missing() -> list[str]:
    missing = []
    for module, package in NEEDS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m jaxprims bench``; 0, or 1 where an item of ours failed, or 2 where nothing could be run."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["models"]:
        from jaxprims.bench import models

        return models.main(words[1:])
    if words[:1] == ["compile"]:
        from jaxprims.bench import compile_time

        return compile_time.main(words[1:])
    p = parser()
    options = p.parse_args(words)
    if options.suite in ("models", "compile"):
        p.error(f"{options.suite} comes first, its own options behind it")
    items = rows.select(
        options.suite, rows=options.rows, dtypes=options.dtype, directions=options.directions, quick=options.quick
    )
    if options.list:
        for item in items:
            print(f"{item.id:32} {item.row.group:12} {item.row.shape}")
        return 0
    if not items:
        print("No row is left: see them all with --list.", file=sys.stderr)
        return 2
    if missing := _missing():
        print(f"The benchmark needs {', '.join(missing)}. Get it with: pip install 'jaxprims[bench]'", file=sys.stderr)
        return 2
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory beside JAX
    import jax

    if options.cpu:
        jax.config.update("jax_platforms", "cpu")
    from jaxprims.bench import torch_rival
    from jaxprims.core import ffi

    if not options.cpu and not ffi.gpu_present():
        print(
            "No NVIDIA GPU that JAX computes on: there is nothing to measure here. `python -m jaxprims doctor` tells what is "
            "missing; --cpu --quick times the reference on the CPU in tiny sizes, which only tries the program.",
            file=sys.stderr,
        )
        return 2
    if not options.cpu and (problem := ffi.why_not()):
        print(no_kernels(problem), file=sys.stderr)
    torch = None if options.cpu or options.no_torch else torch_rival.load()
    settings = Settings(
        cpu=options.cpu,
        quick=options.quick,
        torch=torch,
        compiled=options.torch_compile,
        errors=options.errors,
        gemm=options.gemm,
    )
    if torch is not None:
        settings.l2 = float(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or L2)
    if options.cpu and options.quick:
        items = [replace(item, row=item.row.tiny()) for item in items]
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--output {options.output}: {error}", file=sys.stderr)
        return 2
    return _run(options, items, settings)


def no_kernels(problem: tuple[str, str]) -> str:
    """What is said where the library cannot run on this GPU: (reason, remedy)."""
    return (
        f"The kernels cannot run here ({problem[0]}); jaxprims' own times are those of its reference. "
        f"Mend it with: {problem[1]}"
    )


def machine_text(machine: dict[str, str]) -> str:
    """What is said of the machine before anything is measured."""
    return (
        f"{machine['gpu']}, driver {machine['driver'] or '-'}, jax {machine['jax']}, torch {machine['torch'] or '-'}, "
        f"cuDNN {machine['cudnn'] or '-'}, commit {machine['commit']}"
    )


def _run(options: argparse.Namespace, items: list[Item], settings: Settings) -> int:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    begin = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 180)
    machine = report.machine(settings)
    console.print(machine_text(machine))
    if settings.torch is None and not settings.cpu:
        console.print(
            "PyTorch is left out" + ("." if options.no_torch else ": it is not importable here, or sees no GPU.")
        )
    ceilings = measure_ceilings(sorted({i.dtype for i in items if not i.by_bytes}), settings)
    console.print("Ceilings of this run: " + report.ceilings_text(ceilings))
    results: list[Result] = []
    stem = report.file_stem(options.suite, machine)
    lost = ""
    columns = [
        TextColumn("{task.description:32.32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    ]  # fmt: skip
    with contextlib.suppress(ValueError):  # where this is not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended still reports
    with (
        report.Csv(options.output / f"{stem}.csv", machine, ceilings) as csv,
        Progress(*columns, console=console) as progress,
    ):
        task = progress.add_task("", total=len(items))
        try:
            for item in items:
                progress.update(task, description=item.id)
                result = run_item(item, settings)
                results.append(result)
                csv.write(result)
                for note in result.notes:
                    if result.failed:
                        progress.console.print(f"{item.id}: {note}", style="red", markup=False)
                progress.advance(task)
        except KeyboardInterrupt:
            lost = "interrupted"
        except ContextLost as error:
            lost = str(error)
    console.print(report.table(results, ceilings))
    console.print(report.summary(results, ceilings))
    for text in report.small_batches(results):
        console.print(text, markup=False)
    written = [f"{options.output / stem}.csv"]
    try:
        if results:
            report.draw(options.output / f"{stem}.png", options.suite, results, ceilings, machine)
            written.append(f"{options.output / stem}.png")
    except Exception as error:  # the figures are safe in the CSV
        console.print(f"no picture: {short(error)}", markup=False)
    failed = [r.item.id for r in results if r.failed]
    for result in results:
        for note in result.notes:
            console.print(f"note  {result.item.id}: {note}", style="red" if result.failed else "dim", markup=False)
    console.print(f"Written in {time.perf_counter() - begin:.0f} s: {', '.join(written)}", markup=False)
    if lost:
        console.print(f"Stopped after {len(results)} of {len(items)} rows: {lost}", style="red", markup=False)
    if failed:
        console.print(f"{len(failed)} of {len(results)} failed: {', '.join(failed)}", style="red", markup=False)
    return 1 if failed or lost or not results else 0
