"""The causal convolution block of state space models for sequences.

Gu, Dao: Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023), arXiv:2312.00752, whose block has a depthwise
causal convolution over four steps, SiLU, and a gate. The optional recurrence is a diagonal, gated one (De et al., Griffin,
arXiv:2402.19427) by an associative scan. Arrays are (N, length, channels).

SiLU is left to the product with the gate, which reads both arms once; the convolution takes its bias along.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen

from jaxprims.models.base import Model


def linear_recurrence(a: jax.Array, b: jax.Array) -> jax.Array:
    """``h_t = a_t h_{t-1} + b_t`` along axis 1, from h = 0, in float32.

    >>> import jax.numpy as jnp
    >>> linear_recurrence(jnp.full((1, 3, 1), 0.5), jnp.ones((1, 3, 1))).ravel().tolist()
    [1.0, 1.5, 1.75]
    """

    def after(one: Any, two: Any) -> Any:
        return one[0] * two[0], one[1] * two[0] + two[1]

    return jax.lax.associative_scan(after, (a.astype(jnp.float32), b.astype(jnp.float32)), axis=1)[1]


class CausalConvBlock(Model):
    """``x + out(mix(silu(conv(u))) * silu(gate))`` with ``u, gate = in(norm(x))``: ``model(x, train)``, x (N, L, C) -> x's shape.

    Attributes: expand: channels inside, as a multiple of C. window: steps of the convolution. recurrence: whether ``mix`` is a
      gated linear recurrence (else the identity).

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("causal_conv", layers="flax")
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 16, 8)))
    >>> variables["params"]["Conv_0"]["kernel"].shape
    (4, 1, 16)
    """

    expand: int = 2
    window: int = 4
    recurrence: bool = False
    target: ClassVar[str] = "value"

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        nn, channels = self.nn, x.shape[-1]
        inner = self.expand * channels
        x = x.astype(self.dtype)
        y = self.stretch(
            lambda m, x: nn.Dense(2 * inner, use_bias=False, dtype=m.dtype)(nn.RMSNorm(epsilon=1e-6, dtype=m.dtype)(x)),
            x,
        )

        def arm(m: CausalConvBlock, y: Any) -> Any:
            return nn.Conv(inner, (m.window,), padding="CAUSAL", feature_group_count=inner, dtype=m.dtype)(
                y[..., :inner]
            )

        def out(m: CausalConvBlock, u: Any, y: Any) -> Any:
            u = nn.silu(u)
            if m.recurrence:
                decay = nn.sigmoid(nn.Dense(inner, dtype=m.dtype, name="decay")(u).astype(jnp.float32))
                u = linear_recurrence(decay, (1 - decay) * u).astype(m.dtype)
            return nn.Dense(channels, use_bias=False, dtype=m.dtype)(u * nn.silu(y[..., inner:]))

        return x + self.stretch(out, self.stretch(arm, y), y)
