"""Models written once against a namespace of layers: they run on jaxprims or on plain Flax by one argument.

``make(name, layers="jaxprims" | "flax")`` builds one of :data:`MODELS`, ``train_step(model)`` gives the step that trains it,
``saved_bytes(fn, *args)`` says what its derivative keeps. Needs flax and optax: ``pip install "jaxprims[models]"``.
"""

from __future__ import annotations

from jaxprims.models.memory import saved_bytes
from jaxprims.models.registry import MODELS, ModelSpec, make
from jaxprims.models.training import TrainState, loss_of, train_step

__all__ = ["MODELS", "ModelSpec", "TrainState", "loss_of", "make", "saved_bytes", "train_step"]
