"""First layers (C <= 4): the plan of their kernels without a GPU (tests/conv_first.cpp), and random shapes on one (mark gpu)."""

from __future__ import annotations

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.native import FORWARD, INPUT_GRAD, WEIGHT_GRAD, build, dw_workspace
from tests.test_cuda_fuzz import COUNT, check, log_int


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("conv_first", tmp_path_factory.mktemp("conv_first"))


def workspace(b, *shape):
    return dw_workspace(*shape, dtype="bfloat16", batched=(b,) if b > 1 else ())


PAPER1 = (1, 128, 3, 128, 96, 11, 1, 0)
STEM = (1, 256, 3, 224, 64, 7, 2, 3)
CIFAR = (10, 256, 3, 32, 64, 3, 1, 1)
DQN = (16, 32, 4, 84, 32, 8, 4, 0)


@pytest.mark.parametrize(
    "op, shape, plan",
    [
        (FORWARD, PAPER1, "96 columns x 1, 132 blocks, 2 windows"),
        (FORWARD, STEM, "64 columns x 1, 264 blocks, 1 windows"),
        (FORWARD, CIFAR, "64 columns x 1, 264 blocks, 2 windows"),
        (FORWARD, DQN, "32 columns x 1, 264 blocks, 2 windows"),
        (FORWARD, (1, 8, 3, 64, 256, 7, 2, 3), "64 columns x 4, 128 blocks, 2 windows"),
        (FORWARD, (1, 8, 5, 64, 64, 3, 1, 1), "more than 4 channels"),
        (FORWARD, (1, 8, 3, 64, 20, 3, 1, 1), "K is not a multiple of 8"),
        (
            FORWARD,
            (1, 64, 3, 224, 768, 16, 16, 0),
            "the filter and the rows that a tile needs do not fit in shared memory",
        ),
        (INPUT_GRAD, PAPER1, "40 columns, 4 x 118 pixels, 8 warps"),
        (INPUT_GRAD, STEM, "24 columns, 4 x 112 pixels, 7 warps"),
        (WEIGHT_GRAD, PAPER1, "3 x 14 tiles, warps 2 x 4 x 1, steps of 1 x 128, 132 splits"),
        (WEIGHT_GRAD, STEM, "4 x 6 tiles, warps 1 x 4 x 2, steps of 2 x 112, 132 splits"),
        (WEIGHT_GRAD, CIFAR, "4 x 6 tiles, warps 1 x 1 x 8, steps of 15 x 32, 13 splits"),
        (WEIGHT_GRAD, DQN, "2 x 8 tiles, warps 1 x 4 x 2, steps of 4 x 32, 8 splits"),
    ],
)
def test_plan(program, op, shape, plan):
    space = workspace(*shape) if op == WEIGHT_GRAD else 0
    arguments = [str(a) for a in (op, *shape, space, 1)]
    assert subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout.strip() == plan


def test_workspace_is_what_the_plan_wants(program):
    """Every weight gradient is split over the whole GPU, and no plan passes what was declared."""
    for b in (1, 3, 50):
        for c in (1, 2, 3, 4):
            for k, r, u in ((8, 1, 1), (64, 3, 1), (96, 11, 4), (256, 7, 2)):
                shape = (b, 32, c, 96, k, r, u, r // 2)
                space = workspace(*shape)
                assert 0 < space < 64 << 20
                for sm90 in (0, 1):
                    arguments = [str(a) for a in (WEIGHT_GRAD, *shape, space, sm90)]
                    text = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout
                    assert "splits" in text, text


@pytest.mark.parametrize(
    "op, shape, plan",
    [
        (FORWARD, PAPER1, "96 columns x 1, 132 blocks, 2 windows"),
        (FORWARD, STEM, "64 columns x 1, 264 blocks, 2 windows"),
        (WEIGHT_GRAD, PAPER1, "3 x 14 tiles, warps 2 x 4 x 1, steps of 1 x 128, 132 splits"),
        (WEIGHT_GRAD, CIFAR, "4 x 6 tiles, warps 1 x 1 x 8, steps of 15 x 32, 13 splits"),
    ],
)
def test_plan_without_wgmma(program, op, shape, plan):
    space = workspace(*shape) if op == WEIGHT_GRAD else 0
    arguments = [str(a) for a in (op, *shape, space, 0)]
    assert subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout.strip() == plan


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_first_layers(seed: int, dtype: str):
    """Value and gradients: odd sizes, asymmetric padding (also negative, also past the filter), wide rows, one image."""
    rng = np.random.default_rng([seed, dtype == "float16", 7])
    c = int(rng.integers(1, 5))
    k = int(rng.choice([8, 24, 32, 64, 96, 200, 256]))
    window = tuple(min(int(rng.choice([1, 2, 3, 5, 7, 8, 11])), 48 // c) for _ in range(2))
    strides = tuple(int(rng.choice([1, 1, 2, 2, 3, 4])) for _ in range(2))
    padding = tuple((int(rng.integers(-1, w + 2)), int(rng.integers(-1, w + 2))) for w in window)
    n = log_int(rng, 1, 40)
    sizes = [log_int(rng, 1, 90), log_int(rng, 1, 90)]
    if seed % 6 == 5:
        n, sizes = 1, [log_int(rng, 1, 12), int(rng.integers(500, 1300))]
    sizes = [max(s, w - sum(p)) for s, w, p in zip(sizes, window, padding, strict=True)]
    x = rng.standard_normal((n, *sizes, c))
    w = rng.standard_normal((*window, c, k)) / np.sqrt(c * np.prod(window))
    activation = rng.choice(np.array([None, None, "relu", "silu"], object))
    out = [(s + sum(p) - r) // u + 1 for s, p, r, u in zip(sizes, padding, window, strides, strict=True)]
    extra = [rng.standard_normal((n, *out, k))] if seed % 3 == 1 else []

    def fn(x, w, b, *r):
        if seed % 4 == 0:
            return jaxprims.conv(x, w, strides=strides, padding=padding, precision="highest") + 0 * b.sum()
        options = dict(strides=strides, padding=padding, precision="highest", activation=activation)
        return jaxprims.conv(x, w, b, residual=r[0] if r else None, **options)

    what = f"x {x.shape} w {w.shape} strides {strides} padding {padding} {activation} residual {bool(extra)}"
    check(fn, [x, w, rng.standard_normal(k), *extra], dtype, 4.0, (0, 1, 2), what)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mapped", ((0, 0), (None, 0), (0, None)))
def test_batched_filters(seed: int, mapped):
    """The true batch axis: of images and filters, of filters alone, of images alone."""
    rng = np.random.default_rng([seed, 8])
    c, k, r, u = ((3, 64, 3, 1), (4, 32, 8, 4), (1, 16, 5, 2))[seed % 3]
    n, size, b = log_int(rng, 1, 9), int(rng.integers(r + 3, 50)), int(rng.integers(2, 6))
    lead = [(b,) if m == 0 else () for m in mapped]
    x = rng.standard_normal((*lead[0], n, size, size + 3, c))
    w = rng.standard_normal((*lead[1], r, r, c, k)) / np.sqrt(c * r * r)
    fn = jax.vmap(lambda x, w: jaxprims.conv(x, w, strides=u, padding=r // 2, precision="highest"), mapped)
    check(fn, [x, w], "bfloat16", 4.0, (0, 1), f"x {x.shape} w {w.shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", (np.inf, np.nan))
def test_a_bad_value_stays_in_its_windows(bad):
    """What lies beside a window, in columns that tiles load too, is not multiplied by zeros."""
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 20, 29, 3)), rng.standard_normal((3, 5, 3, 16))
    x[1, 19, 28, 2] = bad

    def all_three(x, w):
        y, pull = jax.vjp(lambda x, w: jaxprims.conv(x, w, padding="VALID"), x, w)
        return (y, *pull(jnp.ones_like(y)))

    with jaxprims.use("cuda"):
        y, dx, dw = jax.jit(all_three)(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16))
    wrong = ~np.isfinite(np.asarray(y, np.float32))
    assert np.argwhere(wrong.any(-1)).tolist() == [[1, 17, 24]]
    assert np.isfinite(np.asarray(dx, np.float32)).all()
    assert np.argwhere(~np.isfinite(np.asarray(dw, np.float32)).all(-1)).tolist() == [[2, 4, 2]]


@pytest.mark.gpu
def test_bits_are_the_same_in_every_run():
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((16, 64, 64, 3)), rng.standard_normal((7, 7, 3, 64))

    @jax.jit
    def all_three(x, w):
        y, pull = jax.vjp(lambda x, w: jaxprims.conv(x, w, strides=2, padding=3), x, w)
        return (y, *pull(y))

    with jaxprims.use("cuda"):
        x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
        want = [np.asarray(a.view(jnp.uint16)) for a in all_three(x, w)]
        for _ in range(5):
            for a, b in zip(want, all_three(x, w), strict=True):
                assert np.array_equal(a, np.asarray(b.view(jnp.uint16)))
