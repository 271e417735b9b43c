"""From what a user may write to ConvParams, with every complaint that a convolution can have about its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxprims.conv.params import ALGORITHMS, ConvParams, Spec, canonical_precision, dilated, gather
from jaxprims.conv.workspace import MOST_WORKSPACE, image_patches
from jaxprims.core.checks import (
    INT32_MAX,
    canonical_int,
    canonical_padding,
    canonical_tuple,
    check_same_dtype,
    check_width,
    is_static,
    short,
    wide_dtype,
)


def build_params(
    x: Any,
    w: Any,
    specs: lax.ConvDimensionNumbers,
    *,
    strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    groups: int,
    batch_groups: int = 1,
    flip: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    names: tuple[str, str, str, str] = ("strides", "lhs_dilation", "rhs_dilation", "feature_group_count"),
    empty_ok: bool = True,
) -> ConvParams:
    """Checked options of conv(x, w). ``names``: what the caller's arguments are called in the messages.

    ``empty_ok``: a window larger than the padded image gives an empty result, not an error.
    """
    check_same_dtype({"x": x, "w": w})
    if not _byte(x.dtype):
        check_width(x.dtype, "x")
    rank = x.ndim - 2
    _, _, *in_sizes = gather(x.shape, specs.lhs_spec, 0)
    _, _, *window = gather(w.shape, specs.rhs_spec, 0)
    if any(is_static(k) and k < 1 for k in window):
        raise ValueError(f"w has spatial sizes {tuple(window)}; each must be at least 1.")
    stride = _per_axis(1 if strides is None else strides, rank, names[0])
    ld = _per_axis(1 if lhs_dilation is None else lhs_dilation, rank, names[1])
    rd = _per_axis(1 if rhs_dilation is None else rhs_dilation, rank, names[2])
    if isinstance(padding, str) and any(d != 1 for d in ld):
        raise ValueError(
            f"padding={padding!r} is not defined with {names[1]}={ld}; give (low, high) pairs, or use jaxprims.conv_transpose."
        )
    pads = canonical_padding(padding, in_sizes, window, stride, rd)
    for i, (size, k, (lo, hi)) in enumerate(zip(in_sizes, window, pads, strict=True)):
        reach = dilated(k, rd[i])
        if is_static(reach) and reach > INT32_MAX:
            raise ValueError(
                f"{names[2]}={rd[i]} spreads {k} taps over {reach} positions on spatial axis {i}; the reach must stay below 2^31."
            )
        padded = dilated(size, ld[i]) + lo + hi
        if is_static(padded) and padded < 0:
            raise ValueError(
                f"padding={(lo, hi)} crops more than the {dilated(size, ld[i])} positions of spatial axis {i}; crop less."
            )
        if is_static(padded) and padded > INT32_MAX:
            raise ValueError(
                f"spatial axis {i} of {size} elements has {padded} positions after {names[1]}={ld[i]} and padding={(lo, hi)}; "
                "it must stay below 2^31."
            )
        if not empty_ok and is_static(size, reach, padded) and size > 0 and reach > padded:
            raise ValueError(
                f"w has {k} taps on spatial axis {i}, {reach} positions with {names[2]}={rd[i]}, but x has {padded} there after "
                f"padding={(lo, hi)}: the window does not fit; pad more ('SAME' always fits) or give a smaller w "
                "(jaxprims.conv_general_dilated gives an empty result)."
            )
    groups = canonical_int(groups, names[3], low=1)
    batch_groups = canonical_int(batch_groups, "batch_group_count", low=1)
    _check_groups(x, w, specs, groups, batch_groups, names[3])
    return ConvParams(
        lhs_spec=tuple(specs.lhs_spec),
        rhs_spec=tuple(specs.rhs_spec),
        out_spec=tuple(specs.out_spec),
        strides=stride,
        padding=pads,
        lhs_dilation=ld,
        rhs_dilation=rd,
        x_spatial=tuple(in_sizes),
        w_spatial=tuple(window),
        groups=groups,
        batch_groups=batch_groups,
        flip=flip,
        precision=canonical_precision(precision),
        dtype=_preferred(x.dtype, preferred_element_type),
    )


def _per_axis(value: Any, rank: int, name: str) -> Spec:
    """``rank`` positive ints below 2^31 - 1."""
    out = canonical_tuple(value, rank, name)
    if any(v == INT32_MAX for v in out):
        raise ValueError(f"{name}={out} must be below 2^31 - 1.")
    return out


def _check_groups(x: Any, w: Any, specs: Any, groups: int, batch_groups: int, name: str) -> None:
    if groups > 1 and batch_groups > 1:
        raise ValueError(f"{name}={groups} and batch_group_count={batch_groups}: at most one of them may be above 1.")
    n, c = gather(x.shape, specs.lhs_spec, 0)[:2]
    k, c_of_w = gather(w.shape, specs.rhs_spec, 0)[:2]
    if c % groups:
        raise ValueError(
            f"{name}={groups} must divide the {c} input channels (axis {specs.lhs_spec[1]} of x, shape {x.shape})."
        )
    if c // groups != c_of_w:
        raise ValueError(
            f"w of shape {w.shape} takes {c_of_w} input channels (axis {specs.rhs_spec[1]}), but x of shape {x.shape} has "
            f"{c} / {name} {groups} = {c // groups}; check dimension_numbers and {name}."
        )
    if k % groups:
        raise ValueError(
            f"{name}={groups} must divide the {k} output channels (axis {specs.rhs_spec[0]} of w, shape {w.shape})."
        )
    if batch_groups > 1 and n % batch_groups:
        raise ValueError(f"batch_group_count={batch_groups} must divide the batch size {n} of x.")
    if batch_groups > 1 and k % batch_groups:
        raise ValueError(f"batch_group_count={batch_groups} must divide the {k} output channels of w.")


def _preferred(dtype: Any, preferred: Any) -> str | None:
    """The name of the result's dtype, by the rules of jax.lax; None where it is the operands' own."""
    if preferred is None:
        return None
    try:
        np.dtype(preferred)  # zeros takes more than dtypes
        want = jax.eval_shape(lambda: jnp.zeros((), preferred)).dtype  # float64 is float32 without jax_enable_x64
    except (TypeError, ValueError):
        raise TypeError(
            f"preferred_element_type={short(preferred)} is not a dtype that JAX has; give None or one such as jnp.float32."
        ) from None
    if not _byte(dtype):
        check_width(want, "preferred_element_type")
    kinds = [k for k in (jnp.integer, jnp.floating, jnp.complexfloating) if jnp.issubdtype(dtype, k)]  # none of bool
    to_float = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(want, jnp.floating)
    lost = jnp.issubdtype(dtype, jnp.signedinteger) and not jnp.issubdtype(want, jnp.signedinteger)
    if not to_float and (lost or not all(jnp.issubdtype(want, k) for k in kinds)):
        raise TypeError(
            f"preferred_element_type={want.name} does not go with {dtype} operands; give a type of the same kind, signed for "
            "signed ones (or a floating type for integers)."
        )
    if want.itemsize < jnp.dtype(dtype).itemsize:
        raise TypeError(
            f"preferred_element_type={want.name} is narrower than {dtype}; leave it out and cast the result."
        )
    return None if want == dtype else want.name


def canonical_specs(x: Any, w: Any, dimension_numbers: Any) -> lax.ConvDimensionNumbers:
    """lax's dimension numbers in any form."""
    if x.ndim != w.ndim:
        raise ValueError(f"x of shape {x.shape} and w of shape {w.shape} must have the same number of axes.")
    if x.ndim < 2:
        raise ValueError(f"x of shape {x.shape} needs a batch and a channel axis.")
    if isinstance(dimension_numbers, list):
        dimension_numbers = tuple(dimension_numbers)
    try:
        specs = lax.conv_dimension_numbers(x.shape, w.shape, dimension_numbers)
    except TypeError as e:
        raise ValueError(
            f"dimension_numbers={dimension_numbers!r} do not fit x of shape {x.shape} and w of shape {w.shape}: {e} "
            "Give None, a ConvDimensionNumbers, or three strings such as ('NHWC', 'HWIO', 'NHWC')."
        ) from None
    for name, spec in zip(("lhs_spec", "rhs_spec", "out_spec"), specs, strict=True):
        if sorted(spec) != list(range(x.ndim)):
            raise ValueError(f"dimension_numbers.{name}={tuple(spec)} must be a permutation of 0 to {x.ndim - 1}.")
    return specs


_LAYOUTS = {"NWC": 1, "NHWC": None, "NDHWC": 3, "NCW": 1, "NCHW": None, "NCDHW": 3}


def layout_specs(layout: Any, w: Any) -> lax.ConvDimensionNumbers:
    """Specs for "NHWC" (kernel HWIO) or "NCHW" (kernel OIHW) and their spellings for one and three spatial axes."""
    rank = w.ndim - 2
    if layout not in _LAYOUTS:
        raise ValueError(f"dimension_numbers={layout!r} is not known; give one of {', '.join(map(repr, _LAYOUTS))}.")
    if not 1 <= rank <= 3:
        raise ValueError(
            f"w of shape {w.shape} has {rank} spatial axes; give 1 to 3, or use jaxprims.conv_general_dilated."
        )
    if _LAYOUTS[layout] not in (None, rank):
        raise ValueError(
            f"dimension_numbers={layout!r} names {_LAYOUTS[layout]} spatial axes, but w of shape {w.shape} has {rank}; "
            f"give {'NCHW' if layout[1] == 'C' else 'NHWC'!r}, which stands for any number."
        )
    if layout[1] == "C":
        plain = tuple(range(rank + 2))
        return lax.ConvDimensionNumbers(plain, plain, plain)
    image = (0, rank + 1, *range(1, rank + 1))
    return lax.ConvDimensionNumbers(image, (rank + 1, rank, *range(rank)), image)


def specs_and_images(
    x: jax.Array, w: jax.Array, dimension_numbers: Any
) -> tuple[lax.ConvDimensionNumbers, jax.Array, tuple[Any, ...] | None]:
    """Specs, x with one batch axis, and the batch axes that it had: any number where a layout is named, else None for one."""
    if not isinstance(dimension_numbers, str):
        return canonical_specs(x, w, dimension_numbers), x, None
    specs, lead = layout_specs(dimension_numbers, w), x.ndim - w.ndim + 1
    if lead < 0:
        raise ValueError(
            f"x of shape {x.shape} needs {w.ndim - 2} spatial axes and a channel axis, as w of shape {w.shape} has."
        )
    batch = x.shape[:lead]
    size = 1
    for d in batch:
        size *= d  # may be symbolic
    return specs, x if lead == 1 else x.reshape((size, *x.shape[lead:])), batch


def check_bias(bias: Any, k: int, x_dtype: Any, y_dtype: Any) -> None:
    if bias.shape != (k,):
        raise ValueError(f"bias has shape {bias.shape}; it must be ({k},), one value for each output channel of w.")
    allowed = {jnp.dtype(x_dtype), jnp.dtype(y_dtype)} | {wide_dtype(x_dtype)}
    if jnp.dtype(bias.dtype) not in allowed:
        listed = " or ".join(sorted(d.name for d in allowed))
        raise TypeError(f"bias has dtype {bias.dtype}; it must be {listed}: cast it with bias.astype(jnp.{y_dtype}).")


def _byte(dtype: Any) -> bool:
    """A floating dtype of 8 bits: it has no kernel, and the reference computes it in float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


def check_residual(residual: Any, shape: Sequence[int], dtype: Any) -> None:
    if tuple(residual.shape) != tuple(shape):
        raise ValueError(f"residual has shape {residual.shape}; it must be the shape of the result, {tuple(shape)}.")
    if jnp.dtype(residual.dtype) != dtype:
        raise TypeError(
            f"residual has dtype {residual.dtype}; it must be that of the result: cast it with residual.astype(jnp.{dtype})."
        )


def check_algorithm(algorithm: Any, p: ConvParams, x: Any) -> str:
    """The name of an algorithm that exists for this convolution."""
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm={short(algorithm)} does not exist; give one of {', '.join(map(repr, ALGORITHMS))}."
        )
    if algorithm == "gemm":
        last = p.rank + 1
        if (
            p.lhs_spec[1] != last
            or p.out_spec[1] != last
            or p.rhs_spec[:2] != (last, last - 1)
            or p.flip
            or p.groups > 1
        ):
            raise ValueError(
                "algorithm='gemm' exists for channels last with HWIO filters (\"NHWC\"), mode='cross_correlation' and one group; "
                "give 'auto'."
            )
        if image_patches(p, x) > MOST_WORKSPACE:
            raise ValueError(
                f"algorithm='gemm' writes out the patches of an image, here {image_patches(p, x)} bytes; its workspace holds "
                f"{MOST_WORKSPACE}: give 'auto'."
            )
    return algorithm
