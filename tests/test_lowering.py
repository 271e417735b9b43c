"""The program that a GPU gets, read on any machine: which custom calls, and nothing costly beside them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jaxprims
from tests.cases import Case
from tests.contract import CASES, case_id, objective

KERNEL_CASES = [c for c in CASES if c.kernels]
each_case = pytest.mark.parametrize("case", KERNEL_CASES, ids=case_id)


def lowered(fn, *args) -> str:
    with jaxprims.use("cuda"):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def targets(text: str) -> list[str]:
    return sorted(t.removeprefix("jaxprims_") for t in re.findall(r"custom_call @(\w+)", text))


def copies(text: str) -> list[str]:
    """Operations that move an array through memory: transposes, and broadcasts of anything but a scalar's copies."""
    found, uniform = [], set()
    for line in text.splitlines():
        if "stablehlo.transpose" in line:
            found.append(line.strip())
        broadcast = re.match(r"\s*(%\w+) = stablehlo.broadcast_in_dim (%\w+)", line)
        if broadcast:
            result, operand = broadcast.groups()
            if operand in uniform or re.search(r": \(tensor<[a-z]\w*>\)", line):
                uniform.add(result)
            else:
                found.append(line.strip())
    return found


@each_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_is_the_expected_custom_calls_alone(case: Case, dtype: str):
    if dtype not in case.dtypes:
        pytest.skip("not a dtype of this case")
    text = lowered(case.fn, *case.operands(dtype))
    assert targets(text) == sorted(case.kernels)
    assert copies(text) == []
    assert "config = {" in text


@each_case
def test_gradient_is_the_expected_custom_calls(case: Case):
    if not case.diff_args():
        pytest.skip("nothing to differentiate")
    text = lowered(jax.value_and_grad(objective(case), case.diff_args()), *case.operands("float32"))
    assert targets(text) == sorted(case.grad_kernels)
    assert [line for line in copies(text) if "transpose" in line] == []


@each_case
def test_vmap_is_one_call_and_broadcasts_no_unbatched_operand(case: Case):
    if not case.vmap:
        pytest.skip("not vmapped")
    x = case.operands("float32")
    for picked in range(len(x)):
        args = [jnp.stack([a, a]) if i == picked else a for i, a in enumerate(x)]
        in_axes = tuple(0 if i == picked else None for i in range(len(x)))
        text = lowered(jax.vmap(case.fn, in_axes), *args)
        assert targets(text) == sorted(case.kernels), f"operand {picked}"
        assert copies(text) == [], f"operand {picked}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_split_weight_gradient_is_one_custom_call(dtype: str):
    """Its workspace is a second result of the call, of bytes, and nothing else."""
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((8, 64, 64, 8), (3, 3, 8, 16)))
    numbers = ("NHWC", "HWIO", "NHWC")
    f = jax.grad(lambda w, x: jaxprims.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers).sum())
    text = lowered(f, w, x)
    assert targets(text) == ["conv_dw"]
    results = re.search(r"custom_call @jaxprims_conv_dw.*-> \((.*)\)", text)
    assert results and re.fullmatch(r"tensor<3x3x8x16x\w+>, tensor<\d+xui8>", results.group(1))
    assert copies(text) == []


def test_the_reference_holds_no_custom_call():
    x = jnp.ones((2, 4, 4, 3))
    with jaxprims.use("reference"):
        text = jax.jit(lambda x: jaxprims.max_pool(x, (2, 2))).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text


def test_cuda_on_a_machine_without_a_gpu_says_so():
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is here")
    with jaxprims.use("cuda"), pytest.raises(NotImplementedError, match="cpu"):
        jaxprims.softmax(jnp.ones((2, 3)))


def test_cuda_names_the_limit_that_a_case_is_past():
    with jax.enable_x64(True), jaxprims.use("cuda"), pytest.raises(NotImplementedError, match="float64"):
        jax.jit(lambda x: jaxprims.softmax(x)).trace(jnp.ones((2, 3), jnp.float64))


def test_the_setting_is_part_of_the_jit_cache():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return jaxprims.softmax(x)

    x = jnp.ones((2, 3))
    f(x)
    with jaxprims.use("reference"):
        f(x)
    f(x)
    assert len(traces) == 2


def test_an_unknown_backend_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="backend='gpu'"), jaxprims.use("gpu"):
        pass
    monkeypatch.setenv("JAXPRIMS_BACKEND", "fast")
    with pytest.raises(ValueError, match="JAXPRIMS_BACKEND='fast'"):
        jaxprims.softmax(jnp.ones((2, 3)))
