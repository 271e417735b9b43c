"""The kernels where indices outgrow 32 bits or grids outgrow their limits, and under XLA's stricter settings (mark gpu)."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels_only():
    with jaxprims.use("cuda"):
        yield


def test_convolution_past_2_to_the_31_elements():
    """514 channels of 2048 x 2048 ones, 3x3: 9, 6 or 4 taps of 514 each; 4626 rounds to 4624 in float16."""
    x, w = jnp.ones((1, 514, 2048, 2048), jnp.float16), jnp.ones((1, 514, 3, 3), jnp.float16)
    y = jax.jit(lambda x, w: jaxprims.conv(x, w, padding=1, dimension_numbers="NCHW"))(x, w)[0, 0]
    y = np.asarray(y, np.float64)
    assert (y[1:-1, 1:-1] == 4624).all()
    assert (y[0, 1:-1] == 3084).all() and (y[1:-1, -1] == 3084).all()
    assert y[0, 0] == y[-1, -1] == y[0, -1] == 2056


def test_gradients_past_2_to_the_31_elements():
    x, w = jnp.ones((1, 514, 2048, 2048), jnp.float16), jnp.ones((1, 514, 1, 1), jnp.float16)

    def loss(x, w):
        y = jaxprims.conv(x, w, padding=0, dimension_numbers="NCHW", preferred_element_type=jnp.float32)
        return jnp.sum(y) / 2**22

    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert (np.asarray(dw, np.float64) == 1).all()
    assert float(jnp.max(dx)) == float(jnp.min(dx)) == float(np.float16(2.0**-22))


def test_more_images_than_a_grid_has_rows():
    """Rows 0, 65535, 65536 and 69999 of 70000 small images, for a convolution, a pool, a norm and a softmax."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((70000, 4, 4, 3)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 3, 3, 8)), jnp.float32)
    rows = jnp.asarray([0, 65535, 65536, 69999])
    ops = {
        "conv": lambda x: jaxprims.conv(x, w),
        "depthwise": lambda x: jaxprims.conv(x, w[:, :, :1, :3], feature_group_count=3),
        "max_pool": lambda x: jaxprims.max_pool(x, (2, 2)),
        "avg_pool": lambda x: jaxprims.avg_pool(x, (2, 2)),
        "layer_norm": lambda x: jaxprims.layer_norm(x),
        "group_norm": lambda x: jaxprims.group_norm(x, num_groups=3),
        "instance_norm": lambda x: jaxprims.instance_norm(x),
        "local_response_norm": lambda x: jaxprims.local_response_norm(x),
        "softmax": lambda x: jaxprims.softmax(x),
        "activation": lambda x: jaxprims.activation(x, "gelu"),
    }
    for name, op in ops.items():
        some, grad = jax.jit(lambda x, op=op: (op(x)[rows], jax.grad(lambda x: jnp.sum(op(x) ** 2))(x)[rows]))(x)
        np.testing.assert_allclose(some, op(x[rows]), rtol=1e-5, atol=1e-5, err_msg=name)
        want = jax.grad(lambda x, op=op: jnp.sum(op(x) ** 2))(x[rows])
        np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-4, err_msg=name)
    y, mean, var = jax.jit(jaxprims.batch_norm)(x)
    flat = np.asarray(x, np.float64).reshape(-1, 3)
    np.testing.assert_allclose(mean, flat.mean(0), atol=1e-6)
    np.testing.assert_allclose(var, flat.var(0), rtol=1e-5)


@pytest.mark.parametrize("shape", [(190, 64, 64, 2933), (1024, 64, 228, 228)], ids=str)
def test_pools_past_2_to_the_31_elements(shape):
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    layout = "NHWC" if shape[0] == 190 else "NCHW"
    last = x[-1:]

    def both(x):
        return (
            jaxprims.max_pool(x, (2, 2), strides=(2, 2), layout=layout),
            jaxprims.avg_pool(x, (2, 2), strides=(2, 2), layout=layout),
        )

    big, small = jax.jit(lambda x: [y[-1:] for y in both(x)])(x), both(last)
    for a, b in zip(big, small, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    dx = jax.jit(lambda x: jax.grad(lambda x: jnp.sum(both(x)[0].astype(jnp.float32)))(x)[-1:])(x)
    want = jax.grad(lambda x: jnp.sum(both(x)[0].astype(jnp.float32)))(last)
    np.testing.assert_array_equal(np.asarray(dx, np.float32), np.asarray(want, np.float32))


def test_activations_past_2_to_the_31_elements():
    x = jnp.full((3, 2**30 + 7), 2.0, jnp.bfloat16)
    y = jax.jit(lambda x: jaxprims.activation(x, "relu6"))(x)
    assert float(jnp.min(y)) == float(jnp.max(y)) == 2.0


def test_large_filters():
    """30 x 30, and one as large as the image."""
    rng = np.random.default_rng(0)
    for n, c, size, r in ((2, 3, 64, 30), (1, 1, 363, 363)):
        x = jnp.asarray(rng.standard_normal((n, size, size, c)), jnp.float32)
        w = jnp.asarray(rng.standard_normal((r, r, c, 2)), jnp.float32)
        got = jax.jit(lambda x, w: jaxprims.conv(x, w, padding="VALID"))(x, w)
        with jax.enable_x64(True), jaxprims.use("reference"):
            want = jaxprims.conv(x.astype(jnp.float64), w.astype(jnp.float64), padding="VALID")
        np.testing.assert_allclose(got, want, atol=2e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    "flags",
    [
        "--xla_gpu_exclude_nondeterministic_ops=true",
        "--xla_gpu_deterministic_ops=true",
        "--xla_gpu_graph_min_graph_size=1",
    ],
)
def test_strict_settings(flags):
    """A training step compiles and runs in a process of its own under XLA's deterministic modes and with CUDA graphs forced."""
    code = """
import jax, jax.numpy as jnp, jaxprims
jax.config.update("jax_default_matmul_precision", "highest")  # no TF32 in the reference
def loss(p, x):
    y, _, _ = jaxprims.batch_norm(jaxprims.conv(x, p["w"]), p["s"], p["b"], activation="relu")
    y = jaxprims.max_pool(y, (3, 3), strides=(2, 2), padding="SAME")
    y = jaxprims.layer_norm(jaxprims.avg_pool(y, (2, 2)).mean((1, 2)), p["s"], p["b"])
    return -jaxprims.log_softmax(y)[:, 0].mean()
k = jax.random.key(0)
p = dict(w=jax.random.normal(k, (3, 3, 8, 16)), s=jnp.ones(16), b=jnp.zeros(16))
step = jax.jit(jax.value_and_grad(loss))
with jaxprims.use("cuda"):
    for i in range(4):  # other buffers each time
        x = jax.random.normal(jax.random.fold_in(k, i), (8, 16, 16, 8))
        v, g = jax.block_until_ready(step(p, x))
        with jaxprims.use("reference"):
            v2, g2 = step(p, x)
        assert abs(v - v2) < 1e-4, (v, v2)
        for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(g2)):
            assert jnp.allclose(a, b, atol=1e-4), (a, b)
print("fine")
"""
    env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert run.returncode == 0 and "fine" in run.stdout, run.stderr[-3000:]
