"""The parity table of the Flax layers, shared by the tests of linen and of nnx, and how two layers are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxprims

OUT = 6  # channels that a convolution of the table gives
normal = jax.nn.initializers.normal(0.5)


@dataclass(frozen=True)
class LayerCase:
    """One layer with arguments of Flax's, on an input of ``shape``."""

    layer: str
    name: str
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    mask: tuple[int, ...] | None = None  # shape of the mask that the call gets
    average: bool = False  # BatchNorm by its running statistics
    nnx: bool = True  # nnx takes it too
    kernels: tuple[str, ...] = ()  # custom calls of a GPU's program; default: those of the layer

    @property
    def id(self) -> str:
        return f"{self.layer}-{self.name}"

    def data(self, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(np.random.default_rng(seed).standard_normal(self.shape) * 1.5 + 0.3, dtype)

    def call(self) -> dict[str, Any]:
        """Keywords of the call."""
        mask = {} if self.mask is None else {"mask": np.random.default_rng(5).random(self.mask) < 0.8}
        return mask | ({"use_running_average": self.average} if self.layer == "BatchNorm" else {})

    def linen(self, nn: Any, **extra: Any) -> Any:
        positional = {"Conv": (OUT,), "ConvTranspose": (OUT,)}.get(self.layer, ())
        return getattr(nn, self.layer)(*positional, **self.options, **extra)

    def nnx_layer(self, nnx: Any, seed: int = 0, **extra: Any) -> Any:
        channels = self.shape[self.options.get("axis", self.options.get("feature_axes", -1))]
        positional = (channels, OUT) if self.layer.startswith("Conv") else (channels,)
        return getattr(nnx, self.layer)(*positional, **self.options, **extra, rngs=nnx.Rngs(seed))

    def custom_calls(self) -> tuple[str, ...]:
        if self.kernels:
            return self.kernels
        if self.layer.startswith("Conv"):
            return ("conv_fused",) if self.options.get("use_bias", True) else ("conv",)
        return ("norm_apply",) if self.average else ("norm",)


def _of(layer: str, *rows: tuple) -> list[LayerCase]:
    return [LayerCase(layer, name, shape, options, **(rest[0] if rest else {})) for name, shape, options, *rest in rows]


def _triangle(*shape: int) -> np.ndarray:
    return np.tril(np.ones(shape, np.float32))


IMAGE = (2, 6, 5, 4)
K3 = dict(kernel_size=(3, 3))
NO_NNX = dict(nnx=False)

CASES: list[LayerCase] = [
    *_of(
        "Conv",
        ("same", IMAGE, K3),
        ("stride2", (2, 8, 7, 4), dict(K3, strides=2)),
        ("strides-none", IMAGE, dict(K3, strides=None, input_dilation=None, kernel_dilation=None)),
        ("valid", IMAGE, dict(kernel_size=(3, 2), padding="VALID")),
        ("same-lower", IMAGE, dict(kernel_size=(2, 4), padding="SAME_LOWER")),
        ("int-padding", IMAGE, dict(K3, padding=2)),
        ("pairs", IMAGE, dict(K3, padding=((2, 0), 1), strides=(1, 2), kernel_dilation=(1, 2))),
        ("circular", IMAGE, dict(K3, padding="CIRCULAR")),
        ("circular-even-dilated", (2, 7, 6, 4), dict(kernel_size=(2, 3), padding="CIRCULAR", kernel_dilation=(3, 1))),
        ("reflect", IMAGE, dict(K3, padding="REFLECT", strides=2)),
        ("input-dilation", (2, 5, 4, 4), dict(K3, padding=2, input_dilation=2)),
        ("groups", IMAGE, dict(K3, feature_group_count=2, use_bias=False)),
        ("depthwise", (2, 6, 5, 6), dict(K3, feature_group_count=6, bias_init=normal)),
        ("masked", IMAGE, dict(K3, mask=_triangle(3, 3, 4, OUT))),
        ("1d-int-kernel", (2, 9, 4), dict(kernel_size=3)),
        ("1d-causal", (2, 9, 4), dict(kernel_size=(3,), padding="CAUSAL", kernel_dilation=2)),
        ("3d", (2, 4, 3, 5, 4), dict(kernel_size=(3, 1, 2), strides=(1, 2, 1))),
        ("one-image", (6, 5, 4), K3),
        ("two-batch-axes", (2, 3, 6, 5, 4), dict(K3, precision=jax.lax.Precision.HIGHEST)),
        ("no-window-fits", (2, 2, 5, 4), dict(K3, padding="VALID"), dict(kernels=("conv", "bias_act"))),
    ),
    *_of(
        "ConvTranspose",
        ("stride2", IMAGE, dict(K3, strides=(2, 2))),
        ("valid", IMAGE, dict(kernel_size=(3, 2), strides=(2, 3), padding="VALID", bias_init=normal)),
        ("pairs", IMAGE, dict(K3, strides=(2, 1), padding=((2, 1), 1))),
        ("transposed-kernel", IMAGE, dict(K3, strides=(2, 2), transpose_kernel=True)),
        ("dilated", IMAGE, dict(K3, kernel_dilation=(2, 1), use_bias=False)),
        (
            "circular",
            IMAGE,
            dict(kernel_size=(4, 3), strides=(2, 2), padding="CIRCULAR", bias_init=normal),
            dict(kernels=("conv", "bias_act")),
        ),
        (
            "circular-transposed",
            IMAGE,
            dict(kernel_size=(6, 6), strides=(2, 2), padding="CIRCULAR", transpose_kernel=True),
            dict(kernels=("conv", "bias_act")),
        ),
        ("masked", IMAGE, dict(K3, mask=_triangle(3, 3, 4, OUT))),
        ("1d", (2, 9, 4), dict(kernel_size=3, strides=(3,))),
        ("3d", (2, 3, 2, 4, 4), dict(kernel_size=(2, 3, 1), strides=(2, 1, 1))),
        ("one-image", (6, 5, 4), K3),
        ("two-batch-axes", (2, 3, 6, 5, 4), K3),
    ),
    *_of(
        "BatchNorm",
        ("train", IMAGE, {}),
        ("average", IMAGE, {}, dict(average=True)),
        ("channels-first", (2, 4, 6, 5), dict(axis=1, momentum=0.9, epsilon=1e-3)),
        ("channels-first-average", (2, 4, 6, 5), dict(axis=1), dict(average=True)),
        ("rows", (8, 4), dict(use_fast_variance=False)),
        ("two-axes", (5, 4, 6), dict(axis=(1, 2)), NO_NNX),
        ("no-scale", IMAGE, dict(use_scale=False)),
        ("no-bias", IMAGE, dict(use_bias=False, scale_init=normal)),
        ("bare", IMAGE, dict(use_bias=False, use_scale=False)),
        ("mask", IMAGE, {}, dict(mask=(2, 6, 1, 1))),
        ("mask-of-pixels", IMAGE, {}, dict(mask=(2, 6, 5, 4))),
        ("own-reductions", IMAGE, dict(force_float32_reductions=False), NO_NNX),
        ("own-reductions-average", IMAGE, dict(force_float32_reductions=False), dict(average=True, nnx=False)),
    ),
    *_of(
        "LayerNorm",
        ("last", (3, 5, 8), {}),
        ("no-scale", (3, 5, 8), dict(use_scale=False, epsilon=1e-3)),
        ("no-bias", (3, 5, 8), dict(use_bias=False, use_fast_variance=False)),
        ("images", IMAGE, dict(reduction_axes=(1, 2, 3))),
        ("images-all", IMAGE, dict(reduction_axes=(-1, 1, 2), feature_axes=(1, 2, 3)), NO_NNX),
        ("other-axis", IMAGE, dict(reduction_axes=1, feature_axes=-1)),
        ("mask", (3, 5, 8), {}, dict(mask=(3, 5, 8))),
        ("mask-of-positions", IMAGE, dict(reduction_axes=(1, 2, 3)), dict(mask=(1, 6, 5, 1))),
    ),
    *_of(
        "RMSNorm",
        ("last", (3, 5, 8), dict(scale_init=normal)),
        ("no-scale", (3, 5, 8), dict(use_scale=False)),
        ("images", IMAGE, dict(reduction_axes=(1, 2, 3), epsilon=1e-3)),
        ("mask", (3, 5, 8), {}, dict(mask=(3, 1, 8))),
    ),
    *_of(
        "GroupNorm",
        ("groups", (2, 6, 5, 8), dict(num_groups=4)),
        ("sizes", (2, 6, 5, 8), dict(num_groups=None, group_size=2, use_bias=False)),
        ("one-group", (2, 6, 8), dict(num_groups=1, use_scale=False)),
        ("rows", (3, 8), dict(num_groups=2)),
        ("axes", (2, 3, 5, 8), dict(num_groups=2, reduction_axes=(2, 3)), NO_NNX),
        ("mask", (2, 6, 5, 8), dict(num_groups=4), dict(mask=(2, 6, 1, 8))),
    ),
    *_of(
        "InstanceNorm",
        ("images", IMAGE, {}),
        ("channels-first", (2, 4, 6, 5), dict(feature_axes=1)),
        ("series", (2, 9, 4), dict(use_scale=False, bias_init=normal)),
        ("mask", IMAGE, {}, dict(mask=(2, 6, 5, 1))),
    ),
]

BY_ID = {case.id: case for case in CASES}
# One of each, for what does not depend on the arguments.
PLAIN = [
    BY_ID[name]
    for name in (
        "Conv-same",
        "ConvTranspose-stride2",
        "BatchNorm-train",
        "BatchNorm-average",
        "LayerNorm-last",
        "RMSNorm-last",
        "GroupNorm-groups",
        "InstanceNorm-images",
    )
]


def fast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """jit that compiles in less time (the numbers are float32's all the same); inside another trace, fn itself."""
    compiled = jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})

    def call(*args: Any) -> Any:
        traced = any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(args))
        return fn(*args) if traced else compiled(*args)

    return call


# What XLA's own code of these layers is made of.
XLA = {
    "conv_general_dilated",
    "reduce_sum",
    "rsqrt",
    "square",
    "reduce_window_max",
    "reduce_window",
    "reduce_max",
    "exp",
}


def case_id(value: Any) -> str | None:
    return value.id if isinstance(value, LayerCase) else None


def primitives(fn: Callable[..., Any], *args: Any) -> set[str]:
    """Names of the primitives in fn's jaxpr."""
    found: set[str] = set()

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


def custom_calls(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Custom calls of the program that a GPU gets, where a case that no kernel takes is an error."""
    import re

    with jaxprims.use("cuda"):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.convolution" not in text and "stablehlo.reduce" not in text
    return sorted(t.removeprefix("jaxprims_") for t in re.findall(r"custom_call @(\w+)", text))


def close(got: Any, want: Any, tol: float = 1e-5) -> None:
    """Two trees alike: structure, shapes, dtypes, and |got - want| <= tol * max|want| for every array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert g.shape == w.shape and g.dtype == w.dtype, f"{where}: {g.shape} {g.dtype}, expected {w.shape} {w.dtype}"
        wide = np.complex128 if np.iscomplexobj(w) else np.float64
        g, w = np.asarray(g, wide), np.asarray(w, wide)
        scale = max(float(np.abs(w).max(initial=0)), 1e-3)
        worst = float(np.abs(g - w).max(initial=0))
        assert worst <= tol * scale, f"{where}: worst error {worst:.3g} > {tol:.3g} x {scale:.3g}"


def equal(got: Any, want: Any) -> None:
    close(got, want, 0.0)


def stir(tree: Any, seed: int = 3) -> Any:
    """The tree's arrays moved a little, so that no scale is 1 and no bias 0; a variance stays positive."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: (a + jnp.asarray(rng.uniform(0, 0.4, a.shape), a.dtype)).astype(a.dtype), tree)


def objective(y: jax.Array) -> jax.Array:
    """A scalar whose gradient differs from element to element."""
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)) * weights)
