"""Norms: exact answers by hand, what other libraries got wrong, statistics over devices, Flax's numbers, refusals."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxprims.norm import api
from tests.oracle import norm as oracle


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def normal(*shape, seed=0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def near(got, want, tol):
    np.testing.assert_allclose(f64(got), f64(want), rtol=0, atol=tol)


# --- variance: deviations, never E[x^2] - E[x]^2 ------------------------------------------------------------------------


def test_layer_norm_of_a_large_mean_and_small_deviations():
    x = jnp.asarray(1e4 + np.arange(16) * 1e-3, jnp.float32)
    want = oracle.layer_norm(f64(x), eps=1e-5)
    near(want[:3], [-1.33133, -1.15382, -0.97631], 1e-5)
    near(api.layer_norm(x, eps=1e-5), want, 1e-3)
    w = normal(16, seed=1)
    got = jax.grad(lambda x: jnp.sum(api.layer_norm(x, eps=1e-5) * w))(x)
    with jax.enable_x64(True):
        exact = jax.grad(lambda x: jnp.sum(api.layer_norm(x, eps=1e-5) * f64(w)))(jnp.asarray(f64(x)))
    near(got, exact, 1e-3 * np.abs(exact).max())


@pytest.mark.parametrize("mask", [None, np.arange(1000)[:, None] != 3], ids=["all", "mask"])
def test_batch_norm_of_a_large_mean_and_small_deviations(mask):
    x = jnp.asarray(1e4 + 0.01 * np.random.default_rng(0).standard_normal((1000, 1)), jnp.float32)
    y, mean, var = api.batch_norm(x, eps=1e-5, mask=mask)
    want = oracle.batch_norm(f64(x), mask=mask, eps=1e-5)
    near(y, want[0], 1e-3 * np.abs(want[0]).max())
    near(var, want[2], 1e-3 * want[2].max())
    assert abs(float(y.std()) - 0.9524) < 5e-3  # E[x^2] - E[x]^2 gives 3.1, two plain passes 0.9516
    assert abs(float(mean[0]) - want[1][0]) <= 1e-3


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("value", [0.1, 1e4 + 1 / 3, -7e-5])
def test_a_constant_input_gives_exactly_beta(value, eps):
    x = jnp.full((5, 3, 4), value, jnp.float32)
    s, b = jnp.asarray([3.0, 1e3, -2.0, 0.0]), jnp.asarray([0.5, -1.0, 2.0, 0.25])
    beta = jnp.broadcast_to(b, x.shape)
    y, mean, var = api.batch_norm(x, s, b, eps=eps)
    assert (y == beta).all() and (mean == x[0, 0]).all() and (var == 0).all()
    assert (api.batch_norm(x, s, b, eps=eps, mask=jnp.arange(5)[:, None, None] > 1)[0] == beta).all()
    assert (api.layer_norm(x, s, b, eps=eps) == beta).all()
    assert (api.group_norm(x, s, b, num_groups=2, eps=eps) == beta).all()
    assert (api.instance_norm(x, s, b, eps=eps) == beta).all()
    grads = jax.grad(lambda x: jnp.sum(jnp.sin(api.layer_norm(x, s, b, eps=eps))))(x)
    assert jnp.isfinite(grads).all()


# --- half precision -----------------------------------------------------------------------------------------------------


def test_half_inputs_have_float32_statistics():
    x = jnp.asarray([6e4, -6e4, 6e4, -6e4], jnp.float16)
    assert api.layer_norm(x).tolist() == [1, -1, 1, -1]
    y, mean, var = api.batch_norm(x[:, None], jnp.ones(1), jnp.zeros(1))
    assert y[:, 0].tolist() == [1, -1, 1, -1] and mean.dtype == var.dtype == jnp.float32 and jnp.isfinite(var).all()
    rows = jnp.arange(30, dtype=jnp.float16).reshape(3, 10)
    y = api.layer_norm(rows)
    assert (y == y[0]).all()
    near(y[0, [0, -1]], [-1.566, 1.566], 1e-3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_float32_scale_and_bias_beside_half_inputs(dtype):
    x, s, b = normal(4, 8, dtype=dtype), normal(8, seed=1), normal(8, seed=2)
    y = api.layer_norm(x, s, b)
    assert y.dtype == dtype
    near(y, oracle.layer_norm(f64(x), f64(s), f64(b)), 4 * float(jnp.finfo(dtype).eps))
    ds, db = jax.grad(lambda s, b: api.layer_norm(x, s, b).astype(jnp.float32).sum(), (0, 1))(s, b)
    assert ds.dtype == db.dtype == jnp.float32
    near(db, jnp.full(8, 4.0), 1e-6)


# --- conventions --------------------------------------------------------------------------------------------------------


def test_running_variance_is_the_biased_one():
    x = jnp.asarray([np.arange(i, i + 4) for i in range(1, 5)], jnp.float32).reshape(16, 1)
    _, mean, var = api.batch_norm(x)
    assert mean[0] == 4 and var[0] == 2.5
    near(0.9 * 1 + 0.1 * var, [1.15], 1e-6)  # Flax, momentum 0.9
    near(0.9 * 1 + 0.1 * var * 16 / 15, [1.16667], 1e-5)  # PyTorch, momentum 0.1, unbiased
    _, mean, var = api.batch_norm(jnp.asarray([[2.0], [2.0], [-4.0]]))
    assert mean[0] == 0
    near(0.9 * 1 + 0.1 * var, [1.7], 1e-6)
    y, mean, var = api.batch_norm(jnp.asarray([[7.0, -3.0]]), bias=jnp.asarray([1.0, 2.0]))  # one element: its own mean
    assert y.tolist() == [[1, 2]] and mean.tolist() == [7, -3] and var.tolist() == [0, 0]


def test_group_norm_by_hand():
    x = jnp.arange(8.0).reshape(1, 2, 1, 4)
    want = [-1.2127, -0.7276, -1.2127, -0.7276, 0.7276, 1.2127, 0.7276, 1.2127]
    near(api.group_norm(x, num_groups=2, eps=0.0).ravel(), want, 1e-4)
    near(api.group_norm(x, group_size=2, eps=0.0).ravel(), want, 1e-4)
    channels_first = api.group_norm(x.transpose(0, 3, 1, 2), num_groups=2, axis=1, eps=0.0)
    near(channels_first.transpose(0, 2, 3, 1).ravel(), want, 1e-4)


def test_local_response_norm_conventions():
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0]])
    divided = api.local_response_norm(x, size=3, alpha=3.0, beta=1.0, k=1.0)
    whole = api.local_response_norm(x, size=3, alpha=1.0, beta=1.0, k=1.0, divide_by_size=False)
    near(divided, [[1 / 6, 2 / 15, 3 / 30, 4 / 26]], 1e-7)
    assert (divided == whole).all()
    even = api.local_response_norm(x, size=2, alpha=1.0, beta=1.0, k=1.0, divide_by_size=False)  # channels c - 1 and c
    near(even, [[1 / 2, 2 / 6, 3 / 14, 4 / 26]], 1e-7)
    near(api.local_response_norm(x[0, :, None], size=2, alpha=2.0, beta=1.0, axis=0)[:, 0], even[0], 1e-7)
    near(api.local_response_norm(x, size=9, alpha=9.0, beta=1.0), x / 31, 1e-7)  # wider than the channels


@pytest.mark.parametrize("size", [1, 2, 8, 9, 12, 63, 511])
def test_local_response_norm_of_wide_windows(size):
    x, w = normal(3, 80), normal(3, 80, seed=1)
    f = lambda x: api.local_response_norm(x, size=size, alpha=0.1, divide_by_size=False)  # noqa: E731
    near(f(x), oracle.local_response_norm(f64(x), size=size, alpha=0.1, divide_by_size=False), 2e-6)
    assert str(jax.make_jaxpr(jax.jit(jax.grad(lambda x: jnp.vdot(f(x), w))))(x)).count("\n") < 60
    with jax.enable_x64(True):
        check_grads(f, (jnp.asarray(f64(x[:1, :20])),), 2, rtol=1e-5, atol=1e-5)


def test_local_response_norm_compiles_fast_and_cancels_nothing():
    start = time.perf_counter()
    x = jnp.ones((8, 1024)).at[:, 0].set(1e6)
    f = jax.jit(jax.value_and_grad(lambda x: api.local_response_norm(x, size=511, alpha=1.0).sum()))
    jax.block_until_ready(f(x))
    assert f.lower(x).as_text().count("\n") < 1000
    assert time.perf_counter() - start < 15  # a loop over the window took 30
    # behind the windows with 1e12 in them the sum of 511 ones is exact
    y = api.local_response_norm(x, size=511, alpha=1.0, beta=1.0, divide_by_size=False)
    near(y[:, 600], np.full(8, 1 / 512), 1e-9)


def test_local_response_norm_of_a_symbolic_number_of_channels():
    f = jax.jit(lambda x: api.local_response_norm(x, size=5, alpha=1.0))
    (c,) = jax.export.symbolic_shape("c")
    for fn in (f, jax.jit(jax.grad(lambda x: f(x).sum()))):
        exported = jax.export.export(fn)(jax.ShapeDtypeStruct((2, c), jnp.float32))
        for n in (1, 3, 12):
            near(exported.call(normal(2, n)), fn(normal(2, n)), 1e-6)


M = jnp.ones((2, 3, 1)).at[0, 1].set(0)
TRANSFERS = {
    "batch": lambda x: api.batch_norm(x)[0],
    "batch_all": lambda x: api.batch_norm(x, mask=M),
    "batch_members": lambda x: jax.vmap(lambda x: api.batch_norm(x, axis_name="i"), axis_name="i")(x),
    "batch_groups": lambda x: jax.vmap(
        lambda x: api.batch_norm(x, axis_name="i", axis_index_groups=[[0], [1]]), axis_name="i"
    )(x),
    "layer": api.layer_norm,
    "layer_mask": lambda x: api.layer_norm(x, mask=M),
    "rms": api.rms_norm,
    "group": lambda x: api.group_norm(x, num_groups=2, mask=M, activation="silu"),
    "instance": api.instance_norm,
    "response": api.local_response_norm,
}
# jax 0.10 transposes what was linearised op by op when called eagerly, and moves the constants in it to the device.
WHOLE = jax.__version_info__ >= (0, 11)


@pytest.mark.parametrize("norm", TRANSFERS.values(), ids=TRANSFERS.keys())
def test_eager_derivatives_transfer_nothing(norm):
    x = normal(2, 3, 4)
    y = norm(x)
    with jax.transfer_guard("disallow"):
        norm(x)
        jax.jvp(norm, (x,), (x,))
        if norm not in (TRANSFERS["batch_members"], TRANSFERS["batch_groups"]) or WHOLE:
            jax.vjp(norm, x)[1](y)
        jax.jvp(lambda x: jax.jvp(norm, (x,), (x,))[1], (x,), (x,))


def test_a_row_without_elements_has_mean_0_and_var_0():
    x, mask = normal(2, 3, 4), jnp.zeros((2, 3, 4))
    for norm in (api.layer_norm, api.rms_norm, api.instance_norm, lambda x, **k: api.group_norm(x, num_groups=2, **k)):
        near(norm(x, mask=mask, eps=0.25), 2 * x, 1e-6)


def test_residual_of_layer_and_rms_norm_is_added_before():
    x, r = normal(3, 4), normal(3, 4, seed=1)
    for fn in (api.layer_norm, api.rms_norm):
        y, h = fn(x, residual=r)
        assert (h == x + r).all()
        near(y, fn(x + r), 1e-6)


# --- axes and vmap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_layer_norm_over_any_axes(axis):
    x = normal(3, 4, 5)
    axes = (axis,) if isinstance(axis, int) else axis
    s, b = normal(*(x.shape[a] for a in axes), seed=1), normal(*(x.shape[a] for a in axes), seed=2)
    near(api.layer_norm(x, s, b, axis=axis), oracle.layer_norm(f64(x), f64(s), f64(b), axis=axis), 3e-6)


def test_vmap_is_the_batched_call():
    x, s, b = normal(3, 4, 2, 6), normal(6, seed=1), normal(6, seed=2)
    for axis in (0, 1, 2):
        p = normal(x.shape[axis + 1], seed=3)
        got = jax.vmap(lambda v, p=p, axis=axis: api.layer_norm(v, p, p, axis=axis))(x)
        near(got, api.layer_norm(x, p, p, axis=axis + 1), 1e-6)
    y, mean, var = jax.vmap(api.batch_norm, (0, None, None))(x, s, b)  # statistics of each member, nothing kept
    for i in range(3):
        for got, want in zip((y[i], mean[i], var[i]), oracle.batch_norm(f64(x[i]), f64(s), f64(b)), strict=True):
            near(got, want, 5e-6)
    _, mean, _ = jax.vmap(api.batch_norm, (None, 0, None))(x[0], jnp.stack([s, 2 * s]), b)
    near(mean, np.broadcast_to(f64(x[0]).mean((0, 1)), (2, 6)), 1e-6)


# --- statistics over members ----------------------------------------------------------------------------------------------


def test_mask_leaves_elements_out_even_nan():
    x = normal(4, 5, 3)
    mask = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 5, 1)))
    dirty = jnp.where(mask == 0, jnp.nan, x)
    _, mean, var = api.batch_norm(dirty, mask=mask)
    want = oracle.batch_norm(f64(x), mask=np.asarray(mask))
    near(mean, want[1], 1e-6)
    near(var, want[2], 1e-6)
    y, mean, var = api.batch_norm(x, mask=jnp.zeros((4, 5, 1)), eps=1.0)
    assert (mean == 0).all() and (var == 0).all() and (y == x).all()
    for fn in (api.layer_norm, api.group_norm):
        kwargs = {} if fn is api.layer_norm else {"num_groups": 3}
        near(fn(x, mask=jnp.ones((1, 1, 1)), **kwargs), fn(x, **kwargs), 2e-5)


def _objective(x, s, b, w, mask=None, **kwargs):
    y, mean, var = api.batch_norm(x, s, b, activation="silu", mask=mask, **kwargs)
    return jnp.sum(y * w), (mean, var)


@pytest.mark.parametrize("masked", [False, True])
def test_axis_name_under_vmap_is_one_batch_with_unequal_counts(masked):
    x, s, b, w = normal(8, 3, 4), normal(4, seed=1), normal(4, seed=2), normal(8, 3, 4, seed=3)
    mask = jnp.asarray(np.random.default_rng(2).integers(0, 2, (8, 3, 1))) if masked else jnp.ones((8, 3, 1))
    mask = mask.at[2:4].set(0) if masked else mask  # a member without any element
    want, grads = jax.value_and_grad(_objective, (0, 1, 2), has_aux=True)(x, s, b, w, mask)

    def member(x, s, b, w, mask):
        value, stats = _objective(x, s, b, w, mask, axis_name="i")
        return jax.lax.psum(value, "i"), stats

    def whole(x, s, b):
        parts = (v.reshape(4, 2, *v.shape[1:]) for v in (x, w, mask))
        value, stats = jax.vmap(lambda x, w, m: member(x, s, b, w, m), axis_name="i")(*parts)
        return value[0], jax.tree.map(lambda v: v[0], stats)

    got, got_grads = jax.value_and_grad(whole, (0, 1, 2), has_aux=True)(x, s, b)
    for g, v in zip(jax.tree.leaves((got, got_grads)), jax.tree.leaves((want, grads)), strict=True):
        near(g, v, 1e-5)


def test_axis_index_groups_of_unequal_size():
    x = normal(4, 5, 3)
    y = jax.vmap(lambda v: api.batch_norm(v, axis_name="i", axis_index_groups=[[0, 2, 3], [1]])[0], axis_name="i")(x)
    near(y[jnp.asarray([0, 2, 3])], oracle.batch_norm(f64(x[jnp.asarray([0, 2, 3])]))[0], 1e-5)
    near(y[1], oracle.batch_norm(f64(x[1]))[0], 1e-5)


@pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices (set by conftest on CPU)")
@pytest.mark.parametrize("way", ["jit", "shard_map"])
def test_four_devices_equal_one(way):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    x, s, b, w = normal(8, 3, 4), normal(4, seed=1), normal(4, seed=2), normal(8, 3, 4, seed=3)
    mask = jnp.asarray(np.random.default_rng(2).integers(0, 2, (8, 3, 1)))
    step = jax.value_and_grad(_objective, (0, 1, 2), has_aux=True)
    want = step(x, s, b, w, mask)

    def local(x, s, b, w, mask):
        value, stats = _objective(x, s, b, w, mask, axis_name="d")
        return jax.lax.psum(value, "d"), stats

    if way == "shard_map":
        rows, rep = P("d"), P()
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, rep, rep, rows, rows), out_specs=(rep, rep))
        step = jax.value_and_grad(mapped, (0, 1, 2), has_aux=True)
    placed = [jax.device_put(v, NamedSharding(mesh, P("d") if v.ndim > 1 else P())) for v in (x, s, b, w, mask)]
    compiled = jax.jit(step).lower(*placed).compile()
    for g, v in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(want), strict=True):
        near(g, v, 1e-5)
    assert "all-gather" not in compiled.as_text()


# --- bits, emptiness, Flax ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [lambda *a: api.batch_norm(*a)[0], api.layer_norm], ids=["batch", "layer"])
def test_gradients_of_scale_and_bias_are_the_same_bits_in_every_run(fn):
    x, s, b = normal(64, 28, 28, 16, dtype=jnp.bfloat16), normal(16, seed=1), normal(16, seed=2)
    grad = jax.jit(jax.grad(lambda s, b: jnp.sum(fn(x, s, b).astype(jnp.float32) ** 2), (0, 1)))
    first = [np.asarray(g) for g in grad(s, b)]
    for _ in range(19):
        for g, f in zip(grad(s, b), first, strict=True):
            assert (np.asarray(g) == f).all()


def test_empty_batches_give_zeros_where_something_is_left():
    x = jnp.zeros((0, 4))
    y, mean, var = api.batch_norm(x, jnp.ones(4))
    assert y.shape == (0, 4) and mean.tolist() == var.tolist() == [0] * 4
    for fn in (lambda s: api.layer_norm(x, s).sum(), lambda s: api.batch_norm(x, s)[0].sum()):
        assert jax.grad(fn)(jnp.ones(4)).tolist() == [0] * 4
    assert api.local_response_norm(x).shape == (0, 4)
    assert api.group_norm(jnp.zeros((2, 0, 4)), num_groups=2).shape == (2, 0, 4)


def test_flax_gives_the_same_numbers():
    nn = pytest.importorskip("flax.linen")
    x, s, b = normal(3, 4, 5, 6), normal(6, seed=1), normal(6, seed=2)
    params = {"params": {"scale": s, "bias": b}}
    slow = {"use_fast_variance": False}
    stats = {"batch_stats": {"mean": jnp.zeros(6), "var": jnp.ones(6)}}
    want, new = nn.BatchNorm(use_running_average=False, **slow).apply(params | stats, x, mutable=["batch_stats"])
    y, mean, var = api.batch_norm(x, s, b)
    near(y, want, 1e-5)
    near(0.01 * mean, new["batch_stats"]["mean"], 1e-6)
    near(0.99 + 0.01 * var, new["batch_stats"]["var"], 1e-6)
    inference = nn.BatchNorm(use_running_average=True).apply(params | new, x)
    near(api.batch_norm_inference(x, **new["batch_stats"], scale=s, bias=b), inference, 1e-5)
    near(api.layer_norm(x, s, b), nn.LayerNorm(**slow).apply(params, x), 1e-5)
    both = nn.LayerNorm(reduction_axes=(1, 3), feature_axes=3, **slow).apply(params, x)
    near(api.layer_norm(x, s, b, axis=(1, 3), feature_axes=3), both, 1e-5)
    near(api.rms_norm(x, s), nn.RMSNorm(use_fast_variance=False).apply({"params": {"scale": s}}, x), 1e-5)
    near(api.group_norm(x, s, b, num_groups=3), nn.GroupNorm(3, **slow).apply(params, x), 1e-5)
    near(api.instance_norm(x, s, b), nn.InstanceNorm(**slow).apply(params, x), 1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------------

X = jnp.ones((2, 3, 6))


def grouped(groups):
    return jax.vmap(lambda v: api.batch_norm(v, axis_name="i", axis_index_groups=groups)[0], axis_name="i")(X)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: api.batch_norm(jnp.ones((2, 3), int)), TypeError, r"x has dtype int.*cast it with jnp.asarray\(x"),
        (lambda: api.batch_norm(jnp.float32(1)), ValueError, r"x of shape \(\)"),
        (lambda: api.batch_norm(X, axis=3), ValueError, "axis=3 is out of range"),
        (lambda: api.batch_norm(X, jnp.ones(5)), ValueError, r"scale has shape \(5,\).*needs \(6,\)"),
        (lambda: api.batch_norm(X, bias=jnp.ones(6, jnp.float16)), TypeError, "bias has dtype float16.*float32"),
        (lambda: api.batch_norm(X, eps=-1e-5), ValueError, "eps=-1e-05 must not be negative"),
        (lambda: jax.jit(lambda e: api.batch_norm(X, eps=e))(1e-5), TypeError, "eps is a traced array.*Python number"),
        (lambda: api.batch_norm(X, activation="rulu"), ValueError, "activation='rulu' is not known.*relu"),
        (lambda: api.batch_norm(X, residual=jnp.ones((2, 3))), ValueError, r"residual has shape \(2, 3\)"),
        (lambda: api.batch_norm(X, residual=X.astype(jnp.bfloat16)), TypeError, "residual has dtype bfloat16"),
        (
            lambda: api.batch_norm(X, mask=jnp.ones((2, 2, 1))),
            ValueError,
            r"mask of shape \(2, 2, 1\) does not broadcast",
        ),
        (lambda: api.batch_norm(X, axis_index_groups=[[0]]), ValueError, "axis_index_groups=.*needs axis_name"),
        (
            lambda: jax.vmap(lambda v: api.batch_norm(v, axis_name="i", axis_index_groups=[[0]])[0], axis_name="i")(X),
            ValueError,
            "axis_index_groups=.*every index",
        ),
        (lambda: grouped(5), TypeError, r"axis_index_groups=5 must be a sequence of groups.*give e.g. \[\["),
        (lambda: grouped([0, 1]), TypeError, r"axis_index_groups=\[0, 1\] must be a sequence of groups"),
        (lambda: grouped(["01"]), TypeError, r"axis_index_groups=\['01'\] must be a sequence of groups"),
        (lambda: grouped([[0], [1.5]]), TypeError, r"axis_index_groups\[1\]\[0\]=1.5 must be an int"),
        (lambda: api.batch_norm_inference(X, None, jnp.ones(6)), TypeError, "mean and var must be arrays"),
        (lambda: api.batch_norm_inference(X, jnp.ones(3), jnp.ones(6)), ValueError, r"mean has shape \(3,\)"),
        (lambda: api.layer_norm(X, axis=(1, 1)), ValueError, "names an axis twice"),
        (lambda: api.layer_norm(X, axis=()), ValueError, "names no axis"),
        (lambda: api.rms_norm(X, jnp.ones((3, 6))), ValueError, r"scale has shape \(3, 6\)"),
        (lambda: api.group_norm(X, num_groups=4), ValueError, "num_groups=4 does not divide the 6 channels"),
        (lambda: api.group_norm(X, group_size=4), ValueError, "group_size=4 does not divide"),
        (lambda: api.group_norm(X, num_groups=2, group_size=3), ValueError, "both given"),
        (lambda: api.group_norm(X, num_groups=0), ValueError, "num_groups=0 must be at least 1"),
        (lambda: api.group_norm(X, num_groups=2, reduction_axes=1), ValueError, "must hold the channels' axis 2"),
        (lambda: api.group_norm(jnp.ones(6), num_groups=2), ValueError, "no batch axis"),
        (lambda: api.instance_norm(X, axis=0), ValueError, "batch axis 0"),
        (lambda: api.instance_norm(jnp.ones((2, 6))), ValueError, "no axis between"),
        (lambda: api.local_response_norm(X, size=0), ValueError, "size=0 must be at least 1"),
        (lambda: api.local_response_norm(X, size=2.5), TypeError, "size=2.5 must be an int"),
        (lambda: api.local_response_norm(X, alpha="1"), TypeError, "alpha='1' must be a Python number"),
    ],
)
def test_refusals_name_argument_value_rule_and_remedy(call, error, words):
    with pytest.raises(error, match=words):
        call()
