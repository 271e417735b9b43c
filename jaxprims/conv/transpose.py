"""Transposed convolution: a convolution of x with its elements ``strides`` apart, in two conventions of padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax import lax

from jaxprims.conv.checks import build_params, canonical_specs, specs_and_images
from jaxprims.conv.epilogue import with_epilogue
from jaxprims.conv.params import dilated, gather
from jaxprims.conv.reference import move_groups
from jaxprims.core.checks import as_array, canonical_int, canonical_padding, canonical_tuple, padding_forms

_WORDS = ("SAME", "VALID")


def conv_transpose(
    lhs: jax.Array,
    rhs: jax.Array,
    strides: int | Sequence[int] | None,
    padding: str | int | Sequence[int | tuple[int, int]],
    rhs_dilation: int | Sequence[int] | None = None,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    use_consistent_padding: bool = False,
    *,
    padding_convention: Literal["lax", "torch"] = "lax",
    output_padding: int | Sequence[int] = 0,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    feature_group_count: int = 1,
) -> jax.Array:
    """Transposed ("fractionally strided") convolution, with the arguments of :func:`jax.lax.conv_transpose`.

    The stride sets x's elements ``strides`` apart and the window then moves by one::

        y[n, p, k] = sum over r, c of  x[n, (p + r * rhs_dilation - a) / stride, c] * w[r, c, k]

    With d = (kernel - 1) * rhs_dilation, the reach less one, ``padding`` means:

    ======================  ==================================================================================
    "VALID"                 low padding a = d, size (in - 1) * stride + d + 1, and at least in * stride
    "SAME"                  size in * stride
    pairs, "lax"            zeros added around the spread-out x: a = low, size (in - 1) * stride + 1 + low + high - d
    int or pairs, "torch"   what is cropped from the full result: a = d - low, size
                            (in - 1) * stride + d + 1 - low - high + output_padding, as torch.nn.ConvTranspose
    ======================  ==================================================================================

    Args:
      lhs: x, (*batch, H, W, C) with any number of batch axes, or none; with dimension_numbers="NCHW": (*batch, C, H, W).
      rhs: w, HWIO; with "NCHW": OIHW. Its number of axes says how many spatial axes there are, none to three.
      strides: an int, one per spatial axis, or None for 1. rhs_dilation likewise.
      dimension_numbers: None for "NHWC", or as in :func:`jaxprims.conv`: other than a layout's name, x has exactly one batch axis.
      transpose_kernel: reverses w and exchanges its channel axes, so that the result is the gradient of a convolution with w
        in its input: Keras' and PyTorch's kernels (a PyTorch weight is the "OIHW" of "NCHW" with ``transpose_kernel=True``).
        Costs nothing without groups: the kernels read w that way.
      padding_convention: "lax" or "torch", which says what numbers mean (the strings mean the same in both);
        ``use_consistent_padding=True``, jax.lax's name for it, is "torch".
      output_padding: with "torch", elements added at the high end, fewer than the stride or the dilation.
      bias, activation, residual: as in :func:`jaxprims.conv`.
      feature_group_count: G groups of C / G input and K / G output channels. w holds C / G x K of them; with
        ``transpose_kernel``, the convolution that is transposed has the groups: w holds K / G x C.
      precision, preferred_element_type: as in :func:`jaxprims.conv_general_dilated`, also for numerics and errors.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.array([[[1.], [2.], [3.]]]), jnp.array([1., 10., 100.]).reshape(3, 1, 1)
    >>> conv_transpose(x, w, (2,), "VALID").ravel().tolist()
    [100.0, 10.0, 201.0, 20.0, 302.0, 30.0, 3.0]
    >>> conv_transpose(x, w, (2,), 1, transpose_kernel=True, padding_convention="torch").ravel().tolist()
    [10.0, 102.0, 20.0, 203.0, 30.0]
    """
    x, w = as_array(lhs, "lhs"), as_array(rhs, "rhs")
    if padding_convention not in ("lax", "torch"):
        raise ValueError(f"padding_convention={padding_convention!r} is not known; give 'lax' or 'torch'.")
    torch = use_consistent_padding or padding_convention == "torch"
    if dimension_numbers is None and w.ndim == 2:
        specs, batch = canonical_specs(x, w, ("NC", "IO", "NC")), None
    else:
        specs, x, batch = specs_and_images(x, w, "NHWC" if dimension_numbers is None else dimension_numbers)
    rank = w.ndim - 2
    stride = canonical_tuple(1 if strides is None else strides, rank, "strides")
    dilation = canonical_tuple(1 if rhs_dilation is None else rhs_dilation, rank, "rhs_dilation")
    window = gather(w.shape, specs.rhs_spec, 0)[2:]
    extra = canonical_tuple(output_padding, rank, "output_padding", low=0)
    if any(extra) and (not torch or isinstance(padding, str)):
        raise ValueError(f"output_padding={output_padding!r} needs padding_convention='torch' and padding in numbers.")
    for e, s, d in zip(extra, stride, dilation, strict=True):
        if e and e >= max(s, d):
            raise ValueError(
                f"output_padding={output_padding!r} must be smaller than the stride or the dilation, {max(s, d)}."
            )
    if isinstance(padding, str):
        pads = _string_padding(padding, window, stride, dilation)
    else:
        pads = canonical_padding(padding, (0,) * rank, window, stride, dilation, words=_WORDS)
        if torch:
            reach = [dilated(k, d) for k, d in zip(window, dilation, strict=True)]
            pads = tuple((r - 1 - lo, r - 1 - hi + e) for r, (lo, hi), e in zip(reach, pads, extra, strict=True))
    if transpose_kernel:
        out, into, *spatial = specs.rhs_spec
        groups = canonical_int(feature_group_count, "feature_group_count", low=1)
        if groups > 1 and w.shape[out] % groups:
            raise ValueError(
                f"feature_group_count={groups} must divide the {w.shape[out]} input channels (axis {out} of w, shape {w.shape})."
            )
        if groups > 1:  # the groups move from the axis of the input channels to that of the produced ones
            w = move_groups(w, out, into, groups)
        specs = lax.ConvDimensionNumbers(specs.lhs_spec, (into, out, *spatial), specs.out_spec)
    params = build_params(
        x,
        w,
        specs,
        strides=1,
        padding=pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        groups=feature_group_count,
        flip=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
        names=("strides", "strides", "rhs_dilation", "feature_group_count"),
    )
    return with_epilogue(params, x, w, bias, residual, activation, batch)


def _string_padding(padding: str, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> tuple:
    """Padding of the spread-out x for the "SAME" or "VALID" of the forward convolution that this one transposes."""
    word = padding.upper()
    if word not in _WORDS:
        raise ValueError(f"padding={padding!r} is not known; give {padding_forms(len(window), _WORDS)}.")
    pads = []
    for k, s, d in zip(window, strides, dilation, strict=True):
        reach = dilated(k, d)
        if word == "SAME":
            total = reach + s - 2
            low = reach - 1 if s > reach - 1 else -(-total // 2)
        else:
            total = reach + s - 2 + max(reach - s, 0)
            low = reach - 1
        pads.append((low, total - low))
    return tuple(pads)
