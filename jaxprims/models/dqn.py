"""The network of deep Q-learning for many agents at once, each with parameters of its own.

Mnih et al.: Human-level control through deep reinforcement learning (Nature 2015). The agents are one ``vmap``: every
convolution has an axis of agents in its input and in its kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import linen

from jaxprims.models.base import Model, Part


class Torso(Part):
    """Frames (N, 84, 84, 4) -> action values (N, actions): convolutions 8 x 8 stride 4, 4 x 4 stride 2, 3 x 3, two dense layers."""

    actions: int = 18
    width: int = 32
    hidden: int = 512

    @linen.compact
    def __call__(self, x: Any) -> Any:
        nn = self.nn
        for features, size, stride in ((self.width, 8, 4), (2 * self.width, 4, 2), (2 * self.width, 3, 1)):
            x = nn.Conv(
                features, (size, size), (stride, stride), padding="VALID", dtype=self.dtype, activation="relu"
            )(x)  # fmt: skip
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x))
        return nn.Dense(self.actions, dtype=self.dtype)(x)


class DQN(Model):
    """``model(x, train)``: frames (agents, N, 84, 84, 4) -> action values (agents, N, actions).

    Attributes: actions; width: filters of the first convolution; hidden: units of the dense layer. The number of agents is x's.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("dqn", layers="flax", actions=6)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((3, 1, 84, 84, 4)))
    >>> variables["params"]["agents"]["Conv_0"]["kernel"].shape
    (3, 8, 8, 4, 32)
    """

    actions: int = 18
    width: int = 32
    hidden: int = 512
    target: ClassVar[str] = "value"

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        agents = linen.vmap(Torso, variable_axes={"params": 0}, split_rngs={"params": True})
        return agents(**self.shared, actions=self.actions, width=self.width, hidden=self.hidden, name="agents")(x)
