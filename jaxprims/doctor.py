"""``python -m jaxprims doctor``: what is installed, whether the CUDA kernels can run here, and what mends it if not.

The exit code is 1 where an NVIDIA GPU is present and the kernels cannot run on it, else 0: a machine without a GPU is
well, it runs the reference.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from jaxprims.core import ffi

REBUILD = "pip install --force-reinstall --no-deps jaxprims  (in a source tree: pip install -e .)"


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    name: str
    capability: str  # "9.0"
    driver: str  # "580.65.06"


@dataclass
class Facts:
    """Everything the doctor looks at; `find_problems` judges it without looking further."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[Gpu] = field(default_factory=list)
    device_file: bool = False  # /dev/nvidia0 exists
    plugins: list[str] = field(default_factory=list)  # JAX's CUDA plugins with their versions
    jax_gpus: list[str] = field(default_factory=list)
    jax_error: str | None = None  # why JAX has no GPU, in its own words
    jax_platforms: str | None = None  # the environment variable JAX_PLATFORMS
    library_path: str | None = None
    library_named: bool = False  # by the environment variable JAXPRIMS_LIBRARY
    library_loaded: bool = False
    library_reason: str | None = None
    library_remedy: str | None = None
    library_api: str | None = None
    runtime_api: str | None = None
    build_info: str | None = None
    device_errors: dict[int, str] = field(default_factory=dict)  # per GPU: why a kernel of the library cannot run
    op_error: str | None = None  # a real op, run as kernel and compared with the reference

    @property
    def has_gpu(self) -> bool:
        return bool(self.gpus or self.jax_gpus or self.device_file)


@dataclass(frozen=True)
class Problem:
    """What is wrong and the command that mends it."""

    what: str
    remedy: str


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_gpus() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = ([part.strip() for part in line.split(",")] for line in text.splitlines())
    return [Gpu(*row) for row in rows if len(row) == 3]


def _api(number: int | tuple[int, ...] | None) -> str | None:
    """An FFI API version, given as 1000 * major + minor or as a pair, in words."""
    if number is None:
        return None
    major, minor = divmod(number, 1000) if isinstance(number, int) else number
    return f"{major}.{minor}"


def _check_devices(path: str, count: int) -> dict[int, str]:
    """Starts a kernel of the library on each GPU; the ones on which it fails, with CUDA's reason."""
    check = ctypes.CDLL(path).jaxprims_device_check
    check.argtypes, check.restype = [ctypes.c_int], ctypes.c_char_p
    answers = {i: check(i).decode() for i in range(count)}
    return {i: text for i, text in answers.items() if text}


def _check_op() -> str | None:
    """Runs one op as a kernel and as the reference on the GPU; None when they agree."""
    import jax
    import numpy as np

    import jaxprims

    x = jax.device_put(np.linspace(-3, 3, 8 * 37, dtype=np.float32).reshape(8, 37), jax.devices("cuda")[0])
    try:
        with jaxprims.use("cuda"):
            got = np.asarray(jax.jit(jaxprims.softmax)(x))
    except Exception as error:  # the doctor reports whatever went wrong
        return f"{type(error).__name__}: {error}"
    with jaxprims.use("reference"):
        want = np.asarray(jax.jit(jaxprims.softmax)(x))
    worst = float(np.abs(got - want).max())
    return None if worst < 1e-6 else f"softmax as a kernel differs from the reference by {worst:.2g}"


def examine() -> Facts:
    """Looks at this machine. The only function here that touches devices."""
    import jax

    facts = Facts(gpus=_driver_gpus(), device_file=Path("/dev/nvidia0").exists())
    facts.versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("jaxprims", "jax", "jaxlib", "numpy", "flax", "optax", "cupy-cuda12x", "cupy-cuda13x"):
        if version := _version(package):
            facts.versions[package] = version
    names = [f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("plugin", "pjrt")]
    facts.plugins = [f"{name} {version}" for name in names if (version := _version(name))]
    facts.jax_platforms = os.environ.get("JAX_PLATFORMS") or None
    try:
        facts.jax_gpus = [f"{device.device_kind} (cuda:{device.id})" for device in jax.devices("cuda")]
    except RuntimeError as error:
        facts.jax_error = str(error).splitlines()[0]

    status = ffi.status()
    facts.library_loaded, facts.library_path = status.loaded, str(status.path) if status.path else None
    facts.library_named = ffi.given() is not None
    facts.library_reason, facts.library_remedy = status.reason, status.remedy
    facts.library_api, facts.runtime_api = _api(status.library_api), _api(status.runtime_api)
    facts.build_info = status.build_info
    if facts.library_loaded and facts.library_path and facts.jax_gpus:
        facts.device_errors = _check_devices(facts.library_path, len(facts.jax_gpus))
        if not facts.device_errors:
            facts.op_error = _check_op()
    return facts


def _plugin_extra(gpus: list[Gpu]) -> str:
    """The extra whose JAX plugin this driver runs: CUDA 13 needs driver 580."""
    major = gpus[0].driver.split(".")[0] if gpus else ""
    return "cuda12" if major.isdigit() and int(major) < 580 else "cuda13"


def find_problems(facts: Facts) -> list[Problem]:
    """What keeps the kernels from running on a GPU that is there. Empty without a GPU."""
    if not facts.has_gpu:
        return []
    problems = []
    rebuild = (
        f"{ffi.UNSET}; else {REBUILD}" if facts.library_named else REBUILD
    )  # which leaves a named library as it is
    if not facts.jax_gpus:
        if not facts.plugins:
            remedy = f'pip install "jaxprims[{_plugin_extra(facts.gpus)}]"'
            problems.append(Problem("there is an NVIDIA GPU but JAX has no CUDA plugin", remedy))
        elif facts.jax_platforms and not {"cuda", "gpu"} & set(facts.jax_platforms.split(",")):
            what = f"JAX_PLATFORMS={facts.jax_platforms} keeps JAX off the GPU"
            problems.append(Problem(what, "unset JAX_PLATFORMS"))
        else:
            remedy = f'pip install --upgrade "jax[{_plugin_extra(facts.gpus)}]"  (plugin and driver must fit), then nvidia-smi'
            problems.append(Problem(f"JAX does not see the GPU: {facts.jax_error}", remedy))
    if not facts.library_loaded:
        what = f"the kernel library is not loaded: {facts.library_reason or 'no reason given'}"
        problems.append(Problem(what, facts.library_remedy or rebuild))
    for ordinal, text in facts.device_errors.items():
        archs = {gpu.capability.replace(".", "") for gpu in facts.gpus}
        wanted = ";".join(sorted("90a-real" if arch == "90" else f"{arch}-real" for arch in archs)) or "native"
        what = f"the library's kernels do not run on cuda:{ordinal}: {text} (built: {facts.build_info})"
        remedy = f"JAXPRIMS_CUDA=ON JAXPRIMS_CUDA_ARCHS='{wanted}' {REBUILD}"
        problems.append(Problem(what, f"{ffi.UNSET}; else {remedy}" if facts.library_named else remedy))
    if facts.op_error:
        problems.append(
            Problem(f"a kernel fails: {facts.op_error}", f"please report it with this text; rebuild: {rebuild}")
        )
    return problems


def render(facts: Facts, problems: list[Problem]) -> str:
    """The report as text: facts, then problems each with its remedy, then the verdict."""
    lines = [f"{name:<12} {version}" for name, version in facts.versions.items()]
    lines.append(f"{'CUDA plugin':<12} {', '.join(facts.plugins) or 'none'}")
    lines.append(f"{'driver':<12} {facts.gpus[0].driver if facts.gpus else 'none found (nvidia-smi)'}")
    for gpu in facts.gpus:
        lines.append(f"{'GPU':<12} {gpu.name}, compute capability {gpu.capability}")
    lines.append(f"{'JAX devices':<12} {', '.join(facts.jax_gpus) or 'no CUDA device'}")
    lines.append(f"{'FFI API':<12} runtime {facts.runtime_api or 'unknown'}, library {facts.library_api or 'none'}")
    loaded = facts.build_info if facts.library_loaded else f"not loaded: {facts.library_reason}"
    lines.append(f"{'library':<12} {facts.library_path or 'jaxprims/_cuda.so'}: {loaded}")
    lines.append("")
    for problem in problems:
        lines += [f"PROBLEM  {problem.what}", f"  mend:  {problem.remedy}"]
    if problems:
        lines.append("The kernels cannot run on this GPU; every op runs its reference (plain XLA) instead.")
    elif facts.has_gpu:
        lines.append("All well: the kernels run on this GPU (a softmax was run and compared with the reference).")
    else:
        lines.append("No NVIDIA GPU here: every op runs its reference (plain XLA). All well.")
        if not facts.library_loaded and facts.library_remedy:
            lines.append(f"To have the kernels too: {facts.library_remedy}")
    return "\n".join(lines)


def main() -> int:
    """Prints the report; 1 where a GPU is there and the kernels cannot run, else 0."""
    facts = examine()
    problems = find_problems(facts)
    print(render(facts, problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
