"""ResNet-18 and ResNet-50, as the ImageNet code of the Flax examples has them: the same parameter tree, the same numbers.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition (CVPR 2016), arXiv:1512.03385; version 1.5, whose bottleneck
has its stride in the 3 x 3 convolution. The last scale of every block starts at zero: Goyal et al., Accurate, Large Minibatch
SGD (2017), arXiv:1706.02677. Images are NHWC.

Each batch norm takes the ReLU behind it along, and the last one of a block the addition of the shortcut too, so that a
block of three convolutions is three convolutions and three norms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen

from jaxprims.models.base import Model, Part


class _Block(Part):
    """A residual block ``relu(norm(...conv(x)) + shortcut(x))``; the subclasses say which convolutions.

    Each stretch (norm, ReLU, convolution) begins at a convolution's output and ends at the next one's.
    """

    filters: int = 64
    strides: int = 1
    train: bool = True

    def conv(self, filters: int, size: int, strides: int = 1, name: str | None = None) -> Any:
        return self.nn.Conv(filters, (size, size), strides, use_bias=False, dtype=self.dtype, name=name)

    def norm(self, activation: str | None = "relu", name: str | None = None, **options: Any) -> Any:
        return self.nn.BatchNorm(
            use_running_average=not self.train, momentum=0.9, epsilon=1e-5, dtype=self.dtype, activation=activation,
            name=name, **options,
        )  # fmt: skip

    def convolutions(self) -> Sequence[tuple[int, int, int]]:
        """(filters, size, strides) of each."""
        raise NotImplementedError

    @linen.compact
    def __call__(self, x: Any) -> Any:
        first, *rest = self.convolutions()
        y = self.conv(*first)(x)
        for options in rest:
            y = self.stretch(lambda block, y, options=options: block.conv(*options)(block.norm()(y)), y)
        filters = rest[-1][0]
        if x.shape != y.shape:
            x = self.conv(filters, 1, self.strides, name="conv_proj")(x)
            x = self.norm(None, name="norm_proj")(x)
        return self.norm(scale_init=linen.initializers.zeros_init())(y, residual=x)


class ResNetBlock(_Block):
    """Two 3 x 3 convolutions (ResNet-18, -34)."""

    def convolutions(self) -> Sequence[tuple[int, int, int]]:
        return (self.filters, 3, self.strides), (self.filters, 3, 1)


class BottleneckResNetBlock(_Block):
    """1 x 1 down, 3 x 3, 1 x 1 up to four times the filters (ResNet-50 and deeper)."""

    def convolutions(self) -> Sequence[tuple[int, int, int]]:
        return (self.filters, 1, 1), (self.filters, 3, self.strides), (4 * self.filters, 1, 1)


class ResNet(Model):
    """A ResNet: ``model(x, train)`` with x (N, H, W, 3) -> logits (N, num_classes).

    Attributes:
      stage_sizes: blocks of each stage. bottleneck: which block. width: filters of the first stage.
      num_classes: logits.
      keep_every: in recompute mode, of so many consecutive blocks one output is kept and the others are computed again.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("resnet18", layers="flax", width=8, num_classes=10)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> variables["params"]["conv_init"]["kernel"].shape
    (7, 7, 3, 8)
    """

    stage_sizes: Sequence[int] = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    num_classes: int = 1000
    keep_every: int = 2

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        nn = self.nn
        x = nn.Conv(
            self.width, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, dtype=self.dtype, name="conv_init"
        )(x)  # fmt: skip
        x = nn.BatchNorm(
            use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype, activation="relu", name="bn_init"
        )(x)  # fmt: skip
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")

        cls = BottleneckResNetBlock if self.bottleneck else ResNetBlock
        places = [(stage, i) for stage, size in enumerate(self.stage_sizes) for i in range(size)]
        blocks = [
            functools.partial(
                cls, **self.shared, filters=self.width * 2**stage, strides=2 if stage > 0 and i == 0 else 1, train=train,
                name=f"{cls.__name__}_{at}",
            )
            for at, (stage, i) in enumerate(places)
        ]  # fmt: skip
        x = self.chain(blocks, x, self.keep_every)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)


ResNet18 = functools.partial(ResNet, stage_sizes=(2, 2, 2, 2), bottleneck=False)
ResNet50 = functools.partial(ResNet, stage_sizes=(3, 4, 6, 3), bottleneck=True)
