"""Documents that cannot rot: their Python blocks run, the paths they name exist, every public docstring's example holds."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxprims

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cuda/README.md"]
SKIPPED = "<!-- not run: "  # on the line before a block, with the reason


def blocks(document: str) -> list[tuple[int, str]]:
    """(line, code) of the ```python blocks that are to run."""
    found, lines = [], (ROOT / document).read_text().splitlines()
    for start, line in enumerate(lines):
        if line.strip() == "```python" and not (start and lines[start - 1].startswith(SKIPPED)):
            end = lines.index("```", start)
            found.append((start + 1, "\n".join(lines[start + 1 : end])))
    return found


BLOCKS = [(document, line, code) for document in DOCUMENTS for line, code in blocks(document)]


@pytest.mark.parametrize("document, line, code", BLOCKS, ids=[f"{d}:{n}" for d, n, _ in BLOCKS])
def test_block_runs(document: str, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * line + code, str(ROOT / document), "exec"), {"__name__": "__block__"})


def test_the_readme_has_blocks_to_run():
    assert len(blocks("README.md")) >= 3


def squeezed(code: str) -> str:
    """Without whitespace, and without the commas that a formatter adds before a closing bracket."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", code))


def quotes() -> list[tuple[str, str, str]]:
    """(document, file, piece) of every block that says it is from a file; "..." parts its pieces."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for file, code in re.findall(r"<!-- from (\S+) -->\n```\w+\n(.*?)^```$", text, flags=re.S | re.M):
            found += [(document, file, piece) for piece in re.split(r"^\.\.\.$", code, flags=re.M)]
    return found


@pytest.mark.parametrize("document, file, piece", quotes(), ids=[f"{d}-{f}" for d, f, _ in quotes()])
def test_quoted_code_is_the_code(document: str, file: str, piece: str):
    assert squeezed(piece) in squeezed((ROOT / file).read_text()), (
        f"{document} quotes what {file} does not say:\n{piece}"
    )


def test_contributing_quotes_code():
    assert len(quotes()) >= 5 and squeezed("f(a,\n b,\n)") == "f(a,b)"


def named_paths(text: str) -> set[str]:
    """Paths in `backticks` and in links: things with a slash or a known suffix, without spaces or placeholders."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    spans += re.findall(r"\]\(([^)#\s]+)\)", text)
    top = {p.name for p in ROOT.iterdir()}
    names = {s.rstrip("/") for s in spans if re.fullmatch(r"[\w./-]+", s)}
    return {
        n for n in names
        if ("/" in n and n.split("/")[0] in top) or re.search(r"\w\.(py|cu|cuh|h|md|toml|txt|csv|png)$", n)
    }  # fmt: skip


BUILT = {"jaxprims/_cuda.so", "jaxprims_demo.png"}  # made by a command that the document gives


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str):
    folder = (ROOT / document).parent
    names = named_paths((ROOT / document).read_text()) - BUILT
    bare = {p.name for top in ("jaxprims", "cuda", "tests") for p in (ROOT / top).rglob("*")}  # "a family's params.h"
    assert [n for n in sorted(names) if not ((ROOT / n).exists() or (folder / n).exists() or n in bare)] == []


def test_named_paths_are_found():
    assert named_paths("see `jaxprims/core/ffi.py`, `x/y`, [this](cuda/README.md)") == {
        "jaxprims/core/ffi.py", "cuda/README.md",
    }  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_functions_exist(document: str):
    text = (ROOT / document).read_text()
    for name in set(re.findall(r"\bjaxprims\.((?:[a-zA-Z_]\w*)(?:\.[a-zA-Z_]\w*)*)", text)):
        value = jaxprims
        for i, word in enumerate(name.split(".")):
            if not hasattr(value, word):
                module = "jaxprims." + ".".join(name.split(".")[: i + 1])
                if module == "jaxprims.cupy":  # which imports with CuPy alone: its names are tested in test_cupy.py
                    assert importlib.util.find_spec(module)
                    break
                value = importlib.import_module(module)
            else:
                value = getattr(value, word)


def test_make_targets_named_in_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / document).read_text(), flags=re.M))
        assert named <= targets, f"{document} names {sorted(named - targets)}"


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages(jaxprims.__path__, "jaxprims.")]
    without = {"jaxprims.__main__", "jaxprims._cuda", "jaxprims.cupy"}
    if importlib.util.find_spec("torch") is None:
        without.add("jaxprims.bench.torch_models")
    return sorted(name for name in found if name not in without)


@pytest.mark.parametrize("name", ["jaxprims", *modules()])
def test_docstring_examples(name: str):
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name], optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"


def public_functions() -> list[str]:
    return sorted(
        n for n in dir(jaxprims)
        if not n.startswith("_") and n != "status"  # what it returns depends on the machine
        and inspect.isfunction(inspect.unwrap(getattr(jaxprims, n)))
    )  # fmt: skip


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_have_an_example(name: str):
    doc = inspect.getdoc(getattr(jaxprims, name)) or ""
    assert ">>>" in doc, f"jaxprims.{name} has no runnable example"


def test_the_command_line_names_its_commands():
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxprims", "--help"], capture_output=True, text=True, cwd=ROOT, env=env
    )
    assert done.returncode == 0 and all(word in done.stdout for word in ("doctor", "demo", "explain")), done.stderr


def test_the_version_is_said_once():
    import tomllib

    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    assert jax.__version__ >= "0.10"
