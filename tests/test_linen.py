"""jaxprims.linen beside flax.linen: parameters, numbers, gradients, running statistics, dtypes, and what it adds."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.layers import (
    BY_ID,
    CASES,
    OUT,
    PLAIN,
    XLA,
    case_id,
    close,
    custom_calls,
    equal,
    fast,
    objective,
    primitives,
    stir,
)

pytest.importorskip("flax")
from flax import linen

from jaxprims import linen as ours

plain = pytest.mark.parametrize("case", PLAIN, ids=case_id)
each = pytest.mark.parametrize("case", CASES, ids=case_id)


def init(layer, x, **call):
    return fast(lambda key, x: layer.init(key, x, **call))(jax.random.key(1), x)


def applied(layer, variables, x, **call):
    """(y, the collections that changed)."""
    flags = {k: call.pop(k) for k in list(call) if k == "use_running_average"}
    return fast(lambda v, x, call: layer.apply(v, x, mutable=["batch_stats"], **flags, **call))(variables, x, call)


def everything(layer, variables, x, **call):
    """(y, changed collections), gradients in parameters and x."""
    params = {"params": variables.get("params", {})}

    def loss(params, x):
        y, changed = applied(layer, variables | params, x, **call)
        return objective(y), (y, changed)

    with jax.default_matmul_precision("highest"):
        run = fast(jax.value_and_grad(loss, (0, 1), has_aux=True))
        (_, outcome), grads = run(params, x)
    return outcome, grads


@each
def test_parity(case):
    """The same variables for the same key; with those: outputs, running statistics, gradients."""
    flax_layer, layer, x = case.linen(linen), case.linen(ours), case.data()
    both = fast(lambda x: [init(each, x, **case.call()) for each in (flax_layer, layer)])
    variables, own = both(x)
    equal(own, variables)
    variables = stir(variables)
    close(everything(layer, variables, x, **case.call()), everything(flax_layer, variables, x, **case.call()))


@each
def test_the_ops_are_ours(case):
    """In the jaxpr no XLA convolution or reduction; on a GPU one kernel, which takes bias or scale along."""
    layer, x = case.linen(ours), case.data()
    variables = jax.eval_shape(lambda x: init(layer, x, **case.call()), x)

    def forward(variables, x):
        return applied(layer, variables, x, **case.call())

    wraps = {"reduce_sum"} if "circular" in case.name and case.layer == "ConvTranspose" else set()
    assert not primitives(forward, variables, x) & (XLA - wraps)
    if not wraps and x.size and 0 not in jax.eval_shape(forward, variables, x)[0].shape:
        assert custom_calls(forward, variables, x) == sorted(case.custom_calls())


# --- dtypes ---------------------------------------------------------------------------------------------------------

HALVES = (jnp.bfloat16, jnp.float16)
MIXES = [
    (x, dtype, param)
    for x in (jnp.float32, *HALVES, jnp.int32)
    for dtype in (None, jnp.float32, *HALVES)
    for param in (jnp.float32, *HALVES)
]


@plain
def test_result_dtypes_are_those_of_flax(case):
    """Of y, parameters and changed statistics, for every mix of the dtypes of x, of the layer and of its parameters."""
    for x, dtype, param in MIXES:
        options = dict(dtype=dtype, param_dtype=param)
        if case.layer == "BatchNorm" and dtype == jnp.bfloat16:
            options["force_float32_reductions"] = False

        def shapes(nn, x=x, options=options):
            layer = case.linen(nn, **options)

            def run(x):
                variables = init(layer, x, **case.call())
                return variables, applied(layer, variables, x, **case.call())

            return jax.eval_shape(run, jax.ShapeDtypeStruct(case.shape, x))

        got, want = shapes(ours), shapes(linen)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(lambda a: (a.shape, a.dtype), want), (
            f"x {x.dtype}, dtype {dtype}, param_dtype {param}"
        )


def check_half(case, dtype):
    """Against Flax in float32 on the same rounded operands: one rounding of y, statistics exact to float32."""
    x = case.data(dtype=dtype)
    variables = stir(init(case.linen(linen), x, **case.call()))
    variables |= {"params": jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), variables["params"])}
    y, changed = applied(case.linen(ours, dtype=dtype), variables, x, **case.call())
    want, want_changed = applied(case.linen(linen), variables, x.astype(jnp.float32), **case.call())
    assert y.dtype == dtype
    close(y.astype(jnp.float32), want, float(jnp.finfo(dtype).eps))
    close(changed, want_changed)


@plain
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
def test_half_types_round_once(case, dtype):
    check_half(case, dtype)


@pytest.mark.parametrize("x, dtype", [("float64", None), ("float64", "float32"), ("float32", "float32")])
def test_float64_parameters_and_inputs(x, dtype):
    with jax.enable_x64(True):
        for case in (BY_ID["BatchNorm-train"], BY_ID["BatchNorm-average"], BY_ID["LayerNorm-last"]):
            data = case.data(dtype=x)
            variables = stir(init(case.linen(linen, param_dtype=jnp.float64), data, **case.call()))
            variables = stir(jax.tree.map(lambda a: a.astype(jnp.float64), variables))
            got = applied(case.linen(ours, dtype=dtype), variables, data, **case.call())
            want = applied(case.linen(linen, dtype=dtype), variables, data, **case.call())
            close(got, want, 1e-6 if dtype else 1e-12)


def test_statistics_are_exact_where_the_fast_variance_is_not():
    """A mean of 1e4 and a deviation of 0.01: in float64 the normalised deviation is 0.952, Flax's fast variance gives 3."""
    x = jnp.asarray(1e4 + 0.01 * np.random.default_rng(0).standard_normal((1000, 1)), jnp.float32)
    wide = np.asarray(x, np.float64)
    want = (wide - wide.mean(0)) / np.sqrt(wide.var(0) + 1e-5)
    got = ours.BatchNorm(use_running_average=False).init_with_output(jax.random.key(0), x)[0]
    assert abs(got.std() - want.std()) < 1e-3
    np.testing.assert_allclose(got, want, atol=5e-3)
    rows = ours.LayerNorm(epsilon=1e-5).init_with_output(jax.random.key(0), x.T)[0]
    np.testing.assert_allclose(rows.T[:, 0], want[:, 0], atol=5e-3)
    flax_std = linen.BatchNorm(use_running_average=False).init_with_output(jax.random.key(0), x)[0].std()
    assert abs(flax_std - want.std()) > 0.1


# --- what is added --------------------------------------------------------------------------------------------------


def in_plain_flax(case, variables, x, residual, activation, **options):
    y, changed = applied(case.linen(linen, **options), variables, x, **case.call())
    y = y if residual is None else y + residual
    return (y if activation is None else getattr(linen, activation)(y)), changed


@pytest.mark.parametrize(
    "case, activation, with_residual",
    [
        *((case, "relu", True) for case in PLAIN),
        *((BY_ID[name], "silu", False) for name in ("Conv-same", "LayerNorm-last", "GroupNorm-groups")),
        *((BY_ID[name], None, True) for name in ("Conv-stride2", "BatchNorm-average")),
    ],
    ids=case_id,
)
def test_activation_and_residual(case, activation, with_residual):
    """As plain Flax code: y, statistics, and the gradients of x, residual and parameters."""
    x = case.data()
    variables = stir(init(case.linen(linen), x, **case.call()))
    shape = jax.eval_shape(lambda v: applied(case.linen(linen), v, x, **case.call())[0], variables).shape
    residual = jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32) if with_residual else None
    layer = case.linen(ours, activation=activation)

    def of(run):
        def loss(params, x, residual):
            y, changed = run(variables | {"params": params}, x, residual)
            return objective(y), (y, changed)

        wrt = (0, 1, 2) if with_residual else (0, 1)
        return fast(jax.value_and_grad(loss, wrt, has_aux=True))(variables["params"], x, residual)

    def fused(variables, x, residual):
        return applied(layer, variables, x, residual=residual, **case.call())

    close(of(fused), of(lambda v, x, r: in_plain_flax(case, v, x, r, activation)))
    behind = ["bias_act"] if case.layer in ("LayerNorm", "RMSNorm") and with_residual else []
    assert custom_calls(fused, variables, x, residual) == sorted([*case.custom_calls(), *behind])


@plain
def test_a_residual_promotes_the_result(case):
    for dtype, other in ((jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.float16)):
        x = case.data(dtype=jnp.bfloat16)
        variables = init(case.linen(linen), x, **case.call())
        y = applied(case.linen(linen, dtype=dtype), variables, x, **case.call())[0]
        residual = jnp.ones(y.shape, other)
        got = applied(case.linen(ours, dtype=dtype), variables, x, residual=residual, **case.call())[0]
        assert got.dtype == (y + residual).dtype
        close(got, y + residual, 0.02)


@pytest.mark.parametrize(
    "name", ["Conv-circular", "Conv-two-batch-axes", "Conv-1d-causal", "ConvTranspose-valid",
             "ConvTranspose-circular", "GroupNorm-mask", "InstanceNorm-mask"],
)  # fmt: skip
def test_channels_first(name):
    """layout="NCHW" gives what the transposed input gives, with the same parameters, and without a transpose."""
    case = BY_ID[name]
    x, call = case.data(), case.call()
    window = case.options.get("kernel_size", (1,) * (len(case.shape) - 2))
    axis = -1 - (1 if isinstance(window, int) else len(window))
    variables = stir(init(case.linen(linen), x, **call))
    residual = jnp.full(jax.eval_shape(lambda v: applied(case.linen(ours), v, x, **call)[0], variables).shape, 0.5)
    want = applied(case.linen(ours, activation="relu"), variables, x, residual=residual, **call)[0]
    layer, first = case.linen(ours, layout="NCHW", activation="relu"), lambda a: jnp.moveaxis(jnp.asarray(a), -1, axis)
    call = {k: first(v) for k, v in call.items()} | {"residual": first(residual)}
    equal(init(layer, first(x), **call), init(case.linen(linen), x, **case.call()))
    close(applied(layer, variables, first(x), **call)[0], first(want))
    assert "transpose" not in primitives(lambda v, x: applied(layer, v, x, **call)[0], variables, first(x))


def test_local_response_norm():
    x = BY_ID["Conv-same"].data()
    options = dict(size=3, alpha=0.5, beta=0.6, k=2.0, divide_by_size=False)
    equal(ours.LocalResponseNorm(axis=1, **options).apply({}, x), jaxprims.local_response_norm(x, axis=1, **options))
    equal(ours.LocalResponseNorm().apply({}, x), jaxprims.local_response_norm(x))
    assert init(ours.LocalResponseNorm(), x) == {}


# --- where Flax's own code runs -------------------------------------------------------------------------------------


def falls_to_flax(case, x, variables, call=None, layer_options=None, **extra):
    """ours gives Flax's numbers by Flax's code, and adds residual and activation behind."""
    call, options = case.call() | (call or {}), layer_options or {}
    y, changed = applied(case.linen(linen, **options), variables, x, **call)
    close(applied(case.linen(ours, **options), variables, x, **call), (y, changed), 1e-6)
    residual = jnp.ones_like(y)
    got = applied(case.linen(ours, **options, **extra), variables, x, residual=residual, **call)[0]
    close(got, jax.nn.relu(y + residual) if extra else y + residual, 1e-6)
    names = primitives(lambda v, x: applied(case.linen(ours, **options), v, x, **call)[0], variables, x)
    assert names & {"conv_general_dilated", "reduce_sum", "mean", "rsqrt", "sqrt"}


def test_a_convolution_function_of_the_users():
    case, seen = BY_ID["Conv-groups"], []

    def own(*args, **kwargs):
        seen.append(kwargs["feature_group_count"])
        return jax.lax.conv_general_dilated(*args, **kwargs)

    x = case.data()
    variables = init(case.linen(linen), x)
    for options in (dict(conv_general_dilated=own), dict(conv_general_dilated_cls=lambda: own)):
        falls_to_flax(case, x, variables, layer_options=options, activation="relu")
    assert seen and set(seen) == {2}
    layer = case.linen(ours, conv_general_dilated=own, layout="NCHW")
    got = layer.apply(variables, jnp.moveaxis(x, -1, 1))
    close(got, jnp.moveaxis(case.linen(linen).apply(variables, x), -1, 1))
    named = case.linen(ours, conv_general_dilated=jaxprims.conv_general_dilated)
    assert "conv" in primitives(lambda v: named.apply(v, x), variables)


@pytest.mark.parametrize("name", ["Conv-same", "ConvTranspose-stride2"])
def test_floats_of_eight_bits(name):
    case, x = BY_ID[name], BY_ID[name].data()
    eight = dict(dtype=jnp.float8_e4m3fn)
    variables = init(case.linen(linen, **eight), x)
    y = case.linen(linen, **eight).apply(variables, x)
    equal(case.linen(ours, **eight).apply(variables, x), y)
    got = case.linen(ours, activation="relu", **eight).apply(variables, x, residual=jnp.ones_like(y))
    want = jax.nn.relu(y.astype(jnp.float32) + 1).astype(y.dtype)
    equal(got, want)


@pytest.mark.parametrize("name", ["BatchNorm-average", "BatchNorm-train", "LayerNorm-last", "GroupNorm-groups"])
def test_complex_input(name):
    case = BY_ID[name]
    x = jax.lax.complex(case.data(), case.data(1))
    falls_to_flax(case, x, init(case.linen(linen), x, **case.call()))


def test_no_statistics_to_take():
    case = BY_ID["InstanceNorm-images"]
    x = jnp.arange(8.0).reshape(2, 4)
    variables = stir(init(case.linen(linen), x))
    close(case.linen(ours).apply(variables, x), case.linen(linen).apply(variables, x))
    layers = [nn.LayerNorm(reduction_axes=(), feature_axes=-1) for nn in (ours, linen)]
    close(*(layer.apply(variables, x) for layer in layers))
    layers = [nn.GroupNorm(num_groups=2) for nn in (ours, linen)]
    close(*(layer.apply(variables, x[0]) for layer in layers))
    layers = [nn.BatchNorm(use_running_average=False) for nn in (ours, linen)]
    variables |= {"batch_stats": {"mean": jnp.zeros(4), "var": jnp.ones(4)}}
    close(*(applied(layer, variables, x[0]) for layer in layers))


@pytest.mark.parametrize("name", ["LayerNorm-last", "RMSNorm-last", "GroupNorm-groups", "InstanceNorm-images"])
def test_norms_over_a_mapped_axis(name):
    case = BY_ID[name]
    xs = jnp.stack([case.data(0), case.data(1)])
    variables = stir(init(case.linen(linen), xs[0]))

    def mapped(nn, **extra):
        layer = case.linen(nn, axis_name="parts")
        return jax.vmap(lambda x: layer.apply(variables, x, **extra), axis_name="parts")(xs)

    close(mapped(ours), mapped(linen))
    if "layout" in inspect.signature(getattr(ours, case.layer)).parameters:
        layer = case.linen(ours, axis_name="parts", layout="NCHW", activation="relu")
        got = jax.vmap(lambda x: layer.apply(variables, x), axis_name="parts")(jnp.moveaxis(xs, -1, 2))
        close(jnp.moveaxis(got, 2, -1), jax.nn.relu(mapped(linen)))


# --- batch norm over devices ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 5, 6)), jnp.float32)
    layer = linen.BatchNorm(use_running_average=False, momentum=0.9)
    return x, stir(init(layer, x[0]))


def test_axis_name_under_vmap_pmap_and_shard_map(parts):
    x, variables = parts

    def run(nn, mapping, **options):
        layer = nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name="d", **options)
        return mapping(lambda x: applied(layer, variables, x))(x)

    want = run(linen, lambda f: jax.vmap(f, axis_name="d"))
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices("cpu")[:4], axis_types=(jax.sharding.AxisType.Auto,))
    each_device = jax.sharding.PartitionSpec("d")

    def sharded(f):
        one = lambda x: jax.tree.map(lambda a: a[None], f(x[0]))  # noqa: E731
        return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=each_device, out_specs=each_device))

    for mapping in (
        lambda f: jax.vmap(f, axis_name="d"),
        lambda f: jax.pmap(f, axis_name="d", devices=jax.devices("cpu")[:4]),
        sharded,
    ):
        close(jax.tree.map(np.asarray, run(ours, mapping)), jax.tree.map(np.asarray, want))
    groups = run(ours, sharded, axis_index_groups=[[0, 1], [2, 3]])
    halves = linen.BatchNorm(use_running_average=False, momentum=0.9)
    close(groups[0][:2].reshape(6, 5, 6), applied(halves, variables, x[:2].reshape(6, 5, 6))[0])


def test_masks_with_unequal_counts_are_combined(parts):
    """The statistics of all unmasked elements together; a mean of the members' means is another number."""
    x, variables = parts
    mask = jnp.arange(12).reshape(4, 3, 1, 1) % 5 < jnp.array([1, 5, 2, 4]).reshape(4, 1, 1, 1)
    layer = ours.BatchNorm(use_running_average=False, momentum=0.9, axis_name="d")
    y, changed = jax.vmap(lambda x, m: applied(layer, variables, x, mask=m), axis_name="d")(x, mask)
    whole = linen.BatchNorm(use_running_average=False, momentum=0.9)
    want, want_changed = applied(whole, variables, x.reshape(12, 5, 6), mask=mask.reshape(12, 1, 1))
    close(y.reshape(12, 5, 6), want)
    close(jax.tree.map(lambda a: a[2], changed), want_changed)


def test_initialising_needs_no_mapped_axis(parts):
    x, _ = parts
    layer = ours.BatchNorm(use_running_average=False, axis_name="nowhere")
    equal(init(layer, x[0]), init(linen.BatchNorm(use_running_average=False), x[0]))
    with pytest.raises(NameError, match="nowhere"):
        applied(layer, init(layer, x[0]), x[0])


# --- errors ---------------------------------------------------------------------------------------------------------

IMAGE = (2, 6, 5, 4)


@pytest.mark.parametrize(
    "layer, shape, call, error, text",
    [
        (ours.Conv(OUT, (3, 3), mask=np.ones((3, 3))), IMAGE, {}, ValueError, "Mask needs to have the same shape"),
        (ours.Conv(OUT, (3, 3), feature_group_count=3), IMAGE, {}, ValueError, "feature_group_count=3 must divide the 4"),
        (ours.Conv(OUT, (3, 3), padding="SOME"), IMAGE, {}, ValueError, "padding='SOME' is not known"),
        (ours.Conv(OUT, (3, 3), padding="CAUSAL"), IMAGE, {}, ValueError, "'CAUSAL' needs one spatial axis"),
        (ours.Conv(OUT, (3, 3), padding=[1]), IMAGE, {}, ValueError, "1 entries for 2 spatial axes"),
        (ours.Conv(OUT, (3, 3)), (5, 4), {}, ValueError, "2 spatial axes and a channel axis"),
        (ours.Conv(OUT, (3, 3), activation="rely"), IMAGE, {}, ValueError, "activation='rely' is not known.*relu"),
        (ours.Conv(OUT, (3, 3), activation=jax.nn.relu), IMAGE, {}, TypeError, "must be a name"),
        (ours.Conv(OUT, (3, 3), layout="HWCN"), IMAGE, {}, ValueError, "layout='HWCN' is not known; give 'NHWC'"),
        (ours.Conv(OUT, (3, 3)), IMAGE, dict(residual=(2, 6, 5, 4)), ValueError, "residual has shape"),
        (ours.Conv(OUT, (3, 3)), IMAGE, dict(residual=(OUT,)), ValueError, "residual has shape"),
        (ours.ConvTranspose(OUT, (3, 3), padding="CAUSAL"), IMAGE, {}, ValueError, "padding='CAUSAL' is not known"),
        (ours.BatchNorm(), IMAGE, {}, ValueError, "use_running_average"),
        (ours.BatchNorm(False, axis=4), IMAGE, {}, ValueError, "axis 4 is out of range"),
        (ours.BatchNorm(False), IMAGE, dict(residual=(4,)), ValueError, "residual has shape"),
        (ours.BatchNorm(False), IMAGE, dict(mask=(3, 6, 5, 4)), ValueError, "mask of shape .* does not broadcast"),
        (ours.LayerNorm(reduction_axes=7), IMAGE, {}, ValueError, "axis 7 is out of range"),
        (ours.GroupNorm(num_groups=3), IMAGE, {}, ValueError, "Number of groups .3. does not divide"),
        (ours.GroupNorm(group_size=2), IMAGE, {}, ValueError, "pass `num_groups=None`"),
        (ours.GroupNorm(num_groups=2, reduction_axes=1), IMAGE, {}, ValueError, "must include the final dimension"),
        (ours.GroupNorm(2, layout="NCHW", reduction_axes=-1), IMAGE, {}, ValueError, "channels' axis 1 among"),
        (ours.InstanceNorm(feature_axes=0), IMAGE, {}, ValueError, "cannot include the leading dimension"),
        (ours.InstanceNorm(feature_axes=2, layout="NCHW"), IMAGE, {}, ValueError, "features are axis 1"),
        (ours.LocalResponseNorm(size=0), IMAGE, {}, ValueError, "size=0 must be at least 1"),
    ],
)  # fmt: skip
def test_errors(layer, shape, call, error, text):
    with pytest.raises(error, match=text):
        init(layer, jnp.ones(shape), **{k: jnp.ones(v) for k, v in call.items()})


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each
def test_parity_on_a_gpu(case):
    """The table on the kernels (a case that none takes is an error), Flax beside it on XLA at HIGHEST.

    Gradients get a little more room: a sum over all pixels in another order, and Flax's fast variance beside ours.
    """
    if "no-window" in case.name:
        pytest.skip("its result has no elements: there is nothing to launch")
    flax_layer, layer, x = case.linen(linen), case.linen(ours), case.data()
    with jax.default_matmul_precision("highest"):
        variables = stir(init(flax_layer, x, **case.call()))
    want = everything(flax_layer, variables, x, **case.call())
    with jaxprims.use("cuda"):
        got = everything(layer, variables, x, **case.call())
    close(got[0], want[0])
    close(got[1:], want[1:], 3e-5)


@pytest.mark.gpu
@plain
def test_half_types_on_a_gpu(case):
    with jaxprims.use("cuda"):
        for dtype in HALVES:
            check_half(case, dtype)
