"""Pooling: the functions a user calls. Arguments and defaults are Flax's, plus ``layout`` and ``window_dilation``.

Every function takes arrays laid out as ``layout`` says, "NHWC" (channels last, the default) or "NCHW", with one to
three spatial axes (one for each entry of ``window_shape`` or ``output_size``), with any number of leading batch
axes, also none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.core import checks
from jaxprims.pool import primitive as prim
from jaxprims.pool.arguments import (
    Ints,
    Padding,
    adaptive,
    as_images,
    floating,
    rank_of,
    real,
    regular,
    regular_of,
    spatial_sizes,
    whole_image,
)
from jaxprims.pool.window import PoolParams

__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "global_avg_pool",
    "global_max_pool",
    "lp_pool",
    "max_pool",
    "max_pool_with_argmax",
    "max_unpool",
    "min_pool",
]


def _squeeze(p: PoolParams, y: jax.Array, keepdims: bool) -> jax.Array:
    return y if keepdims else jnp.squeeze(y, tuple(p.spatial(k) for k in range(p.rank)))


# --- maxima ---------------------------------------------------------------------------------------------------------


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    *,
    window_dilation: Ints | None = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Maximum over windows.

    ``y[n, p, q, c] = max over r, s of x[n, p*stride - pad + r*dilation, q*stride - pad + s*dilation, c]``

    Args:
      inputs: floating or integer array in ``layout``, e.g. (N, H, W, C); no or several batch axes are taken too.
      window_shape: one int for each spatial axis (1 to 3 of them).
      strides: int or one for each spatial axis; None: all ones.
      padding: "VALID", "SAME", "SAME_LOWER", an int, or for each spatial axis an int or a (low, high) pair.
        Negative: crops. It must be smaller than the window, on each side (Flax takes more, and gives -inf, or averages of
        padding alone, there).
      window_dilation: distance between the places of a window, int or one for each spatial axis; None: all ones.
      layout: "NHWC" or "NCHW" (for any number of spatial axes), or its 1-D and 3-D spelling.

    Returns:
      The array of maxima, of the dtype of ``inputs``.

    Numerics: exact. Padding never wins. Of equal maxima the first one in row-major order of the window is the
    winner: it alone gets the gradient. NaN beats every number (the first NaN wins and gets the gradient).
    Differentiable to any order in both modes, dilated windows included; deterministic.

    Raises:
      ValueError: a window larger than the padded input, or one that lies in padding alone: a padding of the window's
        size or more. TypeError: a bool or complex dtype.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([1.0, 5.0, 3.0, 2.0, 4.0])[:, None]
    >>> max_pool(x, (2,), strides=2)[:, 0].tolist()
    [5.0, 3.0]
    >>> jax.grad(lambda x: max_pool(x, (2,), window_dilation=2).sum())(x)[:, 0].tolist()
    [0.0, 1.0, 1.0, 0.0, 1.0]
    """
    x, last, back = as_images(real(inputs), rank_of(window_shape, "window_shape"), layout)
    p = regular(x, last, window_shape, strides, padding, window_dilation)
    return back(prim.max_pool(replace(p, indices=False), x)[0])


def min_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    *,
    window_dilation: Ints | None = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Minimum over windows; arguments, ties, NaN and errors as :func:`max_pool`.

    >>> import jax.numpy as jnp
    >>> min_pool(jnp.array([[1.0], [5.0], [3.0], [2.0]]), (2,), strides=(2,))[:, 0].tolist()
    [1.0, 2.0]
    """
    x, last, back = as_images(real(inputs), rank_of(window_shape, "window_shape"), layout)
    p = regular(x, last, window_shape, strides, padding, window_dilation)
    return back(prim.max_pool(replace(p, minimum=True, indices=False), x)[0])


def max_pool_with_argmax(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    *,
    window_dilation: Ints | None = None,
    layout: str = "NHWC",
) -> tuple[jax.Array, jax.Array]:
    """Maxima and where they are: ``(y, index)``, both of the shape of :func:`max_pool`'s result.

    ``index`` is int32 and PyTorch's: the row-major place of the winner among the spatial axes of its image and channel,
    ``h * W + w``. Ties and NaN: the first in row-major order. Arguments and errors as :func:`max_pool`; the gradient
    flows through y.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(16.0).reshape(4, 4, 1)
    >>> y, index = max_pool_with_argmax(x, (2, 2), strides=2)
    >>> y[..., 0].tolist(), index[..., 0].tolist()
    ([[5.0, 7.0], [13.0, 15.0]], [[5, 7], [13, 15]])
    """
    x, last, back = as_images(real(inputs), rank_of(window_shape, "window_shape"), layout)
    p = regular(x, last, window_shape, strides, padding, window_dilation)
    y, index = _with_index(p, x)
    return back(y), back(index)


def _with_index(p: PoolParams, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if math.prod(p.in_size) > checks.INT32_MAX:
        raise ValueError(f"inputs has {math.prod(p.in_size)} elements in an image; int32 indices need less than 2^31.")
    y, index = prim.max_pool(replace(p, flat=True), x)
    return y, index


def max_unpool(
    inputs: jax.Array,
    indices: jax.Array,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    *,
    window_dilation: Ints | None = None,
    output_size: Sequence[int] | None = None,
    layout: str = "NHWC",
) -> jax.Array:
    """The inverse of :func:`max_pool_with_argmax`: every value at its index, zero elsewhere.

    Args:
      inputs, indices: values, and the int indices as :func:`max_pool_with_argmax` gives them; the same shape.
      window_shape, strides, padding, window_dilation, layout: as given to :func:`max_pool_with_argmax`.
      output_size: spatial sizes of the result (and of the pool's input). None: the smallest that fits,
        ``(out - 1) * stride + window - padding``; needed for the paddings that depend on the size, e.g. "SAME".

    Numerics: linear in ``inputs``. Values of overlapping windows with the same index are summed (in float32 for half
    types), always in the same order, so that this is exactly the transpose of picking by index. An index that is not
    inside the window of its output (from another pool, negative or too large) places nothing.

    >>> import jax.numpy as jnp
    >>> y, index = max_pool_with_argmax(jnp.array([1.0, 5.0, 3.0, 2.0])[:, None], (2,), strides=2)
    >>> max_unpool(y, index, (2,), strides=2)[:, 0].tolist()
    [0.0, 5.0, 3.0, 0.0]
    """
    values, indices = real(inputs), checks.as_array(indices, "indices")
    rank = rank_of(window_shape, "window_shape")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices has dtype {indices.dtype}; give the integer indices of max_pool_with_argmax.")
    if indices.shape != values.shape:
        raise ValueError(f"indices has shape {indices.shape}, inputs has {values.shape}; they must be equal.")
    y, last, back = as_images(values, rank, layout)
    index, _, _ = as_images(indices, rank, layout)
    got = spatial_sizes(y, rank, last)
    window = checks.canonical_tuple(window_shape, rank, "window_shape")
    steps = (1,) * rank if strides is None else checks.canonical_tuple(strides, rank, "strides")
    dilation = checks.canonical_tuple(1 if window_dilation is None else window_dilation, rank, "window_dilation")
    if output_size is None:
        if isinstance(padding, str) and padding.upper() != "VALID":
            raise ValueError(
                f"padding={padding!r} does not tell the output's size; give output_size, the sizes that were pooled."
            )
        pads = checks.canonical_padding(padding, got, window, steps, dilation)
        sizes = tuple(
            (o - 1) * s + (w - 1) * d + 1 - lo - hi
            for o, s, w, d, (lo, hi) in zip(got, steps, window, dilation, pads, strict=True)
        )
    else:
        sizes = checks.canonical_tuple(output_size, rank, "output_size")
        pads = checks.canonical_padding(padding, sizes, window, steps, dilation)
    p = regular_of(sizes, window, steps, pads, dilation, last)
    if p.out_size != got:
        raise ValueError(
            f"output_size={sizes} is pooled to {p.out_size} by this window, inputs has {got}; "
            "give the sizes that were pooled."
        )
    if math.prod(sizes) > checks.INT32_MAX:
        raise ValueError(f"output_size={sizes} has {math.prod(sizes)} elements; int32 indices need less than 2^31.")
    return back(prim.max_pool_scatter(replace(p, flat=True), y, _int32(index))[0])


def _int32(index: jax.Array) -> jax.Array:
    if jnp.iinfo(index.dtype).max > checks.INT32_MAX:  # what int32 does not hold is outside every image
        index = jnp.where((index >= 0) & (index <= checks.INT32_MAX), index, -1)
    return index.astype(jnp.int32)


# --- averages and norms ---------------------------------------------------------------------------------------------


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
    *,
    window_dilation: Ints | None = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Average over windows: ``y[n, p, q, c] = sum over r, s of x[...] / count``, places as in :func:`max_pool`.

    Args:
      count_include_pad: True (Flax's default): ``count`` is the number of the window's places. False: of those
        inside the input.
      The others: as :func:`max_pool`; ``inputs`` must be floating.

    Numerics: half types are summed in float32 and rounded once; the result has the dtype of ``inputs``. Linear:
    derivatives of any order in both modes; deterministic.

    Raises:
      ValueError: as :func:`max_pool`. TypeError: integer inputs (cast them with
        ``.astype(jnp.float32)``).

    >>> import jax.numpy as jnp
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])[..., None]
    >>> avg_pool(x, (2, 2), padding="SAME").ravel().tolist()
    [2.5, 1.5, 1.75, 1.0]
    >>> avg_pool(x, (2, 2), padding="SAME", count_include_pad=False).ravel().tolist()
    [2.5, 3.0, 3.5, 4.0]
    """
    x, last, back = as_images(floating(inputs), rank_of(window_shape, "window_shape"), layout)
    p = regular(x, last, window_shape, strides, padding, window_dilation)
    return back(prim.avg_pool(replace(p, divisor="window" if count_include_pad else "valid"), x)[0])


def lp_pool(
    inputs: jax.Array,
    p: float,
    window_shape: Sequence[int],
    strides: Ints | None = None,
    padding: Padding = "VALID",
    *,
    window_dilation: Ints | None = None,
    layout: str = "NHWC",
) -> jax.Array:
    """p-norm over windows: ``y = (sum |x|^p)^(1/p)``, places as in :func:`max_pool`; padding adds nothing.

    Args:
      p: the exponent, positive and finite (for infinity pool ``abs(inputs)`` with :func:`max_pool`).
      The others: as :func:`max_pool`; ``inputs`` must be floating.

    Numerics: half types are computed in float32 and rounded once. The sum of p-th powers is float32 (float64 for
    float64): it overflows to inf where |x| is above about 1e38^(1/p), and underflows to 0 below 1e-38^(1/p); for large p
    divide ``inputs`` by their maximum first. The gradient is 0 where y is 0.

    Raises:
      ValueError: as :func:`max_pool`, a p that is not positive and finite. TypeError: integer inputs, a p that is no number.

    >>> import jax.numpy as jnp
    >>> lp_pool(jnp.array([[3.0], [-4.0]]), 2, (2,)).tolist()
    [[5.0]]
    """
    order = checks.as_number(p, "p")
    if not (0 < order < math.inf):
        remedy = "pool abs(inputs) with max_pool for infinity" if order == math.inf else "give a positive number"
        raise ValueError(f"p={p!r} must be positive and finite; {remedy}.")
    x, last, back = as_images(floating(inputs), rank_of(window_shape, "window_shape"), layout)
    params = regular(x, last, window_shape, strides, padding, window_dilation)
    (total,) = prim.avg_pool(params, _power(x, order))
    return back(_root(total, order, x.dtype.name))


# jit: an eager call moves no constant to the device. checkpoint: a derivative keeps the argument, not a float32 factor.


@functools.partial(jax.jit, static_argnums=1, inline=True)
@functools.partial(jax.checkpoint, static_argnums=1, prevent_cse=False)
def _power(x: jax.Array, order: float) -> jax.Array:
    """|x|^order in the wide dtype, with the gradient 0 at 0 (and the right second one for even orders)."""
    x = checks.as_float32(x)
    if order % 2 == 0 and order <= 64:
        return jax.lax.integer_pow(x, int(order))
    return _smooth(jnp.abs(x), order)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
@functools.partial(jax.checkpoint, static_argnums=(1, 2), prevent_cse=False)
def _root(total: jax.Array, order: float, dtype: str) -> jax.Array:
    return (total if order == 1 else _smooth(total, 1 / order)).astype(dtype)


def _smooth(a: jax.Array, order: float) -> jax.Array:
    """a^order for a >= 0, of which the value and every derivative are 0 at 0."""
    zero = (a == 0).astype(a.dtype)
    return (a if order == 1 else (a + zero) ** order) * (1 - zero)


# --- adaptive and global --------------------------------------------------------------------------------------------


def adaptive_avg_pool(inputs: jax.Array, output_size: Any, *, layout: str = "NHWC") -> jax.Array:
    """Averages over ``output_size`` windows that cover the input: window i is ``[floor(i*in/out),
    ceil((i+1)*in/out))`` (PyTorch's).

    Args:
      inputs: floating array in ``layout``; no or several batch axes are taken too.
      output_size: one int for each spatial axis (None: that axis stays), or one int for all axes that ``layout`` names;
        at most 65536 per axis, or the input's size if that is larger.

    Numerics: as :func:`avg_pool`.

    >>> import jax.numpy as jnp
    >>> adaptive_avg_pool(jnp.arange(1.0, 6.0)[:, None], (3,))[:, 0].tolist()  # windows [0,2) [1,4) [3,5)
    [1.5, 3.0, 4.5]
    """
    x, p, back = adaptive(floating(inputs), output_size, layout)
    return back(prim.avg_pool(replace(p, divisor="valid"), x)[0])


def adaptive_max_pool(
    inputs: jax.Array, output_size: Any, *, return_indices: bool = False, layout: str = "NHWC"
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Maxima over the windows of :func:`adaptive_avg_pool`; ties and NaN as :func:`max_pool`.

    ``return_indices=True`` gives ``(y, index)`` with :func:`max_pool_with_argmax`'s int32 index.

    >>> import jax.numpy as jnp
    >>> y, index = adaptive_max_pool(jnp.arange(1.0, 6.0)[:, None], (3,), return_indices=True)
    >>> y[:, 0].tolist(), index[:, 0].tolist()
    ([2.0, 4.0, 5.0], [1, 3, 4])
    """
    x, p, back = adaptive(real(inputs), output_size, layout)
    if return_indices:
        y, index = _with_index(p, x)
        return back(y), back(index)
    return back(prim.max_pool(replace(p, indices=False), x)[0])


def global_avg_pool(inputs: jax.Array, *, keepdims: bool = False, layout: str = "NHWC") -> jax.Array:
    """Average over all spatial axes, (N, H, W, C) -> (N, C); ``layout`` tells how many there are ("NWC", "NHWC",
    "NDHWC", ...).

    ``keepdims`` leaves the spatial axes with size one. Numerics as :func:`avg_pool`: a float16 image of any size has
    the right average.

    >>> import jax.numpy as jnp
    >>> global_avg_pool(jnp.ones((1, 256, 256, 1), jnp.float16)).tolist()
    [[1.0]]
    """
    x, p, back = whole_image(floating(inputs), layout)
    return back(_squeeze(p, prim.avg_pool(replace(p, divisor="window"), x)[0], keepdims))


def global_max_pool(inputs: jax.Array, *, keepdims: bool = False, layout: str = "NHWC") -> jax.Array:
    """Maximum over all spatial axes, (N, H, W, C) -> (N, C); ties and NaN as :func:`max_pool`, axes as
    :func:`global_avg_pool`.

    >>> import jax.numpy as jnp
    >>> global_max_pool(jnp.arange(8.0).reshape(1, 2, 2, 2)).tolist()
    [[6.0, 7.0]]
    """
    x, p, back = whole_image(real(inputs), layout)
    return back(_squeeze(p, prim.max_pool(replace(p, indices=False), x)[0], keepdims))
