"""What all families share: argument forms, the library's fit to a GPU and to jaxlib, sharding rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxprims
from jaxprims.core import checks, ffi
from jaxprims.core.primitive import REGISTRY
from jaxprims.core.sharding import Rule, assign, spec_of


@pytest.mark.parametrize(
    "capability, archs, runs",
    [
        ((8, 0), "sm_80,compute_80,sm_90a", True),
        ((8, 9), "sm_80", True),  # machine code of the major version runs on later minor ones
        ((9, 0), "sm_80", False),
        ((9, 0), "sm_80,compute_80", True),  # through PTX
        ((9, 0), "sm_90a", True),
        ((10, 0), "sm_90a", False),  # "a" is that chip alone
        ((12, 0), "sm_80,compute_80,sm_90a", True),
        ((7, 5), "sm_80,compute_80,sm_90a", False),
        ((8, 0), "sm_86", False),
    ],
)
def test_which_gpus_a_build_runs_on(capability, archs, runs):
    assert ffi.fits(capability, archs) is runs


def test_the_runtime_api_is_read():
    major, minor = ffi.runtime_api()
    assert major == 0 and minor >= 3


@pytest.mark.parametrize(
    "padding, want",
    [
        ("SAME", ((2, 3), (1, 1))),
        ("SAME_LOWER", ((3, 2), (1, 1))),
        ("valid", ((0, 0), (0, 0))),
        (2, ((2, 2), (2, 2))),
        ((1, (0, -3)), ((1, 1), (0, -3))),
    ],
)
def test_forms_of_padding(padding, want):
    assert checks.canonical_padding(padding, (224, 9), (7, 3), (2, 1), (1, 1)) == want


def test_causal_padding():
    assert checks.canonical_padding("CAUSAL", (9,), (4,), (1,), (2,)) == ((6, 0),)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: checks.canonical_tuple(0, 2, "strides"), ValueError, ["strides=0", "at least 1"]),
        (lambda: checks.canonical_tuple((1, 2, 3), 2, "strides"), ValueError, ["(1, 2, 3)", "2 ints"]),
        (lambda: checks.canonical_tuple(1.5, 2, "strides"), TypeError, ["strides", "1.5", "int"]),
        (lambda: checks.canonical_tuple("2", 1, "strides"), TypeError, ["'2'"]),
        (lambda: checks.canonical_int(2**31, "dilation"), ValueError, ["dilation=2147483648", "2^31"]),
        (lambda: checks.canonical_padding("FULL", (9,), (3,), (1,), (1,)), ValueError, ["'FULL'", "'SAME'"]),
        (lambda: checks.canonical_padding("CIRCULAR", (9,), (3,), (1,), (1,)), ValueError, ["wrap"]),
        (lambda: checks.canonical_padding("CAUSAL", (9, 9), (3, 3), (1, 1), (1, 1)), ValueError, ["one spatial axis"]),
        (lambda: checks.canonical_padding(((1, 2, 3),), (9,), (3,), (1,), (1,)), ValueError, ["pair"]),
        (lambda: checks.canonical_axis(3, 2), ValueError, ["axis=3", "-2 to 1"]),
        (lambda: checks.canonical_axis(0, 0), ValueError, ["axis=0", "scalar", "reshape it to (1,)"]),
        (lambda: checks.canonical_axes((0, -2), 2), ValueError, ["twice"]),
        (lambda: checks.check_layout("NCWH", 4), ValueError, ["'NCWH'", "'NCHW'"]),
        (lambda: checks.check_layout("NWC", 4), ValueError, ["'NWC'", "'NHWC'"]),
        (lambda: checks.check_float(jnp.ones(2, jnp.int32), "x"), TypeError, ["x has dtype int32", "jnp.asarray(x, jnp.float32)"]),
        (lambda: checks.check_same_dtype({"x": 1.0, "w": jnp.ones(2, jnp.bfloat16), "b": 1j}), TypeError, ["b: complex"]),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_remedy(call, error, words):
    with pytest.raises(error) as e:
        call()
    for word in words:
        assert word in str(e.value), e.value


def test_rules():
    rule = Rule("n h c, h k -> n k, c", whole=("h",))
    assert rule.operands == (("n", "h", "c"), ("h", "k")) and rule.reductions == ()
    assert not rule.leading and Rule("n c -> n c, n", whole=("c",)).leading
    specs = [P(("a", "b"), "c", None), P(None, "a"), P(), P()]
    shapes = [(8, 3, 4), (3, 6), (8, 6), (4,)]
    axes = assign(rule, specs, shapes, {"a": 2, "b": 2, "c": 3})
    assert axes == {"n": ("a", "b")}  # h is whole, "a" is taken
    assert spec_of(rule.results[0], axes) == P(("a", "b"), None)
    assert assign(rule, [P("c"), P(), P(), P()], shapes, {"c": 3}) == {}  # 8 images do not divide by 3


def test_every_primitive_refuses_foreign_params():
    for op in REGISTRY.values():
        with pytest.raises((TypeError, AttributeError)):
            op.primitive.bind(jnp.ones(3), params="x", backend="auto")


def test_a_library_for_a_newer_jaxlib_is_not_registered(monkeypatch):
    """The versions are compared before anything is registered: a warning with the remedy, and the reference runs."""
    if not ffi.status().path:
        pytest.skip("no library is built here")
    monkeypatch.setattr(ffi, "runtime_api", lambda: (0, 1))
    ffi._load.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"FFI API 0\.\d+.*speaks 0\.1.*pip install"):
            assert not ffi.status().loaded
    finally:
        monkeypatch.undo()
        ffi._load.cache_clear()
    assert ffi.status().loaded


@pytest.mark.parametrize("named", [True, False])
def test_a_library_that_does_not_load_is_mended_where_it_comes_from(named, monkeypatch, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.delenv("JAXPRIMS_LIBRARY", raising=False)
    if named:
        monkeypatch.setenv("JAXPRIMS_LIBRARY", str(broken))
    else:
        monkeypatch.setattr(ffi, "_find", lambda: broken)
    ffi._load.cache_clear()
    try:
        remedy = ffi.status().remedy or ""
        assert ("unset JAXPRIMS_LIBRARY" in remedy) == named and ("pip install" in remedy) != named
    finally:
        monkeypatch.undo()
        ffi._load.cache_clear()


def test_dir_has_the_public_names():
    import subprocess
    import sys

    code = (
        "import jaxprims as j; print(*(n for n in dir(j) if not n.startswith('__')));"
        "import jaxprims.bench; print('bench' in dir(j), j.core.__name__, callable(j.conv), all(hasattr(j, n) for n in dir(j)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names, rest = done.stdout.splitlines()
    assert names.split() == sorted(jaxprims.__all__), done.stderr
    assert rest == "True jaxprims.core True True"
    assert "__version__" in dir(jaxprims)


def test_without_a_library_the_reference_runs_and_status_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXPRIMS_LIBRARY", str(tmp_path / "absent.so"))
    ffi._load.cache_clear()
    try:
        status = jaxprims.status()
        assert not status.loaded and "does not load" in status.reason and status.remedy
        y = jax.jit(jaxprims.softmax)(jnp.zeros((1, 4)))
        assert float(y[0, 0]) == 0.25
    finally:
        monkeypatch.undo()
        ffi._load.cache_clear()
