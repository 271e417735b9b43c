"""Binds a convolution with what follows it: plain conv where nothing does, conv_fused otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.conv import primitive
from jaxprims.conv.checks import check_bias, check_residual
from jaxprims.conv.params import ConvParams, gather, y_shape
from jaxprims.core.activations import check_activation
from jaxprims.core.checks import as_array


def with_epilogue(
    p: ConvParams, x: jax.Array, w: jax.Array, bias: Any, residual: Any, activation: str | None, batch: Any = None
) -> jax.Array:
    """act(conv(x, w) + bias + residual). ``batch``: the batch axes that residual and result have in place of x's one."""
    activation = check_activation(activation)
    dtype = p.result_dtype(x)
    if activation is not None and not jnp.issubdtype(dtype, jnp.floating):
        cast = "" if jnp.issubdtype(dtype, jnp.complexfloating) else " or give preferred_element_type=jnp.float32,"
        raise TypeError(
            f"activation={activation!r} needs a floating result, this one is {dtype}: cast x and w with .astype(jnp.float32),"
            f"{cast} or leave activation out."
        )
    shape = y_shape(p, x, w)
    rest = []
    if bias is not None:
        bias = as_array(bias, "bias")
        check_bias(bias, gather(w.shape, p.rhs_spec, 0)[0], x.dtype, dtype)
        rest.append(bias)
    if residual is not None:
        residual = as_array(residual, "residual")
        check_residual(residual, shape if batch is None else (*batch, *shape[1:]), dtype)
        rest.append(residual.reshape(shape))
    if activation is None and not rest:
        (y,) = primitive.conv(p, x, w)
    else:
        q = replace(p, activation=activation, has_bias=bias is not None, has_residual=residual is not None)
        (y,) = primitive.conv_fused(q, x, w, *rest)
    return y if batch is None or len(batch) == 1 else y.reshape((*batch, *y.shape[1:]))
