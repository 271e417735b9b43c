"""Softmax, activations, bias and layout: exact answers, hard rows, every activation's value and slope, error texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprims.act.api import activation, bias_act, log_softmax, softmax, transpose_layout
from jaxprims.core.activations import ACTIVATIONS, activation_slope
from tests.oracle import act as oracle

INF, NAN = np.inf, np.nan
NAMES = list(ACTIVATIONS)
ROWS = {
    "plain": [1.0, 2.0, 3.0],
    "huge": [1e30, -1e30, 0.0],
    "two-huge": [1e30, 1e30, -INF],
    "one-masked": [-INF, 0.0, 0.0],
    "all-masked": [-INF, -INF, -INF],
    "nan": [0.0, NAN, 1.0],
    "inf": [0.0, INF, 1.0],
    "nan-and-masked": [-INF, NAN, -INF],
}


def rand(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# --- softmax ------------------------------------------------------------------------------------------------------------


def test_exact_values():
    np.testing.assert_array_equal(softmax(jnp.zeros((2, 4))), np.full((2, 4), 0.25))
    np.testing.assert_allclose(softmax(jnp.log(jnp.array([1.0, 2.0, 5.0]))), [0.125, 0.25, 0.625], rtol=1e-6)
    np.testing.assert_allclose(log_softmax(jnp.zeros(8)), np.full(8, -np.log(8)), rtol=1e-6)
    np.testing.assert_array_equal(log_softmax(jnp.array([1e30, 0.0])), np.float32([0.0, -1e30]))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ours, theirs", [(softmax, jax.nn.softmax), (log_softmax, jax.nn.log_softmax)])
def test_hard_rows_are_those_of_jax_nn(name, ours, theirs):
    x = jnp.asarray(ROWS[name], jnp.float32)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-6)
    tangent = jnp.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(jax.jvp(ours, (x,), (tangent,))[1], jax.jvp(theirs, (x,), (tangent,))[1], atol=1e-6)
    np.testing.assert_allclose(jax.vjp(ours, x)[1](tangent)[0], jax.vjp(theirs, x)[1](tangent)[0], atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, -2, (0, 1), (1, 2), (0, 2), (2, 0), (0, 1, 2), None])
@pytest.mark.parametrize("ours, log", [(softmax, False), (log_softmax, True)])
def test_every_axis(axis, ours, log):
    x = rand(2, 3, 4)
    over = (0, 1, 2) if axis is None else axis
    np.testing.assert_allclose(ours(x, axis), oracle.softmax(np.float64(x), over, log), rtol=2e-6, atol=1e-6)


def test_fast_does_not_subtract_the_maximum():
    x = rand(3, 5)
    np.testing.assert_allclose(softmax(x, algorithm="fast"), softmax(x), rtol=1e-5)
    np.testing.assert_allclose(log_softmax(x, algorithm="fast"), log_softmax(x), rtol=1e-5, atol=1e-6)
    assert np.isnan(softmax(jnp.array([100.0, 0.0]), algorithm="fast")[0])
    assert softmax(jnp.array([100.0, 0.0]))[0] == 1.0


def test_half_types_compute_in_float32():
    x = rand(4, 1000, dtype=jnp.float16)
    want = oracle.softmax(np.float64(x))
    got = softmax(x)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.float64(got), want, rtol=2**-10, atol=2**-24)
    ones = softmax(jnp.zeros((1, 1 << 17), jnp.float16))  # a sum of 131072 overflows float16
    np.testing.assert_array_equal(np.float64(ones), 2.0**-17)


@pytest.mark.parametrize(
    "mask", [[[1, 1, 0], [1, 1, 1]], [[1, 0, 0], [0, 1, 1]], [[0, 0, 0], [1, 0, 1]], [[1, 0, 1]]], ids=str
)
@pytest.mark.parametrize("ours, theirs", [(softmax, jax.nn.softmax), (log_softmax, jax.nn.log_softmax)])
def test_where_is_that_of_jax_nn(mask, ours, theirs):
    x, where = rand(2, 3), jnp.asarray(mask, bool)
    np.testing.assert_allclose(ours(x, where=where), theirs(x, where=where, axis=-1), rtol=1e-6)
    bad = jnp.where(where, x, NAN)  # what is left out may hold anything
    np.testing.assert_allclose(ours(bad, where=where), ours(x, where=where), rtol=1e-6)
    c = rand(2, 3, seed=1)
    grad = jax.grad(lambda x: jnp.where(where, c * ours(x, where=where), 0).sum())(x)
    assert np.isfinite(grad).all()
    assert not np.asarray(grad)[~np.broadcast_to(where, (2, 3))].any()


def test_sizes_zero_and_one():
    assert softmax(jnp.zeros((2, 0))).shape == (2, 0)
    assert softmax(jnp.zeros((0, 3)), 1).shape == (0, 3)
    np.testing.assert_array_equal(softmax(jnp.array([[5.0], [-1e30]])), 1.0)
    np.testing.assert_array_equal(log_softmax(jnp.array([[5.0], [-1e30]])), 0.0)
    np.testing.assert_array_equal(jax.grad(lambda x: softmax(x)[0, 0])(jnp.array([[5.0]])), 0.0)
    assert softmax(jnp.float32(3.0)) == 1.0


@pytest.mark.parametrize("ours, theirs", [(softmax, jax.nn.softmax), (log_softmax, jax.nn.log_softmax)])
def test_hessian_and_jacobians(ours, theirs):
    with jax.enable_x64(True):
        x = rand(5, dtype=np.float64)
        w = rand(5, seed=1, dtype=np.float64)
        f, g = (lambda x: (w * ours(x) ** 2).sum()), (lambda x: (w * theirs(x) ** 2).sum())
        np.testing.assert_allclose(jax.hessian(f)(x), jax.hessian(g)(x), rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(jax.jacrev(ours)(x), jax.jacfwd(ours)(x), atol=1e-14)
        np.testing.assert_allclose(jax.jacrev(jax.jacrev(ours))(x), jax.jacfwd(jax.jacfwd(theirs))(x), atol=1e-13)


# --- activations ----------------------------------------------------------------------------------------------------------

GRID = np.concatenate([np.linspace(-20, 20, 321), [-3, -1, 0, 1, 3, 6, -100.0, 100.0, -1e4, 1e4]])


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_values_and_slopes_in_float64(name):
    with jax.enable_x64(True):
        z = jnp.asarray(GRID)
        np.testing.assert_allclose(activation(z, name), oracle.ACTIVATIONS[name](GRID), rtol=1e-12, atol=1e-12)
        got = jax.vmap(jax.grad(lambda z: activation(z, name)))(z)
        np.testing.assert_allclose(got, activation_slope(name, z), rtol=1e-8, atol=1e-14)
        away = np.abs(GRID[:, None] - [-3, -1, 0, 1, 3, 6]).min(1) > 1e-4  # kinks apart
        h = 1e-6
        f = oracle.ACTIVATIONS[name]
        near = away & (np.abs(GRID) < 50)
        np.testing.assert_allclose(got[near], ((f(GRID + h) - f(GRID - h)) / (2 * h))[near], rtol=1e-6, atol=1e-8)


def test_kinks_are_those_of_jax_nn():
    slope = jax.vmap(jax.grad(activation), (0, None))
    np.testing.assert_array_equal(slope(jnp.array([-0.0, 0.0]), "relu"), 0.0)
    np.testing.assert_array_equal(slope(jnp.array([0.0, 6.0]), "relu6"), 0.0)
    np.testing.assert_array_equal(slope(jnp.array([-3.0, 3.0]), "hard_sigmoid"), 0.0)
    np.testing.assert_array_equal(slope(jnp.array([-3.0, 3.0]), "hard_silu"), [0.0, 1.0])
    np.testing.assert_array_equal(slope(jnp.array([-1.0, 1.0]), "hard_tanh"), 1.0)
    np.testing.assert_array_equal(slope(jnp.array([0.0]), "leaky_relu"), 1.0)


HARNESS = """
#define __device__
#define __forceinline__ inline
#include <cmath>
#include <cstdio>
using std::isnan;
#include "common/act.cuh"
int main() {
  int code; float z;
  while (std::scanf("%d %f", &code, &z) == 2)
    std::printf("%.9g %.9g\\n", jaxprims::act_apply(jaxprims::Act(code), z), jaxprims::act_slope(jaxprims::Act(code), z));
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_formulas_on_the_host(tmp_path):
    root = Path(__file__).parents[1]
    (tmp_path / "act.cpp").write_text(HARNESS)
    subprocess.run(["g++", "-std=c++17", f"-I{root}/cuda", "act.cpp", "-o", "act"], cwd=tmp_path, check=True)
    grid = np.float32(np.concatenate([GRID, [-1e30, 1e30, 2.9999998, -2.9999998, 1e-20, -1e-20]]))
    lines = "".join(f"{ACTIVATIONS[n].code} {z!r}\n" for n in NAMES for z in grid.tolist())
    out = subprocess.run(["./act"], cwd=tmp_path, input=lines, capture_output=True, text=True, check=True).stdout
    got = np.array([[float(v) for v in line.split()] for line in out.splitlines()]).reshape(len(NAMES), len(grid), 2)
    with jax.enable_x64(True):
        z = jnp.asarray(grid, jnp.float64)
        for name, (value, slope) in zip(NAMES, np.moveaxis(got, 2, 1), strict=True):
            tiny = 1e-6 * np.maximum(1, np.minimum(np.abs(grid), 10))  # cancellation in 1 + tanh, float32
            want = np.asarray(ACTIVATIONS[name].apply(z))
            assert np.all(np.abs(value - want) <= 1e-6 * np.abs(want) + tiny), name
            want = np.asarray(activation_slope(name, z))
            assert np.isfinite(slope).all(), name
            fine = np.isfinite(want)
            assert np.all(np.abs(slope - want)[fine] <= 4 * tiny[fine]), (
                name,
                grid[fine][np.argmax(np.abs(slope - want)[fine])],
            )


def test_the_enum_has_the_names_codes():
    text = (Path(__file__).parents[1] / "cuda/common/act.cuh").read_text()
    enum = {k.lower(): int(v) for k, v in re.findall(r"k(\w+) = (\d+)", text.split("enum class Act")[1].split("}")[0])}
    assert enum == {(name or "none").replace("_", ""): a.code for name, a in ACTIVATIONS.items()}


# --- bias_act -------------------------------------------------------------------------------------------------------------


def test_bias_along_every_axis_and_residual():
    x, r = rand(2, 3, 4), rand(2, 3, 4, seed=1)
    for axis in (0, 1, 2, -2):
        b = rand(x.shape[axis], seed=2)
        want = oracle.bias_act(*map(np.float64, (x, b, r)), activation="gelu", axis=axis)
        np.testing.assert_allclose(bias_act(x, b, "gelu", axis, r), want, rtol=1e-5, atol=1e-6)


def test_float32_bias_of_a_bfloat16_image():
    x = jnp.zeros((2, 3, 1), jnp.bfloat16)
    b = jnp.array([1 + 2.0**-8])
    y = bias_act(x, b, residual=jnp.full_like(x, -1))  # rounded once: the bias's low bit survives
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(y), 2.0**-8)
    many = jnp.ones((4096, 1), jnp.bfloat16)
    g = jax.grad(lambda b: bias_act(many, b, "relu").astype(jnp.float32).sum())(b)
    assert g.dtype == jnp.float32
    np.testing.assert_array_equal(g, [4096.0])


def test_bias_gradient_is_a_sum_in_float32_for_half_types():
    x = jnp.ones((70000, 2), jnp.float16)
    g = jax.grad(lambda b: (bias_act(x, b, "relu") / 1024).sum().astype(jnp.float32))(jnp.ones(2, jnp.float16))
    np.testing.assert_allclose(np.float64(g), 70000 / 1024, rtol=2**-10)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, 0, None), (0, 0, -1)], ids=str)
def test_vmap_of_some_operands(axes):
    shapes = [(2, 3, 4), (3,), (2, 3, 4)]
    args = [
        jnp.moveaxis(rand(5, *s, seed=i), 0, a) if a is not None else rand(*s, seed=i)
        for i, (s, a) in enumerate(zip(shapes, axes, strict=True))
    ]
    f = lambda x, b, r: bias_act(x, b, "silu", 1, r)  # noqa: E731
    take = [(lambda k, x=x, a=a: x if a is None else jnp.take(x, k, a)) for x, a in zip(args, axes, strict=True)]
    want = jnp.stack([f(*(t(k) for t in take)) for k in range(5)])
    np.testing.assert_allclose(jax.vmap(f, axes)(*args), want, rtol=1e-6, atol=1e-6)
    g = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    for got, loop in zip(
        jax.vmap(g, axes)(*args), zip(*(g(*(t(k) for t in take)) for k in range(5)), strict=True), strict=True
    ):
        np.testing.assert_allclose(got, jnp.stack(loop), rtol=1e-5, atol=1e-5)


def test_what_is_linear_has_a_transpose():
    x, b, r, c = rand(2, 3, 4), rand(3, seed=1), rand(2, 3, 4, seed=2), rand(2, 3, 4, seed=3)
    same = np.testing.assert_array_equal
    for f in (
        lambda v: bias_act(v),
        lambda v: activation(v, None),
        lambda v: activation(v, "identity"),
        lambda v: bias_act(v, b, axis=1),
        lambda v: bias_act(v, residual=r),
        lambda v: bias_act(x, b, None, 1, residual=v),
    ):
        same(jax.linear_transpose(f, x)(c)[0], c)
        same(jax.linear_transpose(jax.vmap(f), x[None])(c[None])[0], c[None])
    half = x.astype(jnp.bfloat16)
    (g,) = jax.linear_transpose(lambda v: bias_act(half, v, axis=1), b)(c.astype(jnp.bfloat16))
    assert g.dtype == b.dtype
    np.testing.assert_allclose(g, c.astype(jnp.bfloat16).astype(jnp.float32).sum((0, 2)), rtol=1e-6)
    f = jax.vmap(lambda v, b: bias_act(v, b, axis=1), (None, 0))  # x is summed over the batch axis that it lacks
    ct = rand(5, 2, 3, 4, seed=4)
    (g,) = jax.linear_transpose(lambda v: f(v, jnp.ones((5, 3))), x)(ct)
    np.testing.assert_allclose(g, ct.sum(0), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="activation='relu' is not linear"):
        jax.linear_transpose(lambda v: bias_act(v, None, "relu"), x)(x)


def test_the_identity_binds_nothing():
    assert str(jax.make_jaxpr(lambda v: activation(v, "none"))(jnp.ones(3))).count("bias_act") == 0
    np.testing.assert_array_equal(activation([1.0, 2.0], None), [1.0, 2.0])
    with pytest.raises(ValueError, match="axis=2 is out of range"):
        bias_act(jnp.ones((2, 3)), axis=2)


def test_a_scalar_is_one_element():
    assert bias_act(1.0, None, "relu", residual=-3.0) == 0.0 and bias_act(-1.0).shape == ()
    for axis in (-1, 0, (0,), (), None):
        assert softmax(3.0, axis) == 1.0 and log_softmax(3.0, axis).shape == ()
    assert softmax(3.0, where=jnp.array(False)) == 0.0
    assert jax.grad(lambda v: bias_act(v, None, "silu", 0, v))(0.0) == 1.0


# --- layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source, target, shape", [("NWC", "NCW", (2, 5, 3)), ("NHWC", "NCHW", (2, 5, 4, 3)), ("NDHWC", "NCDHW", (2, 5, 4, 2, 3)), ("NHWC", "NCHW", (2, 5, 3))])  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_])
def test_transpose_layout_there_and_back(source, target, shape, dtype):
    x = (10 * rand(*shape)).astype(dtype)
    y = transpose_layout(x, source, target)
    np.testing.assert_array_equal(y, jnp.moveaxis(x, -1, 1))
    np.testing.assert_array_equal(transpose_layout(y, target, source), x)
    assert transpose_layout(x, source, source) is x


# --- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: softmax(jnp.arange(3)), TypeError, ["x", "int32", "jnp.asarray("]),
        (lambda: log_softmax(jnp.arange(3)), TypeError, ["x", "int32", "jnp.asarray("]),
        (lambda: softmax(jnp.ones(3), 1), ValueError, ["axis=1", "array of 1 axis;", "-1 to 0"]),
        (lambda: softmax(1.0, 3), ValueError, ["axis=3", "a scalar", "-1 or 0"]),
        (lambda: log_softmax(1.0, (0, 1)), ValueError, ["axis=1", "a scalar", "-1 or 0"]),
        (lambda: softmax(1.0, (0, -1)), ValueError, ["axis", "twice"]),
        (lambda: softmax(1.0, where=jnp.ones(2, bool)), ValueError, ["where", "(2,)", "()"]),
        (lambda: softmax([1.0], where=[1]), TypeError, ["where", "int32", "jnp.asarray(where) != 0"]),
        (lambda: bias_act(1.0, None, "relu", 7), ValueError, ["axis=7", "a scalar", "-1 or 0"]),
        (lambda: bias_act(1.0, [1.0]), ValueError, ["bias", "(1,)", "x is a scalar", "reshape x"]),
        (lambda: bias_act(1.0, residual=[2.0, 3.0]), ValueError, ["residual", "(2,)", "x's shape ()"]),
        (lambda: bias_act(1.0, residual=[2.0]), ValueError, ["residual", "(1,)", "x's shape ()"]),
        (lambda: bias_act(1.0, residual=1), TypeError, ["residual", "int32", "jnp.asarray(residual, jnp.float32)"]),
        (lambda: bias_act(jnp.ones(3), [1, 1, 1]), TypeError, ["bias", "jnp.asarray(bias, jnp.float32)"]),
        (lambda: softmax(jnp.ones((3, 3)), (0, -2)), ValueError, ["axis", "twice"]),
        (lambda: softmax(jnp.ones(3), ()), ValueError, ["axis=()"]),
        (lambda: softmax(jnp.ones(3), algorithm="slow"), ValueError, ["algorithm='slow'", "'accurate'", "'fast'"]),
        (lambda: softmax(jnp.ones(3), where=jnp.ones(3)), TypeError, ["where", "float32", "bool"]),
        (lambda: softmax(jnp.ones(3), where=jnp.ones(2, bool)), ValueError, ["where", "(2,)", "(3,)"]),
        (lambda: softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)), ValueError, ["where", "(2, 3)", "(3,)"]),
        (lambda: activation(jnp.ones(3), "rleu"), ValueError, ["activation='rleu'", "relu"]),
        (lambda: activation(jnp.arange(3), "relu"), TypeError, ["x", "int32", "jnp.asarray("]),
        (lambda: bias_act(jnp.ones((2, 3)), jnp.ones(2)), ValueError, ["bias", "(2,)", "(3,)"]),
        (lambda: bias_act(jnp.ones((2, 3)), jnp.ones(3, jnp.float16)), TypeError, ["bias", "float16", "jnp.asarray("]),
        (lambda: bias_act(jnp.ones((2, 3)), residual=jnp.ones(3)), ValueError, ["residual", "(3,)", "(2, 3)"]),
        (
            lambda: bias_act(jnp.ones((2, 3)), residual=jnp.ones((2, 3), jnp.bfloat16)),
            TypeError,
            ["residual", "bfloat16"],
        ),
        (lambda: transpose_layout(jnp.ones((2, 3, 4)), "NHCW", "NCHW"), ValueError, ["source='NHCW'", "'NHWC'"]),
        (lambda: transpose_layout(jnp.ones((2, 3)), "NHWC", "NCHW"), ValueError, ["source='NHWC'", "2 axes"]),
    ],
)
def test_errors_name_argument_value_and_remedy(call, error, words):
    with pytest.raises(error) as info:
        call()
    for word in words:
        assert word in str(info.value)
