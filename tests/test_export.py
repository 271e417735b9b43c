"""jax.export: a program for CPU and CUDA, serialised with its gradient, read back, and run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxprims
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, close_all, grad_tolerance, objective

pytest.importorskip("flatbuffers", reason="serialisation needs flatbuffers")
each_case = pytest.mark.parametrize("case", CASES, ids=case_id)


@each_case
def test_round_trip_with_gradient(case: Case):
    x = case.operands("float32")
    args = case.diff_args()
    fn = objective(case) if args else case.fn
    exported = export.export(jax.jit(fn), platforms=("cpu", "cuda"), disabled_checks=jaxprims.export_checks())(*x)
    back = export.deserialize(exported.serialize(vjp_order=1 if args else 0))
    close_all(as_tuple(back.call(*x)), as_tuple(fn(*x)), case.tolerance("float32"), "call")
    if args:
        got, want = jax.grad(back.call, args)(*x), jax.grad(fn, args)(*x)
        close_all(got, want, grad_tolerance(case, "float32"), "gradient")


@each_case
def test_symbolic_batch(case: Case):
    """A batch size left open at export."""
    axes = (*case.batch_axes, *(None,) * (len(case.shapes) - len(case.batch_axes)))
    if all(a is None for a in axes) or "batch_groups" in case.name:
        pytest.skip("no batch")
    (b,) = export.symbolic_shape("b")
    specs = [
        jax.ShapeDtypeStruct(tuple(b if a is not None and i == a % len(s) else d for i, d in enumerate(s)), y.dtype)
        for s, a, y in zip(case.shapes, axes, case.operands("float32"), strict=True)
    ]
    x = case.operands("float32")
    checks = jaxprims.export_checks()
    exported = export.export(jax.jit(case.fn), platforms=("cpu", "cuda"), disabled_checks=checks)(*specs)
    close_all(as_tuple(exported.call(*x)), as_tuple(case.fn(*x)), case.tolerance("float32"), "call")
    with jaxprims.use("cuda"):
        text = export.export(jax.jit(case.fn), platforms=("cuda",), disabled_checks=checks)(*specs).mlir_module()
    assert all(f"jaxprims_{k}" in text for k in case.kernels)


def test_without_the_checks_jax_refuses():
    with jaxprims.use("cuda"), pytest.raises(ValueError, match="compatibility guarantees"):
        export.export(jax.jit(jaxprims.softmax), platforms=("cuda",))(jnp.ones((2, 3)))
