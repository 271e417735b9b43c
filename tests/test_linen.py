"""jaxprims.linen beside flax.linen: parameters, numbers, gradients, running statistics, dtypes, and what it adds."""

from __future__ import annotations

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.layers import CASES, OUT, XLA, case_id, close, custom_calls, equal, objective, primitives, stir

pytest.importorskip("flax")
from flax import linen, serialization  # noqa: E402

from jaxprims import linen as ours  # noqa: E402

each = pytest.mark.parametrize("case", CASES, ids=case_id)


def init(layer, x, **call):
    return layer.init(jax.random.key(1), x, **call)


def applied(layer, variables, x, **call):
    """(y, the collections that changed)."""
    return layer.apply(variables, x, mutable=["batch_stats"], **call)


def everything(layer, variables, x, **call):
    """(y, changed collections), gradients in parameters and x."""
    params = {"params": variables.get("params", {})}

    def loss(params, x):
        y, changed = applied(layer, variables | params, x, **call)
        return objective(y), (y, changed)

    with jax.default_matmul_precision("highest"):
        (_, outcome), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return outcome, grads


@each
def test_parity(case):
    """The same variables for the same key; with those: outputs, running statistics, gradients."""
    flax_layer, layer, x = case.linen(linen), case.linen(ours), case.data()
    variables = init(flax_layer, x, **case.call())
    equal(init(layer, x, **case.call()), variables)
    variables = stir(variables)
    close(everything(layer, variables, x, **case.call()), everything(flax_layer, variables, x, **case.call()))


@each
def test_the_ops_are_ours(case):
    """In the jaxpr no XLA convolution or reduction; on a GPU one kernel, which takes bias or scale along."""
    layer, x = case.linen(ours), case.data()
    variables = init(layer, x, **case.call())

    def forward(variables, x):
        return applied(layer, variables, x, **case.call())

    wraps = {"reduce_sum"} if "circular" in case.name and case.layer == "ConvTranspose" else set()
    assert not primitives(forward, variables, x) & (XLA - wraps)
    if not wraps and x.size and 0 not in jax.eval_shape(forward, variables, x)[0].shape:
        assert custom_calls(forward, variables, x) == sorted(case.custom_calls())
