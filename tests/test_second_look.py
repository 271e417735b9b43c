"""Promises that no single case shows: orders of differentiation composed, sizes left open, unseen shapes, limits of memory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxprims
from jaxprims.core.primitive import REGISTRY
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, close_all, grad_tolerance, objective

each_case = pytest.mark.parametrize("case", [c for c in CASES if c.vmap and c.diff_args()], ids=case_id)


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


SMALL = {
    "conv": (lambda x, w: jaxprims.conv(x, w, activation="tanh"), (1, 3, 3, 2), (2, 2, 2, 2)),
    "layer_norm": (lambda x, s: jaxprims.layer_norm(x, s, activation="silu"), (3, 4), (4,)),
    "batch_norm": (lambda x, s: jaxprims.batch_norm(x, s)[0] ** 2, (4, 3), (3,)),
}


@pytest.mark.parametrize("name", SMALL)
def test_jacobians_of_both_modes_and_hessians_agree(name: str):
    fn, *shapes = SMALL[name]
    with jax.enable_x64(True):
        a = [normal(i, *s, dtype="float64") for i, s in enumerate(shapes)]
        forward, backward = jax.jacfwd(fn, (0, 1))(*a), jax.jacrev(fn, (0, 1))(*a)
        close_all(forward, backward, 256, "jacfwd and jacrev")
        hessian = jax.hessian(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1))
        reverse = jax.jacrev(jax.jacrev(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1)), (0, 1))
        got, want = jax.tree.leaves(hessian(*a)), jax.tree.leaves(reverse(*a))
        scale = max(float(jnp.abs(w).max()) for w in want)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=1e-12 * scale)
        np.testing.assert_allclose(got[1].reshape(a[0].size, -1), got[2].reshape(a[1].size, -1).T, atol=1e-12 * scale)


@pytest.mark.parametrize("name", ["conv", "layer_norm"])
def test_export_keeps_two_orders_of_gradients(name: str):
    pytest.importorskip("flatbuffers", reason="serialisation needs flatbuffers")
    fn, *shapes = SMALL[name]
    a = [normal(i, *s) for i, s in enumerate(shapes)]

    def loss(*a):
        return jnp.sum(jnp.sin(fn(*a)))

    exported = export.export(jax.jit(loss), platforms=("cpu", "cuda"), disabled_checks=jaxprims.export_checks())(*a)
    back = export.deserialize(exported.serialize(vjp_order=2)).call

    def twice(f):
        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(f, (0, 1))(*a)), (0, 1))(*a)

    close_all(twice(back), twice(loss), 256, "second order")


@each_case
def test_vmap_of_the_gradient_over_a_batch_of_none_of_one_and_of_open_size(case: Case):
    """Per-sample gradients: every operand mapped, and the first alone."""
    args = case.diff_args()
    grad = jax.grad(objective(case), args)
    base = [case.operands("float32", seed) for seed in range(3)]
    stacked = [jnp.stack(col) for col in zip(*base, strict=True)]
    for picked in ((0,), tuple(range(len(stacked)))):
        in_axes = tuple(0 if i in picked else None for i in range(len(stacked)))
        mapped = jax.jit(jax.vmap(grad, in_axes))

        def some(n, picked=picked):
            return [a[:n] if i in picked else a[0] for i, a in enumerate(stacked)]

        for g, i in zip(mapped(*some(0)), args, strict=True):
            assert g.shape == (0, *case.shapes[i])
        one = [g[None] for g in jax.jit(grad)(*base[0])]
        close_all(mapped(*some(1)), one, grad_tolerance(case, "float32"), "one")
        (b,) = export.symbolic_shape("b")
        specs = [
            jax.ShapeDtypeStruct((b, *a.shape[1:]) if i in picked else a.shape[1:], a.dtype)
            for i, a in enumerate(stacked)
        ]
        opened = export.export(mapped, disabled_checks=jaxprims.export_checks())(*specs)
        close_all(opened.call(*some(3)), mapped(*some(3)), grad_tolerance(case, "float32"), "open size")


@pytest.mark.parametrize("which", ["images", "kernels", "both"])
def test_convolutions_mapped_over_an_open_size(which: str):
    axes = {"images": (0, None), "kernels": (None, 0), "both": (0, 0)}[which]
    x, w = normal(0, 3, 2, 5, 5, 4), normal(1, 3, 3, 3, 2, 4)
    (b,) = export.symbolic_shape("b")
    fn = jax.jit(jax.vmap(lambda x, w: jaxprims.conv(x, w, w[0, 0, 0], feature_group_count=2, activation="relu"), axes))
    specs = [
        jax.ShapeDtypeStruct(a.shape[1:] if d is None else (b, *a.shape[1:]), a.dtype)
        for a, d in zip((x, w), axes, strict=True)
    ]
    args = [a[0] if d is None else a for a, d in zip((x, w), axes, strict=True)]
    opened = export.export(fn, platforms=("cpu", "cuda"), disabled_checks=jaxprims.export_checks())(*specs)
    close_all(as_tuple(opened.call(*args)), as_tuple(fn(*args)), 32, which)


def test_second_derivative_of_the_variance_of_a_constant_channel_over_a_named_axis():
    x = jnp.stack([jnp.full((2, 3), 2.0), normal(0, 2, 3)], axis=-1)  # channel 0 is constant

    def var(x, name):
        if name is None:
            return jnp.sum(jaxprims.batch_norm(x.reshape(6, 2))[2])
        return jnp.sum(jax.vmap(lambda x: jaxprims.batch_norm(x, axis_name=name)[2], axis_name=name)(x)[0])

    for order in (jax.jacfwd, jax.jacrev):
        got, want = (order(jax.grad(var))(x, name) for name in ("i", None))
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert float(jnp.abs(want[..., 0, :, :, 0]).max()) > 0.2


def test_a_window_far_wider_than_the_channels_costs_what_they_cost(monkeypatch):
    from jaxprims.norm import lrn

    def few(*of):
        assert len(range(*of)) < 100, of
        return range(*of)

    monkeypatch.setattr(lrn, "range", few, raising=False)
    x = normal(0, 2, 5)
    wide = jax.make_jaxpr(lambda x: jaxprims.local_response_norm(x, size=2**30, alpha=1.0, divide_by_size=False))(x)
    assert len(wide.eqns) < 50

    def plain(x):
        return x / (1 + jnp.sum(x * x, -1, keepdims=True)) ** 0.75

    for size in (9, 10, 11, 2**30):
        got = jaxprims.local_response_norm(x, size=size, alpha=1.0, divide_by_size=False)
        grad = jax.grad(
            lambda x, s=size: jnp.sum(jaxprims.local_response_norm(x, size=s, alpha=1.0, divide_by_size=False))
        )(x)
        close_all((got, grad), (plain(x), jax.grad(lambda x: jnp.sum(plain(x)))(x)), 64, f"size {size}")


def test_unseen_shapes_trace_once_and_lower_to_the_call():
    """Twenty convolutions of new shapes: one trace each, and the calls in the lowered text; the second use traces nothing."""
    traced = []

    def loss(x, w):
        traced.append(x.shape)
        return jnp.sum(jaxprims.conv(x, w, padding=1, activation="relu") ** 2)

    fn = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with jaxprims.use("cuda"):
        for i in range(20):
            args = jnp.ones((1 + i % 3, 17 + i, 23 + 2 * i, 3 + i)), jnp.ones((3, 3, 3 + i, 5 + i))
            text = fn.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            calls = sorted(re.findall(r"custom_call @jaxprims_(\w+)", text))
            assert calls == ["conv_dw", "conv_dx", "conv_fused"]
            fn.trace(*args)
    assert len(traced) == 20


def test_the_package_asks_for_the_jax_it_is_tested_with():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert {"jax>=0.10", "jaxlib>=0.10"} <= set(project["dependencies"])
    assert project["requires-python"] == ">=3.11"


BIG = {
    "conv": (lambda x, w: jaxprims.conv(x, w), (256, 224, 224, 64), (3, 3, 64, 512)),
    "conv_fused": (lambda x, w: jaxprims.conv(x, w, activation="relu"), (256, 56, 56, 256), (3, 3, 256, 2048)),
    "grouped": (lambda x, w: jaxprims.conv(x, w, feature_group_count=32), (256, 56, 56, 256), (3, 3, 8, 256)),
    "3-D": (lambda x, w: jaxprims.conv(x, w), (8, 64, 128, 128, 64), (3, 3, 3, 64, 128)),
    "batch_norm": (lambda x, s: jaxprims.batch_norm(x, s)[0], (1024, 224, 224, 64), (64,)),
    "layer_norm": (lambda x, s: jaxprims.layer_norm(x, s), (1 << 20, 8192), (8192,)),
    "group_norm": (lambda x, s: jaxprims.group_norm(x, s), (256, 224, 224, 512), (512,)),
    "local_response_norm": (lambda x: jaxprims.local_response_norm(x), (256, 224, 224, 512)),
    "softmax": (lambda x: jaxprims.softmax(x), (4096, 1 << 18)),
    "bias_act": (lambda x, b: jaxprims.bias_act(x, b, "gelu"), (1 << 20, 8192), (8192,)),
    "max_pool": (lambda x: jaxprims.max_pool(x, (3, 3), (2, 2), "SAME"), (1024, 224, 224, 64)),
    "avg_pool": (lambda x: jaxprims.avg_pool(x, (7, 7)), (1024, 224, 224, 64)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BIG)
def test_workspace_of_big_shapes(name: str, dtype: str):
    """At most 64 MiB beside operands and results, forward and backward, mapped and not."""
    fn, *shapes = BIG[name]
    specs = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    grad = jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32)), tuple(range(len(specs))))
    mapped = [jax.ShapeDtypeStruct((4, *s.shape), s.dtype) for s in specs]
    found = [*_ops(jax.make_jaxpr(grad)(*specs).jaxpr), *_ops(jax.make_jaxpr(jax.vmap(grad))(*mapped).jaxpr)]
    assert len(found) >= 4
    for op, params, avals in found:
        space = op.workspace(params, *avals) if op.workspace else 0
        assert space <= 64 << 20, (op.name, space)


def _ops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in REGISTRY:
            yield REGISTRY[eqn.primitive.name], eqn.params["params"], [v.aval for v in eqn.invars]
        for value in eqn.params.values():
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from _ops(getattr(value, "jaxpr", value))
