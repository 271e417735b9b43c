"""The kernels on a GPU (mark gpu): every case against the float64 oracle, its gradient against float64, bit-equal runs.

`use("cuda")` is in force, so that a case which quietly fell back to the reference fails here. Run once more with CUDA
graphs forced (XLA_FLAGS=--xla_gpu_graph_min_graph_size=1) and once under compute-sanitizer (-k sanitizer).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, close_all, floats, grad_tolerance, in_float64, is_float, objective

pytestmark = pytest.mark.gpu
KERNEL_DTYPES = ("float32", "bfloat16", "float16")
KERNEL_CASES = [c for c in CASES if c.kernels]
each = pytest.mark.parametrize(
    "case, dtype", [(c, d) for c in KERNEL_CASES for d in KERNEL_DTYPES if d in c.dtypes], ids=case_id
)
each_case = pytest.mark.parametrize("case", KERNEL_CASES, ids=case_id)


@pytest.fixture(autouse=True)
def poison():
    """Fill memory that results will be given with NaN, so that an element which no kernel writes is seen."""
    jax.block_until_ready([jnp.full((1 << k,), jnp.nan, jnp.float32) for k in range(4, 22)])


def on_kernels(fn):
    def call(*a):
        with jaxprims.use("cuda"):
            return jax.jit(fn)(*a)

    return call


def on_reference(fn):
    def call(*a):
        with jaxprims.use("reference"):
            return jax.jit(fn)(*a)

    return call


@each
def test_value(case: Case, dtype: str):
    for seed in range(2):
        x = case.operands(dtype, seed)
        want = as_tuple(case.oracle(*in_float64(x)))
        close_all(as_tuple(on_kernels(case.fn)(*x)), want, case.tolerance(dtype), "kernel")


@each
def test_gradient_and_tangent(case: Case, dtype: str):
    args = case.diff_args()
    if not args:
        pytest.skip("nothing to differentiate")
    x = case.operands(dtype)
    got = on_kernels(jax.grad(objective(case), args))(*x)
    tangents = tuple(jnp.asarray(np.random.default_rng(i).standard_normal(x[i].shape), x[i].dtype) for i in args)

    def forward(x, tangents):
        def of_diff(*d):
            full = list(x)
            for i, v in zip(args, d, strict=True):
                full[i] = v
            return floats(case.fn)(*full)

        return jax.jvp(of_diff, tuple(x[i] for i in args), tangents)[1]

    got_dot = on_kernels(forward)(x, tangents)
    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(a, jnp.float64) if is_float(a) else a for a in x)
        want = on_reference(jax.grad(objective(case), args))(*wide)
        want_dot = on_reference(forward)(wide, tuple(t.astype(jnp.float64) for t in tangents))
    close_all(got, want, grad_tolerance(case, dtype), "grad", dtype)
    close_all(got_dot, want_dot, grad_tolerance(case, dtype), "jvp", dtype)


@each_case
def test_second_order(case: Case):
    """Gradient of a function of the gradient, kernels against float64."""
    args = case.diff_args()
    if not args:
        pytest.skip("nothing to differentiate")

    def squared(*x):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(objective(case), args)(*x))

    x = case.operands("float32")
    got = on_kernels(jax.grad(squared, args))(*x)
    with jax.enable_x64(True):
        want = on_reference(jax.grad(squared, args))(*(jnp.asarray(a, jnp.float64) if is_float(a) else a for a in x))
    close_all(got, want, 8 * grad_tolerance(case, "float32"), "second order", "float32")


@each_case
def test_vmap_equals_a_loop(case: Case):
    if not case.vmap:
        pytest.skip("not vmapped")
    base = [case.operands("float32", seed) for seed in range(3)]
    n = len(case.shapes)
    fns = [(case.fn, case.tolerance("float32"))]
    if case.diff_args():
        fns.append((jax.grad(objective(case), case.diff_args()), grad_tolerance(case, "float32")))
    for picked in [*({i} for i in range(n)), set(range(n))]:
        in_axes = tuple(0 if i in picked else None for i in range(n))
        stacked = [jnp.stack([b[i] for b in base]) if i in picked else base[0][i] for i in range(n)]
        members = [[b[i] if i in picked else base[0][i] for i in range(n)] for b in base]
        for fn, tol in fns:
            got = on_kernels(jax.vmap(fn, in_axes))(*stacked)
            one = on_kernels(fn)
            want = [jnp.stack(col) for col in zip(*(as_tuple(one(*m)) for m in members), strict=True)]
            close_all(as_tuple(got), want, tol, f"vmap {in_axes}")


@each_case
def test_twenty_runs_give_the_same_bits(case: Case):
    x = case.operands("float32", 7)
    args = case.diff_args()

    def fn(*x):
        return as_tuple(case.fn(*x)), (jax.grad(objective(case), args)(*x) if args else ())

    run = jax.jit(fn)
    with jaxprims.use("cuda"):
        first = jax.tree.map(lambda a: np.asarray(a).tobytes(), run(*x))
        for _ in range(19):
            assert jax.tree.map(lambda a: np.asarray(a).tobytes(), run(*x)) == first


@pytest.mark.parametrize("case", KERNEL_CASES, ids=case_id)
def test_sanitizer(case: Case):
    """The sample for compute-sanitizer: forward and gradient of each case, bfloat16 and float32, values not compared."""
    for dtype in ("float32", "bfloat16"):
        if dtype in case.dtypes:
            x = case.operands(dtype)
            jax.block_until_ready(on_kernels(case.fn)(*x))
            if case.diff_args():
                jax.block_until_ready(on_kernels(jax.grad(objective(case), case.diff_args()))(*x))
