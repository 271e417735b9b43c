"""Softmax, activations and bias in NumPy float64, from their formulas."""

from __future__ import annotations

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def softmax(x, axis=-1, log=False):
    with np.errstate(all="ignore"):
        shifted = x - np.max(x, axis=axis, keepdims=True, initial=-np.inf)
        total = np.sum(np.exp(shifted), axis=axis, keepdims=True)
        return shifted - np.log(total) if log else np.exp(shifted) / total


def log_softmax(x, axis=-1):
    return softmax(x, axis, log=True)


def _sigmoid(z):
    return 0.5 * (1 + np.tanh(0.5 * z))


def _softplus(z):
    return np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))


_ELU = 1.6732632423543772848170429916717
ACTIVATIONS = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu6": lambda z: np.clip(z, 0, 6),
    "leaky_relu": lambda z: np.where(z >= 0, z, 0.01 * z),
    "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "selu": lambda z: 1.0507009873554804934193349852946 * np.where(z > 0, z, _ELU * np.expm1(np.minimum(z, 0))),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "silu": lambda z: z * _sigmoid(z),
    "gelu": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * (1 + _erf(z / math.sqrt(2))),
    "softplus": _softplus,
    "hard_sigmoid": lambda z: np.clip(z + 3, 0, 6) / 6,
    "hard_silu": lambda z: z * np.clip(z + 3, 0, 6) / 6,
    "hard_tanh": lambda z: np.clip(z, -1, 1),
    "mish": lambda z: z * np.tanh(_softplus(z)),
    "soft_sign": lambda z: z / (1 + np.abs(z)),
    "log_sigmoid": lambda z: -_softplus(-z),
}


def bias_act(x, bias=None, residual=None, activation=None, axis=-1):
    z = np.array(x, np.float64)
    if bias is not None:
        z = z + np.reshape(bias, [-1 if a == axis % z.ndim else 1 for a in range(z.ndim)])
    return ACTIVATIONS[activation](z if residual is None else z + residual)
