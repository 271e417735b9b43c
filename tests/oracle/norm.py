"""Norms in NumPy float64, from their formulas: loops over groups and windows, deviations squared and averaged."""

from __future__ import annotations

import numpy as np

from tests.oracle.act import ACTIVATIONS


def moments(x, axes, mask=None):
    """(mean, biased variance) over ``axes`` of the elements where ``mask`` is not 0; axes kept; 0 where there are none."""
    w = np.broadcast_to(np.ones(()) if mask is None else np.asarray(mask) != 0, x.shape).astype(np.float64)
    n = np.maximum(w.sum(axes, keepdims=True), 1)
    mean = np.where(w != 0, x, 0).sum(axes, keepdims=True) / n
    var = np.where(w != 0, (x - mean) ** 2, 0).sum(axes, keepdims=True) / n
    return mean, var


def _along(p, ndim, axes):
    """A parameter over ``axes`` (ascending) as an array that broadcasts to ``ndim`` axes."""
    return np.expand_dims(p, tuple(a for a in range(ndim) if a not in axes))


def affine(xhat, scale, bias, axes, activation=None, residual=None):
    z = xhat
    if scale is not None:
        z = z * _along(scale, xhat.ndim, axes)
    if bias is not None:
        z = z + _along(bias, xhat.ndim, axes)
    if residual is not None:
        z = z + residual
    return ACTIVATIONS[activation](z)


def _tuple(axes, ndim):
    return tuple(sorted(a % ndim for a in ((axes,) if isinstance(axes, int) else axes)))


def batch_norm(x, scale=None, bias=None, residual=None, mask=None, *, axis=-1, eps=1e-5, activation=None):
    keep = _tuple(axis, x.ndim)
    axes = tuple(a for a in range(x.ndim) if a not in keep)
    mean, var = moments(x, axes, mask)
    y = affine((x - mean) / np.sqrt(var + eps), scale, bias, keep, activation, residual)
    return y, mean.squeeze(axes), var.squeeze(axes)


def batch_norm_inference(x, mean, var, scale=None, bias=None, *, axis=-1, eps=1e-5, activation=None):
    keep = _tuple(axis, x.ndim)
    xhat = (x - _along(mean, x.ndim, keep)) / np.sqrt(_along(var, x.ndim, keep) + eps)
    return affine(xhat, scale, bias, keep, activation)


def layer_norm(x, scale=None, bias=None, *, axis=-1, feature_axes=None, eps=1e-6, activation=None):
    axes = _tuple(axis, x.ndim)
    mean, var = moments(x, axes)
    features = axes if feature_axes is None else _tuple(feature_axes, x.ndim)
    return affine((x - mean) / np.sqrt(var + eps), scale, bias, features, activation)


def rms_norm(x, scale=None, *, axis=-1, eps=1e-6, activation=None):
    axes = _tuple(axis, x.ndim)
    return affine(x / np.sqrt((x**2).mean(axes, keepdims=True) + eps), scale, None, axes, activation)


def group_norm(x, scale=None, bias=None, *, num_groups, axis=-1, eps=1e-6, activation=None):
    c = axis % x.ndim
    size = x.shape[c] // num_groups
    xhat = np.empty_like(x)
    for n in range(x.shape[0]):
        for g in range(num_groups):
            at = (n, *(slice(g * size, (g + 1) * size) if a == c else slice(None) for a in range(1, x.ndim)))
            part = x[at]
            xhat[at] = (part - part.mean()) / np.sqrt(((part - part.mean()) ** 2).mean() + eps)
    return affine(xhat, scale, bias, (c,), activation)


def instance_norm(x, scale=None, bias=None, residual=None, *, axis=-1, eps=1e-6, activation=None):
    keep = _tuple(axis, x.ndim)
    axes = tuple(a for a in range(1, x.ndim) if a not in keep)
    mean, var = moments(x, axes)
    return affine((x - mean) / np.sqrt(var + eps), scale, bias, keep, activation, residual)


def local_response_norm(x, *, size=5, alpha=1e-4, beta=0.75, k=1.0, axis=-1, divide_by_size=True):
    v = np.moveaxis(x, axis, -1)
    channels = v.shape[-1]
    y = np.empty_like(v)
    for c in range(channels):
        total = np.zeros(v.shape[:-1])
        for j in range(c - size // 2, c + (size - 1) // 2 + 1):
            if 0 <= j < channels:
                total = total + v[..., j] ** 2
        y[..., c] = v[..., c] / (k + alpha / (size if divide_by_size else 1) * total) ** beta
    return np.moveaxis(y, -1, axis)


def positive(operand):
    """``Case.make`` with values in [0.5, 2) for the operand numbered, standard normal ones elsewhere."""

    def make(rng, i, shape):
        return rng.uniform(0.5, 2.0, shape) if i == operand else rng.standard_normal(shape)

    return make


def masking(operand):
    """``Case.make`` with ones and zeros for the operand numbered; the first element of each row counts."""

    def make(rng, i, shape):
        if i != operand:
            return rng.standard_normal(shape)
        mask = rng.integers(0, 2, shape)
        mask[:, :1] = 1
        return mask

    return make
