"""Run the notebooks of this folder, and write their outputs into them:  python notebooks/run.py [01_quickstart ...]

Needs ``pip install 'jaxprims[notebooks]'``. What is specific to a machine (timestamps, kernel names) is not written, so a run
that changes nothing leaves no difference.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TIMEOUT = 600  # seconds for one cell


def execute(path: Path):
    """The notebook as run on this machine, from its first cell to its last; an error in a cell is raised."""
    import nbformat
    from nbclient import NotebookClient

    python_path = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    book = nbformat.read(path, as_version=4)
    NotebookClient(
        book,
        kernel_name="python3",
        timeout=TIMEOUT,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(env={**os.environ, "PYTHONPATH": python_path})
    return book


def write(book, path: Path) -> None:
    """Without what differs from machine to machine."""
    import nbformat

    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(book.cells):
        cell.id = f"cell-{i}"
        cell.metadata = {}
    nbformat.write(book, path)


def main(names: list[str]) -> int:
    """Run those named, or all."""
    chosen = [p for p in NOTEBOOKS if not names or any(name in p.stem for name in names)]
    if not chosen:
        print(f"no notebook named {names}: there are {[p.stem for p in NOTEBOOKS]}", file=sys.stderr)
        return 2
    for path in chosen:
        begin = time.perf_counter()
        write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
