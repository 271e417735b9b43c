"""What the contract tests share: how a case is run, compared, batched and resized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.cases import EPS, Case, all_cases

CASES = list(all_cases())
CASE_DTYPES = [(c, d) for c in CASES for d in c.dtypes]


def case_id(value: Any) -> str:
    return value.id if isinstance(value, Case) else str(value)


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def floats(fn: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """fn with its integer results dropped, as a tuple."""
    return lambda *a: tuple(y for y in as_tuple(fn(*a)) if jnp.issubdtype(y.dtype, jnp.inexact))


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def close(got: Any, want: Any, tol: float, dtype: Any = None, what: str = "") -> None:
    """|got - want| <= tol * eps * max|want| elementwise; NaN and infinities must agree; integers must be equal."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=what)
        return
    name = np.dtype(dtype or got.dtype).name
    kind = np.complex128 if np.iscomplexobj(got) else np.float64
    got, want = got.astype(kind), want.astype(kind)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"{what}: NaN")
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=f"{what}: infinities")
    if not finite.any():
        return
    scale = max(float(np.abs(want[finite]).max()), 1e-3)
    worst = float(np.abs(got - want)[finite].max())
    limit = tol * EPS.get(name, EPS["float32"]) * scale
    assert worst <= limit, f"{what}: worst error {worst:.3g} > {limit:.3g} = {tol} eps({name}) x {scale:.3g}"


def close_all(got: Any, want: Any, tol: float, what: str = "", dtype: Any = None) -> None:
    got, want = as_tuple(got), as_tuple(want)
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        close(g, w, tol, dtype, f"{what}[{i}]")


def in_float64(operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """The operands as rounded to their dtypes, in float64 (indices stay integers)."""
    return tuple(np.asarray(x).astype(np.float64) if is_float(x) else np.asarray(x) for x in operands)


def objective(case: Case, seed: int = 1) -> Callable[..., Any]:
    """A scalar of the case's results: a fixed random projection, so that every result element has its own cotangent."""

    def scalar(*operands):
        total = 0.0
        for i, y in enumerate(floats(case.fn)(*operands)):
            c = np.random.default_rng([seed, i]).standard_normal(y.shape)
            wide = y if y.dtype == jnp.float64 else y.astype(jnp.float32)
            total = total + jnp.sum(wide * jnp.asarray(c, wide.dtype))
        return total

    return scalar


def resized(case: Case, n: int) -> tuple[tuple[int, ...], ...]:
    """The case's shapes with a batch of n."""
    axes = (*case.batch_axes, *(None,) * (len(case.shapes) - len(case.batch_axes)))
    return tuple(
        s if a is None else tuple(n if i == a % len(s) else d for i, d in enumerate(s))
        for s, a in zip(case.shapes, axes, strict=True)
    )


def grad_tolerance(case: Case, dtype: str) -> float:
    return 4 * case.tolerance(dtype) * (4 if dtype in ("float16", "bfloat16") else 1)
