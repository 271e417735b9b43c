"""Public convolutions: ``conv_general_dilated`` (jax.lax's, argument for argument) and ``conv`` (layouts, fused epilogue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax

from jaxprims.conv import primitive
from jaxprims.conv.checks import build_params, canonical_specs, check_algorithm, specs_and_images
from jaxprims.conv.epilogue import with_epilogue
from jaxprims.conv.transpose import conv_transpose
from jaxprims.core.checks import as_array
from jaxprims.core.sharding import with_out_sharding

__all__ = ["conv", "conv_general_dilated", "conv_transpose"]


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolution with the arguments and results of :func:`jax.lax.conv_general_dilated`.

    Along each spatial axis, with low padding ``a``::

        y[n, p, k] = sum over r, c of  x[n, (p * stride + r * rhs_dilation - a) / lhs_dilation, c] * w[r, c, k]

    where a tap counts if the division is exact and the index lies in x (cross-correlation: w is not reversed).
    With ``feature_group_count`` G, output channels [g K/G, (g+1) K/G) see input channels [g C/G, (g+1) C/G) only; with
    ``batch_group_count`` G they see images [g N/G, (g+1) N/G), and y has N/G images.

    Args:
      lhs: x, and rhs: w, of one dtype and the same number of axes.
      window_strides: one positive int per spatial axis.
      padding: "SAME", "SAME_LOWER", "VALID", or a (low, high) pair per spatial axis; negative pairs crop.
      lhs_dilation, rhs_dilation: spacing of the elements of x and of w; default 1.
      dimension_numbers: None (channels first), a ConvDimensionNumbers, or strings like ("NHWC", "HWIO", "NHWC").
      feature_group_count, batch_group_count: at most one above 1.
      precision: as in jax.lax; ``jax.default_matmul_precision`` is read where None is given, and the derivatives run at the
        precision of their forward call.
      preferred_element_type: dtype of the result (int8 with int32, bfloat16 with float32, ...).
      out_sharding: on a mesh with explicit axes, a PartitionSpec or NamedSharding that the result shall have, as in jax.lax.

    Numerics: the CUDA kernels add in float32 and round once. Operands of float32 may be rounded to TF32 (11 significant bits)
    at the default precision, as XLA does on a GPU; at HIGH and HIGHEST they are not. The reference,
    which runs elsewhere and for other dtypes, hands ``precision`` to XLA; HIGHEST is exact float32. It computes floats of 8 bits
    in float32, too, and rounds once.

    A window larger than the padded input gives an empty result. Raises ValueError or TypeError, while tracing, for sizes,
    groups, strides, dilations, padding or dtypes that do not fit.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.array([[[1., 2., 3., 4.]]]), jnp.array([[[1., 10., 100.]]])
    >>> conv_general_dilated(x, w, (1,), [(2, 0)])[0, 0].tolist()
    [100.0, 210.0, 321.0, 432.0]
    """
    x, w = as_array(lhs, "lhs"), as_array(rhs, "rhs")
    params = build_params(
        x,
        w,
        canonical_specs(x, w, dimension_numbers),
        strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        groups=feature_group_count,
        batch_groups=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
        names=("window_strides", "lhs_dilation", "rhs_dilation", "feature_group_count"),
    )
    return with_out_sharding(primitive.conv(params, x, w)[0], out_sharding)


def conv(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | int | Sequence[int | tuple[int, int]] = "SAME",
    input_dilation: int | Sequence[int] = 1,
    kernel_dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    dimension_numbers: Any = "NHWC",
    activation: str | None = None,
    residual: jax.Array | None = None,
    mode: Literal["cross_correlation", "convolution"] = "cross_correlation",
    precision: Any = None,
    preferred_element_type: Any = None,
    algorithm: str = "auto",
    out_sharding: Any = None,
) -> jax.Array:
    """``activation(conv(x, w) + bias + residual)`` in one pass over y, with one, two or three spatial axes.

    Args:
      x: (*batch, H, W, C) in "NHWC", (*batch, C, H, W) in "NCHW": any number of batch axes, or none, as Flax takes them.
      w: HWIO in "NHWC", OIHW in "NCHW", with C / feature_group_count input channels. Its number of axes says how many
        spatial axes there are; axes of x in front of these and the channels are batch axes, as in Flax.
      bias: (K,), of x's dtype, the result's, or float32 beside half types; a scalar is not broadcast.
      strides, input_dilation, kernel_dilation: an int, or one per spatial axis.
      padding: "SAME", "SAME_LOWER", "VALID", "CAUSAL" (one spatial axis), an int, or an int or (low, high) pair per axis.
      dimension_numbers: "NHWC", "NCHW" (either stands for any number of spatial axes), "NWC", "NDHWC", "NCW", "NCDHW", or
        what ``jax.lax.conv_general_dilated`` takes (then x has exactly one batch axis).
      activation: a name ("relu", "silu", "gelu", ...) or None. residual: of y's shape and dtype.
      mode: "cross_correlation" (jax.lax, Flax), or "convolution", which reverses w along its spatial axes.
      algorithm: "auto", or what the CUDA kernels shall use where it can be: "implicit_gemm" (tiles of a matrix product whose
        patches exist on the chip alone), "direct" (one sum per thread), "gemm" (patches written out, in up to 64 MiB of workspace,
        then a matrix product: Caffe's way, to be measured against; "NHWC" and one group). Derivatives of "gemm" and what vmap
        makes of it choose as "auto" does; the reference is always the same. out_sharding: as in :func:`conv_general_dilated`.

    Numerics: bias, residual and activation are applied to the float32 accumulator, and the result is rounded once; integers
    wrap as in jax.lax. See :func:`conv_general_dilated` for precision. Under differentiation, activations whose slope the result
    does not tell (all but relu, relu6, leaky_relu, softplus, log_sigmoid) are taken, value and slope, of the pre-activation as
    rounded to the result's dtype: one convolution gives it, it is what is kept, and the result is rounded once more.

    Raises ValueError or TypeError, while tracing, for what does not fit, and, unlike :func:`conv_general_dilated`, for a
    window larger than the padded image (an image with no elements gives an empty result).

    >>> import jax.numpy as jnp
    >>> x, w = jnp.array([[1.], [2.], [3.], [4.]]), jnp.array([1., 10., 100.]).reshape(3, 1, 1)
    >>> conv(x, w, jnp.array([-300.]), padding="CAUSAL", activation="relu")[:, 0].tolist()
    [0.0, 0.0, 21.0, 132.0]
    """
    x, w = as_array(x, "x"), as_array(w, "w")
    if mode not in ("cross_correlation", "convolution"):
        raise ValueError(f"mode={mode!r} is not known; give 'cross_correlation' or 'convolution'.")
    specs, x, batch = specs_and_images(x, w, dimension_numbers)
    params = build_params(
        x,
        w,
        specs,
        strides=strides,
        padding=padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        groups=feature_group_count,
        flip=mode == "convolution",
        precision=precision,
        preferred_element_type=preferred_element_type,
        names=("strides", "input_dilation", "kernel_dilation", "feature_group_count"),
        empty_ok=False,
    )
    params = replace(params, algorithm=check_algorithm(algorithm, params, x))
    return with_out_sharding(with_epilogue(params, x, w, bias, residual, activation, batch), out_sharding)
