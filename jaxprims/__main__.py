"""``python -m jaxprims doctor | demo | bench | explain``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any


def _example() -> tuple[Any, ...]:
    """The gradient of the demo's loss and its arguments' shapes."""
    import jax
    import jax.numpy as jnp

    from jaxprims import demo

    params, stats = jax.eval_shape(demo.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((demo.BATCH, 8, 8, 1), jnp.float32)
    labels = jax.ShapeDtypeStruct((demo.BATCH,), jnp.int32)
    return jax.grad(demo.loss_fn, has_aux=True), params, stats, x, labels


def _explain(target: str | None, gpu: str) -> int:
    from jaxprims.explain import explain

    if target is None:
        fn, *args = _example()
        print("The gradient of the demo's network (python -m jaxprims explain MODULE:FUNCTION for your own)\n")
    else:
        module, _, name = target.partition(":")
        if not name:
            print(
                f"error: target={target!r}: give MODULE:FUNCTION, a function that returns (fn, *args).", file=sys.stderr
            )
            return 2
        sys.path.insert(0, "")
        fn, *args = getattr(importlib.import_module(module), name)()
    print(explain(fn, *args).on(gpu))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxprims", description="CUDA primitives for JAX")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, whether the kernels run here, and what mends it if not")
    commands.add_parser("demo", help="train a small network on real images", add_help=False)
    commands.add_parser("bench", help="time this GPU: jaxprims, XLA and PyTorch side by side", add_help=False)
    explained = commands.add_parser("explain", help="per op of a function: kernel or reference, FLOPs, bytes")
    explained.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION", help="a function without arguments that returns (fn, *args)"
    )
    explained.add_argument("--gpu", default="H200", help="whose roofline to show (default: %(default)s)")
    options, rest = parser.parse_known_args(argv)
    if options.command == "demo":
        from jaxprims import demo

        return demo.main(rest) or 0
    if options.command == "bench":
        from jaxprims.bench import run

        return run.main(rest)
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if options.command == "doctor":
        from jaxprims import doctor

        return doctor.main()
    return _explain(options.target, options.gpu)


if __name__ == "__main__":
    sys.exit(main())
