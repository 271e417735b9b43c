"""The shape of the source: imports run one way, JAX's extension API stays in core, files stay readable."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jaxprims"
MODULES = sorted(PACKAGE.rglob("*.py"))
KERNELS = sorted(p for p in (ROOT / "cuda").rglob("*") if p.suffix in (".cu", ".cuh", ".h"))
FAMILIES = ("conv", "pool", "norm", "act")
LONGEST = 500  # lines; a longer file says "Long: <why>" in its first ten lines

# Each part imports only parts further right (and itself). The package's own __init__ is "jaxprims".
LAYERS = [
    {"__main__"},
    {"bench"},
    {"models", "demo", "doctor"},
    {"linen", "nnx", "cupy"},
    {"flax_ops"},
    {"jaxprims"},
    {*FAMILIES, "explain"},
    {"core"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

EXTENSION = (
    "jax._src", "jax.extend", "jax.ffi", "jax.interpreters", "jax.experimental.custom_partitioning", "jaxlib",
)  # fmt: skip


def part_of(module: Path) -> str:
    first = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "jaxprims" if first == "__init__" else first


def imported(module: Path) -> set[str]:
    """Dotted names that a module imports anywhere, also inside functions: "jaxprims.core.ffi", "jax.numpy"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def wrong_imports(part: str, names: set[str]) -> list[str]:
    """Those of the imported names that a part must not import."""
    wrong = []
    for name in names:
        words = name.split(".")
        if words[0] != "jaxprims":
            continue
        target = words[1] if len(words) > 1 and words[1] in RANK else "jaxprims"
        if target != part and RANK[target] <= RANK[part]:
            wrong.append(name)
    return sorted(wrong)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(ROOT)))
def test_imports_run_one_way(module: Path):
    assert part_of(module) in RANK, f"{module.name} is in no layer: add it to LAYERS"
    assert wrong_imports(part_of(module), imported(module)) == []


def test_the_import_rule_catches_what_it_is_for():
    assert wrong_imports("conv", {"jaxprims.pool.api.max_pool"}) == ["jaxprims.pool.api.max_pool"]
    assert wrong_imports("core", {"jaxprims"}) == ["jaxprims"]
    assert wrong_imports("linen", {"jaxprims.max_pool", "jaxprims.demo.main"}) == ["jaxprims.demo.main"]
    assert wrong_imports("conv", {"jaxprims.core.checks.check_float", "jaxprims.conv.params.x", "jax.numpy"}) == []


def extension_uses(text: str) -> set[str]:
    """Uses of JAX's extension API in a module's code: imports, and attributes such as jax.ffi.ffi_call."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        found |= {name for name in names if any(name == e or name.startswith(f"{e}.") for e in EXTENSION)}
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(ROOT)))
def test_extension_api_is_in_core_alone(module: Path):
    text = module.read_text()
    if part_of(module) != "core":
        assert extension_uses(text) == set()
    code = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    code |= {name.split(".")[-1] for name in imported(module)}
    assert not code & {"custom_vjp", "custom_jvp", "custom_gradient"}


def test_the_extension_rule_catches_what_it_is_for():
    assert extension_uses("import jax\njax.ffi.ffi_call('x')") == {"jax.ffi.ffi_call", "jax.ffi"}
    assert extension_uses("from jax.interpreters import ad") == {"jax.interpreters.ad"}
    assert extension_uses("import jax.numpy as jnp\njnp.zeros(1)") == set()


@pytest.mark.parametrize("path", [*MODULES, *KERNELS], ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= LONGEST or any(re.search(r"Long: \w", line) for line in lines[:10]), f"{len(lines)} lines"


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: str(p.relative_to(ROOT)))
def test_kernel_families_include_only_common_and_themselves(path: Path):
    family = path.parent.name
    for name in re.findall(r'#include "([^"]+)"', path.read_text()):
        folder = name.split("/")[0] if "/" in name else family
        assert folder in ("common", family, "xla"), f'{path.name} includes "{name}"'


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: str(p.relative_to(ROOT)))
def test_kernel_files_open_with_a_comment(path: Path):
    assert path.read_text().startswith("//"), "the head comment says what the file computes and how"


def sources() -> list[Path]:
    folders = ("jaxprims", "cuda", "tests", "benchmarks", "notebooks", ".ci")
    files = [p for f in folders if (ROOT / f).is_dir() for p in (ROOT / f).rglob("*") if p.is_file()]
    files += [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml")]
    return [p for p in files if p.suffix not in (".so", ".pyc", ".png") and "__pycache__" not in p.parts]


@pytest.mark.parametrize("folder", ["..", "/home", "/root", "/work"])
def test_nothing_reads_outside_the_tree(folder: str):
    pattern = re.compile(rf"""(?<![\w./]){re.escape(folder)}/\w""")
    hits = [
        f"{p.relative_to(ROOT)}:{i}: {line.strip()}"
        for p in sources()
        if p != Path(__file__)
        for i, line in enumerate(p.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []


def test_importing_touches_no_device():
    import subprocess
    import sys

    code = "import jaxprims, jax._src.xla_bridge as b; assert not b._backends, b._backends; print('untouched')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "untouched\n", done.stderr
