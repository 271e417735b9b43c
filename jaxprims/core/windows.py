"""Windows along one axis, folded by slices: elementwise code that XLA fuses, and a program that does not grow with the window.

``parts`` is a tuple of arrays that are cut alike along ``axis``; ``combine(a, b)`` folds two such tuples, ``a`` of the
elements in front of those of ``b``. It must be associative: of more than ``FEW`` elements, neighbours are folded first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

Parts = tuple[jax.Array, ...]
Combine = Callable[[Parts, Parts], Parts]
FEW = 8  # elements that are folded one by one


def _cut(parts: Parts, axis: int, first: Any, end: Any, step: int = 1) -> Parts:
    return tuple(lax.slice_in_dim(v, first, end, step, axis) for v in parts)


def fold_windows(
    parts: Parts, combine: Combine, axis: int, out: Any, window: int, stride: int = 1, dilation: int = 1
) -> Parts:
    """Result o: the fold of the elements ``o * stride + r * dilation`` for r = 0 .. window - 1, all of which exist.

    Blocks of 1, 2, 4, ... elements are folded at every place, and those that make up the window are taken, so that
    2 log2(window) operations do; no element is ever taken back, as differences of cumulative sums would.
    """

    def pick(block: Parts, r: int) -> Parts:
        return _cut(block, axis, r * dilation, r * dilation + (out - 1) * stride + 1, stride)

    if window <= FEW:
        total = pick(parts, 0)
        for r in range(1, window):
            total = combine(total, pick(parts, r))
        return total
    total, taken, size, block = None, 0, 1, parts
    while True:
        if window & size:
            total = pick(block, taken) if total is None else combine(total, pick(block, taken))
            taken += size
            if taken == window:
                return total
        n, shift = block[0].shape[axis], size * dilation
        block = combine(_cut(block, axis, 0, n - shift), _cut(block, axis, shift, n))
        size *= 2


def fold_axis(parts: Parts, combine: Combine, axis: int) -> Parts:
    """The fold of the whole axis, which is kept with size 1."""
    size, rest = parts[0].shape[axis], []
    while size > 1:
        even = size - size % 2
        if even < size:
            rest.append(_cut(parts, axis, even, size))
        parts = combine(_cut(parts, axis, 0, even, 2), _cut(parts, axis, 1, even, 2))
        size = even // 2
    for last in reversed(rest):
        parts = combine(parts, last)
    return parts
