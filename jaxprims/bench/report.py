"""What a run says: the table, the geometric means, the CSV with everything, and one picture."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import math
import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxprims.bench.rows import ConvRow, Item

if TYPE_CHECKING:
    from jaxprims.bench.run import Result, Settings

RIVALS = ("xla", "xla map", "torch", "torch 1d", "torch.compile")
META = ("commit", "gpu", "driver", "jax", "jaxlib", "torch", "cudnn", "date", "method")
FIELDS = (
    "row", "group", "standing", "shape", "dtype", "layout", "direction", "gflop", "gflop_needed", "mbytes",
    "ms", *(f"ms_{name.replace(' ', '_').replace('.', '_')}" for name in RIVALS), "ms_unbatched", "ms_gemm",
    "tflops", "tbytes_s", "share_of_ceiling", "floor_ms", "share_of_roofline", "best_rival", "ratio", "runs_as",
    "workspace", "spread", "sets", "l2", "check", "error_jaxprims", "error_xla", "error_torch", "failed", "notes", "ceiling_tflops", "ceiling_tbytes_s", *META,
)  # fmt: skip


# --- figures of a line ----------------------------------------------------------------------------------------------------


def rate(item: Item, ms: float | None) -> float | None:
    """FLOP/s of dense convolutions, bytes/s of the rest."""
    if not ms:
        return None
    return (item.moved() if item.by_bytes else item.row.flops()) / (ms * 1e-3)


def ceiling(item: Item, ceilings: dict[str, float]) -> float | None:
    return ceilings.get("copy" if item.by_bytes else item.dtype)


def floor_ms(item: Item, ceilings: dict[str, float]) -> float | None:
    """The roofline: the larger of bytes over the copy's rate and FLOPs over the matrix product's (grouped: bytes alone)."""
    times = [item.moved() / ceilings["copy"]] if ceilings.get("copy") else []
    if not item.by_bytes and ceilings.get(item.dtype):
        times.append(item.row.flops() / ceilings[item.dtype])
    return max(times) * 1e3 if times else None


def best_rival(result: Result) -> str | None:
    names = [name for name in RIVALS if name in result.ms]
    return min(names, key=lambda name: result.ms[name]) if names else None


def ratio(result: Result) -> float | None:
    """The best rival's time over ours."""
    best, ours = best_rival(result), result.ms.get("jaxprims")
    return result.ms[best] / ours if best and ours else None


def geometric_mean(values: Iterable[float]) -> float:
    """
    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


# --- the machine ----------------------------------------------------------------------------------------------------------


def _output(*command: str) -> str:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=here, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """The source's commit, "+" behind it where tracked files differ; JAXPRIMS_COMMIT where there is no repository."""
    if given := os.environ.get("JAXPRIMS_COMMIT"):
        return given
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def machine(settings: Settings) -> dict[str, str]:
    """What every line of the CSV says of where it was measured."""
    import jax

    from jaxprims.bench import timing, torch_rival

    device = jax.devices()[0]
    driver = "" if settings.cpu else _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "commit": commit(),
        "gpu": device.device_kind,
        "driver": driver.splitlines()[0] if driver else "",
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        **torch_rival.versions(settings.torch),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "method": timing.METHOD,
    }


def file_stem(suite: str, machine: dict[str, str]) -> str:
    """"conv-nvidia-h200-20261130-1733"."""  # fmt: skip
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    return f"{suite}-{gpu}-{re.sub('[^0-9]', '', machine['date'][:10])}-{machine['date'][11:16].replace(':', '')}"


def ceilings_text(ceilings: dict[str, float]) -> str:
    parts = [f"copy {ceilings['copy'] / 1e12:.3g} TB/s"] if "copy" in ceilings else []
    parts += [f"matrix product {name} {value / 1e12:.3g} TFLOP/s" for name, value in ceilings.items() if name != "copy"]
    return ", ".join(parts) or "none could be measured"


# --- CSV ------------------------------------------------------------------------------------------------------------------


def fields(result: Result, ceilings: dict[str, float]) -> dict[str, Any]:
    """A line of the CSV, without what is said of the machine."""
    item, ms = result.item, result.ms
    row, ours = item.row, result.ms.get("jaxprims")
    top, floor = ceiling(item, ceilings), floor_ms(item, ceilings)
    flops = _over(row.flops(), ours * 1e-3) if ours and row.flops() else None
    line: dict[str, Any] = {
        "row": row.name,
        "group": row.group,
        "standing": int(item.standing),
        "shape": row.shape,
        "dtype": item.dtype,
        "layout": row.layout if isinstance(row, ConvRow) else "NHWC",
        "direction": item.direction,
        "gflop": row.flops() / 1e9,
        "gflop_needed": row.needed_flops() / 1e9,
        "mbytes": item.moved() / 1e6,
        "ms": ours,
        "ms_unbatched": ms.get("unbatched"),
        "ms_gemm": ms.get("gemm"),
        "tflops": _over(flops, 1e12),
        "tbytes_s": _over(item.moved() / 1e9, ours),
        "share_of_ceiling": _over(rate(item, ours), top),
        "floor_ms": floor,
        "share_of_roofline": _over(floor, ours),
        "best_rival": best_rival(result),
        "ratio": ratio(result),
        "runs_as": result.runs_as,
        "workspace": result.workspace,
        "spread": result.spread,
        "sets": result.sets,
        "l2": "cold" if result.cold else "warm",
        "check": result.check,
        **{f"error_{name}": result.errors.get(name) for name in ("jaxprims", "xla", "torch")},
        "failed": int(result.failed),
        "notes": "; ".join(result.notes),
        "ceiling_tflops": _over(ceilings.get(item.dtype), 1e12),
        "ceiling_tbytes_s": _over(ceilings.get("copy"), 1e12),
    }
    line |= {f"ms_{name.replace(' ', '_').replace('.', '_')}": ms.get(name) for name in RIVALS}
    return texts(line)


def texts(line: dict[str, Any]) -> dict[str, Any]:
    """As a CSV has them: floats of six digits, nothing for what is not known."""
    return {k: f"{v:.6g}" if isinstance(v, float) else "" if v is None else v for k, v in line.items()}


class Lines:
    """A CSV that is written line by line, so that a run that is cut short leaves what it had; `META` ends every line."""

    def __init__(self, path: Path, columns: Sequence[str], machine: dict[str, str]):
        self._path, self._columns, self._machine = path, columns, machine

    def __enter__(self) -> Self:
        self._file = self._path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, self._columns)
        self._writer.writeheader()
        return self

    def write_line(self, line: dict[str, Any]) -> None:
        self._writer.writerow(line | {name: self._machine[name] for name in META})
        self._file.flush()

    def __exit__(self, *exc: object) -> None:
        self._file.close()


class Csv(Lines):
    """The lines of convolutions and of ops bound by memory."""

    def __init__(self, path: Path, machine: dict[str, str], ceilings: dict[str, float]):
        super().__init__(path, FIELDS, machine)
        self._ceilings = ceilings

    def write(self, result: Result) -> None:
        self.write_line(fields(result, self._ceilings))


# --- table ----------------------------------------------------------------------------------------------------------------


def _cell(value: float | None, text: str = "{:.3f}") -> str:
    return "-" if value is None else text.format(value)


def table(results: list[Result], ceilings: dict[str, float]) -> Any:
    """The rich table: one line an item, green where ours is ahead, red where it is behind or failed."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (
        ("row", "left"), ("shape", "left"), ("dtype", "left"), ("dir", "left"), ("ms", "right"), ("xla", "right"),
        ("torch", "right"), ("T/s", "right"), ("of ceiling", "right"), ("of roofline", "right"), ("x best rival", "right"),
    ):  # fmt: skip
        out.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    previous = None
    for result in results:
        item, ours = result.item, result.ms.get("jaxprims")
        value = ratio(result)
        speed = rate(item, ours)
        style = (
            "red" if result.failed or value is not None and value < 0.97 else "green" if value and value > 1.03 else ""
        )
        same = previous is not None and previous.item.row.name == item.row.name
        previous = result

        def fastest(*names: str, ms: dict[str, float] = result.ms) -> float | None:
            return min((ms[n] for n in names if n in ms), default=None)

        dtype = item.dtype + (" NCHW" if isinstance(item.row, ConvRow) and item.row.layout == "NCHW" else "")
        out.add_row(
            "" if same else item.row.name,
            "" if same else item.row.shape,
            dtype,
            item.direction,
            "FAILED" if result.failed else _cell(ours) + ("*" if "reference" in result.runs_as else ""),
            _cell(fastest("xla", "xla map")),
            _cell(fastest("torch", "torch 1d", "torch.compile")),
            _cell(_over(speed, 1e12), "{:.2f} B" if item.by_bytes else "{:.1f} F"),
            _cell(_over(speed, ceiling(item, ceilings)), "{:.0%}"),
            _cell(_over(floor_ms(item, ceilings), ours), "{:.0%}"),
            _cell(value, "{:.2f}"),
            style=style,
        )
    return out


def summary(results: list[Result], ceilings: dict[str, float]) -> Any:
    """Geometric means of the ratio to the best rival, per group and dtype, by direction."""
    from rich import box
    from rich.table import Table

    directions = list(dict.fromkeys(r.item.direction for r in results))
    out = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Best rival's time over ours, geometric means",
        caption="* the reference ran. T/s: F FLOP, B bytes. Ceiling: " + ceilings_text(ceilings), title_justify="left",
        caption_justify="left",
    )  # fmt: skip
    for name in ("group", "dtype", *directions, "all", "rows"):
        out.add_column(name, justify="left" if name in ("group", "dtype") else "right", no_wrap=True)

    def line(group: str, dtype: str, some: list[Result]) -> None:
        ratios = [(r.item.direction, ratio(r)) for r in some]
        known = [(d, v) for d, v in ratios if v is not None]
        if known:
            means = [[v for d, v in known if d == direction] for direction in directions]
            cells = [f"{geometric_mean(m):.2f}" if m else "-" for m in means]
            out.add_row(group, dtype, *cells, f"{geometric_mean(v for _, v in known):.2f}", str(len(known)))

    keys = dict.fromkeys((r.item.row.group, r.item.dtype) for r in results)
    for group, dtype in keys:
        line(group, dtype, [r for r in results if (r.item.row.group, r.item.dtype) == (group, dtype)])
    everything = all(r.item.by_bytes for r in results)  # else: dense convolutions
    for dtype in dict.fromkeys(r.item.dtype for r in results):
        some = [r for r in results if r.item.dtype == dtype and (everything or not r.item.by_bytes)]
        line("all" if everything else "all dense", dtype, some)
        line("standing rows", dtype, [r for r in some if r.item.standing])
    return out


def small_batches(results: list[Result]) -> list[str]:
    """Per layer, how much of the best batch size's FLOP/s is left with 16 images."""
    speeds: dict[str, dict[str, float]] = {}
    for result in results:
        row, ours = result.item.row, result.ms.get("jaxprims")
        if isinstance(row, ConvRow) and ours and row.group in ("paper", "paper-n") and row.channels_last:
            key = f"{row.name.split('-')[0]} {result.item.dtype} {result.item.direction}"
            speeds.setdefault(key, {})[f"N{row.n}"] = row.flops() / ours
    return [
        f"{key}: N = 16 at {by['N16'] / max(by.values()):.0%} of the best of {', '.join(by)}"
        for key, by in speeds.items()
        if "N16" in by and len(by) > 1
    ]


# --- picture --------------------------------------------------------------------------------------------------------------


def draw(path: Path, suite: str, results: list[Result], ceilings: dict[str, float], machine: dict[str, str]) -> None:
    """conv: a roofline plot for each dtype. membound: bars of the share of the copy's rate, ours and the best rival's."""
    from jaxprims.bench import picture

    if suite == "conv":
        picture.roofline(path, results, ceilings, machine)
    else:
        picture.bars(path, results, ceilings, machine)
