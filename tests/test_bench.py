"""The benchmark: its rows are right, its counts are those of a pencil, its report says what was measured, its failures show."""

from __future__ import annotations

import csv
import json
import math

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import jax
import jax.numpy as jnp

from jaxprims.bench import compile_time, exact, programs, report, rivals, rows, run, timing
from jaxprims.bench.rows import ConvRow, Item, MemRow

CONV_ROWS = [row for row in rows.CONV if isinstance(row, ConvRow)]
ALL_ROWS = {row.name: row for suite in rows.SUITES.values() for row in suite}
MACHINE = dict.fromkeys(report.META, "x") | {"gpu": "Test GPU", "date": "2026-11-30T17:33:00+00:00"}
CEILINGS = {"copy": 4e12, "bf16": 800e12, "f32": 50e12}


@pytest.fixture
def platforms():
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    yield
    jax.config.update("jax_platforms", before)


# --- rows ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", rows.SUITES)
def test_names_are_unique_and_the_quick_choice_is_small(suite):
    names = [row.name for row in rows.SUITES[suite]]
    assert len(names) == len(set(names))
    everything, quick = rows.select(suite), rows.select(suite, quick=True)
    assert 10 <= len(quick) <= 40 < len(everything)
    assert len({item.id for item in everything}) == len(everything)


@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_row_is_what_the_op_takes_and_gives(name):
    row = ALL_ROWS[name]
    for direction in row.directions:
        item = Item(row, row.dtypes[0], direction)
        (program,) = {"xla": rivals.xla(item)["xla"]}.values()
        specs = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in programs.operands(item)]
        if program.prepare is None:
            out = jax.eval_shape(program.fn, *specs)
        else:
            out = jax.eval_shape(lambda *a, p=program: p.fn(*p.prepare(*a)), *specs)
        leaves = [leaf.shape for leaf in jax.tree.leaves(out)]
        if isinstance(row, ConvRow):
            want = {"fwd": row.y_shape(), "dgrad": row.x_shape(), "wgrad": row.w_shape()}[direction]
            assert leaves == [want]
        else:
            assert leaves[0] == (row.dims if direction == "bwd" else row.y_shape())
            assert direction == "fwd" or row.dims in leaves
        tiny = item.row.tiny()
        assert tiny.name == row.name and max(s.shape and math.prod(s.shape) for s in programs.operands(Item(tiny, item.dtype, direction))) < 5000  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "paper1 N128 C3 128^2 K96 11^2",
        "paper5-n16 N16 C384 13^2 K384 3^2",
        "rn50-stem N256 C3 224^2 K64 7^2 s2 p3",
        "rn50-l2d N256 C256 56^2 K512 1^2 s2",
        "rn50-l4b N256 C512 7^2 K512 3^2 p1",
        "dw-mobile3s2 N256 C144 56^2 K144 3^2 s2 p1 g144",
        "dilated N32 C256 56^2 K256 3^2 p4 d4",
        "c3d-in N8 C1 64^3 K32 3^3 p1",
        "dw1d-mamba N8 C4096 2048^1 K4096 4^1 p3 g4096",
        "transposed5s2 N64 C128 32^2 K64 5^2 s2 p2 transposed",
        "b-ensemble 10 x (N256 C3 32^2 K64 3^2 p1)",
    ],
)
def test_shapes_are_printed_as_in_the_tables(text):
    name, shape = text.split(" ", 1)
    assert ALL_ROWS[name].shape == shape


def test_flops_and_bytes_by_hand():
    one = ConvRow("x", 1, 1, (3, 3), 1, (3, 3), pad=1)
    assert one.out == (3, 3)
    assert one.flops() == 2 * 9 * 9
    assert one.needed_flops() == 2 * 7 * 7  # along an axis 2 + 3 + 2 of the 9 products are inside
    assert one.bytes("bf16") == 2 * (9 + 9 + 9)
    up = ConvRow("x", 1, 2, (2,), 3, (3,), stride=2, transposed=True)
    assert up.out == (6,)  # 1 * 2 + 2 + 1, and an output padding of 1
    assert up.flops() == up.needed_flops() == 2 * 2 * 3 * 2 * 3  # every input meets every tap
    cropped = ConvRow("x", 1, 1, (2,), 1, (3,), stride=2, pad=1, transposed=True)
    assert cropped.out == (4,) and cropped.needed_flops() == 2 * (6 - 1)  # one product falls off the low end
    assert ALL_ROWS["paper2"].flops() == pytest.approx(532.7e9, rel=1e-4)
    assert ALL_ROWS["paper5"].flops() == pytest.approx(41.1e9, rel=1e-3)
    strided = ConvRow("x", 2, 4, (5,), 8, (3,), stride=2, groups=2)
    assert strided.flops() == 2 * 2 * 2 * 8 * 4 * 3 // 2
    many = ConvRow("x", 2, 3, (4,), 5, (1,), batch=7, batch_of="filters")
    assert many.flops() == 7 * 2 * 2 * 4 * 5 * 3
    assert many.bytes("f32") == 7 * 4 * (2 * 4 * 3 + 3 * 5 + 2 * 4 * 5)
    plain = many.unbatched()
    assert plain is not None and plain.flops() == many.flops() and plain.x_shape() == (14, 4, 3)


def test_bytes_of_memory_bound_rows_by_hand():
    def moved(kind, dims, direction, dtype="bf16", **options):
        return MemRow("x", kind, dims, tuple(options.items())).bytes(dtype, direction)

    assert moved("layer_norm", (10, 4), "fwd") == 2 * 40 * 2
    assert moved("layer_norm", (10, 4), "bwd", "f32") == 3 * 40 * 4
    assert moved("layer_norm", (10, 4), "fwd+bwd") == 5 * 40 * 2
    assert moved("rms_norm", (10, 4), "fwd", residual=True) == 4 * 40 * 2  # x, residual; y, their sum
    assert moved("batch_norm", (2, 2, 2, 5), "fwd") == 2 * 40 * 2
    large = (1000, 100, 100, 5)
    n = math.prod(large) * 2
    assert (
        n > rows.ON_CHIP and moved("batch_norm", large, "fwd") == 3 * n and moved("batch_norm", large, "bwd") == 5 * n
    )
    pool = dict(window=3, stride=2, pad=1)
    assert moved("max_pool", (1, 4, 4, 1), "fwd", **pool) == 2 * (16 + 4)
    assert moved("max_pool", (1, 4, 4, 1), "bwd", **pool) == 2 * (16 + 4) + 4  # a byte an output: the index
    assert moved("avg_pool", (1, 4, 4, 1), "bwd", **pool) == 2 * (16 + 4)
    assert moved("global_avg_pool", (2, 4, 4, 3), "fwd") == 2 * (96 + 6)


def test_choosing_rows():
    ids = {item.id for item in rows.select("conv", rows="rn50-stem,batched", directions=("wgrad",))}
    assert {"rn50-stem bf16 wgrad", "b-sample-dw bf16 wgrad", "b-dqn1 bf16 wgrad"} <= ids and len(ids) == 6
    assert all(item.dtype == "f32" for item in rows.select("membound", dtypes=("f32",)))
    assert {item.direction for item in rows.select("membound", directions=("bwd",))} == {"bwd", "dgrad", "wgrad"}
    assert rows.select("conv", rows="no such row") == []
    halves = rows.select("conv", rows="paper1-n16,c3d-in", dtypes=("f16",))
    assert [item.id for item in halves] == [f"paper1-n16 f16 {d}" for d in rows.CONV_DIRECTIONS]


# --- timing -------------------------------------------------------------------------------------------------------------


def test_operand_sets_defeat_the_cache():
    assert timing.set_count(10**9, 60e6, cpu=False) == 2
    for moved in (3_000_000, 10_000_000, 50_000_000):
        sets = timing.set_count(moved, 60e6, cpu=False)
        assert sets * moved >= 180e6 and (sets <= timing.UNROLL or sets % timing.UNROLL == 0)
    assert timing.set_count(1, 60e6, cpu=False) == timing.MOST_SETS


@pytest.mark.parametrize(
    "row",
    [
        ConvRow("x", 2, 6, (7, 6), 12, (3, 2), stride=2, pad=1, dilation=2, groups=3),
        ConvRow("x", 2, 3, (5, 4, 3), 10, (2, 2, 2), pad=1, layout="NCHW"),
        ConvRow("x", 3, 4, (6,), 5, (3,), batch=2, batch_of="filters"),
    ],
    ids=lambda row: row.shape,
)
@pytest.mark.parametrize("direction", rows.CONV_DIRECTIONS)
def test_a_block_in_float64_is_what_xla_computes(row, direction):
    item = Item(row, "f32", direction)
    (args,) = timing.random_sets(programs.operands(item), 1, seed=1)
    out = rivals.xla(item)["xla"].fn(*args)
    block = exact.Block(row, direction, args)
    assert block.of(out).shape == block.want.shape and block.want.size >= 20
    assert 0 < block.error(out) < 1e-6
    assert block.error(1.001 * out) == pytest.approx(1e-3, rel=1e-2)


def test_operands_are_random_and_different():
    specs = [
        programs.Spec((64, 50), "float32"),
        programs.Spec((4000,), "bfloat16"),
        programs.Spec((4000,), "float32", True),
    ]
    (x, y, z), (x2, _, _) = timing.random_sets(specs, 2, seed=3)
    assert (x.shape, y.dtype) == ((64, 50), jnp.bfloat16)
    assert abs(float(x.mean())) < 0.1 and 0.9 < float(x.std()) < 1.1 and abs(float((x * x2).mean())) < 0.1
    assert float(z.min()) >= 0.5 and float(z.max()) <= 1.5


def test_an_unrolled_program_calls_once_for_each_set():
    many = timing.unrolled(lambda a, b: a @ b)
    sets = [(jnp.full((2, 2), float(i)), jnp.eye(2)) for i in range(3)]
    outs = jax.jit(many)(sets)
    assert [float(out[0, 0]) for out in outs] == [0.0, 1.0, 2.0]
    text = jax.jit(many).lower(sets).as_text()
    assert text.count("dot_general") == 3 and text.count("optimization_barrier") == 2
    same = jax.jit(many).lower([sets[0], sets[0]]).compile().as_text()  # equal operands are not merged either
    assert same.count("dot(") + same.count("custom-call(") + same.count("kind=kOutput") >= 2 or same.count("dot.") >= 2


def test_a_difference_is_relative_and_shapes_count():
    a = jnp.array([3.0, 4.0])
    assert timing.difference([a, a], [a, 2 * a]) == pytest.approx(0.5)
    assert math.isnan(timing.difference([a * jnp.nan], [a]))
    with pytest.raises(ValueError, match="shapes"):
        timing.difference([a], [a[:1]])


# --- report -------------------------------------------------------------------------------------------------------------


def made_up() -> list[run.Result]:
    conv = Item(ALL_ROWS["paper2"], "bf16", "fwd")
    norm = Item(ALL_ROWS["ln-32768x4096"], "f32", "bwd")
    return [
        run.Result(conv, {"jaxprims": 1.0, "xla": 2.0, "torch": 1.5}, 0.01, "conv", 0, 4, True, "xla 1.0e-03"),
        run.Result(norm, {"jaxprims": 0.4, "xla": 0.2}, runs_as="layer_norm by reference"),
        run.Result(Item(conv.row, "bf16", "dgrad"), {"xla": 2.0}, failed=True, notes=["jaxprims: ValueError: no"]),
    ]


def test_figures_of_a_line():
    first, second, failed = (report.fields(r, CEILINGS) for r in made_up())
    gflop = ALL_ROWS["paper2"].flops() / 1e9
    assert float(first["tflops"]) == pytest.approx(gflop, rel=1e-5)  # in one millisecond
    assert float(first["share_of_ceiling"]) == pytest.approx(gflop / 800, rel=1e-5)
    assert float(first["floor_ms"]) == pytest.approx(gflop / 800, rel=1e-5) and first["best_rival"] == "torch"
    assert float(first["ratio"]) == 1.5 and first["ms_xla"] == "2" and first["ms_torch"] == "1.5"
    moved = 3 * 32768 * 4096 * 4
    assert float(second["share_of_ceiling"]) == pytest.approx(moved / 0.4e-3 / 4e12, rel=1e-4)
    assert float(second["ratio"]) == 0.5 and second["l2"] == "warm" and second["tflops"] == ""
    assert failed["ms"] == failed["ratio"] == "" and failed["failed"] == 1 and "ValueError" in failed["notes"]


def test_what_is_left_with_few_images():
    rows_ms = {"paper4": 0.08, "paper4-n16": 0.02, "paper4-n64": 0.05}  # 8 : 1 : 4 of the arithmetic
    results = [run.Result(Item(ALL_ROWS[name], "bf16", "fwd"), {"jaxprims": ms}) for name, ms in rows_ms.items()]
    assert report.small_batches(results) == ["paper4 bf16 fwd: N = 16 at 50% of the best of N128, N16, N64"]
    assert report.small_batches(results[:1]) == []


def test_standing_rows_exist():
    assert set(ALL_ROWS) >= rows.STANDING
    items = rows.select("conv", dtypes=("bf16",))
    assert sum(item.standing and not item.by_bytes for item in items) == 3 * (5 + 5 + 13 + 3)
    assert sum(item.standing for item in rows.select("membound") if isinstance(item.row, MemRow)) == 2 * 2 * 14


def test_the_report_is_written_line_by_line(tmp_path):
    path = tmp_path / "a.csv"
    with report.Csv(path, MACHINE, CEILINGS) as out:
        out.write(made_up()[0])
        assert len(path.read_text().splitlines()) == 2  # already there
        for result in made_up()[1:]:
            out.write(result)
    lines = list(csv.DictReader(path.open()))
    assert [line["row"] for line in lines] == ["paper2", "ln-32768x4096", "paper2"]
    assert tuple(lines[0]) == report.FIELDS and {line["gpu"] for line in lines} == {"Test GPU"}


@pytest.mark.parametrize("suite", rows.SUITES)
@pytest.mark.parametrize("ceilings", [CEILINGS, {}], ids=["measured", "none"])
def test_the_picture_is_drawn(suite, ceilings, tmp_path):
    path = tmp_path / "a.png"
    results = [r for r in made_up() if suite == "membound" or isinstance(r.item.row, ConvRow)]
    report.draw(path, suite, results, ceilings, MACHINE)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_marks_what_failed_and_what_the_reference_ran():
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.table(made_up(), CEILINGS))
        console.print(report.summary(made_up(), CEILINGS))
    text = captured.get()
    assert "FAILED" in text and "0.400*" in text and "1.50" in text and "532.7 F" in text
    assert report.file_stem("conv", MACHINE) == "conv-test-gpu-20261130-1733"


# --- command line -------------------------------------------------------------------------------------------------------


def bench(tmp_path, *words: str) -> tuple[int, list[dict[str, str]]]:
    code = run.main([*words, "--cpu", "--quick", "--output", str(tmp_path / "new")])
    files = sorted((tmp_path / "new").glob("*.csv"))
    lines = list(csv.DictReader(files[0].open()))
    assert len(files) == 1 and files[0].with_suffix(".png").is_file() == bool(lines)
    return code, lines


def test_conv_on_a_cpu(tmp_path, platforms, capsys):
    code, lines = bench(tmp_path, "conv", "--rows", "paper5-n16,b-dqn3", "--directions", "fwd,wgrad", "--errors")
    assert code == 0, capsys.readouterr().out
    assert [f"{line['row']} {line['direction']}" for line in lines] == [
        "paper5-n16 fwd", "paper5-n16 wgrad", "b-dqn3 fwd", "b-dqn3 wgrad",
    ]  # fmt: skip
    for line in lines:
        assert float(line["ms"]) > 0 and float(line["ms_xla"]) > 0 and float(line["ratio"]) > 0
        assert line["check"].startswith("xla ") and "by reference" in line["runs_as"] and line["jax"] == jax.__version__
        assert 0 < float(line["error_jaxprims"]) < 1e-2 and 0 < float(line["error_xla"]) < 1e-2
        batched = line["row"].startswith("b-")
        assert bool(line["ms_xla_map"]) == bool(line["ms_unbatched"]) == batched
    assert "Ceilings of this run" in capsys.readouterr().out


def test_membound_on_a_cpu(tmp_path, platforms):
    code, lines = bench(tmp_path, "membound", "--rows", "ln-small,rms-small", "--dtype", "f32")
    assert code == 0
    assert [line["direction"] for line in lines] == ["fwd", "bwd", "fwd+bwd"] * 2
    assert all(float(line["tbytes_s"]) > 0 and line["tflops"] == "" for line in lines)


def test_an_op_that_fails_or_is_wrong_is_reported_and_the_run_goes_on(tmp_path, platforms, monkeypatch, capsys):
    right = programs.ours

    def ours(item):
        if item.direction == "fwd":
            raise ValueError("no kernel today")
        fn = right(item).fn
        return programs.Program((lambda *a: 1.2 * fn(*a)) if item.direction == "dgrad" else fn)

    monkeypatch.setattr(programs, "ours", ours)
    code, lines = bench(tmp_path, "conv", "--rows", "paper5-n16")
    assert code == 1
    assert [line["failed"] for line in lines] == ["1", "1", "0"]
    assert "no kernel today" in lines[0]["notes"] and "differs from xla" in lines[1]["notes"]
    assert [bool(line["ms"]) for line in lines] == [False, False, True]
    assert "2 of 3 failed" in " ".join(capsys.readouterr().out.split())


def test_a_rival_that_fails_is_a_note(tmp_path, platforms, monkeypatch):
    def broken(item):
        raise_ = programs.Program(lambda *_: json.loads("{"))
        return {"xla": raise_, "xla map": rivals_xla(item)["xla"]}

    rivals_xla = rivals.xla
    monkeypatch.setattr(rivals, "xla", broken)
    code, (line,) = bench(tmp_path, "conv", "--rows", "paper5-n16", "--directions", "fwd")
    assert code == 0 and line["ms_xla"] == "" and line["best_rival"] == "xla map" and "JSONDecodeError" in line["notes"]


def test_a_lost_gpu_ends_the_run_but_not_the_report(tmp_path, platforms, monkeypatch, capsys):
    def lost(item, settings):
        raise run.ContextLost("the GPU answers no more after it")

    monkeypatch.setattr(run, "run_item", lost)
    code, lines = bench(tmp_path, "conv", "--rows", "paper5-n16", "--directions", "fwd")
    assert code == 1 and lines == [] and "answers no more" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(tmp_path, monkeypatch, capsys):
    from jaxprims.core import ffi

    monkeypatch.setattr(ffi, "gpu_present", lambda: False)
    assert run.main(["conv", "--output", str(tmp_path / "new")]) == 2
    err = capsys.readouterr().err
    assert "No NVIDIA GPU" in err and "--cpu --quick" in err and not (tmp_path / "new").exists()


def test_arguments(capsys, monkeypatch):
    from jaxprims.__main__ import main

    assert main(["bench", "conv", "--rows", "paper1", "--dtype", "bf16", "--list"]) == 0
    assert "paper1 bf16 wgrad" in capsys.readouterr().out
    assert run.main(["conv", "--rows", "nothing-like-it"]) == 2
    for words in (["conv", "--dtype", "int3"], ["conv", "--directions", "sideways"], ["fft"]):
        with pytest.raises(SystemExit) as info:
            run.main(words)
        assert info.value.code == 2
    import sys

    monkeypatch.setitem(sys.modules, "rich", None)
    assert run.main(["conv"]) == 2
    assert "pip install 'jaxprims[bench]'" in capsys.readouterr().err


def test_compile_times(tmp_path, capsys):
    """The 53 convolutions are those of the model; both contenders are timed, each in a process of its own."""
    convolutions = compile_time.resnet50()
    gflop = sum(2 * (h // stride) ** 2 * c * k * r * r for h, c, k, r, stride in convolutions) / 1e9
    assert len(convolutions) == 53 and 8.1 < gflop < 8.2  # 4.09 G multiplications and additions, as published, doubled
    assert run.main(["compile", "--cpu", "--batch", "1", "--size", "32", "--output", str(tmp_path)]) == 0
    assert "of XLA's time" in capsys.readouterr().out
    (file,) = tmp_path.glob("compile-*.csv")
    lines = list(csv.DictReader(file.open()))
    assert [line["contender"] for line in lines] == ["xla", "jaxprims"] and all(
        float(line["compile_s"]) > 0 for line in lines
    )
