"""The benchmark's picture, by matplotlib without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxprims.bench import report

if TYPE_CHECKING:
    from jaxprims.bench.model_report import Outcome
    from jaxprims.bench.run import Result

OURS, RIVAL, INK = "#0072b2", "#d55e00", "#444444"  # apart for the colour-blind too
GRADIENTS = {"dgrad": "dgrad and wgrad", "wgrad": "dgrad and wgrad"}  # one panel
MARKS = {"fwd": "o", "dgrad": "s", "wgrad": "^"}


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _title(machine: dict[str, str]) -> str:
    return f"{machine['gpu']}, {machine['date'][:10]}, commit {machine['commit']}, jax {machine['jax']}" + (
        f", torch {machine['torch']}" if machine["torch"] else ""
    )


def roofline(path: Path, results: list[Result], ceilings: dict[str, float], machine: dict[str, str]) -> None:
    """TFLOP/s over FLOP a byte, both logarithmic: ours full, the best rival hollow, a line between the two."""
    dtypes = list(dict.fromkeys(r.item.dtype for r in results))
    columns = min(len(dtypes), 2)
    lines = -(-len(dtypes) // max(columns, 1))
    figure = _figure(7.5 * columns, 5.5 * lines)
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(dtypes) :]:
        axis.remove()
    for axis, dtype in zip(axes.flat, dtypes):
        _roofline(axis, dtype, [r for r in results if r.item.dtype == dtype], ceilings)
    figure.suptitle("Convolution: jaxprims and the best rival under the roofline\n" + _title(machine), fontsize=10)
    figure.savefig(path)


def _roofline(axis: Any, dtype: str, results: list[Result], ceilings: dict[str, float]) -> None:
    from matplotlib.lines import Line2D

    at, seen = [], []
    for result in results:
        row, ours, best = result.item.row, result.ms.get("jaxprims"), report.best_rival(result)
        intensity = row.flops() / result.item.moved()
        y = [row.flops() / (ms * 1e9) if ms else None for ms in (ours, result.ms[best] if best else None)]
        if y[0] is None and y[1] is None:
            continue
        at.append(intensity)
        seen += [v for v in y if v]
        mark = MARKS.get(result.item.direction, "o")
        if y[0] and y[1]:
            axis.plot([intensity] * 2, y, color=INK, linewidth=0.6, alpha=0.5, zorder=1)
        if y[1]:
            axis.plot(intensity, y[1], mark, markerfacecolor="none", markeredgecolor=RIVAL, markersize=6, zorder=2)
        if y[0]:
            axis.plot(intensity, y[0], mark, color=OURS, markersize=5, zorder=3)
    if at:
        low, high = min(at) / 1.6, max(at) * 1.6
        copy, peak = ceilings.get("copy"), ceilings.get(dtype)
        xs = [low * (high / low) ** (i / 200) for i in range(201)]
        if copy:
            roof = [min(x * copy, peak or float("inf")) / 1e12 for x in xs]
            axis.plot(xs, roof, color=INK, linewidth=1.4, zorder=0)
            seen += roof
        if copy and peak:
            axis.text(
                high / 1.05,
                peak / 1e12 * 1.05,
                f"{peak / 1e12:.3g} TFLOP/s",
                ha="right",
                va="bottom",
                color=INK,
                fontsize=8,
            )
        axis.set_xlim(low, high)
        axis.set_ylim(min(seen) / 1.6, max(seen) * 1.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(
        f"{dtype}" + (f" (copy {ceilings['copy'] / 1e12:.2f} TB/s)" if "copy" in ceilings else ""), fontsize=10
    )
    axis.set_xlabel("FLOP per byte that must move")
    axis.set_ylabel("TFLOP/s")
    axis.grid(alpha=0.25, which="both", linewidth=0.4)
    keys = [
        Line2D([], [], color=OURS, marker="o", linestyle="", label="jaxprims"),
        Line2D([], [], markeredgecolor=RIVAL, markerfacecolor="none", marker="o", linestyle="", label="best rival"),
        *(Line2D([], [], color=INK, marker=m, linestyle="", label=name) for name, m in MARKS.items()),
    ]
    axis.legend(handles=keys, fontsize=8, loc="lower right")


def bars(path: Path, results: list[Result], ceilings: dict[str, float], machine: dict[str, str]) -> None:
    """Share of the copy's rate (bytes/s where none was measured), a panel for each direction."""
    copy = ceilings.get("copy")
    panels: dict[str, list[Result]] = {}
    for result in results:
        panels.setdefault(GRADIENTS.get(result.item.direction, result.item.direction), []).append(result)
    figure = _figure(6.5 * max(len(panels), 1), 1.6 + 0.26 * max(map(len, panels.values()), default=1))
    axes = figure.subplots(1, max(len(panels), 1), squeeze=False)[0]
    for axis, (title, some) in zip(axes, panels.items()):
        for i, result in enumerate(some):
            best = report.best_rival(result)
            for ms, shift, colour in (
                (result.ms.get("jaxprims"), -0.2, OURS), (result.ms[best] if best else None, 0.2, RIVAL),
            ):  # fmt: skip
                if ms:
                    axis.barh(i + shift, result.item.moved() / (ms * 1e-3) / (copy or 1.0), height=0.38, color=colour)
            value = report.ratio(result)
            if value:
                axis.annotate(f" {value:.2f}x", (1.0, i), xycoords=("axes fraction", "data"), fontsize=7, va="center")
        names = [
            f"{r.item.row.name} {r.item.dtype}" + f" {r.item.direction}" * (title in GRADIENTS.values()) for r in some
        ]
        axis.set_yticks(range(len(some)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_ylim(len(some) - 0.4, -0.6)
        if copy:
            axis.axvline(1.0, color=INK, linewidth=1)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("share of the copy's rate" if copy else "bytes/s")
        axis.grid(axis="x", alpha=0.3, linewidth=0.5)
    from matplotlib.patches import Patch

    axes[0].legend(handles=[Patch(color=OURS, label="jaxprims"), Patch(color=RIVAL, label="best rival")], fontsize=8)
    figure.suptitle("Ops bound by memory: jaxprims and the best rival\n" + _title(machine), fontsize=10)
    figure.savefig(path)


# --- models ---------------------------------------------------------------------------------------------------------------

# By class of kernel, ours and the rivals' bars alike; none is a colour of the bars beside them.
CLASS_COLOURS = {
    "convolution": "#332288", "norm": "#ddcc77", "pool": "#117733", "elementwise": "#cc6677", "copy": "#88ccee",
    "other": "#bbbbbb",
}  # fmt: skip
OTHER_OURS = "#56b4e9"  # recompute


def models(path: Path, outcomes: list[Outcome], machine: dict[str, str]) -> None:
    """For each model two panels: ms a step of every contender, and where those milliseconds go by class of kernel."""
    from matplotlib.patches import Patch

    from jaxprims.bench import model_report

    rows = [row for row in dict.fromkeys(o.row for o in outcomes) if any(o.row == row for o in outcomes if o.ms)]
    shown = [list(model_report.of_row(outcomes, row).values()) for row in rows]
    heights = [0.5 + 0.24 * len(some) for some in shown]
    figure = _figure(14, 1.7 + sum(heights))
    axes = figure.subplots(
        len(rows), 2, squeeze=False, gridspec_kw={"height_ratios": heights, "width_ratios": [1, 1.1]}
    )
    for (left, right), row, some in zip(axes, rows, shown):
        _model_bars(left, outcomes, row, some)
        _model_classes(right, some)
    axes[0][0].set_title("ms a step (shorter is faster)", fontsize=10)
    axes[0][1].set_title("where a step's time goes: ms in kernels; | the step", fontsize=10)
    keys = [Patch(color=OURS, label="jaxprims"), Patch(color=OTHER_OURS, label="jaxprims, recompute"),
            Patch(color=RIVAL, label="rivals")]  # fmt: skip
    classes = [Patch(color=colour, label=name) for name, colour in CLASS_COLOURS.items()]
    figure.legend(handles=keys + classes, loc="outside lower center", ncols=len(keys) + len(classes), fontsize=8)
    reference = any(o.platform == model_report.REFERENCE for o in outcomes)
    what = "Training steps: jaxprims, Flax on XLA and PyTorch" + (
        " (CPU, reference, small sizes: nothing is said of kernels)" if reference else ""
    )
    figure.suptitle(what + "\n" + _title(machine), fontsize=10)
    figure.savefig(path)


def _model_bars(axis: Any, outcomes: list[Outcome], row: Any, some: list[Outcome]) -> None:
    from jaxprims.bench import model_report

    best = model_report.best_rival(outcomes, row)
    longest = max((o.ms for o in some if o.ms), default=1.0)
    for i, o in enumerate(some):
        ours = o.contender.startswith("jaxprims")
        if not o.ms or not o.per_second:
            axis.text(0.01 * longest, i, "failed" if o.failed else "no figure", va="center", fontsize=7, color=INK)
            continue
        axis.barh(i, o.ms, height=0.75, color=RIVAL if not ours else OURS if o.contender == "jaxprims" else OTHER_OURS)
        value = model_report.ratio(o, best) if ours else None
        text = f" {o.ms:.3g} ms, {o.per_second:,.0f} {row.unit}/s" + (f", {value:.2f}x" if value else "")
        axis.text(o.ms, i, text, va="center", fontsize=7, color=INK, fontweight="bold" if ours else None)
    axis.set_xlim(0, 1.55 * longest)
    axis.set_yticks(range(len(some)), [o.contender for o in some], fontsize=7)
    axis.set_ylim(len(some) - 0.4, -0.6)
    axis.set_ylabel(row.name.replace(" ", "\n"), rotation=0, ha="right", va="center", fontsize=9, fontweight="bold")
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _model_classes(axis: Any, some: list[Outcome]) -> None:
    for i, o in enumerate(some):
        at = 0.0
        for name, colour in CLASS_COLOURS.items():
            ms = o.figures.get(f"{name}_ms") or 0.0
            if ms:
                axis.barh(i, ms, left=at, height=0.75, color=colour)
            at += ms
        if not at:
            axis.text(0.0, i, " no profile", va="center", fontsize=7, color=INK)
        elif o.ms:
            axis.plot([o.ms] * 2, [i - 0.45, i + 0.45], color=INK, linewidth=1.2)
    axis.set_xlim(left=0)
    axis.set_yticks(range(len(some)), [""] * len(some))
    axis.set_ylim(len(some) - 0.4, -0.6)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
