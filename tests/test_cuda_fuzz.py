"""Random shapes on a GPU (mark gpu): sizes large enough for every tile and path of the kernels, odd in every way.

The oracle is the reference in float64 on the CPU, on the operands as rounded to the dtype. Value and gradient of each. The
number of shapes an op is JAXPRIMS_FUZZ (default 24).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from tests.contract import as_tuple, close_all

pytestmark = pytest.mark.gpu
COUNT = int(os.environ.get("JAXPRIMS_FUZZ", "24"))
DTYPES = ("float32", "bfloat16", "float16")


def log_int(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 0.999))))


def check(
    fn: Callable[..., Any], operands: list[np.ndarray], dtype: str, tol: float, grad: tuple[int, ...], what: str
) -> None:
    """Kernels in ``dtype`` against the reference in float64 on the CPU, forward and gradient of a random projection."""
    x = [jnp.asarray(a, dtype) if a.dtype == np.float64 else jnp.asarray(a) for a in operands]
    cpu = jax.devices("cpu")[0]

    def both(*x):
        def scalar(*d):
            full = list(x)
            for i, v in zip(grad, d, strict=True):
                full[i] = v
            ys = [y for y in as_tuple(fn(*full)) if jnp.issubdtype(y.dtype, jnp.inexact)]
            total = 0.0
            for i, y in enumerate(ys):
                wide = y if y.dtype == jnp.float64 else y.astype(jnp.float32)
                c = np.random.default_rng(i).standard_normal(y.shape).astype(np.float32)
                total = total + jnp.sum(wide * jnp.asarray(c, wide.dtype))
            return total, ys

        (_, ys), grads = jax.value_and_grad(scalar, tuple(range(len(grad))), has_aux=True)(*(x[i] for i in grad))
        return ys, grads

    with jaxprims.use("cuda"):
        ys, grads = jax.jit(both)(*x)
    with jax.enable_x64(True), jaxprims.use("reference"), jax.default_device(cpu):
        wide = [
            jax.device_put(np.asarray(a).astype(np.float64 if jnp.issubdtype(a.dtype, jnp.inexact) else a.dtype), cpu)
            for a in x
        ]
        want_ys, want_grads = jax.jit(both)(*wide)
    close_all(tuple(ys), tuple(want_ys), tol, f"{what}: value", dtype)
    close_all(tuple(grads), tuple(want_grads), 8 * tol, f"{what}: gradient", dtype)


def tolerance(dtype: str, terms: int) -> float:
    """Multiples of eps: one rounding for half types, sqrt(terms) float32 ones for the accumulation."""
    return 2.0 if dtype != "float32" else 16.0 + 4.0 * float(np.sqrt(terms))


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", DTYPES)
def test_conv(seed: int, dtype: str):
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 1])
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    groups = int(rng.choice([1, 1, 1, 2, 3, 8]))
    depthwise = bool(rng.random() < 0.2)
    c = log_int(rng, 1, 96)
    k = log_int(rng, 1, 160)
    if depthwise:
        groups, c = c, 1
        k = groups * int(rng.choice([1, 1, 2]))
    else:
        c, k = c, -(-k // groups) * groups
    window = tuple(int(rng.choice([1, 2, 3, 3, 5, 7])) for _ in range(rank))
    strides = tuple(int(rng.choice([1, 1, 2, 3])) for _ in range(rank))
    rhs = tuple(int(rng.choice([1, 1, 2])) for _ in range(rank))
    lhs = tuple(int(rng.choice([1, 1, 1, 2, 3])) for _ in range(rank))
    padding = tuple((int(rng.integers(-1, 4)), int(rng.integers(-1, 4))) for _ in range(rank))
    budget = 3e8 / (c * k * np.prod(window) * 2)
    n = log_int(rng, 1, 24)
    side = int(np.clip((budget / n) ** (1 / rank), 9, 40))
    sizes = tuple(max(8, side + int(rng.integers(-3, 4))) for _ in range(rank))
    last = bool(rng.integers(2))
    x_shape = (n, *sizes, c * groups) if last else (n, c * groups, *sizes)
    w_shape = (*window, c, k) if last else (k, c, *window)
    letters = "DHW"[3 - rank :]
    numbers = (
        (f"N{letters}C", f"{letters}IO", f"N{letters}C") if last else (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    )

    def fn(x, w):
        return jaxprims.conv_general_dilated(
            x, w, strides, padding, lhs, rhs, numbers, feature_group_count=groups, precision="highest"
        )

    x, w = rng.standard_normal(x_shape), rng.standard_normal(w_shape) / np.sqrt(c * np.prod(window))
    terms = c * int(np.prod(window))
    what = (
        f"x {x_shape} w {w_shape} strides {strides} padding {padding} dilations {lhs} {rhs} groups {groups} {numbers}"
    )
    check(fn, [x, w], dtype, tolerance(dtype, max(terms, n * int(np.prod(sizes)) // 16)), (0, 1), what)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_conv_of_groups(seed: int, dtype: str):
    """Channels last, multiples of 8, 1 to 16 channels a group: what the row kernels and those of large filters take."""
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 7])
    per = int(rng.choice([1, 1, 1, 2, 4, 8, 16]))
    c = 16 * log_int(rng, 1, 9) if per > 1 else 8 * log_int(rng, 1, 18)
    window = (3, 3) if per > 1 else tuple(int(rng.choice([1, 3, 4, 5, 7, 7, 9, 11, 31])) for _ in range(2))
    dilation = tuple(int(rng.choice([1, 1, 1, 2, 3])) if w < 8 else 1 for w in window)
    padding = tuple((int(rng.integers(0, w)), int(rng.integers(0, w))) for w in window)
    n = log_int(rng, 1, 40)
    wide = int(rng.choice([9, 9, 40, 150]))
    sizes = tuple(
        max(s, (w - 1) * d + 1) for s, w, d in zip((9 + int(rng.integers(20)), wide), window, dilation, strict=True)
    )
    x = rng.standard_normal((n, *sizes, c))
    w = rng.standard_normal((*window, per, c)) / np.sqrt(per * np.prod(window))

    def fn(x, w, b):
        return jaxprims.conv(
            x, w, b, padding=padding, kernel_dilation=dilation, feature_group_count=c // per, activation="relu"
        )

    what = f"x {x.shape} w {w.shape} padding {padding} dilation {dilation}"
    check(fn, [x, w, 4.0 + rng.standard_normal(c)], dtype, 2.0, (0, 1), what)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_conv_of_tensor_cores(seed: int, dtype: str):
    """Channels last, multiples of 8, no groups: what Hopper's kernels take, in images of 1 to 40 and channels of 8 to 320."""
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 5])
    rank = int(rng.choice([1, 2, 2, 2, 3]))
    c, k = 8 * log_int(rng, 1, 40), 8 * log_int(rng, 1, 40)
    window = tuple(int(rng.choice([1, 1, 3, 3, 5])) for _ in range(rank))
    strides = tuple(int(rng.choice([1, 1, 1, 2, 3])) for _ in range(rank))
    dilation = tuple(int(rng.choice([1, 1, 2])) for _ in range(rank))
    padding = tuple((int(rng.integers(0, w + 1)), int(rng.integers(0, w + 1))) for w in window)
    n = log_int(rng, 1, 130)
    side = int(np.clip((4e8 / (c * k * np.prod(window) * 2 * n)) ** (1 / rank), 9, 40))
    sizes = tuple(max(9, side + int(rng.integers(-3, 4))) for _ in range(rank))
    # Not relu6: a y just below 6 rounds to 6 in a half type, and the slope there is 0 where float64 has 1.
    activation = rng.choice(np.array([None, None, "relu", "silu"], object))
    residual = bool(rng.random() < 0.3)
    x = rng.standard_normal((n, *sizes, c))
    w = rng.standard_normal((*window, c, k)) / np.sqrt(c * np.prod(window))
    out = [
        (s + sum(p) - (r - 1) * d - 1) // u + 1
        for s, p, r, d, u in zip(sizes, padding, window, dilation, strides, strict=True)
    ]
    extra = [rng.standard_normal((n, *out, k))] if residual else []

    def fn(x, w, b, *r):
        options: dict[str, Any] = dict(strides=strides, padding=padding, kernel_dilation=dilation, precision="highest")
        if activation is None and not residual and seed % 2:
            return jaxprims.conv(x, w, **options) + 0 * b.sum()
        return jaxprims.conv(x, w, b, residual=r[0] if r else None, activation=activation, **options)

    what = f"x {x.shape} w {w.shape} strides {strides} padding {padding} dilation {dilation} {activation} residual {residual}"
    check(fn, [x, w, rng.standard_normal(k), *extra], dtype, 4.0, (0, 1, 2), what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, window, k, strides, groups",
    [
        ((32, 224, 224, 3), 7, 64, 2, 1),
        ((64, 56, 56, 64), 1, 64, 1, 1),
        ((8, 256, 256, 64), 1, 2, 1, 1),
        ((64, 28, 28, 64), 3, 64, 1, 1),
        ((64, 56, 56, 144), 3, 144, 1, 144),
        ((64, 28, 28, 128), 3, 128, 1, 32),
    ],
)
def test_weight_gradients_of_constants(dtype: str, shape, window: int, k: int, strides: int, groups: int):
    """Sums over every pixel of products that are all equal, where roundings do not cancel: each is the count of pixels."""
    w = jnp.zeros((window, window, shape[-1] // groups, k), dtype)
    x = jnp.full(shape, 0.125, dtype)

    def loss(w):
        options = dict(strides=strides, padding="VALID", feature_group_count=groups, preferred_element_type=jnp.float32)
        return jnp.sum(jaxprims.conv(x, w, **options)) * 0.7

    with jaxprims.use("cuda"):
        dw = np.asarray(jax.jit(jax.grad(loss))(w), np.float64)
    pixels = shape[0] * ((shape[1] - window) // strides + 1) ** 2
    slope = float(jnp.float32(0.7)) if dtype == "float32" else float(jnp.asarray(0.7, jnp.float32))
    limit = {"float32": 2e-5, "bfloat16": 2**-8, "float16": 2**-11}[dtype] * 2
    np.testing.assert_allclose(dw, np.full(dw.shape, pixels * 0.125 * slope), rtol=limit)


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", DTYPES)
def test_pool(seed: int, dtype: str):
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 2])
    rank = int(rng.choice([1, 2, 2, 3]))
    window = tuple(log_int(rng, 1, 20 if rank == 1 else 7) for _ in range(rank))
    strides = tuple(int(rng.choice([1, 2, 3])) for _ in range(rank))
    dilation = tuple(int(rng.choice([1, 1, 2])) for _ in range(rank))
    padding = tuple((int(rng.integers(0, w)), int(rng.integers(0, w))) for w in window)
    sizes = tuple(
        (w - 1) * d + 1 + log_int(rng, 1, 40 if rank < 3 else 12) for w, d in zip(window, dilation, strict=True)
    )
    layout = str(rng.choice(["NHWC", "NCHW"]))
    n, c = log_int(rng, 1, 9), log_int(rng, 1, 70)
    shape = (n, *sizes, c) if layout == "NHWC" else (n, c, *sizes)
    kind = str(
        rng.choice(
            [
                "max_pool",
                "min_pool",
                "avg_pool",
                "avg_pool_exclude",
                "lp_pool",
                "adaptive_avg_pool",
                "adaptive_max_pool",
            ]
        )
    )
    options: dict[str, Any] = dict(strides=strides, padding=padding, window_dilation=dilation, layout=layout)

    def fn(x):
        if kind == "avg_pool_exclude":
            return jaxprims.avg_pool(x, window, count_include_pad=False, **options)
        if kind == "lp_pool":
            return jaxprims.lp_pool(x, 2, window, **options)
        if kind.startswith("adaptive"):
            return getattr(jaxprims, kind)(
                x, tuple(max(1, s // w) for s, w in zip(sizes, window, strict=True)), layout=layout
            )
        return getattr(jaxprims, kind)(x, window, **options)

    x = rng.permutation(int(np.prod(shape))).reshape(shape) * 1.0  # distinct in float32
    if dtype != "float32" and "avg" not in kind and kind != "lp_pool":
        x = rng.integers(-100, 100, shape) * 1.0  # exact in half types, with ties
    elif kind == "lp_pool" or dtype != "float32":
        x = rng.standard_normal(shape)
    check(fn, [x], dtype, tolerance(dtype, int(np.prod(window))), (0,), f"{kind} {shape} window {window} {options}")


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(seed: int, dtype: str):
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 3])
    kind = str(rng.choice(["layer", "layer", "rms", "batch", "batch", "group", "instance", "lrn"]))
    rank = int(rng.choice([3, 4]))
    big = int(rng.integers(rank))
    shape = [log_int(rng, 1, 24) for _ in range(rank)]
    shape[big] = log_int(rng, 1, 9000 if kind != "lrn" else 300)
    axis = int(rng.choice([-1, 1]))
    groups = int(rng.choice([1, 2, 3, 4]))
    if kind == "group":
        shape[axis] = -(-shape[axis] // groups) * groups
        shape[axis] = min(shape[axis], 4092 // groups * groups)
    shape = tuple(shape)
    activation = rng.choice(np.array([None, None, "relu", "silu", "gelu"], object))
    features = shape[axis]
    x = rng.standard_normal(shape) * 2 + rng.choice([0.0, 3.0])
    scale, bias = rng.standard_normal(features), rng.standard_normal(features)

    def fn(x, scale, bias):
        if kind == "layer":
            return jaxprims.layer_norm(x, scale, bias, axis=axis, activation=activation)
        if kind == "rms":
            return jaxprims.rms_norm(x, scale, axis=axis, activation=activation) + 0 * bias.sum()
        if kind == "batch":
            return jaxprims.batch_norm(x, scale, bias, axis=axis, activation=activation)
        if kind == "group":
            return jaxprims.group_norm(x, scale, bias, num_groups=groups, axis=axis, activation=activation)
        if kind == "instance":
            return jaxprims.instance_norm(x, scale, bias, axis=axis, activation=activation)
        return jaxprims.local_response_norm(x, size=5, axis=axis) + 0 * (scale.sum() + bias.sum())

    count = int(np.prod(shape))
    if kind in ("layer", "rms") and features < 3:
        pytest.skip("the variance of one or two numbers is not well conditioned")
    if kind == "instance" and count // (shape[0] * features) < 3 or kind == "batch" and count // features < 3:
        pytest.skip("the variance of one or two numbers is not well conditioned")
    if kind == "group" and count // (shape[0] * groups) < 3:
        pytest.skip("the variance of one or two numbers is not well conditioned")
    # half types: statistics of the rounded input are exact to float32, the gradient's cancellations are not
    tol = 4.0 if dtype != "float32" else 64.0 + 4 * float(np.sqrt(count))
    check(fn, [x, scale, bias], dtype, tol, (0, 1, 2), f"{kind} {shape} axis {axis} groups {groups} {activation}")


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("dtype", DTYPES)
def test_act(seed: int, dtype: str):
    rng = np.random.default_rng([seed, DTYPES.index(dtype), 4])
    kind = str(rng.choice(["softmax", "softmax", "log_softmax", "log_softmax", "bias_act", "transpose_layout"]))
    outer, n, inner = log_int(rng, 1, 60), log_int(rng, 1, 30000), int(rng.choice([1, 1, 1, 2, 7, 33]))
    n = min(n, 2_000_000 // (outer * inner) + 1)
    shape = (outer, n, inner) if inner > 1 else (outer, n)
    x = rng.standard_normal(shape) * 3
    if kind == "bias_act":
        names = ["relu", "relu6", "leaky_relu", "elu", "selu", "sigmoid", "tanh", "silu", "gelu", "gelu_exact", "softplus",
                 "hard_sigmoid", "hard_silu", "hard_tanh", "mish", "soft_sign", "log_sigmoid"]  # fmt: skip
        name = names[seed % len(names)]
        bias = rng.standard_normal(n)
        terms = outer * inner
        check(
            lambda x, b: jaxprims.bias_act(x, b, name, axis=1),
            [x, bias],
            dtype,
            tolerance(dtype, terms) + 6,
            (0, 1),
            f"{name} {shape}",
        )
    elif kind == "transpose_layout":
        shape = (outer, log_int(rng, 1, 40), log_int(rng, 1, 40), log_int(rng, 1, 70))
        check(
            lambda x: jaxprims.transpose_layout(x, "NHWC", "NCHW"),
            [rng.standard_normal(shape)],
            dtype,
            1.0,
            (0,),
            f"{shape}",
        )
    else:
        fn = getattr(jaxprims, kind)
        check(lambda x: fn(x, axis=1), [x], dtype, tolerance(dtype, n), (0,), f"{kind} {shape}")
