"""What the tests of the kernels' plans share: their C++ programs, compiled without CUDA, and the options of a convolution."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxprims.conv import workspace
from jaxprims.conv.params import ConvParams

ROOT = Path(__file__).parent.parent
FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2  # Op of cuda/conv/problem.h


def build(stem: str, folder: Path) -> Path:
    """tests/<stem>.cpp as a program; skips where there is no C++ compiler."""
    compiler = next(filter(None, (os.environ.get("CXX"), shutil.which("c++"), shutil.which("g++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = str(ROOT / "tests" / f"{stem}.cpp")
    program = folder / stem
    subprocess.run([compiler, "-std=c++17", "-O1", "-I", str(ROOT / "cuda"), source, "-o", str(program)], check=True)
    return program


def dw_workspace(
    n: Any,
    c: int,
    h: int,
    k: int,
    r: int,
    u: int,
    pad: int,
    groups: int = 1,
    dtype: str = "float32",
    batched: tuple[Any, ...] = (),
) -> int:
    """The bytes that conv_dw asks for, NHWC and square; n and the batch axis B, (B,) or (), may be symbolic."""
    params = ConvParams(
        lhs_spec=(0, 3, 1, 2),
        rhs_spec=(3, 2, 0, 1),
        out_spec=(0, 3, 1, 2),
        strides=(u, u),
        padding=((pad, pad), (pad, pad)),
        lhs_dilation=(1, 1),
        rhs_dilation=(1, 1),
        x_spatial=(h, h),
        w_spatial=(r, r),
        groups=groups,
        x_batched=bool(batched),
        y_batched=bool(batched),
        w_batched=bool(batched),
    )
    x = jax.core.ShapedArray((*batched, n, h, h, c), dtype)
    dy = jax.core.ShapedArray((*batched, n, *params.y_spatial, k), dtype)
    return workspace.conv_dw(params, x, dy)
