"""The models: one definition on Flax's layers and on jaxprims', and what they keep in memory.

Parameters are made of NumPy's random numbers, none of them zero: the scales that a training run starts at zero would hide
what lies behind them.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
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


# Sums of up to 10^4 float32 terms in another order differ by sqrt(10^4) eps = 1e-5 of their terms' size; the deepest of the small
# models has a dozen of them in a row each way, of which the root counts, and norms subtract means behind them: ten times that.
SUMS = math.sqrt(12) * 100 * EPS
TOLERANCE = 10 * SUMS
ULPS = 16 * EPS  # of one computation, compiled twice

CONFIGS = [("flax", "default"), ("jaxprims", "default"), ("jaxprims", "recompute")]
RECOMPUTED = {"resnet18": 0, "unet3d_block": 0, "causal_conv": 0, "convnext_t": ULPS, "unet_block": ULPS}
NORMED = ("resnet18", "resnet50", "unet3d_block")  # those with batch statistics


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_on_both(name: str):
    """Parameter trees; in float32: results in inference; loss, gradients and batch statistics of a step; losses of the next.

    And for some of the models the same in recompute mode, to the bit where the compiler makes one code of both.
    """
    optimizer = optax.sgd(0.01, momentum=0.9)  # after one step its momentum is the gradient
    (x, target), got = data(name), {}
    with jax.default_matmul_precision("highest"):
        for layers, memory in CONFIGS if name in RECOMPUTED else CONFIGS[:2]:
            model = small(name, layers, memory)
            state = state_of(model, x, optimizer)
            train = train_step(model, optimizer)[1]

            def both(
                state, x, target, model=model, train=train
            ):  # one program: the compiler makes one code of what is alike
                y = model.apply({"params": state.params, "batch_stats": state.stats}, x, train=False)
                return train(state, x, target), y

            program = compiled(both, state, x, target)

            def step(*args, program=program):
                return program(*args)[0]

            (first, loss), y = program(state, x, target)
            losses = [loss, *losses_of(step, first, x, target, 2)]
            got[layers, memory] = {
                "results": y, "gradients": first.optimizer, "batch statistics": first.stats, "losses": losses,
            }  # fmt: skip
            if name == "resnet18" and memory == "default":
                got[layers, memory]["fifty"] = np.array(losses_of(step, state, x, target, 50))
                if layers == "flax":  # from parameters that differ by rounding
                    near = jax.tree.map(lambda p: np.asarray(p) * np.float32(1 + 8 * EPS), state.params)
                    yardstick = np.array(losses_of(step, state._replace(params=near), x, target, 50))
    theirs, ours = got["flax", "default"], got["jaxprims", "default"]
    for what in theirs.keys() - {"fifty"}:
        assert apart(ours[what], theirs[what]) < TOLERANCE, what
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(ours["gradients"])), "a gradient is zero"
    assert bool(ours["batch statistics"]) == (name in NORMED)
    for what, value in got.get(("jaxprims", "recompute"), {}).items():
        assert apart(value, ours[what]) <= RECOMPUTED[name], what
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

    Ours differs from Flax's by other roundings, in every step: four times as far is allowed, beside that of one step's sums.
    """
    assert theirs[-1] < 0.5 * theirs[0], "nothing was learned"
    spread = np.maximum.accumulate(np.abs(yardstick - theirs) / theirs)
    assert np.all(np.abs(ours - theirs) / theirs <= SUMS + 4 * spread), np.stack([theirs, ours, spread])


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
        assert less == more if name == "dqn" else less < more, (name, layers)  # ReLU keeps nothing beside its result
    assert kept["jaxprims", "default"] < kept["flax", "default"]


# --- at full size, as shapes alone ----------------------------------------------------------------------------------------

PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "alexnet": 60_965_224,
    "convnext_t": 28_589_128,
}  # as published


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_results_at_full_size(name: str):
    spec = MODELS[name]
    x = jax.ShapeDtypeStruct(spec.input_shape(2), jnp.bfloat16)
    trees = []
    for layers in ("flax", "jaxprims"):
        model = make(name, layers, jnp.bfloat16)
        trees.append(variables := shapes(model, x))
        y = jax.eval_shape(functools.partial(model.apply, train=False), variables, x)
        assert y.dtype == jnp.bfloat16
        assert y.shape == (spec.target_shape(x.shape) if spec.classes == "regression" else (2, spec.classes))
    assert trees[0] == trees[1]
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(trees))
    if name in PARAMETERS:
        assert sum(math.prod(a.shape) for a in jax.tree.leaves(trees[0]["params"])) == PARAMETERS[name]


def resnet50_bytes(batch: int = 256) -> dict[str, int]:
    """What ResNet-50 keeps in bfloat16, by hand: outputs of convolutions, norms inside blocks, and so on."""
    made = {"conv": 112 * 112 * 64, "inner": 0, "block": [], "pool": 56 * 56 * 64}
    size = 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        f = 64 * 2**stage
        for i in range(blocks):
            entry = size * size * f
            size //= 2 if stage > 0 and i == 0 else 1
            inner, out = entry + size * size * f, 4 * size * size * f
            made["conv"] += inner + out * (2 if i == 0 else 1)
            made["inner"] += inner
            made["block"].append(out)
    kept = {k: 2 * batch * v for k, v in made.items() if k != "block"}
    kept["block"] = 2 * batch * sum(made["block"])
    kept["every second block"] = 2 * batch * sum(made["block"][1:-1:2])  # the last one is only averaged
    kept["pool"] += batch * made["pool"]  # one byte more of each for the place of its maximum
    return kept


def test_what_resnet50_keeps():
    """By :func:`saved_bytes` at batch 256 in bfloat16, and by hand: the rest are weights in bfloat16 and statistics.

    In recompute mode at most 0.75 of the default.
    """
    x = jax.ShapeDtypeStruct((256, 224, 224, 3), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((256,), jnp.int32)
    got = {}
    for layers, memory in CONFIGS:
        model = make("resnet50", layers, jnp.bfloat16, memory)
        _, args = loss_and_arguments(model, x, labels)

        def logits(params, stats, x, model=model):
            return model.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])[0]

        got[layers, memory] = saved_bytes(logits, *args)
    k = resnet50_bytes()
    default = k["conv"] + k["pool"] + k["inner"] + k["block"]
    recompute = k["conv"] + k["pool"] + k["every second block"]
    weights = 2 * PARAMETERS["resnet50"]
    assert 0 <= got["jaxprims", "default"] - default < 1.1 * weights
    assert 0 <= got["jaxprims", "recompute"] - recompute < 1.1 * weights
    assert got["jaxprims", "recompute"] / got["jaxprims", "default"] < 0.68
    row = f"| `resnet50` | 256 | {got['jaxprims', 'default'] / 2**30:.2f} GiB | {got['jaxprims', 'recompute'] / 2**30:.2f} GiB |"
    assert row in (Path(__file__).parent.parent / "README.md").read_text()
    assert got["jaxprims", "default"] < 0.35 * got["flax", "default"]  # float32 copies, which XLA mostly does not make


# --- dtypes, options, errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "dqn"])
def test_bfloat16_trains(name: str):
    x, target = data(name)
    model = small(name, dtype=jnp.bfloat16)
    init, step = train_step(model)
    state = state_of(model, x, optax.sgd(0.01, momentum=0.9))
    assert jax.tree.structure(jax.eval_shape(init, jax.random.key(0), x)) == jax.tree.structure(state)
    step = compiled(step, state, x, target)
    losses = losses_of(step, state, x, target, 8)
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(state.params))


def test_init_gives_each_agent_its_own():
    x = jnp.zeros(MODELS["dqn"].small.shape)
    state = train_step(small("dqn", actions=2))[0](jax.random.key(3, impl="rbg"), x)
    first = np.asarray(state.params["agents"]["Conv_0"]["kernel"])
    assert int(state.count) == 0 and first.std() > 0
    assert not np.allclose(first[0], first[1]), "agents start alike"


def test_stochastic_depth_depends_on_the_count_of_steps():
    x, target = data("convnext_t", (8, 16, 16, 3))
    options = dict(depths=(2,), widths=(8,), drop=0.5)
    model = small("convnext_t", **options)
    optimizer = optax.sgd(0.0)
    state = state_of(model, x, optimizer)
    step = compiled(train_step(model, optimizer)[1], state, x, target)
    after, first = step(state, x, target)
    again, second = step(state, x, target)[1], step(after, x, target)[1]
    assert first == again and first != second
    assert model.random and small("alexnet", dropout=0.5).random
    assert not small("convnext_t").random and not small("alexnet").random


def test_dropout_takes_its_random_numbers_from_the_step():
    x, target = data("alexnet")
    model = small("alexnet", dropout=0.5)
    state = state_of(model, x, optax.sgd(0.01, momentum=0.9))
    assert equations(train_step(model)[1], state, x, target).get("random_bits", 0) == 2
    assert "random_bits" not in equations(train_step(small("alexnet"))[1], state, x, target)


def test_convnext_takes_convolutions_for_its_products():
    x, _ = data("convnext_t")
    dense, conv = (small("convnext_t", pointwise=p) for p in ("dense", "conv"))
    variables = filled(shapes(dense, x))
    other = jax.tree.map(lambda s, a: a.reshape(s.shape), shapes(conv, x), renamed(variables))
    y, z = (
        compiled(functools.partial(m.apply, train=False), v, x)(v, x) for m, v in ((dense, variables), (conv, other))
    )
    assert apart(z, y) < TOLERANCE


def renamed(tree):
    """ConvNeXt's Dense_i inside blocks as Conv_{i + 1}."""
    if not isinstance(tree, dict):
        return tree
    inside = "gamma" in tree
    return {(f"Conv_{int(k[6:]) + 1}" if inside and k.startswith("Dense_") else k): renamed(v) for k, v in tree.items()}


def test_the_recurrence_and_the_times_reach_the_result():
    x, _ = data("causal_conv")
    model = small("causal_conv", recurrence=True)
    variables = filled(shapes(model, x))
    grad = compiled(jax.grad(lambda x: model.apply(variables, x)[0, 20].sum()), x)(x)[0]
    assert np.abs(grad[:17]).max() > 0, "the recurrence remembers beyond the window"
    assert np.abs(grad[21:]).max() == 0, "nothing from the future"
    x, _ = data("unet_block")
    model = small("unet_block")
    variables = filled(shapes(model, x))
    run = compiled(model.apply, variables, x, jnp.zeros(2))
    a, b = run(variables, x, jnp.zeros(2)), run(variables, x, jnp.array([0.0, 7.0]))
    assert np.allclose(a[0], b[0], atol=1e-5) and not np.allclose(a[1], b[1], atol=1e-3)
    assert jax.eval_shape(model.apply, variables, x).shape == x.shape, "times may be left out"


def test_keep_every_trades_products_for_nothing():
    """One block output kept in more: fewer bytes, the same products, the same gradients."""
    x, target = data("resnet18")
    kept = []
    for many in (1, 2):
        loss, args = loss_and_arguments(small("resnet18", memory="recompute", keep_every=many), x, target)
        kept.append(saved_bytes(loss, *args))
    block = 4 * 4 * 8 * 8 * 8  # float32 of (4, 8, 8, 8)
    assert kept[0] - kept[1] == block


def test_errors_name_what_there_is():
    with pytest.raises(ValueError, match="resnet51.*resnet50"):
        make("resnet51")
    with pytest.raises(ValueError, match="layers='torch'.*'jaxprims', 'flax'"):
        make("dqn", layers="torch")
    with pytest.raises(ValueError, match="memory='less'.*'default', 'recompute'"):
        make("dqn", memory="less")
    with pytest.raises(ValueError, match="pointwise='matrix'.*'dense' or 'conv'"):
        shapes(small("convnext_t", pointwise="matrix"), data("convnext_t")[0])
