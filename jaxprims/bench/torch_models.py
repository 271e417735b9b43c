"""The models in plain torch.nn, with the layer sizes of `jaxprims.models`, and their training step.

Channels last in memory, autocast for bf16 and f16, SGD with momentum in one fused kernel: as a PyTorch user would write it to be
fast. The initial values are PyTorch's own; what a step computes is the same. Needs torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jaxprims.bench.model_rows import ModelRow

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
        sizes = [(filters, 1, 1), (filters, 3, stride), (cout, 1, 1)] if bottleneck else [(cout, 3, stride), (cout, 3, 1)]
        layers: list[nn.Module] = []
        c = cin
        for k, size, s in sizes:
            layers += [conv_norm(c, k, size, s), nn.ReLU(inplace=True)]
            c = k
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Identity() if stride == 1 and cin == cout else conv_norm(cin, cout, 1, stride)

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(stages: Sequence[int], bottleneck: bool, width: int = 64, num_classes: int = 1000, **_: Any) -> nn.Module:
    """ResNet-18 or -50, version 1.5."""
    layers: list[nn.Module] = [conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    c = width
    for stage, count in enumerate(stages):
        for i in range(count):
            filters = width * 2**stage
            layers.append(Residual(c, filters, 2 if stage and not i else 1, bottleneck))
            c = filters * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, num_classes))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": lambda **options: resnet((2, 2, 2, 2), False, **options),
    "resnet50": lambda **options: resnet((3, 4, 6, 3), True, **options),
}


def build(name: str, options: Mapping[str, Any]) -> nn.Module:
    """The model of a name of the registry, with the options of `jaxprims.models.make`."""
    if name not in MODELS:
        raise ValueError(f"{name} has no PyTorch definition")
    return MODELS[name](**options)


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
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        model: Any = build(row.model, options).to(device)
        if len(row.shape) in formats:
            model = model.to(memory_format=formats[len(row.shape)])
        self.model = model.train()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        dtype = DTYPES[row.dtype]
        x = channels_first(torch.randn(row.shape, device=device).to(dtype))
        if spec.classes == "regression":
            target = channels_first(torch.randn(spec.target_shape(row.shape), device=device).to(dtype))
        else:
            target = torch.randint(options.get("num_classes", spec.classes), row.shape[:1], device=device)

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
