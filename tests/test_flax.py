"""Flax's own layers with jaxprims' convolution put in their place: the same parameters, numbers and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxprims.conv.api import conv, conv_general_dilated

flax = pytest.importorskip("flax")
from flax import linen, nnx  # noqa: E402

# kernel_size, input shape, options of the layer
LAYERS = {
    "1d-same": ((3,), (2, 9, 4), {}),
    "1d-causal-dilated": ((3,), (2, 9, 4), dict(padding="CAUSAL", kernel_dilation=2)),
    "1d-depthwise-causal": ((4,), (2, 9, 6), dict(padding="CAUSAL", feature_group_count=6)),
    "2d-same-stride2": ((3, 3), (2, 8, 7, 4), dict(strides=2)),
    "2d-valid-groups": ((3, 2), (2, 6, 7, 4), dict(padding="VALID", feature_group_count=2, use_bias=False)),
    "2d-depthwise": ((3, 3), (2, 6, 7, 6), dict(feature_group_count=6)),
    "2d-circular": ((3, 3), (2, 6, 5, 4), dict(padding="CIRCULAR")),
    "2d-pairs": ((3, 3), (2, 6, 5, 4), dict(padding=((2, 0), 1), strides=(1, 2), kernel_dilation=(1, 2))),
    "2d-input-dilation": ((3, 3), (2, 5, 4, 4), dict(padding=2, input_dilation=2)),
    "2d-unbatched": ((3, 3), (6, 5, 4), {}),
    "2d-two-batch-axes": ((3, 3), (2, 3, 6, 5, 4), {}),
}
FEATURES = 6


def data(shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def close(got, want):
    """Both are float32 sums of at most 3 * 3 * 6 taps times positions, in different orders."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def both_ways(loss):
    return lambda *args: jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*args)


@pytest.mark.parametrize("name", LAYERS)
def test_linen(name):
    kernel_size, shape, options = LAYERS[name]
    x = data(shape)
    own = linen.Conv(FEATURES, kernel_size, **options)
    ours = linen.Conv(FEATURES, kernel_size, conv_general_dilated=conv_general_dilated, **options)
    params = own.init(jax.random.key(0), x)
    assert jax.tree.structure(params) == jax.tree.structure(ours.init(jax.random.key(0), x))

    def run(layer):
        def loss(params, x):
            y = layer.apply(params, x)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(both_ways(loss))(params, x)

    close(run(ours), run(own))
    text = str(jax.make_jaxpr(lambda p: ours.apply(p, x))(params))
    assert "conv_general_dilated[" not in text, "the layer did not use jaxprims"


@pytest.mark.parametrize("name", LAYERS)
def test_nnx(name):
    kernel_size, shape, options = LAYERS[name]
    x = data(shape)

    def run(**extra):
        layer = nnx.Conv(shape[-1], FEATURES, kernel_size, rngs=nnx.Rngs(0), **options, **extra)
        graph, state = nnx.split(layer)

        def loss(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(jnp.sin(y)), y

        (value, y), (dstate, dx) = jax.jit(both_ways(loss))(state, x)
        return value, y, jax.tree.leaves(dstate), dx

    close(run(conv_general_dilated=conv_general_dilated), run())


def test_nnx_preferred_element_type():
    x = data((2, 6, 5, 4))
    options = dict(rngs=nnx.Rngs(0), dtype=jnp.bfloat16, preferred_element_type=jnp.float32)
    ours = nnx.Conv(4, FEATURES, (3, 3), conv_general_dilated=conv_general_dilated, **options)
    own = nnx.clone(ours)
    own.conv_general_dilated = jax.lax.conv_general_dilated
    assert ours(x).dtype == own(x).dtype
    close(ours(x).astype(jnp.float32), own(x).astype(jnp.float32))


@pytest.mark.parametrize("name", [n for n in LAYERS if "circular" not in n])
def test_conv_takes_flax_arguments(name):
    """jaxprims.conv has the names, meaning and defaults of the layer's options."""
    kernel_size, shape, options = LAYERS[name]
    x = data(shape)
    layer = linen.Conv(FEATURES, kernel_size, **options)
    params = layer.init(jax.random.key(1), x)["params"]
    options = {k: v for k, v in options.items() if k != "use_bias"}
    close(conv(x, params["kernel"], params.get("bias"), **options), layer.apply({"params": params}, x))


def test_unshared_kernels_learn_their_shape_from_conv():
    """linen.ConvLocal traces the convolution for its result's shape, with keyword arguments."""
    x = data((2, 5, 4, 3))
    own = linen.ConvLocal(FEATURES, (2, 2), padding="VALID")
    ours = linen.ConvLocal(FEATURES, (2, 2), padding="VALID", conv_general_dilated=conv_general_dilated)
    params = own.init(jax.random.key(0), x)
    close(ours.init(jax.random.key(0), x), params)
    close(ours.apply(params, x), own.apply(params, x))
