"""What the models' benchmark says: a line of the CSV for each model and contender, the table, the picture's data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxprims.bench.model_rows import CONTENDERS, RIVALS, ModelRow
from jaxprims.bench.profile import CLASSES
from jaxprims.bench.report import META, texts

FIELDS = (
    "row", "model", "batch", "shape", "dtype", "contender", "platform", "ms", "spread", "per_second", "unit", "best_rival",
    "ratio", "temp_mib", "temp_ratio", "argument_mib", "peak_mib", "lower_s", "compile_s", "compile_ratio", "busy_ms",
    *(f"{name}_ms" for name in CLASSES), "parameters", "first_loss", "loss", "runs_as", "top", "failed", "notes", *META,
)  # fmt: skip
REFERENCE = "cpu, reference"  # the platform of figures that say nothing of kernels
LOSS_TOLERANCE = {"bf16": 3e-2, "f16": 1e-2, "f32": 1e-3}  # of the first step's loss, against Flax's


@dataclass
class Outcome:
    """One line: a row, who ran it, and what became of it. `figures` by the names in `FIELDS`."""

    row: ModelRow
    contender: str
    platform: str = REFERENCE
    figures: dict[str, Any] = field(default_factory=dict)
    failed: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def ms(self) -> float | None:
        return None if self.failed else self.figures.get("ms")

    @property
    def per_second(self) -> float | None:
        return self.row.count / (self.ms * 1e-3) if self.ms else None

    @property
    def title(self) -> str:
        return f"{self.row.name} {self.contender}"


def of_row(outcomes: list[Outcome], row: ModelRow) -> dict[str, Outcome]:
    """By contender, in their order."""
    known = {o.contender: o for o in outcomes if o.row == row}
    return {name: known[name] for name in CONTENDERS if name in known}


def best_rival(outcomes: list[Outcome], row: ModelRow) -> Outcome | None:
    """The fastest rival of a row."""
    rivals = [o for name, o in of_row(outcomes, row).items() if name in RIVALS and o.ms]
    return min(rivals, key=lambda o: o.ms or 0.0, default=None)


def ratio(outcome: Outcome, other: Outcome | None, name: str = "ms") -> float | None:
    """The other's figure over this one's: above 1 where this one needs less."""
    if outcome.failed or other is None or other.failed:
        return None
    mine, theirs = outcome.figures.get(name), other.figures.get(name)
    return theirs / mine if mine and theirs else None


def check_loss(outcome: Outcome, outcomes: list[Outcome]) -> None:
    """Notes, and fails, one of ours whose first loss is not Flax's: the same parameters and data have gone in."""
    flax = of_row(outcomes, outcome.row).get("flax")
    if not outcome.contender.startswith("jaxprims") or flax is None or outcome is flax:
        return
    mine, theirs = outcome.figures.get("first_loss"), flax.figures.get("first_loss")
    if mine is None or theirs is None:
        return
    if not abs(mine - theirs) <= LOSS_TOLERANCE[outcome.row.dtype] * max(abs(theirs), 1e-3):
        outcome.failed = True
        outcome.notes.append(f"the first step's loss is {mine:.6g}, Flax's {theirs:.6g}")


def fields(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, Any]:
    """A line of the CSV, without what is said of the machine."""
    row, best = outcome.row, best_rival(outcomes, outcome.row)
    flax = of_row(outcomes, row).get("flax")
    line = {name: None for name in FIELDS if name not in META} | {
        k: v for k, v in outcome.figures.items() if k in FIELDS
    }
    line |= {
        "row": row.name,
        "model": row.model,
        "batch": row.shape[0] if row.small else row.batch,
        "shape": "x".join(map(str, row.shape)),
        "dtype": row.dtype,
        "contender": outcome.contender,
        "platform": outcome.platform,
        "ms": outcome.ms,
        "per_second": outcome.per_second,
        "unit": row.unit,
        "best_rival": best.contender if best else None,
        "ratio": ratio(outcome, best),
        "temp_ratio": ratio(flax, outcome, "temp_mib") if flax else None,
        "compile_ratio": ratio(flax, outcome, "compile_s") if flax else None,
        "failed": int(outcome.failed),
        "notes": "; ".join(outcome.notes),
    }
    return texts(line)


def _cell(value: Any, text: str) -> str:
    return "-" if value is None else text.format(value)


def _mib(value: float | None, unit: str = "") -> str:
    return "-" if value is None else (f"{value:.0f}" if value >= 100 else f"{value:.3g}") + unit


def line(outcome: Outcome, outcomes: list[Outcome]) -> str:
    """One outcome on one line, said as soon as it is there."""
    if outcome.ms is None:
        return f"{outcome.title:34} {'; '.join(outcome.notes) or 'no figure'}"
    f, best = outcome.figures, best_rival(outcomes, outcome.row)
    value = None if outcome.contender in RIVALS else ratio(outcome, best)
    parts = [
        f"{outcome.ms:9.3f} ms",
        f"{outcome.per_second:10.0f} {outcome.row.unit}/s",
        f"temporary {_mib(f.get('temp_mib'), ' MiB')}",
        f"peak {_mib(f.get('peak_mib'), ' MiB')}",
        "compile " + _cell(f.get("compile_s"), "{:.1f} s"),
    ]
    if value is not None and best is not None:
        parts.append(f"{value:.2f}x {best.contender}")
    return f"{outcome.title:34} " + "  ".join(parts)


def table(outcomes: list[Outcome]) -> Any:
    """The rich table: green where ours is ahead of the best rival, red where it is behind or anything failed."""
    from rich import box
    from rich.table import Table

    out = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left",
        caption="x best rival: the fastest rival's time over this one's. temporary, compile: share of Flax's in brackets. "
        "Classes: ms of a step in kernels of " + ", ".join(CLASSES) + ".",
    )  # fmt: skip
    for name in ("row", "contender"):
        out.add_column(name, no_wrap=True)
    columns = ("ms", "units/s", "x best rival", "temporary MiB", "peak MiB", "compile s", "busy ms", *CLASSES)
    for name in columns:
        out.add_column(name, justify="right", no_wrap=name.endswith("MiB"))
    previous = None
    for outcome in outcomes:
        row, f = outcome.row, outcome.figures
        same, previous = row == previous, row
        flax = of_row(outcomes, row).get("flax")
        value = ratio(outcome, best_rival(outcomes, row))
        ours = outcome.contender not in RIVALS
        style = "red" if outcome.failed or ours and value and value < 0.97 else ""
        style = style or ("green" if ours and value and value > 1.03 else "")

        def share(name: str, f: dict[str, Any] = f, flax: Outcome | None = flax, ours: bool = ours) -> str:
            base = flax.figures.get(name) if flax else None
            return f" ({f[name] / base:.2f})" if ours and base and f.get(name) is not None else ""

        out.add_row(
            "" if same else row.name,
            outcome.contender,
            "FAILED" if outcome.failed else _cell(outcome.ms, "{:.3f}"),
            _cell(outcome.per_second, "{:.0f}"),
            _cell(value if ours else None, "{:.2f}"),
            _mib(f.get("temp_mib")) + share("temp_mib"),
            _mib(f.get("peak_mib")),
            _cell(f.get("compile_s"), "{:.1f}") + share("compile_s"),
            _cell(f.get("busy_ms"), "{:.2f}"),
            *(_cell(f.get(f"{name}_ms"), "{:.2f}") for name in CLASSES),
            style=style,
        )
    return out


def gaps(outcomes: list[Outcome]) -> list[str]:
    """Steps of which more than a fifth is no kernel: the host's launches bound them."""
    found = []
    for o in outcomes:
        busy = o.figures.get("busy_ms")
        if o.ms and busy and busy < 0.8 * o.ms and o.platform != REFERENCE:
            found.append(
                f"{o.title}: kernels take {busy:.3g} of {o.ms:.3g} ms, the rest is the host's launches or gaps"
            )
    return found
