"""Activation functions: the names a user may give, their formula, and the code under which the kernels know them.

``z`` is the pre-activation. The code is the C++ ``enum Act`` of ``cuda/common/act.cuh``; the formulas are those of
``jax.nn``, so that a kernel and the reference give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
    code: int
    apply: Callable[[jax.Array], jax.Array]


def _mish(z: jax.Array) -> jax.Array:
    return z * jnp.tanh(jax.nn.softplus(z))


ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(0, lambda z: z),
    "relu": Activation(1, jax.nn.relu),
    "relu6": Activation(2, jax.nn.relu6),
    "leaky_relu": Activation(3, jax.nn.leaky_relu),  # slope 0.01
    "elu": Activation(4, jax.nn.elu),  # alpha 1
    "selu": Activation(5, jax.nn.selu),
    "sigmoid": Activation(6, jax.nn.sigmoid),
    "tanh": Activation(7, jnp.tanh),
    "silu": Activation(8, jax.nn.silu),
    "gelu": Activation(9, jax.nn.gelu),  # tanh approximation, as jax.nn.gelu's default
    "gelu_exact": Activation(10, lambda z: jax.nn.gelu(z, approximate=False)),
    "softplus": Activation(11, jax.nn.softplus),
    "hard_sigmoid": Activation(12, jax.nn.hard_sigmoid),
    "hard_silu": Activation(13, jax.nn.hard_silu),
    "hard_tanh": Activation(14, jax.nn.hard_tanh),
    "mish": Activation(15, _mish),
    "soft_sign": Activation(16, jax.nn.soft_sign),
    "log_sigmoid": Activation(17, jax.nn.log_sigmoid),
}
ALIASES: dict[str | None, str | None] = {
    "swish": "silu",
    "hard_swish": "hard_silu",
    "identity": None,
    "linear": None,
    "none": None,
}


def check_activation(name: str | None) -> str | None:
    """The canonical name, or an error that lists the known ones."""
    known = ", ".join(sorted(k for k in ACTIVATIONS if k))
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"activation={name!r} must be a name, as 'relu', not {type(name).__name__}; give None or one of: {known}, "
            "and call a function of your own on the result."
        )
    name = ALIASES.get(name, name)
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not known; give None or one of: {known}.")
    return name


def activation_code(name: str | None) -> int:
    return ACTIVATIONS[name].code


def apply_activation(name: str | None, z: jax.Array) -> jax.Array:
    """The activation of ``z``, in z's dtype."""
    return ACTIVATIONS[name].apply(z)


def _elu_slope(z: jax.Array) -> jax.Array:
    return jnp.where(z > 0, 1.0, jnp.exp(jnp.where(z > 0, 0.0, z)))


def _selu_slope(z: jax.Array) -> jax.Array:
    return 1.0507009873554805 * jnp.where(z > 0, 1.0, 1.6732632423543772 * jnp.exp(jnp.where(z > 0, 0.0, z)))


# Derivatives where JAX's own is a sum that cancels (1 - y, 1 - y * y, 1 + expm1(z) up to jax 0.10) and leaves nothing of a small slope.
_SLOPES: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    "elu": _elu_slope,
    "selu": _selu_slope,
    "sigmoid": lambda z: jax.nn.sigmoid(z) * jax.nn.sigmoid(-z),
    "tanh": lambda z: 4 * (jax.nn.sigmoid(2 * z) * jax.nn.sigmoid(-2 * z)),
}


def activation_slope(name: str | None, z: jax.Array) -> jax.Array:
    """The derivative of the activation at ``z``, elementwise; differentiable again."""
    if name is None:
        return jnp.ones_like(z)
    if name in _SLOPES:
        return _SLOPES[name](z)
    return jax.jvp(ACTIVATIONS[name].apply, (z,), (jnp.ones_like(z),))[1]
