"""ConvNeXt-T: depthwise 7 x 7 convolutions, layer norms, GELU.

Liu, Mao, Wu, Feichtenhofer, Darrell, Xie: A ConvNet for the 2020s (CVPR 2022), arXiv:2201.03545. Images are NHWC.

GELU is not fused into the layer in front of it: its slope needs the pre-activation, which the derivative would have to
compute by a second product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen

from jaxprims.models.base import Model, Part


class ConvNeXtBlock(Part):
    """``x + drop(gamma * pointwise(gelu(pointwise(norm(depthwise(x))))))``, with four times the channels inside.

    Attributes: scale_init: first value of gamma. pointwise: "dense" or "conv", a 1 x 1 convolution. drop: rate at which the
      whole branch of an image is left out in training (stochastic depth).
    """

    scale_init: float = 1e-6
    pointwise: str = "dense"
    drop: float = 0.0
    train: bool = True

    def mix(self, features: int) -> Any:
        if self.pointwise == "dense":
            return self.nn.Dense(features, dtype=self.dtype)
        return self.nn.Conv(features, (1, 1), dtype=self.dtype)

    @linen.compact
    def __call__(self, x: Any) -> Any:
        nn, c = self.nn, x.shape[-1]
        y = nn.Conv(c, (7, 7), padding=3, feature_group_count=c, dtype=self.dtype)(x)
        y = self.stretch(lambda block, y: block.mix(4 * c)(nn.LayerNorm(epsilon=1e-6, dtype=block.dtype)(y)), y)
        y = self.stretch(lambda block, y: block.mix(c)(nn.gelu(y, approximate=False)), y)
        gamma = self.param("gamma", linen.initializers.constant(self.scale_init), (c,))
        y = y * gamma.astype(self.dtype)
        y = nn.Dropout(self.drop, broadcast_dims=(1, 2, 3), deterministic=not self.train)(y)
        return x + y


class ConvNeXt(Model):
    """``model(x, train)`` with x (N, H, W, 3) -> logits (N, num_classes).

    Attributes:
      depths, widths: blocks and channels of each stage. num_classes: logits.
      scale_init, pointwise: as of :class:`ConvNeXtBlock`. drop: stochastic depth, growing from 0 to this rate (the paper: 0.1).
      keep_every: in recompute mode, of so many consecutive blocks one output is kept.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("convnext_t", layers="flax", depths=(1, 1), widths=(8, 16), num_classes=10)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> variables["params"]["ConvNeXtBlock_0"]["Conv_0"]["kernel"].shape
    (7, 7, 1, 8)
    """

    depths: Sequence[int] = (3, 3, 9, 3)
    widths: Sequence[int] = (96, 192, 384, 768)
    num_classes: int = 1000
    scale_init: float = 1e-6
    pointwise: str = "dense"
    drop: float = 0.0
    keep_every: int = 2

    @property
    def random(self) -> bool:
        return self.drop > 0

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        nn = self.nn
        if self.pointwise not in ("dense", "conv"):
            raise ValueError(f"pointwise={self.pointwise!r} is not known; give 'dense' or 'conv'.")
        norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        total, at = sum(self.depths), 0
        for stage, (depth, width) in enumerate(zip(self.depths, self.widths, strict=True)):
            if stage == 0:
                x = nn.Conv(width, (4, 4), (4, 4), padding="VALID", dtype=self.dtype)(x)
                x = norm()(x)
            else:
                x = nn.Conv(width, (2, 2), (2, 2), padding="VALID", dtype=self.dtype)(norm()(x))
            blocks = [
                functools.partial(
                    ConvNeXtBlock, **self.shared, scale_init=self.scale_init, pointwise=self.pointwise,
                    drop=self.drop * i / max(total - 1, 1), train=train, name=f"ConvNeXtBlock_{i}",
                )
                for i in range(at, at + depth)
            ]  # fmt: skip
            x = self.chain(blocks, x, self.keep_every)
            at += depth
        x = norm()(jnp.mean(x, axis=(1, 2)))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x)
