"""What all models share: the choice of layers, dtype and memory mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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

    def chain(self, blocks: Sequence[Callable[[], linen.Module]], x: Any, keep_every: int) -> Any:
        """x through all blocks; in recompute mode one block output in ``keep_every`` is kept, the others computed again.

        ``blocks`` make the modules, so that these belong to the stretch that runs them.
        """

        def run(_: linen.Module, x: Any, some: Sequence[Callable[[], linen.Module]]) -> Any:
            for block in some:
                x = block()(x)
            return x

        for start in range(0, len(blocks), keep_every):
            x = self.stretch(functools.partial(run, some=blocks[start : start + keep_every]), x)
        return x


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
