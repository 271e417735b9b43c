"""PyTorch's side of the models' benchmark: the same models, timed as is said; without PyTorch, what can be known without it."""

from __future__ import annotations

import contextlib
import math

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")

import jax
import jax.numpy as jnp

from jaxprims import models as registry
from jaxprims.bench import model_worker, models
from jaxprims.bench.model_rows import ModelRow


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
@pytest.mark.parametrize("name", registry.MODELS)
def test_pytorchs_definition_has_the_same_parameters(name, small):
    torch = pytest.importorskip("torch")
    from jaxprims.bench import torch_models

    spec = registry.MODELS[name]
    row = ModelRow(name, spec.batch, small=small)
    given = dict(spec.small.options) if small else {}
    with torch.device("meta"):
        model = torch_models.build(name, row.shape, given)
    init, _ = registry.train_step(registry.make(name, layers="flax", **given))
    state = jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct(row.shape, jnp.float32))
    theirs = sorted(p.numel() for p in model.parameters())
    assert theirs == sorted(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("name", registry.MODELS)
def test_pytorchs_definition_trains(name):
    pytest.importorskip("torch")
    from jaxprims.bench import torch_models

    training = torch_models.Training(ModelRow(name, 1, "f32", small=True), "cpu")
    losses = [float(training.step()) for _ in range(8)]
    assert all(math.isfinite(v) for v in losses) and min(losses[1:]) < losses[0]


class FakeCuda:
    """As much of torch.cuda as timing needs; `log` says what was enqueued on which stream."""

    def __init__(self):
        self.log, self.current, self.cuda = [], None, self

    def Stream(self):
        return "side"

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = None

    def Event(self, enable_timing):
        log, where = self.log, self

        class Event:
            def record(self):
                log.append(("event", where.current))

            def synchronize(self):
                log.append("wait")

            def elapsed_time(self, end):
                return 12.0

        return Event()

    def CUDAGraph(self):
        class Graph:
            replay = staticmethod(lambda: self.log.append(("replay", self.current)))

        return Graph()

    @contextlib.contextmanager
    def graph(self, graph, stream):
        self.log.append(("capture", stream))
        yield


def test_pytorchs_steps_lie_between_events_and_become_a_graph():
    torch = FakeCuda()
    steps = model_worker.TorchSteps(torch, lambda: torch.log.append(("step", torch.current)) or "loss", gpu=True)
    assert steps.call(2) == pytest.approx(0.012) and steps.loss == "loss"
    event, step = ("event", "side"), ("step", "side")
    assert torch.log == [event, step, step, event, "wait"]
    steps.capture()
    torch.log.clear()
    steps.call(3)
    assert torch.log == [event, *[("replay", "side")] * 3, event, "wait"] and steps.loss == "loss"


def test_pytorch_is_timed_on_a_cpu():
    pytest.importorskip("torch")
    options = models.parser().parse_args(["--samples", "2", "--sample-seconds", "0.001"])
    told = models.measure(models.context(), ModelRow("dqn", 1, small=True), "torch", options, on_gpu=False)
    assert not told.failed and told.ms and told.figures["parameters"] == 7746, told.notes
    assert told.figures["runs_as"] == "calls back to back"
