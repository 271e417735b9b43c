"""The pools in plain jax.numpy: the definition of right, and the lowering on every platform without a kernel.

Half types are computed in float32 and rounded once. A maximum is found axis by axis, innermost first: the first
maximum of every row, then the first row that has it, is the first in row-major order; the same holds for the first NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprims.core.checks import as_float32
from jaxprims.core.primitive import match_vma
from jaxprims.core.windows import Combine, Parts, fold_axis, fold_windows
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
    at = jnp.asarray(a.starts(), jnp.int32)[:, None] + jnp.arange(a.window, dtype=jnp.int32)[None]
    taken = jnp.take(x, jnp.clip(at, 0, a.size - 1).reshape(-1), axis=axis, mode="clip").reshape(shape)
    return jnp.where(_inside(a, axis, x.ndim), taken, jnp.asarray(fill, x.dtype))


def _inside(a: Axis, axis: int, ndim: int) -> np.ndarray:
    """Whether each place of each window is one of it, shaped for ``_windows``."""
    first, end = (v[:, None] for v in a.valid())
    r = np.arange(a.window)[None]
    return ((r >= first) & (r < end)).reshape(*(1,) * axis, a.out, a.window, *(1,) * (ndim - axis - 1))


def _along(v: np.ndarray, axis: int, ndim: int) -> jax.Array:
    """A vector as an int32 array of ``ndim`` axes that has it along ``axis``."""
    return jnp.asarray(v.reshape(*(1,) * axis, -1, *(1,) * (ndim - axis - 1)), jnp.int32)


def _ramp(n: int, axis: int, ndim: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (*(1,) * axis, n, *(1,) * (ndim - axis - 1)), axis)


def _plain(a: Axis) -> Axis:
    """An adaptive axis whose windows stand side by side as a regular one; a single window's stride as its size."""
    if a.adaptive and a.size % a.out == 0:
        n = a.size // a.out
        return Axis(a.size, a.out, n, n, 0, 1, False)
    return a._replace(stride=a.window) if a.out == 1 and a.dilation == 1 and not a.adaptive else a


def _reached(x: jax.Array, axis: int, a: Axis, fill: Any) -> jax.Array:
    """Exactly the elements that some window of a regular axis reaches, ``fill`` in the padding: element 0 is window 0's first."""
    last = (a.out - 1) * a.stride + (a.window - 1) * a.dilation + 1 - a.pad
    x = lax.slice_in_dim(x, max(0, -a.pad), max(0, min(a.size, last)), axis=axis)
    around = (max(0, a.pad), max(0, last - a.size))
    if around == (0, 0):
        return x
    return jnp.pad(x, [around if i == axis else (0, 0) for i in range(x.ndim)], constant_values=fill)


def _fold(parts: Parts, combine: Combine, whole: Callable[[Parts, int], Parts], axis: int, a: Axis) -> Parts:
    """The windows of a regular axis of ``parts``, cut by ``_reached``; ``whole`` folds all of an axis.

    What stride and window have as common divisor is folded as blocks first; of windows side by side nothing is left.
    """
    window, stride = a.window, a.stride
    if a.dilation == 1:
        block = math.gcd(window, stride)
        if block > 1:
            n = parts[0].shape[axis] // block
            parts = tuple(v.reshape(*v.shape[:axis], n, block, *v.shape[axis + 1 :]) for v in parts)
            parts = tuple(jnp.squeeze(v, axis + 1) for v in whole(parts, axis + 1))
            window, stride = window // block, stride // block
    return fold_windows(parts, combine, axis, a.out, window, stride, a.dilation)


def max_pool(p: PoolParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Value and place are folded side by side: where nobody reads the place, XLA drops its half."""
    if math.prod(p.in_size) == 0 or math.prod(p.out_size) == 0:
        shape = p.image(x.shape, p.out_size, x.shape[:1])
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, index_dtype(p))
    lowest = _lowest(x.dtype, p.minimum)
    floating = jnp.issubdtype(x.dtype, jnp.floating)

    def combine(a: Parts, b: Parts) -> Parts:
        """(value, place, whether it is padding): the first stays unless the second beats it, or it is padding."""
        stays = (a[0] <= b[0]) if p.minimum else (a[0] >= b[0])
        if floating:
            stays |= a[0] != a[0]
        return (
            lax.select(stays, a[0], b[0]),
            jnp.where(stays & ~a[2], a[1], b[1]),
            a[2] & b[2],
        )

    def whole(parts: Parts, axis: int) -> Parts:
        return fold_axis(parts, combine, axis)

    place, unit = jnp.zeros((1,) * x.ndim, jnp.int32), 1
    for k in reversed(range(p.rank)):
        a, axis = _plain(p.axes()[k]), p.spatial(k)
        if a.adaptive:
            values, pad = _windows(x, axis, a, lowest), jnp.asarray(~_inside(a, axis, x.ndim))
            sized = (*place.shape[:axis], a.size, *place.shape[axis + 1 :])
            inner = _windows(jnp.broadcast_to(place, sized), axis, a, 0)
            places = inner + _ramp(a.window, axis + 1, x.ndim + 1) * unit
            x, place, _ = (jnp.squeeze(v, axis + 1) for v in whole((values, places, pad), axis + 1))
        else:
            at = place + _ramp(a.size, axis, x.ndim) * unit
            pad = jnp.zeros_like(_ramp(a.size, axis, x.ndim), bool)
            parts = _reached(x, axis, a, lowest), _reached(at, axis, a, 0), _reached(pad, axis, a, True)
            x, at, _ = _fold(parts, combine, whole, axis, a)
            place = at - _along(a.starts(), axis, x.ndim) * unit
            if a.dilation > 1:
                place = place // (a.dilation * unit) * unit + place % unit
        unit *= p.window[k]
    place = jnp.broadcast_to(place, x.shape)
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
    if math.prod(p.in_size) == 0 or math.prod(p.out_size) == 0:
        return jnp.zeros(p.image(x.shape, p.out_size, x.shape[:1]), x.dtype)
    for k in reversed(range(p.rank)):
        a, axis = _plain(p.axes()[k]), p.spatial(k)
        if a.adaptive:
            x = _windows(x, axis, a, 0).sum(axis + 1)
        else:
            (x,) = _fold((_reached(x, axis, a, 0),), _add, _total, axis, a)
    return x


def _add(a: Parts, b: Parts) -> Parts:
    return (a[0] + b[0],)


def _total(parts: Parts, axis: int) -> Parts:
    return (jnp.sum(parts[0], axis, keepdims=True),)


def avg_pool(p: PoolParams, x: jax.Array) -> tuple[jax.Array]:
    total = _sums(p, as_float32(x))
    count = _counts(p, total.dtype)
    return ((total if count is None else total / count).astype(x.dtype),)


def avg_pool_dx(p: PoolParams, dy: jax.Array) -> tuple[jax.Array]:
    share = as_float32(dy)
    count = _counts(p, share.dtype)
    share = share if count is None else share / count
    if math.prod(p.in_size) == 0 or math.prod(p.out_size) == 0:
        return (jnp.zeros(p.image(dy.shape, p.in_size, dy.shape[:1]), dy.dtype),)
    for k in range(p.rank):
        a, axis = _plain(p.axes()[k]), p.spatial(k)
        share = (_spread_adaptive if a.adaptive else _spread)(share, axis, a)
    return (share.astype(dy.dtype),)


def _spread(v: jax.Array, axis: int, a: Axis) -> jax.Array:
    """The transpose of a regular axis's window sums: each element gets the sum of the windows that have it.

    The windows that have an element are a window too, over outputs ``stride`` apart; it is folded as forward.
    """
    window, stride = a.window, a.stride
    block = math.gcd(window, stride) if a.dilation == 1 else 1
    window, stride = window // block, stride // block
    around = (window - 1) * a.dilation
    n = (a.out - 1) * stride + around + 1
    if around or stride > 1:
        zero = jnp.zeros((), v.dtype)
        v = lax.pad(v, zero, [(around, around, stride - 1) if i == axis else (0, 0, 0) for i in range(v.ndim)])
        (v,) = fold_windows((v,), _add, axis, n, window, 1, a.dilation)
    if block > 1:
        shape = (*v.shape[:axis], n, block, *v.shape[axis + 1 :])
        v = jnp.broadcast_to(jnp.expand_dims(v, axis + 1), shape)
        n *= block
        v = v.reshape(*v.shape[:axis], n, *v.shape[axis + 2 :])
    # element 0 is now the first of window 0: cut what lies in the padding, add what no window reaches
    v = lax.slice_in_dim(v, max(0, a.pad), min(n, a.size + a.pad), axis=axis)
    return jnp.pad(v, [(max(0, -a.pad), max(0, a.size + a.pad - n)) if i == axis else (0, 0) for i in range(v.ndim)])


def _spread_adaptive(v: jax.Array, axis: int, a: Axis) -> jax.Array:
    # Only its type is used; inside shard_map it must vary over the axes that v varies over.
    x, _ = match_vma(jnp.zeros((*v.shape[:axis], a.size, *v.shape[axis + 1 :]), v.dtype), v)
    return jax.linear_transpose(lambda x: _windows(x, axis, a, 0).sum(axis + 1), x)(v)[0]
