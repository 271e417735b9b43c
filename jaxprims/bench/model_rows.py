"""Which training steps are timed, and by whom: rows (a model at a batch size) and contenders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# In the order in which a row is measured: the rivals first, so that ours has its ratio as soon as it is written.
CONTENDERS = ("flax", "torch", "torch.compile", "jaxprims", "jaxprims-recompute")
RIVALS = ("flax", "torch", "torch.compile")
SLOW = ("torch.compile",)  # only when asked for

# The headline first: a run that is cut short has it. None: the registry's batch.
ROWS: tuple[tuple[str, int | None], ...] = (
    ("resnet50", 256), ("resnet50", 32), ("alexnet", None), ("convnext_t", None), ("unet_block", None),
    ("unet3d_block", None), ("causal_conv", None), ("dqn", None), ("resnet18", None),
)  # fmt: skip
QUICK = (("resnet50", 256), ("alexnet", None), ("unet_block", None))
UNITS = {"causal_conv": "sequences", "dqn": "frames"}  # else images
EXPECTED_SECONDS = {"flax": 20, "torch": 10, "torch.compile": 45, "jaxprims": 12, "jaxprims-recompute": 12}  # a guess


@dataclass(frozen=True)
class ModelRow:
    """One model at one batch size. ``small``: the registry's size for CPUs, whatever the batch."""

    model: str
    batch: int
    dtype: str = "bf16"
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} small" if self.small else f"{self.model} N{self.batch}"

    @property
    def unit(self) -> str:
        return UNITS.get(self.model, "images")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input."""
        from jaxprims.models import MODELS

        spec = MODELS[self.model]
        return tuple(spec.small.shape if self.small else spec.input_shape(self.batch))

    @property
    def count(self) -> int:
        """Units in a step: the leading axis of x, of the mapped agents (agents, batch, ...) both."""
        return math.prod(self.shape[: 2 if self.model == "dqn" else 1])


def select(
    rows: str = "", *, quick: bool = False, batches: Sequence[int] = (), dtype: str = "bf16", small: bool = False
) -> list[ModelRow]:
    """The rows of the models whose name holds one of ``rows`` ("a,b"), at ``batches`` if given; all that the registry has.

    >>> [row.name for row in select("resnet50")]
    ['resnet50 N256', 'resnet50 N32']
    """
    from jaxprims.models import MODELS

    table = list(QUICK if quick else ROWS)
    table += [(name, None) for name in MODELS if name not in {n for n, _ in ROWS} and not quick]
    words = [word for word in rows.split(",") if word]
    out = []
    for name, batch in table:
        if name in MODELS and (not words or any(word in name for word in words)):
            for n in batches or (batch or MODELS[name].batch,):
                out.append(ModelRow(name, n, dtype, small))
    if small:  # one size whatever the batch
        out = [row for i, row in enumerate(out) if row.model not in {r.model for r in out[:i]}]
    return list(dict.fromkeys(out))
