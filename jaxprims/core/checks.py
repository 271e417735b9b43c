"""Argument normalisation: what users may write, brought to one form, with an error that says how to mend it."""

from __future__ import annotations

import functools
import numbers
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

INT32_MAX = 2**31 - 1
PADDING_STRINGS = ("SAME", "VALID", "SAME_LOWER", "CAUSAL")
LAYOUTS = {  # spelling -> channel axis
    "NWC": 2,
    "NHWC": 3,
    "NDHWC": 4,
    "NCW": 1,
    "NCHW": 1,
    "NCDHW": 1,
}

Padding = tuple[tuple[int, int], ...]


def is_many(value: Any) -> bool:
    """True for a sequence, an array or an iterator; False for one number, 0-d arrays among them, and for what has no order."""
    if isinstance(value, (Mapping, Set, bytes, bytearray)):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "__iter__") and getattr(value, "ndim", 1) != 0)


def refuse_traced(value: Any, name: str, kind: str) -> None:
    """TypeError for a traced array where a Python ``kind`` is compiled into the op."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced array ({jax.typeof(value)}); it is compiled into the op: give a Python {kind} "
            "(through jax.jit's static_argnames, or closed over)."
        )


def as_index(value: Any, name: str, forms: str = "an int") -> int:
    """``value`` (an int of Python or NumPy, or a 0-d array of one) as a Python int. A bool is none.

    ``forms``: what the caller's argument may be, for the message.
    """
    refuse_traced(value, name, "int")
    if bool not in (type(value), getattr(value, "dtype", None)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={short(value)} must be {forms}, not {type(value).__name__}.")


def short(value: Any) -> str:
    """``repr``, cut where it is too long for a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def canonical_int(value: Any, name: str, *, low: int | None = None, forms: str = "an int") -> int:
    """``value`` as a Python int within [low, 2^31). ``forms``: what the caller's argument may be, for the message."""
    v = as_index(value, name, forms)
    if low is not None and v < low:
        raise ValueError(f"{name}={v} must be at least {low}.")
    if v > INT32_MAX:
        raise ValueError(f"{name}={v} must be below 2^31.")
    return v


def canonical_tuple(value: Any, n: int, name: str, *, low: int | None = 1) -> tuple[int, ...]:
    """An int for every one of ``n`` axes, or a sequence of ``n`` ints; each in [low, 2^31)."""
    if is_many(value) and not isinstance(value, str):
        items = tuple(value)
        if len(items) != n:
            raise ValueError(
                f"{name}={items!r} has {len(items)} entries for {n} spatial axes; give an int or {n} ints."
            )
    else:
        return (canonical_int(value, name, low=low, forms=f"an int or a sequence of {n} ints"),) * n
    return tuple(canonical_int(v, f"{name}[{i}]", low=low) for i, v in enumerate(items))


def same_padding(size: int, window: int, stride: int, dilation: int, *, lower: bool = False) -> tuple[int, int]:
    """TensorFlow's SAME: ceil(size / stride) outputs; the odd element goes to the end (``lower``: to the start)."""
    reach = (window - 1) * dilation + 1
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    half = total // 2
    return (total - half, half) if lower else (half, total - half)


def padding_forms(n: int, words: Sequence[str] = PADDING_STRINGS) -> str:
    """What a padding of ``n`` spatial axes may be, in words."""
    return f"an int, {n} ints or (low, high) pairs, or one of {', '.join(map(repr, words))}"


def canonical_padding(
    padding: Any,
    in_sizes: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    name: str = "padding",
    words: Sequence[str] = PADDING_STRINGS,
) -> Padding:
    """Low and high padding for each spatial axis.

    Accepts ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, ``"CAUSAL"`` (one spatial axis), an int for all, or one int or one
    (low, high) pair for each axis. Negative amounts crop. ``words``: the strings that the caller takes, for the messages.
    """
    n = len(in_sizes)
    forms = padding_forms(n, words)
    if isinstance(padding, str):
        word = padding.upper()
        if word == "VALID":
            return ((0, 0),) * n
        if word in ("SAME", "SAME_LOWER"):
            lower = word == "SAME_LOWER"
            return tuple(
                same_padding(i, w, s, d, lower=lower)
                for i, w, s, d in zip(in_sizes, window, strides, dilation, strict=True)
            )
        if word == "CAUSAL":
            if n != 1:
                raise ValueError(f"{name}='CAUSAL' needs one spatial axis, got {n}; give (low, high) pairs instead.")
            return (((window[0] - 1) * dilation[0], 0),)
        remedy = " Pad with jnp.pad(mode='wrap') first and give 'VALID'." if word == "CIRCULAR" else ""
        raise ValueError(f"{name}={padding!r} is not known; give {forms}.{remedy}")
    if not is_many(padding):
        p = canonical_int(padding, name, forms=forms)
        return ((p, p),) * n
    items = tuple(padding)
    if len(items) != n:
        raise ValueError(f"{name}={items!r} has {len(items)} entries for {n} spatial axes; give {n} (low, high) pairs.")
    out = []
    for i, item in enumerate(items):
        if is_many(item):
            pair = () if isinstance(item, str) else tuple(item)
            if len(pair) != 2:
                raise ValueError(f"{name}[{i}]={short(item)} must be an int or a pair (low, high).")
            out.append((canonical_int(pair[0], f"{name}[{i}][0]"), canonical_int(pair[1], f"{name}[{i}][1]")))
        else:
            p = canonical_int(item, f"{name}[{i}]", forms="an int or a pair (low, high)")
            out.append((p, p))
    for i, pair in enumerate(out):
        if min(pair) < -INT32_MAX:
            raise ValueError(f"{name}[{i}]={pair!r} must be above -2^31.")
    return tuple(out)


def check_width(dtype: Any, name: str) -> None:
    """TypeError for a floating dtype narrower than 16 bits, for which an op has no arithmetic (or infinities to pad with)."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        raise TypeError(
            f"{name} has dtype {dtype}; floating dtypes of 16 bits and more are taken: {cast(name, jnp.bfloat16)}."
        )


def cast(name: str, dtype: Any) -> str:
    """The remedy for an argument of another dtype, in words that are right for arrays, lists and numbers."""
    return f"cast it with jnp.asarray({name}, jnp.{jnp.dtype(dtype).name})"


def check_float(x: Any, name: str, *, complex_ok: bool = False) -> None:
    """TypeError unless ``x``, an array or a dtype, is floating with at least 16 bits (or complex, where allowed)."""
    dtype = jnp.dtype(getattr(x, "dtype", x))
    check_width(dtype, name)
    if jnp.issubdtype(dtype, jnp.floating) or (complex_ok and jnp.issubdtype(dtype, jnp.complexfloating)):
        return
    raise TypeError(f"{name} has dtype {dtype}; this op needs a floating dtype: {cast(name, jnp.float32)}.")


def check_same_dtype(arrays: Mapping[str, Any]) -> None:
    """TypeError unless all named arrays have one dtype."""
    dtypes = {name: jnp.result_type(x) for name, x in arrays.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{k}: {v}" for k, v in dtypes.items())
        raise TypeError(f"dtypes differ ({listed}); cast them to one dtype with jnp.asarray(array, dtype).")


def canonical_axis(axis: Any, ndim: int, name: str = "axis", *, scalar: bool = False) -> int:
    """A non-negative axis of an array of ``ndim`` axes. ``scalar``: a scalar counts as an array of one axis."""
    a = as_index(axis, name)
    n = 1 if scalar and ndim == 0 else ndim
    if not -n <= a < n:
        if ndim == 0:
            remedy = "give -1 or 0" if scalar else "reshape it to (1,)"
            raise ValueError(f"{name}={axis} is out of range for a scalar, which has no axes; {remedy}.")
        raise ValueError(
            f"{name}={axis} is out of range for an array of {ndim} {'axis' if ndim == 1 else 'axes'}; give {-n} to {n - 1}."
        )
    return a % n


def canonical_axes(axes: Any, ndim: int, name: str = "axis", *, scalar: bool = False) -> tuple[int, ...]:
    """Distinct non-negative axes in ascending order, from an int or a sequence."""
    many = is_many(axes) and not isinstance(axes, str)
    items = tuple(axes) if many else (as_index(axes, name, "an int or a sequence of ints"),)
    out = [canonical_axis(a, ndim, name, scalar=scalar) for a in items]
    if len(set(out)) != len(out):
        raise ValueError(f"{name}={items!r} names an axis twice.")
    return tuple(sorted(out))


def check_layout(layout: str, ndim: int, name: str = "layout") -> int:
    """The channel axis of an array of ``ndim`` axes (batch and channel included) laid out as named."""
    known = LAYOUTS.get(layout) if isinstance(layout, str) else None
    if known is None:
        raise ValueError(f"{name}={layout!r} is not known; give one of {', '.join(map(repr, LAYOUTS))}.")
    channel_last = known != 1
    if ndim < 3 or ndim > 5:
        raise ValueError(
            f"{name}={layout!r}: the array has {ndim} axes; 1 to 3 spatial axes beside batch and channel are taken."
        )
    if len(layout) not in (ndim, 4):  # "NHWC" and "NCHW" stand for any rank
        raise ValueError(
            f"{name}={layout!r} names {len(layout)} axes, the array has {ndim}; give {'NHWC' if channel_last else 'NCHW'!r}."
        )
    return ndim - 1 if channel_last else 1


def is_static(*sizes: Any) -> bool:
    """True where every size is a plain int (not a symbolic dimension of jax.export)."""
    return all(isinstance(s, int) for s in sizes)


def as_array(x: Any, name: str) -> jax.Array:
    """``x`` (an array, a number, nested lists of numbers) as a JAX array, or a TypeError that names the argument."""
    try:
        array = None if x is None else jnp.asarray(x)
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is not None:
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(
                f"{name} has dtype {array.dtype}; PRNG keys are no numbers: give jax.random.key_data({name})."
            )
        return array
    raise TypeError(
        f"{name}={short(x)} is not an array; give a JAX or NumPy array, a number, or nested lists of numbers."
    )


def as_number(x: Any, name: str) -> float:
    """A real number that is compiled into the kernel: Python's, NumPy's, or a 0-d array of one. A bool is none."""
    refuse_traced(x, name, "number")
    dtype = getattr(x, "dtype", object)  # bfloat16 and its like are neither numbers.Real nor of NumPy's kind "f"
    scalar = getattr(x, "ndim", None) == 0 and any(jnp.issubdtype(dtype, k) for k in (jnp.integer, jnp.floating))
    if (isinstance(x, numbers.Real) or scalar) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError:
            raise ValueError(f"{name}={short(x)} is too large for a float.") from None
        except TypeError:  # a ShapeDtypeStruct has no value
            pass
    raise TypeError(f"{name}={short(x)} must be a Python number (or NumPy's): it is compiled into the kernel.")


def wide_dtype(dtype: Any) -> Any:
    """The arithmetic type of the references: float32 for floating types of fewer bits, every other type itself."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def promote(*dtypes: Any) -> Any:
    """The dtype that all go into, by JAX's standard rules whatever ``jax_numpy_dtype_promotion`` is set to.

    8-bit floats, which JAX promotes with nothing, go as float32 where they are not alone.
    """
    kinds = dict.fromkeys(map(jnp.dtype, dtypes))
    if len(kinds) == 1:
        return next(iter(kinds))
    kinds = [wide_dtype(d) if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 16 else d for d in kinds]
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, kinds)


def as_float32(x: jax.Array) -> jax.Array:
    """Half types as float32, everything else as it is."""
    return x.astype(wide_dtype(x.dtype))
