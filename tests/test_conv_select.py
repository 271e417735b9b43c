"""The choice of Hopper kernel and its index arithmetic, without a GPU: tests/conv_select.cpp, compiled and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = next(filter(None, (os.environ.get("CXX"), shutil.which("c++"), shutil.which("g++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("select") / "select"
    source = str(ROOT / "tests" / "conv_select.cpp")
    subprocess.run([compiler, "-std=c++17", "-O1", "-I", str(ROOT / "cuda"), source, "-o", str(path)], check=True)
    return path


def test_every_product_is_visited_once(program):
    """Random shapes: phases, boxes and taps of the plan give exactly the products of the definition."""
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    "op, n, c, h, k, r, u, pad, tile",
    [
        (FORWARD, 128, 64, 64, 128, 9, 1, 0, "2x2"),
        (FORWARD, 128, 128, 32, 128, 9, 1, 0, "3x2"),  # 384 tiles of 192 x 128: three full rounds
        (FORWARD, 16, 128, 16, 128, 7, 1, 0, "2x1"),  # few tiles: small ones
        (FORWARD, 256, 64, 56, 64, 3, 1, 1, "1x4 swapped"),  # K = 64: pixels are the wide side
        (FORWARD, 256, 64, 56, 256, 1, 1, 0, "2x2 flat"),
        (FORWARD, 256, 512, 7, 512, 3, 1, 1, "2x2 boxes"),  # 18 % of the products are padding
        (FORWARD, 256, 256, 14, 256, 3, 1, 1, "2x2"),  # 9 %: not worth it
        (FORWARD, 256, 3, 224, 64, 7, 2, 3, "channels are not multiples of 8"),
        (INPUT_GRAD, 128, 64, 64, 128, 9, 1, 0, "1x4 swapped boxes"),
        (INPUT_GRAD, 256, 128, 56, 128, 3, 2, 1, "2x2 boxes"),  # four phases
        (INPUT_GRAD, 64, 64, 32, 32, 4, 4, 0, "too many phases"),
        (WEIGHT_GRAD, 128, 64, 64, 128, 9, 1, 0, "2x4"),
        (WEIGHT_GRAD, 256, 64, 56, 64, 3, 1, 1, "1x3"),  # nine chunks of rows
        (WEIGHT_GRAD, 256, 64, 56, 256, 1, 1, 0, "1x4 swapped flat"),
    ],
)
def test_tile(program, op, n, c, h, k, r, u, pad, tile):
    arguments = [str(a) for a in (op, n, c, h, k, r, u, pad)]
    assert subprocess.run([str(program), *arguments], capture_output=True, text=True).stdout.strip() == tile


def test_workspace_agrees(program):
    """cuda/conv/sm90.h and jaxprims/conv/primitive.py declare the same number of bytes."""
    from jaxprims.conv import primitive

    text = (ROOT / "cuda" / "conv" / "sm90.h").read_text()
    value = {
        name: int(line.split("=")[1].split(";")[0])
        for name in ("kSm90Workers", "kSm90Chunks")
        for line in text.splitlines()
        if line.startswith(f"constexpr int {name} =")
    }
    assert "2} * kSm90Workers * kSm90Chunks * 64 * 64 * 4;" in text
    assert primitive._SM90_WORKSPACE == 2 * value["kSm90Workers"] * value["kSm90Chunks"] * 64 * 64 * 4
