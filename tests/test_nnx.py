"""jaxprims.nnx beside flax.nnx: variables, numbers, gradients, running statistics, dtypes, and what it adds."""

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
    IMAGE,
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
from flax import nnx, serialization

from jaxprims import nnx as ours

# What reads these arguments is shared with linen, whose tests run the whole table.
SHARED = {
    "Conv": (
        "strides-none",
        "valid",
        "same-lower",
        "int-padding",
        "circular-even-dilated",
        "depthwise",
        "1d-int-kernel",
    ),
    "ConvTranspose": ("pairs", "transposed-kernel", "circular", "1d", "one-image"),
    "BatchNorm": ("channels-first-average", "no-scale", "no-bias", "mask"),
    "LayerNorm": ("no-bias", "images", "mask"),
    "RMSNorm": ("images",),
    "GroupNorm": ("one-group", "rows"),
}
TABLE = [c for c in CASES if c.nnx and c.name not in SHARED.get(c.layer, ())]
each = pytest.mark.parametrize("case", TABLE, ids=case_id)
plain = pytest.mark.parametrize("case", PLAIN, ids=case_id)
HALVES = (jnp.bfloat16, jnp.float16)


def values(layer):
    """The layer's variables as a plain tree of arrays."""
    return nnx.to_pure_dict(nnx.state(layer))


def loaded(layer, tree):
    """The layer with the tree's values in its variables."""
    state = nnx.state(layer)
    nnx.replace_by_pure_dict(state, tree)
    nnx.update(layer, state)
    return layer


def functional(layer, **call):
    """The layer as a function of its state and x, giving y and the variables afterwards; and the state."""
    graph, state = nnx.split(layer)

    def forward(state, x):
        layer = nnx.merge(graph, state)
        y = layer(x, **call)
        return y, nnx.to_pure_dict(nnx.state(layer))

    return forward, state


def run(layer, x, **call):
    forward, state = functional(layer, **call)
    return fast(forward)(state, x)


def gradients(layer, loss, *args, wrt):
    """What loss(layer, *args) gives beside its value, and the gradients in parameters and in ``args`` (from 1 on)."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def of(params, *args):
        *args, rest = args
        layer = nnx.merge(graph, params, rest, copy=True)
        y = loss(layer, *args)
        return objective(y), (y, nnx.to_pure_dict(nnx.state(layer, nnx.BatchStat)))

    with jax.default_matmul_precision("highest"):
        (_, outcome), (dparams, *others) = fast(jax.value_and_grad(of, (0, *wrt), has_aux=True))(params, *args, rest)
    return outcome, nnx.to_pure_dict(dparams), others


def everything(layer, x, **call):
    """y, the changed statistics, and the gradients in parameters and x."""
    return gradients(layer, lambda layer, x: layer(x, **call), x, wrt=(1,))


@each
def test_parity(case):
    """The same variables for the same seed; with those: outputs, running statistics, gradients; on a GPU one kernel."""
    theirs, mine, x = case.nnx_layer(nnx), case.nnx_layer(ours), case.data()
    equal(values(mine), values(theirs))
    tree = stir(values(theirs))
    loaded(theirs, tree), loaded(mine, tree)
    close(everything(mine, x, **case.call()), everything(theirs, x, **case.call()))

    graph, state = nnx.split(mine)
    forward = lambda state, x: nnx.merge(graph, state)(x, **case.call())  # noqa: E731
    wraps = {"reduce_sum"} if "circular" in case.name and case.layer == "ConvTranspose" else set()
    assert not primitives(forward, state, x) & (XLA - wraps)
    if not wraps and 0 not in jax.eval_shape(forward, state, x).shape:
        assert custom_calls(forward, state, x) == sorted(case.custom_calls())


@plain
def test_result_dtypes_are_those_of_flax(case):
    for dtype in (None, jnp.float32, *HALVES):
        for param in (jnp.float32, *HALVES):
            layers = [case.nnx_layer(space, dtype=dtype, param_dtype=param) for space in (ours, nnx)]
            for x in (jnp.float32, *HALVES, jnp.int32):
                aval = jax.ShapeDtypeStruct(case.shape, x)
                got, want = (jax.eval_shape(*functional(layer, **case.call()), aval) for layer in layers)
                same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), got, want)
                assert jax.tree.all(same), f"x {x.dtype}, dtype {dtype}, param_dtype {param}: {got[0]}, {want[0]}"


def check_half(case, dtype):
    """Against Flax in float32 on the same rounded operands: one rounding of y, statistics exact to float32."""
    x = case.data(dtype=dtype)
    mine, theirs = case.nnx_layer(ours, dtype=dtype), case.nnx_layer(nnx)
    tree = {k: v if k in ("mean", "var") else v.astype(dtype).astype(v.dtype) for k, v in stir(values(theirs)).items()}
    loaded(mine, tree), loaded(theirs, tree)
    (y, changed), (want, want_changed) = run(mine, x, **case.call()), run(theirs, x.astype(jnp.float32), **case.call())
    assert y.dtype == dtype
    close(y.astype(jnp.float32), want, float(jnp.finfo(dtype).eps))
    close(changed, want_changed)


@plain
def test_half_types_round_once(case):
    check_half(case, jnp.bfloat16)


def test_a_convolution_s_preferred_element_type():
    x = BY_ID["Conv-same"].data(dtype=jnp.bfloat16)
    options = dict(dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    for name in ("Conv-same", "ConvTranspose-stride2"):
        mine, theirs = (BY_ID[name].nnx_layer(space, **options) for space in (ours, nnx))
        got = mine(x)
        assert got.dtype == jnp.float32
        close(got, theirs(x))


# --- what is added --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, activation, with_residual", [
    *((case, "relu", True) for case in PLAIN),
    (BY_ID["Conv-same"], "silu", False), (BY_ID["BatchNorm-average"], None, True),
], ids=case_id)  # fmt: skip
def test_activation_and_residual(case, activation, with_residual):
    """As plain Flax code: y, statistics, and the gradients of x, residual and parameters."""
    x, theirs, mine = case.data(), case.nnx_layer(nnx), case.nnx_layer(ours, activation=activation)
    tree = stir(values(theirs))
    loaded(theirs, tree), loaded(mine, tree)
    shape = jax.eval_shape(*functional(theirs, **case.call()), x)[0].shape
    residual = jnp.asarray(np.random.default_rng(7).standard_normal(shape), jnp.float32) if with_residual else None

    def fused(layer, x, residual):
        return layer(x, residual=residual, **case.call())

    def plain(layer, x, residual):
        y = layer(x, **case.call())
        y = y if residual is None else y + residual
        return y if activation is None else getattr(nnx, activation)(y)

    wrt = (1, 2) if with_residual else (1,)
    close(*(gradients(layer, f, x, residual, wrt=wrt) for layer, f in ((mine, fused), (theirs, plain))))


@pytest.mark.parametrize("name", ["Conv-pairs", "ConvTranspose-valid", "GroupNorm-mask", "InstanceNorm-images"])
def test_channels_first(name):
    case = BY_ID[name]
    x, first = case.data(), lambda a: jnp.moveaxis(jnp.asarray(a), -1, 1)
    plain, layer = case.nnx_layer(ours, activation="relu"), case.nnx_layer(ours, layout="NCHW", activation="relu")
    residual = jnp.ones(jax.eval_shape(lambda x: plain(x, **case.call()), x).shape)
    call = case.call() | {"residual": residual}
    close(layer(first(x), **{k: first(v) for k, v in call.items()}), first(plain(x, **call)))
    by_flax = case.nnx_layer(nnx)
    close(plain(x, **call), jax.nn.relu(by_flax(x, **case.call()) + residual))


def test_local_response_norm():
    x = BY_ID["Conv-same"].data()
    options = dict(size=3, alpha=0.5, beta=0.6, k=2.0, divide_by_size=False)
    equal(ours.LocalResponseNorm(axis=1, **options)(x), jaxprims.local_response_norm(x, axis=1, **options))
    assert jax.tree.leaves(nnx.state(ours.LocalResponseNorm())) == []


# --- running statistics ---------------------------------------------------------------------------------------------


def test_train_eval_and_view_choose_the_statistics():
    x = BY_ID["BatchNorm-train"].data()
    for layer in (ours.BatchNorm(4, momentum=0.9, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, momentum=0.9, rngs=nnx.Rngs(0))):
        assert isinstance(layer.mean, nnx.BatchStat) and isinstance(layer.scale, nnx.Param)
        layer.train()
        layer(x)
        once = values(layer)
        layer.eval()
        y = layer(x)
        equal(values(layer), once)
        close(y, (x - once["mean"]) * jax.lax.rsqrt(once["var"] + 1e-5))
        close(layer(x, use_running_average=False).mean((0, 1, 2)), jnp.zeros(4), 1e-2)
        assert float(jnp.abs(values(layer)["mean"] - once["mean"]).max()) > 1e-3
        viewed = nnx.view(layer, use_running_average=False)
        assert viewed.mean is layer.mean and viewed.use_running_average is False and layer.use_running_average
        silent = type(layer)(4, use_running_average=None, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="No `use_running_average` argument was provided"):
            silent(x)


def test_running_statistics_stay_float32():
    """A mean of 100 and a variance of 1: rounded to bfloat16 the mean would be off by up to a quarter of a deviation."""
    layer = ours.BatchNorm(1, use_running_average=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    loaded(layer, values(layer) | {"mean": jnp.array([100.3]), "var": jnp.ones(1)})
    y = layer(jnp.full((1, 1), 100.0, jnp.bfloat16))
    assert abs(float(y[0, 0]) + 0.3) < 0.002


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_axis_name(mapping):
    xs = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 5, 6)), jnp.float32)
    mask = jnp.arange(12).reshape(4, 3, 1, 1) % 5 < jnp.array([1, 5, 2, 4]).reshape(4, 1, 1, 1)
    whole = nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))
    graph, state = nnx.split(ours.BatchNorm(6, momentum=0.9, axis_name="d", rngs=nnx.Rngs(0)))

    def one(x, mask, state):
        layer = nnx.merge(graph, state)
        return layer(x, mask=mask), nnx.to_pure_dict(nnx.state(layer))

    if mapping == "vmap":
        run_all = jax.vmap(one, in_axes=(0, 0, None), axis_name="d")
    else:
        mesh = jax.make_mesh((4,), ("d",), devices=jax.devices("cpu")[:4], axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("d")
        run_all = jax.jit(jax.shard_map(
            lambda x, m, s: jax.tree.map(lambda a: a[None], one(x[0], m[0], s)), mesh=mesh,
            in_specs=(spec, spec, jax.sharding.PartitionSpec()), out_specs=spec,
        ))  # fmt: skip
    for masks in (jnp.ones_like(mask), mask):  # equal counts, and unequal ones
        whole = nnx.BatchNorm(6, momentum=0.9, rngs=nnx.Rngs(0))
        want = whole(xs.reshape(12, 5, 6), mask=masks.reshape(12, 1, 1))
        y, after = run_all(xs, masks, state)
        close(np.asarray(y).reshape(12, 5, 6), want)
        close(jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[2]), after), values(whole))


# --- where Flax's own code runs -------------------------------------------------------------------------------------


def test_a_convolution_function_of_the_users_and_out_sharding():
    seen, x = [], BY_ID["Conv-same"].data()

    def own(*args, **kwargs):
        seen.append(kwargs["feature_group_count"])
        return jax.lax.conv_general_dilated(*args, **kwargs)

    options = dict(rngs=nnx.Rngs(0), activation="relu")
    mine = ours.Conv(4, OUT, (3, 3), conv_general_dilated=own, **options)
    theirs = loaded(nnx.Conv(4, OUT, (3, 3), rngs=nnx.Rngs(0)), values(mine))
    residual = jnp.ones((2, 6, 5, OUT))
    close(mine(x, residual=residual), jax.nn.relu(theirs(x) + residual))
    assert seen == [1]
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("d")
        split = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        layers = [loaded(space.Conv(4, OUT, (3, 3), rngs=nnx.Rngs(0)), values(mine)) for space in (ours, nnx)]
        got, want = (layer(split, out_sharding=spec) for layer in layers)
        assert got.sharding.spec == want.sharding.spec
        close(jnp.asarray(np.asarray(got)), jnp.asarray(np.asarray(want)))


@pytest.mark.parametrize("name", ["BatchNorm-average", "LayerNorm-last", "RMSNorm-last", "GroupNorm-groups"])
def test_complex_input(name):
    case = BY_ID[name]
    x = jax.lax.complex(case.data(), case.data(1))
    mine, theirs = case.nnx_layer(ours), case.nnx_layer(nnx)
    got, want = (run(layer, x, **case.call())[0] for layer in (mine, theirs))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_norms_over_a_mapped_axis_and_over_nothing():
    for name in ("LayerNorm-last", "GroupNorm-groups", "InstanceNorm-images"):
        case = BY_ID[name]
        xs = jnp.stack([case.data(0), case.data(1)])
        layers = [case.nnx_layer(space, axis_name="d") for space in (ours, nnx)]
        close(*(jax.vmap(layer, axis_name="d")(xs) for layer in layers))
    close(*(space.InstanceNorm(4, rngs=nnx.Rngs(0))(jnp.ones((2, 4))) for space in (ours, nnx)))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, call, error, text",
    [
        (lambda r: ours.Conv(4, OUT, (3, 3), mask=np.ones(3), rngs=r), {}, ValueError, "Mask needs to have the same"),
        (lambda r: ours.Conv(4, OUT, (3, 3), layout="CHWN", rngs=r), {}, ValueError, "layout='CHWN' is not known"),
        (lambda r: ours.Conv(3, OUT, (3, 3), rngs=r), {}, ValueError, "takes 3 input channels"),
        (lambda r: ours.Conv(4, OUT, (3, 3), padding="SOME", rngs=r), {}, ValueError, "padding='SOME' is not known"),
        (lambda r: ours.Conv(4, OUT, (3, 3), activation="rely", rngs=r), {}, ValueError, "activation='rely'"),
        (lambda r: ours.Conv(4, OUT, (3, 3), rngs=r), dict(residual=(2, 6, 5, 4)), ValueError, "residual has shape"),
        (lambda r: ours.ConvTranspose(4, OUT, 3, padding=(1, 2), rngs=r), {}, ValueError, "2 entries for 1 spatial"),
        (lambda r: ours.BatchNorm(5, rngs=r), {}, ValueError, "has shape .5,."),
        (lambda r: ours.BatchNorm(4, axis=4, rngs=r), {}, ValueError, "axis 4 is out of range"),
        (lambda r: ours.LayerNorm(5, rngs=r), {}, ValueError, "scale has shape .5,."),
        (lambda r: ours.GroupNorm(4, num_groups=3, rngs=r), {}, ValueError, "does not divide the number of channels"),
        (lambda r: ours.GroupNorm(4, 2, rngs=r), dict(mask=(3,)), ValueError, "mask of shape .3,. does not"),
        (lambda r: ours.GroupNorm(4, 2, reduction_axes=2, layout="NCHW", rngs=r), {}, ValueError, "channels' axis 1"),
        (lambda r: ours.InstanceNorm(4, feature_axes=0, rngs=r), {}, ValueError, "cannot include the leading"),
        (lambda r: ours.Conv(4, OUT, (3, 3), activations="relu", rngs=r), {}, TypeError, "activations"),
    ],
)  # fmt: skip
def test_errors(build, call, error, text):
    with pytest.raises(error, match=text):
        build(nnx.Rngs(0))(jnp.ones(IMAGE), **{k: jnp.ones(v) for k, v in call.items()})


# --- the namespace --------------------------------------------------------------------------------------------------


def test_every_other_name_is_flax_s_own():
    own = {"BatchNorm", "Conv", "ConvTranspose", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"}
    own |= {"avg_pool", "log_softmax", "max_pool", "min_pool", "softmax"}
    for name in [n for n in dir(nnx) if not n.startswith("__")]:
        assert name in dir(ours)
        assert (getattr(ours, name) is getattr(nnx, name)) == (name not in own), name
    for name in own:
        mine, theirs = getattr(ours, name), getattr(nnx, name)
        if inspect.isclass(mine):
            assert issubclass(mine, theirs) and mine.__name__ == theirs.__name__
            mine, theirs = mine.__init__, theirs.__init__
        shared = [p for p in inspect.signature(mine).parameters.values() if p.name not in ("activation", "layout")]
        arguments = list(inspect.signature(theirs).parameters.values())
        assert [(p.name, p.default) for p in shared[: len(arguments)]] == [(p.name, p.default) for p in arguments]
    names: dict = {}
    exec("from jaxprims.nnx import *\nfrom jaxprims.nnx import Linear, initializers", names)
    assert names["Linear"] is nnx.Linear and names["Conv"] is ours.Conv and names["lp_pool"] is jaxprims.lp_pool
    with pytest.raises(AttributeError, match="no attribute 'Convolution'"):
        ours.Convolution  # noqa: B018


def test_metadata_reaches_the_variables():
    metadata = dict(kernel_metadata={"note": "k"}, bias_metadata={"note": "b"})
    for space in (ours, nnx):
        layer = space.Conv(4, OUT, (3, 3), rngs=nnx.Rngs(0), **metadata)
        assert (layer.kernel.note, layer.bias.note) == ("k", "b")
        assert space.GroupNorm(4, 2, rngs=nnx.Rngs(0), scale_metadata={"note": "s"}).scale.note == "s"


# --- whole models ---------------------------------------------------------------------------------------------------

MODEL = """
import jax.numpy as jnp
from flax import nnx

class Block(nnx.Module):
    def __init__(self, channels, rngs):
        self.conv = nnx.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(x + self.norm(self.conv(x)))

class Model(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.blocks = nnx.List([Block(8, rngs) for _ in range(2)])
        self.up = nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.group, self.layer = nnx.GroupNorm(8, 2, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.gelu(self.stem(x)), (2, 2), strides=(2, 2))
        for block in self.blocks:
            x = block(x)
        x = self.group(self.up(x))
        x = nnx.avg_pool(x, (2, 2), padding="SAME").mean((1, 2))
        return nnx.log_softmax(self.head(self.layer(x)))
"""


def model(source: str):
    names: dict = {"__name__": __name__}
    exec(source, names)
    return names["Model"](rngs=nnx.Rngs(0))


def trained(net, steps=5):
    import optax

    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 16, 16, 3)), jnp.float32)
    labels = jnp.arange(6) % 3
    optimizer = nnx.Optimizer(net, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        def loss(net):
            return -jnp.mean(jnp.take_along_axis(net(x), labels[:, None], 1))

        value, grads = nnx.value_and_grad(loss)(net)
        optimizer.update(net, grads)
        return value

    net.train()
    return [float(step(net, optimizer)) for _ in range(steps)]


def test_a_model_moves_by_its_import():
    """Equal losses of five steps under nnx.jit and nnx.grad, and states that load both ways."""
    theirs, mine = model(MODEL), model(MODEL.replace("from flax import nnx", "from jaxprims import nnx"))
    assert type(mine.blocks[0].conv) is ours.Conv
    equal(values(mine), values(theirs))
    want, got = trained(theirs), trained(mine)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert want[-1] < want[0]
    close(values(mine), values(theirs), 1e-3)
    x = jnp.ones((1, 16, 16, 3))
    for source, target in ((theirs, mine), (mine, theirs)):
        saved = serialization.to_bytes(values(source))
        loaded(target, jax.tree.map(jnp.asarray, serialization.from_bytes(values(target), saved)))
        source.eval(), target.eval()
        equal(values(target), values(source))
        close(run(target, x)[0], run(source, x)[0])


def test_lifted_transformations():
    """nnx.vmap and nnx.scan over layers of stacked variables, nnx.remat, and split and merge under jax.vmap."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 4)), jnp.float32)
    xs = jnp.stack([x, x + 1, x * 2])

    def lifted(space):
        class Net(space.Module):
            def __init__(self, rngs):
                self.conv = space.Conv(4, 4, (3,), use_bias=False, rngs=rngs)
                self.norm = space.BatchNorm(4, rngs=rngs)

            def __call__(self, x):
                return self.norm(self.conv(x))

        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def build(rngs):
            return Net(rngs)

        each = build(nnx.Rngs(0))
        ys = nnx.vmap(lambda net, x: net(x))(each, xs)
        chained = build(nnx.Rngs(0))
        y = nnx.scan(lambda x, net: net(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, chained)
        single = Net(nnx.Rngs(1))
        grads = nnx.grad(nnx.remat(lambda net: objective(net(x))))(single)
        return ys, values(each), y, values(chained), nnx.to_pure_dict(grads), values(single)

    close(lifted(ours), lifted(nnx), 2e-5)


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each
def test_parity_on_a_gpu(case):
    """The table on the kernels (a case that none takes is an error), Flax beside it on XLA at HIGHEST.

    Gradients get a little more room: a sum over all pixels in another order, and Flax's fast variance beside ours.
    """
    if "no-window" in case.name:
        pytest.skip("its result has no elements: there is nothing to launch")
    theirs, mine, x = case.nnx_layer(nnx), case.nnx_layer(ours), case.data()
    tree = stir(values(theirs))
    loaded(theirs, tree), loaded(mine, tree)
    want = everything(theirs, x, **case.call())
    with jaxprims.use("cuda"):
        got = everything(mine, x, **case.call())
    close(got[0], want[0])
    close(got[1:], want[1:], 3e-5)


@pytest.mark.gpu
@plain
def test_half_types_on_a_gpu(case):
    with jaxprims.use("cuda"):
        for dtype in HALVES:
            check_half(case, dtype)


@pytest.mark.parametrize("make", ["Conv", "ConvTranspose", "BatchNorm", "LayerNorm", "GroupNorm"])
def test_an_unknown_activation_is_refused_at_construction(make):
    sizes = (4, 8, (3, 3)) if make.startswith("Conv") else (4,)
    options = dict(num_groups=2) if make == "GroupNorm" else {}
    with pytest.raises(ValueError, match="rleu"):
        getattr(ours, make)(*sizes, activation="rleu", rngs=nnx.Rngs(0), **options)
