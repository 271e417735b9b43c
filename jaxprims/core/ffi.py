"""The kernel library: found, checked against the installed jaxlib, and its FFI targets registered with XLA.

Nothing here touches a device: loading the library runs no CUDA call, and registering a target is a table entry.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

LIBRARY = "_cuda.so"
REINSTALL = "JAXPRIMS_CUDA=ON pip install --force-reinstall --no-deps ."
BUILD = "make build  (in the source tree; needs nvcc), or " + REINSTALL
UNSET = "unset JAXPRIMS_LIBRARY, or let it name a library that was built for this machine and jaxlib"


@dataclass(frozen=True)
class Status:
    """What became of the kernel library. ``reason`` and ``remedy`` are set where it is not loaded."""

    loaded: bool
    path: str | None = None
    reason: str | None = None
    remedy: str | None = None
    library_api: tuple[int, int] | None = None
    runtime_api: tuple[int, int] | None = None
    build_info: str | None = None


def runtime_api() -> tuple[int, int] | None:
    """XLA's FFI API version of the installed jaxlib, read off its own header."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError:
        return None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0].group(1)), int(found[1].group(1))) if found[0] and found[1] else None


def given() -> str | None:
    """The library that the user named in place of the installed one; no reinstallation changes that one."""
    return os.environ.get("JAXPRIMS_LIBRARY") or None


def _remedy() -> str:
    return UNSET if given() else REINSTALL


def _find() -> Path | None:
    if named := given():
        return Path(named)
    package = Path(__file__).resolve().parent.parent
    places = [package, *(Path(sysconfig.get_path(k)) / "jaxprims" for k in ("platlib", "purelib"))]
    return next((p / LIBRARY for p in places if (p / LIBRARY).is_file()), None)


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, Status]:
    have = runtime_api()
    path = _find()
    if path is None:
        return None, Status(
            False, reason="this installation was built without CUDA kernels", remedy=BUILD, runtime_api=have
        )
    try:
        library = ctypes.CDLL(str(path))
        library.jaxprims_build_info.restype = ctypes.c_char_p
        info = library.jaxprims_build_info().decode()
        version = library.jaxprims_ffi_api_version()
    except (OSError, AttributeError) as e:
        return None, Status(False, str(path), f"the library does not load: {e}", _remedy(), runtime_api=have)
    built = (version // 1000, version % 1000)
    remedy = _remedy()
    if have is not None and (built[0] != have[0] or built[1] > have[1]):
        reason = f"the library was built for XLA FFI API {built[0]}.{built[1]}, the installed jaxlib speaks {have[0]}.{have[1]}"
        warnings.warn(f"jaxprims: {reason}; the reference runs instead. Mend it with: {remedy}", stacklevel=2)
        return None, Status(False, str(path), reason, remedy, built, have, info)
    return library, Status(True, str(path), None, None, built, have, info)


def status() -> Status:
    """What became of the kernel library, and the command that mends it."""
    return _load()[1]


def ask(symbol: str, values: Sequence[int]) -> str | None:
    """The text that the library's ``symbol(values, count, hopper)`` gives; None where there is no library or it has none.

    ``hopper``: this machine's GPU is one, or there is no GPU and the library has kernels for one.
    """
    library, state = _load()
    function = getattr(library, symbol, None)
    if function is None:
        return None
    function.restype, function.argtypes = (
        ctypes.c_char_p,
        [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int],
    )
    hopper = "sm_90a" in (state.build_info or "")
    if gpu_present():
        hopper = hopper and str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"
    return function((ctypes.c_int64 * len(values))(*values), len(values), hopper).decode() or None


_registered: set[str] = set()


def register(target: str) -> bool:
    """Register the C symbol ``target`` as the FFI target of that name; False where the library lacks it."""
    library = _load()[0]
    if library is None:
        return False
    if target not in _registered:
        try:
            symbol = getattr(library, target)
        except AttributeError:
            return False
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(symbol), platform="CUDA")
        jax.ffi.register_ffi_target_as_batch_partitionable(target)
        _registered.add(target)
    return True


def gpu_present() -> bool:
    """True where this process computes on an NVIDIA GPU. Initialises JAX's backends: call it while lowering, not on import."""
    try:
        device = jax.devices()[0]
    except RuntimeError:
        return False
    return device.platform in ("gpu", "cuda") and "cuda" in device.client.platform_version.lower()


def fits(capability: tuple[int, int], archs: str) -> bool:
    """Whether code built for ``archs`` ("80,90a,compute_80") runs on a GPU of this compute capability.

    Machine code runs on its major version with at least its minor one ("90a": on 9.0 alone); PTX on everything newer.
    """
    for word in re.split(r"[,; ]+", archs.strip()):
        m = re.fullmatch(r"(sm_|compute_)?(\d+)(\d)([af]?)(-real|-virtual)?", word)
        if not m:
            continue
        arch = (int(m.group(2)), int(m.group(3)))
        virtual = m.group(1) == "compute_" or m.group(5) == "-virtual"
        if m.group(4) == "a":
            ok = capability == arch
        elif virtual:
            ok = capability >= arch
        else:
            ok = capability[0] == arch[0] and capability[1] >= arch[1]
        if ok:
            return True
    return False


@functools.cache
def device_problem() -> str | None:
    """Why the loaded library cannot run on the GPU at hand (None: it can, or there is no GPU)."""
    info = status().build_info
    archs = re.search(r"archs=([^\s;]+)", info or "")
    if not gpu_present() or archs is None:
        return None
    for device in jax.local_devices():
        m = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        if m and not fits((int(m.group(1)), int(m.group(2))), archs.group(1)):
            return (
                f"the library holds code for {archs.group(1)}, {device.device_kind} has compute capability {m.group(0)}"
            )
    return None


def why_not() -> tuple[str, str] | None:
    """(reason, remedy) where kernels cannot run in this process, else None."""
    s = status()
    if not s.loaded:
        return s.reason or "", s.remedy or ""
    problem = device_problem()
    if problem:
        return problem, _remedy()
    return None


@functools.cache
def _tell(reason: str, remedy: str) -> None:
    warnings.warn(f"jaxprims: {reason}; the reference runs on this GPU instead. Mend it with: {remedy}", stacklevel=3)


def usable() -> bool:
    """Whether a program lowered for CUDA here may call the kernels. On a GPU without them: one warning, or an error."""
    problem = why_not()
    if problem is None:
        return True
    if gpu_present():
        reason, remedy = problem
        if os.environ.get("JAXPRIMS_REQUIRE_CUDA") == "1":
            raise RuntimeError(f"jaxprims: JAXPRIMS_REQUIRE_CUDA=1, but {reason}. Mend it with: {remedy}")
        _tell(reason, remedy)
    return False
