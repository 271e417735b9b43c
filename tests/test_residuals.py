"""What a derivative keeps between forward and backward: operands and results in their own dtypes, nothing computed twice wide."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import jaxprims
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, floats

BYTES = {"bool": 1, "u8": 1, "u16": 2, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "f64": 8}


def residuals(capsys, fn, *args) -> list[tuple[str, tuple[int, ...], str]]:
    """(dtype, shape, where from) of everything that is kept."""
    capsys.readouterr()
    print_saved_residuals(fn, *args)
    lines = capsys.readouterr().out.splitlines()
    found = [re.match(r"(\w+)\[([\d,]*)\] (.*)", line) for line in lines]
    return [(m[1], tuple(int(d) for d in m[2].split(",") if d), m[3]) for m in found if m]


def size(kept) -> int:
    return sum(BYTES[d] * math.prod(shape) for d, shape, _ in kept)


@pytest.mark.parametrize("case", [c for c in CASES if "bfloat16" in c.dtypes and c.diff_args()], ids=case_id)
def test_nothing_wide_is_kept(case: Case, capsys):
    x = case.operands("bfloat16")
    args = case.diff_args()

    def of_diff(*d):
        full = list(x)
        for i, v in zip(args, d, strict=True):
            full[i] = v
        return floats(case.fn)(*full)

    kept = residuals(capsys, of_diff, *(x[i] for i in args))
    y = as_tuple(case.fn(*x))[0]
    made = [k for k in kept if "from the argument" not in k[2] and "constant" not in k[2] and "reshape" not in k[2]]
    # y itself, or a pool's indices, and statistics: never a float32 array of y's or x's size (lp_pool's sum is one).
    wide = [k for k in made if k[0] == "f32" and math.prod(k[1]) >= min(y.size, x[0].size)]
    if case.op == "lp_pool":
        assert [k[1] for k in wide] == [y.shape]
    elif y.size > 8:
        assert wide == []
    given = sum(a.nbytes for a in x)
    statistics = sum(BYTES[d] * math.prod(s) for d, s, _ in made if d == "f32")
    assert size(kept) <= given + max(y.nbytes, 4 * y.size if "argmax" in case.op else 0) + statistics, kept


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "elu", "tanh", "silu", "gelu", "softplus"])
def test_a_fused_convolution_keeps_one_array_of_its_result(activation: str, capsys):
    x, w, b = jnp.ones((2, 8, 8, 4), jnp.bfloat16), jnp.ones((3, 3, 4, 16), jnp.bfloat16), jnp.ones(16)
    kept = residuals(capsys, lambda x, w, b: jaxprims.conv(x, w, b, activation=activation), x, w, b)
    images = [k[:2] for k in kept if len(k[1]) == 4 and "argument" not in k[2]]
    assert images == [("bf16", (2, 8, 8, 16))]


def test_a_norm_with_relu_keeps_its_result_in_place_of_a_residual(capsys):
    x, scale, r = jnp.ones((2, 4, 4, 8), jnp.bfloat16), jnp.ones(8), jnp.ones((2, 4, 4, 8), jnp.bfloat16)
    for activation, many in (("relu", 1), ("silu", 0)):  # silu's slope needs what is in front of it
        kept = residuals(
            capsys, lambda x, s, r, a=activation: jaxprims.batch_norm(x, s, residual=r, activation=a)[0], x, scale, r
        )
        images = [k for k in kept if len(k[1]) == 4]
        assert all(k[0] == "bf16" for k in images)
        assert len([k for k in images if "argument" in k[2]]) == 2 - many
        assert len([k for k in images if "argument" not in k[2]]) == many


def test_layer_norm_keeps_x_scale_and_statistics(capsys):
    x, scale, bias = jnp.ones((4, 6, 32), jnp.bfloat16), jnp.ones(32), jnp.ones(32)
    kept = residuals(capsys, lambda x, s, b: jaxprims.layer_norm(x, s, b), x, scale, bias)
    assert sorted(k[:2] for k in kept) == [
        ("bf16", (4, 6, 32)),
        *[("f32", (4, 6))] * 3,
        ("f32", (32,)),
    ]  # mean, low, var
    kept = residuals(capsys, lambda x, s: jaxprims.rms_norm(x, s), x, scale)
    assert sorted(k[:2] for k in kept) == [("bf16", (4, 6, 32)), ("f32", (4, 6)), ("f32", (32,))]


def test_named_results_are_what_a_policy_keeps(capsys):
    x, w, s = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 4)), jnp.ones(4)

    def block(x, w, s):
        y = checkpoint_name(jaxprims.conv(x, w, activation="relu"), "conv")
        return jnp.sum(checkpoint_name(jaxprims.layer_norm(y, s), "norm"))

    for names, many in ((("conv",), 1), (("conv", "norm"), 1), ((), 0)):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        kept = residuals(capsys, jax.checkpoint(block, policy=policy), x, w, s)
        made = [k for k in kept if "argument" not in k[2]]
        assert [k[1] for k in made] == [(2, 6, 6, 4)] * many, (names, kept)
        got = jax.grad(jax.checkpoint(block, policy=policy), (0, 1, 2))(x, w, s)
        for g, h in zip(got, jax.grad(block, (0, 1, 2))(x, w, s), strict=True):
            assert jnp.allclose(g, h, atol=1e-6)
