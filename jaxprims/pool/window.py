"""Where windows lie: the one description that max, min, average, regular, dilated and adaptive pools share.

Along one spatial axis with ``size`` elements, output ``o`` reads the places ``r`` of its window at

    regular   start(o) = o * stride - pad,            r = 0 .. window - 1, element start(o) + r * dilation
    adaptive  start(o) = floor(o * size / out),       r = 0 .. ceil((o + 1) * size / out) - start(o) - 1, dilation 1

and of these only the ones inside ``[0, size)``. A window's places are numbered in row-major order over the spatial
axes, ``place = (r0 * window1 + r1) * window2 + r2``; an element's flat index is its row-major place in the image.
``cuda/pool/window.h`` has the same arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Axis(NamedTuple):
    """One spatial axis of a pool."""

    size: int
    out: int
    window: int  # the widest one where the pool is adaptive
    stride: int
    pad: int  # before the first element; negative: elements left out
    dilation: int
    adaptive: bool

    def starts(self) -> np.ndarray:
        o = np.arange(self.out, dtype=np.int64)
        return o * self.size // self.out if self.adaptive else o * self.stride - self.pad

    def valid(self) -> tuple[np.ndarray, np.ndarray]:
        """(first, end): output o reads the places first[o] .. end[o] - 1."""
        start = self.starts()
        if self.adaptive:
            end = -(-(np.arange(self.out, dtype=np.int64) + 1) * self.size // self.out)
            return np.zeros_like(start), end - start
        first = np.maximum(0, -(start // self.dilation))
        end = np.minimum(self.window, (self.size - 1 - start) // self.dilation + 1)
        return first, end

    def first_empty(self) -> int | None:
        """The first output of a regular pool whose window has no place inside the image.

        The padding is smaller than the window, so that a window overlaps the image: none of its places is inside only
        where the dilation steps over the whole image, or where this has no element.
        """
        if self.out == 0 or (0 < self.size >= self.dilation):
            return None
        if self.size == 0:
            return 0
        # Those that start in the padding find -pad modulo dilation; then the pattern repeats, or they start inside.
        many = min(self.out, -(-self.pad // self.stride), self.dilation // math.gcd(self.stride, self.dilation))
        for o in range(max(many, 0)):
            if (o * self.stride - self.pad) % self.dilation >= self.size:
                return o
        return None

    def widest(self) -> int:
        """Places of the widest window of an adaptive pool.

        With size / out = (q * n + r) / n in lowest terms, a window starts anywhere modulo n, and has
        ceil((m + q * n + r) / n) places if it starts m behind a multiple of n.
        """
        n = self.out // math.gcd(self.size, self.out) if self.out else 1
        q, r = divmod(self.size * n // max(self.out, 1), n)
        return max(1, q + min(r, 2))

    def tiles(self) -> bool:
        """Windows stand side by side, none reaches into the padding."""
        regular = not self.adaptive and self.dilation == 1 and self.pad == 0
        return regular and (self.stride == self.window or self.out == 1) and self.out * self.window <= self.size


@dataclass(frozen=True)
class PoolParams:
    """Static options of every pool primitive; ``PoolConfig`` in ``cuda/pool/params.h``.

    ``data_axes`` and ``index_axes`` (gather and scatter only) tell for each leading batch axis of the result whether
    the first operand and the indices have it: an operand without it is the same for the whole axis and is never copied.
    """

    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    adaptive: bool = False
    channels_last: bool = True
    minimum: bool = False  # max_pool only
    indices: bool = True  # max_pool only: whether the places are a second result
    flat: bool = False  # maxima are told by the flat index of the element (int32), not by the place in the window
    divisor: str = "none"  # avg_pool only: "window" (all places), "valid" (places inside the image), "none" (a sum)
    data_axes: tuple[bool, ...] = ()
    index_axes: tuple[bool, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.window)

    @property
    def places(self) -> int:
        return math.prod(self.window)

    def axes(self) -> tuple[Axis, ...]:
        fields = zip(self.in_size, self.out_size, self.window, self.strides, self.padding, self.dilation, strict=True)
        return tuple(Axis(i, o, w, s, p, d, self.adaptive) for i, o, w, s, p, d in fields)

    def spatial(self, k: int) -> int:
        """Position of spatial axis k in an (N, ...) array."""
        return k + (1 if self.channels_last else 2)

    def image(self, like: tuple[Any, ...], size: tuple[int, ...], lead: tuple[Any, ...]) -> tuple[Any, ...]:
        """Shape with the channels of ``like``, spatial extents ``size`` and leading axes ``lead``."""
        if self.channels_last:
            return (*lead, *size, like[-1])
        return (*lead, like[-1 - self.rank], *size)


def adaptive_params(in_size: tuple[int, ...], out_size: tuple[int, ...], channels_last: bool, **kw: Any) -> PoolParams:
    ones, zeros = (1,) * len(in_size), (0,) * len(in_size)
    p = PoolParams(in_size, out_size, ones, ones, zeros, ones, adaptive=True, channels_last=channels_last, **kw)
    window = tuple(a.widest() for a in p.axes())
    return PoolParams(in_size, out_size, window, ones, zeros, ones, adaptive=True, channels_last=channels_last, **kw)


def index_dtype(p: PoolParams) -> Any:
    """int32 for flat indices; for places the smallest type that has them all."""
    return (
        jnp.uint8
        if p.places <= 1 << 8 and not p.flat
        else jnp.uint16
        if p.places <= 1 << 16 and not p.flat
        else jnp.int32
    )


def _along(v: np.ndarray, p: PoolParams, k: int, ndim: int) -> jax.Array:
    """A vector over outputs of spatial axis k, as an int32 array that broadcasts against an (..., N, ...) array."""
    trailing = p.rank - 1 - k + (1 if p.channels_last else 0)
    shape = [1] * ndim
    shape[ndim - 1 - trailing] = len(v)
    return jnp.asarray(v.reshape(shape), jnp.int32)


def flat_from_place(p: PoolParams, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(flat index of the element at ``place``, whether there is one); 0 where there is none."""
    rest = place.astype(jnp.int32)
    ok = (rest >= 0) & (rest < p.places)
    flat = jnp.zeros_like(rest)
    unit = 1
    for k in reversed(range(p.rank)):
        a = p.axes()[k]
        first, end = (_along(v, p, k, place.ndim) for v in a.valid())
        r = rest % a.window
        at = _along(a.starts(), p, k, place.ndim) + r * a.dilation
        ok &= (r >= first) & (r < end)
        flat += at * unit
        rest, unit = rest // a.window, unit * a.size
    return jnp.where(ok, flat, 0), ok


def in_window(p: PoolParams, flat: jax.Array) -> jax.Array:
    """Whether the window of each output has the element ``flat``."""
    rest = flat
    ok = (rest >= 0) & (rest < math.prod(p.in_size))
    for k in reversed(range(p.rank)):
        a = p.axes()[k]
        first, end = (_along(v, p, k, flat.ndim) for v in a.valid())
        step = rest % max(a.size, 1) - _along(a.starts(), p, k, flat.ndim)
        r = step // a.dilation
        ok &= (step % a.dilation == 0) & (r >= first) & (r < end)
        rest = rest // max(a.size, 1)
    return ok


def flat_index(p: PoolParams, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(flat index, whether it is one of the window) of an op's index operand, whichever kind it is."""
    if not p.flat:
        return flat_from_place(p, index)
    ok = in_window(p, index)
    return jnp.where(ok, index, 0), ok
