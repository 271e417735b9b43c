"""Where a step's time goes, by class of kernel: a profiler's trace and the compiled program, read without other packages.

A trace is the JSON that ``jax.profiler`` (``*.trace.json.gz``) and ``torch.profiler`` write. A JAX event names the
instruction of the compiled program that it ran, and that instruction says what it is; where it names none (a kernel inside a
CUDA graph, a PyTorch kernel) the kernel's own name is looked at. XLA fuses a norm's normalisation with what stands beside it:
such a fusion is of the class "elementwise", a fusion that reduces inside a norm is of the class "norm".
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLASSES: tuple[str, ...] = (
    "convolution",
    "norm",
    "pool",
    "elementwise",
    "copy",
    "other",
)  # matrix products are convolutions here

# --- the compiled program -------------------------------------------------------------------------------------------------

_TYPE = r"(?:\((?:[^()]|\([^()]*\))*\)|\S+)"
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT\s+)?%?([\w.\-]+) = {_TYPE} ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program: what it is, what it holds inside, where in the model it comes from."""

    opcode: str
    target: str = ""  # of a custom call
    inside: frozenset[str] = frozenset()  # opcodes of a fusion's body
    scope: str = ""  # op_name of the instruction and of its body's reductions


def instructions(text: str) -> dict[str, Instruction]:
    """By name, all instructions of an HLO module's text.

    >>> text = '''
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   ROOT %copy.1 = f32[4]{0} copy(%x), metadata={op_name="jit(f)/copy"}
    ... }'''
    >>> instructions(text)["copy.1"].opcode
    'copy'
    """
    bodies: dict[str, list[tuple[str, str, str]]] = {}  # computation: (name, opcode, line)
    body: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            body.append((found[1], found[2], line))
        elif opened := _COMPUTATION.match(line):
            body = bodies.setdefault(opened[1], [])
    out = {}
    for lines in bodies.values():
        for name, opcode, line in lines:
            target, scope, called = _TARGET.search(line), _OP_NAME.search(line), _CALLS.search(line)
            inside = bodies.get(called[1], []) if called and opcode in ("fusion", "call") else []
            scopes = [scope[1]] if scope else []
            scopes += [s[1] for _, o, text in inside if o.startswith("reduce") and (s := _OP_NAME.search(text))]
            out[name] = Instruction(
                opcode, target[1] if target else "", frozenset(o for _, o, _ in inside), " ".join(scopes)
            )
    return out


_NORM_SCOPE = re.compile(r"norm|(?<![a-z])lrn|local_response|(?<![a-z])bn(?![a-z])", re.IGNORECASE)
_POOL_SCOPE = re.compile(r"select_and_scatter|reduce_window|_pool\b", re.IGNORECASE)
_MOVES = frozenset({
    "copy", "transpose", "pad", "slice", "concatenate", "dynamic-slice", "dynamic-update-slice", "reverse", "copy-start",
    "copy-done",
})  # fmt: skip
_STILL = frozenset({
    "parameter", "constant", "bitcast", "reshape", "broadcast", "convert", "tuple", "get-tuple-element", "bitcast-convert",
    "iota",
})  # fmt: skip
_OTHER = frozenset(
    {"sort", "gather", "scatter", "all-reduce", "fft", "rng-bit-generator", "cholesky", "infeed", "outfeed"}
)
_CONTAINERS = ("while", "conditional", "async-start", "async-done")
_OURS = (("conv", "convolution"), ("norm", "norm"), ("lrn", "norm"), ("max_pool", "pool"), ("avg_pool", "pool"),
         ("bias_act", "elementwise"), ("transpose_layout", "copy"))  # fmt: skip


def class_of(instruction: Instruction) -> str | None:
    """The class of an instruction's time; None of what only holds others (a loop), whose events come beside its own."""
    opcode, target = instruction.opcode, instruction.target
    inside = instruction.inside or frozenset({opcode})
    if opcode in _CONTAINERS:
        return None
    if target.startswith("jaxprims_"):
        stem = target.removeprefix("jaxprims_")
        return next((name for start, name in _OURS if stem.startswith(start)), "other")
    if target:
        return class_of_kernel(target)
    if inside & {"convolution", "dot"}:
        return "convolution"
    norm = bool(_NORM_SCOPE.search(instruction.scope))
    if inside & {"reduce-window", "select-and-scatter"}:
        return "norm" if norm else "pool"
    if _POOL_SCOPE.search(instruction.scope):
        return "pool"
    if "reduce" in inside:
        return "norm" if norm else "elementwise"
    if inside & _OTHER:
        return "other"
    if inside & _MOVES and inside <= _MOVES | _STILL:
        return "copy"
    return "elementwise"


# --- kernels by name ------------------------------------------------------------------------------------------------------

_KERNELS = tuple((re.compile(pattern, re.IGNORECASE), name) for pattern, name in (
    (r"jaxprims::norm|\b(columns|rows|norm|lrn)_\w+", "norm"),
    (r"jaxprims::pool", "pool"),
    (r"memcpy|memset|nchw_?to_?nhwc|nhwc_?to_?nchw|transpose_layout|\btranspose|_transpose|tensor_?transform|cat_?array"
     r"|direct_copy|copy_kernel|wrapped_(copy|transpose|slice|concatenate|pad)|im2col|col2im", "copy"),
    (r"pool|select_and_scatter|reduce_window", "pool"),
    (r"batch_?norm|\bbn_(fw|bw)|layer_?norm|group_?norm|rms_?norm|rowwise_?moments|local_?response|\blrn|welford"
     r"|cudnn\$norm|compute(internal|gradient)|gammabeta|fusedparams", "norm"),
    (r"conv|xmma|cutlass|gemm|nvjet|wgrad|dgrad|fprop|implicit|cublas|cudnn|winograd|\bdot\b|_dot_|splitk|gemv", "convolution"),
    (r"input_reduce|triton_(red|per)|reduce_kernel|row_reduce|column_reduce", "norm"),
    (r"elementwise|fusion|loop_|triton_poi|multi_tensor|foreach|bias_act|\bact_|relu|gelu|silu|wrapped_|fill", "elementwise"),
))  # fmt: skip


def class_of_kernel(name: str) -> str:
    """By a kernel's name alone: cuDNN's and cuBLAS's, PyTorch's, XLA's fusions, ours.

    >>> class_of_kernel("sm90_xmma_fprop_implicit_gemm_bf16bf16_nhwckrsc_nhwc_tilesize128x128x64")
    'convolution'
    """
    return next((found for pattern, found in _KERNELS if pattern.search(name)), "other")


# --- traces ---------------------------------------------------------------------------------------------------------------


@dataclass
class Event:
    """One run of a kernel (on a CPU: of a part of the program), microseconds."""

    name: str
    lane: tuple[Any, Any]  # process and thread: a stream of the GPU
    start: float
    duration: float
    instruction: str = ""


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file, compressed or not."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]


def device_events(trace: Iterable[dict[str, Any]]) -> list[Event]:
    """What ran on the device: JAX's GPU streams, PyTorch's kernels and copies; where there is neither, XLA's parts on the CPU."""
    trace = list(trace)
    gpus, streams = set(), set()
    for e in trace:
        if e.get("ph") == "M":
            label = str(e.get("args", {}).get("name", ""))
            if e.get("name") == "process_name" and "/device:GPU" in label:
                gpus.add(e.get("pid"))
            if e.get("name") == "thread_name" and label.startswith("Stream"):
                streams.add((e.get("pid"), e.get("tid")))
    timed = [e for e in trace if e.get("ph") == "X" and float(e.get("dur", 0)) > 0]
    found = [e for e in timed if e.get("pid") in gpus and (e.get("pid"), e.get("tid")) in streams]
    found = found or [e for e in timed if str(e.get("cat", "")).lower() in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = found or [e for e in timed if e.get("args", {}).get("hlo_op")]
    return [
        Event(str(e["name"]), (e.get("pid"), e.get("tid")), float(e["ts"]), float(e["dur"]),
              str(e.get("args", {}).get("hlo_op", "")))
        for e in found
    ]  # fmt: skip


def own_times(events: Iterable[Event]) -> list[tuple[Event, float]]:
    """Every event's duration less that of the events inside it on its lane."""
    out: list[tuple[Event, float]] = []
    lanes: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        lanes.setdefault(event.lane, []).append(event)
    for lane in lanes.values():
        lane.sort(key=lambda e: (e.start, -e.duration))
        times, open_events = [e.duration for e in lane], []
        for i, event in enumerate(lane):
            while open_events and lane[open_events[-1]].start + lane[open_events[-1]].duration <= event.start + 1e-9:
                open_events.pop()
            if open_events:
                times[open_events[-1]] -= event.duration
            open_events.append(i)
        out += [(event, max(t, 0.0)) for event, t in zip(lane, times)]
    return out


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds by class of kernel, and of the kernels that took most, by name."""

    classes: dict[str, float]
    top: tuple[tuple[str, float], ...] = ()

    @property
    def busy(self) -> float:
        """Milliseconds of all kernels."""
        return sum(self.classes.values())


def breakdown(
    trace: Iterable[dict[str, Any]], program: dict[str, Instruction] | None = None, steps: int = 1
) -> Breakdown:
    """A trace's time on the device by class, a step; `program` from `instructions` where JAX compiled it."""
    program = program or {}
    kernels = {re.sub(r"[.\-]", "_", name): name for name in program}  # a fusion's kernel has its name
    classes, names = dict.fromkeys(CLASSES, 0.0), {}
    for event, time in own_times(device_events(trace)):
        known = event.instruction or kernels.get(re.sub(r"[.\-]", "_", event.name), "")
        kind = class_of(program[known]) if known in program else class_of_kernel(event.name)
        if kind is not None:
            classes[kind] += time / 1e3 / steps
            names[event.name] = names.get(event.name, 0.0) + time / 1e3 / steps
    return Breakdown(classes, tuple(sorted(names.items(), key=lambda item: -item[1])[:12]))
