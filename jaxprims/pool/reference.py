"""The pools in plain jax.numpy: the definition of right, and the lowering on every platform without a kernel.

Half types are computed in float32 and rounded once. A maximum is found axis by axis, innermost first: the first
maximum of every row, then the first row that has it, is the first in row-major order; the same holds for the first NaN.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprims.core.checks import as_float32
from jaxprims.core.primitive import match_vma
from jaxprims.pool.window import Axis, PoolParams, flat_from_place, flat_index, index_dtype


def _lowest(dtype: Any, minimum: bool) -> Any:
    """The value that never beats another one."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(np.inf if minimum else -np.inf, dtype)
    info = jnp.iinfo(dtype)
    return jnp.array(info.max if minimum else info.min, dtype)


def _windows(x: jax.Array, axis: int, a: Axis, fill: Any) -> jax.Array:
    """``x`` with ``axis`` replaced by two: outputs, and the places of their windows (``fill`` outside the image)."""
    shape = (*x.shape[:axis], a.out, a.window, *x.shape[axis + 1 :])
    if a.tiles():
        return lax.slice_in_dim(x, 0, a.out * a.window, axis=axis).reshape(shape)
    if a.size == 0 or a.out == 0:
        return jnp.full(shape, fill, x.dtype)
    r = jnp.arange(a.window, dtype=jnp.int32)
    at = jnp.asarray(a.starts(), jnp.int32)[:, None] + (r * a.dilation)[None]
    first, end = (jnp.asarray(v, jnp.int32)[:, None] for v in a.valid())
    inside = (r[None] >= first) & (r[None] < end)
    taken = jnp.take(x, jnp.clip(at, 0, a.size - 1).reshape(-1), axis=axis, mode="clip").reshape(shape)
    inside = inside.reshape(*(1,) * axis, a.out, a.window, *(1,) * (x.ndim - axis - 1))
    return jnp.where(inside, taken, jnp.asarray(fill, x.dtype))


def max_pool(p: PoolParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    place = jnp.zeros((1,) * x.ndim, jnp.int32)
    unit, pick = 1, jnp.argmin if p.minimum else jnp.argmax
    for k in reversed(range(p.rank)):
        a, axis = p.axes()[k], p.spatial(k)
        values = _windows(x, axis, a, _lowest(x.dtype, p.minimum))
        # A tie with the padding's value goes to the first element inside the image.
        first = a.valid()[0].reshape(*(1,) * axis, a.out, 1, *(1,) * (x.ndim - axis - 1))
        best = jnp.maximum(pick(values, axis=axis + 1, keepdims=True).astype(jnp.int32), jnp.asarray(first, jnp.int32))
        if unit == 1:
            inner = jnp.zeros((), jnp.int32)
        else:
            inner = jnp.take_along_axis(_windows(place, axis, a, 0), best, axis=axis + 1, mode="clip")
        place = jnp.squeeze(best * unit + inner, axis + 1)
        x = jnp.squeeze(jnp.take_along_axis(values, best, axis=axis + 1, mode="clip"), axis + 1)
        unit *= a.window
    return x, (flat_from_place(p, place)[0] if p.flat else place).astype(index_dtype(p))


def _aligned(p: PoolParams, data: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
    """Both operands with every batch axis and N, and these axes' sizes. (A kernel reads them without the copies.)"""
    data = jnp.expand_dims(data, tuple(i for i, there in enumerate(p.data_axes) if not there))
    place = jnp.expand_dims(place, tuple(i for i, there in enumerate(p.index_axes) if not there))
    n = len(p.data_axes) + 1
    lead = tuple(b if a == 1 else a for a, b in zip(data.shape[:n], place.shape[:n], strict=True))
    data = jnp.broadcast_to(data, (*lead, *data.shape[n:]))
    return data, jnp.broadcast_to(place, (*lead, *place.shape[n:])), lead


def _images(p: PoolParams, x: jax.Array) -> jax.Array:
    """As (images, places, channels): leading axes as one, spatial axes as one, channels last."""
    if not p.channels_last:
        x = jnp.moveaxis(x, -1 - p.rank, -1)
    return x.reshape(math.prod(x.shape[: -1 - p.rank]), math.prod(x.shape[-1 - p.rank : -1]), x.shape[-1])


def _from_images(p: PoolParams, x: jax.Array, lead: tuple[Any, ...], size: tuple[int, ...]) -> jax.Array:
    x = x.reshape(*lead, *size, x.shape[-1])
    return x if p.channels_last else jnp.moveaxis(x, -1, -1 - p.rank)


def max_pool_gather(p: PoolParams, t: jax.Array, place: jax.Array) -> tuple[jax.Array]:
    t, place, lead = _aligned(p, t, place)
    flat, there = (_images(p, v) for v in flat_index(p, place))
    images = _images(p, t)
    if images.shape[1] == 0:
        return (_from_images(p, jnp.zeros(flat.shape, t.dtype), lead, p.out_size),)
    y = jnp.where(there, jnp.take_along_axis(images, flat, axis=1, mode="clip"), jnp.zeros((), t.dtype))
    return (_from_images(p, y, lead, p.out_size),)


def max_pool_scatter(p: PoolParams, dy: jax.Array, place: jax.Array) -> tuple[jax.Array]:
    dy, place, lead = _aligned(p, dy, place)
    flat, there = (_images(p, v) for v in flat_index(p, place))
    values = as_float32(jnp.where(there, _images(p, dy), jnp.zeros((), dy.dtype)))
    n, _, c = values.shape
    rows, channels = jnp.arange(n, dtype=jnp.int32)[:, None, None], jnp.arange(c, dtype=jnp.int32)
    dx = jnp.zeros((n, math.prod(p.in_size), c), values.dtype).at[rows, flat, channels].add(values, mode="drop")
    return (_from_images(p, dx.astype(dy.dtype), lead, p.in_size),)


def _counts(p: PoolParams, dtype: Any) -> jax.Array | None:
    """By what the sum of each window is divided, shaped to broadcast against (N, ...) arrays."""
    if p.divisor == "none":
        return None
    if p.divisor == "window" and not p.adaptive:
        return jnp.asarray(p.places, dtype)
    count = jnp.ones((1,) * (p.rank + 2), dtype)
    for k, a in enumerate(p.axes()):
        first, end = a.valid()
        shape = [1] * (p.rank + 2)
        shape[p.spatial(k)] = a.out
        count = count * jnp.asarray((end - first).reshape(shape), dtype)
    return count


def _sums(p: PoolParams, x: jax.Array) -> jax.Array:
    if p.adaptive:
        for k in range(p.rank):
            x = _windows(x, p.spatial(k), p.axes()[k], 0).sum(p.spatial(k) + 1)
        return x
    dims, strides, dilation = ([1] * x.ndim for _ in range(3))
    pads = [(0, 0)] * x.ndim
    for k, a in enumerate(p.axes()):
        i = p.spatial(k)
        dims[i], strides[i], dilation[i] = a.window, a.stride, a.dilation
        # Exactly the elements that some window reaches: crop first, XLA gets no negative padding.
        last = (a.out - 1) * a.stride - a.pad + (a.window - 1) * a.dilation + 1
        lo, hi = max(0, -a.pad), max(0, min(a.size, last))
        x = lax.slice_in_dim(x, min(lo, hi), hi, axis=i)
        pads[i] = (max(0, a.pad), max(0, last - a.size)) if a.out else (0, 0)
    if math.prod(p.out_size) == 0:
        return jnp.zeros(p.image(x.shape, p.out_size, x.shape[:1]), x.dtype)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, dims, strides, pads, window_dilation=dilation)


def avg_pool(p: PoolParams, x: jax.Array) -> tuple[jax.Array]:
    total = _sums(p, as_float32(x))
    count = _counts(p, total.dtype)
    return ((total if count is None else total / count).astype(x.dtype),)


def avg_pool_dx(p: PoolParams, dy: jax.Array) -> tuple[jax.Array]:
    share = as_float32(dy)
    count = _counts(p, share.dtype)
    share = share if count is None else share / count
    # Only its type is used; inside shard_map it must vary over the axes that dy varies over.
    x, _ = match_vma(jnp.zeros(p.image(dy.shape, p.in_size, dy.shape[:1]), share.dtype), share)
    (dx,) = jax.linear_transpose(lambda v: _sums(p, v), x)(share)
    return (dx.astype(dy.dtype),)
