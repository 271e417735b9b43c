"""Pools in NumPy float64, from the formulas: plain loops over outputs and window places, one image at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Positions = list[list[int | None]]  # for each output along an axis: the element of every place, None in the padding


def regular(size: int, window: int, stride: int, pad: tuple[int, int], dilation: int) -> Positions:
    out = (size + pad[0] + pad[1] - (window - 1) * dilation - 1) // stride + 1
    rows: Positions = []
    for o in range(out):
        at = [o * stride - pad[0] + r * dilation for r in range(window)]
        rows.append([i if 0 <= i < size else None for i in at])
    return rows


def adaptive(size: int, out: int) -> Positions:
    return [list(range(math.floor(o * size / out), math.ceil((o + 1) * size / out))) for o in range(out)]


def same(size: int, window: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    total = max(((size + stride - 1) // stride - 1) * stride + (window - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def axes(
    sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int] | None = None,
    pads: Any = None,
    dilation: Sequence[int] | None = None,
) -> list[Positions]:
    n = len(sizes)
    strides, dilation = strides or (1,) * n, dilation or (1,) * n
    if pads == "SAME":
        pads = [same(*a) for a in zip(sizes, window, strides, dilation)]
    return [regular(*a) for a in zip(sizes, window, strides, pads or [(0, 0)] * n, dilation)]


def _each(x: np.ndarray, where: list[Positions], last: bool, fn: Callable[[np.ndarray, list[Any]], Any]) -> np.ndarray:
    """fn(image, its window's elements in row-major order, None in padding) for every image, channel and output."""
    rank = len(where)
    planes = np.moveaxis(x, -1, -1 - rank) if last else x
    lead, out = planes.shape[: planes.ndim - rank], tuple(len(w) for w in where)
    y = np.zeros((*lead, *out))
    for at in itertools.product(*map(range, lead)):
        for o in itertools.product(*map(range, out)):
            places = itertools.product(*(w[k] for w, k in zip(where, o)))
            y[(*at, *o)] = fn(planes[at], [None if None in p else p for p in places])
    return np.moveaxis(y, -1 - rank, -1) if last else y


def _first_best(image: np.ndarray, places: list[Any], sign: float) -> Any:
    best = None
    for p in places:
        if p is None:
            continue
        if best is None or (np.isnan(image[p]) and not np.isnan(image[best])) or sign * image[p] > sign * image[best]:
            best = p
    return best


def max_pool(x: np.ndarray, where: list[Positions], last: bool = True, sign: float = 1.0) -> np.ndarray:
    return _each(x, where, last, lambda image, places: image[_first_best(image, places, sign)])


def argmax_pool(x: np.ndarray, where: list[Positions], last: bool = True) -> np.ndarray:
    def flat(image: np.ndarray, places: list[Any]) -> int:
        return int(np.ravel_multi_index(_first_best(image, places, 1.0), image.shape))

    return _each(x, where, last, flat).astype(np.int32)


def max_pool_grad(x: np.ndarray, dy: np.ndarray, where: list[Positions], last: bool = True) -> np.ndarray:
    """dx: every dy added to the element that won; by way of the flat indices."""
    return unpool(dy, argmax_pool(x, where, last), x.shape, len(where), last)


def unpool(y: np.ndarray, index: np.ndarray, shape: tuple[int, ...], rank: int, last: bool = True) -> np.ndarray:
    def planes(v: np.ndarray) -> np.ndarray:
        v = np.moveaxis(v, -1, -1 - rank) if last else v
        return v.reshape(*v.shape[: v.ndim - rank], -1)

    dx = np.zeros(shape)
    view = np.moveaxis(dx, -1, -1 - rank) if last else dx
    y, index = planes(y), planes(index).astype(int)
    for at in itertools.product(*map(range, y.shape[:-1])):
        plane = np.zeros(math.prod(view.shape[view.ndim - rank :]))
        for v, i in zip(y[at], index[at]):
            plane[i] += v
        view[at] = plane.reshape(view.shape[view.ndim - rank :])
    return dx


def avg_pool(x: np.ndarray, where: list[Positions], last: bool = True, count_pad: bool = False) -> np.ndarray:
    def mean(image: np.ndarray, places: list[Any]) -> float:
        inside = [image[p] for p in places if p is not None]
        return float(np.sum(inside)) / (len(places) if count_pad else len(inside))

    return _each(x, where, last, mean)


def lp_pool(x: np.ndarray, p: float, where: list[Positions], last: bool = True) -> np.ndarray:
    return _each(x, where, last, lambda im, at: np.sum([abs(im[q]) ** p for q in at if q is not None]) ** (1 / p))
