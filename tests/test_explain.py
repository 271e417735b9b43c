"""jaxprims.explain: what it finds inside nested programs, how it counts, and its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxprims
from jaxprims.__main__ import main
from jaxprims.core.primitive import REGISTRY

sys_explain = sys.modules["jaxprims.explain"]  # the module: the package's attribute of that name is the function
Ceilings, Row = sys_explain.Ceilings, sys_explain.Row

X = jax.ShapeDtypeStruct((2, 6, 5, 3), jnp.float32)
W = jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32)


def conv(x, w):
    return jaxprims.conv(x, w, padding="SAME")


def same(x):
    """A convolution whose result can be its next operand."""
    return jaxprims.conv(x, jnp.ones((3, 3, 3, 3), x.dtype))


def rows(fn, *args):
    return jaxprims.explain(fn, *args).rows


def test_one_convolution_by_hand():
    (row,) = rows(conv, X, W)
    assert (row.op, row.kernel, row.reason, row.times, row.inside) == ("conv", "jaxprims_conv", None, 1, ())
    assert (row.operands, row.results) == (("f32[2,6,5,3]", "f32[3,3,3,4]"), ("f32[2,6,5,4]",))
    assert row.bytes == 4 * (2 * 6 * 5 * 3 + 3 * 3 * 3 * 4 + 2 * 6 * 5 * 4)
    assert row.flops == 2 * (2 * 6 * 5 * 4) * (3 * 3 * 3)


def test_the_gradient_is_made_of_kernels_too():
    found = rows(jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1)), X, W)
    assert sorted(row.op for row in found) == ["conv", "conv_dw", "conv_dx"]
    assert all(row.kernel == f"jaxprims_{row.op}" for row in found)


def test_a_case_without_kernel_says_why():
    with jax.enable_x64(True):
        report = jaxprims.explain(conv, jnp.ones(X.shape, jnp.float64), jnp.ones(W.shape, jnp.float64))
    (row,) = report.rows
    assert row.kernel is None and row.reason and "float64" in row.reason
    assert report.kernels == 0
    assert f"reference for conv: {row.reason}" in str(report)


def test_use_reference_is_followed():
    with jaxprims.use("reference"):
        (row,) = rows(conv, X, W)
    assert row.kernel is None and row.reason and "reference" in row.reason


def test_every_kind_of_inner_program():
    def branch(x):
        return jax.lax.cond(x.sum() > 0, same, lambda x: 2 * same(x), x)

    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, same(c[1])), (0, x))[1]

    def scan(x):
        return jax.lax.scan(lambda c, _: (jax.lax.scan(lambda d, _: (same(d), None), c, None, 4)[0], None), x, None, 5)[
            0
        ]

    @jax.custom_jvp
    def own(x):
        return same(x)

    own.defjvp(lambda p, t: (own(p[0]), t[0]))

    def found(fn):
        return [(row.times, row.inside) for row in rows(fn, X)]

    assert found(jax.jit(jax.jit(same))) == [(1, ())]
    assert found(branch) == [(1, ("cond (one of 2)",))] * 2
    assert found(loop) == [(1, ("while (per turn)",))]
    assert found(scan) == [(20, ("scan x5", "scan x4"))]
    assert found(own) == [(1, ())]
    assert found(jax.checkpoint(same)) == [(1, ())]
    assert found(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(same(x)))(x).sum()))[0] == (1, ())


def test_shard_map_counts_one_device():
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:2])
    fn = jax.shard_map(same, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    (row,) = rows(fn, X)
    assert row.inside == ("shard_map (per device)",)
    assert row.operands[0].startswith("f32[1,6,5,3]")


def test_other_equations_are_counted():
    report = jaxprims.explain(lambda x: jnp.sin(jnp.sin(x)) + 1.0, X)
    assert report.rows == () and report.others == {"sin": 2, "add": 1}
    assert "3 other equations go to XLA" in str(report)


def test_nothing_is_run_and_keywords_pass_through():
    def fn(x, *, scale):
        assert isinstance(x["a"], jax.core.Tracer)
        return jaxprims.conv(x["a"] * scale, jnp.ones((1, 1, 3, 2)))

    assert len(rows(lambda tree: fn(tree, scale=2.0), {"a": X})) == 1
    assert len(jaxprims.explain(fn, {"a": X}, scale=jnp.ones(())).rows) == 1


def row_of(dtype, flops, moved):
    return Row("conv", "jaxprims_conv", None, ("a",), ("b",), dtype, flops, moved, 0)


def test_roofline_time_is_the_larger_of_the_two():
    gpu = Ceilings("toy", copy=100.0, bf16=1000.0, tf32=500.0, f32=50.0)
    assert row_of("float32", 100, 100).seconds(gpu) == 2.0
    assert row_of("float32", 100, 100).seconds(gpu, "tf32") == 1.0
    assert row_of("bfloat16", 1000, 10).seconds(gpu) == 1.0
    assert row_of("float16", 0, 300).seconds(gpu) == 3.0


def test_table_with_roofline():
    report = jaxprims.explain(conv, X, W)
    lines = str(report.on("H200")).splitlines()
    assert "H200 roofline" in lines[0] and set(lines[1]) == {"-", " "}
    assert lines[2].startswith("conv  jaxprims_conv") and "  f32[2,6,5,3] f32[3,3,3,4] -> f32[2,6,5,4]" in lines[2]
    assert lines[2].endswith("us")
    assert "1 ops of jaxprims, 1 as kernels on an NVIDIA GPU" in lines[3]
    mine = Ceilings("mine", 1e9, 1e9, 1e9, 1e9)
    assert "mine roofline" in str(report.on(mine))
    with pytest.raises(ValueError, match="gpu='B2000' is not known.*H200.*Ceilings"):
        report.on("B2000")


@pytest.mark.parametrize("timed", ["report", "row"])
def test_a_roofline_is_refused_where_it_is_asked_for(timed):
    report = jaxprims.explain(conv, X, W)
    call = report.on if timed == "report" else report.rows[0].seconds
    with pytest.raises(ValueError, match="float32='f16' is not known; give one of 'f32', 'tf32'"):
        call("H200", float32="f16")
    with pytest.raises(ValueError, match="gpu='A100' is not known.*H200"):
        call("A100")
    for value in (3, None, Ceilings):
        with pytest.raises(TypeError, match="gpu=.* must be a name or Ceilings"):
            call(value)
    assert report.rows[0].seconds("H200", "tf32") == report.rows[0].seconds(sys_explain.GPUS["H200"], "tf32") > 0


@pytest.mark.parametrize(
    "value, text", [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2.5e9, "2.5 GB"), (7e15, "7e+03 TB")]
)
def test_units(value, text):
    assert sys_explain._unit(value, "B") == text


def test_every_op_decides_for_every_case_as_it_lowers():
    from tests.cases import all_cases

    seen = set()
    for case in all_cases():
        report = jaxprims.explain(case.fn, *case.operands("float32"))
        assert sorted(row.op for row in report.rows) == sorted(case.kernels), case.id
        assert all(row.kernel for row in report.rows), case.id
        assert all(row.bytes > 0 and row.flops >= 0 and row.workspace >= 0 for row in report.rows), case.id
        seen |= {row.op for row in report.rows}
    assert seen <= set(REGISTRY)


def test_command_line_explains_its_own_example(capsys):
    assert main(["explain"]) == 0
    out = capsys.readouterr().out
    assert "conv_dw" in out and "H200 roofline" in out


def test_command_line_explains_a_function_of_a_module(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp, jaxprims\n"
        "def step():\n"
        "    return lambda x: jaxprims.conv(x, jnp.ones((1, 1, 3, 2))), jnp.ones((1, 4, 4, 3))\n"
    )
    root = str(Path(jaxprims.__file__).parent.parent)
    command = [sys.executable, "-m", "jaxprims", "explain", "mine:step"]
    env = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "f32[1,4,4,3]" in done.stdout, done.stderr


def test_command_line_errors(capsys):
    assert main(["explain", "mine"]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "--fast"])
    with pytest.raises(SystemExit) as left:
        main(["explain", "--gpu", "A100"])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and "H200" in err and "A100" in err and out == ""
    with pytest.raises(SystemExit):
        main([])


@pytest.mark.parametrize(
    "target, why",
    [
        ("nope:foo", "no module 'nope'"),
        ("os.nope:foo", "no module 'os.nope'"),
        ("math:nope", "has no 'nope'"),
        ("math:sqrt", "sqrt cannot be called without arguments"),
        ("math:pi", "pi is not a function"),
        (":x", "missing"),
        ("math:", "missing"),
        (".math:x", "missing"),
        ("os:getcwd", "getcwd returned str"),
        ("builtins:dict", "dict returned dict"),
    ],
)
def test_command_line_refuses_targets_without_a_traceback(target, why, capsys):
    assert main(["explain", target]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: target={target!r}: ") and why in err and "MODULE:FUNCTION" in err and out == ""


def test_command_line_leaves_the_errors_of_the_users_code(tmp_path, monkeypatch):
    (tmp_path / "asks_for_more.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        main(["explain", "asks_for_more:step"])


def test_command_line_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out == f"jaxprims {jaxprims.__version__}\n"


def test_explaining_does_not_change_the_numbers():
    x, w = np.ones(X.shape, np.float32), np.ones(W.shape, np.float32)
    before = conv(x, w)
    jaxprims.explain(conv, x, w)
    np.testing.assert_array_equal(conv(x, w), before)


def test_the_choice_of_a_convolution_comes_from_the_library():
    x, w = jax.ShapeDtypeStruct((8, 14, 14, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    choices = {}
    for algorithm in ("auto", "direct", "gemm"):
        (row,) = jaxprims.explain(lambda x, w, a=algorithm: jaxprims.conv(x, w, algorithm=a), x, w).rows
        choices[algorithm] = row.choice
    if not jaxprims.core.ffi.status().loaded:
        assert set(choices.values()) == {None}
    else:
        assert (
            choices["direct"] == "direct"
            and choices["gemm"].startswith("im2col")
            and choices["auto"] not in (None, "direct")
        )
    (row,) = jaxprims.explain(jaxprims.softmax, x).rows
    assert row.choice is None
