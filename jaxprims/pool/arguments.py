"""What callers of the pools may write, brought to arrays with one batch axis and one :class:`PoolParams`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core import checks
from jaxprims.pool.window import PoolParams, adaptive_params

Ints = int | Sequence[int]
MAX_ADAPTIVE = 65536  # windows along one axis: tracing makes tables of them
Padding = str | int | Sequence[int | tuple[int, int]]


def real(x: Any, name: str = "inputs") -> jax.Array:
    x = checks.as_array(x, name)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(
            f"{name} has dtype {x.dtype}; maxima need an ordered dtype: cast it to a floating or integer one."
        )
    checks.check_width(x.dtype, name)
    return x


def floating(x: Any) -> jax.Array:
    x = checks.as_array(x, "inputs")
    checks.check_float(x, "inputs")
    return x


def rank_of(value: Any, name: str) -> int:
    if isinstance(value, str) or not hasattr(value, "__len__") or not checks.is_many(value):
        raise TypeError(
            f"{name}={checks.short(value)} must be a sequence with one int for each spatial axis, e.g. (2, 2) for images."
        )
    if not 1 <= len(value) <= 3:
        raise ValueError(
            f"{name}={tuple(value)!r} has {len(value)} entries; give one to three, one for each spatial axis."
        )
    return len(value)


def as_images(x: jax.Array, rank: int, layout: str) -> tuple[jax.Array, bool, Callable[[jax.Array], jax.Array]]:
    """(x with one batch axis, whether channels are last, the way back for a result)."""
    last = checks.check_layout(layout, rank + 2) != 1
    if x.ndim < rank + 1:
        raise ValueError(
            f"inputs has shape {x.shape}; "
            f"{rank} spatial axes and a channel axis (layout={layout!r}) need at least {rank + 1} axes."
        )
    lead = x.shape[: x.ndim - rank - 1]
    if len(lead) == 1:
        return x, last, lambda y: y
    x = x.reshape(math.prod(lead), *x.shape[len(lead) :])
    return x, last, lambda y: y.reshape(*lead, *y.shape[1:])


def spatial_sizes(x: jax.Array, rank: int, last: bool) -> tuple[int, ...]:
    sizes = x.shape[1:-1] if last else x.shape[2:]
    if not checks.is_static(*sizes):
        raise ValueError(
            f"inputs has symbolic spatial sizes {sizes}; only batch and channel sizes may be symbolic, as windows are "
            "compiled in: export once for each image size, or pad or resize images (jnp.pad, jax.image.resize) to fixed ones first."
        )
    return sizes


def regular(
    x: jax.Array, last: bool, window_shape: Any, strides: Any, padding: Any, window_dilation: Any
) -> PoolParams:
    rank = len(window_shape)
    window = checks.canonical_tuple(window_shape, rank, "window_shape")
    strides = (1,) * rank if strides is None else checks.canonical_tuple(strides, rank, "strides")
    dilation = checks.canonical_tuple(1 if window_dilation is None else window_dilation, rank, "window_dilation")
    sizes = spatial_sizes(x, rank, last)
    return regular_of(
        sizes, window, strides, checks.canonical_padding(padding, sizes, window, strides, dilation), dilation, last
    )


@functools.lru_cache(maxsize=1024)
def regular_of(
    sizes: tuple[int, ...],
    window: tuple[int, ...],
    strides: tuple[int, ...],
    padding: checks.Padding,
    dilation: tuple[int, ...],
    last: bool,
) -> PoolParams:
    out, kept = [], []
    for k, (size, w, s, (lo, hi), d) in enumerate(zip(sizes, window, strides, padding, dilation, strict=True)):
        reach = (w - 1) * d + 1
        if max(lo, hi) >= reach:
            raise ValueError(
                f"padding[{k}]={(lo, hi)} is not smaller than the window "
                f"({w} places with window_dilation {d}: {reach}): a window would lie in the padding alone; pad less or widen window_shape."
            )
        padded = size + lo + hi
        if reach > padded:
            raise ValueError(
                f"window_shape[{k}]={w} with window_dilation {d} spans {reach} elements, "
                f"the padded input has {padded}; give a smaller window or more padding."
            )
        n = (padded - reach) // s + 1
        out.append(n)
        kept.append(s if n > 1 else 1)
    dilation = tuple(d if w > 1 else 1 for d, w in zip(dilation, window, strict=True))
    lows = tuple(lo for lo, _ in padding)
    p = PoolParams(sizes, tuple(out), window, tuple(kept), lows, dilation, channels_last=last)
    for k, a in enumerate(p.axes()):
        o = a.first_empty()
        if o is not None:
            raise ValueError(
                f"padding[{k}]={padding[k]} leaves window {o} along spatial axis {k} without any element of the input "
                f"(size {a.size}, window_shape {a.window}, window_dilation {a.dilation}); pad less."
            )
    return p


_adaptive_of = functools.lru_cache(maxsize=1024)(adaptive_params)


def adaptive(
    inputs: jax.Array, output_size: Any, layout: str
) -> tuple[jax.Array, PoolParams, Callable[[jax.Array], jax.Array]]:
    if not checks.is_many(output_size):
        checks.check_layout(layout, len(layout) if isinstance(layout, str) else 4)
        output_size = (checks.canonical_int(output_size, "output_size", low=1),) * (len(layout) - 2)
    rank = rank_of(output_size, "output_size")
    x, last, back = as_images(inputs, rank, layout)
    sizes = spatial_sizes(x, rank, last)
    wanted = tuple(s if o is None else o for o, s in zip(output_size, sizes, strict=True))
    _filled(sizes)
    wanted = checks.canonical_tuple(wanted, rank, "output_size")
    for k, (out, size) in enumerate(zip(wanted, sizes, strict=True)):
        if out > max(MAX_ADAPTIVE, size):
            raise ValueError(
                f"output_size[{k}]={out} must be at most {max(MAX_ADAPTIVE, size)} ({MAX_ADAPTIVE}, or the {size} elements of "
                f"spatial axis {k} if they are more); give a smaller one, and repeat its result with jnp.repeat or jax.image.resize."
            )
    return x, _adaptive_of(sizes, wanted, last), back


def _filled(sizes: tuple[int, ...]) -> None:
    if 0 in sizes:
        raise ValueError(
            f"inputs has spatial sizes {sizes}; "
            "an empty image has no maximum and no average: give at least one element."
        )


def whole_image(inputs: jax.Array, layout: str) -> tuple[jax.Array, PoolParams, Callable[[jax.Array], jax.Array]]:
    rank = len(layout) - 2 if isinstance(layout, str) else 2
    x, last, back = as_images(inputs, rank, layout)
    sizes = spatial_sizes(x, rank, last)
    _filled(sizes)
    return x, regular_of(sizes, sizes, (1,) * rank, ((0, 0),) * rank, (1,) * rank, last), back
