"""The choice of Hopper kernel and its index arithmetic, without a GPU: tests/conv_select.cpp, compiled and run."""

from __future__ import annotations

import subprocess

import jax
import jax.export
import pytest

from jaxprims.conv import workspace as workspace_module
from tests.native import FORWARD, INPUT_GRAD, ROOT, WEIGHT_GRAD, build, dw_workspace


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("conv_select", tmp_path_factory.mktemp("conv_select"))


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


@pytest.mark.parametrize(
    "tf32, op, n, c, h, k, r, u, pad, tile",
    [
        (1, FORWARD, 128, 64, 64, 128, 9, 1, 0, "2x256"),
        (1, FORWARD, 128, 128, 32, 128, 9, 1, 0, "2x192"),  # 384 tiles: three full rounds
        (1, FORWARD, 128, 128, 16, 128, 7, 1, 0, "2x128"),  # few tiles: small ones
        (1, FORWARD, 256, 64, 56, 64, 3, 1, 1, "1x128"),  # K = 64: the warpgroups share the pixels out
        (1, FORWARD, 256, 64, 56, 256, 1, 1, 0, "2x256 flat"),
        (1, INPUT_GRAD, 256, 128, 56, 128, 3, 2, 1, "2x128"),  # four phases
        (0, FORWARD, 128, 384, 13, 384, 3, 1, 0, "2x128 exact"),
        (0, FORWARD, 256, 64, 56, 64, 3, 1, 1, "1x128 exact"),
        (0, INPUT_GRAD, 128, 384, 13, 384, 3, 1, 0, "2x128 exact boxes"),  # over a quarter of the products are padding
        (0, FORWARD, 256, 3, 224, 64, 7, 2, 3, "channels are not multiples of 4"),
        (0, FORWARD, 256, 4, 224, 64, 7, 2, 3, "so few channels that three quarters of a tile are empty"),
        (1, WEIGHT_GRAD, 128, 64, 64, 128, 9, 1, 0, "a weight gradient: both operands would lie the wrong way"),
    ],
)
def test_float32_tile(program, tf32, op, n, c, h, k, r, u, pad, tile):
    arguments = [str(a) for a in ("f32", tf32, op, n, c, h, k, r, u, pad)]
    assert subprocess.run([str(program), *arguments], capture_output=True, text=True).stdout.strip() == tile


@pytest.mark.parametrize(
    "op, n, c, h, k, r, u, pad, groups, kernel",
    [
        (FORWARD, 256, 64, 56, 64, 3, 1, 1, 1, "tensor x 1"),
        (FORWARD, 256, 2048, 14, 512, 3, 1, 1, 1, "tensor x 1"),
    ],
)
def test_generic_kernel(program, op, n, c, h, k, r, u, pad, groups, kernel):
    arguments = ["generic", *(str(a) for a in (op, n, c, h, k, r, u, pad, groups, 0))]
    assert (
        subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout.strip() == kernel
    )


@pytest.mark.parametrize(
    "n, c, h, k, r, u, pad, groups, kernel",
    [
        (256, 3, 224, 64, 7, 2, 3, 1, "tensor x 392"),  # two tiles; 3.2 million terms, 8192 for each accumulator
        (256, 64, 56, 64, 1, 1, 0, 1, "tensor x 264"),  # one tile
        (256, 64, 56, 64, 3, 1, 1, 1, "tensor x 98"),
        (256, 256, 14, 256, 3, 1, 1, 1, "tensor x 7"),
        (256, 2048, 7, 1000, 1, 1, 0, 1, "tensor x 2"),
        (256, 256, 56, 2, 1, 1, 0, 1, "narrow x 132"),
        (256, 96, 112, 96, 3, 1, 1, 96, "direct x 28"),  # 25 would leave most of a sixth round idle
        (4, 8, 8, 8, 3, 1, 1, 1, "narrow x 1"),
    ],
)
def test_weight_gradient_is_split(program, n, c, h, k, r, u, pad, groups, kernel):
    """No block alone has the sum over all pixels, where the reduction is long."""
    space = dw_workspace(n, c, h, k, r, u, pad, groups)
    arguments = ["generic", *(str(a) for a in (WEIGHT_GRAD, n, c, h, k, r, u, pad, groups, space))]
    assert (
        subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True).stdout.strip() == kernel
    )


def test_workspace_is_bounded():
    """Below 64 MiB whatever the sizes, some of them symbolic; none where a reduction is short."""
    (n, b) = jax.export.symbolic_shape("n, b")
    sizes = [1, 3, 8, 64, 1000, 4096]
    for c in sizes:
        for k in sizes:
            for r in (1, 3, 11):
                for images, batched in ((1, ()), (4096, ()), (n, ()), (64, (b,)), (n, (b,)), (256, (1000,))):
                    for dtype in ("float32", "bfloat16"):
                        space = dw_workspace(images, c, 224, k, r, 1, r // 2, dtype=dtype, batched=batched)
                        assert isinstance(space, int) and 0 <= space < 64 << 20
    assert dw_workspace(256, 3, 224, 64, 7, 2, 3) > 0
    assert dw_workspace(n, 3, 224, 64, 7, 2, 3) > 0
    assert dw_workspace(n, 3, 224, 64, 7, 2, 3, batched=(b,)) > 0
    assert dw_workspace(256, 64, 56, 64, 1, 1, 0, groups=64) > 0
    assert dw_workspace(1, 8, 8, 8, 3, 1, 1) == 0
    assert dw_workspace(0, 8, 64, 8, 3, 1, 1) == 0
    assert dw_workspace(256, 4096, 7, 4096, 1, 1, 0) == 0  # the result alone is 64 MiB
    assert dw_workspace(1, 8, 8, 8, 3, 1, 1, dtype="bfloat16") == workspace_module._SM90_WORKSPACE


def test_workspace_agrees(program):
    """cuda/conv/sm90.h and jaxprims/conv/workspace.py declare the same number of bytes."""
    text = (ROOT / "cuda" / "conv" / "sm90.h").read_text()
    value = {
        name: int(line.split("=")[1].split(";")[0])
        for name in ("kSm90Workers", "kSm90Chunks")
        for line in text.splitlines()
        if line.startswith(f"constexpr int {name} =")
    }
    assert "2} * kSm90Workers * kSm90Chunks * 64 * 64 * 4;" in text
    select = (ROOT / "cuda" / "conv" / "select.h").read_text()
    assert f"constexpr int64_t kSplitTerms = {workspace_module._SPLIT_TERMS};" in select
    assert f"constexpr int64_t kSerial = {workspace_module._SPLIT_SERIAL};" in select
    assert workspace_module._SM90_WORKSPACE == 2 * value["kSm90Workers"] * value["kSm90Chunks"] * 64 * 64 * 4
