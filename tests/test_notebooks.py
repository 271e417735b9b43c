"""The notebooks: outputs that are fit to be read, and, where the extra `notebooks` is installed, a run from start to end.

With JAXPRIMS_REQUIRE_NOTEBOOKS=1 (as CI has it in the stage of this name) a missing package is an error and not a skip.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = ("nbclient", "ipykernel", "flax", "optax", "sklearn", "matplotlib")
LARGEST = 2_000_000  # bytes, of the whole folder
MACHINE = re.compile(r"""(?<![\w./])/(?:home|root|work|tmp|mnt|opt|Users|usr|var|private)/\w""")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def code_cells(book: Any) -> list[Any]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def texts(cell: Any) -> list[str]:
    """What a cell put out as text: streams, errors, and every text of a result."""
    found = []
    for output in cell["outputs"]:
        found += output.get("traceback", [])
        parts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
        found += ["".join(part) for part in parts]
    return found


def faults(book: Any) -> list[str]:
    """What must not be in a notebook's outputs."""
    found = []
    for i, cell in enumerate(code_cells(book), 1):
        for output in cell["outputs"]:
            kind = output["output_type"]
            if kind == "error":
                found.append(f"cell {i}: {output['ename']}")
            if kind == "stream" and output["name"] == "stderr":
                found.append(f"cell {i}: a warning or a log: {''.join(output['text'])[:200]}")
            found += [
                f"cell {i}: {mime}" for mime in output.get("data", {}) if "widget" in mime or "javascript" in mime
            ]
        for text in texts(cell):
            if MACHINE.search(text):
                found.append(f"cell {i}: a path of one machine: {MACHINE.search(text)[0]}... in {text[:200]!r}")  # type: ignore[index]
            if "\r" in text or "\x1b" in text or "█" in text:
                found.append(f"cell {i}: a progress bar or colours: {text[:200]!r}")
    return found


def test_all_are_there():
    assert [p.stem[:2] for p in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in NOTEBOOKS if f"notebooks/{p.name}" not in readme] == []


@each
def test_outputs_are_of_one_run_from_start_to_end(path: Path):
    book = read(path)
    counts = [cell["execution_count"] for cell in code_cells(book)]
    assert counts == list(range(1, len(counts) + 1))
    assert any(cell["outputs"] for cell in code_cells(book))
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["metadata"] == {} for cell in book["cells"])


@each
def test_outputs_are_fit_to_be_read(path: Path):
    assert faults(read(path)) == []


def test_faults_are_found():
    def book(**output):
        return {"cells": [{"cell_type": "code", "outputs": [output]}]}

    def stream(text, name="stdout"):
        return faults(book(output_type="stream", name=name, text=[text]))

    assert stream("fine\n") == [] and stream("in cuda/conv/sm90.cuh, a/b, //x\n") == []
    assert stream("careful\n", "stderr") and stream("50 %\r") and stream("\x1b[31m") and stream('File "/tmp/x.py"')
    assert faults(book(output_type="error", ename="ValueError", evalue="", traceback=[]))
    assert faults(book(output_type="display_data", data={"application/vnd.jupyter.widget-view+json": {}}))


def test_the_folder_stays_small():
    assert sum(p.stat().st_size for p in NOTEBOOKS) < LARGEST


def test_the_speed_notebook_takes_a_file_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    (tmp_path / "pyproject.toml").touch()
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    head = (
        "row,dtype,contender,platform,ms,per_second,ratio,temp_mib,peak_mib,compile_s,busy_ms,norm_ms,other_ms,failed"
    )
    lines = [
        "net,bf16,flax,gpu,4,1000,,100,200,3,4,2,2,0",
        "net,bf16,jaxprims,gpu,2,2000,2,50,150,1,2,1,1,0",
        "net,bf16,jaxprims-recompute,gpu,,,,,,,,,,1",
    ]
    for name, date in (("models-a.csv", "2026-01-02"), ("models-b.csv", "2026-01-01")):  # the newer by what it says
        text = [f"{head},commit,gpu,jax,torch,date", *(f"{line},{name},G,1,,{date}" for line in lines)]
        (folder / name).write_text("\n".join(text) + "\n")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in code_cells(read(NOTEBOOKS[4])):
        exec("".join(cell["source"]), names)
    drawn = [axis for number in plt.get_fignums() for axis in plt.figure(number).axes]
    plt.close("all")
    out = capsys.readouterr().out
    assert "models-a.csv: G" in out and "models-b.csv" not in out and "conv: no file yet" in out
    assert re.search(r"net bf16 +flax +4.00", out) and re.search(r"jaxprims +2.00 +2000 +50 +150 +1.0 +2.00", out)
    assert re.search(r"jaxprims-recompute +FAILED", out)
    assert len(drawn) == 2 and [bar.get_width() for bar in drawn[0].patches] == [1.0, 2.0]


@each
def test_runs_from_start_to_end(path: Path, monkeypatch: pytest.MonkeyPatch):
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing and os.environ.get("JAXPRIMS_REQUIRE_NOTEBOOKS") != "1":
        pytest.skip(f"{', '.join(missing)}: pip install 'jaxprims[notebooks]'; CI has a stage that does")
    assert not missing
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the tests' eight devices
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    run = importlib.import_module("run")
    try:
        book = run.execute(path)
    finally:
        sys.modules.pop("run", None)
    assert faults(book) == []
