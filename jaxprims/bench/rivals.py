"""The rivals on XLA: jax.lax and Flax's formulas in jax.numpy, under jit with autotuning. PyTorch's are in `torch_rival`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxprims.bench.programs import LRN, Program, conv_program, mem_program
from jaxprims.bench.rows import ConvRow, Item, MemRow


def xla(item: Item) -> dict[str, Program]:
    """The item on XLA: by name, all that count as one rival each. Batched rows by vmap and by lax.map."""
    from jax import lax

    if isinstance(item.row, MemRow):
        return {"xla": mem_program(item, xla_op(item.row))}

    def program(**how: Any) -> Program:
        assert isinstance(item.row, ConvRow)
        return conv_program(item.row, item.dtype, item.direction, lax.conv_general_dilated, lax.conv_transpose, **how)

    if item.row.batch:
        return {"xla": program(), "xla map": program(by_map=True)}
    return {"xla": program()}


def xla_op(row: MemRow) -> Callable[..., Any]:
    """``op(x, *parameters[, residual]) -> (y, other results)``, as Flax computes it: float32 inside, E[x^2] - E[x]^2."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    o = row.option
    f32 = jnp.float32
    act = {None: lambda y: y, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}[o("activation")]  # type: ignore[index]

    def normalise(x: Any, axes: tuple[int, ...], eps: float, *, mean: bool = True) -> tuple[Any, Any, Any]:
        x = x.astype(f32)
        m = x.mean(axes, keepdims=True) if mean else 0.0
        square = (x * x).mean(axes, keepdims=True)
        var = jnp.maximum(square - m * m, 0.0) if mean else square
        return (x - m) * lax.rsqrt(var + eps), m, var

    def batch_norm(x: Any, scale: Any, bias: Any, *more: Any) -> Any:
        axes = tuple(range(x.ndim - 1))
        xf = x.astype(f32)
        mean = xf.mean(axes)
        var = jnp.maximum((xf * xf).mean(axes) - mean * mean, 0.0)
        y = (xf - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias
        y = act(y + more[0] if more else y)
        return y.astype(x.dtype), (mean, var)

    def inference(x: Any, mean: Any, var: Any, scale: Any, bias: Any) -> Any:
        return act((x.astype(f32) - mean) * (lax.rsqrt(var + 1e-5) * scale) + bias).astype(x.dtype), ()

    def row_norm(mean: bool) -> Callable[..., Any]:
        def norm(x: Any, scale: Any, *more: Any) -> Any:
            bias = more[0] if mean else None
            h = x + more[-1] if o("residual") else x
            y = normalise(h, (-1,), 1e-6, mean=mean)[0] * scale
            y = (y if bias is None else y + bias).astype(x.dtype)
            return ((y, h) if o("residual") else y), ()

        return norm

    def group_norm(x: Any, scale: Any, bias: Any) -> Any:
        n, *size, c = x.shape
        groups = int(o("groups", c))  # type: ignore[call-overload]
        g = x.reshape(n, *size, groups, c // groups)
        y = normalise(g, (*range(1, len(size) + 1), len(size) + 2), 1e-6)[0].reshape(x.shape)
        return act(y * scale + bias).astype(x.dtype), ()

    def lrn(x: Any) -> Any:
        size, xf = LRN["size"], x.astype(f32)
        low = int(size) // 2
        window = (1,) * (x.ndim - 1) + (int(size),)
        pads = ((0, 0),) * (x.ndim - 1) + ((low, int(size) - 1 - low),)
        total = lax.reduce_window(xf * xf, 0.0, lax.add, window, (1,) * x.ndim, pads)
        return (xf * (LRN["k"] + LRN["alpha"] / size * total) ** -LRN["beta"]).astype(x.dtype), ()

    def windows() -> tuple[Any, ...]:
        w, s, p = (int(o(name)) for name in ("window", "stride", "pad"))  # type: ignore[call-overload]
        return (1, w, w, 1), (1, s, s, 1), ((0, 0), (p, p), (p, p), (0, 0))

    def max_pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, *windows()), ()

    def avg_pool(x: Any) -> Any:
        window, strides, pads = windows()
        total = lax.reduce_window(x.astype(f32), 0.0, lax.add, window, strides, pads)
        return (total / (window[1] * window[2])).astype(x.dtype), ()

    ops: dict[str, Callable[..., Any]] = {
        "batch_norm": batch_norm,
        "batch_norm_inference": inference,
        "layer_norm": row_norm(True),
        "rms_norm": row_norm(False),
        "group_norm": group_norm,
        "instance_norm": group_norm,
        "local_response_norm": lrn,
        "max_pool": max_pool,
        "avg_pool": avg_pool,
        "global_avg_pool": lambda x: (x.astype(f32).mean((1, 2)).astype(x.dtype), ()),
        "softmax": lambda x: (jax.nn.softmax(x.astype(f32)).astype(x.dtype), ()),
        "log_softmax": lambda x: (jax.nn.log_softmax(x.astype(f32)).astype(x.dtype), ()),
        "bias_act": lambda x, b: (act(x + b), ()),
        "transpose_layout": lambda x: (x.transpose(0, 3, 1, 2), ()),
    }
    return ops[row.kind]
