"""Functions of JAX arrays, called with the arrays of another library, which share their memory by DLPack.

`wrap` is all of it: arrays in by ``jax.dlpack.from_dlpack``, one jitted call, results out by the library's ``from_dlpack``.
What differs between libraries is a `Library`; :mod:`jaxprims.cupy` has CuPy's, the tests use NumPy's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Library:
    """An array library: its names, and an answer to what DLPack leaves open.

    Attributes:
      name: of the module, for messages: "cupy".
      array: the class of its arrays.
      from_dlpack: takes any object with ``__dlpack__`` and ``__dlpack_device__``, and makes the current stream wait for it.
      compact: the array itself where JAX can take its memory (row-major without gaps, aligned), else a copy that it can.
      pointer: the address of the first element.
      empty: (shape, dtype) -> an array.
      scope: a context manager that makes the array's device the current one.
      synchronize: waits, on the host, for the current stream.
      keep: (result, owner) -> None. Called for every result; until the library's queued work on ``result`` has ended after
        ``result`` is gone, ``owner`` must stay alive.
    """

    name: str
    array: type
    from_dlpack: Callable[[Any], Any]
    compact: Callable[[Any], Any]
    pointer: Callable[[Any], int]
    empty: Callable[[tuple[int, ...], Any], Any]
    scope: Callable[[Any], Any] = contextlib.nullcontext
    synchronize: Callable[[], None] = _nothing
    keep: Callable[[Any, Any], None] = _nothing


class _Inward:
    """An array on its way to JAX. A consumer that names no stream orders nothing itself: then the host waits here."""

    def __init__(self, array: Any, library: Library):
        self._array, self._library = array, library

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if stream is None:
            self._library.synchronize()
        return self._array.__dlpack__(stream=stream, **options)


class _Outward:
    """A result on its way out. Nobody else holds it, so it leaves without DLPack 1.0's mark of read-only memory."""

    def __init__(self, array: Any):
        self._array = array

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self._array.__dlpack__(stream=stream)


@dataclass(frozen=True)
class _Call:
    """The static half of a call. A value goes with its type: True and 1 are equal, but not the same argument."""

    tree: Any
    arrays: tuple[int, ...]  # places of the arrays among the leaves
    values: tuple[tuple[type, Any], ...]  # all other leaves, in order


def _is_wide(dtype: Any) -> bool:
    return dtype.kind in "iufc" and dtype.itemsize == (16 if dtype.kind == "c" else 8)


def _to_jax(x: Any, library: Library) -> jax.Array:
    try:
        return jax.dlpack.from_dlpack(_Inward(x, library))
    except RuntimeError as error:
        if "nknown backend" not in str(error):
            raise
        raise RuntimeError(
            f"JAX cannot compute where this {library.name} array lies ({error}): python -m jaxprims doctor says what is missing."
        ) from error


def wrap(op: Callable[..., Any], library: Library) -> Callable[..., Any]:
    """``op``, a function of JAX arrays, as a function of ``library``'s arrays.

    The result takes op's arguments. Arrays of the library come in without a copy (but see ``Library.compact``), NumPy and
    JAX arrays are passed on as they are, anything else is static: one compilation per static value, shape and dtype.
    64-bit arrays keep their dtype: such a call runs under ``jax.enable_x64``. Results are the library's arrays on JAX's
    memory, never on an argument's.

    Raises:
      TypeError: no argument is an array of the library. Otherwise what ``op`` raises.

    >>> import jaxprims, numpy as np
    >>> numpy = Library(
    ...     "numpy", np.ndarray, np.from_dlpack, np.ascontiguousarray, lambda x: x.ctypes.data, np.empty)
    >>> softmax = wrap(jaxprims.softmax, numpy)
    >>> softmax(np.zeros((1, 2), np.float32), axis=1)
    array([[0.5, 0.5]], dtype=float32)
    """
    name = getattr(op, "__name__", "function")

    @functools.partial(jax.jit, static_argnums=1)
    def run(arrays: list[Any], call: _Call) -> Any:
        leaves: list[Any] = [value for _, value in call.values]
        for place, x in zip(call.arrays, arrays, strict=True):
            leaves.insert(place, x)
        args, kwargs = jax.tree.unflatten(call.tree, leaves)
        return op(*args, **kwargs)

    @functools.wraps(op)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, (library.array, np.ndarray, jax.Array)))
        values = tuple((type(leaf), leaf) for i, leaf in enumerate(leaves) if i not in places)
        given = [leaves[i] for i in places]
        first = next((x for x in given if isinstance(x, library.array)), None)
        if first is None:
            raise TypeError(
                f"{name}: no argument is a {library.name}.{library.array.__name__}; "
                f"jaxprims.{name} takes NumPy and JAX arrays."
            )
        wide = any(isinstance(x, library.array) and _is_wide(x.dtype) for x in given)
        with library.scope(first), jax.enable_x64(True) if wide else contextlib.nullcontext():
            arrays, taken = [], set()
            for x in given:
                if not isinstance(x, library.array):
                    arrays.append(x)
                elif x.size == 0:  # no memory to share
                    arrays.append(np.empty(x.shape, x.dtype))
                else:
                    x = library.compact(x)
                    taken.add(library.pointer(x))
                    arrays.append(_to_jax(x, library))
            results = run(arrays, _Call(tree, places, values))  # on their device: from_dlpack commits them to it

            def outward(y: jax.Array) -> Any:
                if y.size == 0:
                    return library.empty(y.shape, y.dtype)
                result = library.from_dlpack(_Outward(y))
                library.keep(result, y)
                ours = library.pointer(result) not in taken  # else the op handed back its argument
                return result if ours else result.copy()

            return jax.tree.map(outward, results)  # `arrays` live until the current stream waits for every result

    wrapped.__doc__ = (
        f"``jaxprims.{name}`` on {library.name} arrays, without a copy.\n\n"
        f"Arguments, numerics and errors: ``help(jaxprims.{name})``. Memory and stream order: this module's documentation."
    )
    return wrapped
