"""Every case of tests/cases.py under every transformation of JAX, on the machine at hand.

Values against the NumPy float64 oracle; derivatives of the float64 op against finite differences, and those of the other
dtypes against float64; each transformation against a loop or the plain result.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tests.cases import Case
from tests.contract import (
    CASE_DTYPES,
    CASES,
    as_tuple,
    case_id,
    close_all,
    floats,
    grad_tolerance,
    in_float64,
    is_float,
    objective,
    resized,
)  # fmt: skip

each_case = pytest.mark.parametrize("case", CASES, ids=case_id)
each_dtype = pytest.mark.parametrize("case, dtype", CASE_DTYPES, ids=case_id)
vmapped = pytest.mark.parametrize("case", [c for c in CASES if c.vmap], ids=case_id)
batched = pytest.mark.parametrize("case", [c for c in CASES if any(a is not None for a in c.batch_axes)], ids=case_id)


def widened(case: Case, operands):
    return tuple(jnp.asarray(x, jnp.float64) if is_float(x) else x for x in operands)


@each_dtype
def test_value_eager_and_jit(case: Case, dtype: str):
    with jax.enable_x64(dtype == "float64"):
        x = case.operands(dtype)
        want = as_tuple(case.oracle(*in_float64(x)))
        got = as_tuple(jax.jit(case.fn)(*x))
        close_all(got, want, case.tolerance(dtype), "jit")
        close_all(as_tuple(case.fn(*x)), got, case.tolerance(dtype), "eager")
        assert not any(y.weak_type for y in got)


@each_dtype
def test_gradient_and_tangent_against_float64(case: Case, dtype: str):
    if dtype == "float64":
        pytest.skip("float64 derivatives are checked against finite differences")
    with jax.enable_x64(True):
        x = case.operands(dtype)
        args = case.diff_args()
        scalar = objective(case)
        got = jax.jit(jax.grad(scalar, args))(*x)
        want = jax.jit(jax.grad(scalar, args))(*widened(case, x))
        for i, g in zip(args, got, strict=True):
            assert g.dtype == x[i].dtype, f"gradient of operand {i} has dtype {g.dtype}, the operand {x[i].dtype}"
        close_all(got, want, grad_tolerance(case, dtype), "grad", dtype)

        def of_diff(*d):
            full = list(x)
            for i, v in zip(args, d, strict=True):
                full[i] = v
            return floats(case.fn)(*full)

        tangents = tuple(jnp.asarray(np.random.default_rng(i).standard_normal(x[i].shape), x[i].dtype) for i in args)
        y, ydot = jax.jit(lambda *a: jax.jvp(of_diff, a[: len(args)], a[len(args) :]))(*(x[i] for i in args), *tangents)
        assert [a.dtype for a in y] == [a.dtype for a in ydot]
        x = widened(case, x)
        tangents = tuple(t.astype(jnp.float64) for t in tangents)
        _, want = jax.jit(lambda *a: jax.jvp(of_diff, a[: len(args)], a[len(args) :]))(*(x[i] for i in args), *tangents)
        close_all(ydot, want, grad_tolerance(case, dtype), "jvp", dtype)


@each_case
def test_every_order_and_mode_against_finite_differences(case: Case):
    with jax.enable_x64(True):
        x = widened(case, case.operands("float64"))
        args = case.diff_args()
        if not args:
            pytest.skip("nothing to differentiate")

        def of_diff(*d):
            full = list(x)
            for i, v in zip(args, d, strict=True):
                full[i] = v
            return floats(case.fn)(*full)

        check_grads(
            jax.jit(of_diff), tuple(x[i] for i in args), order=case.order, modes=("fwd", "rev"), atol=2e-4, rtol=2e-4
        )


@each_case
def test_transpose_of_the_linear_map_and_remat(case: Case):
    x = case.operands("float32")
    args = case.diff_args()
    if not args:
        pytest.skip("nothing to differentiate")

    def of_diff(*d):
        full = list(x)
        for i, v in zip(args, d, strict=True):
            full[i] = v
        return floats(case.fn)(*full)

    primal = tuple(x[i] for i in args)
    y, linear = jax.linearize(of_diff, *primal)
    cts = tuple(jnp.asarray(np.random.default_rng(i).standard_normal(a.shape), a.dtype) for i, a in enumerate(y))
    want = jax.vjp(of_diff, *primal)[1](cts)
    tol = grad_tolerance(case, "float32")
    close_all(jax.linear_transpose(linear, *primal)(cts), want, tol, "linear_transpose")
    scalar = objective(case)
    want = jax.grad(scalar, args)(*x)
    close_all(jax.grad(jax.checkpoint(scalar), args)(*x), want, tol, "checkpoint")


@vmapped
def test_vmap_equals_a_loop(case: Case):
    size = 3
    base = [case.operands("float32", seed) for seed in range(size)]
    fn = jax.jit(case.fn)
    args = case.diff_args()
    grad = jax.jit(jax.grad(objective(case), args)) if args else None
    tol = case.tolerance("float32")
    n = len(case.shapes)

    def check(picked, axes):
        """`picked` operands are batched along `axes`, the others are those of member 0."""
        in_axes = tuple(axes[i] if i in picked else None for i in range(n))
        stacked = [jnp.stack([b[i] for b in base], axis=in_axes[i]) if i in picked else base[0][i] for i in range(n)]
        members = [[b[i] if i in picked else base[0][i] for i in range(n)] for b in base]

        def loop(f):
            return [jnp.stack(col) for col in zip(*(as_tuple(f(*m)) for m in members), strict=True)]

        where = f"vmap in_axes={in_axes}"
        close_all(as_tuple(jax.vmap(case.fn, in_axes)(*stacked)), loop(fn), tol, where)
        if grad is not None:
            got = jax.vmap(jax.grad(objective(case), args), in_axes)(*stacked)
            close_all(got, loop(grad), grad_tolerance(case, "float32"), f"{where} of grad")

    for i in range(n):
        check({i}, [0] * n)
    check(set(range(n)), [-1] * n)  # in_axes=-1: the batch is innermost
    if n > 1:
        check(set(range(n)), [min(1, len(s)) for s in case.shapes])


@vmapped
def test_nested_vmap_and_empty_and_single_batches(case: Case):
    base = [[case.operands("float32", 2 * i + j) for j in range(2)] for i in range(2)]
    n = len(case.shapes)
    fn = jax.jit(case.fn)
    tol = case.tolerance("float32")
    outer_only = [jnp.stack([base[i][0][k] for i in range(2)]) for k in range(n)]
    for picked in range(n):  # operand `picked` under both vmaps, the others under the outer one
        both = jnp.stack([jnp.stack([base[i][j][picked] for j in range(2)]) for i in range(2)])
        args = [both if k == picked else outer_only[k] for k in range(n)]
        inner = jax.vmap(case.fn, tuple(0 if k == picked else None for k in range(n)))
        got = as_tuple(jax.vmap(inner)(*args))
        rows = [
            [as_tuple(fn(*(base[i][j][k] if k == picked else base[i][0][k] for k in range(n)))) for j in range(2)]
            for i in range(2)
        ]
        want = [
            jnp.stack([jnp.stack([rows[i][j][r] for j in range(2)]) for i in range(2)]) for r in range(len(rows[0][0]))
        ]
        close_all(got, want, tol, f"nested vmap of operand {picked}")
    single = as_tuple(jax.vmap(case.fn)(*[x[:1] for x in outer_only]))
    close_all(single, [y[None] for y in as_tuple(fn(*(x[0] for x in outer_only)))], tol, "a batch of one")
    empty = as_tuple(jax.vmap(case.fn)(*[x[:0] for x in outer_only]))
    assert [y.shape for y in empty] == [(0, *y.shape[1:]) for y in single]


@each_case
def test_scan(case: Case):
    base = [case.operands("float32", seed) for seed in range(2)]
    stacked = tuple(jnp.stack(col) for col in zip(*base, strict=True))
    _, got = jax.lax.scan(lambda c, xs: (c, case.fn(*xs)), 0, stacked)
    want = [jnp.stack(col) for col in zip(*(as_tuple(case.fn(*b)) for b in base), strict=True)]
    close_all(as_tuple(got), want, case.tolerance("float32"), "scan")


@batched
def test_batch_of_zero_and_of_one(case: Case):
    one = dataclasses.replace(case, shapes=resized(case, 1)) if not _needs_several_images(case) else None
    if one is not None:
        x = one.operands("float32")
        close_all(as_tuple(case.fn(*x)), as_tuple(case.oracle(*in_float64(x))), case.tolerance("float32"), "one image")
    none = dataclasses.replace(case, shapes=resized(case, 0))
    x = none.operands("float32")
    y = as_tuple(jax.jit(case.fn)(*x))
    for a, axis in zip(y, case.out_batch_axes, strict=False):
        assert axis is None or a.shape[axis] == 0
    args = case.diff_args()
    grads = jax.jit(jax.grad(objective(case), args))(*x)
    for i, g in zip(args, grads, strict=True):
        assert g.shape == x[i].shape
        if g.size and not np.isnan(np.asarray(case.fn(*x)[0] if isinstance(case.fn(*x), tuple) else case.fn(*x))).any():
            assert not np.asarray(g).any(), f"gradient of operand {i} over an empty batch must be zeros, got {g}"


def _needs_several_images(case: Case) -> bool:
    return "batch_groups" in case.name
