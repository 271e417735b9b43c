"""The plans of norms and softmax over rows, without a GPU: tests/rows_select.cpp, compiled and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = next(filter(None, (os.environ.get("CXX"), shutil.which("c++"), shutil.which("g++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("rows") / "rows"
    source = str(ROOT / "tests" / "rows_select.cpp")
    subprocess.run([compiler, "-std=c++17", "-O1", "-I", str(ROOT / "cuda"), source, "-o", str(path)], check=True)
    return path


def test_every_element_has_a_thread(program):
    """Lengths up to 140000 and rows from 1 to 2^33: what a plan takes, its threads cover, within their registers and workspace."""
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
