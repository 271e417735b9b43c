"""One training step for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxprims.models.base import Model


class TrainState(NamedTuple):
    """Parameters, batch statistics (empty where a model has none), the optimizer's state, steps taken."""

    params: Any
    stats: Any
    optimizer: Any
    count: jax.Array


def loss_of(model: Model, y: jax.Array, target: jax.Array) -> jax.Array:
    """Mean cross entropy of logits and labels, or mean square error, in float32."""
    y = y.astype(jnp.float32)
    if model.target == "class":
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(y, target))
    return jnp.mean(jnp.square(y - target.astype(jnp.float32)))


def train_step(
    model: Model, optimizer: optax.GradientTransformation | None = None
) -> tuple[Callable[[jax.Array, Any], TrainState], Callable[[TrainState, Any, Any], tuple[TrainState, jax.Array]]]:
    """``init(key, x) -> state`` and ``step(state, x, target) -> (state, loss)``.

    ``init`` reads only shape and dtype of x, and runs the initialisers alone. ``step`` is pure and not jitted: ``jax.jit(step, donate_argnums=0)``. It takes the
    gradient of :func:`loss_of`, updates the batch statistics, and applies the optimizer (default: SGD at 0.01, momentum 0.9).
    Random numbers, where a model draws any, depend on the count of steps alone.

    >>> import jax
    >>> from jaxprims.models import MODELS, make, train_step
    >>> spec = MODELS["resnet18"]
    >>> init, step = train_step(make("resnet18", layers="flax", **spec.small.options))
    >>> x, labels = spec.data(jax.random.key(0), small=True)
    >>> state = jax.eval_shape(init, jax.random.key(1), x)
    >>> state, loss = jax.eval_shape(step, state, x, labels)
    >>> loss.shape
    ()
    """
    opt = optax.sgd(0.01, momentum=0.9) if optimizer is None else optimizer

    def init(key: jax.Array, x: Any) -> TrainState:
        variables = model.lazy_init(key, jax.ShapeDtypeStruct(x.shape, x.dtype), train=False)
        params = variables["params"]
        return TrainState(params, variables.get("batch_stats", {}), opt.init(params), jnp.zeros((), jnp.int32))

    def step(state: TrainState, x: Any, target: Any) -> tuple[TrainState, jax.Array]:
        rngs = {"dropout": jax.random.fold_in(jax.random.key(0), state.count)} if model.random else {}

        def loss(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.stats}
            y, new = model.apply(variables, x, train=True, mutable=["batch_stats"], rngs=rngs)  # type: ignore[misc]
            return loss_of(model, y, target), new.get("batch_stats", {})

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, inner = opt.update(grads, state.optimizer, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, stats, inner, state.count + 1), value

    return init, step
