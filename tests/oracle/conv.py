"""Convolution from its formula, in NumPy: one loop over the taps of the kernel, in the dtype of the operands.

Written apart from jaxprims: x is spread out, padded and cropped in memory, and each tap adds a strided slice of it.
"""

from __future__ import annotations

import itertools

import numpy as np


def _pad_or_crop(a: np.ndarray, axis: int, lo: int, hi: int) -> np.ndarray:
    index = [slice(None)] * a.ndim
    index[axis] = slice(max(-lo, 0), a.shape[axis] - max(-hi, 0))
    pads = [(0, 0)] * a.ndim
    if -lo > a.shape[axis] or -hi > a.shape[axis] or max(-lo, 0) + max(-hi, 0) > a.shape[axis]:
        a = np.zeros([n if i != axis else max(n + lo + hi, 0) for i, n in enumerate(a.shape)], a.dtype)
        return a
    pads[axis] = (max(lo, 0), max(hi, 0))
    return np.pad(a[tuple(index)], pads)


def _spread(a: np.ndarray, axis: int, step: int) -> np.ndarray:
    n = a.shape[axis]
    shape = list(a.shape)
    shape[axis] = (n - 1) * step + 1 if n else 0
    out = np.zeros(shape, a.dtype)
    index = [slice(None)] * a.ndim
    index[axis] = slice(None, None, step)
    if n:
        out[tuple(index)] = a
    return out


def conv_nc(x, w, strides, padding, lhs_dilation=None, rhs_dilation=None, groups=1, batch_groups=1, flip=False):
    """x (N, C, ...), w (K, C/groups, ...) -> y (N/batch_groups, K, ...)."""
    x, w = np.asarray(x), np.asarray(w)
    rank = x.ndim - 2
    lhs_dilation, rhs_dilation = lhs_dilation or (1,) * rank, rhs_dilation or (1,) * rank
    if flip:
        w = w[(slice(None), slice(None), *(slice(None, None, -1),) * rank)]
    for i in range(rank):
        x = _spread(x, 2 + i, lhs_dilation[i])
        x = _pad_or_crop(x, 2 + i, *padding[i])
    out = []
    for i in range(rank):
        reach = (w.shape[2 + i] - 1) * rhs_dilation[i] + 1
        out.append(max((x.shape[2 + i] - reach) // strides[i] + 1, 0))
    n, c, k = x.shape[0], x.shape[1], w.shape[0]
    y = np.zeros((n // batch_groups, k, *out), np.result_type(x, w))
    if 0 in out:
        return y
    g_all = max(groups, batch_groups)
    for g in range(g_all):
        ks = slice(g * k // g_all, (g + 1) * k // g_all)
        xg = x[:, g * c // groups : (g + 1) * c // groups] if groups > 1 else x
        xg = xg[g * n // batch_groups : (g + 1) * n // batch_groups] if batch_groups > 1 else xg
        for tap in itertools.product(*map(range, w.shape[2:])):
            window = tuple(
                slice(t * rhs_dilation[i], t * rhs_dilation[i] + (out[i] - 1) * strides[i] + 1, strides[i])
                for i, t in enumerate(tap)
            )
            piece = xg[(slice(None), slice(None), *window)]
            y[:, ks] += np.einsum("nc...,kc->nk...", piece, w[(ks, slice(None), *tap)])
    return y


def conv(x, w, strides, padding, lhs_dilation=None, rhs_dilation=None, specs=None, **options):
    """The same with lax dimension numbers ``specs`` = (lhs_spec, rhs_spec, out_spec), positions of N C / K C / N K, spatial."""
    plain = tuple(range(np.ndim(x)))
    lhs, rhs, out = specs or (plain, plain, plain)
    y = conv_nc(np.transpose(x, lhs), np.transpose(w, rhs), strides, padding, lhs_dilation, rhs_dilation, **options)
    return np.transpose(y, np.argsort(out))


def conv_dx(x_shape, w, dy, *args, **kwargs):
    """The transpose in x by its definition: the inner product of dy with the response to each unit of x."""
    return _transpose(lambda e: conv(e, w, *args, **kwargs), x_shape, dy)


def conv_dw(x, w_shape, dy, *args, **kwargs):
    return _transpose(lambda e: conv(x, e, *args, **kwargs), w_shape, dy)


def _transpose(f, shape, dy):
    out = np.zeros(shape, np.result_type(dy))
    for index in np.ndindex(*shape):
        unit = np.zeros(shape, out.dtype)
        unit[index] = 1
        out[index] = np.sum(f(unit) * dy)
    return out


NHWC = {
    1: ((0, 2, 1), (2, 1, 0), (0, 2, 1)),
    2: ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
    3: ((0, 4, 1, 2, 3), (4, 3, 0, 1, 2), (0, 4, 1, 2, 3)),
}


def same(size, window, stride=1, dilation=1):
    reach = (window - 1) * dilation + 1
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


ACT = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu6": lambda z: np.clip(z, 0, 6),
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
}


def conv_layer(x, w, bias=None, residual=None, *, strides, padding, channels_last=True, activation=None, **options):
    """jaxprims.conv of a batch of images with pairs for padding."""
    rank = np.ndim(x) - 2
    z = conv(x, w, strides, padding, specs=NHWC[rank] if channels_last else None, **options)
    if bias is not None:
        z = z + (bias if channels_last else np.reshape(bias, (-1, *(1,) * rank)))
    return ACT[activation](z if residual is None else z + residual)


def transposed_same_3x3(x, w):
    """Stride 2, "SAME", kernel given as for the forward convolution (reversed, channels exchanged): twice the size of x."""
    return conv(x, w[::-1, ::-1].swapaxes(2, 3), (1, 1), ((2, 1), (2, 1)), (2, 2), specs=NHWC[2])
