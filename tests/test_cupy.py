"""jaxprims.cupy. On a CPU: its core (jaxprims.exchange) with NumPy as the other library, its bookkeeping with a stand-in for
CuPy's streams. On a GPU (mark gpu): every claim about memory, order and values, against CuPy's and cupyx's own results."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import inspect
import os
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxprims
from jaxprims import exchange

NUMPY = exchange.Library(
    name="numpy",
    array=np.ndarray,
    from_dlpack=np.from_dlpack,
    compact=np.ascontiguousarray,
    pointer=lambda x: x.ctypes.data,
    empty=np.empty,
)


def aligned(shape: tuple[int, ...], dtype=np.float32, seed: int = 0) -> np.ndarray:
    """Random values at an address that JAX takes on a CPU."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    x = raw[start : start + size].view(dtype).reshape(shape)
    x[...] = np.random.default_rng(seed).normal(size=shape).astype(dtype)
    return x


@pytest.fixture
def into_jax(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the arrays that JAX was given, as JAX has them."""
    addresses: list[int] = []
    original = jax.dlpack.from_dlpack

    def spy(*args, **kwargs):
        x = original(*args, **kwargs)
        addresses.append(x.unsafe_buffer_pointer())
        return x

    monkeypatch.setattr(jax.dlpack, "from_dlpack", spy)
    return addresses


X, W, C = aligned((2, 8, 8, 4)), aligned((3, 3, 4, 6), seed=1), aligned((4,), seed=2)
CALLS = {
    "activation": ((X, "gelu"), {}),
    "adaptive_avg_pool": ((X, (3, 2)), {}),
    "adaptive_max_pool": ((X, [3, 2]), {"return_indices": True}),
    "avg_pool": ((X, (2, 2)), {"strides": (2, 2), "count_include_pad": False}),
    "batch_norm": ((X, C, C), {"axis": -1, "activation": "relu"}),
    "batch_norm_inference": ((X, C, C * C + 1, C, C), {}),
    "bias_act": ((X, C), {"activation": "silu", "residual": X}),
    "conv": ((X, W), {"bias": aligned((6,), seed=3), "strides": 2, "padding": [(1, 1), (1, 0)], "activation": "relu"}),
    "conv_general_dilated": ((X, W, (1, 1), "SAME"), {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
    "conv_transpose": ((X, W, (2, 2), "SAME"), {}),
    "global_avg_pool": ((X,), {"keepdims": True}),
    "global_max_pool": ((X,), {}),
    "group_norm": ((X, C, C), {"num_groups": 2}),
    "instance_norm": ((X,), {"eps": 1e-3}),
    "layer_norm": ((X, C, C), {"residual": X}),
    "local_response_norm": ((X,), {"size": 3}),
    "log_softmax": ((X,), {"axis": [1, 2]}),
    "lp_pool": ((X, 2.0, (2, 2)), {}),
    "max_pool": ((X, (3, 3)), {"strides": (2, 2), "padding": "SAME"}),
    "max_pool_with_argmax": ((X, (2, 2)), {}),
    "min_pool": ((X, (2, 2)), {}),
    "rms_norm": ((X, C), {}),
    "softmax": ((X,), {"axis": 1, "where": X > 0}),
    "transpose_layout": ((X, "NHWC", "NCHW"), {}),
}


def unpool_call():
    y, index = jaxprims.max_pool_with_argmax(X, (2, 2), strides=(2, 2))
    return (np.array(y), np.array(index), (2, 2)), {"strides": (2, 2), "output_size": (8, 8)}


# --- the core, with NumPy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted([*CALLS, "max_unpool"]))
def test_every_op_gives_what_it_gives_on_jax_arrays(name: str):
    args, kwargs = CALLS[name] if name in CALLS else unpool_call()
    got = exchange.wrap(getattr(jaxprims, name), NUMPY)(*args, **kwargs)
    want = getattr(jaxprims, name)(*args, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert type(g) is np.ndarray and g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_no_copy_in_and_none_out(into_jax: list[int]):
    out: list[int] = []

    def from_dlpack(y):
        out.append(y._array.unsafe_buffer_pointer())
        return np.from_dlpack(y)

    conv = exchange.wrap(jaxprims.conv, dataclasses.replace(NUMPY, from_dlpack=from_dlpack))
    y = conv(X, W)
    assert into_jax == [X.ctypes.data, W.ctypes.data]
    assert out == [y.ctypes.data]


def test_what_jax_cannot_take_is_copied_by_compact(into_jax: list[int]):
    x = aligned((4, 6))
    got = exchange.wrap(jaxprims.softmax, NUMPY)(x.T)
    assert into_jax and into_jax[0] != x.ctypes.data
    np.testing.assert_allclose(got, jaxprims.softmax(x.T), rtol=1e-6)


@pytest.mark.parametrize("shape, strides", [((1, 4), (999, 1)), ((3, 1, 4), (4, 0, 1)), ((1, 1, 4), (-3, 5, 1))])
def test_strides_of_axes_with_one_element_mean_nothing(shape, strides, into_jax: list[int]):
    x = np.lib.stride_tricks.as_strided(aligned((int(np.prod(shape)),)), shape, [4 * s for s in strides])
    got = exchange.wrap(jaxprims.softmax, NUMPY)(x, axis=0)
    assert into_jax == [x.ctypes.data]
    np.testing.assert_allclose(got, jaxprims.softmax(x.copy(), axis=0), rtol=1e-6)


def test_compiled_once_for_each_shape_and_static_argument():
    traced = []

    def op(x, axes, keep=False):
        traced.append((x.shape, axes, keep))
        return jnp.sum(x, tuple(axes), keepdims=keep)

    f = exchange.wrap(op, NUMPY)
    x = aligned((2, 3))
    for _ in range(3):
        assert f(x, [0]).shape == (3,)
        assert f(x, axes=[0]).shape == (3,)  # spelt in another way: a second trace
        assert f(x, [0], True).shape == (1, 3)
        assert f(aligned((5, 3)), [0]).shape == (3,)
    assert len(traced) == 4


def test_true_is_not_one():
    def op(x, flag):
        return x * (2 if flag is True else 3)

    f = exchange.wrap(op, NUMPY)
    assert f(np.ones(2, np.float32), True).tolist() == [2, 2]
    assert f(np.ones(2, np.float32), 1).tolist() == [3, 3]
    assert f(np.ones(2, np.float32), 1.0).tolist() == [3, 3]


def test_use_is_followed():
    f = exchange.wrap(jaxprims.softmax, NUMPY)
    f(X)
    with jaxprims.use("cuda"), pytest.raises(NotImplementedError, match="softmax"):
        if jax.default_backend() == "cpu":
            f(X)
        else:
            raise NotImplementedError("softmax")
    f(X)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, jnp.bfloat16])
def test_dtypes_stay(dtype):
    x = aligned((2, 4), np.dtype(dtype))
    if dtype is jnp.bfloat16:  # NumPy's DLPack has no bfloat16: the message is NumPy's
        with pytest.raises((BufferError, TypeError, RuntimeError)):
            exchange.wrap(jaxprims.softmax, NUMPY)(x)
        return
    y = exchange.wrap(jaxprims.softmax, NUMPY)(x)
    assert y.dtype == x.dtype
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(y, e / e.sum(-1, keepdims=True), rtol={8: 1e-14, 4: 1e-6, 2: 1e-3}[x.dtype.itemsize])


def test_wide_arrays_leave_the_setting_of_jax_alone():
    exchange.wrap(jaxprims.softmax, NUMPY)(np.ones((1, 2)))
    assert jnp.asarray(np.ones(2)).dtype == jnp.float32


def test_nothing_to_share():
    y = exchange.wrap(jaxprims.softmax, NUMPY)(np.zeros((0, 3), np.float32))
    assert type(y) is np.ndarray and y.shape == (0, 3) and y.dtype == np.float32


def test_a_result_never_shares_memory_with_an_argument():
    same = exchange.wrap(jaxprims.transpose_layout, NUMPY)(X, "NHWC", "NHWC")
    np.testing.assert_array_equal(same, X)
    assert not np.shares_memory(same, X)


def test_numpy_and_jax_arrays_may_stand_beside():
    class Array(np.ndarray):
        pass

    f = exchange.wrap(jaxprims.bias_act, dataclasses.replace(NUMPY, array=Array))
    x = aligned((2, 4))
    got = f(x.view(Array), jnp.ones(4), "relu", residual=x)
    np.testing.assert_allclose(got, np.maximum(2 * x + 1, 0), rtol=1e-6)
    with pytest.raises(TypeError, match=r"bias_act: no argument is a numpy\.Array"):
        f(x)


def test_errors_are_the_ops():
    with pytest.raises(ValueError, match="strides"):
        exchange.wrap(jaxprims.conv, NUMPY)(X, W, strides=0)


class Exporter(np.ndarray):
    """An array that notes how it was asked for."""

    asked: list
    device = None

    def __dlpack_device__(self):
        return self.device or np.ndarray.__dlpack_device__(self.view(np.ndarray))

    def __dlpack__(self, *, stream=None, **options):
        Exporter.asked.append(stream)
        return self.view(np.ndarray).__dlpack__(stream=stream, **options)


def test_the_host_waits_where_no_stream_is_named():
    log: list[str] = []
    Exporter.asked = log

    @contextlib.contextmanager
    def scope(x):
        log.append("scope")
        yield
        log.append("left")

    library = dataclasses.replace(
        NUMPY, array=Exporter, scope=scope, synchronize=lambda: log.append("waited"), compact=lambda x: x
    )
    exchange.wrap(jaxprims.softmax, library)(X.view(Exporter))
    assert log == ["scope", "waited", None, "left"]  # JAX names no stream on a CPU

    inward = exchange._Inward(X.view(Exporter), library)
    log.clear()
    with pytest.raises((RuntimeError, ValueError, BufferError)):
        inward.__dlpack__(stream=7)  # NumPy refuses a stream: it reached the array, and nobody waited
    assert log == [7]


def test_a_result_leaves_writable_and_keeps_its_owner():
    asked: dict = {}
    kept: list = []

    class Target:
        def __init__(self, y):
            asked.update(device=y.__dlpack_device__())
            y.__dlpack__(stream=None, max_version=(1, 0), copy=None)

        ctypes = types.SimpleNamespace(data=0)

    library = dataclasses.replace(NUMPY, from_dlpack=Target, keep=lambda r, o: kept.append((r, o)))
    result = exchange.wrap(jaxprims.softmax, library)(X)
    assert kept[0][0] is result and isinstance(kept[0][1], jax.Array)
    assert asked["device"][0] == 1


def test_a_backend_that_jax_lacks_is_named():
    if any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX has the backend here")
    x = X.view(Exporter)
    x.device = (2, 0)
    library = dataclasses.replace(NUMPY, array=Exporter, compact=lambda x: x)
    with pytest.raises(RuntimeError, match="numpy array lies .*doctor"):
        exchange.wrap(jaxprims.softmax, library)(x)


# --- the module, with a stand-in for CuPy -----------------------------------------------------------------------------------


class Event:
    done = False

    def __init__(self, **_):
        self.stream = None

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """jaxprims.cupy over NumPy under CuPy's names: what it keeps and when it lets go, without a GPU."""

    class Array(np.ndarray):
        device = types.SimpleNamespace(id=0)

    fake = types.ModuleType("cupy")
    fake.ndarray, fake.from_dlpack, fake.empty = Array, None, np.empty
    fake.ascontiguousarray = np.ascontiguousarray
    fake.cuda = types.SimpleNamespace(
        Event=Event, Device=lambda i: contextlib.nullcontext(), get_current_stream=lambda: "stream"
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "jaxprims.cupy", raising=False)
    module = importlib.import_module("jaxprims.cupy")
    yield module
    sys.modules.pop("jaxprims.cupy", None)
    if hasattr(jaxprims, "cupy"):
        del jaxprims.cupy


def test_memory_of_a_dropped_result_waits_for_its_stream(stand_in, monkeypatch):
    class Owner:
        pass

    def dropped() -> weakref.ref:
        result, owner = np.zeros(2).view(stand_in.cupy.ndarray), Owner()
        stand_in._keep(result, owner)
        return weakref.ref(owner)

    first, second = dropped(), dropped()
    gc.collect()
    assert first() is not None and second() is not None
    assert [event.stream for event, _ in stand_in._retired] == ["stream", "stream"]
    events = [event for event, _ in stand_in._retired]
    events[0].done = True
    stand_in._release()
    assert first() is None and second() is not None
    events[1].done = True
    stand_in._keep(np.zeros(1).view(stand_in.cupy.ndarray), Owner())  # the next call sweeps
    assert second() is None


def test_every_op_is_there_under_its_name(stand_in):
    public = set(jaxprims.__all__)
    assert set(stand_in.__all__) == public - stand_in.OTHERS and stand_in.OTHERS <= public
    assert set(stand_in.__all__) <= set(dir(stand_in))
    assert set(stand_in.__all__) == {*CALLS, "max_unpool"}, "a new op: add a call to CALLS, or its name to OTHERS"
    for name in stand_in.__all__:
        f = getattr(stand_in, name)
        assert f"jaxprims.{name}" in f.__doc__ and f.__name__ == name
        assert inspect.signature(f) == inspect.signature(getattr(jaxprims, name))


def test_without_cupy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "jaxprims.cupy", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'jaxprims\[cuda13\]'"):
        importlib.import_module("jaxprims.cupy")


def test_importing_jaxprims_imports_no_cupy():
    assert "jaxprims.cupy" not in sys.modules or "cupy" in sys.modules
    assert "exchange" not in jaxprims.__all__


# --- on a GPU ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    """(jaxprims.cupy, cupy)"""
    if os.environ.get("JAXPRIMS_REQUIRE_CUDA") != "1":
        pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'jaxprims[cuda13]'")
    cupy = importlib.import_module("cupy")
    return importlib.import_module("jaxprims.cupy"), cupy


def random(cupy, *shape, seed=0):
    return cupy.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def close(got, want, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(got.get().astype(np.float64), want.get().astype(np.float64), rtol=rtol, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted([*CALLS, "max_unpool"]))
def test_gpu_every_op_gives_what_it_gives_on_jax_arrays(gpu, name):
    jc, cupy = gpu
    args, kwargs = CALLS[name] if name in CALLS else unpool_call()
    want = getattr(jaxprims, name)(*args, **kwargs)
    there = lambda v: cupy.asarray(v) if isinstance(v, np.ndarray) else v  # noqa: E731
    got = getattr(jc, name)(*map(there, args), **{k: there(v) for k, v in kwargs.items()})
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert type(g) is cupy.ndarray and g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_allclose(g.get(), w, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_gpu_no_copy_in_and_none_out(gpu, into_jax, monkeypatch):
    jc, cupy = gpu
    owners: list = []
    library = dataclasses.replace(
        jc.LIBRARY, keep=lambda r, o: (owners.append(o.unsafe_buffer_pointer()), jc._keep(r, o))[0]
    )
    x, w = cupy.asarray(X), cupy.asarray(W)
    y = exchange.wrap(jaxprims.conv, library)(x, w)
    assert into_jax == [a.__cuda_array_interface__["data"][0] for a in (x, w)]
    assert owners == [y.__cuda_array_interface__["data"][0]]
    y += 1  # ours to write


@pytest.mark.gpu
def test_gpu_convolution_against_cupyx(gpu):
    jc, cupy = gpu
    signal = importlib.import_module("cupyx.scipy.signal")
    image = random(cupy, 33, 47)
    window = random(cupy, 5, 3, seed=1)
    y = jc.conv(image[None, :, :, None], window[:, :, None, None], padding="VALID", mode="convolution")
    close(y[0, :, :, 0], signal.convolve2d(image, window, mode="valid"), atol=1e-4)
    y = jc.conv(image[None, :, :, None], window[:, :, None, None], padding="VALID")
    close(y[0, :, :, 0], signal.correlate2d(image, window, mode="valid"), atol=1e-4)


@pytest.mark.gpu
def test_gpu_pools_against_cupyx(gpu):
    jc, cupy = gpu
    ndimage = importlib.import_module("cupyx.scipy.ndimage")
    image = random(cupy, 32, 40)
    x = image[None, :, :, None]
    close(jc.max_pool(x, (3, 3))[0, :, :, 0], ndimage.maximum_filter(image, 3)[1:-1, 1:-1], atol=0)
    close(jc.min_pool(x, (3, 3))[0, :, :, 0], ndimage.minimum_filter(image, 3)[1:-1, 1:-1], atol=0)
    close(jc.avg_pool(x, (3, 3))[0, :, :, 0], ndimage.uniform_filter(image, 3)[1:-1, 1:-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_gpu_rows_against_cupy(gpu, dtype):
    jc, cupy = gpu
    x = random(cupy, 17, 1000).astype(dtype)
    wide = x.astype(cupy.float64)
    tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3}[dtype]
    e = cupy.exp(wide - wide.max(-1, keepdims=True))
    results = {
        "softmax": (jc.softmax(x), e / e.sum(-1, keepdims=True)),
        "layer_norm": (jc.layer_norm(x, eps=0.0), (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)),
        "rms_norm": (jc.rms_norm(x, eps=0.0), wide / cupy.sqrt((wide**2).mean(-1, keepdims=True))),
        "relu": (jc.activation(x, "relu"), cupy.maximum(wide, 0)),
        "tanh": (jc.activation(x, "tanh"), cupy.tanh(wide)),
    }
    for got, want in results.values():
        assert got.dtype == dtype
        close(got, want, tolerance, tolerance)


@pytest.mark.gpu
def test_gpu_bfloat16(gpu):
    jc, cupy = gpu
    import ml_dtypes

    if tuple(int(v) for v in cupy.__version__.split(".")[:2]) < (14, 1):
        pytest.skip(f"CuPy {cupy.__version__} does not exchange bfloat16 (14.1 does)")
    x = cupy.asarray(X).astype(ml_dtypes.bfloat16)
    y = jc.softmax(x)
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.get(), np.asarray(jaxprims.softmax(jnp.asarray(X, jnp.bfloat16))))


@pytest.mark.gpu
def test_gpu_strided_and_unaligned_arrays_are_copied(gpu, into_jax):
    jc, cupy = gpu
    x = random(cupy, 64, 65).astype(cupy.float16)
    for view in (x.T, x[:, 1:], x[1:], x[::2], x.reshape(-1)[1:]):
        got = jc.softmax(view)
        close(got, jc.softmax(view.copy()), 0, 0)
    assert all(address % jc.ALIGNMENT == 0 for address in into_jax)


@pytest.mark.gpu
def test_gpu_calls_run_in_the_order_of_the_current_stream(gpu):
    jc, cupy = gpu
    n = 1 << 24
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.zeros((4, n // 4), cupy.float32)
        jc.activation(x, "relu")  # compiled before the race
        for i in range(1, 20):
            for _ in range(5):  # long enough to be seen if nobody waits
                x += 1
            y = jc.activation(x, "relu")
            x *= 0  # while y may still be computed
            x += 5 * i
            z = y + 1  # reads y on this stream
            assert float(z.min()) == float(z.max()) == 5 * (i - 1) + 5 + 1, i


@pytest.mark.gpu
def test_gpu_a_dropped_result_is_not_written_while_it_is_read(gpu):
    jc, cupy = gpu
    ones = jnp.ones((1 << 22,), jnp.float32)
    other = jax.jit(lambda v: v * 3)
    other(ones).block_until_ready()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.full((1 << 22,), 2.0, cupy.float32)
        jc.activation(x, "relu")
        busy = cupy.zeros((1 << 24,))
        for _ in range(20):
            for _ in range(40):
                busy = cupy.sin(busy)  # fills the stream
            y = jc.activation(x, "relu")
            total = y.sum()  # queued behind it
            del y
            other(ones)  # JAX, on its own stream, would take the memory at once
            assert float(total) == 2.0 * (1 << 22)
        stream.synchronize()
        jc._release()
        assert len(jc._retired) == 0


@pytest.mark.gpu
def test_gpu_writing_to_a_result_changes_no_later_one(gpu):
    jc, cupy = gpu
    x = cupy.asarray(X)
    first = jc.softmax(x)
    kept = first.copy()
    first[...] = 7
    close(jc.softmax(x), kept, 0, 0)
    same = jc.transpose_layout(x, "NHWC", "NHWC")
    same[...] = 0
    close(x, cupy.asarray(X), 0, 0)
