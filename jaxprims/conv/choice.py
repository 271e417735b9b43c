"""Which kernel a convolution gets, in words: what cuda/conv/choose.h says, asked of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxprims.conv.params import ConvParams
from jaxprims.core import ffi
from jaxprims.core.checks import is_static

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # cuda/conv/problem.h
_OPS = {"conv": 0, "conv_fused": 0, "conv_dx": 1, "conv_dw": 2}


def _listed(values: Sequence[int]) -> list[int]:
    return [len(values), *values]


def conv_choice(
    name: str, shape: Callable[..., Any], config: Callable[..., Any], p: ConvParams, workspace: int, *avals: Any
) -> str | None:
    """ "wgmma 128x256", say; None without the library, or where a size is symbolic. Addresses count as aligned."""
    arrays = [*avals, *(jax.ShapeDtypeStruct(*result) for result in shape(p, *avals))]
    if not is_static(*(d for a in arrays for d in a.shape)):
        return None
    values = [_OPS[name], name == "conv_fused", workspace]
    for value in config(p, *avals).values():
        values += _listed(value) if isinstance(value, tuple) else [int(value)]
    values.append(len(avals))
    for a in arrays:
        values += [_TYPES[jnp.dtype(a.dtype).name], *_listed(a.shape)]
    return ffi.ask("jaxprims_conv_choice", [int(v) for v in values])
