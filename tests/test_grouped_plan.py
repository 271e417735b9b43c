"""The choice of kernel for grouped convolutions and the walk of the row kernels, without a GPU: tests/grouped_plan.cpp."""

from __future__ import annotations

import subprocess

import pytest

from tests.native import FORWARD, INPUT_GRAD, WEIGHT_GRAD, build


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("grouped_plan", tmp_path_factory.mktemp("grouped_plan"))


def test_every_output_is_visited_once(program):
    """Random shapes: the blocks' rows, pieces of a dilation and columns meet the inputs of the definition, every output once."""
    run = subprocess.run([str(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    "op, n, h, c, groups, r, pad, dilation, stride, kernel",
    [
        (FORWARD, 128, 28, 192, 192, 7, 3, 1, 1, "band"),
        (INPUT_GRAD, 128, 28, 192, 192, 7, 9, 3, 1, "band"),
        (WEIGHT_GRAD, 128, 28, 192, 192, 7, 3, 1, 1, "wgrad"),
        (FORWARD, 64, 32, 256, 256, 31, 15, 1, 1, "wide"),
        (FORWARD, 128, 56, 128, 32, 3, 1, 1, 1, "narrow"),
        (INPUT_GRAD, 128, 14, 512, 32, 3, 1, 1, 1, "narrow"),
        (WEIGHT_GRAD, 128, 14, 512, 32, 3, 1, 1, 1, "wgrad"),
        (FORWARD, 128, 14, 512, 16, 3, 1, 1, 1, "none"),  # 32 channels a group
        (FORWARD, 128, 56, 128, 32, 3, 1, 1, 2, "none"),
        (FORWARD, 128, 56, 144, 144, 3, 1, 1, 2, "depthwise"),
        (FORWARD, 128, 56, 144, 144, 3, 1, 1, 1, "depthwise"),
        (WEIGHT_GRAD, 128, 56, 144, 144, 3, 1, 1, 1, "wgrad"),
        (WEIGHT_GRAD, 128, 56, 144, 144, 3, 4, 4, 1, "depthwise"),
        (INPUT_GRAD, 128, 56, 144, 144, 3, 1, 1, 2, "depthwise"),
        (FORWARD, 128, 28, 20, 20, 7, 3, 1, 1, "depthwise"),  # channels are not a multiple of 8
        (FORWARD, 128, 28, 192, 1, 7, 3, 1, 1, "none"),
    ],
)
def test_kernel(program, op, n, h, c, groups, r, pad, dilation, stride, kernel):
    arguments = [str(a) for a in (op, n, h, c, groups, r, pad, dilation, stride)]
    assert subprocess.run([str(program), *arguments], capture_output=True, text=True).stdout.strip() == kernel
