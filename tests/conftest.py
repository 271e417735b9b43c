"""Settings shared by all tests: devices, the `gpu` mark.

`pytest -m "not gpu"` runs on the CPU even where a GPU is; `pytest -m gpu` needs one. Without a GPU the tests marked gpu are
skipped, with JAXPRIMS_REQUIRE_CUDA=1 they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before JAX starts its backends: eight CPU devices for the sharding tests, and no GPU memory taken in advance, since
# several test processes may share one.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr", "") == "not gpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


def _gpu_missing() -> str | None:
    """Why tests marked gpu cannot run here."""
    from jaxprims.core import ffi

    if not ffi.gpu_present():
        return "no NVIDIA GPU that JAX computes on"
    reason = ffi.why_not()
    return f"{reason[0]}; {reason[1]}" if reason else None


@pytest.fixture(autouse=True)
def _float32_throughout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests on a GPU compare float32 results to the last digits, unless they ask for TF32 by name."""
    if request.node.get_closest_marker("gpu") is None:
        yield
    else:
        import jax

        with jax.default_matmul_precision("highest"):
            yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or config.getoption("markexpr", "") == "not gpu":
        return
    reason = _gpu_missing()
    if reason and os.environ.get("JAXPRIMS_REQUIRE_CUDA") == "1":
        pytest.exit(f"JAXPRIMS_REQUIRE_CUDA=1, but {reason}", returncode=1)
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
