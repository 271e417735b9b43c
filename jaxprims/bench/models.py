"""``python -m jaxprims bench models``: training steps of the models by jaxprims, Flax on XLA and PyTorch, side by side.

Every line is measured by a process of its own (`model_worker`), forked from one that has only imported: no line's peak memory
or compile time holds another's, and what crashes or hangs costs its own line alone. This process touches no device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxprims.bench import model_report, report, run
from jaxprims.bench.model_report import Outcome
from jaxprims.bench.model_rows import CONTENDERS, EXPECTED_SECONDS, SLOW, ModelRow, select
from jaxprims.bench.options import number_list, word_list

NEEDS = run.NEEDS | {"flax": "flax", "optax": "optax"}


# --- processes ------------------------------------------------------------------------------------------------------------


def context(method: str = "forkserver") -> Any:
    """How children start: from a server that has imported everything, or afresh ("spawn")."""
    made = multiprocessing.get_context(method)
    if method == "forkserver":
        made.set_forkserver_preload(["jaxprims.bench.model_worker"])
    return made


@dataclass
class Told:
    """All that a child sent: figures and notes merged, other values last."""

    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    failed: bool = False


def in_child(
    processes: Any, target: Callable[..., None], args: Callable[[str], tuple[Any, ...]], timeout: float,
    stage: Callable[[str], None] = lambda text: None,
) -> Told:  # fmt: skip
    """Runs ``target(pipe, *args(log file))`` in a process and gathers what it sends; never raises for what happens there."""
    told = Told()
    with tempfile.TemporaryDirectory(prefix="jaxprims-bench-") as folder:
        log = Path(folder) / "log"
        receive, send = processes.Pipe(duplex=False)
        process = processes.Process(target=target, args=(send, *args(str(log))))
        process.start()
        send.close()
        deadline, at = time.monotonic() + timeout, "starting"
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or not receive.poll(left):
                    told.failed = True
                    told.notes.append(f"took longer than {timeout:.0f} s ({at})")
                    break
                message = receive.recv()
                if "stage" in message:
                    at = message["stage"]
                    stage(at)
                told.figures |= message.get("figures", {})
                told.notes += [message["note"]] if "note" in message else []
                if "failed" in message:
                    told.failed = True
                    told.notes.append(message["failed"])
                told.values |= message
        except EOFError:  # it has ended
            process.join(5)
            if process.exitcode and not told.values.get("done"):
                told.failed = True
                told.notes.append(f"the process ended with {_exit(process.exitcode)} ({at}){_last_line(log)}")
        finally:
            if process.is_alive():
                process.kill()
            process.join()
            receive.close()
    return told


def _exit(code: int) -> str:
    with contextlib.suppress(ValueError):
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return f": {lines[-1][:300]}" if lines else ""


def measure(
    processes: Any, row: ModelRow, contender: str, options: argparse.Namespace, on_gpu: bool,
    stage: Callable[[str], None] = lambda text: None,
) -> Outcome:  # fmt: skip
    """One line. What was told before a failure stays in its figures."""
    from jaxprims.bench import model_worker

    def args(log: str) -> tuple[Any, ...]:
        return (
            model_worker.Job(
                row, contender, cpu=not on_gpu, samples=options.samples, seconds=options.sample_seconds,
                profile=not options.no_profile, log=log,
            ),
        )  # fmt: skip

    told = in_child(processes, model_worker.work, args, options.timeout, stage)
    platform = "gpu" if on_gpu else model_report.REFERENCE
    # What failed behind the timing (a profile, a graph) leaves the figure good.
    return Outcome(row, contender, platform, told.figures, told.failed and "ms" not in told.figures, told.notes)


# --- command line ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxprims bench models",
        description="training steps of the models: jaxprims, Flax on XLA and PyTorch side by side on this machine's GPU",
        epilog="Without a GPU the models' small sizes are timed on the CPU, by the reference: that tries the program and "
        "says nothing of kernels.",
    )
    p.add_argument("--rows", default="", metavar="SUBSTR", help="models whose name holds this; several: a,b")
    p.add_argument(
        "--contenders",
        type=word_list(CONTENDERS, "contender"),
        default=(),
        help=f"of {','.join(CONTENDERS)} (default: all but {', '.join(SLOW)})",
    )
    p.add_argument(
        "--batch", type=number_list, default=(), metavar="N", help="other batch sizes than the rows'; several: a,b"
    )
    p.add_argument("--dtype", choices=("bf16", "f16", "f32"), default="bf16", help="of the computation (%(default)s)")
    p.add_argument(
        "--output", type=Path, default=Path("bench_results"), metavar="DIR", help="of CSV and PNG (%(default)s)"
    )
    p.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    p.add_argument("--torch-compile", action="store_true", help="torch.compile too (slow to compile)")
    p.add_argument("--no-profile", action="store_true", help="leave out where a step's time goes")
    p.add_argument("--quick", action="store_true", help="three models, few samples")
    p.add_argument(
        "--samples", type=int, default=0, metavar="N", help="timed batches of steps (default: 7; quick or CPU: 3)"
    )
    p.add_argument("--sample-seconds", type=float, default=0.0, metavar="S", help="of each (default: 0.2; CPU: 0.02)")
    p.add_argument(
        "--timeout", type=float, default=300, metavar="S", help="for a line, then it has failed (%(default)s)"
    )
    p.add_argument(
        "--budget", type=float, default=float("inf"), metavar="S", help="no line is begun after this, for the whole run"
    )
    p.add_argument(
        "--equivalence",
        action="store_true",
        help="instead of timing: 50 steps in float32 by Flax and by jaxprims from the same parameters and data, and the "
        "accuracy on real digits in float32 and bfloat16",
    )
    p.add_argument("--steps", type=int, default=50, metavar="N", help="of --equivalence (%(default)s)")
    p.add_argument(
        "--epochs", type=int, default=20, metavar="N", help="of --equivalence on the digits; 0: leave out (%(default)s)"
    )
    p.add_argument("--cpu", action="store_true", help="the CPU, also where there is a GPU")
    p.add_argument(
        "--start",
        choices=("forkserver", "spawn"),
        default="forkserver",
        help="how a line's process starts: forked from one that has imported everything, or afresh (%(default)s)",
    )
    p.add_argument("--list", action="store_true", help="print the rows and stop")
    return p


def contenders(options: argparse.Namespace, torch: bool) -> list[str]:
    """Whom the options ask for, in the order of measuring; ``torch``: whether PyTorch works here."""
    chosen = options.contenders or [c for c in CONTENDERS if c not in SLOW or options.torch_compile]
    without = options.no_torch or not torch
    return [c for c in CONTENDERS if c in chosen and not (without and c.startswith("torch"))]


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m jaxprims bench models``; 0, or 1 where a line of ours failed, or 2 where nothing could be run."""
    options = parser().parse_args(argv)
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"The benchmark needs {', '.join(missing)}. Get it with: pip install 'jaxprims[bench]'", file=sys.stderr)
        return 2
    rows = select(options.rows, quick=options.quick, batches=options.batch, dtype=options.dtype)
    if options.list:
        for row in rows:
            print(f"{row.name:20} {row.dtype}  {'x'.join(map(str, row.shape))}")
        return 0
    if not rows:
        print("No row is left: see them all with --list.", file=sys.stderr)
        return 2
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"--output {options.output}: {error}", file=sys.stderr)
        return 2
    from jaxprims.bench import model_worker

    processes = context(options.start)
    told = in_child(processes, model_worker.machine, lambda log: (options.cpu, log), timeout=300)
    if told.failed:
        print(f"JAX does not start here: {'; '.join(told.notes)}", file=sys.stderr)
        return 2
    machine, on_gpu = told.figures, bool(told.values.get("gpu"))
    if problem := told.values.get("problem"):
        print(run.no_kernels(problem), file=sys.stderr)
    options.samples = options.samples or (3 if options.quick or not on_gpu else 7)
    options.sample_seconds = options.sample_seconds or (0.2 if on_gpu else 0.02)
    if not on_gpu:
        rows = select(options.rows, quick=options.quick, dtype=options.dtype, small=True)
        print(
            "No NVIDIA GPU in use: the models' small sizes on the CPU, by the reference. These times say nothing of kernels."
        )
    if options.equivalence:
        from jaxprims.bench import equivalence

        return equivalence.main(options, rows, machine, processes, on_gpu)
    return _run(options, rows, machine, processes, on_gpu, bool(told.values.get("torch")))


@contextlib.contextmanager
def progress(console: Any, total: int) -> Iterator[tuple[Any, Any]]:
    """The bar and its task; SIGTERM ends the run as Ctrl-C does, with the report."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with contextlib.suppress(ValueError):  # where this is not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    columns = [TextColumn("{task.description:48.48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console) as bar:
        yield bar, bar.add_task("", total=total)


def _run(
    options: argparse.Namespace,
    rows: list[ModelRow],
    machine: dict[str, str],
    processes: Any,
    on_gpu: bool,
    torch: bool,
) -> int:
    from rich.console import Console

    begin = time.perf_counter()
    who = contenders(options, torch)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(run.machine_text(machine))
    if not any(c.startswith("torch") for c in who):
        console.print("PyTorch is left out" + ("." if torch else ": it is not importable here, or sees no GPU."))
    if not who:
        console.print("No contender is left.", style="red")
        return 2
    if on_gpu:
        guess = len(rows) * sum(EXPECTED_SECONDS[c] for c in who)
        console.print(f"{len(rows)} rows, {len(rows) * len(who)} lines; expected to take about {guess // 60 + 1} minutes, most of "
                      "it compiling (--rows, --contenders, --quick, --budget bound it)")  # fmt: skip
    outcomes: list[Outcome] = []
    stem = report.file_stem("models", machine)
    lost = ""
    with (
        report.Lines(options.output / f"{stem}.csv", model_report.FIELDS, machine) as csv,
        progress(console, len(rows) * len(who)) as (bar, task),
    ):
        try:
            for row in rows:
                for contender in who:
                    title = f"{row.name} {contender}"
                    bar.update(task, description=title)
                    if time.perf_counter() - begin > options.budget:
                        spent = f"not begun: the budget of {options.budget:.0f} s is spent"
                        outcome = Outcome(
                            row, contender, "gpu" if on_gpu else model_report.REFERENCE, {}, True, [spent]
                        )
                    else:
                        outcome = measure(
                            processes, row, contender, options, on_gpu,
                            lambda text, title=title: bar.update(task, description=f"{title}: {text}"),
                        )  # fmt: skip
                    outcomes.append(outcome)
                    model_report.check_loss(outcome, outcomes)
                    csv.write_line(model_report.fields(outcome, outcomes))
                    bar.console.print(
                        model_report.line(outcome, outcomes),
                        style="red" if outcome.failed else None,
                        markup=False,
                        soft_wrap=True,
                    )
                    bar.advance(task)
        except KeyboardInterrupt:
            lost = "interrupted"
    console.print(model_report.table(outcomes))
    written = [f"{options.output / stem}.csv"]
    try:
        if any(o.ms for o in outcomes):
            from jaxprims.bench import picture

            picture.models(options.output / f"{stem}.png", outcomes, machine)
            written.append(f"{options.output / stem}.png")
    except Exception as error:  # the figures are safe in the CSV
        console.print(f"no picture: {run.short(error)}", markup=False)
    for outcome in outcomes:
        for note in outcome.notes:
            console.print(f"note  {outcome.title}: {note}", style="red" if outcome.failed else "dim", markup=False)
    for text in model_report.gaps(outcomes):
        console.print(f"note  {text}", style="dim", markup=False)
    console.print(f"Written in {time.perf_counter() - begin:.0f} s: {', '.join(written)}", markup=False)
    failed = [o.title for o in outcomes if o.failed and o.contender.startswith("jaxprims")]
    if lost:
        console.print(
            f"Stopped after {len(outcomes)} of {len(rows) * len(who)} lines: {lost}", style="red", markup=False
        )
    if failed:
        console.print(f"{len(failed)} of jaxprims' lines failed: {', '.join(failed)}", style="red", markup=False)
    return 1 if failed or lost or not any(o.ms for o in outcomes) else 0
