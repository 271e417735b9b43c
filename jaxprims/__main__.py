"""``python -m jaxprims doctor | demo | bench | explain``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import jaxprims


class _Mistake(Exception):
    """What the user wrote cannot be meant: an ``error:`` line and code 2, no traceback."""


def _example() -> tuple[Any, ...]:
    """The gradient of the demo's loss and its arguments' shapes."""
    import jax
    import jax.numpy as jnp

    from jaxprims import demo

    params, stats = jax.eval_shape(demo.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((demo.BATCH, 8, 8, 1), jnp.float32)
    labels = jax.ShapeDtypeStruct((demo.BATCH,), jnp.int32)
    return jax.grad(demo.loss_fn, has_aux=True), params, stats, x, labels


def _target(text: str) -> tuple[Any, ...]:
    """The (fn, *args) that the function named MODULE:FUNCTION returns. What its own code raises passes through."""

    def refuse(why: str) -> NoReturn:
        raise _Mistake(f"target={text!r}: {why}; give MODULE:FUNCTION, a function that returns (fn, *args).")

    module, _, name = text.partition(":")
    if not module or not name or module.startswith("."):
        refuse("a module or a function is missing")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        refuse(f"there is no module {error.name!r} here")
    if not hasattr(found, name):
        refuse(f"module {module!r} has no {name!r}")
    make = getattr(found, name)
    if not callable(make):
        refuse(f"{name} is not a function but {type(make).__name__}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        refuse(f"{name} cannot be called without arguments ({error})")
    except ValueError:  # a built-in function without a signature
        pass
    made = make()
    if not isinstance(made, (tuple, list)) or not made or not callable(made[0]):
        refuse(f"{name} returned {type(made).__name__}, not a tuple of a function and its arguments")
    return tuple(made)


def _explain(target: str | None, gpu: str) -> int:
    from jaxprims.explain import explain

    if target is None:
        fn, *args = _example()
        print("The gradient of the demo's network (python -m jaxprims explain MODULE:FUNCTION for your own)\n")
    else:
        try:
            fn, *args = _target(target)
        except _Mistake as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(explain(fn, *args).on(gpu))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from jaxprims.explain import GPUS

    parser = argparse.ArgumentParser(prog="python -m jaxprims", description="CUDA primitives for JAX")
    parser.add_argument("--version", action="version", version=f"jaxprims {jaxprims.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what is installed, whether the kernels run here, and what mends it if not")
    commands.add_parser("demo", help="train a small network on real images", add_help=False)
    commands.add_parser("bench", help="time this GPU: jaxprims, XLA and PyTorch side by side", add_help=False)
    explained = commands.add_parser("explain", help="per op of a function: kernel or reference, FLOPs, bytes")
    explained.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION", help="a function without arguments that returns (fn, *args)"
    )
    explained.add_argument(
        "--gpu", default="H200", choices=sorted(GPUS), help="whose roofline to show (default: %(default)s)"
    )
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
