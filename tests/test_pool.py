"""Pools: exact answers by hand, what other libraries got wrong, both layouts, indices, refusals."""

from __future__ import annotations

import time
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxprims
from jaxprims.pool import api, primitive
from jaxprims.pool.arguments import regular_of
from tests.oracle import pool as oracle


def column(*values: float, dtype=jnp.float32) -> jax.Array:
    """One image of one channel along one axis."""
    return jnp.array(values, dtype)[:, None]


def plane(rows, dtype=jnp.float32) -> jax.Array:
    return jnp.array(rows, dtype)[..., None]


def grad_of_sum(fn, x):
    return jax.grad(lambda x: fn(x).sum())(x)


# --- maxima: who wins -----------------------------------------------------------------------------------------------


def test_ties_give_the_gradient_to_the_first_in_row_major_order():
    g = grad_of_sum(partial(api.max_pool, window_shape=(2, 2)), plane([[1, 2], [2, 2]]))
    assert g[..., 0].tolist() == [[0, 1], [0, 0]]
    g = grad_of_sum(partial(api.max_pool, window_shape=(3,)), jnp.ones((5, 1)))
    assert g[:, 0].tolist() == [1, 1, 1, 0, 0]
    g = grad_of_sum(partial(api.max_pool, window_shape=(3,), strides=2, padding="SAME"), jnp.ones((6, 1)))
    assert g[:, 0].tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("pool, empty", [(api.max_pool, -np.inf), (api.min_pool, np.inf)])
def test_all_infinite_windows_go_to_the_first_element_and_padding_never_wins(pool, empty):
    x = jnp.full((4, 1), empty)
    y, g = pool(x, (3,), padding=1), grad_of_sum(partial(pool, window_shape=(3,), padding=1), x)
    assert y[:, 0].tolist() == [empty] * 4
    assert g[:, 0].tolist() == [2, 1, 1, 0]
    if pool is api.max_pool:
        assert api.max_pool_with_argmax(x, (3,), padding=1)[1][:, 0].tolist() == [0, 0, 1, 2]


def test_the_smallest_integer_beats_padding():
    low = jnp.iinfo(jnp.int8).min
    y, index = api.max_pool_with_argmax(column(low, low, low, dtype=jnp.int8), (2,), strides=2, padding=1)
    assert (y.dtype, y[:, 0].tolist(), index[:, 0].tolist()) == (jnp.int8, [low, low], [0, 1])
    assert api.min_pool(column(3, 1, 2, dtype=jnp.uint8), (2,))[:, 0].tolist() == [1, 1]


def test_dilated_windows_have_every_derivative():
    x = column(1, 5, 3, 2, 4)
    f = partial(api.max_pool, window_shape=(2,), window_dilation=2)
    assert f(x)[:, 0].tolist() == [3, 5, 4]
    assert jax.jvp(f, (x,), (column(0, 1, 2, 3, 4),))[1][:, 0].tolist() == [2, 1, 4]
    assert grad_of_sum(f, x)[:, 0].tolist() == [0, 1, 1, 0, 1]
    assert jax.jacfwd(f)(x).tolist() == jax.jacrev(f)(x).tolist()


def test_second_derivatives_in_every_order():
    def f(x):
        return (api.max_pool(x[:, None], (2,)) ** 3).sum()

    x = jnp.array([1.0, 2.0, 4.0, 3.0])
    want = np.diag([0.0, 6 * 2.0, 2 * 6 * 4.0, 0.0])  # windows (1,2) (2,4) (4,3): maxima 2, 4, 4
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            np.testing.assert_array_equal(outer(inner(f))(x), want)
    x = jnp.array([1.0, 2.0, 4.0, 3.0])

    def strided(x):
        return (api.max_pool(x[:, None], (2,), strides=2) ** 3).sum()

    np.testing.assert_array_equal(jax.hessian(strided)(x), np.diag([0.0, 12.0, 24.0, 0.0]))
    hvp = jax.grad(lambda x: jnp.vdot(jax.grad(strided)(x), jnp.arange(4.0)))(x)
    assert hvp.tolist() == [0, 12, 48, 0]


def test_nan_wins_and_takes_the_gradient():
    x = column(1, jnp.nan, 3, 4)
    f = partial(api.max_pool, window_shape=(2,), strides=2)
    np.testing.assert_array_equal(f(x)[:, 0], [np.nan, 4])
    assert grad_of_sum(f, x)[:, 0].tolist() == [0, 1, 0, 1]
    assert grad_of_sum(f, column(jnp.nan, 1, 3, 4))[:, 0].tolist() == [1, 0, 0, 1]
    assert grad_of_sum(f, column(jnp.nan, jnp.nan, 3, 4))[:, 0].tolist() == [1, 0, 0, 1]
    for pool in (api.max_pool, api.min_pool):
        assert np.isnan(pool(column(jnp.nan, -jnp.inf, jnp.inf), (3,))).all()
    y, index = api.max_pool_with_argmax(plane([[1, 2], [jnp.nan, jnp.nan]]), (2, 2))
    assert np.isnan(y).all() and index.ravel().tolist() == [2]


@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_random_windows_with_ties_nan_and_infinities(rank: int, last: bool):
    rng = np.random.default_rng([rank, last])
    tried = 0
    while tried < 3:
        sizes = tuple(map(int, rng.integers(3, 7 if rank < 3 else 5, rank)))
        window, strides, dilation = (tuple(map(int, rng.integers(1, hi, rank))) for hi in (4, 4, 3))
        pads = [(int(rng.integers(-1, 2)), int(rng.integers(-1, 2))) for _ in range(rank)]
        shape = (2, *sizes, 3) if last else (2, 3, *sizes)
        x = rng.integers(-2, 3, shape).astype(np.float32)
        x[rng.random(shape) < 0.1], x[rng.random(shape) < 0.2] = np.nan, -np.inf
        options = dict(strides=strides, padding=pads, window_dilation=dilation, layout="NHWC" if last else "NCHW")
        try:
            y, index = api.max_pool_with_argmax(x, window, **options)
        except ValueError:
            continue
        tried += 1
        where = oracle.axes(sizes, window, strides, pads, dilation)
        np.testing.assert_array_equal(y, oracle.max_pool(x, where, last))
        np.testing.assert_array_equal(index, oracle.argmax_pool(x, where, last))
        np.testing.assert_array_equal(api.min_pool(x, window, **options), oracle.max_pool(x, where, last, -1.0))
        dy = rng.integers(-8, 9, y.shape).astype(np.float32)
        dx = jax.vjp(partial(api.max_pool, window_shape=window, **options), jnp.asarray(x))[1](jnp.asarray(dy))[0]
        np.testing.assert_array_equal(dx, oracle.max_pool_grad(x, dy, where, last))
        np.testing.assert_array_equal(api.max_unpool(dy, index, window, output_size=sizes, **options), dx)


# --- averages -------------------------------------------------------------------------------------------------------


def test_half_types_are_summed_in_float32():
    x = jnp.ones((1, 256, 256, 1), jnp.float16)
    for f in (partial(api.avg_pool, window_shape=(256, 256)), api.global_avg_pool):
        assert f(x).ravel().tolist() == [1.0]
        g = grad_of_sum(f, x)
        assert g.dtype == jnp.float16
        np.testing.assert_array_equal(g, np.float16(2.0**-16))
    assert api.avg_pool(jnp.ones((4096, 1), jnp.bfloat16), (4096,)).tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_padding_is_counted_or_not(dtype):
    x = plane([[1, 2], [3, 4]], dtype)
    include = api.avg_pool(x, (2, 2), padding="SAME")
    exclude = api.avg_pool(x, (2, 2), padding="SAME", count_include_pad=False)
    assert include.dtype == exclude.dtype == dtype
    assert include.ravel().tolist() == [2.5, 1.5, 1.75, 1]
    assert exclude.ravel().tolist() == [2.5, 3, 3.5, 4]


def test_infinities_stay_in_their_windows():
    y = api.avg_pool(column(1, 2, jnp.inf, 4, 6), (2,))
    assert y[:, 0].tolist() == [1.5, jnp.inf, jnp.inf, 5]
    y = api.adaptive_avg_pool(column(1, 2, 3, 4, jnp.inf), (3,))
    assert y[:, 0].tolist() == [1.5, 3, jnp.inf]


def test_lp_pool_values_and_gradients_at_zero():
    assert api.lp_pool(column(3, -4), 2, (2,)).tolist() == [[5]]
    assert api.lp_pool(column(3, -4), 1, (2,)).tolist() == [[7]]
    for p in (0.5, 1, 1.5, 2, 3, 7):
        assert grad_of_sum(lambda x, p=p: api.lp_pool(x, p, (2,)), jnp.zeros((3, 1))).tolist() == [[0]] * 3
        g = grad_of_sum(lambda x, p=p: api.lp_pool(x, p, (2,)), column(0, 2))
        np.testing.assert_allclose(g, [[0], [1]], rtol=1e-6)
    assert np.isnan(api.lp_pool(column(jnp.nan, 1), 2, (2,))).all()
    x = np.random.default_rng(0).standard_normal((2, 5, 2))
    want = oracle.lp_pool(x, 2.5, oracle.axes((5,), (2,), (1,), [(1, 1)]))
    np.testing.assert_allclose(api.lp_pool(jnp.asarray(x, jnp.float32), 2.5, (2,), padding=1), want, rtol=1e-6)
    y = api.lp_pool(jnp.full((4, 1), 200, jnp.float16), 2, (4,))  # 4 * 200^2 is past float16
    assert (y.dtype, y.tolist()) == (jnp.float16, [[400]])


# --- indices, unpooling, adaptive and global pools ---------------------------------------------------------------------


def test_adaptive_windows():
    assert oracle.adaptive(5, 3) == [[0, 1], [1, 2, 3], [3, 4]]
    x = plane(np.arange(1.0, 26.0).reshape(5, 5))
    y, index = api.adaptive_max_pool(x, (3, 3), return_indices=True)
    assert index[..., 0].tolist() == [[6, 8, 9], [16, 18, 19], [21, 23, 24]]
    assert y[..., 0].tolist() == [[7, 9, 10], [17, 19, 20], [22, 24, 25]]
    assert api.adaptive_avg_pool(x, 3)[..., 0].tolist() == [[4, 5.5, 7], [11.5, 13, 14.5], [19, 20.5, 22]]
    assert api.adaptive_avg_pool(x, (None, 1)).shape == (5, 1, 1)


@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
def test_adaptive_pools_of_many_sizes(last: bool):
    rng = np.random.default_rng(3)
    layout = "NHWC" if last else "NCHW"
    for sizes, outs in [((5, 7), (3, 2)), ((2, 3), (5, 4)), ((6, 4), (3, 4)), ((1, 9), (3, 8))]:
        x = (
            rng.permutation(2 * sizes[0] * sizes[1])
            .reshape((1, *sizes, 2) if last else (1, 2, *sizes))
            .astype(np.float32)
        )
        where = [oracle.adaptive(*a) for a in zip(sizes, outs)]
        y, index = api.adaptive_max_pool(x, outs, return_indices=True, layout=layout)
        np.testing.assert_array_equal(y, oracle.max_pool(x, where, last))
        np.testing.assert_array_equal(index, oracle.argmax_pool(x, where, last))
        dy = rng.integers(-4, 5, y.shape).astype(np.float32)
        _, pull = jax.vjp(partial(api.adaptive_max_pool, output_size=outs, layout=layout), jnp.asarray(x))
        np.testing.assert_array_equal(pull(jnp.asarray(dy))[0], oracle.max_pool_grad(x, dy, where, last))
        average = partial(api.adaptive_avg_pool, output_size=outs, layout=layout)
        np.testing.assert_allclose(average(x), oracle.avg_pool(x, where, last), rtol=1e-6)
        t = rng.integers(-4, 5, x.shape).astype(np.float32)  # <average(t), dy> = <t, pulled back dy>
        pulled = jax.linear_transpose(average, t)(jnp.asarray(dy))[0]
        np.testing.assert_allclose(np.vdot(t, pulled), np.vdot(average(t), dy), rtol=1e-5, atol=1e-4)


def test_unpool_is_the_inverse_of_pool_and_sums_what_overlaps():
    x = plane(np.arange(1.0, 17.0).reshape(4, 4))
    y, index = api.max_pool_with_argmax(x, (2, 2), strides=2)
    back = api.max_unpool(y, index, (2, 2), strides=2)
    assert back[..., 0].tolist() == [[0, 0, 0, 0], [0, 6, 0, 8], [0, 0, 0, 0], [0, 14, 0, 16]]
    y, index = api.max_pool_with_argmax(plane(np.arange(25.0).reshape(5, 5)), (2, 2), strides=2)
    assert api.max_unpool(y, index, (2, 2), strides=2, output_size=(5, 5)).shape == (5, 5, 1)
    y, index = api.max_pool_with_argmax(column(1, 5, 2), (2,))
    assert (index[:, 0].tolist(), api.max_unpool(y, index, (2,))[:, 0].tolist()) == ([1, 1], [0, 10, 0])
    assert jax.grad(lambda y: api.max_unpool(y, index, (2,))[1, 0] * 3)(y)[:, 0].tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int16])
def test_unpool_places_nothing_for_an_index_outside_its_window(dtype):
    index = jnp.array([3, 3], jnp.int32).astype(dtype)[:, None]
    assert api.max_unpool(column(1, 2), index, (2,), strides=2)[:, 0].tolist() == [0, 0, 0, 2]
    for far in (-1, 4, 2**15 - 1):
        got = api.max_unpool(column(1, 2), jnp.array([far, 2], jnp.int32).astype(dtype)[:, None], (2,), strides=2)
        assert got[:, 0].tolist() == [0, 0, 2, 0]


def test_global_pools():
    x = jnp.asarray(np.random.default_rng(0).permutation(2 * 3 * 4 * 5).reshape(2, 3, 4, 5), jnp.float32)
    np.testing.assert_array_equal(api.global_max_pool(x), x.max((1, 2)))
    np.testing.assert_array_equal(api.global_max_pool(x, layout="NCHW", keepdims=True), x.max((2, 3), keepdims=True))
    np.testing.assert_allclose(api.global_avg_pool(x), x.mean((1, 2)), rtol=1e-6)
    np.testing.assert_allclose(api.global_avg_pool(x[0], layout="NWC"), x[0].mean(1), rtol=1e-6)
    np.testing.assert_allclose(api.global_avg_pool(x[0], layout="NCHW"), x[0].mean((1, 2)), rtol=1e-6)


def test_large_windows_trace_and_run_fast():
    start = time.perf_counter()
    x = jnp.arange(256.0 * 256).reshape(1, 256, 256, 1)
    value, g = jax.value_and_grad(lambda x: api.global_max_pool(x).sum())(x)
    assert value == 65535 and g.ravel()[-1] == 1 and g.sum() == 1
    assert len(str(jax.make_jaxpr(lambda x: api.max_pool(x, (64, 64)))(x))) < 2000
    assert time.perf_counter() - start < 20


LARGE = {
    "global_avg": partial(api.global_avg_pool),
    "global_avg_1d": lambda x: api.global_avg_pool(x.reshape(2, -1, 32), layout="NWC"),
    "avg_same": partial(api.avg_pool, window_shape=(31, 31), padding="SAME"),
    "avg_strided": partial(api.avg_pool, window_shape=(24, 24), strides=8, padding=3, count_include_pad=False),
    "lp": partial(api.lp_pool, p=2, window_shape=(28, 28)),
    "adaptive": partial(api.adaptive_avg_pool, output_size=(7, 5)),
    "max_same": partial(api.max_pool, window_shape=(31, 31), padding="SAME"),
}


@pytest.mark.parametrize("pool", LARGE.values(), ids=LARGE.keys())
def test_programs_do_not_grow_with_the_window_nor_fold_it(pool):
    """Gradient with a constant cotangent, and forward of a constant: what XLA folds when it compiles stays small."""
    shape = (2, 56, 56, 32)
    start = time.perf_counter()
    both = jax.jit(lambda x: (grad_of_sum(pool, x), pool(jnp.ones(shape)))).lower(jnp.ones(shape))
    text = both.as_text()
    assert "reduce_window" not in text and text.count("\n") < 1500
    both.compile()
    assert time.perf_counter() - start < 20  # 2 s alone; whole-image windows took minutes


def _slow_sums(x, where, divisor):
    """Oracle of averages along axes 1 and 2 of (N, H, W, C) in float64, and its transpose by a matrix."""
    m = [np.array([[i in w for i in range(x.shape[k + 1])] for w in where[k]], np.float64) for k in range(2)]
    return np.einsum("ah,bw,nhwc->nabc", *m, x) / divisor, m


@pytest.mark.parametrize("window", [1, 2, 3, 9, 12, 16, 17])
def test_average_windows_of_every_width_stride_and_dilation(window: int):
    rng = np.random.default_rng(window)
    x = rng.standard_normal((1, 20, 18, 2)).astype(np.float32)
    for stride, dilation, pads in [(1, 1, (0, 0)), (2, 1, (0, 1)), (window, 1, (0, 0)), (4, 1, (-1, -2)), (19, 1, (0, 0)),
                                   (1, 2, (8, 8)), (3, 2, (8, 7))]:  # fmt: skip
        reach = (window - 1) * dilation + 1
        pads = tuple(min(v, reach - 1) for v in pads)
        if reach > 18 + sum(pads):
            continue
        f = partial(
            api.avg_pool, window_shape=(window,) * 2, strides=stride, padding=[pads] * 2, window_dilation=dilation
        )
        where = oracle.axes((20, 18), (window,) * 2, (stride,) * 2, [pads] * 2, (dilation,) * 2)
        want, m = _slow_sums(x, where, window**2)
        y, pull = jax.vjp(f, jnp.asarray(x))
        np.testing.assert_allclose(y, want, atol=2e-6)
        dy = rng.standard_normal(y.shape).astype(np.float32)
        np.testing.assert_allclose(pull(dy)[0], np.einsum("ah,bw,nabc->nhwc", *m, dy) / window**2, atol=2e-6)


@pytest.mark.parametrize("pool, sign", [(api.max_pool, 1.0), (api.min_pool, -1.0)])
@pytest.mark.parametrize(
    "window, stride, dilation", [(9, 1, 1), (12, 1, 1), (12, 4, 1), (7, 7, 1), (3, 5, 1), (10, 1, 2)]
)
def test_wide_maxima_keep_ties_nan_and_the_sign_of_zero(pool, sign, window, stride, dilation):
    rng = np.random.default_rng(window)
    x = rng.choice(
        np.float32([-0.0, 0.0, -1, -np.inf, np.inf, np.nan]), (2, 24, 24, 3), p=[0.4, 0.4, 0.14, 0.04, 0.01, 0.01]
    )
    x *= sign
    options = dict(strides=stride, padding=[(2, 1)] * 2, window_dilation=dilation)
    y, pull = jax.vjp(partial(pool, window_shape=(window,) * 2, **options), jnp.asarray(x))
    where = oracle.axes((24, 24), (window,) * 2, (stride,) * 2, [(2, 1)] * 2, (dilation,) * 2)
    index = oracle.argmax_pool(x, where) if sign > 0 else oracle.argmax_pool(-x, where)
    want = np.take_along_axis(x.reshape(2, -1, 3), index.reshape(2, -1, 3), 1).reshape(y.shape)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(
        np.signbit(y),
        np.signbit(want) if not np.isnan(want).any() else np.where(np.isnan(want), np.signbit(y), np.signbit(want)),
    )
    dy = rng.integers(-8, 9, y.shape).astype(np.float32)
    np.testing.assert_array_equal(
        pull(jnp.asarray(dy))[0],
        oracle.max_pool_grad(x, dy, where, True) if sign > 0 else oracle.max_pool_grad(-x, dy, where, True),
    )


def test_a_maximum_without_its_index_computes_none():
    x = jnp.ones((2, 8, 8, 4))
    for f in (
        partial(api.max_pool, window_shape=(2, 2), strides=2),
        api.global_max_pool,
        partial(api.max_pool, window_shape=(3, 3)),
    ):
        assert "s32[" not in jax.jit(f).lower(x).compile().as_text()
    index = jax.jit(partial(api.max_pool_with_argmax, window_shape=(2, 2))).lower(x).compile().as_text()
    assert "s32[" in index


TRANSFERS = {
    "max": partial(api.max_pool, window_shape=(2, 2)),
    "argmax": lambda x: api.max_pool_with_argmax(x, (2, 2))[0],
    "avg": partial(api.avg_pool, window_shape=(2, 2), padding="SAME", count_include_pad=False),
    "lp": partial(api.lp_pool, p=3, window_shape=(2, 2)),
    "adaptive_avg": partial(api.adaptive_avg_pool, output_size=(3, 3)),
    "adaptive_max": partial(api.adaptive_max_pool, output_size=(3, 3)),
    "global_avg": api.global_avg_pool,
    "global_max": api.global_max_pool,
}
# jax 0.10 transposes what was linearised op by op when called eagerly, and moves the constants in it to the device.
WHOLE = jax.__version_info__ >= (0, 11)


@pytest.mark.parametrize("pool", TRANSFERS.values(), ids=TRANSFERS.keys())
def test_eager_derivatives_transfer_nothing(pool):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 5, 2)), jnp.float32)
    y = pool(x)
    with jax.transfer_guard("disallow"):
        jax.jvp(pool, (x,), (x,))
        if pool is not TRANSFERS["lp"] or WHOLE:
            jax.vjp(pool, x)[1](y)
        jax.jvp(lambda x: jax.jvp(pool, (x,), (x,))[1], (x,), (x,))


def test_symbolic_image_sizes_name_a_remedy():
    h, c = jax.export.symbolic_shape("h, c")
    x = jax.ShapeDtypeStruct((1, h, 8, 3), jnp.float32)
    for pool in (api.global_avg_pool, partial(api.max_pool, window_shape=(2, 2))):
        with pytest.raises(ValueError, match="symbolic spatial sizes.*export once for each image size"):
            jax.eval_shape(pool, x)
    f = jax.jit(lambda x: (api.max_pool(x, (3, 3)), api.avg_pool(x, (9, 9), strides=3, padding="SAME")))
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((c, 12, 12, c), jnp.float32))
    x = jnp.arange(576.0).reshape(2, 12, 12, 2)
    for got, want in zip(exported.call(x), f(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("count, dtype", [(256, jnp.uint8), (257, jnp.uint16), (65536, jnp.uint16), (65537, jnp.int32)])
def test_places_take_the_smallest_type(count: int, dtype):
    p = regular_of((count,), (count,), (1,), ((0, 0),), (1,), True)
    y, place = primitive.max_pool(p, jnp.arange(count, dtype=jnp.float32)[None, :, None])
    assert (place.dtype, int(place.ravel()[0]), float(y.ravel()[0])) == (dtype, count - 1, count - 1)


# --- shapes and batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (2,), (2, 3), (0,), (2, 0, 2)])
def test_any_number_of_batch_axes(lead):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*lead, 4, 5, 3)), jnp.float32)
    flat = x.reshape(-1, 4, 5, 3)
    for f in (api.max_pool, api.avg_pool, api.min_pool):
        y = f(x, (2, 2), (2, 1))
        assert y.shape == (*lead, 2, 4, 3)
        np.testing.assert_array_equal(y.reshape(-1, 2, 4, 3), f(flat, (2, 2), (2, 1)))
        assert grad_of_sum(lambda x, f=f: f(x, (2, 2), (2, 1)), x).shape == x.shape
    assert api.max_pool(jnp.moveaxis(x, -1, -3), (2, 2), layout="NCHW").shape == (*lead, 3, 3, 4)
    assert api.global_avg_pool(x).shape == (*lead, 3)


def test_no_channels_and_many_images():
    assert api.max_pool(jnp.ones((2, 4, 4, 0)), (2, 2)).shape == (2, 3, 3, 0)
    x = jnp.arange(70000.0)[:, None, None] + jnp.array([0.0, 1.0])[:, None]
    rows = jnp.array([0, 65535, 65536, 69999])
    np.testing.assert_array_equal(api.max_pool(x, (2,))[rows, 0, 0], rows + 1.0)
    np.testing.assert_array_equal(api.avg_pool(x, (2,))[rows, 0, 0], rows + 0.5)
    np.testing.assert_array_equal(grad_of_sum(partial(api.max_pool, window_shape=(2,)), x)[rows, :, 0], [[0, 1]] * 4)


def test_images_past_two_to_the_31_elements_trace():
    for shape in [(190, 64, 64, 2933), (1024, 64, 228, 228)]:
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        f = partial(api.max_pool, window_shape=(3, 3), strides=2, padding=1)
        y = jax.eval_shape(f, x)
        assert y.shape == (shape[0], shape[1] // 2, shape[2] // 2, shape[3])
        p = regular_of(shape[1:3], (3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1), True)
        assert primitive.max_pool.limit(p, (x,)) is None  # one image is what counts


def vmapped_loop(f, *args, axes):
    pick = [lambda i, a=a, d=d: a if d is None else jnp.take(a, i, axis=d) for a, d in zip(args, axes)]
    size = next(a.shape[d] for a, d in zip(args, axes) if d is not None)
    return jnp.stack([f(*(g(i) for g in pick)) for i in range(size)])


@pytest.mark.parametrize("op", [primitive.max_pool_gather, primitive.max_pool_scatter], ids=["gather", "scatter"])
@pytest.mark.parametrize("last", [True, False], ids=["nhwc", "nchw"])
def test_batches_of_one_operand_alone(op, last: bool):
    p = regular_of((4, 5), (2, 2), (2, 1), ((0, 0), (0, 0)), (1, 1), last)
    rng = np.random.default_rng(0)
    data = p.in_size if op is primitive.max_pool_gather else p.out_size
    t = jnp.asarray(rng.integers(-9, 10, p.image((3,) * 4, data, (3, 2, 2))), jnp.float32)
    place = jnp.asarray(rng.integers(0, 5, p.image((3,) * 4, p.out_size, (3, 2, 2))), jnp.uint8)

    def f(t, place):
        return op(p, t, place)[0]

    def check(outer, inner, t, place):  # of each vmap: the batch axis of (data, places)
        t = t if outer[0] == inner[0] == 0 else t[0] if inner[0] == 0 else t[:, 0] if outer[0] == 0 else t[0, 0]
        place = (
            place
            if outer[1] == inner[1] == 0
            else place[0]
            if inner[1] == 0
            else place[:, 0]
            if outer[1] == 0
            else place[0, 0]
        )
        many = jax.vmap(jax.vmap(f, inner), outer)
        got = many(t, place)
        want = vmapped_loop(lambda a, b: vmapped_loop(f, a, b, axes=inner), t, place, axes=outer)
        np.testing.assert_array_equal(got, want)
        # and the transpose sums over the axes that the data does not have
        ct = jnp.asarray(rng.integers(-3, 4, got.shape), jnp.float32)
        pulled = jax.linear_transpose(lambda t: many(t, place), t)(ct)[0]
        assert pulled.shape == t.shape
        np.testing.assert_array_equal(jnp.vdot(pulled, t), jnp.vdot(ct, got))

    both, data_only, places_only = (0, 0), (0, None), (None, 0)
    for outer in (both, data_only, places_only):
        for inner in (both, data_only, places_only):
            check(outer, inner, t, place)


def test_jacobians_of_batches_broadcast_no_indices():
    x = jnp.asarray(np.random.default_rng(0).permutation(24).reshape(2, 6, 2), jnp.float32)
    f = partial(api.max_pool, window_shape=(2,))
    np.testing.assert_array_equal(jax.jacfwd(f)(x), jax.jacrev(f)(x))
    np.testing.assert_array_equal(jax.vmap(jax.jacfwd(f))(x), jax.vmap(jax.jacrev(f))(x))
    with jaxprims.use("cuda"):  # also where no library is built
        text = jax.jit(jax.jacfwd(f)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<24x2x5x2xui8>" not in text and "tensor<2x5x2xui8>" in text


def test_gather_and_scatter_are_transposes_for_any_index():
    with jax.enable_x64(True):
        p = regular_of((4, 4), (2, 3), (1, 2), ((1, 0), (1, 1)), (2, 1), True)
        rng = np.random.default_rng(0)
        place = jnp.asarray(rng.integers(0, 8, (2, *p.out_size, 3)), jnp.uint8)  # also outside image and window
        t, dy = rng.standard_normal((2, 4, 4, 3)), rng.standard_normal((2, *p.out_size, 3))
        (y,), (dx,) = primitive.max_pool_gather(p, t, place), primitive.max_pool_scatter(p, dy, place)
        np.testing.assert_allclose(np.vdot(y, dy), np.vdot(t, dx), rtol=1e-12)
        check_grads(lambda t: primitive.max_pool_gather(p, t, place)[0], (jnp.asarray(t),), 2)


def test_the_gradient_has_the_same_bits_every_time():
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 12, 12, 4)), jnp.float32)
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 6, 4)), jnp.float32)
    f = partial(api.max_pool, window_shape=(3, 3), strides=2, padding=1)
    runs = {np.asarray(jax.jit(lambda x, dy: jax.vjp(f, x)[1](dy)[0])(x, dy)).tobytes() for _ in range(20)}
    assert len(runs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_has_the_same_bits_every_time_on_a_gpu(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, (64, 112, 112, 64)), dtype)
    f = partial(api.max_pool, window_shape=(3, 3), strides=2, padding=1)
    step = jax.jit(lambda x: jax.vjp(f, x)[1](jnp.sin(f(x)))[0])
    first = step(x)
    assert all(bool((step(x) == first).all()) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(190, 64, 64, 2933), (1024, 64, 228, 228)])
def test_tensors_past_two_to_the_31_elements_on_a_gpu(shape):
    x = jnp.zeros(shape, jnp.bfloat16).at[-1, -1, -1, -1].set(3).at[0, 0, 0, 0].set(2)
    f = partial(api.max_pool, window_shape=(2, 2), strides=2)
    y, g = jax.jit(jax.value_and_grad(lambda x: f(x).astype(jnp.float32).sum()))(x)
    assert y == 5
    assert g[-1, -1, -1, -1] == 1 and g[0, 0, 0, 0] == 1 and g[-1, -2, -2, -2] == 1


# --- Flax -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["VALID", "SAME", ((1, 0), (0, 1))])
@pytest.mark.parametrize("strides", [None, (2, 1)])
def test_same_numbers_as_flax(padding, strides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn = pytest.importorskip("flax.linen.pooling")
    lead = (2, 3) if isinstance(padding, str) else (2,)  # Flax pads explicitly with one batch axis only
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*lead, 5, 6, 2)), jnp.float32)
    for name in ("max_pool", "min_pool"):
        got, want = (getattr(m, name)(x, (2, 3), strides, padding) for m in (api, nn))
        np.testing.assert_array_equal(got, want)
    x = x.reshape(-1, 5, 6, 2)
    for include in (True, False):
        got, want = (m.avg_pool(x, (2, 3), strides, padding, include) for m in (api, nn))
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


# --- refusals -------------------------------------------------------------------------------------------------------

X = jnp.ones((2, 4, 4, 3))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: api.max_pool(jnp.ones((1, 1)), (3,), 3, 3),
            ValueError,
            r"padding\[0\]=\(3, 3\) is not smaller than the window",
        ),
        (lambda: api.avg_pool(jnp.ones((1, 1)), (2,), padding=1, window_dilation=2), ValueError, "without any element"),
        (lambda: api.max_pool(X, (5, 2)), ValueError, r"window_shape\[0\]=5 .* the padded input has 4"),
        (lambda: api.max_pool(X, (2, 2), window_dilation=2**31 - 1), ValueError, "spans 2147483648 elements"),
        (lambda: api.max_pool(X, (2, 2), strides=2**31), ValueError, "strides.*below 2\\^31"),
        (lambda: api.max_pool(X, (2, 2), strides=0), ValueError, "strides.*at least 1"),
        (lambda: api.max_pool(X, (2, 2), window_dilation=-1), ValueError, "window_dilation.*at least 1"),
        (lambda: api.max_pool(X, (2, 2), padding="FULL"), ValueError, "padding='FULL' is not known"),
        (lambda: api.max_pool(X, 2), TypeError, "window_shape=2 must be a sequence"),
        (lambda: api.max_pool(X, (2,) * 4), ValueError, "one to three"),
        (lambda: api.max_pool(X, (2, 2), layout="HWCN"), ValueError, "layout='HWCN' is not known"),
        (lambda: api.max_pool(X, (2, 2), layout="NWC"), ValueError, "layout='NWC' names 3 axes"),
        (lambda: api.max_pool(jnp.ones((4, 4)), (2, 2)), ValueError, "need at least 3 axes"),
        (lambda: api.max_pool(X.astype(jnp.complex64), (2, 2)), TypeError, "dtype complex64; maxima need an ordered"),
        (lambda: api.max_pool(X > 0, (2, 2)), TypeError, "dtype bool"),
        (lambda: api.avg_pool(X.astype(jnp.int32), (2, 2)), TypeError, "inputs has dtype int32"),
        (lambda: api.global_avg_pool(X.astype(jnp.int32)), TypeError, "inputs has dtype int32"),
        (lambda: api.lp_pool(X, 0, (2, 2)), ValueError, "p=0 must be positive and finite"),
        (lambda: api.lp_pool(X, float("inf"), (2, 2)), ValueError, "max_pool for infinity"),
        (lambda: api.adaptive_avg_pool(X, (0, 2)), ValueError, r"output_size\[0\]=0 must be at least 1"),
        (lambda: api.adaptive_avg_pool(X, 0), ValueError, "output_size=0 must be at least 1"),
        (lambda: api.global_max_pool(jnp.ones((2, 0, 4, 3))), ValueError, "an empty image has no maximum"),
        (lambda: api.max_unpool(X, jnp.zeros(X.shape), (2, 2)), TypeError, "indices has dtype float32"),
        (lambda: api.max_unpool(X, jnp.zeros((2, 4, 4, 1), jnp.int32), (2, 2)), ValueError, "they must be equal"),
        (
            lambda: api.max_unpool(X, jnp.zeros(X.shape, jnp.int32), (2, 2), padding="SAME"),
            ValueError,
            "does not tell the output's size; give output_size",
        ),
        (
            lambda: api.max_unpool(X, jnp.zeros(X.shape, jnp.int32), (2, 2), 2, output_size=(12, 8)),
            ValueError,
            r"output_size=\(12, 8\) is pooled to \(6, 4\)",
        ),
    ],
)
def test_refusals_name_the_argument_and_the_remedy(call, error, text):
    with pytest.raises(error, match=text):
        call()
    with pytest.raises(error, match=text):
        jax.eval_shape(call)
