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
from typing import Any

import numpy as np

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
CONV: list[Case] = []

# --- pool -----------------------------------------------------------------------------------------------------------
POOL: list[Case] = []

# --- norm -----------------------------------------------------------------------------------------------------------
NORM: list[Case] = []

# --- act (softmax, activations, bias, layout) --------------------------------------------------------------------------
ACT: list[Case] = []


def all_cases() -> Sequence[Case]:
    cases = [*CONV, *POOL, *NORM, *ACT]
    ids = [c.id for c in cases]
    assert len(ids) == len(set(ids)), "two cases share an id"
    return cases
