"""The one table of cases: ops x named shapes x dtypes x tolerance. Tests, benchmarks and notebooks read it.

A case is a function of arrays (all static options bound), the shapes of its operands, and a NumPy float64 oracle. The
contract tests do the rest: value, jit, jvp, vjp, second order, vmap, scan, remat, export, lowering, sharding.

Tolerances. The oracle computes in float64 on the operands as rounded to the dtype. A result is right when
    |got - want| <= tol * eps(dtype) * scale + floor,
where scale is max|want| and eps the unit of the *result* dtype (2^-23, 2^-10, 2^-7; float64 2^-52): one rounding at the end
is 0.5 eps; float32 accumulation of n terms adds about sqrt(n) float32 eps. `tol` is therefore small for half types
(2: one rounding of the result, one of an intermediate) and grows with the reduction for float32 and float64 (default 32).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxprims.act import api as act_api
from jaxprims.conv import api as conv_api
from jaxprims.norm import api as norm_api
from jaxprims.pool import api as pool_api
from tests.oracle import act as act_oracle
from tests.oracle import conv as conv_oracle
from tests.oracle import norm as norm_oracle
from tests.oracle import pool as pool_oracle

FLOATS = ("float32", "bfloat16", "float16", "float64")
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Case:
    op: str  # primitive stem: "max_pool"
    name: str  # "3x3s2-same-nhwc"
    fn: Callable[..., Any]  # fn(*arrays) -> array or tuple of arrays (the public op, options bound)
    shapes: tuple[tuple[int, ...], ...]
    oracle: Callable[..., Any]  # the same in NumPy float64: oracle(*float64 arrays) -> array or tuple
    dtypes: tuple[str, ...] = FLOATS
    # Which operands are differentiable (default: all) and which carry the batch in axis `batch_axis` (None: not batched);
    # used by the sharding tests. () = the op has no batch axis that may be sharded.
    diff: tuple[int, ...] | None = None
    batch_axes: tuple[int | None, ...] = ()
    out_batch_axes: tuple[int | None, ...] = (0,)
    # FFI targets (without "jaxprims_") that the forward and the gradient w.r.t. `diff` must consist of on "cuda".
    kernels: tuple[str, ...] = ()
    grad_kernels: tuple[str, ...] = ()  # of the whole value_and_grad program, forward included, sorted
    tol: dict[str, float] = field(default_factory=dict)  # multiples of eps per dtype; default 32, halves 2
    order: int = 2  # check_grads order in float64
    # make(rng, index, shape) -> float64 array; default standard normal. Max-pools want distinct values, LRN positive ones, ...
    make: Callable[[np.random.Generator, int, tuple[int, ...]], np.ndarray] | None = None
    # dtype of operand i for a case dtype; default: all the same. E.g. indices, float32 scale with a bfloat16 x.
    operand_dtypes: dict[int, str] = field(default_factory=dict)
    vmap: bool = True

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"

    def diff_args(self) -> tuple[int, ...]:
        return tuple(range(len(self.shapes))) if self.diff is None else self.diff

    def tolerance(self, dtype: str) -> float:
        return self.tol.get(dtype, 2.0 if dtype in ("float16", "bfloat16") else 32.0)

    def operands(self, dtype: str, seed: int = 0) -> tuple[Any, ...]:
        """Fresh random operands as jax arrays of the case's dtypes (float64 needs jax_enable_x64)."""
        import jax.numpy as jnp

        rng = np.random.default_rng([zlib.crc32(self.id.encode()), seed])
        out = []
        for i, shape in enumerate(self.shapes):
            a = rng.standard_normal(shape) if self.make is None else self.make(rng, i, shape)
            out.append(jnp.asarray(np.asarray(a), self.operand_dtypes.get(i, dtype)))
        return tuple(out)


def distinct(rng: np.random.Generator, _i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values no two of which are closer than 1/16 (exact in every dtype up to 2^7 of them): a maximum with a clear winner."""
    n = int(np.prod(shape))
    return (rng.permutation(n).reshape(shape) - n // 2) / 16.0


# --- conv -----------------------------------------------------------------------------------------------------------
_CONV_GRADS = ("conv", "conv_dw", "conv_dx")
_FUSED_GRADS = ("conv_dw", "conv_dx", "conv_fused")
_STRIDED = dict(window_strides=(2, 1), padding=((2, -1), (-1, 3)), lhs_dilation=(1, 2), rhs_dilation=(2, 1))
_BATCH_GROUPS = dict(window_strides=(2,), padding=((1, 1),), batch_group_count=2)

CONV: list[Case] = [
    Case(
        "conv",
        "3x3-same-nhwc",
        partial(conv_api.conv, padding="SAME"),
        ((2, 5, 4, 3), (3, 3, 3, 4)),
        partial(conv_oracle.conv_layer, strides=(1, 1), padding=((1, 1), (1, 1))),
        batch_axes=(0, None),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv",
        "strided-dilated-cropped-nchw",
        partial(conv_api.conv_general_dilated, **_STRIDED),
        ((2, 3, 6, 4), (4, 3, 2, 3)),
        partial(conv_oracle.conv, strides=(2, 1), padding=((2, -1), (-1, 3)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)),
        batch_axes=(0, None),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv",
        "depthwise-causal-nwc",
        partial(conv_api.conv, padding="CAUSAL", kernel_dilation=2, feature_group_count=4),
        ((2, 7, 4), (3, 1, 4)),
        partial(conv_oracle.conv_layer, strides=(1,), padding=((4, 0),), rhs_dilation=(2,), groups=4),
        batch_axes=(0, None),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv",
        "groups-flipped-ncdhw",
        partial(
            conv_api.conv,
            padding=1,
            strides=(1, 2, 2),
            feature_group_count=2,
            dimension_numbers="NCDHW",
            mode="convolution",
        ),
        ((2, 4, 2, 3, 4), (4, 2, 2, 3, 2)),
        partial(
            conv_oracle.conv_layer, strides=(1, 2, 2), padding=((1, 1),) * 3, groups=2, flip=True, channels_last=False
        ),
        batch_axes=(0, None),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv",
        "batch_groups-ncw",
        partial(conv_api.conv_general_dilated, **_BATCH_GROUPS),
        ((4, 2, 5), (4, 2, 3)),
        partial(conv_oracle.conv, strides=(2,), padding=((1, 1),), batch_groups=2),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv",
        "transposed-same-nhwc",
        partial(conv_api.conv_transpose, strides=(2, 2), padding="SAME", transpose_kernel=True),
        ((2, 3, 2, 3), (3, 3, 4, 3)),
        conv_oracle.transposed_same_3x3,
        batch_axes=(0, None),
        kernels=("conv",),
        grad_kernels=_CONV_GRADS,
    ),
    Case(
        "conv_fused",
        "bias-residual-relu-nhwc",
        lambda x, w, b, r: conv_api.conv(x, w, b, residual=r, padding=1, strides=2, activation="relu"),
        ((2, 5, 4, 3), (3, 3, 3, 4), (4,), (2, 3, 2, 4)),
        partial(conv_oracle.conv_layer, strides=(2, 2), padding=((1, 1), (1, 1)), activation="relu"),
        batch_axes=(0, None, None, 0),
        kernels=("conv_fused",),
        grad_kernels=_FUSED_GRADS,
    ),
    Case(
        "conv_fused",
        "bias-silu-nchw",  # silu's slope needs the pre-activation: conv_fused gives that, and silu follows
        lambda x, w, b: conv_api.conv(x, w, b, padding="VALID", dimension_numbers="NCHW", activation="silu"),
        ((2, 3, 4, 3), (4, 3, 2, 2), (4,)),
        partial(
            conv_oracle.conv_layer, strides=(1, 1), padding=((0, 0), (0, 0)), channels_last=False, activation="silu"
        ),
        batch_axes=(0, None, None),
        kernels=("conv_fused",),
        grad_kernels=_FUSED_GRADS,
    ),
]


# --- pool -----------------------------------------------------------------------------------------------------------
def _pooled(oracle: Callable[..., Any], where: Any, **kw: Any) -> Callable[..., Any]:
    return lambda *arrays: oracle(*arrays, where, **kw)


_MAX_GRADS = ("max_pool", "max_pool_scatter")
_AVG_GRADS = ("avg_pool", "avg_pool_dx")
_POOL_3X3 = pool_oracle.axes((5, 6), (3, 3), (2, 2), "SAME")
_POOL_DILATED = pool_oracle.axes((6, 5), (2, 2), (1, 2), [(1, 0), (0, 2)], (3, 2))
_POOL_CROPPED = pool_oracle.axes((3, 4, 5), (2, 2, 3), (1, 2, 2), [(0, 1), (-1, 1), (1, 1)])
_POOL_ADAPTIVE = [pool_oracle.adaptive(5, 3), pool_oracle.adaptive(4, 3)]


def _unpool_operands(rng: np.random.Generator, i: int, shape: tuple[int, ...]) -> np.ndarray:
    """Values, and for each 2x2 window of a 4x6 image the flat index of one of its elements."""
    if i == 0:
        return rng.standard_normal(shape)
    rows, cols = np.arange(2)[:, None, None] * 2, np.arange(3)[None, :, None] * 2
    return (rows + rng.integers(0, 2, shape)) * 6 + cols + rng.integers(0, 2, shape)


POOL: list[Case] = [
    Case(
        "max_pool",
        "3x3s2-same-nhwc",
        partial(pool_api.max_pool, window_shape=(3, 3), strides=2, padding="SAME"),
        ((2, 5, 6, 4),),
        _pooled(pool_oracle.max_pool, _POOL_3X3),
        batch_axes=(0,),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
    Case(
        "max_pool",
        "dilated-nchw",
        partial(
            pool_api.max_pool,
            window_shape=(2, 2),
            strides=(1, 2),
            padding=((1, 0), (0, 2)),
            window_dilation=(3, 2),
            layout="NCHW",
        ),
        ((2, 3, 6, 5),),
        _pooled(pool_oracle.max_pool, _POOL_DILATED, last=False),
        batch_axes=(0,),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
    Case(
        "min_pool",
        "cropped-ndhwc",
        partial(
            pool_api.min_pool,
            window_shape=(2, 2, 3),
            strides=(1, 2, 2),
            padding=((0, 1), (-1, 1), (1, 1)),
            layout="NDHWC",
        ),
        ((1, 3, 4, 5, 2),),
        _pooled(pool_oracle.max_pool, _POOL_CROPPED, sign=-1.0),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
    Case(
        "max_pool_with_argmax",
        "2s1-nwc",
        partial(pool_api.max_pool_with_argmax, window_shape=(2,), padding=1, layout="NWC"),
        ((2, 6, 3),),
        lambda x: (
            pool_oracle.max_pool(x, pool_oracle.axes((6,), (2,), None, [(1, 1)])),
            pool_oracle.argmax_pool(x, pool_oracle.axes((6,), (2,), None, [(1, 1)])),
        ),
        batch_axes=(0,),
        out_batch_axes=(0, 0),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
    Case(
        "max_unpool",
        "2x2s2-nhwc",
        partial(pool_api.max_unpool, window_shape=(2, 2), strides=2),
        ((2, 2, 3, 4), (2, 2, 3, 4)),
        lambda y, index: pool_oracle.unpool(y, index, (*y.shape[:-3], 4, 6, y.shape[-1]), 2),
        diff=(0,),
        batch_axes=(0, 0),
        kernels=("max_pool_scatter",),
        grad_kernels=("max_pool_gather", "max_pool_scatter"),
        make=_unpool_operands,
        operand_dtypes={1: "int32"},
    ),
    Case(
        "avg_pool",
        "3x3s2-same-include-nhwc",
        partial(pool_api.avg_pool, window_shape=(3, 3), strides=2, padding="SAME"),
        ((2, 5, 6, 4),),
        _pooled(pool_oracle.avg_pool, _POOL_3X3, count_pad=True),
        batch_axes=(0,),
        kernels=("avg_pool",),
        grad_kernels=_AVG_GRADS,
    ),
    Case(
        "avg_pool",
        "dilated-exclude-nchw",
        partial(
            pool_api.avg_pool,
            window_shape=(2, 2),
            strides=(1, 2),
            padding=((1, 0), (0, 2)),
            count_include_pad=False,
            window_dilation=(3, 2),
            layout="NCHW",
        ),
        ((2, 3, 6, 5),),
        _pooled(pool_oracle.avg_pool, _POOL_DILATED, last=False),
        batch_axes=(0,),
        kernels=("avg_pool",),
        grad_kernels=_AVG_GRADS,
    ),
    Case(
        "lp_pool",
        "p3-2x2s2-nhwc",
        partial(pool_api.lp_pool, p=3, window_shape=(2, 2), strides=2),
        ((2, 4, 4, 3),),
        lambda x: pool_oracle.lp_pool(x, 3, pool_oracle.axes((4, 4), (2, 2), (2, 2))),
        batch_axes=(0,),
        kernels=("avg_pool",),
        grad_kernels=_AVG_GRADS,
        tol={"float32": 64, "float64": 64},
    ),
    Case(
        "adaptive_max_pool",
        "5x4-3x3-nhwc",
        partial(pool_api.adaptive_max_pool, output_size=(3, 3)),
        ((2, 5, 4, 3),),
        _pooled(pool_oracle.max_pool, _POOL_ADAPTIVE),
        batch_axes=(0,),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
    Case(
        "adaptive_avg_pool",
        "5x4-3x3-nchw",
        partial(pool_api.adaptive_avg_pool, output_size=(3, 3), layout="NCHW"),
        ((2, 3, 5, 4),),
        _pooled(pool_oracle.avg_pool, _POOL_ADAPTIVE, last=False),
        batch_axes=(0,),
        kernels=("avg_pool",),
        grad_kernels=_AVG_GRADS,
    ),
    Case(
        "global_avg_pool",
        "7x5-nhwc",  # 35 places, few outputs: one block for each
        pool_api.global_avg_pool,
        ((2, 7, 5, 8),),
        lambda x: x.mean((-3, -2)),
        batch_axes=(0,),
        kernels=("avg_pool",),
        grad_kernels=_AVG_GRADS,
    ),
    Case(
        "global_max_pool",
        "7x5-nchw",
        partial(pool_api.global_max_pool, layout="NCHW"),
        ((2, 2, 7, 5),),
        lambda x: x.max((-2, -1)),
        batch_axes=(0,),
        kernels=("max_pool",),
        grad_kernels=_MAX_GRADS,
        make=distinct,
    ),
]

# --- norm -----------------------------------------------------------------------------------------------------------
NORM: list[Case] = [
    Case(
        "batch_norm",
        "statistics-nhwc",
        norm_api.batch_norm,
        ((2, 3, 2, 4), (4,), (4,)),
        norm_oracle.batch_norm,
        batch_axes=(0,),
        out_batch_axes=(0, None, None),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
        tol={"bfloat16": 6.0, "float16": 6.0},  # mean and var are float32: a few units of that
        vmap=False,  # over scale alone, vmap itself broadcasts the statistics it returns; tests/test_norm.py vmaps this
    ),
    Case(
        "batch_norm",
        "residual-silu-nchw",
        lambda x, s, b, r: norm_api.batch_norm(x, s, b, axis=1, residual=r, activation="silu")[0],
        ((2, 3, 2, 2), (3,), (3,), (2, 3, 2, 2)),
        lambda x, s, b, r: norm_oracle.batch_norm(x, s, b, r, axis=1, activation="silu")[0],
        batch_axes=(0, None, None, 0),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
        operand_dtypes={1: "float32", 2: "float32"},
    ),
    Case(
        "batch_norm",
        "residual-relu-nhwc",
        lambda x, s, b, r: norm_api.batch_norm(x, s, b, residual=r, activation="relu")[0],
        ((2, 3, 2, 4), (4,), (4,), (2, 3, 2, 4)),
        lambda x, s, b, r: norm_oracle.batch_norm(x, s, b, r, activation="relu")[0],
        batch_axes=(0, None, None, 0),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
        operand_dtypes={1: "float32", 2: "float32"},
    ),
    Case(
        "batch_norm",
        "mask",
        lambda x, s, m: norm_api.batch_norm(x, s, mask=m)[0],
        ((2, 3, 3), (3,), (2, 3, 1)),
        lambda x, s, m: norm_oracle.batch_norm(x, s, mask=m)[0],
        diff=(0, 1),
        batch_axes=(0, None, 0),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
        operand_dtypes={2: "bool"},
        tol={"float32": 64.0},  # projections of y that nearly cancel
        make=norm_oracle.masking(2),
    ),
    Case(
        "batch_norm_inference",
        "tanh-nhwc",
        partial(norm_api.batch_norm_inference, activation="tanh"),
        ((2, 2, 3), (3,), (3,), (3,), (3,)),
        partial(norm_oracle.batch_norm_inference, activation="tanh"),
        batch_axes=(0,),
        kernels=("norm_apply",),
        grad_kernels=("norm_apply", "norm_bwd"),
        make=norm_oracle.positive(2),
    ),
    Case(
        "layer_norm",
        "last",
        norm_api.layer_norm,
        ((2, 3, 6), (6,), (6,)),
        norm_oracle.layer_norm,
        batch_axes=(0,),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
        operand_dtypes={1: "float32", 2: "float32"},
    ),
    Case(
        "layer_norm",
        "inner-axis-gelu",
        partial(norm_api.layer_norm, axis=1, activation="gelu"),
        ((2, 5, 3), (5,), (5,)),
        partial(norm_oracle.layer_norm, axis=1, activation="gelu"),
        batch_axes=(0,),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
    ),
    Case(
        "rms_norm",
        "last",
        norm_api.rms_norm,
        ((3, 2, 8), (8,)),
        norm_oracle.rms_norm,
        batch_axes=(0,),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
    ),
    Case(
        "group_norm",
        "silu-nhwc",
        partial(norm_api.group_norm, num_groups=2, activation="silu"),
        ((2, 2, 3, 4), (4,), (4,)),
        partial(norm_oracle.group_norm, num_groups=2, activation="silu"),
        batch_axes=(0,),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
    ),
    Case(
        "group_norm",
        "nchw",
        partial(norm_api.group_norm, num_groups=3, axis=1),
        ((2, 6, 2, 2), (6,), (6,)),
        partial(norm_oracle.group_norm, num_groups=3, axis=1),
        batch_axes=(0,),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
    ),
    Case(
        "instance_norm",
        "residual-nwc",
        lambda x, s, b, r: norm_api.instance_norm(x, s, b, residual=r, activation="tanh"),
        ((2, 5, 3), (3,), (3,), (2, 5, 3)),
        partial(norm_oracle.instance_norm, activation="tanh"),
        batch_axes=(0, None, None, 0),
        kernels=("norm",),
        grad_kernels=("norm", "norm_bwd"),
    ),
    Case(
        "local_response_norm",
        "size5-nhwc",
        partial(norm_api.local_response_norm, alpha=1.0),
        ((2, 2, 2, 7),),
        partial(norm_oracle.local_response_norm, alpha=1.0),
        batch_axes=(0,),
        kernels=("lrn",),
        grad_kernels=("lrn", "lrn_bwd"),
    ),
    Case(
        "local_response_norm",
        "size4-undivided-ncw",
        partial(norm_api.local_response_norm, size=4, alpha=0.5, k=2.0, axis=1, divide_by_size=False),
        ((2, 5, 3),),
        partial(norm_oracle.local_response_norm, size=4, alpha=0.5, k=2.0, axis=1, divide_by_size=False),
        batch_axes=(0,),
        kernels=("lrn",),
        grad_kernels=("lrn", "lrn_bwd"),
    ),
]

# --- act (softmax, activations, bias, layout) --------------------------------------------------------------------------
ACT: list[Case] = [
    Case(
        "softmax",
        "last",
        act_api.softmax,
        ((3, 2, 5),),
        act_oracle.softmax,
        batch_axes=(0,),
        kernels=("softmax",),
        grad_kernels=("softmax", "softmax_jvp"),
    ),
    Case(
        "softmax",
        "two-axes-fast-nchw",
        partial(act_api.softmax, axis=(1, 2), algorithm="fast"),
        ((2, 3, 2, 2),),
        partial(act_oracle.softmax, axis=(1, 2)),
        batch_axes=(0,),
        kernels=("softmax",),
        grad_kernels=("softmax", "softmax_jvp"),
    ),
    Case(
        "log_softmax",
        "channels-nchw",
        partial(act_api.log_softmax, axis=1),
        ((2, 4, 3),),
        partial(act_oracle.log_softmax, axis=1),
        batch_axes=(0,),
        kernels=("log_softmax",),
        grad_kernels=("log_softmax", "log_softmax_bwd"),
    ),
    Case(
        "bias_act",
        "gelu-alone",
        partial(act_api.activation, name="gelu"),
        ((3, 8),),
        partial(act_oracle.bias_act, activation="gelu"),
        batch_axes=(0,),
        kernels=("bias_act",),
        grad_kernels=("bias_act", "bias_act_jvp"),
    ),
    Case(
        "bias_act",
        "silu-residual-nchw",
        lambda x, b, r: act_api.bias_act(x, b, "silu", axis=1, residual=r),
        ((2, 3, 2, 2), (3,), (2, 3, 2, 2)),
        partial(act_oracle.bias_act, activation="silu", axis=1),
        batch_axes=(0, None, 0),
        kernels=("bias_act",),
        grad_kernels=("bias_act", "bias_act_jvp"),
    ),
    Case(
        "transpose_layout",
        "nhwc-to-nchw",
        partial(act_api.transpose_layout, source="NHWC", target="NCHW"),
        ((2, 3, 2, 4),),
        lambda x: np.moveaxis(x, -1, 1),
        batch_axes=(0,),
        kernels=("transpose_layout",),
        grad_kernels=("transpose_layout", "transpose_layout"),
    ),
]


def all_cases() -> Sequence[Case]:
    cases = [*CONV, *POOL, *NORM, *ACT]
    ids = [c.id for c in cases]
    assert len(ids) == len(set(ids)), "two cases share an id"
    return cases
