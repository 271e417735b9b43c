"""Blocks of U-Nets: the 2-D one of diffusion models (group norm and SiLU, time embedding), and the 3-D one of volumes.

Ho, Jain, Abbeel: Denoising Diffusion Probabilistic Models (NeurIPS 2020), arXiv:2006.11239, whose residual block this is;
Cicek, Abdulkadir, Lienkamp, Brox, Ronneberger: 3D U-Net (MICCAI 2016), arXiv:1606.06650. Channels are last.

Each group norm takes the SiLU behind it along, each batch norm the ReLU.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen

from jaxprims.models.base import Model, Part


def time_embedding(t: jax.Array, features: int) -> jax.Array:
    """``[cos(t f_0), ..., sin(t f_0), ...]`` (N, features) of times t (N,), frequencies from 1 down to 1e-4; features is even.

    >>> import jax.numpy as jnp
    >>> time_embedding(jnp.zeros(1), 4).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """
    half = features // 2
    angles = t.astype(jnp.float32)[:, None] * jnp.exp(-math.log(1e4) * jnp.arange(half) / half)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class TimeBlock(Part):
    """``shortcut(x) + conv(silu(norm(conv(silu(norm(x))) + dense(silu(time)))))``; the shortcut is a 1 x 1 convolution where
    the number of channels changes."""

    features: int = 320
    groups: int = 32

    @linen.compact
    def __call__(self, x: Any, time: Any) -> Any:
        nn = self.nn

        def norm_conv(block: TimeBlock, y: Any, shift: Any = None, residual: Any = None) -> Any:
            if shift is not None:
                y = y + shift[:, None, None, :]
            y = nn.GroupNorm(block.groups, epsilon=1e-5, dtype=block.dtype, activation="silu")(y)
            return nn.Conv(block.features, (3, 3), padding=1, dtype=block.dtype)(y, residual=residual)

        shift = nn.Dense(self.features, dtype=self.dtype)(nn.silu(time))
        y = self.stretch(norm_conv, x)
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), dtype=self.dtype, name="shortcut")(x)
        return self.stretch(norm_conv, y, shift, x)


class UNetBlock(Model):
    """One level of a diffusion U-Net: ``model(x, t=None, train=True)``, x (N, H, W, C) -> the same shape.

    Down: a residual block at full size, a convolution with stride 2 to twice the channels, two residual blocks; up: the nearest
    neighbour and a convolution, a residual block on that beside the skip, and the last convolution. H and W are even.

    Attributes: features: channels at full size, divisible by ``groups`` (of the group norms). t: times (N,); None: all 0.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("unet_block", layers="flax", features=8, groups=2)
    >>> x = jnp.ones((2, 8, 8, 8))
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), x, jnp.array([0, 500]))[0].shape
    (2, 8, 8, 8)
    """

    features: int = 320
    groups: int = 32
    target: ClassVar[str] = "value"

    @linen.compact
    def __call__(self, x: Any, t: Any = None, train: bool = True) -> Any:
        nn, f = self.nn, self.features
        t = jnp.zeros(x.shape[0]) if t is None else t
        time = time_embedding(t, f).astype(self.dtype)
        time = nn.Dense(4 * f, dtype=self.dtype)(nn.silu(nn.Dense(4 * f, dtype=self.dtype)(time)))

        def block(features: int) -> TimeBlock:
            return TimeBlock(**self.shared, features=features, groups=self.groups)

        x = x.astype(self.dtype)
        skip = block(f)(x, time)
        y = nn.Conv(2 * f, (3, 3), (2, 2), padding=1, dtype=self.dtype)(skip)
        y = block(2 * f)(block(2 * f)(y, time), time)
        n, h, w, c = y.shape
        y = jnp.broadcast_to(y[:, :, None, :, None, :], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)
        y = nn.Conv(f, (3, 3), padding=1, dtype=self.dtype)(y)
        y = self.stretch(lambda _, y, skip: block(f)(jnp.concatenate([y, skip], axis=-1), time), y, skip)
        return nn.Conv(x.shape[-1], (3, 3), padding=1, dtype=self.dtype)(y)


class UNet3DBlock(Model):
    """One level of a 3-D U-Net: ``model(x, train)``, x (N, D, H, W, C) -> the same shape; D, H and W are even.

    Two convolutions 3 x 3 x 3, each with batch norm and ReLU; max pool; two more with twice the features; transposed
    convolution up; two more on that beside the skip; a 1 x 1 x 1 convolution.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("unet3d_block", layers="flax", features=4)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.ones((1, 8, 8, 8, 2)))[0].shape
    (1, 8, 8, 8, 2)
    """

    features: int = 64
    target: ClassVar[str] = "value"

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        nn, f = self.nn, self.features

        def conv(features: int) -> Any:
            return nn.Conv(features, (3, 3, 3), use_bias=False, dtype=self.dtype)

        def norm() -> Any:
            return nn.BatchNorm(
                use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype, activation="relu"
            )

        def two(features: int, *x: Any) -> Any:
            y = self.stretch(lambda _, *x: conv(features)(jnp.concatenate(x, axis=-1)), *x)
            y = self.stretch(lambda _, y: conv(features)(norm()(y)), y)
            return norm()(y)

        channels = x.shape[-1]
        skip = two(f, x)
        y = two(2 * f, nn.max_pool(skip, (2, 2, 2), strides=(2, 2, 2)))
        y = nn.ConvTranspose(f, (2, 2, 2), strides=(2, 2, 2), dtype=self.dtype)(y)
        y = two(f, y, skip)
        return nn.Conv(channels, (1, 1, 1), dtype=self.dtype)(y)
