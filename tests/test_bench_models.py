"""The models' benchmark: traces are read right, every line says what was measured, what fails or crashes costs its line alone."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import signal
import time

import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import jax
import jax.numpy as jnp

from jaxprims import models as registry
from jaxprims.bench import equivalence, model_report, model_rows, model_worker, models, picture, profile, report, run
from jaxprims.bench.model_report import Outcome
from jaxprims.bench.model_rows import ModelRow

MACHINE = dict.fromkeys(report.META, "x") | {"gpu": "Test GPU", "date": "2026-11-30T17:33:00+00:00"}

# --- traces -------------------------------------------------------------------------------------------------------------

HLO = """\
HloModule jit_step, is_scheduled=true

%region_0.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.9 = f32[] add(%a, %b)
}

%fused_computation (p: bf16[8,64]) -> f32[64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %convert = f32[8,64]{1,0} convert(%p)
  %zero = f32[] constant(0)
  ROOT %reduce.1 = f32[64]{0} reduce(%convert, %zero), dimensions={0}, to_apply=%region_0.1, metadata={op_name="jit(step)/ResNet/BatchNorm_0/reduce_sum"}
}

%fused_computation.1 (p.1: bf16[8,64]) -> bf16[8,64] {
  %p.1 = bf16[8,64]{1,0} parameter(0)
  ROOT %max = bf16[8,64]{1,0} maximum(%p.1, %p.1)
}

%wrapped_transpose_computation (p.2: bf16[8,64]) -> bf16[64,8] {
  %p.2 = bf16[8,64]{1,0} parameter(0)
  ROOT %transpose.3 = bf16[64,8]{1,0} transpose(%p.2), dimensions={1,0}
}

%gemm_fusion_dot_computation (p.3: bf16[64,8], p.4: bf16[8,64]) -> bf16[64,64] {
  %p.3 = bf16[64,8]{1,0} parameter(0)
  %p.4 = bf16[8,64]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,64]{1,0} dot(%p.3, %p.4), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[8,64]) -> bf16[64,64] {
  %x = bf16[8,64]{1,0} parameter(0)
  %cudnn-conv.1 = (bf16[8,64]{1,0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$convForward", metadata={op_name="jit(step)/ResNet/Conv_0/conv"}
  %custom-call.2 = (bf16[8,64]{1,0}, /*index=1*/f32[64]{0}) custom-call(%x), custom_call_target="jaxprims_norm_apply"
  %custom-call.3 = bf16[8,64]{1,0} custom-call(%x), custom_call_target="jaxprims_max_pool_scatter"
  %input_reduce_fusion = f32[64]{0} fusion(%x), kind=kInput, calls=%fused_computation, metadata={op_name="jit(step)/ResNet/mul"}
  %loop_maximum_fusion.4 = bf16[8,64]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation.1
  %wrapped_transpose = bf16[64,8]{1,0} fusion(%x), kind=kLoop, calls=%wrapped_transpose_computation
  %while.1 = bf16[8,64]{1,0} while(%x), condition=%region_0.1, body=%region_0.1
  %reduce-window.1 = bf16[8,64]{1,0} reduce-window(%x), to_apply=%region_0.1
  %lrn.1 = bf16[8,64]{1,0} reduce-window(%x), to_apply=%region_0.1, metadata={op_name="jit(step)/AlexNet/LocalResponseNorm/reduce_window"}
  %sort.1 = bf16[8,64]{1,0} sort(%x), dimensions={0}, to_apply=%region_0.1
  ROOT %gemm_fusion_dot.5 = bf16[64,64]{1,0} fusion(%wrapped_transpose, %x), kind=kCustom, calls=%gemm_fusion_dot_computation
}
"""

WANT = {
    "cudnn-conv.1": "convolution", "custom-call.2": "norm", "custom-call.3": "pool", "input_reduce_fusion": "norm",
    "loop_maximum_fusion.4": "elementwise", "wrapped_transpose": "copy", "while.1": None, "reduce-window.1": "pool",
    "lrn.1": "norm", "sort.1": "other", "gemm_fusion_dot.5": "convolution",
}  # fmt: skip


def test_a_programs_instructions_have_their_class():
    program = profile.instructions(HLO)
    assert {name: profile.class_of(program[name]) for name in WANT} == WANT
    assert program["custom-call.2"].target == "jaxprims_norm_apply"
    assert program["input_reduce_fusion"].inside == {"parameter", "convert", "constant", "reduce"}


@pytest.mark.parametrize(
    "scope, want",
    [("ResNet/bn_init", "norm"), ("Block/BatchNorm_0", "norm"), ("Net/bn1", "norm"), ("Net/cabn", "elementwise")],
)
def test_a_sum_inside_a_norm_is_the_norms(scope, want):
    assert profile.class_of(profile.Instruction("reduce", scope=f"jit(step)/{scope}/reduce_sum")) == want


def test_a_compiled_programs_own_text_is_read():
    def f(x, w):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y).sum()

    compiled = jax.jit(jax.grad(f, 1)).lower(jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 4))).compile()
    program = profile.instructions(compiled.as_text() or "")
    assert sum(profile.class_of(i) == "convolution" for i in program.values() if i.opcode == "convolution") >= 2


@pytest.mark.parametrize(
    "name, want",
    [
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true>", "norm"),
        ("void at::native::batch_norm_backward_reduce_channels_last_kernel<4, float>", "norm"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>", "norm"),
        ("triton_red_fused_native_batch_norm_backward_relu_12", "norm"),
        ("triton_poi_fused_add_relu_3", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "elementwise"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::BFloat16, int>", "pool"),
        ("void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, float>", "copy"),
        ("MemcpyD2D", "copy"),
        ("Memset (Device)", "copy"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copy"),
        ("sm90_xmma_wgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x64_cudnn", "convolution"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "convolution"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", "convolution"),
        ("void jaxprims::sm90_conv<jaxprims::Tile<128, 64>>(jaxprims::Args)", "convolution"),
        ("void jaxprims::norm::columns_apply_forward<__nv_bfloat16>(int)", "norm"),
        ("void jaxprims::pool::max_forward<__nv_bfloat16>(int)", "pool"),
        ("input_reduce_fusion_3", "norm"),
        ("loop_add_maximum_fusion_7", "elementwise"),
        ("wrapped_transpose", "copy"),
        ("quite_unknown", "other"),
    ],
)
def test_kernels_by_name(name, want):
    assert profile.class_of_kernel(name) == want


def gpu_trace() -> list[dict]:
    """As jax.profiler writes a step on a GPU: kernels on two streams, and lines that say the same again or are the host's."""

    def label(kind, pid, tid, name):
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}

    def kernel(tid, start, duration, name, **args):
        return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": duration, "name": name, "args": args}

    return [
        label("process_name", 1, 0, "/device:GPU:0"), label("process_name", 9, 0, "/host:CPU"),
        label("thread_name", 1, 14, "Stream #14(Compute)"), label("thread_name", 1, 15, "Stream #15(MemcpyD2D)"),
        label("thread_name", 1, 99, "XLA Ops"), label("thread_name", 9, 3, "python"),
        kernel(14, 0, 1000, "sm90_xmma_fprop_anything", hlo_op="cudnn-conv.1"),
        kernel(14, 1000, 500, "void something_of_ours<int>", hlo_op="custom-call.2"),
        kernel(14, 1500, 250, "input_reduce_fusion"),  # of a CUDA graph: no instruction is named
        kernel(14, 1750, 200, "loop_maximum_fusion_4"),
        kernel(14, 1950, 50, "sm90_xmma_wgrad_of_a_graph"),
        kernel(15, 300, 100, "MemcpyD2D"),
        kernel(99, 0, 2000, "cudnn-conv.1", hlo_op="cudnn-conv.1"),
        {"ph": "X", "pid": 9, "tid": 3, "ts": 0, "dur": 9000, "name": "PjitFunction(step)", "args": {}},
        {"ph": "X", "pid": 1, "tid": 14, "ts": 0, "dur": 0, "name": "nothing", "args": {}},
    ]  # fmt: skip


def test_a_gpus_trace_is_added_up_by_class(tmp_path):
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_trace()}).encode()))
    told = profile.breakdown(profile.read(path), profile.instructions(HLO))
    want = {"convolution": 1.05, "norm": 0.75, "pool": 0, "elementwise": 0.2, "copy": 0.1, "other": 0}
    assert told.classes == pytest.approx(want) and told.busy == pytest.approx(2.1)
    assert told.top[0] == ("sm90_xmma_fprop_anything", pytest.approx(1.0))
    assert profile.breakdown(gpu_trace(), profile.instructions(HLO), steps=2).busy == pytest.approx(1.05)


def test_pytorchs_trace_is_read(tmp_path):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "pid": 5, "tid": 5, "ts": 0, "dur": 50},
        {"ph": "X", "cat": "kernel", "name": "sm90_xmma_fprop", "pid": 0, "tid": 7, "ts": 10, "dur": 30},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 7, "ts": 40, "dur": 5},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    told = profile.breakdown(profile.read(path))
    assert told.classes["convolution"] == pytest.approx(0.03) and told.classes["copy"] == pytest.approx(0.005)
    assert told.busy == pytest.approx(0.035)


def test_time_inside_an_event_is_counted_once():
    def event(name, start, duration, tid=1):
        args = {"hlo_op": name}
        return {"ph": "X", "pid": 1, "tid": tid, "ts": start, "dur": duration, "name": name, "args": args}

    trace = [event("while.1", 0, 100), event("lrn.1", 10, 30), event("sort.1", 50, 20), event("sort.1", 0, 7, tid=2)]
    told = profile.breakdown(trace, profile.instructions(HLO))
    assert told.classes["norm"] == pytest.approx(0.03) and told.classes["other"] == pytest.approx(0.027)
    assert told.busy == pytest.approx(0.057)  # what the loop itself takes is nobody's


def test_a_call_is_profiled_on_this_machine():
    f = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.ones((200, 200))
    compiled = f.lower(x).compile()
    jax.block_until_ready(compiled(x))
    told = model_worker.profile_call(
        lambda: jax.block_until_ready(compiled(x)), profile.instructions(compiled.as_text() or "")
    )
    assert told.busy > 0 and told.classes["convolution"] > 0


# --- rows ---------------------------------------------------------------------------------------------------------------


def test_every_model_has_a_row_and_resnet_two():
    rows = model_rows.select()
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) and {row.model for row in rows} == set(registry.MODELS)
    assert names[:2] == ["resnet50 N256", "resnet50 N32"]
    quick = model_rows.select(quick=True)
    assert {row.model for row in quick} < {row.model for row in rows} and names[0] in [row.name for row in quick]
    small = model_rows.select(small=True)
    assert len(small) == len(registry.MODELS) and all(row.small for row in small)
    assert [row.batch for row in model_rows.select("resnet50", batches=(1, 2))] == [1, 2]
    assert model_rows.select("no such model") == []


def test_what_is_counted_a_second():
    assert ModelRow("resnet50", 32).count == 32 and ModelRow("resnet50", 32).shape == (32, 224, 224, 3)
    dqn = ModelRow("dqn", 32)
    assert (dqn.unit, dqn.count) == ("frames", dqn.shape[0] * 32) and ModelRow("causal_conv", 8).unit == "sequences"
    assert ModelRow("dqn", 32, small=True).count == math.prod(registry.MODELS["dqn"].small.shape[:2])


def test_contenders_are_chosen():
    def chosen(*words, torch=True):
        return models.contenders(models.parser().parse_args(words), torch)

    assert chosen() == ["flax", "torch", "jaxprims", "jaxprims-recompute"]
    assert chosen("--torch-compile") == list(model_rows.CONTENDERS)
    assert chosen("--torch-compile", torch=False) == chosen("--no-torch") == ["flax", "jaxprims", "jaxprims-recompute"]
    assert chosen("--contenders", "jaxprims,torch.compile") == ["torch.compile", "jaxprims"]  # rivals first


# --- report -------------------------------------------------------------------------------------------------------------

ROW, OTHER = ModelRow("resnet50", 256), ModelRow("dqn", 32)


def outcome(row, contender, ms, temp=None, busy=None, **more) -> Outcome:
    shares = dict(zip(profile.CLASSES, (0.5, 0.2, 0.05, 0.15, 0.06, 0.04)))
    classes = {f"{name}_ms": share * busy for name, share in shares.items()} if busy else {}
    figures = {"ms": ms, "temp_mib": temp, "busy_ms": busy, "first_loss": 7.0, "compile_s": 4.0} | classes | more
    return Outcome(row, contender, "gpu", figures)


def made_up() -> list[Outcome]:
    return [
        outcome(ROW, "flax", 40.0, 10000.0, 39.0, compile_s=16.0),
        outcome(ROW, "torch", 50.0, 11000.0, 20.0),
        Outcome(ROW, "torch.compile", "gpu", {}, True, ["RuntimeError: no compiler today"]),
        outcome(ROW, "jaxprims", 25.0, 9000.0, 24.0),
        outcome(ROW, "jaxprims-recompute", 32.0, 7000.0, 31.0),
        outcome(OTHER, "flax", 2.0, 100.0),
        outcome(OTHER, "jaxprims", 2.5, 100.0, 2.0),
    ]


def test_figures_of_a_line():
    outcomes = made_up()
    lines = [model_report.fields(o, outcomes) for o in outcomes]
    ours = lines[3]
    assert tuple(name for name in model_report.FIELDS if name not in report.META) == tuple(ours)
    assert float(ours["per_second"]) == pytest.approx(256 / 0.025) and ours["unit"] == "images"
    assert ours["best_rival"] == "flax" and float(ours["ratio"]) == pytest.approx(40 / 25)
    assert float(ours["temp_ratio"]) == pytest.approx(0.9) and float(ours["compile_ratio"]) == pytest.approx(0.25)
    assert float(ours["convolution_ms"]) == pytest.approx(12.0) and ours["shape"] == "256x224x224x3"
    assert float(lines[1]["ratio"]) == pytest.approx(40 / 50) and float(lines[4]["temp_ratio"]) == pytest.approx(0.7)
    assert lines[2]["ms"] == lines[2]["ratio"] == "" and lines[2]["failed"] == 1 and "no compiler" in lines[2]["notes"]
    assert float(lines[6]["per_second"]) == pytest.approx(OTHER.count / 0.0025) and lines[6]["unit"] == "frames"
    alone = outcome(ROW, "jaxprims", 1.0)
    assert model_report.fields(alone, [alone])["ratio"] == ""


def test_steps_that_wait_for_the_host_are_named():
    assert [text.split(":")[0] for text in model_report.gaps(made_up())] == ["resnet50 N256 torch"]


def test_a_first_loss_that_is_not_flaxs_fails_the_line():
    outcomes = made_up()
    for loss, failed in ((7.05, False), (7.5, True), (math.nan, True)):
        ours = outcome(ROW, "jaxprims", 25.0, first_loss=loss)
        model_report.check_loss(ours, [outcomes[0], ours])
        assert ours.failed == failed and bool(ours.notes) == failed
    rival = outcome(ROW, "torch", 25.0, first_loss=9.0)  # other initial values
    model_report.check_loss(rival, [outcomes[0], rival])
    assert not rival.failed


def test_the_table_and_the_lines_say_it_all():
    from rich.console import Console

    console = Console(width=250)
    with console.capture() as captured:
        console.print(model_report.table(made_up()))
    text = captured.get()
    assert "FAILED" in text and "1.60" in text and "9000 (0.90)" in text and "4.0 (0.25)" in text and "0.80" in text
    said = [model_report.line(o, made_up()) for o in made_up()]
    assert "1.60x flax" in said[3] and "no compiler today" in said[2] and "10240 images/s" in said[3]


def test_the_picture_shows_bars_and_classes(tmp_path):
    from matplotlib import colors, image

    path = tmp_path / "a.png"
    picture.models(path, made_up(), MACHINE)
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    seen = {tuple(p) for p in pixels}
    counts = {c: 0 for c in [picture.OURS, picture.RIVAL, picture.OTHER_OURS, *picture.CLASS_COLOURS.values()]}
    assert len(counts) == 3 + len(profile.CLASSES)  # all different
    for colour in counts:
        rgb = tuple(round(255 * v) for v in colors.to_rgb(colour))
        assert rgb in seen, colour
        counts[colour] = int((pixels == rgb).all(1).sum())
    assert counts[picture.RIVAL] > 2 * counts[picture.OTHER_OURS] > 0  # 40 + 50 + 2 ms and 32 ms, legend and axes aside
    assert counts[picture.CLASS_COLOURS["convolution"]] > 2 * counts[picture.CLASS_COLOURS["pool"]]


# --- processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes():
    return models.context()


def tells(pipe, log):
    pipe.send({"stage": "one"})
    pipe.send({"figures": {"ms": 1.0}})
    pipe.send({"note": "a note"})
    pipe.send({"figures": {"loss": 2.0}, "gpu": False})
    pipe.send({"done": True})


def crashes(pipe, log):
    model_worker.prepare(True, log)
    pipe.send({"figures": {"compile_s": 3.0}})
    pipe.send({"stage": "timing"})
    os.write(2, b"CHECK failed: something in C++\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(pipe, log):
    pipe.send({"stage": "compiling"})
    time.sleep(60)


def test_what_a_child_tells_is_gathered(processes):
    stages = []
    told = models.in_child(processes, tells, lambda log: (log,), 60, stages.append)
    assert told.figures == {"ms": 1.0, "loss": 2.0} and told.notes == ["a note"] and not told.failed
    assert stages == ["one"] and told.values["gpu"] is False


def test_a_child_that_crashes_costs_its_line_alone_and_says_why(processes):
    told = models.in_child(processes, crashes, lambda log: (log,), 60)
    assert told.failed and told.figures == {"compile_s": 3.0}
    (note,) = told.notes
    assert "SIGSEGV" in note and "timing" in note and "CHECK failed: something in C++" in note


def test_a_child_that_hangs_is_ended(processes):
    begin = time.monotonic()
    told = models.in_child(processes, hangs, lambda log: (log,), 3)
    assert told.failed and time.monotonic() - begin < 30
    assert "took longer than 3 s" in told.notes[0]


def options(*words):
    given = models.parser().parse_args(words)
    given.samples, given.sample_seconds = 2, 1e-3
    return given


def test_a_model_that_fails_is_a_line(processes, tmp_path):
    row = ModelRow("dqn", -1)  # no such shape
    failed = models.measure(processes, row, "jaxprims", options(), on_gpu=False)
    assert failed.failed and failed.ms is None and "Error" in failed.notes[0]
    with report.Lines(tmp_path / "a.csv", model_report.FIELDS, MACHINE) as out:
        out.write_line(model_report.fields(failed, [failed]))
        (line,) = csv.DictReader((tmp_path / "a.csv").open())  # already there
    assert line["failed"] == "1" and line["ms"] == "" and line["notes"] == failed.notes[0]


# --- command line -------------------------------------------------------------------------------------------------------


def bench(tmp_path, *words):
    code = run.main(
        ["models", *words, "--cpu", "--samples", "2", "--sample-seconds", "0.001", "--output", str(tmp_path / "new")]
    )
    files = sorted((tmp_path / "new").glob("*.csv"))
    assert len(files) == 1
    return code, list(csv.DictReader(files[0].open())), files[0]


def test_training_steps_on_a_cpu(tmp_path, capsys):
    code, lines, path = bench(tmp_path, "--rows", "causal_conv", "--no-torch")
    out = " ".join(capsys.readouterr().out.split())
    assert code == 0, out
    assert [line["contender"] for line in lines] == ["flax", "jaxprims", "jaxprims-recompute"]
    for line in lines:
        for name in ("ms", "per_second", "ratio", "temp_mib", "temp_ratio", "argument_mib", "lower_s", "compile_s",
                     "compile_ratio", "busy_ms", "convolution_ms", "elementwise_ms", "first_loss", "loss"):  # fmt: skip
            assert float(line[name]) > 0, name
        assert sum(float(line[f"{name}_ms"]) for name in profile.CLASSES) == pytest.approx(
            float(line["busy_ms"]), rel=1e-3
        )
        assert line["parameters"] == "472" and line["platform"] == model_report.REFERENCE and line["peak_mib"] == ""
        assert line["jax"] == jax.__version__ and line["best_rival"] == "flax" and line["failed"] == "0"
        assert float(line["per_second"]) == pytest.approx(2 / float(line["ms"]) * 1e3, rel=1e-3)
    assert float(lines[0]["first_loss"]) == pytest.approx(float(lines[1]["first_loss"]), rel=1e-2)
    assert "say nothing of kernels" in out and "jaxprims-recompute" in out
    assert path.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_spent_budget_leaves_lines_that_say_so(tmp_path, capsys):
    code, lines, path = bench(tmp_path, "--rows", "dqn", "--contenders", "jaxprims", "--budget", "-1")
    assert code == 1 and [line["failed"] for line in lines] == ["1"] and "budget" in lines[0]["notes"]
    assert not path.with_suffix(".png").exists() and "1 of jaxprims' lines failed" in capsys.readouterr().out


def test_a_line_that_takes_too_long_is_a_line(tmp_path):
    code, lines, _ = bench(tmp_path, "--rows", "dqn", "--contenders", "flax", "--timeout", "0.01")
    assert code == 1 and "took longer" in lines[0]["notes"] and lines[0]["failed"] == "1"


def test_arguments(tmp_path, capsys, monkeypatch):
    from jaxprims.__main__ import main

    assert main(["bench", "models", "--rows", "resnet50", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["resnet50", "N256", "bf16", "256x224x224x3"]
    assert run.main(["models", "--rows", "nothing-like-it"]) == 2
    for words in (["--contenders", "caffe"], ["--batch", "0"], ["--batch", "many"], ["--dtype", "int3"]):
        with pytest.raises(SystemExit) as info:
            run.main(["models", *words])
        assert info.value.code == 2
    with pytest.raises(SystemExit):
        run.main(["--quick", "models"])
    assert "models comes first" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run.main(["models", "--output", str(tmp_path / "file")]) == 2
    monkeypatch.setattr(models, "NEEDS", {"no_such_module_here": "no-such-package"})
    assert run.main(["models"]) == 2 and "no-such-package" in capsys.readouterr().err


# --- equivalence --------------------------------------------------------------------------------------------------------


def test_a_loss_is_compared_within_the_noise():
    flax, moved = [2.0, 1.0, 0.5], [2.0, 1.001, 0.5]
    lines = equivalence.compare({"flax": flax, "jaxprims": [2.0 + 1e-6, 1.01, 0.51], "moved": moved})
    assert [line["within"] for line in lines] == [1, 1, 0]  # 0.02 is more than 16 x 0.001, kept from the step before
    assert lines[0]["tolerance"] == equivalence.FLOOR and lines[2]["noise"] == pytest.approx(1e-3)
    assert not equivalence.compare({"flax": flax, "jaxprims": [math.nan] * 3, "moved": moved})[0]["within"]


def test_parameters_are_moved_by_a_unit():
    params = {"a": jnp.linspace(0.5, 2.0, 100), "b": jnp.zeros(3)}
    moved = equivalence.moved(params, jax.random.key(0))
    change = jnp.abs(moved["a"] / params["a"] - 1)
    assert 0 < float(change.min()) and float(change.max()) <= 2.5e-7 and not moved["b"].any()


def test_accuracies_are_compared():
    told = {"flax f32": 0.98, "flax bf16": 0.975, "jaxprims f32": 0.985, "jaxprims bf16": 0.96}
    f32, bf16 = equivalence.compare_accuracies(told)
    assert (f32["within"], bf16["within"]) == (1, 0) and bf16["difference"] == pytest.approx(0.02)


def test_training_is_the_same_on_both_kinds_of_layers(tmp_path, capsys):
    code, lines, path = bench(tmp_path, "--equivalence", "--rows", "causal_conv", "--steps", "4", "--epochs", "0")
    assert code == 0, capsys.readouterr().out
    assert path.name.startswith("equivalence-") and len(lines) == 4
    for line in lines:
        assert float(line["difference"]) <= float(line["tolerance"]) < 1e-2 and line["within"] == "1"
        assert (
            float(line["flax"]) == pytest.approx(float(line["jaxprims"]), rel=1e-3) and line["jax"] == jax.__version__
        )
    assert "4 of 4 losses the same" in " ".join(capsys.readouterr().out.split())


def test_the_digits_are_learned():
    pytest.importorskip("sklearn")
    from jaxprims import demo

    assert equivalence.accuracy("jaxprims", jnp.bfloat16, demo.load_data(0), epochs=2) > 0.9
