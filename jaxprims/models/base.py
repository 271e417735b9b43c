"""What all models share: the choice of layers, dtype and memory mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen

from jaxprims.models import memory as memory_mode
from jaxprims.models.layers import namespace


class Part(linen.Module):
    """A model or a block of one.

    Attributes:
      layers: the namespace of layers, "jaxprims" or "flax" (:mod:`jaxprims.models.layers`).
      dtype: of the computation. Parameters and statistics are float32.
      memory: "default" or "recompute" (:mod:`jaxprims.models.memory`).
    """

    layers: str = "jaxprims"
    dtype: Any = jnp.float32
    memory: str = "default"

    @property
    def nn(self) -> Any:
        """The namespace of layers."""
        return namespace(self.layers)

    @property
    def shared(self) -> dict[str, Any]:
        """The attributes above, to hand on to a block."""
        return {"layers": self.layers, "dtype": self.dtype, "memory": self.memory}

    def stretch(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """``fn(self, *arrays)``, in recompute mode as a stretch whose unmarked values are not kept."""
        return memory_mode.recompute(self, self.memory, fn, *arrays)


class Model(Part):
    """A whole model: called as ``model(x, train=True)``.

    ``target`` says what it is trained on: "class" (integer labels; the result are logits) or "value" (an array of the
    result's shape).
    """

    target: ClassVar[str] = "class"

    @property
    def random(self) -> bool:
        """Whether a training step draws random numbers (dropout, stochastic depth): the stream "dropout" is then needed."""
        return False
