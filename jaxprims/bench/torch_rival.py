"""PyTorch on cuDNN: benchmark mode, channels last where the row is, the same device memory as JAX's arrays (DLPack).

Every function here imports torch when it is called. Timing replays one CUDA graph of a call per operand set between events;
where a program cannot be captured, its calls are enqueued back to back between the events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxprims.bench.programs import LRN
from jaxprims.bench.rows import ConvRow, Item, MemRow

TensorFn = Callable[..., Any]


def load() -> Any | None:
    """torch with its settings made, or None where it or its GPU is missing."""
    try:
        import torch

        if not torch.cuda.is_available():
            return None
    except Exception:  # a broken installation is no rival
        return None
    torch.backends.cudnn.benchmark = True
    return torch


def versions(torch: Any | None) -> dict[str, str]:
    if torch is None:
        return {"torch": "", "cudnn": ""}
    return {"torch": str(torch.__version__), "cudnn": str(torch.backends.cudnn.version())}


def release(torch: Any | None) -> None:
    """Gives cached memory back, so that JAX can have it."""
    if torch is not None:
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class TorchProgram:
    """`operands` of JAX arrays -> tensors; ``fn`` on what ``prepare`` makes of them; `results`: in the layout of JAX's."""

    operands: Callable[..., tuple[Any, ...]]
    fn: TensorFn
    results: Callable[[Any], list[Any]]
    prepare: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors
    grad: bool = False


# --- convolution ----------------------------------------------------------------------------------------------------------


def conv_programs(torch: Any, item: Item) -> dict[str, TorchProgram]:
    """By name; a 1-D convolution also as a 2-D one of height 1, for which channels last exists."""
    row = item.row
    assert isinstance(row, ConvRow)
    if row.rank == 1 and not row.batch:
        return {"torch": _conv(torch, row, item.direction, lift=True), "torch 1d": _conv(torch, row, item.direction)}
    return {"torch": _conv(torch, row, item.direction)}


def _conv(torch: Any, row: ConvRow, direction: str, lift: bool = False) -> TorchProgram:
    lead, last = (1 if row.batch else 0), row.channels_last
    rank = 2 if lift else row.rank
    spatial = list(range(row.rank))
    stride, pad, dilation = [row.stride] * rank, [row.pad] * rank, [row.dilation] * rank
    if lift:
        stride[0], pad[0], dilation[0] = 1, 0, 1
    extra = [row.stride - 1] * rank if row.transposed else [0] * rank
    memory = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank + 2)

    def axes(order: list[int]) -> list[int]:
        return list(range(lead)) + [lead + i for i in order]

    def image(t: Any) -> Any:  # JAX's layout -> N C spatial, as a view
        t = t.permute(axes([0, row.rank + 1, *(1 + i for i in spatial)])) if last else t
        return t.unsqueeze(lead + 2) if lift else t

    def image_back(t: Any) -> Any:
        t = t.squeeze(lead + 2) if lift else t
        return t.permute(axes([0, *(2 + i for i in spatial), 1])) if last else t

    def weight(t: Any) -> Any:  # HWIO -> O I spatial (transposed: I O spatial, reversed), stored as PyTorch stores it
        if last:
            r = row.rank
            order = [r, r + 1, *spatial] if row.transposed else [r + 1, r, *spatial]
            t = t.flip([lead + i for i in spatial]) if row.transposed else t
            t = t.permute(axes(order))
        elif row.transposed:
            t = t.transpose(lead, lead + 1).flip([lead + 2 + i for i in spatial])
        t = t.unsqueeze(lead + 2) if lift else t
        if last and memory is not None and not lead:
            return t.contiguous(memory_format=memory)
        return t.contiguous()

    def weight_back(t: Any) -> Any:
        t = t.squeeze(lead + 2) if lift else t
        if last:
            order = [*(2 + i for i in spatial), *([0, 1] if row.transposed else [1, 0])]
            t = t.permute(axes(order))
            return t.flip([lead + i for i in spatial]) if row.transposed else t
        return t.transpose(lead, lead + 1).flip([lead + 2 + i for i in spatial]) if row.transposed else t

    F = torch.nn.functional
    kind = f"conv{'_transpose' if row.transposed else ''}{rank}d"

    def fwd(x: Any, w: Any) -> Any:
        if row.transposed:
            return getattr(F, kind)(x, w, None, stride, pad, extra, row.groups, dilation)
        return getattr(F, kind)(x, w, None, stride, pad, dilation, row.groups)

    def backward(dy: Any, x: Any, w: Any, which: int) -> Any:
        mask = [which == 0, which == 1, False]
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, stride, pad, dilation, row.transposed, extra, row.groups, mask
        )[which]

    def wrap(fn: TensorFn) -> TensorFn:
        return torch.func.vmap(fn) if row.batch else fn

    unread: dict[str, Any] = {}  # the operand of which a gradient reads the shape alone

    def like(name: str, shape: Sequence[int], dy: Any, place: TensorFn) -> Any:
        if name not in unread:
            unread[name] = place(torch.empty(tuple(shape), dtype=dy.dtype, device=dy.device))
        return unread[name]

    if direction == "fwd":
        return TorchProgram(lambda x, w: (image(x), weight(w)), wrap(fwd), lambda y: [image_back(y)])
    if direction == "dgrad":
        call = wrap(lambda w, dy, x: backward(dy, x, w, 0))
        return TorchProgram(
            lambda w, dy: (weight(w), image(dy), like("x", row.x_shape(), dy, image)), call, lambda g: [image_back(g)]
        )
    call = wrap(lambda x, dy, w: backward(dy, x, w, 1))
    return TorchProgram(
        lambda x, dy: (image(x), image(dy), like("w", row.w_shape(), dy, weight)), call, lambda g: [weight_back(g)]
    )


# --- ops bound by memory --------------------------------------------------------------------------------------------------


def mem_programs(torch: Any, item: Item, compiled: bool = False) -> dict[str, TorchProgram]:
    """Eager, and with `compiled` through torch.compile too."""
    row = item.row
    assert isinstance(row, MemRow)
    op = mem_op(torch, row)
    programs = {"torch": _mem(torch, item, op)}
    if compiled:
        programs["torch.compile"] = _mem(torch, item, torch.compile(op, dynamic=False))
    return programs


def _mem(torch: Any, item: Item, op: TensorFn) -> TorchProgram:
    row = item.row
    assert isinstance(row, MemRow)
    images = len(row.dims) == 4 and row.kind not in ("bias_act", "transpose_layout")

    def place(t: Any) -> Any:
        return t.permute(0, 3, 1, 2) if images and t.ndim == 4 else t

    def back(t: Any) -> Any:
        return t.permute(0, 2, 3, 1) if images and t.ndim == 4 else t

    def results(out: Any) -> list[Any]:
        return [back(t) for t in (out if isinstance(out, (tuple, list)) else [out])]

    if item.direction == "fwd":
        return TorchProgram(lambda *a: tuple(place(t) for t in a), op, results)
    outs = 2 if row.option("residual") and row.kind != "batch_norm" else 1
    # Statistics that are given have no gradient in PyTorch: such rows are forward only.

    def operands(*arrays: Any) -> tuple[Any, ...]:
        tensors = [place(t).detach() for t in arrays]
        return (*(t.requires_grad_() for t in tensors[:-outs]), *tensors[-outs:])

    def forward(*tensors: Any) -> tuple[Any, Any, Any]:
        primals, dy = tensors[:-outs], tensors[-outs:]
        y = op(*primals)
        return (y if isinstance(y, tuple) else (y,)), primals, dy

    def pull(y: Any, primals: Any, dy: Any) -> Any:
        return torch.autograd.grad(y, primals, dy, retain_graph=True)

    def both(*tensors: Any) -> Any:
        y, primals, dy = forward(*tensors)
        return (*(t.detach() for t in y), *torch.autograd.grad(y, primals, dy))

    if item.direction == "bwd":
        return TorchProgram(operands, pull, results, forward, grad=True)
    return TorchProgram(operands, both, results, grad=True)


def mem_op(torch: Any, row: MemRow) -> TensorFn:
    """``op(x, *parameters[, residual]) -> y`` with images as N C H W in channels-last memory."""
    F, o = torch.nn.functional, row.option
    acts: dict[Any, TensorFn] = {
        None: lambda y: y, "relu": F.relu, "silu": F.silu, "gelu": lambda y: F.gelu(y, approximate="tanh"),
    }  # fmt: skip
    act, d = acts[o("activation")], (row.dims[-1],)

    def batch_norm(x: Any, scale: Any, bias: Any, *more: Any) -> Any:
        y = F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
        return act(y + more[0] if more else y)

    def layer_norm(x: Any, scale: Any, bias: Any, *more: Any) -> Any:
        h = x + more[0] if more else x
        y = F.layer_norm(h, d, scale, bias, 1e-6)
        return (y, h) if more else y

    def rms_norm(x: Any, scale: Any, *more: Any) -> Any:
        h = x + more[0] if more else x
        y = F.rms_norm(h, d, scale, 1e-6)
        return (y, h) if more else y

    lrn = (LRN["size"], LRN["alpha"], LRN["beta"], LRN["k"])
    ops: dict[str, TensorFn] = {
        "batch_norm": batch_norm,
        "batch_norm_inference": lambda x, mean, var, scale, bias: act(
            F.batch_norm(x, mean, var, scale, bias, eps=1e-5)
        ),
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "group_norm": lambda x, scale, bias: act(F.group_norm(x, o("groups"), scale, bias, 1e-6)),
        "instance_norm": lambda x, scale, bias: F.instance_norm(x, None, None, scale, bias, eps=1e-6),
        "local_response_norm": lambda x: F.local_response_norm(x, *lrn),
        "max_pool": lambda x: F.max_pool2d(x, o("window"), o("stride"), o("pad")),
        "avg_pool": lambda x: F.avg_pool2d(x, o("window"), o("stride"), o("pad")),
        "global_avg_pool": lambda x: x.mean((2, 3)),
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "bias_act": lambda x, b: act(x + b),
        "transpose_layout": lambda x: x.permute(0, 3, 1, 2).contiguous(),
    }
    return ops[row.kind]


def programs(torch: Any, item: Item, compiled: bool = False) -> dict[str, TorchProgram]:
    if isinstance(item.row, ConvRow):
        return conv_programs(torch, item)
    return mem_programs(torch, item, compiled)


# --- timing ---------------------------------------------------------------------------------------------------------------


class TorchRunner:
    """One call on each operand set, as a CUDA graph."""

    def __init__(self, torch: Any, program: TorchProgram, sets: Sequence[Sequence[Any]], dtype: str):
        self.torch, self.count = torch, len(sets)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype != "f32"
        self._sets = sets  # JAX's arrays, whose memory the tensors share
        stream = torch.cuda.Stream()
        self._graph = None
        with torch.cuda.stream(stream), torch.set_grad_enabled(program.grad):
            tensors = [program.operands(*(torch.from_dlpack(a) for a in arrays)) for arrays in sets]
            self._args = [program.prepare(*t) for t in tensors]
            self._fn = program.fn
            for _ in range(3):
                first = program.fn(*self._args[0])
            stream.synchronize()
            self.first = program.results(first)
            try:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    self._outs = [program.fn(*a) for a in self._args]
                self._graph = graph
            except Exception as error:  # a program that synchronises or allocates behind PyTorch's back
                self.note = f"no CUDA graph ({type(error).__name__}), calls back to back"
                torch.cuda.synchronize()
            else:
                self.note = ""
        self._stream, self._grad = stream, program.grad

    def call(self, repeats: int) -> float:
        """Seconds for `repeats` rounds over the sets."""
        torch = self.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream), torch.set_grad_enabled(self._grad):
            begin.record()
            for _ in range(repeats):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._outs = [self._fn(*a) for a in self._args]
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def outputs(self) -> list[Any]:
        """The first set's results as JAX arrays."""
        import jax.numpy as jnp

        self.torch.cuda.synchronize()
        return [jnp.from_dlpack(t.detach().contiguous()) for t in self.first]

    def drop_outputs(self) -> None:
        self.first = []


def matmul_rate(torch: Any, dtype: str, size: int) -> float:
    """FLOP/s of a square matrix product on random operands: the best of ten timings."""
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "f32": torch.float32}
    torch.backends.cuda.matmul.allow_tf32 = dtype != "f32"
    a, b = (torch.randn(size, size, device="cuda", dtype=kinds[dtype]) for _ in range(2))
    out = torch.empty(size, size, device="cuda", dtype=kinds[dtype])
    return 2.0 * size**3 / _best(torch, lambda: torch.matmul(a, b, out=out))


def copy_rate(torch: Any, size: int) -> float:
    """Bytes/s, read and written, of a copy of `size` bytes on the device."""
    a = torch.randint(0, 255, (size,), device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2.0 * size / _best(torch, lambda: b.copy_(a))


def _best(torch: Any, call: Callable[[], Any], rounds: int = 10, calls: int = 5) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return min(times)
