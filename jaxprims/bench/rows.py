"""The rows of the benchmark: named shapes, what each must compute (FLOPs) and move (bytes).

Names of sizes: N images, H (W, D) in, C channels in, K channels out, R (S, T) window, P (Q, O) out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

ITEMSIZE = {"bf16": 2, "f16": 2, "tf32": 4, "f32": 4}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "tf32": "float32", "f32": "float32"}
CONV_DIRECTIONS = ("fwd", "dgrad", "wgrad")
MEM_DIRECTIONS = ("fwd", "bwd", "fwd+bwd")

# A batch norm whose x is larger than this reads it twice: registers and shared memory of a large GPU hold no more.
ON_CHIP = 40e6

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ConvRow:
    """A convolution, channels last unless ``layout`` says otherwise. Equal (low, high) padding on both sides."""

    name: str
    n: int
    c: int
    size: Shape  # (H, W, ...)
    k: int
    window: Shape
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False  # conv_transpose with PyTorch's meaning of `pad` and output padding stride - 1
    batch: int = 0  # of separate filters (vmap), 0: none
    batch_of: str = ""  # "filters": x and w have the batch axis. "samples": one dW for each of `batch` images
    layout: str = "NHWC"
    dtypes: tuple[str, ...] = ("bf16",)
    directions: tuple[str, ...] = CONV_DIRECTIONS
    group: str = "other"
    quick: bool = False

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def out(self) -> Shape:
        d, s, p = self.dilation, self.stride, self.pad
        if self.transposed:
            return tuple((h - 1) * s + (r - 1) * d + 1 - 2 * p + s - 1 for h, r in zip(self.size, self.window))
        return tuple((h + 2 * p - (r - 1) * d - 1) // s + 1 for h, r in zip(self.size, self.window))

    @property
    def shape(self) -> str:
        """As in tables: "N128 C3 128^2 K96 11^2 s2 p3"."""
        text = f"N{self.n} C{self.c} {_power(self.size)} K{self.k} {_power(self.window)}"
        for letter, value, default in (
            ("s", self.stride, 1),
            ("p", self.pad, 0),
            ("d", self.dilation, 1),
            ("g", self.groups, 1),
        ):
            text += f" {letter}{value}" if value != default else ""
        text += " transposed" if self.transposed else ""
        return f"{self.batch} x ({text})" if self.batch else text

    def x_shape(self) -> Shape:
        return self._lead(self._image(self.n, self.c, self.size))

    def y_shape(self) -> Shape:
        return self._lead(self._image(self.n, self.k, self.out))

    def w_shape(self) -> Shape:
        c, k = self.c // self.groups, self.k
        w = (*self.window, c, k) if self.channels_last else (k, c, *self.window)
        return (self.batch, *w) if self.batch else w

    @property
    def channels_last(self) -> bool:
        return self.layout == "NHWC"

    def _image(self, n: int, c: int, size: Shape) -> Shape:
        return (n, *size, c) if self.channels_last else (n, c, *size)

    def _lead(self, shape: Shape) -> Shape:
        return (self.batch, *shape) if self.batch else shape

    def operands(self, direction: str) -> tuple[Shape, Shape]:
        """Shapes of what a direction reads: fwd (x, w), dgrad (w, dy), wgrad (x, dy)."""
        x, w, y = self.x_shape(), self.w_shape(), self.y_shape()
        return {"fwd": (x, w), "dgrad": (w, y), "wgrad": (x, y)}[direction]

    def flops(self) -> int:
        """2 N P Q K C R S / groups, the same in every direction; for a transposed one every input meets every tap."""
        places = self.size if self.transposed else self.out
        per = 2 * self.n * math.prod(places) * self.k * self.c * math.prod(self.window) // self.groups
        return per * max(self.batch, 1)

    def needed_flops(self) -> int:
        """`flops` without the products with padding."""
        pairs = 1
        for h, r, p in zip(self.size, self.window, self.out):
            o, t = np.arange(p)[:, None], np.arange(r)[None] * self.dilation
            if self.transposed:
                at = o + t - ((r - 1) * self.dilation - self.pad)
                pairs *= int(((at >= 0) & (at <= (h - 1) * self.stride) & (at % self.stride == 0)).sum())
            else:
                at = o * self.stride + t - self.pad
                pairs *= int(((at >= 0) & (at < h)).sum())
        return 2 * self.n * pairs * self.k * self.c // self.groups * max(self.batch, 1)

    def bytes(self, dtype: str, direction: str = "fwd") -> int:
        """x, w and y once each: the same in every direction."""
        del direction
        elements = sum(math.prod(s) for s in (self.x_shape(), self.w_shape(), self.y_shape()))
        return elements * ITEMSIZE[dtype]

    def unbatched(self) -> ConvRow | None:
        """The same arithmetic as one ordinary convolution: every image with the same filters."""
        return replace(self, n=self.n * self.batch, batch=0, batch_of="") if self.batch else None

    def tiny(self) -> ConvRow:
        """The same kind of row in a size for a CPU."""
        g = min(self.groups, 2)
        c = g * min(self.c // self.groups, 2)
        k = g * min(self.k // self.groups, 2)
        window = tuple(min(r, 3) for r in self.window)
        d = min(self.dilation, 2)
        pad = min(self.pad, (window[0] - 1) * d)
        size = tuple(min(h, (window[0] - 1) * d + 3) for h in self.size)
        return replace(
            self, n=min(self.n, 2), c=c, k=k, groups=g, window=window, dilation=d, pad=pad, size=size,
            stride=min(self.stride, window[0]), batch=min(self.batch, 3),
        )  # fmt: skip


@dataclass(frozen=True)
class MemRow:
    """An op that is bound by memory. `kind` names the op in the modules beside this one, `options` its settings."""

    name: str
    kind: str
    dims: Shape
    options: tuple[tuple[str, object], ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "f32")
    directions: tuple[str, ...] = MEM_DIRECTIONS
    group: str = "other"
    quick: bool = False

    def option(self, name: str, default: object = None) -> object:
        return dict(self.options).get(name, default)

    @property
    def shape(self) -> str:
        more = " ".join(f"{k}={v}" for k, v in self.options if v is not None)
        return "x".join(map(str, self.dims)) + (f" {more}" if more else "")

    def y_shape(self) -> Shape:
        if self.kind in ("max_pool", "avg_pool"):
            w, s, p = (int(self.option(o)) for o in ("window", "stride", "pad"))  # type: ignore[call-overload]
            n, *size, c = self.dims
            return (n, *((h + 2 * p - w) // s + 1 for h in size), c)
        if self.kind == "global_avg_pool":
            return (self.dims[0], self.dims[-1])
        if self.kind == "transpose_layout":
            return (self.dims[0], self.dims[-1], *self.dims[1:-1])
        return self.dims

    def flops(self) -> int:
        return 0

    def needed_flops(self) -> int:
        return 0

    def bytes(self, dtype: str, direction: str) -> int:
        """Each input once and each output once.

        Batch norm that does not fit on chip: x (backward: x and dy) twice. Max-pool's backward reads dy and a one-byte
        index that the forward of "fwd+bwd" writes. Other backwards read x (or y) and dy and write dx; of sums, averages
        and changes of layout they read dy alone. Scale and bias are not counted.
        """
        size = ITEMSIZE[dtype]
        x, y = math.prod(self.dims) * size, math.prod(self.y_shape()) * size
        # A residual: read, and its gradient written; the sum beside y of row norms, or y read again for the ReLU's mask.
        extra = 2 * x if self.option("residual") else 0
        reads = 2 if self.kind == "batch_norm" and x > ON_CHIP else 1
        fwd = reads * x + y + (extra if self.kind != "batch_norm" else extra // 2)
        index = 0
        if self.kind == "max_pool":
            index = y // size
            bwd = y + index + x
        elif self.kind in ("avg_pool", "global_avg_pool", "transpose_layout"):
            bwd = y + x
        else:
            bwd = reads * (x + y) + x + (extra if self.kind == "batch_norm" else extra // 2)
        return {"fwd": fwd, "bwd": bwd, "fwd+bwd": fwd + index + bwd}[direction]

    def tiny(self) -> MemRow:
        groups = {"group_norm": 4}.get(self.kind)
        options = tuple((k, groups if k == "groups" else v) for k, v in self.options)
        dims = (min(self.dims[0], 2), *(min(d, 6) for d in self.dims[1:-1]), min(self.dims[-1], 8))
        return replace(self, dims=dims, options=options)


Row = ConvRow | MemRow


def _power(sizes: Shape) -> str:
    return f"{sizes[0]}^{len(sizes)}" if len(set(sizes)) == 1 else "x".join(map(str, sizes))


def _conv(name: str, n: int, c: int, h: int, k: int, r: int, rank: int = 2, **more: object) -> ConvRow:
    return ConvRow(name, n, c, (h,) * rank, k, (r,) * rank, **more)  # type: ignore[arg-type]


# --- convolution ----------------------------------------------------------------------------------------------------------

PAPER = {"paper1": (3, 128, 96, 11), "paper2": (64, 64, 128, 9), "paper3": (128, 32, 128, 9), "paper4": (128, 16, 128, 7), "paper5": (384, 13, 384, 3)}  # fmt: skip
RESNET50 = {  # name: C, H, K, R, stride, pad
    "l1a": (64, 56, 64, 1, 1, 0), "l1b": (64, 56, 64, 3, 1, 1), "l1c": (64, 56, 256, 1, 1, 0), "l1d": (256, 56, 64, 1, 1, 0),
    "l2b": (128, 56, 128, 3, 2, 1), "l2b2": (128, 28, 128, 3, 1, 1), "l2c": (128, 28, 512, 1, 1, 0), "l2d": (256, 56, 512, 1, 2, 0),
    "l3b": (256, 14, 256, 3, 1, 1), "l3c": (256, 14, 1024, 1, 1, 0), "l4b": (512, 7, 512, 3, 1, 1), "l4c": (512, 7, 2048, 1, 1, 0),
}  # fmt: skip


def _dense() -> list[ConvRow]:
    rows = [
        _conv(name, 128, *s, dtypes=("bf16", "tf32", "f32"), group="paper", quick=True) for name, s in PAPER.items()
    ]
    rows += [
        _conv(f"{name}-nchw", 128, *s, dtypes=("tf32",), layout="NCHW", group="paper") for name, s in PAPER.items()
    ]
    for n in (16, 32, 64):  # the table of batch sizes is forward; N = 16 and 128 have their gradients too
        directions = CONV_DIRECTIONS if n == 16 else ("fwd",)
        rows += [_conv(f"{name}-n{n}", n, *s, group="paper-n", directions=directions) for name, s in PAPER.items()]
    rows.append(_conv("rn50-stem", 256, 3, 224, 64, 7, stride=2, pad=3, group="resnet50", quick=True))
    for name, (c, h, k, r, stride, pad) in RESNET50.items():
        dtypes = ("bf16", "f32") if r == 3 else ("bf16",)
        quick = name in ("l1b", "l2b", "l4b", "l4c")
        rows.append(
            _conv(f"rn50-{name}", 256, c, h, k, r, stride=stride, pad=pad, dtypes=dtypes, group="resnet50", quick=quick)
        )
    return rows


DEPTHWISE = [
    _conv("dw-convnext7", 128, 192, 28, 192, 7, pad=3, groups=192, quick=True),
    _conv("dw-convnext7b", 128, 96, 56, 96, 7, pad=3, groups=96),
    _conv("dw-mobile3", 256, 144, 56, 144, 3, pad=1, groups=144),
    _conv("dw-mobile3s2", 256, 144, 56, 144, 3, stride=2, pad=1, groups=144),
    _conv("dw-f32", 128, 192, 28, 192, 7, pad=3, groups=192, dtypes=("f32",)),
    _conv("resnext", 128, 128, 56, 128, 3, pad=1, groups=32),
    _conv("resnext3", 128, 512, 14, 512, 3, pad=1, groups=32),
    _conv("dw1d-mamba", 8, 4096, 2048, 4096, 4, 1, pad=3, groups=4096),
]
DEPTHWISE = [replace(row, group="grouped" if row.name.startswith("resnext") else "depthwise") for row in DEPTHWISE]

# The rest of the depthwise rows: larger windows, dilations of which none should cost more, sizes that divide by nothing.
DEPTHWISE_MORE = [
    _conv("dw-5", 128, 240, 28, 240, 5, pad=2, groups=240),
    _conv("dw-31", 64, 256, 32, 256, 31, pad=15, groups=256),
    _conv("dw-odd3", 61, 147, 53, 147, 3, pad=1, groups=147),
    _conv("dw-3-f32", 256, 144, 56, 144, 3, pad=1, groups=144, dtypes=("f32",)),
    _conv("dw-multiplier2", 128, 96, 56, 192, 3, pad=1, groups=96),
    _conv("dw3d", 8, 64, 32, 64, 3, 3, pad=1, groups=64),
    *(_conv(f"dw1d-d{d}", 8, 2048, 4096, 2048, 4, 1, pad=3 * d, dilation=d, groups=2048) for d in (1, 2, 4, 64)),
]
DEPTHWISE_MORE = [replace(row, group="depthwise") for row in DEPTHWISE_MORE]

OTHER = [
    _conv("dilated", 32, 256, 56, 256, 3, pad=4, dilation=4),
    _conv("dilated2", 64, 128, 28, 128, 3, pad=2, dilation=2),
    _conv("vit-patch", 128, 3, 224, 768, 16, stride=16),
    _conv("transposed5s2", 64, 128, 32, 64, 5, stride=2, pad=2, transposed=True),
    _conv("c3d", 8, 64, 64, 64, 3, 3, pad=1),
    _conv("c3d-32", 8, 32, 64, 32, 3, 3, pad=1),
    _conv("c3d-in", 8, 1, 64, 32, 3, 3, pad=1, dtypes=("tf32",)),
    _conv("c1d", 32, 512, 4096, 512, 3, 1, pad=1),
]

BATCHED = [
    _conv("b-ensemble", 256, 3, 32, 64, 3, pad=1, batch=10, batch_of="filters", quick=True),
    _conv("b-dqn1", 32, 4, 84, 32, 8, stride=4, batch=16, batch_of="filters"),
    _conv("b-dqn2", 32, 32, 20, 64, 4, stride=2, batch=16, batch_of="filters"),
    _conv("b-dqn3", 32, 64, 9, 64, 3, batch=16, batch_of="filters"),
    _conv("b-sample-dw", 1, 128, 28, 128, 3, pad=1, batch=64, batch_of="samples", directions=("wgrad",)),
]
BATCHED = [replace(row, group="batched") for row in BATCHED]

CONV: tuple[Row, ...] = (*_dense(), *DEPTHWISE, *OTHER, *BATCHED)


# --- bound by memory ------------------------------------------------------------------------------------------------------


def _mem(name: str, kind: str, dims: Shape, *, dtypes: tuple[str, ...] = ("bf16", "f32"), quick: bool = False,
         group: str = "", directions: tuple[str, ...] = MEM_DIRECTIONS, **options: object) -> MemRow:  # fmt: skip
    return MemRow(name, kind, dims, tuple(options.items()), dtypes, directions, group or kind, quick)


IMAGES = (256, 112, 112, 64)
MEMBOUND: tuple[Row, ...] = (
    _mem("bn-56", "batch_norm", (256, 56, 56, 256), quick=True),
    _mem("bn-112", "batch_norm", IMAGES),
    _mem("bn-7", "batch_norm", (256, 7, 7, 2048)),
    _mem("bn-relu-56", "batch_norm", (256, 56, 56, 256), dtypes=("bf16",), activation="relu"),
    _mem("bn-add-relu-56", "batch_norm", (256, 56, 56, 256), dtypes=("bf16",), activation="relu", residual=True),
    _mem("bn-inference", "batch_norm_inference", (256, 56, 56, 256), directions=("fwd",), activation="relu"),
    *(
        _mem(f"{short}-{rows}x{d}", kind, (rows, d), quick=d == 4096)
        for rows, d in ((32768, 4096), (131072, 1024), (8192, 16384))
        for short, kind in (("ln", "layer_norm"), ("rms", "rms_norm"))
    ),
    _mem("ln-add-32768x4096", "layer_norm", (32768, 4096), dtypes=("bf16",), residual=True),
    _mem("rms-add-32768x4096", "rms_norm", (32768, 4096), dtypes=("bf16",), residual=True),
    _mem("gn-64", "group_norm", (32, 64, 64, 320), groups=32, quick=True),
    _mem("gn-silu-64", "group_norm", (32, 64, 64, 320), dtypes=("bf16",), groups=32, activation="silu"),
    _mem("in-128", "instance_norm", (32, 128, 128, 64)),
    _mem("lrn", "local_response_norm", (128, 55, 55, 96)),
    _mem("max3s2", "max_pool", IMAGES, window=3, stride=2, pad=1, quick=True),
    _mem("max2s2", "max_pool", IMAGES, window=2, stride=2, pad=0),
    _mem("avg3s1", "avg_pool", (128, 56, 56, 256), window=3, stride=1, pad=1),
    _mem("gap-7", "global_avg_pool", (1024, 7, 7, 2048)),
    _mem("softmax-32768x4096", "softmax", (32768, 4096), quick=True),
    _mem("softmax-131072x1000", "softmax", (131072, 1000)),
    _mem("log_softmax-4096x50257", "log_softmax", (4096, 50257)),
    _mem("relu-56", "bias_act", (256, 56, 56, 256), dtypes=("bf16",), activation="relu"),
    _mem("gelu-56", "bias_act", (256, 56, 56, 256), dtypes=("bf16",), activation="gelu"),
    _mem("nhwc-nchw", "transpose_layout", (256, 56, 56, 256)),
    # sizes that are multiples of nothing
    _mem("bn-odd", "batch_norm", (61, 37, 53, 333), group="odd"),
    _mem("ln-odd", "layer_norm", (30011, 3001), group="odd"),
    _mem("rms-odd", "rms_norm", (30011, 3001), group="odd"),
    _mem("gn-odd", "group_norm", (31, 61, 67, 318), groups=6, group="odd"),
    _mem("max3s2-odd", "max_pool", (251, 111, 109, 61), window=3, stride=2, pad=1, group="odd"),
    _mem("softmax-odd", "softmax", (30011, 3001), group="odd"),
    # a megabyte and less: launches
    _mem("bn-small", "batch_norm", (8, 14, 14, 256), group="small"),
    _mem("ln-small", "layer_norm", (512, 512), group="small", quick=True),
    _mem("rms-small", "rms_norm", (512, 512), group="small"),
    _mem("gn-small", "group_norm", (2, 16, 16, 320), groups=32, group="small"),
    _mem("max-small", "max_pool", (8, 28, 28, 64), window=3, stride=2, pad=1, group="small"),
    _mem("softmax-small", "softmax", (128, 1000), group="small"),
    *DEPTHWISE,
    *DEPTHWISE_MORE,
)
STANDING = frozenset(
    [*PAPER, *(f"{name}-{more}" for name in PAPER for more in ("n16", "nchw")), "rn50-stem", *(f"rn50-{name}" for name in RESNET50)]
    + [row.name for row in DEPTHWISE] + ["dilated", "c3d", "c3d-in", "c1d"]
    + ["bn-56", "bn-112", "bn-7", "gn-64", "lrn", "max3s2", "max2s2", "avg3s1"]
    + [f"{kind}-{size}" for kind in ("ln", "rms") for size in ("32768x4096", "131072x1024", "8192x16384")]
)  # fmt: skip
SUITES = {"conv": CONV, "membound": MEMBOUND}


@dataclass(frozen=True)
class Item:
    """One line of the result: a row in one dtype and one direction."""

    row: Row
    dtype: str
    direction: str

    @property
    def id(self) -> str:
        return f"{self.row.name} {self.dtype} {self.direction}"

    def moved(self) -> int:
        return self.row.bytes(self.dtype, self.direction)

    @property
    def standing(self) -> bool:
        """Among the rows that are compared from release to release; others come and go."""
        if isinstance(self.row, MemRow):
            return (
                self.row.name in STANDING and self.direction != "bwd"
            )  # a rival's is one program, forward and backward
        return self.row.name in STANDING

    @property
    def by_bytes(self) -> bool:
        """Measured in bytes: everything but dense convolution."""
        return isinstance(self.row, MemRow) or self.row.groups > 1


def select(
    suite: str,
    *,
    rows: str = "",
    dtypes: tuple[str, ...] = (),
    directions: tuple[str, ...] = (),
    quick: bool = False,
) -> list[Item]:
    """The items of a suite. `rows`: substrings of names or groups, separated by commas; an empty choice takes everything.

    `quick` takes the few rows marked so, unless `rows` names some. "bwd" takes dgrad and wgrad of convolutions along.

    >>> [item.id for item in select("conv", rows="paper5-n16", directions=("fwd",))]
    ['paper5-n16 bf16 fwd']
    """
    wanted = [word for word in rows.split(",") if word]
    if "bwd" in directions:
        directions = (*directions, "dgrad", "wgrad")
    items = []
    for row in SUITES[suite]:
        if wanted and not any(word in row.name or word == row.group for word in wanted):
            continue
        if quick and not wanted and not row.quick:
            continue
        # Rows of bf16 run in f16 too, where it is asked for.
        for dtype in (*row.dtypes, "f16") if "f16" in dtypes and "bf16" in row.dtypes else row.dtypes:
            if dtypes and dtype not in dtypes or quick and not dtypes and not wanted and dtype != row.dtypes[0]:
                continue
            items += [Item(row, dtype, d) for d in row.directions if not directions or d in directions]
    return items
