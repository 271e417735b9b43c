"""The two namespaces of layers that the models are written against: ``jaxprims.linen``, and plain Flax in this file.

A model asks :func:`namespace` for "jaxprims" or "flax" and uses what it gets as it would use ``flax.linen``, with two more
keywords: ``activation`` (constructor) and ``residual`` (call), which stand for ``activation(layer(x) + residual)``.
jaxprims fuses them into the layer's kernel. The layers below write them as a Flax user writes them: the layer, the addition,
then Flax's own activation function. They are Flax's layers by inheritance, so that names and parameters are the same.
Every other name of this module is ``flax.linen``'s.

>>> import jax, jax.numpy as jnp
>>> nn = namespace("flax")
>>> layer = nn.BatchNorm(use_running_average=False, activation="relu")
>>> y, _ = layer.init_with_output(jax.random.key(0), jnp.array([[1.0], [3.0]]), residual=jnp.array([[0.0], [1.0]]))
>>> y.ravel().round(3).tolist()
[0.0, 2.0]
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

NAMESPACES = ("jaxprims", "flax")


def namespace(layers: str) -> Any:
    """The module of layers by its name: "jaxprims" is ``jaxprims.linen``, "flax" is this one."""
    if layers not in NAMESPACES:
        raise ValueError(f"layers={layers!r} is not known; give one of {', '.join(map(repr, NAMESPACES))}.")
    return sys.modules[__name__] if layers == "flax" else importlib.import_module("jaxprims.linen")


def _finish(y: Any, residual: Any, activation: str | None) -> Any:
    if residual is not None:
        y = y + residual
    if activation is None:
        return y
    if activation == "gelu_exact":
        return linen.gelu(y, approximate=False)
    return getattr(linen, activation)(y)


class Conv(linen.Conv):
    """``activation(flax.linen.Conv(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, inputs: Any, *, residual: Any = None) -> Any:
        return _finish(super().__call__(inputs), residual, self.activation)


class ConvTranspose(linen.ConvTranspose):
    """``activation(flax.linen.ConvTranspose(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, inputs: Any, *, residual: Any = None) -> Any:
        return _finish(super().__call__(inputs), residual, self.activation)


class BatchNorm(linen.BatchNorm):
    """``activation(flax.linen.BatchNorm(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, residual: Any = None, mask: Any = None
    ) -> Any:
        return _finish(super().__call__(x, use_running_average, mask=mask), residual, self.activation)


class LayerNorm(linen.LayerNorm):
    """``activation(flax.linen.LayerNorm(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> Any:
        return _finish(super().__call__(x, mask=mask), residual, self.activation)


class RMSNorm(linen.RMSNorm):
    """``activation(flax.linen.RMSNorm(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> Any:
        return _finish(super().__call__(x, mask=mask), residual, self.activation)


class GroupNorm(linen.GroupNorm):
    """``activation(flax.linen.GroupNorm(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> Any:
        return _finish(super().__call__(x, mask=mask), residual, self.activation)


class InstanceNorm(linen.InstanceNorm):
    """``activation(flax.linen.InstanceNorm(...)(x) + residual)``."""

    activation: str | None = field(default=None, kw_only=True)

    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> Any:
        return _finish(super().__call__(x, mask=mask), residual, self.activation)


class LocalResponseNorm(linen.Module):
    """``x / (k + a * sum of x^2 over the size channels around)^beta``, ``a = alpha / size``, as one writes it in Flax.

    Flax has no such layer. Channels are last; ``divide_by_size=False`` takes ``a = alpha``.
    """

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    divide_by_size: bool = True

    @linen.compact
    def __call__(self, x: Any) -> Any:
        low = self.size // 2
        window = (1,) * (x.ndim - 1) + (self.size,)
        pads = ((0, 0),) * (x.ndim - 1) + ((low, self.size - 1 - low),)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = jax.lax.reduce_window(wide * wide, 0.0, jax.lax.add, window, (1,) * x.ndim, pads)
        a = self.alpha / self.size if self.divide_by_size else self.alpha
        return (wide * (self.k + a * total) ** -self.beta).astype(x.dtype)


def __getattr__(name: str) -> Any:
    return getattr(linen, name)
