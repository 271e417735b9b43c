"""jaxprims: convolution, pooling, normalisation, softmax and activations for JAX, as own CUDA kernels with every JAX rule."""

from __future__ import annotations

from jaxprims.conv.api import conv, conv_general_dilated, conv_transpose
from jaxprims.core.export import export_checks
from jaxprims.core.ffi import Status, status
from jaxprims.core.settings import use
from jaxprims.explain import explain

__version__ = "0.1.0"

__all__ = [
    "Status",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "explain",
    "export_checks",
    "status",
    "use",
]
