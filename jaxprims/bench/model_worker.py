"""One contender's training step, measured in a process of its own: its peak memory and compile time are its alone.

`work` runs in the child and tells the parent what it has through a pipe as soon as it has it, so that a figure is not lost
with what fails after it. Importing this module imports JAX and Flax and touches no device: the processes are forked from one
that has done so. PyTorch is imported by its own processes alone: JAX's do not see the libraries that it brings.
"""

from __future__ import annotations

import importlib
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims import models
from jaxprims.bench import profile, timing
from jaxprims.bench.model_rows import ModelRow
from jaxprims.bench.run import short

warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")  # no device and no thread of JAX's is there yet
MIB = 2.0**20
METHOD = (
    "a process for each line; one jitted step with a donated state (PyTorch: CUDA graph of a step or calls back to back, "
    "whichever is faster), steps enqueued back to back, wall clock (PyTorch on a GPU: events) around each batch of steps with "
    "the device synchronised, median of the batches; temporary memory: compiled.memory_analysis (PyTorch: peak less what stays "
    "between steps); peak: the allocator's (PyTorch's without cuDNN's first trials); lower_s: tracing and lowering; compile_s: "
    "XLA, cold, autotuning included (torch.compile: the first step less a later one); classes and busy: a profile of one "
    "further step"
)


@dataclass(frozen=True)
class Job:
    """What a child is to do."""

    row: ModelRow
    contender: str
    cpu: bool = False
    samples: int = 7
    seconds: float = 0.2  # of one timed batch of steps
    profile: bool = True
    log: str = ""  # file for the child's standard output and error


@dataclass
class Tell:
    """Sends to the parent."""

    pipe: Any

    def stage(self, text: str) -> None:
        self.pipe.send({"stage": text})

    def figures(self, **values: Any) -> None:
        self.pipe.send({"figures": values})

    def note(self, text: str) -> None:
        self.pipe.send({"note": text})


def prepare(cpu: bool, log: str = "") -> None:
    """What every child does first: its output into a file, memory as needed, the platform, no cache on disk."""
    if log:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_enable_compilation_cache", False)
    if cpu:
        jax.config.update("jax_platforms", "cpu")


def work(pipe: Any, job: Job) -> None:
    """The child's whole life."""
    tell = Tell(pipe)
    try:
        prepare(job.cpu, job.log)
        if job.contender.startswith("torch"):
            _torch(job, tell)
        else:
            _jax(job, tell)
    except BaseException as error:  # also SystemExit of a library: the parent is to know
        pipe.send({"failed": short(error)})
    pipe.send({"done": True})
    pipe.close()


def machine(pipe: Any, cpu: bool, log: str) -> None:
    """A child that tells what machine this is, so that the parent touches no device."""
    try:
        prepare(cpu, log)
        from jaxprims.bench import report, run, torch_rival
        from jaxprims.core import ffi

        on_gpu = ffi.gpu_present()
        torch = torch_rival.load() if on_gpu else _installed("torch")
        told = report.machine(run.Settings(cpu=not on_gpu, torch=torch))
        problem = ffi.why_not() if on_gpu else None
        pipe.send({"figures": told | {"method": METHOD}, "gpu": on_gpu, "torch": torch is not None, "problem": problem})
    except BaseException as error:
        pipe.send({"failed": short(error)})
    pipe.close()


def _installed(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except Exception:  # a broken installation is no rival
        return None


# --- JAX ------------------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


class JaxSteps:
    """A compiled step, its state carried from call to call."""

    note = ""
    count = 1

    def __init__(self, compiled: Callable[..., Any], state: Any, batch: tuple[Any, ...]):
        self._compiled, self._state, self._batch = compiled, state, batch
        self.loss: Any = None

    def call(self, repeats: int) -> float:
        """Seconds for `repeats` steps."""
        begin = time.perf_counter()
        for _ in range(repeats):
            self._state, self.loss = self._compiled(self._state, *self._batch)
        jax.block_until_ready((self._state, self.loss))
        return time.perf_counter() - begin


def _peak() -> int:
    return int((jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def _jax(job: Job, tell: Tell) -> None:
    row = job.row
    spec = models.MODELS[row.model]
    layers, _, memory = job.contender.partition("-")
    dtype = DTYPES[row.dtype]
    options = spec.small.options if row.small else {}
    model = models.make(row.model, layers=layers, dtype=dtype, memory=memory or "default", **options)
    tell.stage("parameters")
    make_data = jax.jit(lambda key: spec.data(key, batch=row.batch, small=row.small, dtype=dtype))
    batch = jax.block_until_ready(make_data(jax.random.key(1)))
    init, step = models.train_step(model)
    state = jax.block_until_ready(init(jax.random.key(0), batch[0]))
    tell.figures(parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)))
    del make_data, init
    jax.clear_caches()

    tell.stage("lowering")
    begin = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, *batch)
    lower_s = time.perf_counter() - begin
    tell.stage("compiling")
    begin = time.perf_counter()
    compiled = lowered.compile()
    tell.figures(lower_s=lower_s, compile_s=time.perf_counter() - begin)
    program = profile.instructions(compiled.as_text() or "")
    tell.figures(runs_as=_runs_as(program))
    if layers == "jaxprims" and not job.cpu and not any(i.target.startswith("jaxprims_") for i in program.values()):
        tell.note("no kernel of jaxprims is in the program: the reference ran")
    sizes = compiled.memory_analysis()
    if sizes is not None:
        tell.figures(temp_mib=sizes.temp_size_in_bytes / MIB, argument_mib=sizes.argument_size_in_bytes / MIB)

    tell.stage("timing")
    before = _peak()
    steps = JaxSteps(compiled, state, batch)
    del state
    steps.call(1)
    tell.figures(first_loss=float(steps.loss))
    steps.call(1)
    if after := _peak():
        tell.figures(peak_mib=after / MIB)
        if after == before:
            tell.note("the peak is that of compiling, no step passed it")
    _time(job, tell, steps)
    tell.figures(loss=float(steps.loss))
    if job.profile:
        tell.stage("profile")
        _jax_profile(tell, lowered, steps, program)


def _time(job: Job, tell: Tell, runner: Any) -> float:
    (times,) = timing.interleaved({"steps": runner}, job.samples, job.seconds).values()
    ms = statistics.median(times) * 1e3
    tell.figures(ms=ms, spread=(max(times) - min(times)) * 1e3 / ms)
    return ms


def _runs_as(program: dict[str, profile.Instruction]) -> str:
    """The custom calls of a program and how many of each: our kernels, XLA's libraries."""
    targets = Counter(i.target.removeprefix("jaxprims_") for i in program.values() if i.target)
    return " ".join(f"{name}x{times}" for name, times in targets.most_common()) or "XLA alone"


def _jax_profile(tell: Tell, lowered: Any, steps: JaxSteps, program: dict[str, profile.Instruction]) -> None:
    wall = min(steps.call(1) for _ in range(3)) * 1e3
    try:
        told = profile_call(lambda: steps.call(1), program)
        clear = told.busy - told.classes["other"]
        if clear < 0.5 * wall and jax.devices()[0].platform != "cpu":
            # A CUDA graph may be one event, or none: the same program without graphs has all its kernels.
            again = lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 1_000_000})
            steps._compiled = again
            steps.call(1)
            without = profile_call(lambda: steps.call(1), profile.instructions(again.as_text() or ""))
            told = max(told, without, key=lambda b: b.busy - b.classes["other"])
    except Exception as error:
        tell.note(f"no profile: {short(error)}")
        return
    if not told.busy:
        tell.note("no profile: the trace has no events of the device")
        return
    tell.figures(busy_ms=told.busy, **{f"{name}_ms": ms for name, ms in told.classes.items()}, top=_top(told))


def profile_call(call: Callable[[], Any], program: dict[str, profile.Instruction]) -> profile.Breakdown:
    """Where the time of one call goes, by jax.profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxprims-profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        traces = sorted(Path(folder).rglob("*.trace.json.gz"))
        if not traces:
            raise FileNotFoundError("jax.profiler wrote no trace")
        return profile.breakdown(profile.read(traces[0]), program)


def _top(told: profile.Breakdown) -> str:
    """"name 1.234 ms" of the kernels that took most."""  # fmt: skip
    return "; ".join(f"{name[:80]} {ms:.4g} ms" for name, ms in told.top[:8])


# --- PyTorch --------------------------------------------------------------------------------------------------------------


class TorchSteps:
    """A step by PyTorch: calls back to back, or after `capture` replays of one CUDA graph."""

    note = ""
    count = 1

    def __init__(self, torch: Any, step: Callable[[], Any], gpu: bool):
        self._torch, self._step, self._gpu = torch, step, gpu
        self._stream = torch.cuda.Stream() if gpu else None

    def call(self, repeats: int) -> float:
        """Seconds for `repeats` steps."""
        if not self._gpu:
            begin = time.perf_counter()
            for _ in range(repeats):
                self.loss = self._step()
            return time.perf_counter() - begin
        cuda = self._torch.cuda
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with cuda.stream(self._stream):
            begin.record()
            for _ in range(repeats):
                self.loss = self._step()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def capture(self) -> None:
        """From here on a step is the replay of one graph."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            loss = self._step()

        def replay() -> Any:
            graph.replay()
            return loss

        self._step = replay


def _torch(job: Job, tell: Tell) -> None:
    import torch

    from jaxprims.bench import torch_models

    gpu, row = not job.cpu, job.row
    if gpu and not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # of f32, as JAX's default
    tell.stage("parameters")
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(0)
    train = torch_models.Training(row, device, compiled=job.contender == "torch.compile")
    tell.figures(parameters=train.parameters)
    tell.stage("compiling" if job.contender == "torch.compile" else "timing")
    steps = TorchSteps(torch, train.step, gpu)
    first = steps.call(1) if not gpu else _wall(torch, steps)
    tell.figures(first_loss=float(steps.loss))
    again = min(_wall(torch, steps) if gpu else steps.call(1) for _ in range(3))
    if job.contender == "torch.compile":
        tell.figures(compile_s=first - again)
    tell.stage("timing")
    if gpu:
        train.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest = torch.cuda.memory_allocated()
        steps.call(2)
        peak = torch.cuda.max_memory_allocated()
        tell.figures(peak_mib=peak / MIB, temp_mib=(peak - rest) / MIB, argument_mib=rest / MIB)
    plain = _time(job, tell, steps)
    tell.figures(loss=float(steps.loss), runs_as="calls back to back")
    if not gpu:
        return
    if job.profile:
        tell.stage("profile")
        try:
            _torch_profile(torch, tell, steps)
        except Exception as error:
            tell.note(f"no profile: {short(error)}")
    tell.stage("CUDA graph")
    try:
        train.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        steps.capture()
        (times,) = timing.interleaved({"graph": steps}, job.samples, job.seconds).values()
        ms = statistics.median(times) * 1e3
        if ms < plain:
            tell.figures(ms=ms, spread=(max(times) - min(times)) * 1e3 / ms, runs_as="one CUDA graph")
            tell.note(f"calls back to back: {plain:.4g} ms")
    except Exception as error:
        tell.note(f"no CUDA graph: {short(error)}")


def _wall(torch: Any, steps: TorchSteps) -> float:
    """Seconds of one step with all that the host does, compiling included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    steps.call(1)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _torch_profile(torch: Any, tell: Tell, steps: TorchSteps) -> None:
    with tempfile.TemporaryDirectory(prefix="jaxprims-profile-") as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            steps.call(1)
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        told = profile.breakdown(profile.read(path))
    if not told.busy:
        tell.note("no profile: the trace has no events of the device")
        return
    tell.figures(busy_ms=told.busy, **{f"{name}_ms": ms for name, ms in told.classes.items()}, top=_top(told))
