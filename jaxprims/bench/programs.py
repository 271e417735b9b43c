"""What is timed, as JAX programs: the same function of a library's ops for jaxprims and for its rivals on XLA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxprims.bench.rows import DTYPES, ConvRow, Item, MemRow, Shape

LRN = dict(size=5, alpha=1.0, beta=0.75, k=1.0)


@dataclass(frozen=True)
class Spec:
    """One operand: shape, dtype, and whether its values are all positive."""

    shape: Shape
    dtype: str
    positive: bool = False


@dataclass(frozen=True)
class Program:
    """``fn(*prepare(*operands))`` where ``prepare``, if there is one, runs before the clock starts."""

    fn: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None


def operands(item: Item) -> tuple[Spec, ...]:
    """What an item's program takes: of a convolution what its direction reads, else x, parameters, residual, dy."""
    row, dtype = item.row, DTYPES[item.dtype]
    if isinstance(row, ConvRow):
        return tuple(Spec(shape, dtype) for shape in row.operands(item.direction))
    c = (row.dims[-1],)
    specs = [Spec(row.dims, dtype)]
    if row.kind == "batch_norm":  # parameters stay float32 in mixed-precision training
        specs += [Spec(c, "float32"), Spec(c, "float32")]
    elif row.kind == "batch_norm_inference":
        specs += [Spec(c, "float32"), Spec(c, "float32", positive=True), Spec(c, "float32"), Spec(c, "float32")]
    elif row.kind in ("layer_norm", "group_norm", "instance_norm"):
        specs += [Spec(c, dtype), Spec(c, dtype)]
    elif row.kind in ("rms_norm", "bias_act"):
        specs += [Spec(c, dtype)]
    if row.option("residual"):
        specs.append(Spec(row.dims, dtype))
    if item.direction != "fwd":
        specs.append(Spec(row.y_shape(), dtype))
        if row.option("residual") and row.kind != "batch_norm":
            specs.append(Spec(row.dims, dtype))  # the gradient of the sum
    return tuple(specs)


# --- convolution ----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    ("NHWC", 1): ("NWC", "WIO", "NWC"), ("NHWC", 2): ("NHWC", "HWIO", "NHWC"), ("NHWC", 3): ("NDHWC", "DHWIO", "NDHWC"),
    ("NCHW", 1): ("NCW", "OIW", "NCW"), ("NCHW", 2): ("NCHW", "OIHW", "NCHW"), ("NCHW", 3): ("NCDHW", "OIDHW", "NCDHW"),
}  # fmt: skip


def conv_function(
    row: ConvRow, dtype: str, conv: Callable[..., Any], conv_transpose: Callable[..., Any]
) -> Callable[..., Any]:
    """y = f(x, w) of one convolution (without its batch axis), by functions with the arguments of jax.lax's."""
    from jax import lax

    precision = lax.Precision.HIGHEST if dtype == "f32" else lax.Precision.DEFAULT
    numbers, rank = LAYOUTS[row.layout, row.rank], row.rank
    if row.transposed:
        # Zeros around the spread-out x, as PyTorch's padding means: low d - pad, high the same and the output padding.
        reach = [(r - 1) * row.dilation - row.pad for r in row.window]
        padding = [(lo, lo + row.stride - 1) for lo in reach]
        return lambda x, w: conv_transpose(
            x, w, (row.stride,) * rank, padding, (row.dilation,) * rank, dimension_numbers=numbers, precision=precision
        )
    return lambda x, w: conv(
        x,
        w,
        (row.stride,) * rank,
        [(row.pad, row.pad)] * rank,
        rhs_dilation=(row.dilation,) * rank,
        dimension_numbers=numbers,
        feature_group_count=row.groups,
        precision=precision,
    )


def conv_program(
    row: ConvRow,
    dtype: str,
    direction: str,
    conv: Callable[..., Any],
    conv_transpose: Callable[..., Any],
    *,
    by_map: bool = False,
) -> Program:
    """One direction of a convolution. Its gradients are the transposes in x and in w: nothing else is computed."""
    import jax

    f = conv_function(row, dtype, conv, conv_transpose)
    lead = 1 if row.batch else 0

    def aval(shape: Shape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape[lead:], DTYPES[dtype])

    def dgrad(w: Any, dy: Any) -> Any:
        return jax.linear_transpose(lambda x: f(x, w), aval(row.x_shape()))(dy)[0]

    def wgrad(x: Any, dy: Any) -> Any:
        return jax.linear_transpose(lambda w: f(x, w), aval(row.w_shape()))(dy)[0]

    fn = {"fwd": f, "dgrad": dgrad, "wgrad": wgrad}[direction]
    if by_map:
        return Program(lambda *args: jax.lax.map(lambda one: fn(*one), args))
    return Program(jax.vmap(fn) if row.batch else fn)


def by_patches(item: Item) -> Program | None:
    """A forward convolution by algorithm="gemm", where that exists."""
    import jaxprims

    row = item.row
    if not isinstance(row, ConvRow) or item.direction != "fwd" or row.batch or row.transposed or row.groups > 1:
        return None
    if row.layout != "NHWC":
        return None

    def conv(x: Any, w: Any, strides: Any, padding: Any, *, rhs_dilation: Any, **options: Any) -> Any:
        return jaxprims.conv(
            x, w, strides=strides, padding=padding, kernel_dilation=rhs_dilation, algorithm="gemm", **options
        )

    return conv_program(row, item.dtype, "fwd", conv, jaxprims.conv_transpose)


# --- ops bound by memory --------------------------------------------------------------------------------------------------


def mem_program(item: Item, op: Callable[..., Any]) -> Program:
    """A direction of ``op(x, *parameters) -> (y, other results)``; y may be a pair.

    "bwd": the vjp's function, whose residuals are computed before. "fwd+bwd": y and the gradients as one program.
    """
    import jax

    row = item.row
    assert isinstance(row, MemRow)
    if item.direction == "fwd":
        return Program(op)
    outs = 2 if row.option("residual") and row.kind != "batch_norm" else 1

    def cotangent(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        return args[:-outs], args[-1] if outs == 1 else tuple(args[-outs:])

    def both(*args: Any) -> Any:
        primals, dy = cotangent(args)
        y, vjp, more = jax.vjp(op, *primals, has_aux=True)
        return y, more, vjp(dy)

    if item.direction == "fwd+bwd":
        return Program(both)
    pull = jax.jit(lambda *primals: jax.vjp(op, *primals, has_aux=True)[1])

    def prepare(*args: Any) -> tuple[Any, ...]:
        primals, dy = cotangent(args)
        return pull(*primals), dy

    return Program(lambda vjp, dy: vjp(dy), prepare)


def jaxprims_op(row: MemRow) -> Callable[..., Any]:
    """``op(x, *parameters[, residual]) -> (y, other results)`` by jaxprims."""
    import jaxprims as jp

    act, o = row.option("activation"), row.option
    residual = bool(o("residual"))

    def batch_norm(x: Any, scale: Any, bias: Any, *more: Any) -> Any:
        y, mean, var = jp.batch_norm(x, scale, bias, activation=act, residual=more[0] if more else None)  # type: ignore[arg-type]
        return y, (mean, var)

    def row_norm(norm: Callable[..., Any]) -> Callable[..., Any]:
        if residual:
            return lambda x, *p: (norm(x, *p[:-1], residual=p[-1]), ())
        return lambda *p: (norm(*p), ())

    def pool(fn: Callable[..., Any]) -> Callable[..., Any]:
        window, stride, pad = o("window"), o("stride"), o("pad")
        return lambda x: (fn(x, (window, window), strides=(stride, stride), padding=((pad, pad), (pad, pad))), ())

    ops: dict[str, Callable[..., Any]] = {
        "batch_norm": batch_norm,
        "batch_norm_inference": lambda *p: (jp.batch_norm_inference(*p, activation=act), ()),  # type: ignore[arg-type]
        "layer_norm": row_norm(jp.layer_norm),
        "rms_norm": row_norm(jp.rms_norm),
        "group_norm": lambda *p: (jp.group_norm(*p, num_groups=o("groups"), activation=act), ()),  # type: ignore[arg-type]
        "instance_norm": lambda *p: (jp.instance_norm(*p), ()),
        "local_response_norm": lambda x: (jp.local_response_norm(x, **LRN), ()),  # type: ignore[arg-type]
        "max_pool": pool(jp.max_pool),
        "avg_pool": pool(jp.avg_pool),
        "global_avg_pool": lambda x: (jp.global_avg_pool(x), ()),
        "softmax": lambda x: (jp.softmax(x), ()),
        "log_softmax": lambda x: (jp.log_softmax(x), ()),
        "bias_act": lambda x, b: (jp.bias_act(x, b, act), ()),  # type: ignore[arg-type]
        "transpose_layout": lambda x: (jp.transpose_layout(x, "NHWC", "NCHW"), ()),
    }
    return ops[row.kind]


def ours(item: Item) -> Program:
    """The item by jaxprims."""
    import jaxprims as jp

    if isinstance(item.row, ConvRow):
        return conv_program(item.row, item.dtype, item.direction, jp.conv_general_dilated, jp.conv_transpose)
    return mem_program(item, jaxprims_op(item.row))
