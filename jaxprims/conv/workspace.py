"""Bytes of the workspace that each convolution op declares: what its kernels may need, one or another, always below 64 MiB.

The kernels take what they get: the numbers here and those in cuda/conv/ must agree only where a comment names the place.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from jaxprims.conv.params import ConvParams, dw_shape, gather, w_shape
from jaxprims.core.checks import is_static

MOST_WORKSPACE = 64 << 20  # bytes that any call may ask for
# kSm90Workspace of cuda/conv/sm90.h: two unfinished tiles for each of 132 workers.
_SM90_WORKSPACE = 2 * 132 * 8 * 64 * 64 * 4


def _half_types(*operands: Any) -> bool:
    return all(jnp.dtype(a.dtype).name in ("float16", "bfloat16") for a in operands)


def _sm90_workspace(p: ConvParams, x: Any, dy: Any) -> int:
    """Bytes in which Hopper's weight gradient keeps partial sums; 0 for what it does not take (cuda/conv/sm90.h)."""
    if p.batch_groups * p.groups != 1 or p.x_batched or p.y_batched or p.w_batched:
        return 0
    if not _half_types(x, dy):
        return 0
    last = p.rank + 1
    if p.lhs_spec[1] != last or p.out_spec[1] != last or p.rhs_spec[:2] != (last, last - 1) or max(p.lhs_dilation) > 1:
        return 0
    channels = x.shape[-1], dy.shape[-1]
    return _SM90_WORKSPACE if is_static(*channels) and all(c > 0 and c % 8 == 0 for c in channels) else 0


def _depthwise_workspace(p: ConvParams, x: Any, dy: Any) -> int:
    """Bytes for the partial filters of a depthwise weight gradient; dw_workspace of cuda/conv/depthwise.h, 0 for what it is not."""
    if p.groups < 2 or p.x_batched or p.y_batched or p.w_batched or max(p.lhs_dilation) > 1:
        return 0
    last = p.rank + 1
    channels, features = x.shape[p.lhs_spec[1]], dy.shape[p.out_spec[1]]
    if p.lhs_spec[1] != last or p.out_spec[1] != last or not is_static(channels, features, *p.w_spatial):
        return 0
    if channels != p.groups or features != p.groups or channels % 4:
        return 0
    size = 4 * math.prod(p.w_spatial) * channels * -(-528 * 64 // channels)
    return size if size <= MOST_WORKSPACE else 0


_FIRST_SPLITS = 132  # kFirstSMs of cuda/conv/first.h


def _first_workspace(p: ConvParams, x: Any, dy: Any) -> int:
    """Bytes for the sums of the blocks that share a first layer's weight gradient (cuda/conv/first.h); 0 for what it does not take."""
    if p.batch_groups * p.groups != 1 or p.rank > 2 or max(p.lhs_dilation) > 1 or max(p.rhs_dilation) > 1:
        return 0
    if not _half_types(x, dy):
        return 0
    result = dw_shape(p, x, dy)
    if not is_static(*result):
        return 0
    channels, features = x.shape[p.x_batched + p.lhs_spec[1]], dy.shape[p.y_batched + p.out_spec[1]]
    outputs = math.prod(result)
    if not 1 <= channels <= 4 or features % 8 or outputs == 0:
        return 0
    batch = outputs // math.prod(w_shape(p, x, dy))
    splits = min(-(-_FIRST_SPLITS // batch), _SPLIT_WORKSPACE // (4 * outputs))
    return 4 * outputs * splits


_SPLIT_WORKSPACE = 32 << 20  # at most
_SPLIT_TERMS, _SPLIT_SERIAL = 256, 8192  # kSplitTerms and kSerial of cuda/conv/select.h
_SPLIT_OUTPUTS = 2 * 132 * 64 * 64  # tiles of 64 x 64 that fill a GPU


def _split_workspace(p: ConvParams, x: Any, dy: Any) -> int:
    """Bytes for the sums of the blocks that share a reduction: so many float32 results as splits fill a GPU and keep sums short.

    0 where a reduction is too short to be shared, or the result too large. select.h takes what it gets, and needs no other number.
    """
    result = dw_shape(p, x, dy)
    terms = [n for axis, n in enumerate(dy.shape[p.y_batched :]) if axis != p.out_spec[1]]
    most = math.prod(terms) // _SPLIT_TERMS if is_static(*terms) else _SPLIT_WORKSPACE
    if most < 2:
        return 0
    if not is_static(*result):
        return _SPLIT_WORKSPACE
    outputs = math.prod(result)
    if outputs == 0:
        return 0
    splits = min(most, max(-(-_SPLIT_OUTPUTS // outputs), -(-most * _SPLIT_TERMS // _SPLIT_SERIAL)))
    room = _SPLIT_WORKSPACE // (4 * outputs)
    return 4 * outputs * min(splits, room) if min(splits, room) > 1 else 0


def conv_dw(p: ConvParams, x: Any, dy: Any) -> int:
    """Bytes of the workspace of conv_dw, which one kernel or another uses: below 64 MiB."""
    return max(f(p, x, dy) for f in (_sm90_workspace, _depthwise_workspace, _first_workspace, _split_workspace))


def image_patches(p: ConvParams, x: Any) -> int:
    """Bytes of the patches of one image, P Q R S C elements; 0 where a size is symbolic."""
    sizes = (*p.y_spatial, *p.w_spatial, gather(x.shape, p.lhs_spec, p.x_batched)[1])
    return math.prod(sizes) * jnp.dtype(x.dtype).itemsize if is_static(*sizes) else 0


def conv(p: ConvParams, x: Any, *_rest: Any) -> int:
    """Forward: algorithm="gemm" takes the patches of as many images as fit; others need none."""
    if p.algorithm != "gemm" or p.x_batched or p.w_batched:
        return 0
    image, images = image_patches(p, x), x.shape[p.lhs_spec[0]]
    most = MOST_WORKSPACE // image if image else 0
    return image * (min(images, most) if is_static(images) else most)
