"""Splitting over devices, on eight fake CPU devices: a batch-sharded op computes where its data lies.

No all-gather and no all-to-all forward or backward; a gradient that is a sum over the batch is one all-reduce; the
numbers are those of one device. Automatic mesh, explicit mesh, shard_map with its type check on, partially manual regions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprims
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, close_all, grad_tolerance, objective, resized

DEVICES = 8
SHARDED = [c for c in CASES if any(a is not None for a in c.batch_axes)]
each_case = pytest.mark.parametrize("case", SHARDED, ids=case_id)
pytestmark = pytest.mark.skipif(len(jax.devices()) < DEVICES, reason="needs 8 devices (set by conftest on CPU)")


def mesh(kind: AxisType = AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(kind,))


def spec(shape, axis):
    return P(*("d" if axis is not None and i == axis % len(shape) else None for i in range(len(shape))))


def batch_axes(case: Case):
    return (*case.batch_axes, *(None,) * (len(case.shapes) - len(case.batch_axes)))


def wide(case: Case):
    """The case with one image for each device (two in batch groups), and its operands."""
    case = dataclasses.replace(case, shapes=resized(case, DEVICES))
    return case, case.operands("float32")


def place(case: Case, operands, m):
    return [
        jax.device_put(x, NamedSharding(m, spec(x.shape, a))) for x, a in zip(operands, batch_axes(case), strict=True)
    ]


def collectives(compiled) -> dict[str, int]:
    text = compiled.as_text()
    return {
        name: len(re.findall(rf"= [^=]*\b{name}(?:-start)?\(", text))
        for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute")
    }


def splittable(case: Case) -> bool:
    """Ops whose results are not one image a device: batch groups mix images by their definition."""
    return "batch_groups" not in case.name


@each_case
def test_forward_stays_where_the_batch_lies(case: Case):
    case, x = wide(case)
    want = as_tuple(case.fn(*x))
    compiled = jax.jit(case.fn).lower(*place(case, x, mesh())).compile()
    got = as_tuple(compiled(*place(case, x, mesh())))
    close_all(got, want, case.tolerance("float32"), "sharded")
    if splittable(case):
        found = collectives(compiled)
        assert found["all-gather"] == found["all-to-all"] == found["collective-permute"] == 0, found
        for y, axis in zip(got, case.out_batch_axes, strict=False):
            if axis is not None:
                assert y.sharding.is_equivalent_to(NamedSharding(mesh(), spec(y.shape, axis)), y.ndim), y.sharding


@each_case
def test_backward_gathers_nothing_and_sums_once(case: Case):
    case, x = wide(case)
    args = case.diff_args()
    if not args:
        pytest.skip("nothing to differentiate")
    want = jax.grad(objective(case), args)(*x)
    for i, w in zip(args, want, strict=True):
        compiled = jax.jit(jax.grad(objective(case), i)).lower(*place(case, x, mesh())).compile()
        got = compiled(*place(case, x, mesh()))
        close_all((got,), (w,), grad_tolerance(case, "float32"), f"gradient of operand {i}")
        found = collectives(compiled)
        if splittable(case):
            assert found["all-gather"] == found["all-to-all"] == found["collective-permute"] == 0, (i, found)
            if batch_axes(case)[i] is None and case.out_batch_axes[0] is not None and "batch_norm" not in case.op:
                assert found["all-reduce"] == 1, (i, found)


@each_case
def test_explicit_mesh(case: Case):
    case, x = wide(case)
    m = mesh(AxisType.Explicit)
    want = as_tuple(case.fn(*x))
    with jax.set_mesh(m):
        placed = place(case, x, m)
        got = as_tuple(jax.jit(case.fn)(*placed))
        close_all(got, want, case.tolerance("float32"), "explicit")
        for y, axis in zip(got, case.out_batch_axes, strict=False):
            if splittable(case) and axis is not None:
                assert jax.typeof(y).sharding.spec[axis] == "d", jax.typeof(y)
        args = case.diff_args()
        if args:
            grads = jax.jit(jax.grad(objective(case), args))(*placed)
            for i, g in zip(args, grads, strict=True):
                assert jax.typeof(g).sharding.spec == jax.typeof(placed[i]).sharding.spec, jax.typeof(g)
    if args:
        close_all(grads, jax.grad(objective(case), args)(*x), grad_tolerance(case, "float32"), "explicit gradient")


@each_case
def test_explicit_mesh_split_anywhere(case: Case):
    """Every operand split along an axis that the op may need whole: right numbers, and gradients typed like their operands."""
    case, x = wide(case)
    args = case.diff_args()
    if not args or not splittable(case):
        pytest.skip("nothing to differentiate")
    m = jax.make_mesh((2, 4), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    want = jax.grad(objective(case), args)(*x)
    with jax.set_mesh(m):
        for turn in range(2):
            placed = []
            for i, a in enumerate(x):
                even = [k for k in range(a.ndim) if a.shape[k] % 4 == 0 and a.shape[k]]
                entries = [None] * a.ndim
                if even:
                    entries[even[(i + turn) % len(even)]] = "e"
                placed.append(jax.device_put(a, NamedSharding(m, P(*entries))))
            got = jax.jit(jax.grad(objective(case), args))(*placed)
            for i, g in zip(args, got, strict=True):
                assert jax.typeof(g).sharding.spec == jax.typeof(placed[i]).sharding.spec, jax.typeof(g)
            close_all(
                [jax.device_get(g) for g in got], want, grad_tolerance(case, "float32"), "explicit, split anywhere"
            )


@each_case
def test_operands_without_sharding_under_a_mesh(case: Case):
    """NumPy operands in a jitted function while a mesh is set, as in a model's initialisation."""
    x = [np.asarray(a) for a in case.operands("float32")]
    want = as_tuple(case.fn(*x))
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            got = as_tuple(jax.jit(case.fn)(*x))
        close_all([jax.device_get(y) for y in got], want, case.tolerance("float32"), str(kind))


def test_a_call_that_xla_may_split_has_no_workspace():
    """The CUDA program of a norm large enough for a workspace, in a partly manual region and in an export for 8 devices."""
    x = jnp.ones((8, 64, 256))
    m = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    for op in (jaxprims.layer_norm, jaxprims.rms_norm, jax.grad(lambda x: jnp.sum(jaxprims.layer_norm(x) ** 2))):
        f = jax.shard_map(op, mesh=m, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
        with jaxprims.use("cuda"):
            text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert "jaxprims_norm" in text and "sdy.sharding_rule" in text
        with jaxprims.use("cuda"):
            sharded = jax.jit(op, in_shardings=NamedSharding(m, P("d")))
            export.export(sharded, platforms=("cuda",), disabled_checks=jaxprims.export_checks())(x)


@each_case
def test_shard_map(case: Case):
    """Each device runs the op on its part; values and the gradient of the summed objective, type check on."""
    case, x = wide(case)
    if not splittable(case) or any(a is None for a in case.out_batch_axes) or case.op == "batch_norm":
        pytest.skip("not a map over images")
    m = mesh()
    in_specs = tuple(spec(a.shape, b) for a, b in zip(x, batch_axes(case), strict=True))
    outs = as_tuple(case.fn(*x))
    out_specs = tuple(spec(y.shape, a) for y, a in zip(outs, case.out_batch_axes, strict=True))
    mapped = jax.shard_map(lambda *a: as_tuple(case.fn(*a)), mesh=m, in_specs=in_specs, out_specs=out_specs)
    close_all(jax.jit(mapped)(*x), outs, case.tolerance("float32"), "shard_map")
    args = case.diff_args()
    if args:
        as_case = dataclasses.replace(case, fn=mapped)
        got = jax.jit(jax.grad(objective(as_case), args))(*x)
        close_all(got, jax.grad(objective(case), args)(*x), grad_tolerance(case, "float32"), "grad of shard_map")


@each_case
def test_partially_manual(case: Case):
    """Manual over one mesh axis, automatic over the other: right numbers."""
    case, x = wide(case)
    if not splittable(case) or any(a is None for a in case.out_batch_axes) or case.op == "batch_norm":
        pytest.skip("not a map over images")
    m = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Auto, AxisType.Auto))
    in_specs = tuple(spec(a.shape, b) for a, b in zip(x, batch_axes(case), strict=True))
    outs = as_tuple(case.fn(*x))
    out_specs = tuple(spec(y.shape, a) for y, a in zip(outs, case.out_batch_axes, strict=True))
    mapped = jax.shard_map(
        lambda *a: as_tuple(case.fn(*a)), mesh=m, in_specs=in_specs, out_specs=out_specs, axis_names={"d"}
    )
    close_all(jax.jit(mapped)(*x), outs, case.tolerance("float32"), "partially manual")


def test_uneven_batches_are_right():
    """Ten images on eight devices: a factor that does not divide is kept whole, no padding enters a sum."""
    x, w = jnp.asarray(np.random.default_rng(0).standard_normal((10, 6, 6, 3)), jnp.float32), jnp.ones((3, 3, 3, 4))
    constrained = NamedSharding(mesh(), P(None))

    def dw(x, w):
        x = jax.lax.with_sharding_constraint(x, constrained)
        return jax.grad(lambda w: jnp.sum(jaxprims.conv(x, w) ** 2))(w)

    close_all((jax.jit(dw)(x, w),), (dw(x, w),), 128, "uneven")


N = ("NHWC", "HWIO", "NHWC")


def two_axes(kind: AxisType = AxisType.Explicit):
    return jax.make_mesh((4, 2), ("d", "e"), axis_types=(kind,) * 2)


@pytest.mark.parametrize(
    "wanted", [None, P(), P("d"), P("e"), P("d", None, None, "e"), P(None, None, None, ("d", "e"))]
)
@pytest.mark.parametrize("named", [False, True])
def test_out_sharding_is_that_of_lax(wanted, named):
    m = two_axes()
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-3, 4, s), jnp.float32) for s in ((8, 6, 6, 4), (3, 3, 4, 8)))
    out_sharding = NamedSharding(m, wanted) if named and wanted is not None else wanted
    with jax.set_mesh(m):
        x, w = jax.device_put(x, NamedSharding(m, P("d"))), jax.device_put(w, NamedSharding(m, P()))
        f = lambda f: lambda x, w: f(x, w, (1, 1), "SAME", dimension_numbers=N, out_sharding=out_sharding)  # noqa: E731
        ours, lax = f(jaxprims.conv_general_dilated), f(jax.lax.conv_general_dilated)
        fused = lambda x, w: jaxprims.conv(x, w, activation="silu", residual=x @ w[0, 0], out_sharding=out_sharding)  # noqa: E731
        for run in (lambda g: g, jax.jit):
            want = run(lax)(x, w)
            got = run(ours)(x, w)
            assert jax.typeof(got).sharding == jax.typeof(want).sharding
            assert got.sharding.is_equivalent_to(want.sharding, 4)
            np.testing.assert_array_equal(got, want)
            assert jax.typeof(run(fused)(x, w)).sharding == jax.typeof(want).sharding
        grads = jax.jit(jax.grad(lambda x, w: jnp.sum(ours(x, w) ** 2), (0, 1)))(x, w)
        expected = jax.jit(jax.grad(lambda x, w: jnp.sum(ours(x, w) ** 2), (0, 1)))(
            jax.device_get(x), jax.device_get(w)
        )
        for g, a, e in zip(grads, (x, w), expected, strict=True):
            assert jax.typeof(g).sharding == jax.typeof(a).sharding
            np.testing.assert_array_equal(jax.device_get(g), jax.device_get(e))


@pytest.mark.parametrize(
    "wanted, error, words",
    [
        ("d", TypeError, "out_sharding='d' must be None, a jax.sharding.PartitionSpec"),
        (("d",), TypeError, "NamedSharding, not tuple"),
        (P("q"), ValueError, "q"),
        (P(None, "d"), ValueError, "axis 1 of the result.*4 parts of unequal size"),
        (P(None, None, None, None, "d"), ValueError, "5 entries"),
        ("other mesh", ValueError, "another mesh"),
        ("no mesh", ValueError, "no mesh is set.*jax.set_mesh"),
        ("automatic", ValueError, "d is no explicit axis.*with_sharding_constraint"),
    ],
)
def test_out_sharding_that_lax_refuses(wanted, error, words):
    m = two_axes()
    automatic = two_axes(AxisType.Auto)
    x, w = jnp.ones((8, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
    given = {"other mesh": NamedSharding(automatic, P()), "no mesh": P("d"), "automatic": P("d")}.get(wanted, wanted)
    with contextlib.nullcontext() if wanted == "no mesh" else jax.set_mesh(automatic if wanted == "automatic" else m):
        with pytest.raises(error, match=words):
            jaxprims.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=N, out_sharding=given)
        with pytest.raises((error, AssertionError)):
            jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=N, out_sharding=given)


def test_out_sharding_through_flax():
    nnx = pytest.importorskip("flax.nnx")
    m = two_axes()
    with jax.set_mesh(m):
        x = jax.device_put(jnp.ones((8, 6, 6, 4)), NamedSharding(m, P("d")))
        types = []
        for f in (jax.lax.conv_general_dilated, jaxprims.conv_general_dilated):
            layer = nnx.Conv(4, 8, (3, 3), conv_general_dilated=f, rngs=nnx.Rngs(0))
            y = layer(x, out_sharding=P("d", None, None, "e"))
            types.append(jax.typeof(y).sharding)
    assert types[0] == types[1] and types[0].spec == P("d", None, None, "e")


def test_output_channels_may_be_split():
    """A filter split along K: no collective forward."""
    x, w = jnp.ones((2, 6, 6, 3)), jnp.asarray(np.random.default_rng(0).standard_normal((3, 3, 3, 16)), jnp.float32)
    m = mesh()
    placed = (jax.device_put(x, NamedSharding(m, P())), jax.device_put(w, NamedSharding(m, P(None, None, None, "d"))))
    compiled = jax.jit(jaxprims.conv).lower(*placed).compile()
    assert not any(collectives(compiled).values())
    close_all((compiled(*placed),), (jaxprims.conv(x, w),), 32, "K split")
