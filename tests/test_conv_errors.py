"""What the convolutions refuse, and what their messages say: the argument, its value, the rule, the remedy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxprims.conv import primitive
from jaxprims.conv.api import conv, conv_general_dilated, conv_transpose
from jaxprims.conv.checks import build_params, canonical_specs

X, W = jnp.zeros((2, 5, 5, 4)), jnp.zeros((3, 3, 4, 6))


@pytest.mark.parametrize(
    "options, error, words",
    [
        (dict(strides=0), ValueError, ["strides", "0", "at least 1"]),
        (dict(strides=(1, -2)), ValueError, ["strides[1]=-2", "at least 1"]),
        (dict(strides=(1, 1, 1)), ValueError, ["strides", "2 spatial axes"]),
        (dict(strides=1.5), TypeError, ["strides", "1.5", "int"]),
        (dict(strides=2**31), ValueError, ["strides", "2^31"]),
        (dict(input_dilation=0, padding=1), ValueError, ["input_dilation", "at least 1"]),
        (dict(kernel_dilation=2**31 - 1), ValueError, ["kernel_dilation", str(2**31 - 1), "below"]),
        (dict(kernel_dilation=2**30), ValueError, ["kernel_dilation", "3 taps", "2^31"]),
        (dict(input_dilation=2**30, padding=0), ValueError, ["input_dilation", "2^31"]),
        (dict(input_dilation=2), ValueError, ["padding='SAME'", "input_dilation=(2, 2)", "pairs"]),
        (dict(padding="SOME"), ValueError, ["padding='SOME'", "'SAME'"]),
        (dict(padding=None), TypeError, ["padding=None", "'SAME'", "'CAUSAL'", "an int", "(low, high)"]),
        (dict(out_sharding="d"), TypeError, ["out_sharding='d'", "PartitionSpec"]),
        (dict(padding="CAUSAL"), ValueError, ["CAUSAL", "one spatial axis"]),
        (dict(padding="CIRCULAR"), ValueError, ["CIRCULAR", "jnp.pad"]),
        (dict(padding=[(1, 1)]), ValueError, ["padding", "1 entries", "2 spatial axes"]),
        (dict(padding=[(-3, -3), (0, 0)]), ValueError, ["padding=(-3, -3)", "5 positions"]),
        (dict(feature_group_count=3), ValueError, ["feature_group_count=3", "4 input channels"]),
        (dict(feature_group_count=2), ValueError, ["feature_group_count", "4 input channels"]),
        (dict(feature_group_count=0), ValueError, ["feature_group_count=0", "at least 1"]),
        (dict(dimension_numbers="HWCN"), ValueError, ["dimension_numbers='HWCN'", "'NHWC'"]),
        (dict(dimension_numbers="NWC"), ValueError, ["dimension_numbers='NWC'", "1 spatial axes", "NHWC"]),
        (dict(dimension_numbers=("NHWC", "HWIO")), ValueError, ["dimension_numbers", "three strings"]),
        (dict(activation="rleu"), ValueError, ["activation='rleu'", "relu"]),
        (dict(mode="correlate"), ValueError, ["mode='correlate'", "'convolution'"]),
        (dict(algorithm="fft"), ValueError, ["algorithm='fft'", "'auto'", "'implicit_gemm'"]),
        (dict(precision="exact"), ValueError, ["precision='exact'", "highest"]),
        (dict(preferred_element_type=jnp.float16), TypeError, ["preferred_element_type=float16", "narrower"]),
        (dict(preferred_element_type=jnp.int32), TypeError, ["preferred_element_type=int32", "kind"]),
        (dict(bias=jnp.zeros((5,))), ValueError, ["bias", "(5,)", "(6,)"]),
        (dict(bias=jnp.zeros((6,), jnp.bfloat16)), TypeError, ["bias", "bfloat16", "float32"]),
        (dict(residual=jnp.zeros((2, 5, 5, 4))), ValueError, ["residual", "(2, 5, 5, 6)"]),
        (dict(residual=jnp.zeros((2, 5, 5, 6), jnp.float16)), TypeError, ["residual", "float16"]),
    ],
)
def test_conv_refuses(options, error, words):
    for f in (conv, lambda *a, **k: jax.eval_shape(lambda *b: conv(*b, **k), *a)):  # eager, and while tracing
        with pytest.raises(error) as e:
            f(X, W, **options)
        for word in words:
            assert word in str(e.value), f"{word!r} is not in {e.value}"


@pytest.mark.parametrize(
    "f, error, words",
    [
        (lambda: conv(X, W.astype(jnp.bfloat16)), TypeError, ["float32", "bfloat16", "jnp.asarray"]),
        (lambda: conv(jnp.zeros((5,)), W), ValueError, ["(5,)", "2 spatial axes"]),
        (lambda: conv(X, jnp.zeros((3, 3, 5, 6))), ValueError, ["5 input channels", "(3, 3, 5, 6)"]),
        (lambda: conv(X, jnp.zeros((3, 0, 4, 6))), ValueError, ["spatial sizes (3, 0)", "at least 1"]),
        (lambda: conv(X, jnp.zeros((4, 6))), ValueError, ["0 spatial axes", "conv_general_dilated"]),
        (lambda: conv(X.astype(int), W.astype(int), activation="tanh"), TypeError, ["int32", "activation"]),
        (lambda: conv_general_dilated(X, W[0], (1, 1), "SAME"), ValueError, ["same number of axes"]),
        (lambda: conv_general_dilated(X, W, (1,), "SAME"), ValueError, ["window_strides"]),
        (
            lambda: conv_general_dilated(X, W, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWX")),
            ValueError,
            ["NHWX"],
        ),
        (
            lambda: conv_general_dilated(X[..., :3], jnp.zeros((5, 5, 1, 1)), (1, 1), "SAME", batch_group_count=2),
            ValueError,
            ["batch_group_count=2", "5 output channels"],
        ),
        (
            lambda: conv_general_dilated(X, jnp.zeros((4, 5, 1, 1)), (1, 1), "SAME", batch_group_count=4),
            ValueError,
            ["batch_group_count=4", "batch size 2"],
        ),
        (
            lambda: conv_general_dilated(X, W, (1, 1), "SAME", feature_group_count=2, batch_group_count=2),
            ValueError,
            ["feature_group_count=2", "at most one"],
        ),
        (lambda: conv_transpose(X, W, (2, 2), "SAME_LOWER"), ValueError, ["SAME_LOWER", "'VALID'"]),
        (
            lambda: conv_transpose(X, W, 2, "CIRCULAR"),
            ValueError,
            ["CIRCULAR", "an int", "2 ints or (low, high) pairs"],
        ),
        (lambda: conv_transpose(X, W, 2, None), TypeError, ["padding=None", "an int", "'SAME', 'VALID', not NoneType"]),
        (lambda: conv_transpose(X[0, 0], W, 2, "SAME"), ValueError, ["(5, 4)", "2 spatial axes"]),
        (lambda: conv_transpose(X, W, 2, "SAME", dimension_numbers="HWCN"), ValueError, ["'HWCN'", "'NHWC'"]),
        (
            lambda: conv_transpose(X, W, 2, "SAME", feature_group_count=3),
            ValueError,
            ["feature_group_count=3", "4 input"],
        ),
        (
            lambda: conv_transpose(X, W, 2, "SAME", transpose_kernel=True, feature_group_count=4),
            ValueError,
            ["feature_group_count=4", "6 input channels", "(3, 3, 4, 6)"],
        ),
        (lambda: conv_transpose(X, W, (2, 0), "SAME"), ValueError, ["strides[1]=0"]),
        (lambda: conv_transpose(X, W, (2, 2), 1, output_padding=1), ValueError, ["output_padding=1", "torch"]),
        (
            lambda: conv_transpose(X, W, (2, 2), 1, output_padding=2, padding_convention="torch"),
            ValueError,
            ["output_padding=2", "smaller"],
        ),
        (lambda: conv_transpose(X, W, 1, 1, padding_convention="keras"), ValueError, ["'keras'", "'torch'"]),
    ],
)
def test_arguments_that_do_not_fit(f, error, words):
    with pytest.raises(error) as e:
        f()
    for word in words:
        assert word in str(e.value), f"{word!r} is not in {e.value}"


def test_the_kernels_limits_are_named():
    spec = jax.ShapeDtypeStruct
    x, w = spec((1, 1, 8, 8), jnp.float32), spec((1, 1, 3, 3), jnp.float32)
    p = build_params(
        x, w, canonical_specs(x, w, None), strides=1, padding=1, lhs_dilation=1, rhs_dilation=1, groups=1
    )  # fmt: skip
    assert primitive.conv.limit(p, (x, w)) is None
    double = [spec(a.shape, jnp.float64) for a in (x, w)]
    assert "float64" in primitive.conv.limit(p, double)
    assert "int32" in primitive.conv.limit(dataclasses.replace(p, dtype="int32"), (x, w))
    far = dataclasses.replace(p, rhs_dilation=(2**29, 1))
    assert "positions" in primitive.conv.limit(far, (x, w))
    flat = spec((1, 1), jnp.float32)
    p0 = build_params(
        flat, flat, canonical_specs(flat, flat, None), strides=(), padding=(), lhs_dilation=(), rhs_dilation=(), groups=1
    )  # fmt: skip
    assert "0 spatial axes" in primitive.conv.limit(p0, (flat, flat))
    many = spec((70000, 1, 8, 8), jnp.float32)  # past 65535 images
    assert primitive.conv.limit(p, (many, w)) is None
