"""Which lowering runs: ``use("auto" | "reference" | "cuda")`` and the environment's default."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

BACKENDS = ("auto", "reference", "cuda")


def _check(backend: str, origin: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{origin}={backend!r} is not known; give one of {', '.join(map(repr, BACKENDS))}.")
    return backend


# A user context is part of jit's cache key: a jitted function follows `use` and comes back to its first trace after it.
_context = jax.make_user_context(None)


def backend() -> str:
    """The backend in force where the caller is being traced."""
    return _context.value or _check(os.environ.get("JAXPRIMS_BACKEND") or "auto", "JAXPRIMS_BACKEND")


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Choose the lowering of every jaxprims op traced inside the ``with`` block.

    ``"auto"``: the CUDA kernel on an NVIDIA GPU where one takes the case, else the reference (plain ``jax.lax``).
    ``"reference"``: the reference everywhere. ``"cuda"``: the kernel, and an error that says which limit is in the way
    where no kernel takes the case or the program is lowered for another platform. The default is the environment variable
    ``JAXPRIMS_BACKEND``, or ``"auto"``. A jitted function is retraced when the setting changes.

    Raises:
      ValueError: another word.

    Example:
      >>> import jax.numpy as jnp, jaxprims
      >>> with jaxprims.use("reference"):
      ...     y = jaxprims.softmax(jnp.zeros((1, 2)))
      >>> print(y)
      [[0.5 0.5]]
    """
    with _context(_check(backend, "backend")):
        yield
