"""What a convolution is, apart from its operands: the static options and the arithmetic of its sizes.

Names: N images, C input channels, K output channels; x has C, y has K; the kernel w holds K x C/groups taps per position.
Spatial sizes are three tuples: of x, of w, of y, in the order of the kernel's spatial axes. For one spatial axis,

    y[p] = sum over r of  x[(p * stride + r * rhs_dilation - low) / lhs_dilation] * w[r]

where a tap counts if the division is exact and its index lies in x. ``flip`` reverses w (true convolution).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprims.core.checks import is_static, short

Spec = tuple[int, ...]


# What a caller may ask for, with the codes of cuda/conv/problem.h.
ALGORITHMS = {"auto": 0, "implicit_gemm": 1, "direct": 2, "gemm": 3}


@dataclass(frozen=True)
class ConvParams:
    """Options of conv, conv_dx, conv_dw and conv_fused.

    The specs are positions as in ``jax.lax.ConvDimensionNumbers``, counted without the optional leading batch axis B that
    the ``*_batched`` flags announce. Spatial sizes are here because dx and dw cannot learn them from their operands; batch
    and channel sizes are not, because those axes may be sharded: dx takes N from dy and C from w (times the feature
    groups), dw takes C from x and K from dy.
    """

    lhs_spec: Spec
    rhs_spec: Spec
    out_spec: Spec
    strides: Spec
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Spec
    rhs_dilation: Spec
    x_spatial: Spec
    w_spatial: Spec
    groups: int = 1
    batch_groups: int = 1
    flip: bool = False
    precision: Any = None  # None, a lax.Precision, or a pair of them
    dtype: str | None = None  # dtype of the result; None: that of the operands
    algorithm: str = "auto"  # of ALGORITHMS
    x_batched: bool = False
    w_batched: bool = False
    y_batched: bool = False
    # conv_fused only
    activation: str | None = None
    has_bias: bool = False
    has_residual: bool = False
    bias_batched: bool = False
    residual_batched: bool = False

    @property
    def rank(self) -> int:
        return len(self.strides)

    @property
    def y_spatial(self) -> Spec:
        return tuple(
            window_count(dilated(i, ld) + lo + hi, dilated(k, rd), s)
            for i, k, s, (lo, hi), ld, rd in zip(
                self.x_spatial,
                self.w_spatial,
                self.strides,
                self.padding,
                self.lhs_dilation,
                self.rhs_dilation,
                strict=True,
            )
        )

    def result_dtype(self, operand: Any) -> jnp.dtype:
        return jnp.dtype(operand.dtype if self.dtype is None else self.dtype)

    def linear(self, dtype: Any = None) -> ConvParams:
        """The options of the bilinear part alone (no bias, residual, activation), with another result dtype."""
        return replace(
            self,
            dtype=None if dtype is None else jnp.dtype(dtype).name,
            activation=None,
            has_bias=False,
            has_residual=False,
            bias_batched=False,
            residual_batched=False,
        )


def dilated(size: Any, dilation: int) -> Any:
    """The extent of ``size`` elements that stand ``dilation`` apart; 0 for none."""
    if dilation == 1:
        return size
    if is_static(size):
        return (size - 1) * dilation + 1 if size > 0 else 0
    return (size - 1) * dilation + 1


def window_count(size: Any, window: Any, stride: int) -> Any:
    """How many windows fit: 0 where the window is larger than the (padded) size."""
    count = (size - window) // stride + 1
    return max(count, 0) if is_static(count) else count


def gather(shape: Sequence[Any], spec: Sequence[int], offset: int) -> tuple[Any, ...]:
    """Sizes in the order of the spec (batch, feature, spatial...), behind ``offset`` leading axes."""
    return tuple(shape[offset + i] for i in spec)


def scatter(sizes: Sequence[Any], spec: Spec) -> tuple[Any, ...]:
    """The inverse of gather: the shape whose axis spec[i] has sizes[i]."""
    shape: list[Any] = [None] * len(spec)
    for size, axis in zip(sizes, spec, strict=True):
        shape[axis] = size
    return tuple(shape)


def spatial_of(shape: Sequence[Any], spec: Spec, offset: int = 0) -> tuple[Any, ...]:
    return gather(shape, spec, offset)[2:]


def leading(*pairs: tuple[Any, bool]) -> tuple[Any, ...]:
    """(B,) from the first batched operand, or ()."""
    return next((tuple(x.shape[:1]) for x, batched in pairs if batched), ())


def y_shape(p: ConvParams, x: Any, w: Any) -> tuple[Any, ...]:
    n = gather(x.shape, p.lhs_spec, p.x_batched)[0]
    k = gather(w.shape, p.rhs_spec, p.w_batched)[0]
    n = n // p.batch_groups if p.batch_groups > 1 else n
    return scatter((n, k, *p.y_spatial), p.out_spec)


def x_shape(p: ConvParams, dy: Any, w: Any) -> tuple[Any, ...]:
    n = gather(dy.shape, p.out_spec, p.y_batched)[0] * p.batch_groups
    c = gather(w.shape, p.rhs_spec, p.w_batched)[1] * p.groups
    return scatter((n, c, *p.x_spatial), p.lhs_spec)


def w_shape(p: ConvParams, x: Any, dy: Any) -> tuple[Any, ...]:
    c = gather(x.shape, p.lhs_spec, p.x_batched)[1]
    k = gather(dy.shape, p.out_spec, p.y_batched)[1]
    return scatter((k, c // p.groups if p.groups > 1 else c, *p.w_spatial), p.rhs_spec)


def dw_shape(p: ConvParams, x: Any, dy: Any) -> tuple[Any, ...]:
    """w's, with the batch axis that x or dy has."""
    return leading((x, p.x_batched), (dy, p.y_batched)) + w_shape(p, x, dy)


def flops(y: Sequence[Any], w: Sequence[Any], p: ConvParams) -> int:
    """2 N P Q K (C / groups) R S, times the batch axis; 0 where a size is symbolic. ``y`` carries the batch axis."""
    taps = (gather(w, p.rhs_spec, 0)[1], *p.w_spatial)
    return 2 * math.prod((*y, *taps)) if is_static(*y, *taps) else 0


def canonical_precision(precision: Any) -> Any:
    """None, one ``lax.Precision`` or a pair, with ``jax.default_matmul_precision`` as it stands now where None is given.

    It is read here, while the caller is traced, and travels with the operation, so that dx and dw run at the precision of
    their forward convolution. A dot algorithm says nothing about a convolution, here as in ``jax.lax``.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return None
    if isinstance(precision, str) and hasattr(lax.DotAlgorithmPreset, precision):
        return None
    items = tuple(precision) if isinstance(precision, (tuple, list)) else (precision, precision)
    try:
        if len(items) != 2 or not all(v is None or isinstance(v, (str, lax.Precision)) for v in items):
            raise ValueError  # lax.Precision takes ints and bools too
        pair = tuple(lax.Precision(v) for v in items)
    except ValueError:
        raise ValueError(
            f"precision={short(precision)} is not known; give None, 'default', 'high', 'highest', a jax.lax.Precision, or a pair "
            "of these (for x and for w)."
        ) from None
    return pair[0] if pair[0] == pair[1] else pair


def allows_tf32(precision: Any) -> bool:
    """Whether float32 operands may be rounded to TF32: where neither of them asks for more than the default, as in XLA on a GPU.

    HIGH and HIGHEST are float32 throughout.
    """
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    return all(v in (None, lax.Precision.DEFAULT) for v in pair)
