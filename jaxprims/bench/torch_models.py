"""The models in plain torch.nn, with the layer sizes of `jaxprims.models`, and their training step.

Channels last in memory, autocast for bf16 and f16, SGD with momentum in one fused kernel: as a PyTorch user would write it to be
fast. The initial values are PyTorch's own; what a step computes is the same. Needs torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jaxprims.bench.model_rows import ModelRow

Shape = tuple[int, ...]

# --- ResNet ---------------------------------------------------------------------------------------------------------------


def conv_norm(cin: int, cout: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(cin, cout, size, stride, (size - 1) // 2, bias=False), nn.BatchNorm2d(cout, eps=1e-5, momentum=0.1)
    )


class Residual(nn.Module):
    """``relu(norm(...conv(x)) + shortcut(x))``."""

    def __init__(self, cin: int, filters: int, stride: int, bottleneck: bool):
        super().__init__()
        cout = 4 * filters if bottleneck else filters
        sizes = (
            [(filters, 1, 1), (filters, 3, stride), (cout, 1, 1)] if bottleneck else [(cout, 3, stride), (cout, 3, 1)]
        )
        layers: list[nn.Module] = []
        c = cin
        for k, size, s in sizes:
            layers += [conv_norm(c, k, size, s), nn.ReLU(inplace=True)]
            c = k
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Identity() if stride == 1 and cin == cout else conv_norm(cin, cout, 1, stride)

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(
    shape: Shape, stage_sizes: Sequence[int], bottleneck: bool, width: int = 64, num_classes: int = 1000
) -> nn.Module:
    """ResNet-18 or -50, version 1.5."""
    layers: list[nn.Module] = [conv_norm(shape[-1], width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    c = width
    for stage, count in enumerate(stage_sizes):
        for i in range(count):
            filters = width * 2**stage
            layers.append(Residual(c, filters, 2 if stage and not i else 1, bottleneck))
            c = filters * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, num_classes))


# --- AlexNet --------------------------------------------------------------------------------------------------------------


def alexnet(shape: Shape, num_classes: int = 1000, width: int = 96, hidden: int = 4096) -> nn.Module:
    """Caffe's bvlc_reference, without dropout."""
    w, v = width, width * 8 // 3
    size = (shape[1] - 11) // 4 + 1
    for _ in range(3):
        size = (size - 3) // 2 + 1

    def conv(cin: int, cout: int, k: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(cin, cout, k, stride, k // 2 if stride == 1 else 0, groups=groups), nn.ReLU(inplace=True)]

    def pool_norm() -> list[nn.Module]:
        return [nn.MaxPool2d(3, 2), nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)]

    return nn.Sequential(
        *conv(shape[-1], w, 11, 4), *pool_norm(), *conv(w, v, 5, groups=2), *pool_norm(), *conv(v, 4 * w, 3),
        *conv(4 * w, 4 * w, 3, groups=2), *conv(4 * w, v, 3, groups=2), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(v * size**2, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden), nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )  # fmt: skip


# --- ConvNeXt -------------------------------------------------------------------------------------------------------------


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of N C H W, which are last in memory."""

    def forward(self, input: Any) -> Any:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """``x + gamma * pointwise(gelu(pointwise(norm(depthwise(x)))))``; the products see the channels last."""

    def __init__(self, c: int):
        super().__init__()
        self.depthwise = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.mix = nn.Sequential(nn.LayerNorm(c, eps=1e-6), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.gamma = nn.Parameter(torch.full((c,), 1e-6))

    def forward(self, x: Any) -> Any:
        y = self.mix(self.depthwise(x).permute(0, 2, 3, 1)) * self.gamma.to(x.dtype)
        return x + y.permute(0, 3, 1, 2)


class Mean(nn.Module):
    """Over the image."""

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3))


def convnext(
    shape: Shape,
    depths: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    num_classes: int = 1000,
) -> nn.Module:
    """ConvNeXt-T, without stochastic depth."""
    layers: list[nn.Module] = [nn.Conv2d(shape[-1], widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6)]
    for i, (depth, width) in enumerate(zip(depths, widths)):
        if i:
            layers += [LayerNorm2d(widths[i - 1], eps=1e-6), nn.Conv2d(widths[i - 1], width, 2, 2)]
        layers += [ConvNeXtBlock(width) for _ in range(depth)]
    return nn.Sequential(*layers, Mean(), nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], num_classes))


# --- U-Net blocks ---------------------------------------------------------------------------------------------------------


class TimeBlock(nn.Module):
    """``shortcut(x) + conv(silu(norm(conv(silu(norm(x))) + dense(silu(time)))))``."""

    def __init__(self, cin: int, c: int, groups: int, time: int):
        super().__init__()
        self.dense = nn.Linear(time, c)
        self.norm1, self.conv1 = nn.GroupNorm(groups, cin, eps=1e-5), nn.Conv2d(cin, c, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, c, eps=1e-5), nn.Conv2d(c, c, 3, padding=1)
        self.shortcut = nn.Identity() if cin == c else nn.Conv2d(cin, c, 1)

    def forward(self, x: Any, time: Any) -> Any:
        y = self.conv1(F.silu(self.norm1(x))) + self.dense(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class UNetBlock(nn.Module):
    """One level of a diffusion U-Net, at time 0."""

    def __init__(self, shape: Shape, features: int = 320, groups: int = 32):
        super().__init__()
        f, c = features, shape[-1]
        self.features = f
        self.time = nn.Sequential(nn.Linear(f, 4 * f), nn.SiLU(), nn.Linear(4 * f, 4 * f))
        self.first = TimeBlock(c, f, groups, 4 * f)
        self.down = nn.Conv2d(f, 2 * f, 3, 2, 1)
        self.low = nn.ModuleList([TimeBlock(2 * f, 2 * f, groups, 4 * f) for _ in range(2)])
        self.up = nn.Conv2d(2 * f, f, 3, padding=1)
        self.last = TimeBlock(2 * f, f, groups, 4 * f)
        self.out = nn.Conv2d(f, c, 3, padding=1)

    def forward(self, x: Any) -> Any:
        half = self.features // 2
        angles = torch.zeros(x.shape[0], half, device=x.device)  # of time 0, whatever the frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        skip = self.first(x, time)
        y = self.down(skip)
        for block in self.low:
            y = block(y, time)
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.out(self.last(torch.cat([y, skip], 1), time))


def two_convs(cin: int, c: int) -> list[nn.Module]:
    """Twice 3 x 3 x 3, batch norm, ReLU."""

    def one(k: int) -> list[nn.Module]:
        return [nn.Conv3d(k, c, 3, padding=1, bias=False), nn.BatchNorm3d(c, eps=1e-5), nn.ReLU(inplace=True)]

    return one(cin) + one(c)


class UNet3DBlock(nn.Module):
    """One level of a 3-D U-Net."""

    def __init__(self, shape: Shape, features: int = 64):
        super().__init__()
        f, c = features, shape[-1]
        self.first = nn.Sequential(*two_convs(c, f))
        self.low = nn.Sequential(nn.MaxPool3d(2), *two_convs(f, 2 * f), nn.ConvTranspose3d(2 * f, f, 2, 2))
        self.last = nn.Sequential(*two_convs(2 * f, f), nn.Conv3d(f, c, 1))

    def forward(self, x: Any) -> Any:
        skip = self.first(x)
        return self.last(torch.cat([self.low(skip), skip], 1))


# --- sequences and agents -------------------------------------------------------------------------------------------------


class RMSNorm(nn.RMSNorm):
    """With its parameter in x's dtype, without which PyTorch has no fused kernel under autocast."""

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class CausalConvBlock(nn.Module):
    """``x + out(silu(conv(u)) * silu(gate))`` with ``u, gate = in(norm(x))``; x (N, L, C)."""

    def __init__(self, shape: Shape, expand: int = 2, window: int = 4):
        super().__init__()
        c, inner = shape[-1], expand * shape[-1]
        self.norm, self.inside = RMSNorm(c, eps=1e-6), nn.Linear(c, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, window, padding=window - 1, groups=inner)
        self.out = nn.Linear(inner, c, bias=False)

    def forward(self, x: Any) -> Any:
        u, gate = self.inside(self.norm(x)).chunk(2, -1)
        u = self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(F.silu(u) * F.silu(gate))


class AgentDense(nn.Module):
    """A dense layer for each agent: (agents, N, cin) -> (agents, N, cout)."""

    def __init__(self, agents: int, cin: int, cout: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(agents, cin, cout) / cin**0.5)
        self.bias = nn.Parameter(torch.zeros(agents, 1, cout))

    def forward(self, x: Any) -> Any:
        return torch.baddbmm(self.bias, x, self.weight)


class DQN(nn.Module):
    """Deep Q-learning's network for all agents at once: x (N, agents * 4, H, W), a group of channels for each agent."""

    def __init__(self, shape: Shape, actions: int = 18, width: int = 32, hidden: int = 512):
        super().__init__()
        self.agents, _, size, _, c = shape
        convs: list[nn.Module] = []
        for features, k, stride in ((width, 8, 4), (2 * width, 4, 2), (2 * width, 3, 1)):
            convs += [
                nn.Conv2d(self.agents * c, self.agents * features, k, stride, groups=self.agents),
                nn.ReLU(inplace=True),
            ]
            c, size = features, (size - k) // stride + 1
        self.convs = nn.Sequential(*convs)
        self.dense = nn.Sequential(
            AgentDense(self.agents, c * size**2, hidden), nn.ReLU(), AgentDense(self.agents, hidden, actions)
        )

    def forward(self, x: Any) -> Any:
        y = self.convs(x)  # (N, agents * features, P, Q)
        return self.dense(y.reshape(y.shape[0], self.agents, -1).transpose(0, 1))


# --- registry -------------------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": functools.partial(resnet, stage_sizes=(2, 2, 2, 2), bottleneck=False),
    "resnet50": functools.partial(resnet, stage_sizes=(3, 4, 6, 3), bottleneck=True),
    "alexnet": alexnet,
    "convnext_t": convnext,
    "unet_block": UNetBlock,
    "unet3d_block": UNet3DBlock,
    "causal_conv": CausalConvBlock,
    "dqn": DQN,
}


def build(name: str, shape: Shape, options: Mapping[str, Any]) -> nn.Module:
    """The model of a name of the registry: ``shape`` of its input in JAX, ``options`` of `jaxprims.models.make`."""
    if name not in MODELS:
        raise ValueError(f"{name} has no PyTorch definition")
    return MODELS[name](shape=shape, **options)


def data(row: ModelRow, device: str, classes: int | None, target_shape: Shape) -> tuple[Any, Any]:
    """Random input and target: labels of so many classes, or values; images channels last in memory."""
    dtype = DTYPES[row.dtype]
    x = torch.randn(row.shape, device=device).to(dtype)
    if row.model == "dqn":  # (agents, N, H, W, 4) -> (N, agents * 4, H, W)
        agents, n, h, w, c = row.shape
        x = x.permute(1, 2, 3, 0, 4).reshape(n, h, w, agents * c)
    channels = x.ndim > 3  # sequences stay (N, L, C)
    if classes is not None:
        target = torch.randint(classes, row.shape[:1], device=device)
    else:
        target = torch.randn(target_shape, device=device).to(dtype)
        target = channels_first(target) if channels and target.ndim > 3 else target
    return (channels_first(x) if channels else x), target


# --- training -------------------------------------------------------------------------------------------------------------

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def channels_first(x: Any) -> Any:
    """(N, spatial, C) -> (N, C, spatial) as a view: channels-last memory."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1))


class Training:
    """A model with synthetic data on `device` and its training step."""

    def __init__(self, row: ModelRow, device: str, compiled: bool = False):
        from jaxprims.models import MODELS as SPECS

        spec = SPECS[row.model]
        options = dict(spec.small.options) if row.small else {}
        classes = None if spec.classes == "regression" else options.get("num_classes", spec.classes)
        x, target = data(row, device, classes, spec.target_shape(row.shape))
        model: Any = build(row.model, row.shape, options).to(device)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if x.ndim in formats:
            model = model.to(memory_format=formats[x.ndim])
        self.model = model.train()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        dtype = DTYPES[row.dtype]

        def loss() -> Any:
            mixed = torch.autocast(device, dtype=dtype) if dtype != torch.float32 else contextlib.nullcontext()
            with mixed:
                y = model(x)
            if target.is_floating_point():
                return F.mse_loss(y.float(), target.float())
            return F.cross_entropy(y.float(), target)

        self._loss = torch.compile(loss, dynamic=False) if compiled else loss

    def step(self) -> Any:
        """One step; the loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()
