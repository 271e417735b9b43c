"""What ``jax.export`` must be told to serialise programs that hold jaxprims kernels."""

from __future__ import annotations

from jax import export

from jaxprims.core.primitive import REGISTRY


def export_checks() -> list[export.DisabledSafetyCheck]:
    """The custom calls of jaxprims, for ``jax.export.export(..., disabled_checks=jaxprims.export_checks())``.

    JAX refuses to serialise custom calls it does not know to be stable. Those of jaxprims are named ``jaxprims_<op>`` and
    an artefact needs, where it runs, a jaxprims of the same minor version. A program for ``platforms=("cpu", "cuda")``
    holds the reference for the one and the kernels for the other.

    Example:
      >>> import jax, jax.numpy as jnp, jaxprims
      >>> from jax import export
      >>> f = jax.jit(lambda x: jaxprims.softmax(x))
      >>> exported = export.export(f, disabled_checks=jaxprims.export_checks())(jnp.zeros((2, 4)))
      >>> print(exported.call(jnp.zeros((2, 4)))[0])
      [0.25 0.25 0.25 0.25]
    """
    return [export.DisabledSafetyCheck.custom_call(op.target) for op in REGISTRY.values()]
