"""Convolution: answers worked out by hand, users' cases with their values, agreement with jax.lax, and what is refused.

Every program here is a case that another library got wrong, or a rule of jaxprims.conv's own. The generic contract (jit,
derivatives, vmap, sharding) of the conv entries of cases.py is tested elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.test_util import check_grads

from jaxprims.conv import primitive
from jaxprims.conv.api import conv, conv_general_dilated, conv_transpose
from jaxprims.conv.checks import build_params, canonical_specs
from jaxprims.conv.params import scatter
from jaxprims.core.activations import ACTIVATIONS, apply_activation
from tests.oracle import conv as oracle


def nwc(*values, dtype=jnp.float32):
    return jnp.array(values, dtype).reshape(1, -1, 1)


def taps(*values, dtype=jnp.float32):
    return jnp.array(values, dtype).reshape(-1, 1, 1)


def ints(rng, shape, dtype="float64"):
    return jnp.asarray(rng.integers(-4, 5, shape), dtype)


# --- worked out by hand -----------------------------------------------------------------------------------------------


def test_depthwise_gradient_counts_the_positions_that_each_tap_meets():
    n, length, c = 32, 1024, 4
    x, w = jnp.ones((n, length, c)), jnp.ones((5, 1, c))
    y, vjp = jax.vjp(lambda x, w: conv(x, w, feature_group_count=c), x, w)
    dx, dw = vjp(jnp.ones_like(y))
    edge = [3, 4, *[5] * (length - 4), 4, 3]
    np.testing.assert_array_equal(y[0, :, 0], edge)
    np.testing.assert_array_equal(dx[0, :, 0], edge)
    want = [32704, 32736, 32768, 32736, 32704]
    np.testing.assert_array_equal(dw[:, 0, :], np.tile(np.array(want)[:, None], (1, c)))


@pytest.mark.parametrize("dilation, want", [(1, [100, 210, 321, 432]), (2, [100, 200, 310, 420])])
def test_causal(dilation, want):
    x, w = nwc(1, 2, 3, 4), taps(1, 10, 100)
    np.testing.assert_array_equal(conv(x, w, padding="CAUSAL", kernel_dilation=dilation).ravel(), want)


def test_input_dilation_forward_and_kernel_gradient():
    x = jnp.array([[1.0, 2], [3, 4]]).reshape(1, 2, 2, 1)
    w = jnp.ones((3, 3, 1, 1))

    def f(w):
        return conv(x, w, input_dilation=2, padding=[(1, 2), (1, 2)])

    np.testing.assert_array_equal(f(w)[0, :, :, 0], [[1, 3, 2, 2], [4, 10, 6, 6], [3, 7, 4, 4], [3, 7, 4, 4]])
    dw = jax.grad(lambda w: jnp.mean(f(w)))(w)
    np.testing.assert_array_equal(
        dw[:, :, 0, 0], [[0.625, 0.625, 0.375], [0.625, 0.625, 0.375], [0.4375, 0.4375, 0.25]]
    )


def test_transposed_in_both_orientations():
    x, w = nwc(1, 2, 3), taps(1, 10, 100)
    np.testing.assert_array_equal(conv_transpose(x, w, (2,), "VALID").ravel(), [100, 10, 201, 20, 302, 30, 3])
    got = conv_transpose(x, w, (2,), "VALID", transpose_kernel=True)
    np.testing.assert_array_equal(got.ravel(), [1, 10, 102, 20, 203, 30, 300])


def test_transposed_valid_is_not_padding_zero():
    x, w = jnp.ones((1, 8, 8, 1)), jnp.ones((4, 4, 1, 1))
    assert conv_transpose(x, w, (4, 4), "VALID").shape == (1, 32, 32, 1)
    assert conv_transpose(x, w, (4, 4), ((0, 0), (0, 0))).shape == (1, 26, 26, 1)
    assert conv_transpose(x, w, (4, 4), 0, padding_convention="torch").shape == (1, 32, 32, 1)


def test_transposed_torch_convention_crops_and_extends():
    # torch.nn.functional.conv_transpose1d([1, 2, 3], [1, 10, 100], stride=2, padding=p, output_padding=o)
    full = [1, 10, 102, 20, 203, 30, 300]
    x, w = nwc(1, 2, 3), taps(1, 10, 100)

    def torch(padding, output_padding=0):
        return conv_transpose(
            x, w, 2, padding, transpose_kernel=True, padding_convention="torch", output_padding=output_padding
        ).ravel()

    np.testing.assert_array_equal(torch(0), full)
    np.testing.assert_array_equal(torch(1), full[1:-1])
    np.testing.assert_array_equal(torch(1, 1), full[1:])
    np.testing.assert_array_equal(torch(0, 1), [*full, 0])
    np.testing.assert_array_equal(torch(3), full[3:-3])  # more than the reach of the kernel: a crop of x itself
    np.testing.assert_array_equal(torch([(2, 0)]), full[2:])


def test_bfloat16_dilated_and_strided():
    y = conv_general_dilated(
        jnp.ones((2, 4, 16), jnp.bfloat16), jnp.ones((16, 4, 3), jnp.bfloat16), (2,), "SAME", rhs_dilation=(2,)
    )
    assert y.shape == (2, 16, 8) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, np.tile(np.array([8, 12, 12, 12, 12, 12, 12, 8]), (2, 16, 1)))


def test_highest_precision_is_exact_float32_in_all_three():
    x = jnp.zeros((1, 2, 64)).at[:, :, 0].set(1 + 2.0**-13)
    w = jnp.ones((1, 64, 1))
    with jax.default_matmul_precision("highest"):
        y, vjp = jax.vjp(lambda x, w: conv(x, w), x, w)
    assert y[0, 0, 0] == 1.0001220703125
    dx, dw = vjp(jnp.full_like(y, 1 + 2.0**-13))
    assert dx[0, 0, 0] == 1.0001220703125
    assert dw[0, 0, 0] == np.float32(2 * (1 + 2.0**-13) ** 2)


@pytest.mark.parametrize("context", [None, "highest", "BF16_BF16_F32"])
@pytest.mark.parametrize("precision", [None, "high", lax.Precision.HIGHEST, ("default", "highest")])
def test_precision_travels_to_the_derivatives(context, precision):
    x, w = jnp.ones((1, 3, 2)), jnp.ones((1, 2, 2))
    with jax.default_matmul_precision(context):
        y, vjp = jax.vjp(lambda x, w: conv(x, w, precision=precision), x, w)
    jaxpr = jax.make_jaxpr(vjp)(y)  # outside of the context
    found = {e.params["params"].precision for e in jaxpr.eqns if "params" in e.params}
    if precision is None:
        want = lax.Precision.HIGHEST if context == "highest" else None
    else:
        want = lax.Precision.HIGH if precision == "high" else precision
        want = (lax.Precision.DEFAULT, lax.Precision.HIGHEST) if isinstance(want, tuple) else want
    assert found == {want}


def test_complex_is_not_conjugated_and_float64_is_float64():
    x = jnp.array([1 + 1j, 2, 3j], jnp.complex64).reshape(1, 3, 1)
    w = jnp.array([1j, 1], jnp.complex64).reshape(2, 1, 1)
    np.testing.assert_array_equal(conv(x, w, padding="VALID").ravel(), [1 + 1j, 5j])
    dw = jax.grad(lambda w: jnp.sum(conv(x, w, padding="VALID")).real, allow_int=False)(w)
    np.testing.assert_array_equal(dw.ravel(), [3 + 1j, 2 + 3j])  # JAX's convention: the transpose, not its conjugate
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, w = rng.standard_normal((2, 9, 9, 5)), rng.standard_normal((3, 3, 5, 4))
        got = conv(jnp.asarray(x), jnp.asarray(w), padding="VALID")
        want = oracle.conv_layer(x, w, strides=(1, 1), padding=((0, 0), (0, 0)))
        assert got.dtype == jnp.float64
        assert np.abs(got - want).max() < 1e-12


def test_float16_products_do_not_overflow_the_sum():
    x, w = jnp.full((1, 1, 128), 250.0, jnp.float16), jnp.full((1, 128, 1), 2.0, jnp.float16)
    assert conv(x, w)[0, 0, 0] == 64000.0  # partial sums of half precision would have lost digits from 2048 on
    x = jnp.concatenate([x, -x], axis=2)  # 64000 * 2 on the way would pass float16's 65504
    assert conv(x * 2, jnp.tile(w, (1, 2, 1)))[0, 0, 0] == 0


@pytest.mark.parametrize(
    "x, w, padding, want",
    [
        ((0, 3, 8, 8), (4, 3, 3, 3), 0, (0, 4, 6, 6)),
        ((2, 32, 0, 5), (16, 32, 2, 2), 1, (2, 16, 1, 6)),
        ((2, 0, 6, 6), (4, 0, 3, 3), 1, (2, 4, 6, 6)),
        ((2, 3, 6, 6), (0, 3, 3, 3), 1, (2, 0, 6, 6)),
        ((2, 3, 2, 2), (4, 3, 3, 3), 0, (2, 4, 0, 0)),
        ((2, 3, 2, 2), (4, 3, 3, 3), -1, (2, 4, 0, 0)),
    ],
)
def test_zero_sizes_give_zeros(x, w, padding, want):
    x, w = jnp.ones(x), jnp.ones(w)

    def f(x, w):
        return conv_general_dilated(x, w, (1, 1), [(padding, padding)] * 2)

    y, vjp = jax.vjp(jax.jit(f), x, w)
    assert y.shape == want and not np.any(y)
    dx, dw = vjp(jnp.ones_like(y))
    assert dx.shape == x.shape and dw.shape == w.shape
    assert not np.any(dx) and not np.any(dw)
    if want[-1] == 0:  # the window does not fit: lax's empty result from the one, an error from the other
        with pytest.raises(ValueError, match="does not fit"):
            conv(x, w, padding=padding, dimension_numbers="NCHW")
        return
    fused = conv(x, w, jnp.full(w.shape[0], 2.0), padding=padding, dimension_numbers="NCHW", activation="relu")
    np.testing.assert_array_equal(fused, np.full(want, 2.0))  # an empty sum is zero, the bias still counts


def test_more_images_than_a_grid_axis_counts():
    x = jnp.arange(70000.0).reshape(-1, 1, 1)
    y = conv(x, taps(2))
    np.testing.assert_array_equal(y[jnp.array([0, 65535, 65536, 69999])].ravel(), [0, 131070, 131072, 139998])


def test_same_padding_with_stride_is_not_symmetric():
    x, w = nwc(1, 2, 3, 4, 5, 6), taps(1, 10, 100)
    np.testing.assert_array_equal(conv(x, w, strides=2).ravel(), [321, 543, 65])
    np.testing.assert_array_equal(conv(x, w, strides=2, padding=1).ravel(), [210, 432, 654])
    np.testing.assert_array_equal(conv(x, w, strides=2, padding="SAME_LOWER").ravel(), [210, 432, 654])
    p = build_params(
        jnp.zeros((1, 224, 1)), jnp.zeros((7, 1, 1)), canonical_specs(jnp.zeros((1, 224, 1)), jnp.zeros((7, 1, 1)), ("NWC", "WIO", "NWC")),
        strides=2, padding="SAME", lhs_dilation=1, rhs_dilation=1, groups=1,
    )  # fmt: skip
    assert p.padding == ((2, 3),)


def test_negative_padding_crops():
    x = jnp.ones((1, 15, 6, 8))
    w = jnp.eye(8).reshape(1, 1, 8, 8)
    y, vjp = jax.vjp(lambda x: conv(x, w, padding=[(0, 0), (-5, 1)]), x)
    assert y.shape == (1, 15, 2, 8)
    np.testing.assert_array_equal(y[0, 0, :, 0], [1, 0])
    (dx,) = vjp(jnp.ones_like(y))
    np.testing.assert_array_equal(dx[0, 0, :, 0], [0, 0, 0, 0, 0, 1])
    # Padding beyond the kernel: its input gradient is the case with negative padding.
    dx = jax.grad(lambda x: jnp.sum(conv(x, w, padding=2) * 3))(x)
    np.testing.assert_array_equal(dx, np.full(x.shape, 3.0))


def test_mode_convolution_reverses_the_kernel():
    x, w = nwc(1, 2, 3), taps(1, 10, 100)
    got = conv(x, w, padding=2, mode="convolution").ravel()
    np.testing.assert_array_equal(got, np.convolve([1, 2, 3], [1, 10, 100]))


def test_int8_with_int32_sums():
    x, w = jnp.full((1, 2, 2, 64), 100, jnp.int8), jnp.full((1, 1, 64, 1), 100, jnp.int8)
    y = conv(x, w, jnp.array([7], jnp.int32), preferred_element_type=jnp.int32)
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, np.full((1, 2, 2, 1), 640007))
    assert conv(x, w, preferred_element_type=jnp.float32)[0, 0, 0, 0] == 640000.0
    assert conv(x, w)[0, 0, 0, 0] == np.array(640000).astype(np.int8)  # wraps, as jax.lax


# --- against jax.lax --------------------------------------------------------------------------------------------------

NUMBERS = [
    None,
    ("NCHW", "OIHW", "NCHW"),
    ("NHWC", "HWIO", "NHWC"),
    ("NHWC", "OHWI", "NCHW"),
    ("CHWN", "IWHO", "HWNC"),
    lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("padding", ["SAME", "VALID", "same_lower", [(2, 0), (1, 3)]])
def test_dimension_numbers_and_padding_as_lax(numbers, padding):
    rng = np.random.default_rng(1)
    spec = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, numbers)
    x = ints(rng, scatter((2, 3, 7, 5), spec.lhs_spec), "float32")
    w = ints(rng, scatter((4, 3, 3, 2), spec.rhs_spec), "float32")
    args = ((2, 1), padding, None, (1, 2), numbers)
    np.testing.assert_array_equal(conv_general_dilated(x, w, *args), lax.conv_general_dilated(x, w, *args))


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 3))])
@pytest.mark.parametrize("strides, dilation", [((1, 1), None), ((2, 3), (1, 2)), ((5, 4), (2, 1))])
def test_conv_transpose_as_lax(transpose_kernel, consistent, padding, strides, dilation):
    rng = np.random.default_rng(2)
    x = ints(rng, (2, 4, 3, 3), "float32")
    w = ints(rng, (3, 2, 4, 3) if transpose_kernel else (3, 2, 3, 4), "float32")
    args = (strides, padding, dilation, None, transpose_kernel)
    want = lax.conv_transpose(x, w, *args, use_consistent_padding=consistent)
    np.testing.assert_array_equal(conv_transpose(x, w, *args, use_consistent_padding=consistent), want)


def test_conv_transpose_numbers_and_epilogue():
    rng = np.random.default_rng(3)
    x, w, b = ints(rng, (2, 3, 5, 4), "float32"), ints(rng, (3, 6, 2, 2), "float32"), ints(rng, (6,), "float32")
    numbers = ("NCHW", "IOHW", "NCHW")
    want = lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=numbers)
    np.testing.assert_array_equal(conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=numbers), want)
    got = conv_transpose(x, w, 2, "SAME", dimension_numbers=numbers, bias=b, activation="relu")
    np.testing.assert_array_equal(got, jax.nn.relu(want + b[:, None, None]))
    r = ints(rng, want.shape, "float32")
    got = conv_transpose(x, w, 2, "SAME", dimension_numbers=numbers, bias=b, activation="relu", residual=r)
    np.testing.assert_array_equal(got, jax.nn.relu(want + b[:, None, None] + r))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 2)])
def test_conv_transpose_takes_the_batches_and_layouts_of_conv(batch):
    rng = np.random.default_rng(11)
    x, w, b = ints(rng, (*batch, 4, 5, 3), "float32"), ints(rng, (3, 2, 3, 2), "float32"), ints(rng, (2,), "float32")
    flat = lax.conv_transpose(x.reshape(-1 if x.size else 0, 4, 5, 3), w, (2, 2), "SAME")
    want = flat.reshape(*batch, *flat.shape[1:])
    np.testing.assert_array_equal(conv_transpose(x, w, 2, "SAME"), want)
    np.testing.assert_array_equal(conv_transpose(x, w, 2, "SAME", dimension_numbers="NHWC", residual=want), 2 * want)
    first = conv_transpose(
        jnp.moveaxis(x, -1, -3),
        jnp.transpose(w, (3, 2, 0, 1)),
        2,
        "SAME",
        dimension_numbers="NCHW",
        bias=b,
        activation="relu",
    )
    np.testing.assert_array_equal(first, jnp.moveaxis(jax.nn.relu(want + b), -1, -3))
    np.testing.assert_array_equal(
        conv_transpose(x, w, None, "SAME"), conv_transpose(x, w, 1, "SAME", dimension_numbers="NHWC")
    )


@pytest.mark.parametrize("layout", ["NWC", "NCW"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_conv_transpose_in_groups(layout, groups):
    rng = np.random.default_rng(13)
    to = (lambda a: jnp.moveaxis(a, -1, 1)) if layout == "NCW" else (lambda a: a)
    kernel = (lambda a: jnp.transpose(a, (2, 1, 0))) if layout == "NCW" else (lambda a: a)
    options = dict(feature_group_count=groups, dimension_numbers=layout)
    x, w, dy = (
        ints(rng, (2, 8, 4), "float32"),
        ints(rng, (3, 4 // groups, 8), "float32"),
        ints(rng, (2, 4, 8), "float32"),
    )
    (want,) = jax.linear_transpose(lambda x: conv(x, kernel(w), strides=2, **options), to(x))(to(dy))
    got = conv_transpose(to(dy), kernel(w), 2, "SAME", transpose_kernel=True, **options)
    np.testing.assert_array_equal(got, want)
    w = ints(rng, (3, 8 // groups, 4), "float32")
    parts = [
        lax.conv_transpose(a, b, (2,), "SAME")
        for a, b in zip(jnp.split(dy, groups, -1), jnp.split(w, groups, -1), strict=True)
    ]
    got = conv_transpose(to(dy), kernel(w), 2, "SAME", **options)
    np.testing.assert_array_equal(got, to(jnp.concatenate(parts, -1)))


@st.composite
def problems(draw):
    """Any legal convolution of small integers, so that every result is exact."""
    rank = draw(st.integers(0, 3))
    small = lambda lo, hi: draw(st.integers(lo, hi))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    batch_groups = 1 if groups > 1 else draw(st.sampled_from([1, 1, 2]))
    n, c, k = batch_groups * small(1, 2), groups * small(1, 2), groups * batch_groups * small(1, 2)
    sizes, window = [small(0, 5) for _ in range(rank)], [small(1, 3) for _ in range(rank)]
    strides, ld, rd = ([small(1, 3) for _ in range(rank)] for _ in range(3))
    padding = []
    for size, d in zip(sizes, ld, strict=True):
        extent = (size - 1) * d + 1 if size else 0
        lo = small(-min(extent, 3), 3)
        padding.append((lo, small(-min(extent + lo, 3), 3)))
    perms = [draw(st.permutations(range(rank + 2))) for _ in range(3)]
    specs = lax.ConvDimensionNumbers(*map(tuple, perms))
    shapes = scatter((n, c, *sizes), specs.lhs_spec), scatter((k, c // groups, *window), specs.rhs_spec)
    return shapes, strides, padding, ld, rd, specs, groups, batch_groups, draw(st.integers(0, 2**16))


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(problems())
def test_any_convolution_and_its_transposes(problem):
    (x_shape, w_shape), strides, padding, ld, rd, specs, groups, batch_groups, seed = problem
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        x, w = ints(rng, x_shape), ints(rng, w_shape)
        args = (strides, padding, ld, rd, specs)
        y, vjp = jax.vjp(lambda x, w: conv_general_dilated(x, w, *args, groups, batch_groups), x, w)
        want = oracle.conv(x, w, *args, groups=groups, batch_groups=batch_groups)
        assert y.shape == want.shape
        np.testing.assert_array_equal(y, want)
        dy = ints(rng, y.shape)
        dx, dw = vjp(dy)
        options = dict(groups=groups, batch_groups=batch_groups)
        np.testing.assert_array_equal(dx, oracle.conv_dx(x_shape, w, np.asarray(dy), *args, **options))
        np.testing.assert_array_equal(dw, oracle.conv_dw(x, w_shape, np.asarray(dy), *args, **options))


# --- layouts, batches, dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_channels_first_is_channels_last(rank):
    rng = np.random.default_rng(4)
    sizes = (5, 4, 3)[:rank]
    x, w = ints(rng, (2, *sizes, 4), "float32"), ints(rng, (*(2,) * rank, 2, 6), "float32")
    b, r = ints(rng, (6,), "float32"), ints(rng, (2, *sizes, 6), "float32")
    to_first = lambda a: jnp.moveaxis(a, -1, 1)  # noqa: E731
    options = dict(strides=1, feature_group_count=2, activation="relu6")
    last = conv(x, w, b, residual=r, **options)
    kernel = jnp.transpose(w, (rank + 1, rank, *range(rank)))
    names = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}[rank]
    for layout in ("NCHW", names[1]):
        first = conv(to_first(x), kernel, b, residual=to_first(r), dimension_numbers=layout, **options)
        np.testing.assert_array_equal(first, to_first(last))
    np.testing.assert_array_equal(conv(x, w, b, residual=r, dimension_numbers=names[0], **options), last)


@pytest.mark.parametrize("layout, shape", [("NHWC", (4, 5, 3)), ("NCHW", (3, 4, 5))])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 2)])
def test_no_batch_axis_or_several(layout, shape, batch):
    rng = np.random.default_rng(5)
    x = ints(rng, (*batch, *shape), "float32")
    w = ints(rng, (3, 3, 3, 2) if layout == "NHWC" else (2, 3, 3, 3), "float32")
    y = conv(x, w, dimension_numbers=layout)
    flat = conv(x.reshape(-1 if 0 not in batch else 0, *shape), w, dimension_numbers=layout)
    assert y.shape == (*batch, *flat.shape[1:])
    np.testing.assert_array_equal(y.reshape(flat.shape), flat)
    np.testing.assert_array_equal(conv(x, w, dimension_numbers=layout, residual=y), 2 * y)


@pytest.mark.parametrize("sizes, padding", [("n, 5, 4", 2), ("n, h, w", "SAME"), ("n, h, w", ((0, 1), (2, -1)))])
def test_sizes_may_be_symbolic(sizes, padding):
    from jax import export

    shape = export.symbolic_shape(sizes, constraints=["h >= 3", "w >= 3"] if "h" in sizes else [])
    w, b = jnp.ones((3, 3, 4, 2)), jnp.ones((2,))

    def f(x, w):
        y, vjp = jax.vjp(lambda x, w: conv(x, w, b, activation="tanh", padding=padding, strides=(2, 1)), x, w)
        return y, *vjp(y)

    exported = export.export(jax.jit(f), platforms=["cpu"])(jax.ShapeDtypeStruct((*shape, 4), jnp.float32), w)
    x = jax.random.normal(jax.random.key(0), (3, 5, 4, 4))
    for got, want in zip(exported.call(x, w), f(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_mixed_dtypes_in_every_order():
    """A float32 result of bfloat16 operands: gradients come back in bfloat16, computed from unrounded float32."""
    rng = np.random.default_rng(6)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 5, 3), (3, 3, 4)))
    y, vjp = jax.vjp(lambda x, w: conv(x, w, preferred_element_type=jnp.float32), x, w)
    assert y.dtype == jnp.float32
    dy = jnp.asarray(rng.standard_normal(y.shape), jnp.float32)  # digits that bfloat16 cannot hold
    dx, dw = vjp(dy)
    assert dx.dtype == dw.dtype == jnp.bfloat16
    args = ((1,), ((1, 1),), None, None, oracle.NHWC[1])
    wide = [np.asarray(a, np.float64) for a in (x, w, dy)]
    for got, want in (
        (dx, oracle.conv_dx(x.shape, wide[1], wide[2], *args)),
        (dw, oracle.conv_dw(wide[0], w.shape, wide[2], *args)),
    ):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2.0**-8, atol=1e-4)
    second = jax.grad(
        lambda w: jnp.sum(
            jax.grad(lambda x: jnp.sum(conv(x, w, preferred_element_type=jnp.float32) ** 2))(x).astype(jnp.float32)
        )
    )(w)
    assert second.dtype == jnp.bfloat16


# --- the epilogue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_fused_is_the_composition_in_every_order(activation):
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        x, w, b, r = (jnp.asarray(rng.standard_normal(s)) for s in ((2, 4, 3), (2, 3, 2), (2,), (2, 3, 2)))

        def fused(x, w, b, r):
            return conv(x, w, b, residual=r, padding="VALID", activation=activation)

        def composed(x, w, b, r):
            return apply_activation(activation, conv(x, w, padding="VALID") + b + r)

        def third(f):
            u = jax.tree.map(jnp.cos, (x, w, b, r))
            first = lambda *a: jax.jvp(f, a, u)[1]  # noqa: E731
            second = lambda *a: jax.grad(lambda *q: jnp.sum(jnp.sin(first(*q))), (0, 1, 2, 3))(*a)  # noqa: E731
            return first(x, w, b, r), second(x, w, b, r), jax.jvp(second, (x, w, b, r), u)[1]

        np.testing.assert_allclose(fused(x, w, b, r), composed(x, w, b, r), rtol=1e-12, atol=1e-12)
        for got, want in zip(
            jax.tree.leaves(jax.jit(lambda: third(fused))()),
            jax.tree.leaves(jax.jit(lambda: third(composed))()),
            strict=True,
        ):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_relu6_has_slope_one_strictly_inside_only():
    x = nwc(-1, 0, 3, 6, 7)
    dx = jax.grad(lambda x: jnp.sum(conv(x, taps(1), activation="relu6")))(x)
    np.testing.assert_array_equal(dx.ravel(), [0, 0, 1, 0, 0])


def test_bias_gradient_of_half_precision_is_summed_in_float32():
    x, w, b = jnp.zeros((1, 4096, 1), jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16), jnp.zeros((1,), jnp.float32)
    db = jax.grad(lambda b: jnp.sum(conv(x, w, b).astype(jnp.float32)))(b)
    assert db.dtype == jnp.float32 and db[0] == 4096.0


# --- batching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 3), (-1, None)])
def test_vmap_over_images_and_kernels_equals_a_loop(axes):
    rng = np.random.default_rng(8)
    size = 3
    images, kernels = ints(rng, (size, 2, 4, 4, 3), "float32"), ints(rng, (size, 2, 2, 3, 2), "float32")
    args = [
        (a if axis is not None else a[0]) if axis is None else jnp.moveaxis(a, 0, axis)
        for a, axis in zip((images, kernels), axes, strict=True)
    ]

    def grads(x, w):
        return jax.vjp(conv, x, w)[1](jnp.ones((2, 4, 4, 2)))

    for f in (lambda x, w: (conv(x, w),), grads):
        got = jax.vmap(f, axes)(*args)
        pick = lambda i: [a if axis is None else jnp.take(a, i, axis) for a, axis in zip(args, axes, strict=True)]  # noqa: E731
        want = [f(*pick(i)) for i in range(size)]
        for r, column in enumerate(zip(*want, strict=True)):
            np.testing.assert_array_equal(got[r], jnp.stack(column))


def test_vmapped_kernels_are_a_batch_axis_not_groups():
    x, w = jnp.ones((2, 4, 4, 3)), jnp.ones((5, 2, 2, 3, 2))
    equations = lambda f, *a: [e for e in jax.make_jaxpr(f)(*a).eqns if "params" in e.params]  # noqa: E731
    (eq,) = equations(jax.vmap(conv, (None, 0)), x, w)
    assert eq.params["params"].groups == 1 and eq.params["params"].w_batched and not eq.params["params"].x_batched
    assert [v.aval.shape for v in eq.invars] == [x.shape, w.shape]  # x is not copied
    per_sample = jax.vmap(jax.grad(lambda w, x: jnp.sum(conv(x, w))), (None, 0))
    (dw,) = [e for e in equations(per_sample, w[0], x) if e.primitive.name == "conv_dw"]
    assert dw.params["params"].groups == dw.params["params"].batch_groups == 1
    assert dw.outvars[0].aval.shape == (2, *w.shape[1:])


@pytest.mark.parametrize("name", ["conv", "conv_dx", "conv_dw"])
@pytest.mark.parametrize("outer", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("inner", [(0, 0), (0, None), (None, 0)])
@pytest.mark.parametrize("groups, batch_groups", [(1, 1), (2, 1), (1, 2)])
def test_nested_vmap_of_each_primitive(name, outer, inner, groups, batch_groups):
    rng = np.random.default_rng(9)
    shapes = {"x": (2, 4, 5), "w": (4, 4 // groups, 2), "y": (2 // batch_groups, 4, 4)}
    p = build_params(
        jnp.zeros(shapes["x"]), jnp.zeros(shapes["w"]), canonical_specs(jnp.zeros(shapes["x"]), jnp.zeros(shapes["w"]), None),
        strides=1, padding="VALID", lhs_dilation=1, rhs_dilation=1, groups=groups, batch_groups=batch_groups,
    )  # fmt: skip
    op = getattr(primitive, name)
    slots = {"conv": "xw", "conv_dx": "yw", "conv_dw": "xy"}[name]
    args = []
    for slot, o, i in zip(slots, outer, inner, strict=True):
        lead = (2,) * (o is not None) + (3,) * (i is not None)
        args.append(ints(rng, (*lead, *shapes[slot]), "float32"))
    got = jax.vmap(jax.vmap(lambda a, b: op(p, a, b)[0], inner), outer)(*args)
    for j in range(2):
        row = [a if o is None else a[j] for a, o in zip(args, outer, strict=True)]
        for m in range(3):
            a, b = [v if i is None else v[m] for v, i in zip(row, inner, strict=True)]
            np.testing.assert_array_equal(got[j, m], op(p, a, b)[0])


def test_batched_primitives_differentiate_in_both_modes():
    rng = np.random.default_rng(10)
    with jax.enable_x64(True):
        x, w = jnp.asarray(rng.standard_normal((2, 4, 2))), jnp.asarray(rng.standard_normal((3, 2, 2, 2)))
        check_grads(jax.jit(jax.vmap(lambda x, w: conv(x, w), (None, 0))), (x, w), order=2, modes=("fwd", "rev"))
        per_sample = jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(conv(x, w) ** 2)), (None, 0)))
        check_grads(per_sample, (w[0], x), order=2, modes=("fwd", "rev"))
