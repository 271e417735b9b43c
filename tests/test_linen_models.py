"""Pools, softmax, the namespace of jaxprims.linen, and whole models moved to it by their import."""

from __future__ import annotations

import importlib
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.layers import XLA, close, custom_calls, equal, fast, objective, primitives

pytest.importorskip("flax")
from flax import linen, serialization

from jaxprims import linen as ours

HALVES = (jnp.bfloat16, jnp.float16)


def init(net, x):
    return fast(net.init)(jax.random.key(1), x)


# --- pools and softmax ----------------------------------------------------------------------------------------------

POOLS = {
    "max": ("max_pool", (2, 6, 5, 4), ((2, 2),), {}),
    "max-strides-same": ("max_pool", (2, 6, 5, 4), ((3, 2), (2, 1), "SAME"), {}),
    "max-pairs": ("max_pool", (2, 6, 5, 4), ((3, 3), (2, 2), ((1, 1), (0, 2))), {}),
    "max-1d": ("max_pool", (2, 9, 4), ((3,), (2,)), {}),
    "max-3d-one-image": ("max_pool", (4, 5, 3, 2), ((2, 2, 1),), {}),
    "max-two-batch-axes": ("max_pool", (2, 3, 6, 5, 4), ((2, 2), (2, 2)), {}),
    "avg": ("avg_pool", (2, 6, 5, 4), ((2, 2),), dict(strides=(2, 2))),
    "avg-same": ("avg_pool", (2, 6, 5, 4), ((3, 3),), dict(padding="SAME")),
    "avg-same-own-count": ("avg_pool", (2, 6, 5, 4), ((3, 3),), dict(padding="SAME", count_include_pad=False)),
    "avg-one-image-own-count": ("avg_pool", (6, 5, 4), ((2, 3), (1, 2), ((1, 0), (1, 1)), False), {}),
}
BY_FLAX = {
    "pad-as-large-as-the-window": ("max_pool", (2, 6, 5, 4), ((2, 2), (1, 1), ((2, 2), (0, 0))), {}),
    "avg-of-padding": ("avg_pool", (2, 6, 5, 4), ((2, 2), (1, 1), ((2, 0), (0, 3))), {}),
    "no-window-fits": ("max_pool", (2, 3, 5, 4), ((4, 2),), {}),
    "no-window-fits-pads": ("avg_pool", (2, 3, 5, 4), ((6, 2), (1, 1), ((1, 1), (0, 0))), {}),
    "four-axes": ("max_pool", (2, 3, 4, 3, 4, 2), ((2, 2, 1, 2),), {}),
}


def pooled(nn, row, dtype=jnp.float32):
    name, shape, args, options = row
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    fn = lambda x: getattr(nn, name)(x, *args, **options)  # noqa: E731
    return fn, x


@pytest.mark.parametrize("name", POOLS)
def test_pools(name):
    results = []
    for nn in (ours, linen):
        fn, x = pooled(nn, POOLS[name])
        results.append(fast(lambda x, fn=fn: (fn(x), jax.grad(lambda x: objective(fn(x)))(x)))(x))
        results[-1] += ([jax.eval_shape(fn, x.astype(dtype)).dtype.name for dtype in HALVES],)
        if nn is ours:
            assert not primitives(fn, x) & XLA
            assert custom_calls(fn, x) == [POOLS[name][0]]
    close(results[0][:2], results[1][:2])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("name", BY_FLAX)
def test_pools_that_flax_answers(name):
    got, want = (fn(x) for fn, x in (pooled(nn, BY_FLAX[name]) for nn in (ours, linen)))
    np.testing.assert_array_equal(got, want)


def test_pools_of_other_kinds():
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (2, 6, 5, 4)), jnp.int32)
    for name in ("max_pool", "min_pool"):
        want = getattr(linen.pooling, name)(x.astype(jnp.float32), (2, 2))
        np.testing.assert_array_equal(getattr(ours, name)(x, (2, 2)), want)
        np.testing.assert_array_equal(getattr(ours, name)(x, (2, 2), 2), want[:, ::2, ::2])
    y = x.astype(jnp.float32)
    first = jnp.moveaxis(y, -1, 1)
    close(ours.max_pool(first, (3, 2), layout="NCHW"), jnp.moveaxis(ours.max_pool(y, (3, 2)), -1, 1))
    close(ours.avg_pool(y, (2, 2), window_dilation=2), jaxprims.avg_pool(y, (2, 2), window_dilation=2))
    assert float(ours.avg_pool(jnp.ones((1, 256, 256, 1), jnp.float16), (256, 256))[0, 0, 0, 0]) == 1.0
    with pytest.raises(ValueError, match="is not smaller than the window"):  # our own keyword: no Flax to fall to
        ours.max_pool(first, (2, 2), padding=((2, 2), (0, 0)), layout="NCHW")
    with pytest.raises(TypeError, match="window_shape"):
        ours.max_pool(y, 2)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 4)) * 4, jnp.float32)
    where = jnp.asarray(np.random.default_rng(1).random((5, 4)) < 0.7).at[:, 0].set(True)
    mine, theirs = getattr(ours, name), getattr(linen, name)
    for options in ({}, dict(axis=1), dict(axis=(0, 2)), dict(where=where), dict(axis=-2, where=where.at[0].set(True))):
        close(jnp.exp(mine(x, **options)), jnp.exp(theirs(x, **options)))
        assert primitives(lambda x, o=options: mine(x, **o), x) >= {name}
    close(mine(x.astype(jnp.int32)), theirs(x.astype(jnp.int32)))
    larger = (jnp.exp(f(x[0, 0], where=where)) for f in (mine, theirs))
    close(*larger)


# --- the namespace --------------------------------------------------------------------------------------------------


def test_every_other_name_is_flax_s_own():
    own = {"BatchNorm", "Conv", "ConvTranspose", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"}
    own |= {"avg_pool", "log_softmax", "max_pool", "softmax"}
    for name in [n for n in dir(linen) if not n.startswith("__")]:
        assert name in dir(ours)
        assert (getattr(ours, name) is getattr(linen, name)) == (name not in own), name
    for name in own & set(dir(linen)):
        mine, theirs = getattr(ours, name), getattr(linen, name)
        assert mine.__module__.startswith("jaxprims")
        if inspect.isclass(mine):
            assert issubclass(mine, theirs) and mine.__name__ == theirs.__name__
        shared = [p for p in inspect.signature(mine).parameters.values() if p.name not in ("activation", "layout")]
        arguments = list(inspect.signature(theirs).parameters.values())
        assert [(p.name, p.default) for p in shared[: len(arguments)]] == [(p.name, p.default) for p in arguments]
    names: dict = {}
    exec("from jaxprims.linen import *\nfrom jaxprims.linen import Dense, initializers", names)
    assert names["Dense"] is linen.Dense and names["Conv"] is ours.Conv and names["lp_pool"] is jaxprims.lp_pool
    with pytest.raises(AttributeError, match="no attribute 'Convolution'"):
        ours.Convolution  # noqa: B018
    layer = ours.Conv(3, (3, 3), activation="relu", kernel_init=linen.initializers.zeros)
    assert pickle.loads(pickle.dumps(layer)).activation == "relu"


@pytest.mark.parametrize("name", ["jaxprims.linen.linear", "jaxprims.linen.module", "jaxprims.nnx.variablelib"])
def test_flax_files_are_not_loaded_a_second_time(name):
    """A second Module or Param class would be another type than Flax's, silently."""
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        importlib.import_module(name)


@pytest.mark.parametrize(
    "layer",
    [
        ours.Conv(4, (3, 3), conv_general_dilated=lambda *a, **k: jax.lax.conv_general_dilated(*a, **k)),
        ours.Conv(4, (3, 3)),
        ours.LayerNorm(reduction_axes=()),
        ours.LayerNorm(),
        ours.GroupNorm(num_groups=2),
    ],
    ids=["conv-by-flax", "conv", "layer-norm-by-flax", "layer-norm", "group-norm"],
)
def test_interceptors_and_captures_see_one_call(layer):
    def twice(call, args, kwargs, context):
        y = call(*args, **kwargs)
        return 2 * y if context.method_name == "__call__" else y

    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 4, 4)), jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    y, captured = layer.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    assert len(captured["intermediates"]["__call__"]) == 1
    with linen.intercept_methods(twice):
        equal(layer.apply(variables, x), 2 * y)


def test_a_function_as_activation_is_told_where_it_goes():
    class Own(ours.Conv):
        activation: object = linen.relu

    with pytest.raises(TypeError, match="must be a name, as 'relu'.*on the result"):
        Own(4, (3, 3)).init(jax.random.key(0), jnp.ones((1, 4, 4, 3)))


@pytest.mark.parametrize("padding", [np.array([[1, 0], [2, 1]]), np.array([1, 2]), np.int32(1)], ids=str)
def test_padding_may_be_an_array_of_numpy(padding):
    x = jnp.ones((1, 5, 5, 2))
    y, variables = ours.Conv(3, (3, 3), padding=padding).init_with_output(jax.random.key(0), x)
    equal(y, ours.Conv(3, (3, 3), padding=padding.tolist()).apply(variables, x))
    y, variables = ours.ConvTranspose(3, (3, 3), padding=padding).init_with_output(jax.random.key(0), x)
    equal(y, ours.ConvTranspose(3, (3, 3), padding=padding.tolist()).apply(variables, x))


def test_importing_jaxprims_does_not_import_flax():
    import subprocess
    import sys

    code = "import jaxprims, sys; assert not [m for m in sys.modules if m.startswith('flax')]"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import sys; sys.modules['flax'] = None\ntry: import jaxprims.linen\nexcept ModuleNotFoundError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'jaxprims[flax]'" in done.stdout


# --- whole models ---------------------------------------------------------------------------------------------------

MODEL = """
from functools import partial
from flax import linen as nn

class Block(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x, train):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.channels, (3, 3), use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(self.channels, (3, 3))(y))
        return nn.relu(x + y)

class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), strides=2, padding="SAME")(x)
        x = nn.max_pool(nn.gelu(x), (2, 2), strides=(2, 2))
        x = Block(8)(x, train)
        x = nn.GroupNorm(num_groups=2)(nn.ConvTranspose(8, (2, 2), strides=(2, 2))(x))
        x = nn.avg_pool(x, (2, 2), padding="SAME", count_include_pad=False)
        x = nn.LayerNorm()(x.reshape(x.shape[0], -1))
        return nn.log_softmax(nn.Dense(3)(nn.Dropout(0.5, deterministic=True)(x)))
"""


def model(source: str):
    names: dict = {"__name__": __name__}
    exec(source, names)
    return names["Model"]()


def trained(net, variables, steps=5):
    import optax

    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 16, 16, 3)), jnp.float32)
    labels = jnp.arange(6) % 3
    optimizer = optax.sgd(0.02, momentum=0.9)

    @fast
    def step(variables, state):
        def loss(params):
            out, changed = net.apply(variables | {"params": params}, x, mutable=["batch_stats"])
            return -jnp.mean(jnp.take_along_axis(out, labels[:, None], 1)), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, state = optimizer.update(grads, state)
        return {"params": optax.apply_updates(variables["params"], updates)} | changed, state, value

    state, losses = optimizer.init(variables["params"]), []
    for _ in range(steps):
        variables, state, value = step(variables, state)
        losses.append(float(value))
    return losses, variables


def test_a_model_moves_by_its_import():
    """Equal losses of five steps, and checkpoints that load both ways."""
    moved = MODEL.replace("from flax import linen", "from jaxprims import linen")
    theirs, mine = model(MODEL), model(moved)
    x = jnp.ones((1, 16, 16, 3))
    variables = init(theirs, x)
    equal(init(mine, x), variables)
    want, want_variables = trained(theirs, variables)
    got, got_variables = trained(mine, variables)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert want[-1] < want[0]
    for source, target in ((want_variables, variables), (got_variables, variables)):
        loaded = serialization.from_bytes(target, serialization.to_bytes(source))
        equal(jax.tree.map(jnp.asarray, loaded), source)
        close(*(fast(lambda v, x, net=net: net.apply(v, x, train=False))(loaded, x) for net in (mine, theirs)))
    names = primitives(lambda v: mine.apply(v, x, train=False), variables)
    assert names >= {"conv_fused", "conv", "norm", "norm_apply", "max_pool", "avg_pool", "log_softmax"}
    assert not names & (XLA - {"square", "exp", "rsqrt"})


@pytest.mark.parametrize("lift", ["vmap", "scan", "remat", "jit", "partitioned"])
def test_lifted_transformations(lift):
    """The layers under Flax's transformations: variables, numbers and gradients as Flax's own."""

    def build(nn):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x, _=None):
                x = nn.Conv(4, (3,), activation="relu")(x) if nn is ours else nn.relu(nn.Conv(4, (3,))(x))
                return nn.BatchNorm(use_running_average=False)(x), None

        both = dict(variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True})
        if lift == "vmap":
            return nn.vmap(Net, in_axes=0, out_axes=0, **both)()
        if lift == "scan":
            return nn.scan(Net, length=3, **both)()
        if lift == "partitioned":
            kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None, "model"))
            return nn.Conv(4, (3,), kernel_init=kernel)
        return {"remat": nn.remat, "jit": nn.jit}[lift](Net)()

    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 7, 4)), jnp.float32)
    theirs, mine = build(linen), build(ours)
    args = (x, None) if lift == "scan" else (x,)
    variables = fast(theirs.init)(jax.random.key(0), *args)
    equal(fast(mine.init)(jax.random.key(0), *args), variables)

    def run(net):
        def loss(variables):
            y, changed = net.apply(variables, *args, mutable=["batch_stats"])
            return objective(jax.tree.leaves(y)[0]), changed

        return fast(jax.value_and_grad(loss, has_aux=True))(variables)

    close(run(mine), run(theirs))
