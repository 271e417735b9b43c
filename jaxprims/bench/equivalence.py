"""``bench models --equivalence``: does training by jaxprims' layers go where training by Flax's goes?

*Losses.* Every model takes the same steps in float32 (products at the highest precision) on Flax's and on jaxprims' layers, from
the same parameters, on the same few batches in turn. Rounding differs, and training amplifies what differs: how much is told
by a third run, Flax's from parameters moved by one unit in their last place. The losses of a step are the same where they differ by
at most ``FLOOR + FACTOR * noise``, relatively, the noise being the largest of that third run's differences up to the step.

*Accuracy.* A small network learns scikit-learn's handwritten digits in float32 and in bfloat16 on both kinds of layers;
all four end within ``ACCURACY`` of each other on images that were held out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from jaxprims import demo, models
from jaxprims.bench import model_worker, report
from jaxprims.bench import models as command
from jaxprims.bench.model_rows import ModelRow
from jaxprims.bench.run import short
from jaxprims.models.base import Model

FLOOR, FACTOR = 1e-5, 16.0
ACCURACY = 0.015  # five or six of the 360 images
BATCHES = 4  # different ones, taken in turn
IMAGES = 8  # of a batch at full size
FIELDS = (
    "kind",
    "model",
    "shape",
    "step",
    "flax",
    "jaxprims",
    "difference",
    "noise",
    "tolerance",
    "within",
    "notes",
    *report.META,
)


@dataclass(frozen=True)
class Job:
    """What a child is to do: a model's losses, or (no row) the digits."""

    row: ModelRow | None
    steps: int = 50
    epochs: int = 20
    cpu: bool = False
    log: str = ""


def work(pipe: Any, job: Job) -> None:
    """The child's whole life."""
    tell = model_worker.Tell(pipe)
    try:
        model_worker.prepare(job.cpu, job.log)
        if job.row is None:
            tell.figures(**accuracies(job.epochs, tell.stage))
        else:
            tell.figures(**losses(job.row, job.steps, tell.stage))
    except BaseException as error:
        pipe.send({"failed": short(error)})
    pipe.send({"done": True})
    pipe.close()


# --- losses ---------------------------------------------------------------------------------------------------------------


def moved(params: Any, key: jax.Array) -> Any:
    """The parameters, each moved up or down by one unit in its last place."""
    leaves, tree = jax.tree.flatten(params)
    ulp = float(jnp.finfo(jnp.float32).eps)
    return jax.tree.unflatten(tree, [
        leaf * (1 + ulp * jax.random.rademacher(k, leaf.shape, leaf.dtype))
        for leaf, k in zip(leaves, jax.random.split(key, len(leaves)))
    ])  # fmt: skip


def losses(row: ModelRow, steps: int, stage: Callable[[str], None] = lambda text: None) -> dict[str, list[float]]:
    """The losses of every step: ``{"flax": ..., "jaxprims": ..., "moved": ...}``; the last: Flax from `moved` parameters."""
    spec = models.MODELS[row.model]
    options = spec.small.options if row.small else {}
    batches = [spec.data(jax.random.key(i), batch=row.batch, small=row.small) for i in range(BATCHES)]
    out: dict[str, list[float]] = {}
    with jax.default_matmul_precision("highest"):
        start = None
        for layers in ("flax", "jaxprims"):
            init, step = models.train_step(models.make(row.model, layers=layers, **options))
            stage(f"{layers}: compiling")
            start = init(jax.random.key(7), batches[0][0]) if start is None else start
            jitted = jax.jit(step)
            runs = {layers: start}
            if layers == "flax":
                runs["moved"] = start._replace(params=moved(start.params, jax.random.key(9)))
            for name, state in runs.items():
                values = []
                for i in range(steps):
                    state, value = jitted(state, *batches[i % BATCHES])
                    values.append(value)
                    stage(f"{name}: step {i + 1}")
                out[name] = [float(v) for v in values]
    return out


def compare(told: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A line for each step: both losses, their relative difference, the noise so far, what is allowed, whether it is kept."""
    lines, noise = [], 0.0
    for i, (flax, ours, other) in enumerate(zip(told["flax"], told["jaxprims"], told["moved"])):
        scale = max(abs(flax), 1e-3)
        noise = max(noise, abs(other - flax) / scale)
        difference, tolerance = abs(ours - flax) / scale, FLOOR + FACTOR * noise
        lines.append({
            "kind": "loss", "step": i + 1, "flax": flax, "jaxprims": ours, "difference": difference, "noise": noise,
            "tolerance": tolerance, "within": int(difference <= tolerance),
        })  # fmt: skip
    return lines


# --- accuracy -------------------------------------------------------------------------------------------------------------


class Digits(Model):
    """The demo's network against a namespace of layers: images (N, 8, 8, 1) -> logits (N, 10)."""

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        nn = self.nn
        for size in (5, 3):
            x = nn.Conv(32, (size, size), use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(
                use_running_average=not train, momentum=demo.MOMENTUM, dtype=self.dtype, activation="relu"
            )(x)  # fmt: skip
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Conv(64, (3, 3), dtype=self.dtype, activation="relu")(x)
        return nn.Dense(demo.CLASSES, dtype=self.dtype)(x.reshape(x.shape[0], -1))


def accuracy(layers: str, dtype: Any, data: demo.Data, epochs: int, seed: int = 0) -> float:
    """On the held-out digits after so many passes over the others."""
    model = Digits(layers=layers, dtype=dtype)
    steps = len(data.train_x) // demo.BATCH
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(2, epochs) * steps // 2, epochs * steps)
    init, step = models.train_step(model, optax.adamw(schedule, weight_decay=1e-2))
    state = init(jax.random.key(seed), data.train_x[: demo.BATCH])

    @jax.jit
    def jitted(state: Any, x: Any, y: Any) -> Any:
        return step(state, demo.shifted(jax.random.fold_in(jax.random.key(1), state.count), x), y)[0]

    order = np.random.default_rng(seed)
    for _ in range(epochs):
        for batch in order.permutation(len(data.train_x))[: steps * demo.BATCH].reshape(steps, demo.BATCH):
            state = jitted(state, data.train_x[batch], data.train_y[batch])
    variables = {"params": state.params, "batch_stats": state.stats}
    # Op by op: XLA's compiler for CPUs in jaxlib 0.12.0 makes NaN of such a network in bfloat16 as one program.
    logits: Any = model.apply(variables, data.test_x, train=False)
    return float(np.mean(np.asarray(logits).argmax(-1) == data.test_y))


def accuracies(epochs: int, stage: Callable[[str], None] = lambda text: None) -> dict[str, float]:
    """By layers and dtype: "flax f32", "flax bf16", "jaxprims f32", "jaxprims bf16"."""
    data, out = demo.load_data(0), {}
    for layers in ("flax", "jaxprims"):
        for name, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16)):
            stage(f"{layers} {name}")
            out[f"{layers} {name}"] = accuracy(layers, dtype, data, epochs)
    return out


def compare_accuracies(told: dict[str, float]) -> list[dict[str, Any]]:
    """A line for each dtype: both accuracies, and how far they are from Flax's in float32."""
    base = told["flax f32"]
    lines = []
    for name in ("f32", "bf16"):
        pair = {layers: told[f"{layers} {name}"] for layers in ("flax", "jaxprims")}
        difference = max(abs(v - base) for v in pair.values())
        lines.append({
            "kind": "accuracy", "model": f"digits {name}", **pair, "difference": difference, "tolerance": ACCURACY,
            "within": int(difference <= ACCURACY),
        })  # fmt: skip
    return lines


# --- the command ----------------------------------------------------------------------------------------------------------


def main(
    options: argparse.Namespace, rows: list[ModelRow], machine: dict[str, str], processes: Any, on_gpu: bool
) -> int:
    """0, or 1 where a loss or an accuracy is not within its tolerance, or could not be had."""
    from rich.console import Console

    begin = time.perf_counter()
    console = Console(width=None if sys.stdout.isatty() else 180)
    # One size of each model: few images, since twice as many rounding errors are no better evidence.
    rows = list({row.model: ModelRow(row.model, min(row.batch, IMAGES), "f32", row.small) for row in rows}.values())
    jobs: list[ModelRow | None] = [*rows, *([None] if options.epochs > 0 else [])]
    path = options.output / f"{report.file_stem('equivalence', machine)}.csv"
    lines: list[dict[str, Any]] = []
    lost = False
    with report.Lines(path, FIELDS, machine) as csv, command.progress(console, len(jobs)) as (bar, task):
        try:
            for row in jobs:
                title = row.name if row else "digits"
                bar.update(task, description=title)
                told = command.in_child(
                    processes, work,
                    lambda log, row=row: (Job(row, options.steps, options.epochs, not on_gpu, log),), options.timeout,
                    lambda text, title=title: bar.update(task, description=f"{title}: {text}"),
                )  # fmt: skip
                new = _lines(row, told)
                for line in new:
                    csv.write_line(report.texts(line))
                lines += new
                bar.console.print(
                    summary(title, new), style=None if all(n["within"] for n in new) else "red", markup=False
                )
                bar.advance(task)
        except KeyboardInterrupt:
            lost = True
            bar.console.print("interrupted", style="red")
    console.print(table(lines))
    console.print(f"Written in {time.perf_counter() - begin:.0f} s: {path}", markup=False)
    return 0 if lines and not lost and all(line["within"] for line in lines) else 1


def _lines(row: ModelRow | None, told: command.Told) -> list[dict[str, Any]]:
    """What goes into the CSV of what a child told: of a failure one line that says why."""
    if told.failed:
        new: list[dict[str, Any]] = [
            {"kind": "loss" if row else "accuracy", "within": 0, "notes": "; ".join(told.notes)}
        ]
    else:
        new = compare(told.figures) if row else compare_accuracies(told.figures)
    about = {"model": row.name, "shape": "x".join(map(str, row.shape))} if row else {}
    return [{"model": "digits"} | line | about for line in new]


def summary(title: str, lines: list[dict[str, Any]]) -> str:
    """One model on one line."""
    if lines[0].get("notes"):
        return f"{title:22} {lines[0]['notes']}"
    if lines[0]["kind"] == "accuracy":
        text = "  ".join(f"{n['model']}: Flax {n['flax']:.2%}, jaxprims {n['jaxprims']:.2%}" for n in lines)
        return f"{title:22} {text}"
    worst = max(lines, key=lambda n: n["difference"] / n["tolerance"])
    return (
        f"{title:22} {sum(n['within'] for n in lines)} of {len(lines)} losses the same; {lines[0]['flax']:.4g} -> "
        f"{lines[-1]['flax']:.4g}; nearest to its tolerance at step {worst['step']}: {worst['difference']:.1e} of {worst['tolerance']:.1e}"
    )


def table(lines: list[dict[str, Any]]) -> Any:
    """Losses side by side at some of the steps, and the accuracies."""
    from rich import box
    from rich.table import Table

    out = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left",
        caption=f"Tolerance of a loss: {FLOOR:.0e} + {FACTOR:.0f} x what Flax differs from itself (noise) with its first parameters "
        f"moved by a unit in the last place; of an accuracy: {ACCURACY:.1%} from Flax in float32.",
    )  # fmt: skip
    for name in ("model", "step", "Flax", "jaxprims", "difference", "noise", "tolerance"):
        out.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    shown = [
        n
        for n in lines
        if "flax" in n and (n["kind"] != "loss" or n["step"] == 1 or n["step"] % 10 == 0 or not n["within"])
    ]
    for line in shown:
        accuracy = line["kind"] == "accuracy"
        value = "{:.2%}" if accuracy else "{:.6f}"
        out.add_row(
            line["model"],
            "" if accuracy else str(line["step"]),
            value.format(line["flax"]),
            value.format(line["jaxprims"]),
            f"{line['difference']:.1e}",
            "" if accuracy else f"{line['noise']:.1e}",
            f"{line['tolerance']:.1e}",
            style=None if line["within"] else "red",
        )
    return out
