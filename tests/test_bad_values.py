"""Values that no op means: refused while tracing, by a message with the argument, its value, the rule and the remedy."""

from __future__ import annotations

import inspect
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxprims as jp
from tests.test_arguments import OPS, each_op

X = jnp.arange(2 * 4 * 4 * 4.0).reshape(2, 4, 4, 4) / 16
W = jnp.ones((3, 3, 4, 4))
S = jnp.ones(4)
LAX = jnp.ones((4, 4, 3, 3))
FOUR = jnp.ones((2, 4, 4))


def refused(error, words, call):
    with pytest.raises(error) as e:
        call()
    for word in words:
        assert word in str(e.value), f"{word!r} is not in {e.value}"


# --- arrays that are none -------------------------------------------------------------------------------------------

ARRAYS = {  # every other array argument of every op
    "conv w": ("w", lambda v: jp.conv(X, v)),
    "conv bias": ("bias", lambda v: jp.conv(X, W, v)),
    "conv residual": ("residual", lambda v: jp.conv(X, W, residual=v)),
    "conv_general_dilated rhs": ("rhs", lambda v: jp.conv_general_dilated(X, v, (1, 1), "SAME")),
    "conv_transpose rhs": ("rhs", lambda v: jp.conv_transpose(X, v, (2, 2), "SAME")),
    "conv_transpose bias": ("bias", lambda v: jp.conv_transpose(X, W, (2, 2), "SAME", bias=v)),
    "max_unpool indices": ("indices", lambda v: jp.max_unpool(X, v, (2, 2), 2)),
    "batch_norm scale": ("scale", lambda v: jp.batch_norm(X, v)),
    "batch_norm bias": ("bias", lambda v: jp.batch_norm(X, S, v)),
    "batch_norm residual": ("residual", lambda v: jp.batch_norm(X, residual=v)),
    "batch_norm mask": ("mask", lambda v: jp.batch_norm(X, mask=v)),
    "batch_norm_inference mean": ("mean", lambda v: jp.batch_norm_inference(X, v, S)),
    "batch_norm_inference var": ("var", lambda v: jp.batch_norm_inference(X, S, v)),
    "layer_norm scale": ("scale", lambda v: jp.layer_norm(X, v)),
    "rms_norm scale": ("scale", lambda v: jp.rms_norm(X, v)),
    "group_norm bias": ("bias", lambda v: jp.group_norm(X, S, v, num_groups=2)),
    "instance_norm scale": ("scale", lambda v: jp.instance_norm(X, v)),
    "softmax where": ("where", lambda v: jp.softmax(X, where=v)),
    "bias_act bias": ("bias", lambda v: jp.bias_act(X, v)),
    "bias_act residual": ("residual", lambda v: jp.bias_act(X, residual=v)),
    "transpose_layout": ("x", lambda v: jp.transpose_layout(v, "NHWC", "NCHW")),
}
NO_ARRAYS = ("abc", ["a", "b"], [["a"], ["b"]], {"x": 1}, object(), 2**70)


@each_op
@pytest.mark.parametrize("value", [None, *NO_ARRAYS], ids=lambda v: type(v).__name__)
def test_first_arrays_that_are_none(op: str, value):
    with pytest.raises(TypeError, match=r"^(x|lhs|inputs)=.* is not an array; give a JAX or NumPy array"):
        OPS[op](value)


@pytest.mark.parametrize("case", ARRAYS)
@pytest.mark.parametrize("value", NO_ARRAYS, ids=lambda v: type(v).__name__)
def test_other_arrays_that_are_none(case: str, value):
    name, call = ARRAYS[case]
    with pytest.raises(TypeError, match=rf"^{name}=.* is not an array; give a JAX or NumPy array"):
        call(value)


def test_a_long_value_is_cut():
    with pytest.raises(TypeError) as e:
        jp.softmax(["no"] * 10000)
    assert len(str(e.value).split("\n")[0]) < 400


# --- names ----------------------------------------------------------------------------------------------------------

ACTIVATED = {
    "conv": lambda a: jp.conv(X, W, activation=a),
    "conv_transpose": lambda a: jp.conv_transpose(X, W, (2, 2), "SAME", activation=a),
    "batch_norm": lambda a: jp.batch_norm(X, activation=a),
    "batch_norm_inference": lambda a: jp.batch_norm_inference(X, S, S, activation=a),
    "layer_norm": lambda a: jp.layer_norm(X, activation=a),
    "rms_norm": lambda a: jp.rms_norm(X, activation=a),
    "group_norm": lambda a: jp.group_norm(X, num_groups=2, activation=a),
    "instance_norm": lambda a: jp.instance_norm(X, activation=a),
    "activation": lambda a: jp.activation(X, a),
    "bias_act": lambda a: jp.bias_act(X, S, a),
}


def test_every_op_with_an_activation_is_tried():
    takes = {n for n in jp.__all__ if callable(getattr(jp, n)) and inspect.isfunction(getattr(jp, n))}
    takes = {n for n in takes if "activation" in inspect.signature(getattr(jp, n)).parameters}
    assert takes | {"activation"} == set(ACTIVATED)


@pytest.mark.parametrize("op", ACTIVATED)
@pytest.mark.parametrize("value", [["relu"], np.ones(2), jnp.ones(2), 1, jax.nn.relu], ids=lambda v: type(v).__name__)
def test_an_activation_that_is_no_name(op: str, value):
    refused(
        TypeError, ["activation=", "must be a name, as 'relu'", "None or one of", "silu"], lambda: ACTIVATED[op](value)
    )


def test_an_activation_of_integers():
    x, w = X.astype(int), W.astype(int)
    words = ["activation='relu'", "int32", "x and w with .astype(jnp.float32)", "preferred_element_type=jnp.float32"]
    refused(TypeError, words, lambda: jp.conv(x, w, activation="relu"))
    y = jp.conv(x, w, activation="relu", preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(y, jp.conv(x.astype(jnp.float32), W, activation="relu"))
    refused(TypeError, ["activation='relu'", "complex64"], lambda: jp.conv(X + 0j, W + 0j, activation="relu"))


def test_what_explain_explains_is_callable():
    refused(TypeError, ["fn=3", "callable", "int", "explain(f, x)"], lambda: jp.explain(3))
    refused(TypeError, ["fn=", "callable"], lambda: jp.explain(jp.softmax(X)))


# --- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, True, [2, 2], "2", "U2", object], ids=repr)
def test_a_result_dtype_that_is_none(value):
    for call in (
        lambda: jp.conv(X, W, preferred_element_type=value),
        lambda: jp.conv_general_dilated(X, LAX, (1, 1), "SAME", preferred_element_type=value),
        lambda: jp.conv_transpose(X, W, (2, 2), "SAME", preferred_element_type=value),
    ):
        refused(TypeError, ["preferred_element_type=", "dtype", "jnp.float32"], call)


DTYPES = ("bool", "int8", "uint8", "uint16", "int32", "uint32", "float16", "float32", "complex64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_dtypes_are_those_of_lax(dtype: str):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.integers(0, 3, (1, 2, 5)), dtype), jnp.asarray(rng.integers(0, 3, (3, 2, 2)), dtype)
    taken = set()
    for preferred in DTYPES:

        def run(f):
            return f(x, w, (1,), "VALID", preferred_element_type=preferred)  # noqa: B023

        try:
            want = run(lax.conv_general_dilated)
        except TypeError:
            refused(TypeError, [f"preferred_element_type={preferred}", dtype], lambda: run(jp.conv_general_dilated))
            continue
        got = run(jp.conv_general_dilated)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
        taken.add(preferred)
    if dtype == "bool":
        assert taken == set(DTYPES)
    if dtype in ("uint8", "uint16"):
        assert "int32" in taken and ("int8" in taken) == (dtype == "uint8")


def test_half_results_of_integers_are_rounded_once():
    x = jnp.full((1, 1, 2100), True)
    y = jp.conv_general_dilated(x, x, (1,), "VALID", preferred_element_type=jnp.float16)
    np.testing.assert_array_equal(y.ravel(), [np.float16(2100)])


@pytest.mark.parametrize(
    "name, call",
    [
        ("bias", lambda v: jp.conv(X, W, v)),
        ("bias", lambda v: jp.bias_act(X, v)),
        ("bias", lambda v: jp.layer_norm(X, S, v)),
        ("scale", lambda v: jp.batch_norm(X, v)),
    ],
)
def test_a_parameter_of_another_dtype(name, call):
    refused(
        TypeError, [f"{name} has dtype bfloat16", "cast it with", "jnp.float32)"], lambda: call(S.astype(jnp.bfloat16))
    )


def test_a_residual_of_another_dtype():
    half = X.astype(jnp.bfloat16)
    for call in (lambda: jp.conv(X, W, residual=half), lambda: jp.batch_norm(X, residual=half)):
        refused(TypeError, ["residual has dtype bfloat16", "cast it with", "jnp.float32)"], call)


# --- ints and numbers -----------------------------------------------------------------------------------------------

INTS = {
    "conv strides": ("strides", lambda v: jp.conv(X, W, strides=v)),
    "conv padding": ("padding", lambda v: jp.conv(X, W, padding=v)),
    "conv paddings": ("padding[0]", lambda v: jp.conv(X, W, padding=[v, 1])),
    "conv pairs": ("padding[1][0]", lambda v: jp.conv(X, W, padding=[(1, 1), (v, 1)])),
    "conv dilation": ("kernel_dilation", lambda v: jp.conv(X, W, kernel_dilation=v)),
    "conv_transpose": ("strides", lambda v: jp.conv_transpose(X, W, v, "SAME")),
    "conv_general_dilated": ("window_strides[1]", lambda v: jp.conv_general_dilated(X, LAX, (1, v), "SAME")),
    "max_pool window": ("window_shape[0]", lambda v: jp.max_pool(X, (v, 2))),
    "max_pool strides": ("strides", lambda v: jp.max_pool(X, (2, 2), v)),
    "avg_pool padding": ("padding", lambda v: jp.avg_pool(X, (3, 3), padding=v)),
    "avg_pool dilation": ("window_dilation", lambda v: jp.avg_pool(X, (2, 2), window_dilation=v)),
    "adaptive_avg_pool": ("output_size", lambda v: jp.adaptive_avg_pool(X, v)),
    "adaptive_max_pools": ("output_size[1]", lambda v: jp.adaptive_max_pool(X, (2, v))),
    "max_unpool": ("output_size[0]", lambda v: jp.max_unpool(FOUR, jnp.zeros((2, 4, 4), int), (1,), output_size=(v,))),
    "softmax": ("axis", lambda v: jp.softmax(X, axis=v)),
    "softmax scalar": ("axis", lambda v: jp.softmax(1.0, axis=v)),
    "batch_norm": ("axis", lambda v: jp.batch_norm(X, axis=v)),
    "layer_norm axes": ("axis", lambda v: jp.layer_norm(X, axis=(v, 3))),
    "group_norm": ("num_groups", lambda v: jp.group_norm(X, num_groups=v)),
    "group_norm size": ("group_size", lambda v: jp.group_norm(X, group_size=v)),
    "local_response_norm": ("size", lambda v: jp.local_response_norm(X, size=v)),
    "bias_act": ("axis", lambda v: jp.bias_act(X, S, axis=v)),
}


@pytest.mark.parametrize("case", INTS)
@pytest.mark.parametrize("value", [True, False, np.True_, jnp.array(True), np.array(True), 1.0], ids=repr)
def test_ints_are_no_bools_and_no_floats(case: str, value):
    name, call = INTS[case]
    refused(TypeError, [f"{name}={value!r}", "must be an int"], lambda: call(value))


@pytest.mark.parametrize("case", INTS)
def test_zero_dimensional_arrays_are_ints_where_they_are_known(case: str):
    name, call = INTS[case]
    for value in (jnp.int32(2), np.array(2)):
        try:
            want = call(2)
        except ValueError as e:  # whatever is said of 2
            refused(ValueError, [str(e).split(";")[0]], lambda: call(value))  # noqa: B023
        else:
            for g, w in zip(jax.tree.leaves(call(value)), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(g, w)
    refused(TypeError, [name, "traced", "static"], lambda: jax.jit(call)(2))


def test_arrays_of_ints():
    same = np.testing.assert_array_equal
    two, ones = jnp.array([2, 2]), jnp.array([[1, 1], [1, 1]])
    same(jp.conv(X, W, padding=two, strides=two), jp.conv(X, W, padding=2, strides=2))
    same(jp.conv(X, W, padding=ones), jp.conv(X, W, padding=1))
    same(jp.max_pool(X, two, two), jp.max_pool(X, (2, 2), 2))
    same(jp.adaptive_avg_pool(X, two), jp.adaptive_avg_pool(X, 2))
    same(jp.softmax(X, axis=jnp.array([1, 2])), jp.softmax(X, axis=(1, 2)))
    refused(TypeError, ["window_shape=", "sequence"], lambda: jp.max_pool(X, jnp.int32(2)))
    refused(ValueError, ["padding[0]='SAME'", "pair"], lambda: jp.conv(X, W, padding=("SAME", "SAME")))
    refused(ValueError, ["layout=None", "'NHWC'"], lambda: jp.adaptive_avg_pool(X, 2, layout=None))


@pytest.mark.parametrize("value", [None, [2, 2], "2", True, np.True_, jnp.ones(2), 1j], ids=repr)
def test_numbers_that_are_none(value):
    for name, call in (
        ("p", lambda: jp.lp_pool(X, value, (2, 2))),
        ("eps", lambda: jp.layer_norm(X, eps=value)),
        ("beta", lambda: jp.local_response_norm(X, beta=value)),
    ):
        refused(TypeError, [f"{name}=", "must be a Python number"], call)


def test_zero_dimensional_arrays_are_numbers_where_they_are_known():
    np.testing.assert_array_equal(jp.lp_pool(X, jnp.float32(2), (2, 2)), jp.lp_pool(X, 2, (2, 2)))
    np.testing.assert_array_equal(jp.layer_norm(X, eps=jnp.float32(0.5)), jp.layer_norm(X, eps=0.5))


def test_numbers_that_no_formula_means():
    refused(ValueError, ["eps=nan", "finite", "1e-5"], lambda: jp.layer_norm(X, eps=float("nan")))
    refused(ValueError, ["eps=inf", "finite", "1e-5"], lambda: jp.batch_norm(X, eps=float("inf")))
    for name in ("alpha", "beta", "k"):
        refused(
            ValueError,
            [f"{name}=nan", "finite"],
            lambda: jp.local_response_norm(X, **{name: float("nan")}),  # noqa: B023
        )
    for k in (0, -1.0):
        refused(ValueError, [f"k={float(k)}", "positive"], lambda: jp.local_response_norm(X, k=k))  # noqa: B023


@pytest.mark.parametrize("value", [0, True, 1, [2, 2], [0, 1], ["high", 1], object()], ids=lambda v: str(v)[:12])
def test_precisions_are_those_of_lax(value):
    with pytest.raises(ValueError):
        lax.conv_general_dilated(X, LAX, (1, 1), "SAME", precision=value)
    refused(ValueError, ["precision=", "highest"], lambda: jp.conv(X, W, precision=value))
    for taken in ("high", lax.Precision.HIGH, ("high", "highest"), None):
        jax.eval_shape(lambda: jp.conv(X, W, precision=taken))  # noqa: B023


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(padding="VALID"), ["3 taps on spatial axis 0", "padding=(0, 0)", "x has 2", "'SAME'"]),
        (dict(padding=[(1, 1), (0, 0)]), ["spatial axis 1", "x has 2"]),
        (dict(padding=1, kernel_dilation=2), ["5 positions with kernel_dilation=2", "x has 4"]),
    ],
)
def test_a_window_larger_than_the_padded_image(options, words):
    x = jnp.ones((1, 2, 2, 4))
    refused(ValueError, [*words, "does not fit"], lambda: jp.conv(x, W, **options))
    refused(ValueError, words, lambda: jax.eval_shape(lambda x: jp.conv(x, W, **options), x))


def test_windows_that_may_be_larger():
    assert jp.conv(jnp.ones((1, 0, 5, 4)), W, padding="VALID").shape == (1, 0, 3, 4)  # an empty image
    lhs = jnp.ones((1, 4, 2, 2))
    assert jp.conv_general_dilated(lhs, LAX, (1, 1), "VALID").shape == (1, 4, 0, 0)  # as jax.lax
    assert jp.conv(jnp.ones((1, 2, 2, 4)), W, padding=[(1, 0), (1, 0)]).shape == (1, 1, 1, 4)


@pytest.mark.parametrize("pool", [jp.adaptive_avg_pool, jp.adaptive_max_pool])
@pytest.mark.parametrize("size", [2**31 - 1, 65537, (2, 2**30)], ids=str)
def test_an_adaptive_output_too_large_to_trace(pool, size):
    value = size if isinstance(size, int) else size[1]
    words = ["output_size[", f"={value} must be at most 65536", "jnp.repeat"]
    refused(ValueError, words, lambda: jax.eval_shape(lambda x: pool(x, size), X))


@pytest.mark.parametrize(
    "shape, op",
    [
        ((1, 60000, 60000, 1), lambda x: jp.adaptive_max_pool(x, (65536, 65535))),
        ((1, 60000, 60000, 1), lambda x: jp.adaptive_avg_pool(x, 65536)),
        ((1, 2**30, 1), lambda x: jp.adaptive_avg_pool(x, (None,), layout="NWC")),
        ((1, 2**30, 1), lambda x: jp.max_pool(x, (3,), padding=1, window_dilation=2)),
        ((1, 1, 1), lambda x: jp.avg_pool(x, (2**30,), padding=2**30 - 1)),
    ],
)
def test_shapes_of_large_pools_are_cheap(shape, op):
    tracemalloc.start()
    begin = time.perf_counter()
    jax.eval_shape(op, jax.ShapeDtypeStruct(shape, jnp.float32))
    seconds, (_, peak) = time.perf_counter() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24 and seconds < 20, (peak, seconds)


def test_widest_windows_and_empty_windows_in_closed_form():
    from jaxprims.pool.window import Axis

    for size in range(0, 20):
        for out in range(1, 30):
            a = Axis(size, out, 1, 1, 0, 1, True)
            assert a.widest() == max(1, a.valid()[1].max()), a
    for size, window, stride, low, high, dilation in np.ndindex(5, 4, 4, 8, 8, 7):
        window, stride, dilation = window + 1, stride + 1, dilation + 1
        reach = (window - 1) * dilation + 1
        if max(low, high) < reach <= size + low + high:
            out = (size + low + high - reach) // stride + 1
            a = Axis(size, out, window, stride, low, dilation if window > 1 else 1, False)
            first, end = a.valid()
            assert a.first_empty() == (int((end <= first).argmax()) if (end <= first).any() else None), a


# --- what the documents say -----------------------------------------------------------------------------------------


def test_limits_that_the_documents_state():
    refused(ValueError, ["padding[0]=(2, 2)", "padding alone"], lambda: jp.max_pool(X, (2, 2), padding=2))
    for pool in (lambda x: jp.avg_pool(x, (2, 2)), lambda x: jp.lp_pool(x, 2, (2, 2)), jp.global_avg_pool):
        refused(TypeError, ["int32", "jnp.asarray(inputs, jnp.float32)"], lambda: pool(X.astype(int)))  # noqa: B023
    edge = 1e38 ** (1 / 8)
    got = jp.lp_pool(jnp.array([[edge / 2], [edge * 2], [1 / edge / 4]]), 8, (1,)).ravel()
    assert abs(got[0] / (edge / 2) - 1) < 1e-5 and got[1] == np.inf and got[2] == 0
    _, mean, var = jp.batch_norm(jnp.zeros((0, 4)))
    np.testing.assert_array_equal([mean, var], np.zeros((2, 4)))
    for call in (lambda: jp.conv(X, W, 1.0), lambda: jp.bias_act(X, 1.0), lambda: jp.layer_norm(X, 1.0)):
        with pytest.raises(ValueError, match=r"\(4,\)"):
            call()
    lead = jnp.ones((5, 2, 4, 4, 4))
    assert jp.conv(lead, W).shape == lead.shape
    assert jp.conv(lead, jnp.ones((3, 3, 3, 4, 4))).shape == lead.shape  # the same x, of three spatial axes
    assert jp.max_pool(jnp.ones((2, 4, 4)), (2,)).shape == (2, 3, 4)  # "NHWC" of one spatial axis


def test_the_readme_has_the_limits():
    from pathlib import Path

    text = (Path(__file__).parents[1] / "README.md").read_text()
    section = text[text.index("### What differs from Flax") : text.index("## Choosing what runs")]
    for words in ("padding of the window's size", "integers are refused", "65536", "1e38^(1/p)", "mean 0 and var 0"):
        assert words in section
    for words in ("scalars are not broadcast", "batch axes, as in Flax", "stand for any rank", "empty result"):
        assert words in section
