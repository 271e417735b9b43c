"""The models by name, with the sizes at which they are measured and tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxprims.models import alexnet, convnext, dqn, resnet, sequence, unet
from jaxprims.models.base import Model
from jaxprims.models.layers import NAMESPACES
from jaxprims.models.memory import MODES

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """A size that a CPU runs in a second: options for :func:`make`, and the shape of the input."""

    options: Mapping[str, Any]
    shape: Shape


@dataclass(frozen=True)
class ModelSpec:
    """A model of the registry.

    Attributes:
      build: the model's constructor. options: those that every build of this name gets.
      input_shape: batch -> shape of x. classes: number of classes, or "regression".
      batch: the batch of the benchmark. small: a size for tests on a CPU.
      target_shape: for regression, shape of x -> shape of the target.
    """

    build: Callable[..., Model]
    input_shape: Callable[[int], Shape]
    classes: int | Literal["regression"]
    batch: int
    small: Small
    target_shape: Callable[[Shape], Shape] = field(default=lambda shape: shape)

    def data(
        self, key: jax.Array, batch: int | None = None, small: bool = False, dtype: Any = jnp.float32
    ) -> tuple[jax.Array, jax.Array]:
        """Random inputs and targets: of ``batch`` (default: the benchmark's) at full size, or the small ones."""
        shape = self.small.shape if small else self.input_shape(self.batch if batch is None else batch)
        k1, k2 = jax.random.split(key)
        x = jax.random.normal(k1, shape, dtype)
        if self.classes == "regression":
            return x, jax.random.normal(k2, self.target_shape(shape), dtype)
        classes = self.small.options["num_classes"] if small else self.classes
        return x, jax.random.randint(k2, shape[:1], 0, classes)


def _images(size: int) -> Callable[[int], Shape]:
    return lambda batch: (batch, size, size, 3)


MODELS: dict[str, ModelSpec] = {
    "resnet18": ModelSpec(
        resnet.ResNet18, _images(224), 1000, 256, Small({"stage_sizes": (1, 1), "width": 8, "num_classes": 10}, (4, 32, 32, 3)),
    ),
    "resnet50": ModelSpec(
        resnet.ResNet50, _images(224), 1000, 256, Small({"stage_sizes": (1, 1), "width": 4, "num_classes": 10}, (4, 32, 32, 3)),
    ),
    "alexnet": ModelSpec(
        alexnet.AlexNet, _images(227), 1000, 256, Small({"width": 24, "hidden": 32, "num_classes": 10}, (4, 67, 67, 3))
    ),
    "convnext_t": ModelSpec(
        convnext.ConvNeXt, _images(224), 1000, 128,
        Small({"depths": (1, 2), "widths": (8, 16), "num_classes": 10}, (4, 32, 32, 3)),
    ),
    "unet_block": ModelSpec(
        unet.UNetBlock, lambda batch: (batch, 64, 64, 320), "regression", 16,
        Small({"features": 8, "groups": 2}, (2, 8, 8, 8)),
    ),
    "unet3d_block": ModelSpec(
        unet.UNet3DBlock, lambda batch: (batch, 64, 64, 64, 64), "regression", 4, Small({"features": 4}, (2, 8, 8, 8, 2))
    ),
    "causal_conv": ModelSpec(
        sequence.CausalConvBlock, lambda batch: (batch, 2048, 2048), "regression", 8, Small({}, (2, 32, 8))
    ),
    "dqn": ModelSpec(
        dqn.DQN, lambda batch: (16, batch, 84, 84, 4), "regression", 32,
        Small({"width": 4, "hidden": 16}, (3, 2, 36, 36, 4)), target_shape=lambda shape: (*shape[:2], 18),
    ),
}  # fmt: skip


def make(
    name: str, layers: str = "jaxprims", dtype: Any = jnp.float32, memory: str = "default", **options: Any
) -> Model:
    """Build a model of :data:`MODELS`.

    Args:
      name: a key of MODELS. layers: "jaxprims" or "flax": the same definition on either, with the same parameters.
      dtype: of the computation; parameters and statistics are float32.
      memory: "default", or "recompute": keep the convolutions' outputs alone and compute what stands between them again in
        the backward pass (:mod:`jaxprims.models.memory`).
      options: attributes of the model's class, e.g. ``num_classes``.

    Raises ValueError for an unknown name, layers or memory.

    >>> make("resnet50", layers="flax", num_classes=10).num_classes
    10
    """
    if name not in MODELS:
        raise ValueError(f"name={name!r} is no model; there are {', '.join(MODELS)}.")
    for argument, value, known in (("layers", layers, NAMESPACES), ("memory", memory, MODES)):
        if value not in known:
            raise ValueError(f"{argument}={value!r} is not known; give one of {', '.join(map(repr, known))}.")
    return MODELS[name].build(layers=layers, dtype=dtype, memory=memory, **options)
