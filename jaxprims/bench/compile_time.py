"""`python -m jaxprims bench compile`: how long the 53 convolutions of ResNet-50 take to compile, forward and backward.

Each contender has a process of its own without a compilation cache, and one program: every convolution with both its gradients,
none of which is run. What is timed is tracing and lowering, and then compiling (which for XLA's convolutions includes trying
cuDNN's algorithms on the GPU).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTENDERS = ("xla", "jaxprims")
META: tuple[str, ...] = ("commit", "gpu", "driver", "jax", "date")
FIELDS: tuple[str, ...] = ("program", "batch", "dtype", "contender", "lower_s", "compile_s", "of_xla", *META)

Convolution = tuple[int, int, int, int, int]  # height and width of x, C, K, window, stride


def resnet50(size: int = 224) -> list[Convolution]:
    """The convolutions of ResNet-50 v1.5 in order: the stem, then stages of 3, 4, 6, 3 bottlenecks.

    >>> len(resnet50())
    53
    >>> resnet50()[0], resnet50()[-1]
    ((224, 3, 64, 7, 2), (7, 512, 2048, 1, 1))
    """
    convolutions, c = [(size, 3, 64, 7, 2)], 64
    size = -(-size // 4)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        k = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            out = -(-size // stride)
            convolutions += [(size, c, k, 1, 1), (size, k, k, 3, stride), (out, k, 4 * k, 1, 1)]
            if not block:
                convolutions.append((size, c, 4 * k, 1, stride))
            size, c = out, 4 * k
    return convolutions


def program(contender: str, convolutions: Sequence[Convolution], batch: int, dtype: str) -> tuple[Any, Any]:
    """(function, avals): the function gives y, dx and dw of every convolution."""
    import jax
    from jax import lax

    import jaxprims

    conv: Any = jaxprims.conv_general_dilated if contender == "jaxprims" else lax.conv_general_dilated

    def one(x: Any, w: Any, stride: int) -> Any:
        y, back = jax.vjp(
            lambda x, w: conv(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), x, w
        )
        return y, back(y)

    avals = [
        (jax.ShapeDtypeStruct((batch, h, h, c), dtype), jax.ShapeDtypeStruct((r, r, c, k), dtype))
        for h, c, k, r, _ in convolutions
    ]
    strides = [stride for *_, stride in convolutions]
    return lambda pairs: [one(x, w, s) for (x, w), s in zip(pairs, strides, strict=True)], avals


def work(pipe: Any, contender: str, batch: int, size: int, dtype: str, cpu: bool, log: str) -> None:
    """The body of a contender's process: tells lower_s and compile_s."""
    from jaxprims.bench.model_worker import prepare
    from jaxprims.bench.run import short

    try:
        prepare(cpu, log)
        import jax

        jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the backend has started
        fn, avals = program(contender, resnet50(size), batch, dtype)
        begin = time.perf_counter()
        lowered = jax.jit(fn).lower(avals)
        middle = time.perf_counter()
        lowered.compile()
        pipe.send({"figures": {"lower_s": middle - begin, "compile_s": time.perf_counter() - middle}})
    except BaseException as error:
        pipe.send({"failed": short(error)})
    pipe.send({"done": True})
    pipe.close()


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxprims bench compile", description="compile time of ResNet-50's convolutions, cold"
    )
    p.add_argument("--batch", type=int, default=256, metavar="N", help="images (%(default)s)")
    p.add_argument("--size", type=int, default=224, help="height and width of the image (%(default)s)")
    p.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for a contender (%(default)s)")
    p.add_argument("--output", type=Path, default=Path("bench_results"), metavar="DIR", help="of the CSV (%(default)s)")
    p.add_argument("--cpu", action="store_true", help="on the CPU: tries the program, says nothing of GPUs")
    return p


def main(argv: Sequence[str]) -> int:
    """0; 1 where a contender failed, 2 where JAX does not start."""
    from jaxprims.bench import model_worker, report
    from jaxprims.bench.models import context, in_child

    options = parser().parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    processes = context("spawn")
    told = in_child(processes, model_worker.machine, lambda log: (options.cpu, log), options.timeout)
    if told.failed:
        print(f"JAX does not start here: {'; '.join(told.notes)}", file=sys.stderr)
        return 2
    machine = told.figures
    title = f"resnet50 {options.size}^2: {len(resnet50())} convolutions, forward and both gradients"
    print(f"{machine['gpu']}, jax {machine['jax']}; {title}, N {options.batch}, {options.dtype}")
    seconds: dict[str, float] = {}
    lines: list[dict[str, Any]] = []
    for contender in CONTENDERS:
        job = contender, options.batch, options.size, options.dtype, options.cpu
        told = in_child(processes, work, lambda log, job=job: (*job, log), options.timeout)
        if told.failed:
            print(f"{contender}: {'; '.join(told.notes)}", file=sys.stderr)
            continue
        lower, compile_ = told.figures["lower_s"], told.figures["compile_s"]
        seconds[contender] = lower + compile_
        share = seconds[contender] / seconds["xla"] if "xla" in seconds else None
        print(f"{contender:9} traced and lowered in {lower:.2f} s, compiled in {compile_:.2f} s")
        lines.append(
            {
                "program": title, "batch": options.batch, "dtype": options.dtype, "contender": contender,
                "lower_s": round(lower, 3), "compile_s": round(compile_, 3), "of_xla": round(share, 3) if share else "",
                **{name: machine.get(name, "") for name in META},
            }
        )  # fmt: skip
    if {*CONTENDERS} <= {*seconds}:
        print(f"jaxprims takes {seconds['jaxprims'] / seconds['xla']:.2f} of XLA's time.")
    path = options.output / f"{report.file_stem('compile', machine)}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(lines)
    print(f"Written: {path}")
    return int(len(seconds) < len(CONTENDERS))
