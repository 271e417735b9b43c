"""jaxprims: convolution, pooling, normalisation, softmax and activations for JAX, as own CUDA kernels with every JAX rule.

``jaxprims.conv`` and ``jaxprims.explain`` are the functions; of the modules of these names, types are imported as
``from jaxprims.explain import Ceilings``. ``jaxprims.linen``, ``nnx``, ``models``, ``cupy`` and ``bench`` are imported by
name when they are needed.
"""

from __future__ import annotations

from jaxprims.act.api import activation, bias_act, log_softmax, softmax, transpose_layout
from jaxprims.conv.api import conv, conv_general_dilated, conv_transpose
from jaxprims.core.export import export_checks
from jaxprims.core.ffi import Status, status
from jaxprims.core.settings import use
from jaxprims.explain import explain
from jaxprims.norm.api import (
    batch_norm,
    batch_norm_inference,
    group_norm,
    instance_norm,
    layer_norm,
    local_response_norm,
    rms_norm,
)
from jaxprims.pool.api import (
    adaptive_avg_pool,
    adaptive_max_pool,
    avg_pool,
    global_avg_pool,
    global_max_pool,
    lp_pool,
    max_pool,
    max_pool_with_argmax,
    max_unpool,
    min_pool,
)

__version__ = "0.1.0"

__all__ = [
    "Status",
    "activation",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "batch_norm",
    "batch_norm_inference",
    "bias_act",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "explain",
    "export_checks",
    "global_avg_pool",
    "global_max_pool",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "local_response_norm",
    "log_softmax",
    "lp_pool",
    "max_pool",
    "max_pool_with_argmax",
    "max_unpool",
    "min_pool",
    "rms_norm",
    "softmax",
    "status",
    "transpose_layout",
    "use",
]

_MODULES = ("bench", "cupy", "linen", "models", "nnx")  # public ones; they show once they are imported


def __dir__() -> list[str]:
    return sorted(n for n in globals() if n in __all__ or n in _MODULES or (n.startswith("__") and n.endswith("__")))
