"""conv(..., algorithm=): what is refused, what a program declares, and (mark gpu) that all give the same sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims

ALGORITHMS = ("auto", "implicit_gemm", "direct", "gemm")


def arrays(shape, window, k, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    return x, jnp.asarray(rng.standard_normal((*window, shape[-1], k)), dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reference_is_the_same(algorithm):
    x, w = arrays((2, 5, 6, 3), (3, 3), 4)
    want = jaxprims.conv(x, w, activation="relu")
    np.testing.assert_array_equal(jaxprims.conv(x, w, activation="relu", algorithm=algorithm), want)
    grads = [jax.grad(lambda w, a=a: jnp.sum(jaxprims.conv(x, w, algorithm=a) ** 2))(w) for a in ("auto", algorithm)]
    np.testing.assert_array_equal(*grads)
    many = jax.vmap(lambda w: jaxprims.conv(x, w, algorithm=algorithm))(jnp.stack([w, 2 * w]))
    np.testing.assert_allclose(many[1], 2 * many[0], rtol=1e-6)


@pytest.mark.parametrize("value", ["fft", "winograd", 1, None])
def test_unknown(value):
    x, w = arrays((2, 5, 6, 3), (3, 3), 4)
    with pytest.raises(ValueError, match="algorithm=.*'implicit_gemm'"):
        jaxprims.conv(x, w, algorithm=value)


def test_gemm_says_where_it_exists():
    x, w = arrays((2, 5, 6, 4), (3, 3), 4)
    with pytest.raises(ValueError, match="channels last"):
        jaxprims.conv(x, w[:, :, :2], feature_group_count=2, algorithm="gemm")
    with pytest.raises(ValueError, match="channels last"):
        jaxprims.conv(x, w, mode="convolution", algorithm="gemm")
    with pytest.raises(ValueError, match="channels last"):
        jaxprims.conv(
            jnp.moveaxis(x, -1, 1), jnp.moveaxis(w, (2, 3), (1, 0)), dimension_numbers="NCHW", algorithm="gemm"
        )
    big, wide = jax.ShapeDtypeStruct((1, 512, 512, 64), jnp.float32), jax.ShapeDtypeStruct((9, 9, 64, 8), jnp.float32)
    with pytest.raises(ValueError, match="64 \\* 2|67108864"):
        jax.eval_shape(lambda x, w: jaxprims.conv(x, w, algorithm="gemm"), big, wide)


@pytest.mark.parametrize(
    "algorithm, shape, workspace",
    [
        ("auto", (128, 16, 16, 128), 0),
        ("direct", (128, 16, 16, 128), 0),
        ("gemm", (4, 8, 8, 4), 4 * 64 * 36 * 4),  # N P Q R S C elements
        ("gemm", (512, 16, 16, 32), (64 << 20) // (256 * 288 * 4) * (256 * 288 * 4)),  # as many images as 64 MiB hold
    ],
)
def test_workspace(algorithm, shape, workspace):
    x, w = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((3, 3, shape[-1], 8), jnp.float32)
    (row,) = jaxprims.explain(lambda x, w: jaxprims.conv(x, w, algorithm=algorithm), x, w).rows
    assert row.workspace == workspace


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_kernels_agree(algorithm, dtype):
    """Small integers: every order of summation gives the same, exact, result."""
    for i, (shape, window, k, options) in enumerate(
        [
            ((3, 9, 11, 16), (3, 3), 24, dict(padding=1)),
            ((2, 13, 8, 3), (5, 2), 7, dict(strides=(2, 1), kernel_dilation=(1, 3), padding="SAME")),
            ((5, 40, 6), (4,), 10, dict(padding="CAUSAL")),
            ((2, 6, 5, 7, 8), (2, 3, 2), 8, dict(padding="SAME")),
            ((2, 7, 7, 4), (3, 3), 8, dict(input_dilation=2, padding=((1, 2), (0, 1)))),
            ((700, 12, 12, 64), (3, 3), 8, dict(padding=1)),  # patches in several rounds
        ]
    ):
        rng = np.random.default_rng(i)
        x, w, b = (
            rng.integers(-2, 3, size).astype(jnp.dtype(dtype)) for size in (shape, (*window, shape[-1], k), (k,))
        )

        def loss(x, w, b, algorithm=algorithm, options=options):
            y = jaxprims.conv(x, w, b, activation="relu", algorithm=algorithm, **options)
            return jnp.sum(jnp.where(y > 0, 1.0, 0.0).astype(y.dtype) * y), y

        # The reference on the CPU: on a GPU XLA may take Winograd's algorithm, whose sums of integers are none.
        results = []
        for how, a, device in (("cuda", algorithm, "cuda"), ("reference", "auto", "cpu")):
            both = jax.value_and_grad(lambda x, w, b, a=a: loss(x, w, b, a), (0, 1), has_aux=True)
            with jaxprims.use(how), jax.default_device(jax.devices(device)[0]):
                results.append(jax.jit(both)(x, w, b))
        ours, got = results
        (_, y), grads = ours
        (_, want), want_grads = got
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))
        for g, e in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(e, np.float32), rtol=2**-7)
