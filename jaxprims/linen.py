"""Flax's linen namespace with jaxprims' ops under it: ``from jaxprims import linen as nn`` is the whole migration.

Convolutions, norms, pools and softmax are defined here; every other name is Flax's own (``nn.Module``, ``nn.Dense``, ...).
The layers subclass Flax's and keep their names, constructor arguments, defaults, parameter trees, initialisers and dtype
rules, so that checkpoints load both ways. They add keywords for what one op of jaxprims does at once:

==============================  ==========================================================================================
``Layer(activation="relu")``    y = activation(f(x) + residual), for every convolution and norm
``layer(x, residual=r)``        r: of y's shape; the result's dtype is what y and r promote to
``Layer(layout="NCHW")``        Conv, ConvTranspose, GroupNorm, InstanceNorm, pools (BatchNorm: ``axis=1``). Kernels stay as
                                Flax keeps them, (*window, in, out)
``LocalResponseNorm``           and pools that Flax lacks: min, lp, global, adaptive, with argmax, and unpooling
==============================  ==========================================================================================

Statistics are exact whatever ``use_fast_variance`` says, and float32 at least whatever ``force_float32_reductions`` says. With
``axis_name``, batch norm combines counts, means and squared deviations, so that masks with unequal counts come out right;
an empty batch, or a channel without any unmasked element, has mean 0 and variance 0 (Flax: NaN).

Flax's own code runs, with the extra keywords added behind, where no op of jaxprims takes the call: a convolution
function given by the user (``conv_general_dilated``, ``conv_general_dilated_cls``), complex input to a norm, floats of 8 bits, an
epsilon that is no plain number, norms other than batch norm with an ``axis_name``, statistics over no axis, GroupNorm
without a batch axis, and what :func:`max_pool`, :func:`avg_pool` and :func:`softmax` say. ConvLocal and the recurrent cells
(ConvLSTMCell) are Flax's.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jaxprims
from jaxprims import flax_ops as ops
from jaxprims.flax_ops import avg_pool, log_softmax, max_pool, min_pool, softmax
from jaxprims.flax_ops import flax_linen as _flax

if TYPE_CHECKING:  # the names that __getattr__ hands on
    from flax.linen import *  # noqa: F403  # pyright: ignore[reportAssignmentType, reportWildcardImportFromLibrary]

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


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # __path__ above all: Flax's files must not be loaded a second time under this name
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(jaxprims if name in ops.OPS else _flax, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *ops.OPS, *dir(_flax)})


def _by_flax(cls: Any, layer: Any) -> Any:
    """The ``__call__`` of Flax's class, for ``layer``: no second call of the module to interceptors and captures."""
    return functools.partial(inspect.unwrap(cls.__call__), layer)


def _usual_conv(layer: Any) -> bool:
    """Whether the convolution is the one that Flax takes by default, or jaxprims' own named in its place."""
    usual = (None, jax.lax.conv_general_dilated, jaxprims.conv_general_dilated)
    return layer.conv_general_dilated_cls is None and layer.conv_general_dilated in usual


def _kernel(layer: Any, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """The parameters of a convolution, made in Flax's order."""
    if layer.mask is not None and layer.mask.shape != shape:
        raise ValueError(f"Mask needs to have the same shape as weights. Shapes are: {layer.mask.shape}, {shape}")
    kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
    if layer.mask is not None:
        kernel *= layer.mask
    bias = layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype) if layer.use_bias else None
    return kernel, bias


def _window(layer: Any) -> tuple[int, ...]:
    return (layer.kernel_size,) if isinstance(layer.kernel_size, int) else tuple(layer.kernel_size)


def _channels(x: Any, window: tuple[int, ...], layout: str) -> int:
    """The channels' axis of an image or a batch (of batches) of images."""
    return -1 if ops.channels_last(layout) else x.ndim - len(window) - 1


class Conv(_flax.Conv):
    """``flax.linen.Conv``, then bias, residual and activation, as one :func:`jaxprims.conv`.

    All arguments are Flax's, with ``activation`` and ``layout`` ("NHWC" or "NCHW", whatever the number of spatial axes) added. The
    kernel is (*window, in / groups, features) in both layouts.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv(8, (3, 3), activation="relu")
    >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 6, 6, 3)))
    >>> y.shape, variables["params"]["kernel"].shape
    ((2, 6, 6, 8), (3, 3, 3, 8))
    """

    activation: str | None = field(default=None, kw_only=True)
    layout: str = field(default="NHWC", kw_only=True)

    @_flax.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        """Applies the layer to (*batch, spatial axes..., channels), or with "NCHW" (*batch, channels, spatial axes...)."""
        window = _window(self)
        axis = _channels(inputs, window, self.layout)
        if not _usual_conv(self) or ops.narrow(inputs.dtype, self.dtype, self.param_dtype):
            call = _by_flax(_flax.Conv, self)
            return ops.finish(ops.in_channels_last(call, inputs, axis), self.activation, residual)
        channels, groups = inputs.shape[axis], self.feature_group_count
        if channels % groups:
            raise ValueError(f"feature_group_count={groups} must divide the {channels} input channels.")
        kernel, bias = _kernel(self, (*window, channels // groups, self.features))
        x, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return ops.conv(
            x, kernel, bias, strides=self.strides, padding=self.padding, input_dilation=self.input_dilation,
            kernel_dilation=self.kernel_dilation, feature_group_count=groups, precision=self.precision, layout=self.layout,
            activation=self.activation, residual=residual,
        )  # fmt: skip


class ConvTranspose(_flax.ConvTranspose):
    """``flax.linen.ConvTranspose``, then bias, residual and activation, as one :func:`jaxprims.conv_transpose`.

    All arguments are Flax's, with ``activation`` and ``layout`` added, as in :class:`Conv`. padding="CIRCULAR" sums the periods
    behind the convolution, and adds bias, residual and activation after that, in one op.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose(8, (3, 3), strides=(2, 2))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 6, 6, 3)))[0].shape
    (2, 12, 12, 8)
    """

    activation: str | None = field(default=None, kw_only=True)
    layout: str = field(default="NHWC", kw_only=True)

    @_flax.compact
    def __call__(self, inputs: Any, *, residual: Any = None) -> jax.Array:
        window = _window(self)
        axis = _channels(inputs, window, self.layout)
        if ops.narrow(inputs.dtype, self.dtype, self.param_dtype, self.preferred_element_type):
            call = _by_flax(_flax.ConvTranspose, self)
            return ops.finish(ops.in_channels_last(call, inputs, axis), self.activation, residual)
        pair = (inputs.shape[axis], self.features)
        kernel, bias = _kernel(self, (*window, *(pair[::-1] if self.transpose_kernel else pair)))
        x, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return ops.conv_transpose(
            x, kernel, bias, strides=self.strides, padding=self.padding, kernel_dilation=self.kernel_dilation,
            transpose_kernel=self.transpose_kernel, precision=self.precision, layout=self.layout,
            activation=self.activation, residual=residual, preferred_element_type=self.preferred_element_type,
        )  # fmt: skip


def _affine(layer: Any, shape: tuple[int, ...]) -> tuple[jax.Array | None, jax.Array | None]:
    """Scale and bias of a norm, made in Flax's order."""
    scale = bias = None
    if layer.use_scale:
        scale = layer.param("scale", layer.scale_init, shape, layer.param_dtype)
    if getattr(layer, "use_bias", False):
        bias = layer.param("bias", layer.bias_init, shape, layer.param_dtype)
    return scale, bias


class BatchNorm(_flax.BatchNorm):
    """``flax.linen.BatchNorm``, then residual and activation, as one :func:`jaxprims.batch_norm`.

    All arguments are Flax's, with ``activation`` added; channels first are ``axis=1``. Running statistics are Flax's: the biased
    variance, ``running = momentum * running + (1 - momentum) * batch``.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[1.0], [3.0]])
    >>> layer = BatchNorm(use_running_average=False, momentum=0.9, activation="relu")
    >>> y, changed = layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    >>> print(changed["batch_stats"]["mean"])
    [0.2]
    """

    activation: str | None = field(default=None, kw_only=True)

    @_flax.compact
    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: Any = None, residual: Any = None
    ) -> jax.Array:
        """Normalises x with the batch's statistics, which update the running ones, or with the running ones."""
        average = _flax.merge_param("use_running_average", self.use_running_average, use_running_average)
        if ops.no_norm(x, self.epsilon, self.dtype, self.param_dtype):
            return ops.finish(
                _by_flax(_flax.BatchNorm, self)(x, use_running_average, mask=mask), self.activation, residual
            )
        x = jnp.asarray(x)
        features = ops.axes_of(x.ndim, self.axis)
        shape = tuple(x.shape[a] for a in features)
        kept = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(shape, kept))
        var = self.variable("batch_stats", "var", lambda: jnp.ones(shape, kept))
        params = _affine(self, shape)
        options: dict[str, Any] = dict(
            axis=features, eps=self.epsilon, dtype=self.dtype, residual=residual, activation=self.activation
        )
        if average:
            before = (jnp.asarray(mean.value), jnp.asarray(var.value))
            if not self.force_float32_reductions:
                before = (before[0].astype(kept), before[1].astype(kept))
            return ops.normalise(jaxprims.batch_norm_inference, x, *params, before=before, **options)
        first = self.is_initializing()
        y, batch_mean, batch_var = ops.normalise(
            jaxprims.batch_norm, x, *params, mask=mask, axis_name=None if first else self.axis_name,
            axis_index_groups=None if first else self.axis_index_groups, **options,
        )  # fmt: skip
        if not first:
            exact = jnp.dtype(x.dtype if self.dtype is None else self.dtype)
            if self.force_float32_reductions:
                exact = jnp.promote_types(exact, jnp.float32)
            keep = self.momentum
            mean.value = keep * mean.value + (1 - keep) * batch_mean.astype(exact)
            var.value = keep * var.value + (1 - keep) * batch_var.astype(exact)
        return y


class LayerNorm(_flax.LayerNorm):
    """``flax.linen.LayerNorm`` by :func:`jaxprims.layer_norm`, the activation in the same op; a residual costs a second one.

    All arguments are Flax's, with ``activation`` added.

    >>> import jax, jax.numpy as jnp
    >>> LayerNorm(epsilon=0.0).init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0]]))[0].tolist()
    [[-1.0, 1.0]]
    """

    activation: str | None = field(default=None, kw_only=True)

    @_flax.compact
    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> jax.Array:
        if _rows_by_flax(self, x):
            return ops.finish(_by_flax(_flax.LayerNorm, self)(x, mask=mask), self.activation, residual)
        return _rows(self, ops.layer_norm, x, mask, residual)


class RMSNorm(_flax.RMSNorm):
    """``flax.linen.RMSNorm`` by :func:`jaxprims.rms_norm`; the rest as :class:`LayerNorm`.

    >>> import jax, jax.numpy as jnp
    >>> print(RMSNorm(epsilon=0.0).init_with_output(jax.random.key(0), jnp.array([[3.0, 4.0, 0.0, 0.0]]))[0])
    [[1.2 1.6 0.  0. ]]
    """

    activation: str | None = field(default=None, kw_only=True)

    @_flax.compact
    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> jax.Array:
        if _rows_by_flax(self, x):
            return ops.finish(_by_flax(_flax.RMSNorm, self)(x, mask=mask), self.activation, residual)
        return _rows(self, ops.rms_norm, x, mask, residual)


def _rows_by_flax(layer: Any, x: Any) -> bool:
    return (
        ops.no_norm(x, layer.epsilon, layer.dtype, layer.param_dtype)
        or layer.axis_name is not None
        or not ops.axes_of(x.ndim, layer.reduction_axes)
    )


def _rows(layer: Any, op: Any, x: Any, mask: Any, residual: Any) -> jax.Array:
    x = jnp.asarray(x)
    features = ops.axes_of(x.ndim, layer.feature_axes)
    scale, bias = _affine(layer, tuple(x.shape[a] for a in features))
    params = (scale,) if op is ops.rms_norm else (scale, bias)
    return ops.normalise(
        op, x, *params, axis=ops.axes_of(x.ndim, layer.reduction_axes), feature_axes=features, eps=layer.epsilon,
        dtype=layer.dtype, mask=mask, residual=residual, activation=layer.activation,
    )  # fmt: skip


class GroupNorm(_flax.GroupNorm):
    """``flax.linen.GroupNorm``, then residual and activation, as one :func:`jaxprims.group_norm`.

    All arguments are Flax's, with ``activation`` and ``layout`` added. "NCHW" has the channels at axis 1, also in ``reduction_axes``.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[1.0, 3.0, 5.0, 5.0]])
    >>> GroupNorm(num_groups=2, epsilon=0.0, activation="relu").init_with_output(jax.random.key(0), x)[0].tolist()
    [[0.0, 1.0, 0.0, 0.0]]
    """

    activation: str | None = field(default=None, kw_only=True)
    layout: str = field(default="NHWC", kw_only=True)

    @_flax.compact
    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> jax.Array:
        axis = x.ndim - 1 if ops.channels_last(self.layout) else 1
        if (
            ops.no_norm(x, self.epsilon, self.dtype, self.param_dtype)
            or self.axis_name is not None
            or x.ndim < 2
            or not ops.groups_fit(x.shape[axis], self.num_groups, self.group_size)
            or (self.reduction_axes is not None and axis not in ops.axes_of(x.ndim, self.reduction_axes))
        ):
            if self.layout == "NCHW" and (x.ndim < 2 or self.reduction_axes is not None):
                raise ValueError(ops.GROUPS_FIRST.format(shape=jnp.shape(x), axes=self.reduction_axes))
            y = ops.in_channels_last(_by_flax(_flax.GroupNorm, self), x, axis, mask=mask)
            return ops.finish(y, self.activation, residual)
        x = jnp.asarray(x)
        return ops.normalise(
            jaxprims.group_norm, x, *_affine(self, (x.shape[axis],)), num_groups=self.num_groups, axis=axis,
            group_size=self.group_size,
            reduction_axes=None if self.reduction_axes is None else ops.axes_of(x.ndim, self.reduction_axes),
            eps=self.epsilon, dtype=self.dtype, mask=mask, residual=residual, activation=self.activation,
        )  # fmt: skip


class InstanceNorm(_flax.InstanceNorm):
    """``flax.linen.InstanceNorm``, then residual and activation, as one :func:`jaxprims.instance_norm`.

    All arguments are Flax's, with ``activation`` and ``layout`` added; "NCHW" is another way to say ``feature_axes=1``.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.array([[[1.0, 3.0]]])
    >>> InstanceNorm(epsilon=0.0, layout="NCHW").init_with_output(jax.random.key(0), x)[0].tolist()
    [[[-1.0, 1.0]]]
    """

    activation: str | None = field(default=None, kw_only=True)
    layout: str = field(default="NHWC", kw_only=True)

    @_flax.compact
    def __call__(self, x: Any, *, mask: Any = None, residual: Any = None) -> jax.Array:
        features = ops.instance_features(x.ndim, self.feature_axes, self.layout)
        if (
            ops.no_norm(x, self.epsilon, self.dtype, self.param_dtype)
            or self.axis_name is not None
            or 0 in features
            or len(features) >= x.ndim - 1
        ):
            turned = features == (1,) and self.feature_axes == -1
            y = ops.in_channels_last(_by_flax(_flax.InstanceNorm, self), x, 1 if turned else -1, mask=mask)
            return ops.finish(y, self.activation, residual)
        x = jnp.asarray(x)
        return ops.normalise(
            jaxprims.instance_norm, x, *_affine(self, tuple(x.shape[a] for a in features)), axis=features,
            eps=self.epsilon, dtype=self.dtype, mask=mask, residual=residual, activation=self.activation,
        )  # fmt: skip


class LocalResponseNorm(_flax.Module):
    """Local response normalisation across channels, :func:`jaxprims.local_response_norm`; it has no parameters.

    ``divide_by_size`` says which of the two conventions of ``alpha`` is meant: Caffe's and PyTorch's (True), or the paper's.

    >>> import jax.numpy as jnp
    >>> print(LocalResponseNorm(size=3, alpha=3.0, beta=1.0).apply({}, jnp.ones((1, 3))))
    [[0.33333334 0.25       0.33333334]]
    """

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    divide_by_size: bool = True
    axis: int = -1

    def __call__(self, x: Any) -> jax.Array:
        return jaxprims.local_response_norm(
            x, size=self.size, alpha=self.alpha, beta=self.beta, k=self.k, axis=self.axis,
            divide_by_size=self.divide_by_size,
        )  # fmt: skip
