"""What every op takes and refuses alike: lists, NumPy's scalars, and dtypes that it has no arithmetic for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims as jp

X = jnp.arange(2 * 4 * 4 * 4.0).reshape(2, 4, 4, 4) / 16
W = jnp.ones((3, 3, 4, 4))
S = jnp.ones(4)

OPS = {  # of one array of X's shape, and whether it needs a floating one
    "conv": lambda x: jp.conv(x, _like(W, x)),
    "conv_activation": lambda x: jp.conv(x, _like(W, x), activation="relu"),
    "conv_general_dilated": lambda x: jp.conv_general_dilated(x, _like(jnp.ones((4, 4, 3, 3)), x), (1, 1), "SAME"),
    "conv_transpose": lambda x: jp.conv_transpose(x, _like(W, x), (2, 2), "SAME"),
    "max_pool": lambda x: jp.max_pool(x, (2, 2)),
    "min_pool": lambda x: jp.min_pool(x, (2, 2)),
    "max_pool_with_argmax": lambda x: jp.max_pool_with_argmax(x, (2, 2)),
    "max_unpool": lambda x: jp.max_unpool(x, np.zeros((2, 4, 4, 4), np.int32), (2, 2), 2),
    "avg_pool": lambda x: jp.avg_pool(x, (2, 2)),
    "lp_pool": lambda x: jp.lp_pool(x, 2, (2, 2)),
    "adaptive_avg_pool": lambda x: jp.adaptive_avg_pool(x, 2),
    "adaptive_max_pool": lambda x: jp.adaptive_max_pool(x, 2),
    "global_avg_pool": jp.global_avg_pool,
    "global_max_pool": jp.global_max_pool,
    "batch_norm": jp.batch_norm,
    "batch_norm_inference": lambda x: jp.batch_norm_inference(x, S, S),
    "layer_norm": jp.layer_norm,
    "rms_norm": jp.rms_norm,
    "group_norm": lambda x: jp.group_norm(x, num_groups=2),
    "instance_norm": jp.instance_norm,
    "local_response_norm": jp.local_response_norm,
    "softmax": jp.softmax,
    "log_softmax": jp.log_softmax,
    "activation": lambda x: jp.activation(x, "relu"),
    "bias_act": lambda x: jp.bias_act(x, S, "relu"),
}
each_op = pytest.mark.parametrize("op", OPS)
NARROW = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn")


def _like(w, x):
    return w if jnp.issubdtype(getattr(x, "dtype", jax.dtypes.prng_key), jax.dtypes.extended) else w.astype(x.dtype)


@each_op
@pytest.mark.parametrize("dtype", NARROW)
def test_floats_of_less_than_16_bits_are_refused_with_a_remedy(op: str, dtype: str):
    x = X.astype(dtype)
    if op.startswith("conv") and dtype.startswith("float8"):
        assert OPS[op](x).dtype == dtype  # as jax.lax takes it
        return
    with pytest.raises(TypeError, match=rf"{dtype}.*jnp\.asarray\(\w+, jnp\.bfloat16\)"):
        OPS[op](x)
    with pytest.raises(TypeError, match=dtype):
        jax.eval_shape(OPS[op], x)


def test_a_narrow_result_dtype_or_parameter_is_refused():
    with pytest.raises(TypeError, match="preferred_element_type has dtype float8_e4m3fn"):
        jp.conv(X, W, preferred_element_type=jnp.float8_e4m3fn)
    with pytest.raises(TypeError, match="bias has dtype float8_e5m2"):
        jp.bias_act(X, S.astype(jnp.float8_e5m2), "relu")
    with pytest.raises(TypeError, match="scale has dtype float8_e5m2"):
        jp.layer_norm(X, S.astype(jnp.float8_e5m2))


@pytest.mark.parametrize("dtype", [*NARROW, "int4", "uint4", "complex64", "bool", "bfloat16", "int8", "uint16"])
def test_layouts_of_any_dtype_and_the_kernel_takes_what_its_handler_takes(dtype: str):
    x = (X + 1).astype(dtype)
    y = jp.transpose_layout(x, "NHWC", "NCHW")
    np.testing.assert_array_equal(np.asarray(y), np.moveaxis(np.asarray(x), -1, 1))
    taken = jp.explain(lambda x: jp.transpose_layout(x, "NHWC", "NCHW"), x)
    assert ("does not take" not in str(taken)) == (dtype in ("complex64", "bool", "bfloat16", "int8", "uint16"))


def test_the_layout_dtypes_are_those_of_the_handler():
    import pathlib
    import re

    from jaxprims.act.primitive import _LAYOUT_DTYPES

    source = (pathlib.Path(__file__).parents[1] / "cuda/act/handlers.cu").read_text()
    body = source[source.index("int bytes_of(") : source.index("default: return 0")]
    short = {"PRED": "bool", "BF16": "bfloat16", "C64": "complex64"}
    kinds = {"S": "int", "U": "uint", "F": "float"}
    named = {short.get(n) or kinds[n[0]] + n[1:] for n in re.findall(r"DataType::(\w+):", body)}
    assert named == set(_LAYOUT_DTYPES)


@each_op
def test_nested_lists_are_arrays_and_others_are_named(op: str):
    got, want = OPS[op](np.asarray(X).tolist()), OPS[op](X)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)
    with pytest.raises(TypeError, match=r"^(x|lhs|inputs)=\[\[1.0, 2.0\], \[3.0\]\] is not an array"):
        OPS[op]([[1.0, 2.0], [3.0]])
    with pytest.raises(TypeError, match=r"^(x|lhs|inputs)=None is not an array"):
        OPS[op](None)


KEYS = jax.random.split(jax.random.key(0), (2, 4, 4, 4))


@each_op
def test_random_keys_are_no_numbers(op: str):
    words = r"^(x|lhs|inputs) has dtype key<fry>; PRNG keys are no numbers: give jax\.random\.key_data\(\1\)"
    for call in (OPS[op], jax.jit(OPS[op])):
        with pytest.raises(TypeError, match=words):
            call(KEYS)


@pytest.mark.parametrize(
    "name, call",
    [
        ("x", lambda v: jp.transpose_layout(v, "NHWC", "NCHW")),
        ("where", lambda v: jp.softmax(X, where=v)),
        ("bias", lambda v: jp.bias_act(X, v)),
        ("residual", lambda v: jp.bias_act(X, residual=v)),
        ("w", lambda v: jp.conv(X, v)),
        ("scale", lambda v: jp.layer_norm(X, v)),
        ("mask", lambda v: jp.batch_norm(X, mask=v)),
        ("indices", lambda v: jp.max_unpool(X, v, (2, 2), 2)),
    ],
)
def test_random_keys_as_other_arguments(name, call):
    for value in (KEYS, list(KEYS)):
        with pytest.raises(TypeError, match=f"^{name} has dtype key<fry>"):
            call(value)


@pytest.mark.parametrize("i", [np.int64, np.int32, np.uint8])
def test_numpy_ints(i):
    same = np.testing.assert_array_equal
    one, two, three, four = i(1), i(2), i(3), i(4)
    w = jnp.ones((3, 3, 2, 4))
    same(
        jp.conv(X, w, feature_group_count=two, strides=two, padding=one),
        jp.conv(X, w, feature_group_count=2, strides=2, padding=1),
    )
    lax_w = jnp.ones((4, 2, 3, 3))
    same(
        jp.conv_general_dilated(X, lax_w, (one, one), [(one, one)] * 2, feature_group_count=two),
        jp.conv_general_dilated(X, lax_w, (1, 1), [(1, 1)] * 2, feature_group_count=2),
    )
    w = jnp.ones((4, 4, 3, 3))
    same(
        jp.conv_general_dilated(X, w, (1, 1), "SAME", batch_group_count=two),
        jp.conv_general_dilated(X, w, (1, 1), "SAME", batch_group_count=2),
    )
    same(jp.max_pool(X, (two, two), two, one), jp.max_pool(X, (2, 2), 2, 1))
    same(jp.max_pool(X, np.array([2, 2], i), np.array([2, 2], i)), jp.max_pool(X, (2, 2), 2))
    same(jp.lp_pool(X, two, (2, 2)), jp.lp_pool(X, 2, (2, 2)))
    same(jp.adaptive_avg_pool(X, two), jp.adaptive_avg_pool(X, 2))
    same(jp.group_norm(X, num_groups=two), jp.group_norm(X, num_groups=2))
    same(jp.local_response_norm(X, size=three), jp.local_response_norm(X, size=3))
    same(jp.softmax(X, axis=one), jp.softmax(X, axis=1))
    same(jp.layer_norm(X, axis=(one, three), eps=four), jp.layer_norm(X, axis=(1, 3), eps=4))


@pytest.mark.parametrize("f", [np.float32, np.float16, np.float64, np.array])
def test_numpy_floats(f):
    same = np.testing.assert_array_equal
    same(
        jp.local_response_norm(X, alpha=f(0.5), beta=f(0.75), k=f(2.0)),
        jp.local_response_norm(X, alpha=0.5, beta=0.75, k=2.0),
    )
    same(jp.layer_norm(X, eps=f(0.5)), jp.layer_norm(X, eps=0.5))
    same(jp.lp_pool(X, f(1.5), (2, 2)), jp.lp_pool(X, 1.5, (2, 2)))


NUMBERS = {
    "eps": lambda v: jp.layer_norm(X, eps=v),
    "p": lambda v: jp.lp_pool(X, v, (2, 2)),
    "alpha": lambda v: jp.local_response_norm(X, alpha=v),
    "beta": lambda v: jp.local_response_norm(X, beta=v),
    "k": lambda v: jp.local_response_norm(X, k=v),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float16", "float32", "int4", "uint8"])
def test_zero_dimensional_numbers_of_every_dtype(name: str, dtype: str):
    value = 2 if "int" in dtype else 1.5
    want = NUMBERS[name](value)
    for given in (jnp.asarray(value, dtype), np.asarray(value, dtype), np.asarray(value, dtype)[()]):
        np.testing.assert_array_equal(NUMBERS[name](given), want)


@pytest.mark.parametrize("name", NUMBERS)
def test_traced_numbers_are_told_from_others(name: str):
    words = rf"^{name} is a traced array \(~?float32\[\]\).*give a Python number.*static_argnames"
    with pytest.raises(TypeError, match=words):
        jax.jit(NUMBERS[name])(1.0)
    with pytest.raises(TypeError, match=f"^{name}=.*must be a Python number"):
        NUMBERS[name](jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(ValueError, match=f"^{name}=.*too large for a float"):
        NUMBERS[name](10**400)


def test_lists_of_another_dtype_have_a_remedy_that_runs():
    with pytest.raises(TypeError, match=r"scale has dtype int32.*jnp\.asarray\(scale, jnp\.float32\)"):
        jp.layer_norm(X, [1, 1, 1, 1])
    with pytest.raises(TypeError, match=r"x has dtype int32.*jnp\.asarray\(x, jnp\.float32\)"):
        jp.softmax([1, 2])
    scale = [1, 1, 1, 1]
    np.testing.assert_array_equal(jp.layer_norm(X, jnp.asarray(scale, jnp.float32)), jp.layer_norm(X))


def test_numbers_that_are_none():
    for call, name in (
        (lambda: jp.local_response_norm(X, alpha="1"), "alpha"),
        (lambda: jp.layer_norm(X, eps=None), "eps"),
        (lambda: jp.lp_pool(X, "2", (2, 2)), "p"),
        (lambda: jp.lp_pool(X, 1j, (2, 2)), "p"),
    ):
        with pytest.raises(TypeError, match=f"^{name}=.*number"):
            call()
    for bad in (2.0, True, "2"):
        with pytest.raises(TypeError, match="feature_group_count=.* must be an int, not"):
            jp.conv(X, W, feature_group_count=bad)
        with pytest.raises(TypeError, match="batch_group_count=.* must be an int, not"):
            jp.conv_general_dilated(X, jnp.ones((4, 4, 3, 3)), (1, 1), "SAME", batch_group_count=bad)
    with pytest.raises(TypeError, match="feature_group_count is a traced array.*static_argnames"):
        jax.jit(lambda n: jp.conv(X, W, feature_group_count=n))(1)


@pytest.mark.parametrize("bad", [{"a": 1}, {1: 1, 2: 2}, {1, 2}, frozenset((1, 2)), {1: 2}.keys(), b"ab"], ids=repr)
def test_what_has_no_order_is_no_sequence(bad):
    for f in (
        lambda **k: jp.conv(X, W, **k),
        lambda **k: jp.conv_transpose(X, W, **{"strides": 1, "padding": "SAME", **k}),
    ):
        with pytest.raises(
            TypeError, match=r"^padding=.* must be an int, 2 ints or \(low, high\) pairs, or one of 'SAME'"
        ):
            f(padding=bad)
        with pytest.raises(TypeError, match="^strides=.* must be an int or a sequence of 2 ints"):
            f(strides=bad)
    for name in ("kernel_dilation", "input_dilation"):
        with pytest.raises(TypeError, match=f"^{name}=.* must be an int or a sequence of 2 ints"):
            jp.conv(X, W, padding=1, **{name: bad})
    with pytest.raises(TypeError, match=r"^padding\[0\]=.* must be an int or a pair \(low, high\)"):
        jp.conv(X, W, padding=(bad, 1))
    with pytest.raises(TypeError, match="^strides=.* must be an int or a sequence"):
        jp.max_pool(X, (2, 2), bad)
    with pytest.raises(TypeError, match="^axis=.* must be an int or a sequence of ints"):
        jp.softmax(X, axis=bad)


def test_sequences_arrays_and_iterators_are_taken():
    want = jp.conv(X, W, strides=(1, 2), padding=((1, 1), (0, 2)))
    for many in (list, np.array, jnp.array, iter):
        got = jp.conv(X, W, strides=many((1, 2)), padding=many(((1, 1), (0, 2))))
        np.testing.assert_array_equal(got, want)


def test_8_bit_floats_are_convolved_in_float32_by_the_reference():
    x, w = jnp.linspace(-3, 3, 60).reshape(1, 4, 5, 3), jnp.linspace(-1, 2, 24).reshape(2, 2, 3, 2)
    for dtype in NARROW[:2]:
        a, b = x.astype(dtype), w.astype(dtype)
        for wanted in (None, jnp.float32, jnp.bfloat16):
            f = functools.partial(jp.conv, preferred_element_type=wanted)
            y, vjp = jax.vjp(f, a, b)
            assert y.dtype == (wanted or dtype)
            exact = jp.conv(a.astype("float32"), b.astype("float32"))
            np.testing.assert_array_equal(y, exact.astype(y.dtype))
            grads = vjp(jnp.ones_like(y))
            _, wide = jax.vjp(lambda x, w: jp.conv(x, w), a.astype("float32"), b.astype("float32"))
            for g, h in zip(grads, wide(jnp.ones_like(exact)), strict=True):
                assert g.dtype == dtype
                np.testing.assert_array_equal(g, h.astype(dtype))
            z = jp.conv(a, b, jnp.ones(2), activation="silu", preferred_element_type=wanted)
            np.testing.assert_array_equal(z, jax.nn.silu(exact + 1).astype(z.dtype))
        assert "the kernels take float32" in str(jp.explain(f, a, b))
