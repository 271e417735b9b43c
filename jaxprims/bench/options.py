"""The benchmark's command line: `python -m jaxprims bench conv` or `membound`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxprims.bench import rows
from jaxprims.bench.rows import CONV_DIRECTIONS, DTYPES, MEM_DIRECTIONS


def word_list(known: Sequence[str], name: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.split(",") if word)
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is no {name}; there are {', '.join(known)}")
        return words

    return parse


def number_list(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(",") if word)
    if any(n < 1 for n in numbers):
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return numbers


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m jaxprims bench", description="jaxprims, XLA and PyTorch side by side on this machine's GPU"
    )
    p.add_argument(
        "suite",
        choices=[*sorted(rows.SUITES), "models", "compile"],
        help="convolutions, the ops that are bound by memory, training steps, or the compile time of ResNet-50's convolutions (the "
        "last two have options of their own: models --help)",
    )
    p.add_argument(
        "--rows", default="", metavar="SUBSTR", help="rows whose name holds this, or of this group; several: a,b"
    )
    p.add_argument(
        "--dtype", type=word_list(tuple(DTYPES), "dtype"), default=(), help=f"of {','.join(DTYPES)} (default: all)"
    )
    directions = (*CONV_DIRECTIONS, *MEM_DIRECTIONS[1:])
    p.add_argument(
        "--directions",
        type=word_list(directions, "direction"),
        default=(),
        help=f"of {','.join(directions)} (default: all)",
    )
    p.add_argument(
        "--output", type=Path, default=Path("bench_results"), metavar="DIR", help="of CSV and PNG (%(default)s)"
    )
    p.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    p.add_argument(
        "--torch-compile", action="store_true", help="torch.compile as a further rival of memory-bound rows (slow)"
    )
    p.add_argument(
        "--errors", action="store_true", help="errors of convolutions against float64 too (slow: on the host)"
    )
    p.add_argument(
        "--gemm", action="store_true", help="our algorithm='gemm' (patches written out) beside forward convolutions"
    )
    p.add_argument("--quick", action="store_true", help="few rows, few samples; with --cpu: tiny sizes")
    p.add_argument(
        "--cpu", action="store_true", help="time the reference on the CPU: tries the path, says nothing of kernels"
    )
    p.add_argument("--list", action="store_true", help="print the rows and stop")
    return p
