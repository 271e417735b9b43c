"""Errors against float64: a block of a convolution's result (``--errors``), computed on the host by NumPy.

The block of y is image 0 with the first output channels, of dx image 0 with the first input channels, of dw the first of
both; of batched rows, that of the first batch. It needs a small part of the arithmetic and every kind of element in it.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from jaxprims.bench.rows import ConvRow

FEW = 8  # channels of a block


class Block:
    """The block of one row and direction: `want` in float64, and `of` to take it from a result."""

    def __init__(self, row: ConvRow, direction: str, operands: tuple[Any, ...]):
        if row.transposed:
            raise ValueError("transposed rows have no float64 block")
        self._row, self._direction = row, direction
        self._c, self._k = row.c // row.groups, row.k // row.groups  # of group 0
        c, k = min(FEW if direction == "dgrad" else 2, self._c), min(FEW, self._k)
        one = slice(0, 1)
        if direction == "fwd":
            x, w = operands
            self._where = (one, slice(0, k))
            self.want = self._fwd(self._image(x, one, slice(0, self._c)), self._weight(w, slice(None), slice(0, k)))
        elif direction == "dgrad":
            w, dy = operands
            self._where = (one, slice(0, c))
            self.want = self._dgrad(
                self._weight(w, slice(0, c), slice(0, self._k)), self._image(dy, one, slice(0, self._k))
            )
        else:
            x, dy = operands
            self._where = (slice(0, c), slice(0, k))
            self.want = self._wgrad(self._image(x, slice(None), slice(0, c)), self._image(dy, slice(None), slice(0, k)))

    def of(self, result: Any) -> np.ndarray:
        return (self._weight if self._direction == "wgrad" else self._image)(result, *self._where)

    def error(self, result: Any) -> float:
        """|result - want| / |want| over the block."""
        return float(
            np.linalg.norm((self.of(result) - self.want).ravel()) / max(np.linalg.norm(self.want.ravel()), 1e-300)
        )

    def _host(self, a: Any) -> np.ndarray:
        return np.asarray(a.astype("float32")).astype(np.float64)

    def _image(self, a: Any, n: slice, c: slice) -> np.ndarray:
        a = a[0] if self._row.batch else a
        if self._row.channels_last:
            return self._host(a[n, ..., c])
        return np.moveaxis(self._host(a[n, c]), 1, -1)

    def _weight(self, a: Any, c: slice, k: slice) -> np.ndarray:
        a = a[0] if self._row.batch else a
        if self._row.channels_last:
            return self._host(a[..., c, k])
        return np.moveaxis(self._host(a[k, c]), (0, 1), (-1, -2))

    def _taps(self) -> Any:
        """(tap, the places of the padded input that it meets)"""
        row = self._row
        for tap in itertools.product(*(range(r) for r in row.window)):
            at = (
                slice(t * row.dilation, t * row.dilation + (p - 1) * row.stride + 1, row.stride)
                for t, p in zip(tap, row.out)
            )
            yield tap, (slice(None), *at)

    def _padded(self, x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), *[(self._row.pad,) * 2] * self._row.rank, (0, 0)])

    def _fwd(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        xp, y = self._padded(x), np.zeros((x.shape[0], *self._row.out, w.shape[-1]))
        for tap, at in self._taps():
            y += xp[at] @ w[tap]
        return y

    def _dgrad(self, w: np.ndarray, dy: np.ndarray) -> np.ndarray:
        row = self._row
        dx = np.zeros((dy.shape[0], *(h + 2 * row.pad for h in row.size), w.shape[-2]))
        for tap, at in self._taps():
            dx[at] += dy @ w[tap].T
        return dx[(slice(None), *(slice(row.pad, row.pad + h) for h in row.size))]

    def _wgrad(self, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
        xp = self._padded(x)
        dw = np.zeros((*self._row.window, x.shape[-1], dy.shape[-1]))
        flat = dy.reshape(-1, dy.shape[-1])
        for tap, at in self._taps():
            dw[tap] = xp[at].reshape(-1, x.shape[-1]).T @ flat
        return dw
