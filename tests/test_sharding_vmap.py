"""vmap of an op some of whose operands are split over devices and shared by the mapped members."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxprims
from tests.contract import as_tuple, close_all
from tests.test_sharding import DEVICES, collectives, mesh

pytestmark = pytest.mark.skipif(len(jax.devices()) < DEVICES, reason="needs 8 devices (set by conftest on CPU)")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


C = normal(9, 2, DEVICES, 3, 2, 4)
MEMBERS = {
    "scale": lambda x, s: jax.vmap(lambda s: jaxprims.batch_norm(x, s)[0])(s),
    "silu": lambda x, s: jax.vmap(lambda s: jaxprims.batch_norm(x, None, s, activation="silu")[0])(s),
    "statistics": lambda x, s: jax.vmap(lambda s: (lambda y, m, v: y * m * v)(*jaxprims.batch_norm(x, s)))(s),
    "shared cotangent": lambda x, s: jax.vmap(lambda a: jaxprims.batch_norm(x * a)[1] * jnp.mean(s, 0))(s[:, :1]),
    "inference": lambda x, s: jax.vmap(lambda s: jaxprims.batch_norm_inference(x, s, s**2))(s),
}


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("of", ["grad", "jvp of grad", "grad of grad"])
def test_batch_norm_of_one_split_batch_under_several_scales(name: str, of: str):
    def loss(x, s):
        y = MEMBERS[name](x, s)
        return jnp.sum(y * (C if y.ndim == C.ndim else C[:, 0, 0, 0]))

    grad = jax.grad(loss, (0, 1))
    x, s = normal(0, *C.shape[1:]), normal(1, 2, 4)

    def fn(x, s):
        if of == "grad":
            return grad(x, s)
        if of == "jvp of grad":
            return jax.jvp(grad, (x, s), (jnp.sin(3 * x), s * 2))[1]
        return jax.grad(lambda x, s: sum(jnp.sum(jnp.sin(g)) for g in grad(x, s)), (0, 1))(x, s)

    split = jax.device_put(x, NamedSharding(mesh(), P("d")))
    want = jax.jit(fn)(x, s)
    close_all(as_tuple(jax.jit(fn)(split, s)), as_tuple(want), 1024, of)


def test_vmap_of_the_gradient_of_a_split_convolution_gathers_nothing():
    """Per-filter gradients of one split batch: each device computes its share."""
    x, w = normal(0, DEVICES, 5, 5, 3), normal(1, 2, 3, 3, 3, 4)

    def fn(x, w):
        return jax.vmap(jax.grad(lambda x, w: jnp.sum(jaxprims.conv(x, w) ** 2), (0, 1)), (None, 0))(x, w)

    split = jax.device_put(x, NamedSharding(mesh(), P("d")))
    compiled = jax.jit(fn).lower(split, w).compile()
    found = collectives(compiled)
    assert found["all-gather"] == found["all-to-all"] == found["collective-permute"] == 0, found
    close_all(compiled(split, w), jax.jit(fn)(x, w), 256, "per filter")

    per_image = jax.vmap(jax.grad(lambda x, w: jnp.sum(jaxprims.conv(x, w) ** 2), (0, 1)), (0, None))
    split = jax.device_put(x, NamedSharding(mesh(), P("d")))  # per-image gradients, split along the images
    compiled = jax.jit(per_image).lower(split, w[0]).compile()
    assert not any(collectives(compiled).values()), collectives(compiled)
    close_all(compiled(split, w[0]), jax.jit(per_image)(x, w[0]), 256, "per image")
