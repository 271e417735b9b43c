"""How JAX programs are timed: device time without dispatch noise, on operands that the cache does not hold.

A program is unrolled over several operand sets inside one jitted function, each call behind the one before (an optimisation
barrier: XLA cannot merge, reorder or drop any; all results are returned). That function is dispatched back to back over
groups of sets until a few milliseconds are full, and the clock stops when the last result is there. The sets together exceed
the L2 cache three times where memory and the limit of sets allow, so that every call finds its operands in device memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxprims.bench.programs import Program, Spec

UNROLL = 8  # calls in one program
MOST_SETS = 96
METHOD = (
    "median of samples, contenders in turn; JAX: programs of up to 8 calls on distinct operands, dispatched back to back, wall "
    "clock; PyTorch: CUDA graph of a call per operand set, events; operand sets exceed L2 three times unless l2 says warm; "
    "nothing subtracted"
)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _random(seed: Any, shape: tuple[int, ...], dtype: str, positive: bool) -> Any:
    """Normal values (positive: uniform in [0.5, 1.5)) from a hash of the place: cheap to compile and to run."""
    n = math.prod(shape)
    h = lax.iota(jnp.uint32, n) * jnp.uint32(0x9E3779B9) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * jnp.uint32(factor)
    u = ((h ^ (h >> 16)) >> 8).astype(jnp.float32) * 2.0**-24  # [0, 1)
    u = u + 0.5 if positive else math.sqrt(2) * lax.erf_inv(jnp.clip(2 * u - 1, -0.999999, 0.999999))
    return u.astype(dtype).reshape(shape)


def random_sets(specs: Sequence[Spec], count: int, seed: int) -> list[tuple[Any, ...]]:
    """`count` sets of operands, all different."""

    def one(i: int, j: int, s: Spec) -> Any:
        number = (seed * 1_000_003 + i * 1009 + j + 1) * 0x27D4EB2F % 2**32
        return _random(jnp.uint32(number), s.shape, s.dtype, s.positive)

    return [tuple(one(i, j, s) for j, s in enumerate(specs)) for i in range(count)]


def set_count(moved: int, l2: float, cpu: bool) -> int:
    """How many operand sets: three times the cache, a whole number of programs where it is more than one."""
    if cpu:
        return 2
    sets = min(max(2, math.ceil(3 * l2 / max(moved, 1))), MOST_SETS)
    return sets if sets <= UNROLL else math.ceil(sets / UNROLL) * UNROLL


def unrolled(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """``fn`` on each of a list of argument tuples, one after the other."""

    def many(groups: list[tuple[Any, ...]]) -> list[Any]:
        outs: list[Any] = []
        for args in groups:
            if outs:
                args, outs[-1] = lax.optimization_barrier((args, outs[-1]))
            outs.append(fn(*args))
        return outs

    return many


class JaxRunner:
    """One call on each operand set, in jitted programs of up to `UNROLL` calls."""

    note = ""

    def __init__(self, program: Program, sets: Sequence[tuple[Any, ...]]):
        args = list(sets)
        if program.prepare is not None:
            prepare = program.prepare
            args = [prepare(*a) for a in sets]
        self.count = len(args)
        self._groups = [args[i : i + UNROLL] for i in range(0, len(args), UNROLL)]
        self._many = jax.jit(unrolled(program.fn))
        self.first: Any = jax.block_until_ready(self._many(self._groups[0]))[0]
        self.enqueue_share = 0.0

    def call(self, repeats: int) -> float:
        """Seconds for `repeats` rounds over the sets."""
        out = None
        begin = time.perf_counter()
        for _ in range(repeats):
            for group in self._groups:
                out = self._many(group)
        enqueued = time.perf_counter()
        jax.block_until_ready(out)
        end = time.perf_counter()
        self.enqueue_share = (enqueued - begin) / max(end - begin, 1e-9)
        return end - begin

    def drop_outputs(self) -> None:
        self.first = None


def interleaved(runners: dict[str, Any], samples: int, seconds: float) -> dict[str, list[float]]:
    """Seconds a call of every runner, `samples` of each, taken in turn; a sample lasts about `seconds`."""
    repeats: dict[str, int] = {}
    for name, runner in runners.items():
        runner.call(1)
        repeats[name] = max(1, min(1000, math.ceil(seconds / max(runner.call(1), 1e-6))))
        runner.call(repeats[name])
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(samples):
        for name, runner in runners.items():
            times[name].append(runner.call(repeats[name]) / (repeats[name] * runner.count))
    return times


@jax.jit
def _relative(got: Any, want: Any) -> Any:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2)) / jnp.maximum(jnp.sqrt(jnp.sum(want**2)), 1e-30)


def difference(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The largest |got - want| / |want| over pairs of results; NaN where either holds one."""
    if [g.shape for g in got] != [w.shape for w in want]:
        raise ValueError(f"results have shapes {[g.shape for g in got]}, the rival's {[w.shape for w in want]}")
    errors = [float(_relative(g, w)) for g, w in zip(got, want)]
    return math.nan if any(math.isnan(e) for e in errors) else max(errors, default=0.0)


@lru_cache(maxsize=1)
def _copy() -> Callable[[Any], Any]:
    return jax.jit(lambda x: x ^ jnp.uint32(0x5A5A5A5A))


def copy_rate(size: int) -> float:
    """Bytes/s, read and written, of a pass over `size` bytes."""
    x = _random(jnp.uint32(7), (size // 4,), "float32", False).view(jnp.uint32)
    return 2.0 * size / _best(lambda: _copy()(x))


def matmul_rate(dtype: str, array_dtype: str, size: int) -> float:
    """FLOP/s of a square matrix product on random operands."""
    precision = lax.Precision.HIGHEST if dtype == "f32" else lax.Precision.DEFAULT
    a, b = (_random(jnp.uint32(s), (size, size), array_dtype, False) for s in (3, 5))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    return 2.0 * size**3 / _best(lambda: product(a, b))


def _best(call: Callable[[], Any], rounds: int = 10, calls: int = 5) -> float:
    jax.block_until_ready([call() for _ in range(2)])
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        out = None
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return min(times)
