"""What the Flax layers of ``jaxprims.linen`` and ``jaxprims.nnx`` share: from Flax's arguments to one call of a jaxprims op.

Both namespaces take Flax's arguments and have Flax's result dtypes; the ops of jaxprims ask for operands of few dtypes.
Here is what stands between: the dtype a layer computes in, paddings that no convolution has, the way back from a layout,
and which calls no op takes, so that Flax's own code has to run.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import jaxprims

try:
    import flax.linen as flax_linen
    import flax.nnx as flax_nnx
    from flax.linen.dtypes import canonicalize_dtype
except ModuleNotFoundError as e:
    if e.name is None or e.name.split(".")[0] != "flax":
        raise
    raise ModuleNotFoundError(
        "jaxprims.linen and jaxprims.nnx are layers for Flax, which is not installed: pip install 'jaxprims[flax]'.",
        name="flax",
    ) from None

__all__ = ["flax_linen", "flax_nnx"]  # imported here for linen.py and nnx.py, behind the message above
OPS = (  # functions of jaxprims that Flax has no name for, given under the same name by both namespaces
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "global_avg_pool",
    "global_max_pool",
    "lp_pool",
    "max_pool_with_argmax",
    "max_unpool",
)
GROUPS_FIRST = (
    "layout='NCHW': x of shape {shape} with reduction_axes={axes} needs a batch axis, a number of groups that divides the channels, "
    "the channels' axis 1 among the axes, real numbers, and no axis_name."
)
C = TypeVar("C", bound=type)


# --- dtypes ---------------------------------------------------------------------------------------------------------


def _narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def narrow(*dtypes: Any) -> bool:
    """True where a dtype (None: not given) is a floating one of 8 bits or less, for which no op has arithmetic."""
    return any(d is not None and _narrow(d) for d in dtypes)


def no_norm(x: Any, eps: Any, *dtypes: Any) -> bool:
    """True where no norm of jaxprims takes ``x``: complex and 8-bit dtypes, no axis, an eps that is no plain number."""
    dtypes = tuple(d for d in (x.dtype, *dtypes) if d is not None)
    return (
        x.ndim == 0
        or any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)
        or narrow(*dtypes)
        or not (isinstance(eps, numbers.Real) and 0 <= float(eps) < math.inf)
    )


def normalise(
    op: Callable[..., Any],
    x: jax.Array,
    *params: jax.Array | None,
    dtype: Any,
    residual: Any = None,
    activation: str | None = None,
    before: tuple[jax.Array, ...] = (),
    **options: Any,
) -> Any:
    """``op(x, *before, *params, ...)`` in a dtype that loses nothing, its first result in the dtype that Flax gives.

    Flax computes in float32 at least and rounds once, to the dtype that x and the parameters promote to, or ``dtype``. An
    op does the same inside, where x has that dtype already; else x goes in as float32 (float64).
    ``before``: given statistics. ``residual`` adds to what Flax's layer gives: the result's dtype is promoted to it.
    """
    given = [p for p in params if p is not None]
    want = jnp.dtype(canonicalize_dtype(x, *given, dtype=dtype))
    if residual is not None:
        residual = jnp.asarray(residual)
        want = jnp.promote_types(want, residual.dtype)
    wide = functools.reduce(jnp.promote_types, (x.dtype, want, *(p.dtype for p in (*given, *before))), jnp.float32)
    inside = want if x.dtype == want and wide in (want, jnp.float32) else wide

    def cast(p: jax.Array | None) -> jax.Array | None:
        return p if p is None or p.dtype in (inside, jnp.float32) else p.astype(wide)

    extra = {} if residual is None else {"residual": residual.astype(inside)}
    y = op(x.astype(inside), *map(cast, before), *map(cast, params), activation=activation, **extra, **options)
    return (y[0].astype(want), *y[1:]) if isinstance(y, tuple) else y.astype(want)


def then(op: Callable[..., Any]) -> Callable[..., Any]:
    """A norm whose own ``residual`` comes before the statistics, as one whose residual comes behind."""

    def call(x: Any, *args: Any, activation: str | None = None, residual: Any = None, **options: Any) -> Any:
        if residual is None:
            return op(x, *args, activation=activation, **options)
        return jaxprims.bias_act(op(x, *args, **options), None, activation, residual=residual)

    return call


layer_norm = then(jaxprims.layer_norm)
rms_norm = then(jaxprims.rms_norm)


def finish(
    y: jax.Array, activation: str | None, residual: Any = None, bias: jax.Array | None = None, axis: int = -1
) -> jax.Array:
    """``activation(y + bias + residual)`` behind what no op fuses them into."""
    extra = [jnp.asarray(a) for a in (bias, residual) if a is not None]
    if activation is None and not extra:
        return y
    want = functools.reduce(jnp.promote_types, (a.dtype for a in extra), y.dtype)
    inside = jnp.dtype(jnp.float32) if _narrow(want) else want
    if activation is None and not jnp.issubdtype(want, jnp.floating):  # integers and complex numbers
        if bias is not None:
            y += jnp.expand_dims(bias, [a for a in range(y.ndim) if a != axis % y.ndim])
        return y if residual is None else y + residual
    bias, residual = (None if a is None else jnp.asarray(a).astype(inside) for a in (bias, residual))
    return jaxprims.bias_act(y.astype(inside), bias, activation, axis, residual).astype(want)


# --- axes and layouts -----------------------------------------------------------------------------------------------


def axes_of(ndim: int, axes: Any) -> tuple[int, ...]:
    """Flax's axes, an int or several, from 0 up and in order."""
    found = set()
    for a in axes if isinstance(axes, Iterable) else (axes,):
        if not -ndim <= a < ndim:
            raise ValueError(f"axis {a} is out of range for an array of {ndim} axes; give {-ndim} to {ndim - 1}.")
        found.add(int(a) % ndim)
    return tuple(sorted(found))


def instance_features(ndim: int, feature_axes: Any, layout: str) -> tuple[int, ...]:
    """The axes of InstanceNorm's features."""
    if channels_last(layout):
        return axes_of(ndim, feature_axes)
    if axes_of(ndim, feature_axes) not in ((ndim - 1,), (1,)):
        raise ValueError(
            f"layout='NCHW' says that the features are axis 1, feature_axes={feature_axes!r}; give one of them."
        )
    return (1,)


def groups_fit(channels: int, num_groups: int | None, group_size: int | None) -> bool:
    """Whether one of the two is given, and divides the channels."""
    given = [v for v in (num_groups, group_size) if v is not None]
    return len(given) == 1 and given[0] > 0 and channels % given[0] == 0


def channels_last(layout: str) -> bool:
    if layout not in ("NHWC", "NCHW"):
        raise ValueError(f"layout={layout!r} is not known; give 'NHWC' or 'NCHW', which stand for any number of axes.")
    return layout == "NHWC"


def in_channels_last(call: Callable[..., jax.Array], x: Any, axis: int, **arrays: Any) -> jax.Array:
    """``call(x, ...)`` for a ``call`` of Flax's, which has channels last, on an x that has them at ``axis``, as the result.

    ``arrays``: what broadcasts to x (or None).
    """
    if axis % x.ndim == x.ndim - 1:
        return call(x, **arrays)

    def move(a: Any) -> Any:
        return (
            None if a is None else jnp.moveaxis(jnp.reshape(a, (1,) * (x.ndim - jnp.ndim(a)) + jnp.shape(a)), axis, -1)
        )

    return jnp.moveaxis(call(move(x), **{k: move(a) for k, a in arrays.items()}), -1, axis)


# --- convolutions ---------------------------------------------------------------------------------------------------


def _plain(padding: Any) -> Any:
    """A padding given as NumPy's array or int, as lists and ints."""
    return padding.tolist() if hasattr(padding, "tolist") else padding


def _per_axis(value: Any, rank: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (1 if value is None else value,) * rank


def _dilated(size: Any, step: int) -> Any:
    return (size - 1) * step + 1


def _one_batch_axis(a: jax.Array, rank: int) -> jax.Array:
    lead = a.ndim - rank - 1
    return a if lead == 1 else a.reshape(math.prod(a.shape[:lead]), *a.shape[lead:])


def _specs(rank: int, last: bool) -> jax.lax.ConvDimensionNumbers:
    """Images in the layout, kernels as Flax keeps them in both: (*window, in, out)."""
    image = (0, rank + 1, *range(1, rank + 1)) if last else tuple(range(rank + 2))
    return jax.lax.ConvDimensionNumbers(image, (rank + 1, rank, *range(rank)), image)


def _prepare(x: Any, rank: int, residual: Any, last: bool) -> tuple[jax.Array, Any, range]:
    """x and residual with one batch axis, and the spatial axes."""
    if x.ndim < rank + 1:
        raise ValueError(f"inputs has shape {x.shape}; {rank} spatial axes and a channel axis are needed.")
    if residual is not None:
        residual = jnp.asarray(residual)
        if residual.ndim != x.ndim:
            raise ValueError(
                f"residual has shape {residual.shape}; it must have the result's, which has {x.ndim} axes."
            )
        residual = _one_batch_axis(residual, rank)
    return _one_batch_axis(x, rank), residual, range(1, rank + 1) if last else range(2, rank + 2)


def _result_dtype(x: jax.Array, preferred: Any, *others: Any) -> Any:
    """What x's convolution, then + bias, then + residual promote to, as the op's preferred_element_type."""
    dtypes = [o.dtype for o in others if o is not None]
    natural = jnp.dtype(x.dtype if preferred is None else preferred)
    want = functools.reduce(jnp.promote_types, dtypes, natural)
    return want, preferred if want == natural else want


def conv(
    x: Any,
    kernel: Any,
    bias: jax.Array | None,
    *,
    strides: Any,
    padding: Any,
    input_dilation: Any,
    kernel_dilation: Any,
    feature_group_count: int,
    precision: Any,
    layout: str,
    activation: str | None,
    residual: Any,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Flax's convolution, any number of batch axes and its paddings, then bias, residual, activation: one op."""
    rank, last, lead = kernel.ndim - 2, channels_last(layout), x.shape[: x.ndim - kernel.ndim + 1]
    x, residual, spatial = _prepare(x, rank, residual, last)
    window, kernel_dilation = kernel.shape[:rank], _per_axis(kernel_dilation, rank)
    reach = [_dilated(k, d) for k, d in zip(window, kernel_dilation, strict=True)]
    padding = _plain(padding)
    if padding in ("CIRCULAR", "REFLECT"):
        pads = [(0, 0)] * x.ndim
        for axis, r in zip(spatial, reach, strict=True):
            pads[axis] = ((r - 1) // 2, r // 2)
        x, padding = jnp.pad(x, pads, mode="wrap" if padding == "CIRCULAR" else "reflect"), "VALID"
    options: dict[str, Any] = dict(feature_group_count=feature_group_count, precision=precision)
    dilations = _per_axis(input_dilation, rank)
    want, preferred = _result_dtype(x, preferred_element_type, bias, residual)
    if _fits([_dilated(x.shape[a], d) for a, d in zip(spatial, dilations, strict=True)], reach, padding):
        y = jaxprims.conv(
            x, kernel, None if bias is None else bias.astype(want),
            strides=_per_axis(strides, rank), padding=padding, input_dilation=dilations, kernel_dilation=kernel_dilation,
            dimension_numbers=_specs(rank, last), activation=activation, preferred_element_type=preferred,
            residual=None if residual is None else residual.astype(want), **options,
        )  # fmt: skip
    else:  # no window fits: empty, as jax.lax has it
        y = jaxprims.conv_general_dilated(
            x, kernel, _per_axis(strides, rank), padding, dilations, kernel_dilation, _specs(rank, last), **options
        )
        y = finish(y.astype(want), activation, residual, bias, -1 if last else 1)
    return y if len(lead) == 1 else y.reshape(*lead, *y.shape[1:])


def _fits(sizes: Sequence[Any], reach: Sequence[int], padding: Any) -> bool:
    """False where a window is larger than the padded image along some axis (of a known size)."""
    if isinstance(padding, str):
        pads: Sequence[Any] = (0 if padding.upper() == "VALID" else math.inf,) * len(sizes)
    else:
        pads = padding if isinstance(padding, Sequence) else (padding,) * len(sizes)
    return len(pads) != len(sizes) or not any(
        isinstance(size, int) and r > size + (sum(p) if isinstance(p, Sequence) else 2 * p)
        for size, r, p in zip(sizes, reach, pads, strict=True)
    )


def conv_transpose(
    x: Any,
    kernel: Any,
    bias: jax.Array | None,
    *,
    strides: Any,
    padding: Any,
    kernel_dilation: Any,
    transpose_kernel: bool,
    precision: Any,
    layout: str,
    activation: str | None,
    residual: Any,
    preferred_element_type: Any,
) -> jax.Array:
    """Flax's transposed convolution; bias, residual and activation in the same op but for "CIRCULAR", which folds first."""
    rank, last, lead = kernel.ndim - 2, channels_last(layout), x.shape[: x.ndim - kernel.ndim + 1]
    x, residual, spatial = _prepare(x, rank, residual, last)
    strides = _per_axis(strides, rank)
    want, preferred = _result_dtype(x, preferred_element_type, bias, residual)
    call = functools.partial(
        jaxprims.conv_transpose, x, kernel, strides, rhs_dilation=_per_axis(kernel_dilation, rank),
        dimension_numbers=_specs(rank, last), transpose_kernel=transpose_kernel, precision=precision,
        preferred_element_type=preferred,
    )  # fmt: skip
    padding = _plain(padding)
    if padding == "CIRCULAR":
        y = call(padding="VALID")
        for axis, stride in zip(spatial, strides, strict=True):
            y = _wrap(y, axis, x.shape[axis] * stride, transpose_kernel)
        y = finish(y, activation, residual, bias, -1 if last else 1)
    else:
        y = call(
            padding=padding, activation=activation, bias=None if bias is None else bias.astype(want),
            residual=None if residual is None else residual.astype(want),
        )  # fmt: skip
    return y if len(lead) == 1 else y.reshape(*lead, *y.shape[1:])


def _wrap(y: jax.Array, axis: int, period: int, late: bool) -> jax.Array:
    """Sums ``y`` along ``axis`` into one ``period``, its middle at the period's own place (``late``: the odd one right)."""
    excess = -(y.shape[axis] - period) % (2 * period)
    pads = [(0, 0)] * y.ndim
    pads[axis] = (excess // 2, (excess + 1) // 2) if late else ((excess + 1) // 2, excess // 2)
    y = jnp.pad(y, pads)
    return y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)


# --- pools ----------------------------------------------------------------------------------------------------------


def _answered_by_flax(inputs: jax.Array, window: Sequence[int], padding: Any, ordered: bool) -> bool:
    """True for a pool that jaxprims refuses and Flax computes. ``ordered``: maxima, which integers have too."""
    rank, dtype = len(window), inputs.dtype
    if not 1 <= rank <= 3:
        return True
    if not jnp.issubdtype(dtype, jnp.floating) and not (ordered and jnp.issubdtype(dtype, jnp.integer)):
        return True
    sizes = inputs.shape[-rank - 1 : -1]
    if narrow(dtype) or not all(isinstance(s, int) for s in sizes):
        return True
    if isinstance(padding, str):
        pads = [(0, 0)] * rank if padding.upper() == "VALID" else []  # the others always fit
    else:
        pads = list(padding) if isinstance(padding, Sequence) and all(isinstance(p, Sequence) for p in padding) else []
    return any(max(p) >= w or w > s + sum(p) for p, w, s in zip(pads, window, sizes))


def _pool(name: str, inputs: Any, window_shape: Any, strides: Any, padding: Any, extra: dict, own: dict) -> jax.Array:
    """``own``: the keywords that Flax's pool lacks; where one is in use, jaxprims' pool says what is wrong."""
    inputs = jnp.asarray(inputs)
    plain = own == {"window_dilation": None, "layout": "NHWC"} and isinstance(window_shape, Sequence)
    if (
        plain
        and inputs.ndim > len(window_shape)
        and _answered_by_flax(inputs, window_shape, padding, name != "avg_pool")
    ):
        strides = None if strides is None else _per_axis(strides, len(window_shape))
        return getattr(flax_linen.pooling, name)(inputs, tuple(window_shape), strides, padding, **extra)
    return getattr(jaxprims, name)(inputs, window_shape, strides, padding, **extra, **own)


def max_pool(
    inputs: Any,
    window_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    *,
    window_dilation: Any = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Maximum over windows: Flax's ``max_pool`` by :func:`jaxprims.max_pool`, which tells the keywords that Flax lacks.

    Flax's own code answers where jaxprims' refuses: more than three spatial axes, symbolic sizes, 8-bit floats, paddings of
    the window's size or more (-inf in the padding alone), windows larger than the padded input (an empty result).

    >>> import jax.numpy as jnp
    >>> max_pool(jnp.array([[1.0], [5.0], [3.0], [2.0]]), (2,), strides=(2,))[:, 0].tolist()
    [5.0, 3.0]
    """
    own = {"window_dilation": window_dilation, "layout": layout}
    return _pool("max_pool", inputs, window_shape, strides, padding, {}, own)


def min_pool(
    inputs: Any,
    window_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    *,
    window_dilation: Any = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Minimum over windows by :func:`jaxprims.min_pool`; the rest as :func:`max_pool`.

    >>> import jax.numpy as jnp
    >>> min_pool(jnp.array([[1.0], [5.0], [3.0], [2.0]]), (2,), strides=(2,))[:, 0].tolist()
    [1.0, 2.0]
    """
    own = {"window_dilation": window_dilation, "layout": layout}
    return _pool("min_pool", inputs, window_shape, strides, padding, {}, own)


def avg_pool(
    inputs: Any,
    window_shape: Sequence[int],
    strides: Any = None,
    padding: Any = "VALID",
    count_include_pad: bool = True,
    *,
    window_dilation: Any = None,
    layout: str = "NHWC",
) -> jax.Array:
    """Average over windows: Flax's ``avg_pool`` by :func:`jaxprims.avg_pool`, which tells the keywords that Flax lacks.

    Half types are summed in float32. The dtype is Flax's: with ``count_include_pad=False`` that is float32 also for them.
    Flax's own code answers in the cases of :func:`max_pool`, and for dtypes that are not floating.

    >>> import jax.numpy as jnp
    >>> avg_pool(jnp.array([[1.0], [2.0], [6.0]]), (2,), padding="SAME", count_include_pad=False)[:, 0].tolist()
    [1.5, 4.0, 6.0]
    """
    own = {"window_dilation": window_dilation, "layout": layout}
    extra = {"count_include_pad": count_include_pad}
    y = _pool("avg_pool", inputs, window_shape, strides, padding, extra, own)
    return y if count_include_pad else y.astype(jnp.promote_types(y.dtype, jnp.float32))


# --- softmax --------------------------------------------------------------------------------------------------------


def _softmax_by_jax(x: jax.Array, where: Any) -> bool:
    if not jnp.issubdtype(x.dtype, jnp.floating) or narrow(x.dtype):
        return True
    if where is None:
        return False
    where = jnp.asarray(where)
    return where.dtype != jnp.bool_ or where.ndim > x.ndim or jnp.broadcast_shapes(where.shape, x.shape) != x.shape


def softmax(x: Any, axis: Any = -1, where: Any = None) -> jax.Array:
    """Softmax by :func:`jaxprims.softmax`, with the arguments of ``jax.nn.softmax`` (Flax's); entries left out by ``where`` are 0.

    ``jax.nn``'s own runs for dtypes that are not floating or have 8 bits, and a ``where`` that is not bool or larger than x.

    >>> import jax.numpy as jnp
    >>> softmax(jnp.array([1e30, -1e30, 1e30])).tolist()
    [0.5, 0.0, 0.5]
    """
    x = jnp.asarray(x)
    return jax.nn.softmax(x, axis, where) if _softmax_by_jax(x, where) else jaxprims.softmax(x, axis, where)


def log_softmax(x: Any, axis: Any = -1, where: Any = None) -> jax.Array:
    """Logarithm of :func:`softmax` by :func:`jaxprims.log_softmax`; entries left out by ``where`` are -inf.

    >>> import jax.numpy as jnp
    >>> log_softmax(jnp.array([0.0, 0.0]), where=jnp.array([True, False])).tolist()
    [0.0, -inf]
    """
    x = jnp.asarray(x)
    return jax.nn.log_softmax(x, axis, where) if _softmax_by_jax(x, where) else jaxprims.log_softmax(x, axis, where)


# --- the namespaces -------------------------------------------------------------------------------------------------


def public_names(module: Any) -> list[str]:
    """What a star import takes from Flax's namespace."""
    return [n for n in vars(module) if not n.startswith("_")]


def keep_signature(cls: C) -> C:
    """Gives a class whose ``__init__`` passes ``*args, **kwargs`` on to its base the base's signature, plus its own keywords."""
    own = inspect.signature(cls.__init__)
    base = inspect.signature(cls.__mro__[1].__init__)
    new = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
    merged = base.replace(parameters=[*base.parameters.values(), *new])
    setattr(cls.__init__, "__signature__", merged)  # noqa: B010
    return cls
