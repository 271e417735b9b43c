"""Every case under JAX's strict settings: no implicit promotion of dtypes or ranks, no implicit transfer to the device."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

import jaxprims
from tests.cases import Case
from tests.contract import CASES, as_tuple, case_id, close_all, floats

each_case = pytest.mark.parametrize("case", CASES, ids=case_id)


@contextlib.contextmanager
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def plain_objective(case: Case):
    """A scalar of the results that itself promotes nothing."""

    def scalar(*x):
        return sum(jnp.sum(jnp.sin(y).astype(jnp.float32)) for y in floats(case.fn)(*x))

    return scalar


@each_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_derivatives_promote_nothing(case: Case, dtype: str):
    x = case.operands(dtype)
    args = case.diff_args()
    scalar = plain_objective(case)

    def of_diff(*d):
        full = list(x)
        for i, v in zip(args, d, strict=True):
            full[i] = v
        return floats(case.fn)(*full)

    def everything(*x):
        primal = [x[i] for i in args]
        grads = jax.grad(scalar, args)(*x)
        return as_tuple(case.fn(*x)), grads, jax.jvp(of_diff, primal, primal)[1]

    want = jax.jit(everything)(*x)
    with strict():
        got = jax.jit(lambda *x: everything(*x))(*x)
        case.fn(*x)
        with jaxprims.use("cuda"):
            jax.jit(everything).trace(*x).lower(lowering_platforms=("cuda",))
    for g, w in zip(got, want, strict=True):
        close_all(g, w, 4.0, "strict")


@each_case
def test_second_order_and_vmap_promote_nothing(case: Case):
    x = case.operands("bfloat16")
    args = case.diff_args()
    scalar = plain_objective(case)

    def second(*x):
        return jax.jvp(lambda *d: jax.grad(lambda *d: scalar(*put(x, d)), tuple(range(len(args))))(*d), *twice(x))[1]

    def put(x, d):
        full = list(x)
        for i, v in zip(args, d, strict=True):
            full[i] = v
        return full

    def twice(x):
        return [tuple(x[i] for i in args)] * 2

    with strict():
        jax.jit(second).trace(*x).lower(lowering_platforms=("cpu",))
        for picked in range(len(x)):
            in_axes = tuple(0 if i == picked else None for i in range(len(x)))
            batched = [jnp.stack([a, a]) if i == picked else a for i, a in enumerate(x)]
            jax.jit(jax.vmap(case.fn, in_axes)).trace(*batched).lower(lowering_platforms=("cpu",))


BIASED = {
    "conv": lambda x, w, b: jaxprims.conv(x, w, b, activation="relu"),
    "conv silu": lambda x, w, b: jaxprims.conv(x, w, b, activation="silu"),
    "conv_transpose": lambda x, w, b: jaxprims.conv_transpose(x, w, (1, 1), "SAME", bias=b),
    "bias_act": lambda x, w, b: jaxprims.bias_act(x, b, "gelu"),
    "layer_norm": lambda x, w, b: jaxprims.layer_norm(x, b, b),
    "inference": lambda x, w, b: jaxprims.batch_norm_inference(x, b, b, b, b),
}


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_float32_parameters_beside_half_arrays(name: str, half: str):
    x, w, b = jnp.ones((2, 4, 4, 3), half), jnp.ones((3, 3, 3, 3), half), jnp.ones(3)
    with strict():
        fn = BIASED[name]
        g = jax.grad(lambda x, w, b: jnp.sum(fn(x, w, b).astype(jnp.float32)), (0, 1, 2))(x, w, b)
        jax.jvp(fn, (x, w, b), (x, w, b))
        jax.vmap(fn, (None, None, 0))(x, w, jnp.stack([b, b]))
    assert [a.dtype for a in g] == [x.dtype, w.dtype, b.dtype]


@each_case
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eager_calls_transfer_nothing(case: Case, dtype: str):
    x = case.operands(dtype)
    case.fn(*x)
    with jax.transfer_guard("disallow"):
        y = as_tuple(case.fn(*x))
        jax.jit(case.fn)(*x)
    assert all(a is not None for a in y)


KEEP = jnp.array([True, False, True])
RESIDUAL, BIAS = jnp.full((2, 3), 0.25), jnp.full(3, 0.5)
LINEAR = ("bias", "transpose_layout", "activation None")
ACTS = {
    "softmax": jaxprims.softmax,
    "log_softmax": lambda x: jaxprims.log_softmax(x, 0),
    "softmax fast": lambda x: jaxprims.softmax(x, None, algorithm="fast"),
    "softmax where": lambda x: jaxprims.softmax(x, where=KEEP),
    "bias": lambda x: jaxprims.bias_act(x, BIAS),
    "bias gelu residual": lambda x: jaxprims.bias_act(x, BIAS, "gelu", residual=RESIDUAL),
    "transpose_layout": lambda x: jaxprims.transpose_layout(x.reshape(2, 3, 1), "NWC", "NCW"),
    **{f"activation {n}": lambda x, n=n: jaxprims.activation(x, n) for n in ("relu", "elu", "silu", "mish", None)},
}


@pytest.mark.parametrize("name", ACTS)
def test_eager_derivatives_transfer_nothing(name: str):
    fn, x = ACTS[name], jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    y = fn(x)
    batch = jnp.stack([x, x])
    with jax.transfer_guard("disallow"):
        jax.jvp(fn, (x,), (x,))
        jax.linearize(fn, x)[1](x)
        jax.vjp(fn, x)[1](y)
        jax.jvp(lambda x: jax.jvp(fn, (x,), (x,))[1], (x,), (x,))
        if name in LINEAR:
            jax.linear_transpose(fn, x)(y)
        else:  # of a linear function the tangent is JAX's own zeros, which it transfers
            jax.jvp(lambda x: jax.vjp(fn, x)[1](y)[0], (x,), (x,))
        if "where" not in name:  # JAX's own broadcast of a mask under vmap transfers
            jax.vmap(fn)(batch)


def test_nan_is_seen_by_debug_nans_and_checks_of_results():
    from jax.experimental import checkify

    x = jnp.array([[jnp.inf, 1.0]])
    for fn in (jaxprims.softmax, jax.jit(jaxprims.softmax)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            fn(x)

    def checked(x):
        y = jaxprims.softmax(x)
        checkify.check(~jnp.isnan(y).any(), "a result is nan")
        return y

    assert "a result is nan" in checkify.checkify(checked)(x)[0].get()


@pytest.mark.parametrize("fn", [jaxprims.softmax, jaxprims.log_softmax])
def test_a_mask_promotes_and_transfers_nothing(fn):
    x, keep = jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16), jnp.array([True, False, True])
    want = fn(x, where=keep)
    with strict(), jax.transfer_guard("disallow"):
        close_all(fn(x, where=keep), want, 0.0, "where")
