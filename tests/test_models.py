"""The models: one definition on Flax's layers and on jaxprims', and what they keep in memory.

Parameters are made of NumPy's random numbers, none of them zero: the scales that a training run starts at zero would hide
what lies behind them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
optax = pytest.importorskip("optax")
from jaxprims.models import MODELS, loss_of, make, saved_bytes, train_step  # noqa: E402
from jaxprims.models.training import TrainState  # noqa: E402

EPS = float(jnp.finfo(jnp.float32).eps)
QUICK = {"xla_backend_optimization_level": "0"}  # the compiler is most of the time of these tests


def shapes(model, x) -> Any:
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), train=False))


def filled(tree, seed: int = 0):
    """Kernels of variance 1 / fan-in, scales and variances near 1, the rest near 0."""
    rng = np.random.default_rng(seed)

    def leaf(path, a):
        name = path[-1].key
        v = rng.standard_normal(a.shape).astype(np.float32)
        if name == "kernel":
            return jnp.asarray(v / math.sqrt(max(1, math.prod(a.shape[:-1]))))
        return jnp.asarray((1 if name in ("scale", "var", "gamma") else 0) + 0.1 * (np.abs(v) if name == "var" else v))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def small(name: str, layers: str = "jaxprims", memory: str = "default", dtype: Any = jnp.float32, **options):
    spec = MODELS[name]
    return make(name, layers, dtype, memory, **{**spec.small.options, **options})


def data(name: str, shape=None, classes: int = 10):
    spec, rng = MODELS[name], np.random.default_rng(1)
    shape = spec.small.shape if shape is None else shape
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    if spec.classes == "regression":
        return x, jnp.asarray(rng.standard_normal(spec.target_shape(shape)), jnp.float32)
    return x, jnp.asarray(rng.integers(0, classes, shape[:1]), jnp.int32)


def state_of(model, x, optimizer) -> TrainState:
    variables = filled(shapes(model, x))
    params = variables["params"]
    return TrainState(params, variables.get("batch_stats", {}), optimizer.init(params), jnp.zeros((), jnp.int32))


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile(QUICK)


def apart(a, b) -> float:
    """The largest difference of two trees, each array's by its own largest value."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max((float(np.max(np.abs(p - q)) / max(np.max(np.abs(q)), 1e-3)) for p, q in pairs), default=0.0)


def equal(a, b) -> bool:
    return all(np.array_equal(p, q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# Sums of up to 10^4 float32 terms in another order differ by sqrt(10^4) eps = 1e-5 of their terms' size; the deepest of the small
# models has a dozen of them in a row each way, of which the root counts, and norms subtract means behind them: ten times that.
TOLERANCE = 10 * math.sqrt(12) * 100 * EPS
ULPS = 16 * EPS  # of one computation, compiled twice

CONFIGS = [("flax", "default"), ("jaxprims", "default"), ("jaxprims", "recompute")]
NORMED = ("resnet18", "resnet50", "unet3d_block")  # those with batch statistics


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_on_both(name: str):
    """Parameter trees; in float32: results in inference; loss, gradients and batch statistics of a step; losses of the next.

    And the same in recompute mode, to the bit where the compiler makes one code of both.
    """
    optimizer = optax.sgd(0.01, momentum=0.9)  # after one step its momentum is the gradient
    (x, target), got = data(name), {}
    with jax.default_matmul_precision("highest"):
        for layers, memory in CONFIGS:
            model = small(name, layers, memory)
            state = state_of(model, x, optimizer)
            step = compiled(train_step(model, optimizer)[1], state, x, target)
            first, loss = step(state, x, target)
            losses = [loss, *losses_of(step, first, x, target, 2)]
            got[layers, memory] = {"gradients": first.optimizer, "batch statistics": first.stats, "losses": losses}
            if memory == "default":
                variables = filled(shapes(model, x))
                forward = functools.partial(model.apply, train=False)
                got[layers, memory]["results"] = compiled(forward, variables, x)(variables, x)
            if name == "resnet18" and memory == "default":
                got[layers, memory]["fifty"] = np.array(losses_of(step, state, x, target, 50))
                if layers == "flax":  # from parameters that differ by rounding
                    near = jax.tree.map(lambda p: p * (1 + 8 * EPS), state.params)
                    yardstick = np.array(losses_of(step, state._replace(params=near), x, target, 50))
    theirs, ours = got["flax", "default"], got["jaxprims", "default"]
    for what in theirs.keys() - {"fifty"}:
        assert apart(ours[what], theirs[what]) < TOLERANCE, what
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(ours["gradients"])), "a gradient is zero"
    assert bool(ours["batch statistics"]) == (name in NORMED)
    for what, value in got["jaxprims", "recompute"].items():
        assert apart(value, ours[what]) <= (ULPS if name in ("convnext_t", "unet_block") else 0), what
    if name == "resnet18":
        compare_training(ours["fifty"], theirs["fifty"], yardstick)


def losses_of(step, state, x, target, many: int) -> list:
    losses = []
    for _ in range(many):
        state, loss = step(state, x, target)
        losses.append(float(loss))
    return losses


def compare_training(ours: np.ndarray, theirs: np.ndarray, yardstick: np.ndarray) -> None:
    """Losses side by side. Training magnifies rounding: how much is learned from a second run of Flax's, which begins 8 ulp off.

    Ours differs from Flax's by more roundings, in every step, than that: ten times as far is allowed, and TOLERANCE in any case.
    """
    assert theirs[-1] < 0.5 * theirs[0], "nothing was learned"
    spread = np.maximum.accumulate(np.abs(yardstick - theirs) / theirs)
    assert np.all(np.abs(ours - theirs) / theirs <= TOLERANCE + 10 * spread), np.stack([theirs, ours, spread])


# --- the programs -------------------------------------------------------------------------------------------------------------


def equations(fn, *args) -> dict[str, int]:
    """How often each primitive stands in a function's program, in inner functions too."""
    count: dict[str, int] = {}

    def walk(jaxpr) -> None:
        for e in jaxpr.eqns:
            count[e.primitive.name] = count.get(e.primitive.name, 0) + 1
            for value in jax.tree.leaves(list(e.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
                inner = value if hasattr(value, "eqns") else getattr(value, "jaxpr", None)
                if hasattr(inner, "eqns"):
                    walk(inner)

    jaxpr = jax.make_jaxpr(fn)(*args)
    walk(jaxpr if hasattr(jaxpr, "eqns") else jaxpr.jaxpr)
    return count


def loss_and_arguments(model, x, target):
    """``loss(params, stats, x)`` in training, and its arguments as shapes."""
    variables = shapes(model, x)

    def loss(params, stats, x):
        y, _ = model.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return loss_of(model, y, target)

    return loss, (variables["params"], variables.get("batch_stats", {}), jax.ShapeDtypeStruct(x.shape, x.dtype))


PRODUCTS = ("conv", "conv_fused", "conv_dx", "conv_dw", "conv_general_dilated", "dot_general")
XLA_OPS = ("conv_general_dilated", "reduce_window", "reduce_window_max", "reduce_window_sum", "select_and_scatter_add")
# Ops of the forward pass. A fused activation of ReLU's kind needs no second product.
EXPECTED = {
    "resnet18": {"conv": 6, "norm": 6, "max_pool": 1},
    "resnet50": {"conv": 9, "norm": 9, "max_pool": 1},
    "alexnet": {"conv_fused": 5, "max_pool": 3, "lrn": 2},
    "convnext_t": {"conv_fused": 5, "norm": 6},
    "unet_block": {"conv_fused": 12, "norm": 8},
    "unet3d_block": {"conv": 6, "norm": 6, "max_pool": 1, "conv_fused": 2},
    "causal_conv": {"conv_fused": 1, "norm": 1},
    "dqn": {"conv_fused": 3},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_programs(name: str):
    """jaxprims' ops do the work, each once; recompute mode repeats no product, on either namespace, and keeps less."""
    x, target = data(name)
    ours = small(name)
    forward = equations(functools.partial(ours.apply, train=True, mutable=["batch_stats"]), shapes(ours, x), x)
    assert {k: forward.get(k, 0) for k in EXPECTED[name]} == EXPECTED[name]
    kept = {}
    for layers in ("flax", "jaxprims"):
        for memory in ("default", "recompute"):
            loss, args = loss_and_arguments(small(name, layers, memory), x, target)
            count = equations(jax.grad(loss), *args)
            kept[layers, memory] = saved_bytes(loss, *args)
            products = {k: count.get(k, 0) for k in PRODUCTS}
            if memory == "default":
                once = products
            assert products == once, (layers, memory)
            if layers == "jaxprims":
                assert not set(count) & set(XLA_OPS)
                assert {k: count[k] for k in forward if k in EXPECTED[name] and k.startswith("conv")} == {
                    k: v for k, v in EXPECTED[name].items() if k.startswith("conv")
                }
    for layers in ("flax", "jaxprims"):
        less, more = kept[layers, "recompute"], kept[layers, "default"]
        assert less == more if name == "dqn" else less < more, (name, layers)
    print(name, kept)
