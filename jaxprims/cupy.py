"""The ops of jaxprims on CuPy arrays, without a copy.

``from jaxprims import cupy as jc``; then ``jc.conv(x, w)`` with CuPy arrays gives a CuPy array. Every op of jaxprims that
takes arrays is here under its name, with its arguments: convolutions, pools, norms, softmax, activations, layouts. It runs
as a jitted JAX program on the arrays' GPU, compiled once per shape, dtype and static argument. There are no gradients and no
``vmap`` across the border: inside a JAX program use ``jaxprims`` itself.

Needs ``pip install 'jaxprims[cuda13]'`` (or ``cuda12``), which brings CuPy and JAX's CUDA plugin. JAX takes three quarters of
the GPU's memory when it starts; set ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` before it does, so that CuPy has some too.

Order. A call behaves like a CuPy kernel launched on the current stream of the arrays' device: it starts after all that was
put into that stream before, and what is put there later waits for it. The host waits for nothing. On the way in, XLA hands
CuPy a stream of its own, which then waits for CuPy's current one; on the way out CuPy's current stream waits for the event
that marks the result (DLPack's ``stream`` argument, both ways). Where a version of JAX names no stream the protocol orders
nothing, and the host waits for CuPy's stream instead. Work on other streams is yours to order, as with any CuPy kernel.

Memory. A row-major array without gaps, whose address is a multiple of 256 bytes, is read in place (what CuPy allocates is;
a slice may not be). Any other is copied first, on the GPU: JAX has neither strides nor odd addresses. Managed memory
(``cupy.cuda.malloc_managed``) is refused by JAX. The result lies in JAX's memory, is yours alone, and may be written to;
it never shares memory with an argument. Arguments may be changed as soon as the call has returned. When the last reference
to a result is dropped, its memory goes back to JAX once the stream that made it has passed that point: it is safe to drop
a result that queued CuPy work still reads.

Dtypes. All that both sides have; float64, int64 and complex128 stay what they are, whatever ``jax_enable_x64`` says.
bfloat16 is ``ml_dtypes.bfloat16``, exchanged by CuPy from 14.1 on; an older CuPy raises an error. NumPy arrays and Python
scalars may stand where an op takes them beside a CuPy array.
"""

from __future__ import annotations

import collections
import importlib
import weakref
from typing import TYPE_CHECKING, Any

import jax

import jaxprims
from jaxprims.exchange import Library, wrap

try:
    cupy: Any = importlib.import_module("cupy")  # Any, and so for type checkers not this module
except ImportError as error:
    raise ImportError(
        "jaxprims.cupy needs CuPy, which is not installed: pip install 'jaxprims[cuda13]' "
        "(or 'jaxprims[cuda12]', by the CUDA version of your driver)."
    ) from error

ALIGNMENT = 256  # bytes: what XLA's own allocations have, and its kernels may rely on

OTHERS = frozenset({"Status", "explain", "export_checks", "status", "use"})  # public, but no functions of arrays

# Memory of dropped results, each with the event behind which it is free.
_retired: collections.deque[tuple[Any, jax.Array]] = collections.deque()


def _release() -> None:
    while _retired:
        try:
            event, owner = _retired.popleft()
        except IndexError:  # another thread was faster
            return
        if not event.done:
            _retired.appendleft((event, owner))
            return


def _retire(owner: jax.Array, stream: Any, device: int) -> None:
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(block=False, disable_timing=True)
        event.record(stream)
    _retired.append((event, owner))
    _release()


def _keep(result: Any, owner: jax.Array) -> None:
    _release()
    finalizer = weakref.finalize(result, _retire, owner, cupy.cuda.get_current_stream(), result.device.id)
    finalizer.atexit = False


def _compact(x: Any) -> Any:
    if not x.flags.c_contiguous:
        return cupy.ascontiguousarray(x)
    return x if x.data.ptr % ALIGNMENT == 0 else x.copy()


LIBRARY = Library(
    name="cupy",
    array=cupy.ndarray,
    from_dlpack=cupy.from_dlpack,
    compact=_compact,
    pointer=lambda x: x.data.ptr,
    empty=cupy.empty,
    scope=lambda x: x.device,
    synchronize=lambda: cupy.cuda.get_current_stream().synchronize(),
    keep=_keep,
)

if TYPE_CHECKING:  # the names and signatures, for editors
    from jaxprims import *  # noqa: F403
else:
    __all__ = [name for name in jaxprims.__all__ if name not in OTHERS]
    globals().update({name: wrap(getattr(jaxprims, name), LIBRARY) for name in __all__})


def __dir__() -> list[str]:
    return sorted([*(name for name in jaxprims.__all__ if name not in OTHERS), "LIBRARY"])
