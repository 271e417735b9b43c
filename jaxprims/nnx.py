"""Flax's nnx namespace with jaxprims' ops under it: ``from jaxprims import nnx`` is the whole migration.

As :mod:`jaxprims.linen`, for nnx: the layers subclass Flax's, with the same constructor arguments, variables, initial values,
metadata and dtype rules, so that states and checkpoints load both ways; every other name is Flax's own. Added are

======================================  ==================================================================================
``Layer(..., activation="relu")``       y = activation(f(x) + residual), for every convolution and norm
``layer(x, residual=r)``                r: of y's shape; the result's dtype is what y and r promote to
``Layer(..., layout="NCHW")``           Conv, ConvTranspose, GroupNorm, InstanceNorm, pools (BatchNorm: ``axis=1``)
``LocalResponseNorm``                   and pools that Flax lacks: lp, global, adaptive, with argmax, and unpooling
======================================  ==================================================================================

The two keywords become plain attributes of the layer, outside its state. Flax casts running statistics to ``dtype`` before it
normalises with them; here they stay float32. Statistics, and where Flax's own code runs, are as :mod:`jaxprims.linen` says, and
so is a convolution called with ``out_sharding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any  # nnx.Any is a filter of Flax's

import jax
import jax.numpy as jnp

import jaxprims
from jaxprims import flax_ops as ops
from jaxprims.core.activations import check_activation as _check_activation
from jaxprims.flax_ops import avg_pool, log_softmax, max_pool, min_pool, softmax
from jaxprims.flax_ops import flax_nnx as _flax

if _TYPE_CHECKING:  # the names that __getattr__ hands on
    from flax.nnx import *  # noqa: F403  # pyright: ignore[reportAssignmentType, reportWildcardImportFromLibrary]

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "LocalResponseNorm",
    "RMSNorm",
    "avg_pool",
    "log_softmax",
    "max_pool",
    "min_pool",
    "softmax",
]
__all__ += [n for n in (*ops.OPS, *ops.public_names(_flax)) if n not in __all__]  # a star import: all of Flax's


def __getattr__(name: str) -> _Any:
    if name.startswith("__"):  # __path__ above all: Flax's files must not be loaded a second time under this name
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(jaxprims if name in ops.OPS else _flax, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ops.OPS, *dir(_flax)})


def _value(variable: _Any) -> _Any:
    return None if variable is None else variable[...]


def _kernel(layer: _Any) -> _Any:
    if layer.mask is not None and layer.mask.shape != layer.kernel_shape:
        raise ValueError(
            f"Mask needs to have the same shape as weights. Shapes are: {layer.mask.shape}, {layer.kernel_shape}"
        )
    return _value(layer.kernel) if layer.mask is None else _value(layer.kernel) * layer.mask


def _channels(layer: _Any, x: _Any) -> int:
    """The channels' axis of an image or a batch (of batches) of images."""
    return -1 if ops.channels_last(layer.layout) else x.ndim - len(layer.kernel_size) - 1


@ops.keep_signature
class Conv(_flax.Conv):
    """``flax.nnx.Conv``, then bias, residual and activation, as one :func:`jaxprims.conv`.

    All arguments are Flax's, with ``activation`` and ``layout`` ("NHWC" or "NCHW", whatever the number of spatial axes) added. The
    kernel is (*window, in / groups, out) in both layouts.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> layer = nnx.Conv(3, 8, (3, 3), activation="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 6, 6, 3))).shape
    (2, 6, 6, 8)
    """

    def __init__(self, *args: _Any, activation: str | None = None, layout: str = "NHWC", **kwargs: _Any):
        super().__init__(*args, **kwargs)
        ops.channels_last(layout)
        self.activation = _check_activation(activation)
        self.layout = layout

    def __call__(self, inputs: _Any, out_sharding: _Any = None, *, residual: _Any = None) -> jax.Array:
        """Applies the layer to (*batch, spatial axes..., channels), or with "NCHW" (*batch, channels, spatial axes...)."""
        usual = self.conv_general_dilated in (jax.lax.conv_general_dilated, jaxprims.conv_general_dilated)
        dtypes = (inputs.dtype, self.dtype, self.kernel.dtype, self.preferred_element_type)
        if not usual or out_sharding is not None or ops.narrow(*dtypes):
            call = super().__call__
            y = ops.in_channels_last(lambda x: call(x, out_sharding), inputs, _channels(self, inputs))
            return ops.finish(y, self.activation, residual)
        x, kernel, bias = self.promote_dtype((inputs, _kernel(self), _value(self.bias)), dtype=self.dtype)
        return ops.conv(
            x, kernel, bias, strides=self.strides, padding=self.padding, input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation, feature_group_count=self.feature_group_count,
            precision=self.precision, layout=self.layout, activation=self.activation, residual=residual,
            preferred_element_type=self.preferred_element_type,
        )  # fmt: skip


@ops.keep_signature
class ConvTranspose(_flax.ConvTranspose):
    """``flax.nnx.ConvTranspose``, then bias, residual and activation, as one :func:`jaxprims.conv_transpose`.

    All arguments are Flax's, with ``activation`` and ``layout`` added, as in :class:`Conv`. padding="CIRCULAR" sums the periods
    behind the convolution, and adds bias, residual and activation after that, in one op.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> nnx.ConvTranspose(3, 8, (3, 3), strides=2, rngs=nnx.Rngs(0))(jnp.ones((2, 6, 6, 3))).shape
    (2, 12, 12, 8)
    """

    def __init__(self, *args: _Any, activation: str | None = None, layout: str = "NHWC", **kwargs: _Any):
        super().__init__(*args, **kwargs)
        ops.channels_last(layout)
        self.activation = _check_activation(activation)
        self.layout = layout

    def __call__(self, inputs: _Any, *, residual: _Any = None) -> jax.Array:
        if ops.narrow(inputs.dtype, self.dtype, self.kernel.dtype, self.preferred_element_type):
            y = ops.in_channels_last(super().__call__, inputs, _channels(self, inputs))
            return ops.finish(y, self.activation, residual)
        x, kernel, bias = self.promote_dtype((inputs, _kernel(self), _value(self.bias)), dtype=self.dtype)
        return ops.conv_transpose(
            x, kernel, bias, strides=self.strides, padding=self.padding, kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel, precision=self.precision, layout=self.layout,
            activation=self.activation, residual=residual, preferred_element_type=self.preferred_element_type,
        )  # fmt: skip


def _no_norm(layer: _Any, x: _Any) -> bool:
    """True where no op takes x: Flax's own code runs."""
    params = (layer.scale, getattr(layer, "bias", None))
    dtypes = (layer.dtype, *(p.dtype for p in params if p is not None))
    named = layer.axis_name is not None and not isinstance(layer, BatchNorm)
    return named or ops.no_norm(x, layer.epsilon, *dtypes)


def _norm(layer: _Any, op: _Any, x: _Any, mask: _Any, residual: _Any, **options: _Any) -> jax.Array:
    """The op on x, scale and bias brought to one dtype, as Flax does before its statistics."""
    arrays = (x, _value(layer.scale), _value(layer.bias)) if hasattr(layer, "bias") else (x, _value(layer.scale))
    x, *params = layer.promote_dtype(arrays, dtype=layer.dtype)
    return ops.normalise(
        op, x, *params, dtype=layer.dtype, eps=layer.epsilon, mask=mask, residual=residual, activation=layer.activation,
        **options,
    )  # fmt: skip


@ops.keep_signature
class BatchNorm(_flax.BatchNorm):
    """``flax.nnx.BatchNorm``, then residual and activation, as one :func:`jaxprims.batch_norm`.

    All arguments are Flax's, with ``activation`` added; channels first are ``axis=1``. Running statistics are Flax's: the biased
    variance, ``running = momentum * running + (1 - momentum) * batch``; ``train()``, ``eval()`` and ``nnx.view`` choose.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> layer = nnx.BatchNorm(1, momentum=0.9, activation="relu", rngs=nnx.Rngs(0))
    >>> y = layer(jnp.array([[1.0], [3.0]]))
    >>> print(layer.mean[...], layer.var[...])
    [0.2] [1.]
    """

    def __init__(self, *args: _Any, activation: str | None = None, **kwargs: _Any):
        super().__init__(*args, **kwargs)
        self.activation = _check_activation(activation)

    def __call__(
        self, x: _Any, use_running_average: bool | None = None, *, mask: _Any = None, residual: _Any = None
    ) -> jax.Array:
        """Normalises x with the batch's statistics, which update the running ones, or with the running ones."""
        average = self.use_running_average if use_running_average is None else use_running_average
        if average is None or _no_norm(self, x):  # Flax explains the missing argument
            y = super().__call__(x, use_running_average, mask=mask)
            return ops.finish(y, self.activation, residual)
        running = (self.mean[...], self.var[...])
        arrays = (jnp.asarray(x), *running, _value(self.scale), _value(self.bias))
        x, _, _, scale, bias = self.promote_dtype(arrays, dtype=self.dtype)
        options: dict[str, _Any] = dict(
            axis=ops.axes_of(x.ndim, self.axis), eps=self.epsilon, dtype=self.dtype, residual=residual,
            activation=self.activation,
        )  # fmt: skip
        if average:
            return ops.normalise(jaxprims.batch_norm_inference, x, scale, bias, before=running, **options)
        y, *batch = ops.normalise(
            jaxprims.batch_norm, x, scale, bias, mask=mask, axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups, **options,
        )  # fmt: skip
        stop = any(
            getattr(v, "_can_update", False) for v in (self.mean, self.var)
        )  # as Flax: variables that hold a Ref
        for variable, old, new in zip((self.mean, self.var), running, batch, strict=True):
            new = self.momentum * old + (1 - self.momentum) * new
            variable[...] = jax.lax.stop_gradient(new) if stop else new
        return y


@ops.keep_signature
class LayerNorm(_flax.LayerNorm):
    """``flax.nnx.LayerNorm`` by :func:`jaxprims.layer_norm`, the activation in the same op; a residual costs a second one.

    All arguments are Flax's, with ``activation`` added.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> print(nnx.LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0]])))
    [[-1.  1.]]
    """

    def __init__(self, *args: _Any, activation: str | None = None, **kwargs: _Any):
        super().__init__(*args, **kwargs)
        self.activation = _check_activation(activation)

    def __call__(self, x: _Any, *, mask: _Any = None, residual: _Any = None) -> jax.Array:
        if _rows_by_flax(self, x):
            return ops.finish(super().__call__(x, mask=mask), self.activation, residual)
        return _rows(self, ops.layer_norm, x, mask, residual)


@ops.keep_signature
class RMSNorm(_flax.RMSNorm):
    """``flax.nnx.RMSNorm`` by :func:`jaxprims.rms_norm`; the rest as :class:`LayerNorm`.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> print(nnx.RMSNorm(4, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, 4.0, 0.0, 0.0]])))
    [[1.2 1.6 0.  0. ]]
    """

    def __init__(self, *args: _Any, activation: str | None = None, **kwargs: _Any):
        super().__init__(*args, **kwargs)
        self.activation = _check_activation(activation)

    def __call__(self, x: _Any, mask: _Any = None, *, residual: _Any = None) -> jax.Array:
        if _rows_by_flax(self, x):
            return ops.finish(super().__call__(x, mask=mask), self.activation, residual)
        return _rows(self, ops.rms_norm, x, mask, residual)


def _rows_by_flax(layer: _Any, x: _Any) -> bool:
    return _no_norm(layer, x) or not ops.axes_of(x.ndim, layer.reduction_axes)


def _rows(layer: _Any, op: _Any, x: _Any, mask: _Any, residual: _Any) -> jax.Array:
    features, reduce = (ops.axes_of(x.ndim, a) for a in (layer.feature_axes, layer.reduction_axes))
    return _norm(layer, op, x, mask, residual, axis=reduce, feature_axes=features)


@ops.keep_signature
class GroupNorm(_flax.GroupNorm):
    """``flax.nnx.GroupNorm``, then residual and activation, as one :func:`jaxprims.group_norm`.

    All arguments are Flax's, with ``activation`` and ``layout`` added. "NCHW" has the channels at axis 1, also in ``reduction_axes``.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> layer = nnx.GroupNorm(4, num_groups=2, epsilon=0.0, activation="relu", rngs=nnx.Rngs(0))
    >>> print(layer(jnp.array([[1.0, 3.0, 5.0, 5.0]])))
    [[0. 1. 0. 0.]]
    """

    def __init__(self, *args: _Any, activation: str | None = None, layout: str = "NHWC", **kwargs: _Any):
        super().__init__(*args, **kwargs)
        ops.channels_last(layout)
        self.activation = _check_activation(activation)
        self.layout = layout

    def __call__(self, x: _Any, *, mask: _Any = None, residual: _Any = None) -> jax.Array:
        axis = x.ndim - 1 if ops.channels_last(self.layout) else 1
        reduce = None if self.reduction_axes is None else ops.axes_of(x.ndim, self.reduction_axes)
        if _no_norm(self, x) or x.ndim < 2 or (reduce is not None and axis not in reduce):
            if self.layout == "NCHW" and (x.ndim < 2 or reduce is not None):
                raise ValueError(ops.GROUPS_FIRST.format(shape=jnp.shape(x), axes=self.reduction_axes))
            y = ops.in_channels_last(super().__call__, x, axis, mask=mask)
            return ops.finish(y, self.activation, residual)
        return _norm(
            self, jaxprims.group_norm, x, mask, residual, num_groups=self.num_groups, axis=axis, reduction_axes=reduce
        )


@ops.keep_signature
class InstanceNorm(_flax.InstanceNorm):
    """``flax.nnx.InstanceNorm``, then residual and activation, as one :func:`jaxprims.instance_norm`.

    All arguments are Flax's, with ``activation`` and ``layout`` added; "NCHW" is another way to say ``feature_axes=1``.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> layer = nnx.InstanceNorm(1, epsilon=0.0, layout="NCHW", rngs=nnx.Rngs(0))
    >>> print(layer(jnp.array([[[1.0, 3.0]]])))
    [[[-1.  1.]]]
    """

    def __init__(self, *args: _Any, activation: str | None = None, layout: str = "NHWC", **kwargs: _Any):
        super().__init__(*args, **kwargs)
        ops.channels_last(layout)
        self.activation = _check_activation(activation)
        self.layout = layout

    def __call__(self, x: _Any, *, mask: _Any = None, residual: _Any = None) -> jax.Array:
        features = ops.instance_features(x.ndim, self.feature_axes, self.layout)
        if _no_norm(self, x) or 0 in features or len(features) >= x.ndim - 1:
            turned = features == (1,) and self.feature_axes == -1
            y = ops.in_channels_last(super().__call__, x, 1 if turned else -1, mask=mask)
            return ops.finish(y, self.activation, residual)
        return _norm(self, jaxprims.instance_norm, x, mask, residual, axis=features)


class LocalResponseNorm(_flax.Module):
    """Local response normalisation across channels, :func:`jaxprims.local_response_norm`; it has no parameters.

    ``divide_by_size`` says which of the two conventions of ``alpha`` is meant: Caffe's and PyTorch's (True), or the paper's.

    >>> import jax.numpy as jnp
    >>> from jaxprims import nnx
    >>> print(nnx.LocalResponseNorm(size=3, alpha=3.0, beta=1.0)(jnp.ones((1, 3))))
    [[0.33333334 0.25       0.33333334]]
    """

    def __init__(
        self,
        size: int = 5,
        alpha: float = 1e-4,
        beta: float = 0.75,
        k: float = 1.0,
        divide_by_size: bool = True,
        axis: int = -1,
    ):
        self.size = size
        self.alpha = alpha
        self.beta = beta
        self.k = k
        self.divide_by_size = divide_by_size
        self.axis = axis

    def __call__(self, x: _Any) -> jax.Array:
        return jaxprims.local_response_norm(
            x, size=self.size, alpha=self.alpha, beta=self.beta, k=self.k, axis=self.axis,
            divide_by_size=self.divide_by_size,
        )  # fmt: skip
