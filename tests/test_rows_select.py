"""The plans of norms and softmax over rows, without a GPU: tests/rows_select.cpp, compiled and run."""

from __future__ import annotations

import subprocess

import pytest

from tests.native import build


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("rows_select", tmp_path_factory.mktemp("rows_select"))


def test_every_element_has_a_thread(program):
    """Lengths up to 140000 and rows from 1 to 2^33: what a plan takes, its threads cover, within their registers and workspace."""
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
