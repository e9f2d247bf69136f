"""The compared methods: a way to train, its dtype and its variant, such as `ddp:fp32:halved`.

- `plain`: plain PyTorch in one process on this machine, on all cores.
- `ddp`: `torch.distributed` DDP over gloo; `halved`: gradients are sent as bf16.
- `fsdp`: FSDP2 (`fully_shard`) over gloo. Weights stay gathered from forward to backward pass;
  `reshard`: they are freed and gathered twice.
- `pipeline`: `torch.distributed.pipelining` over gloo. Two stages per device in a V if embedding
  and head share a trained weight, else one stage each and 1F1B; `v`, `1f1b`, `gpipe` force one.
- `hivemind`: `hivemind.Optimizer`, which averages gradients in every step; `fp16`, `8bit`:
  compression of gradients.
- `tiles`, `stages`, `auto`: `cleave train --server`, devices by `cleave join`; `off`, `on`: coding;
  `apart`: the server's computer does not compute layers.
- `resident`: the same with `--method stages --state devices`.
- `virtual`: stages on emulated devices, in virtual time; `off`, `on`: coding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

LOSS_LIMITS: Final = {"fp32": 1e-4, "bf16": 2e-2}
"""The largest relative difference of losses, by dtype."""


class Way(Enum):
    """A way to train; the values are those of `--methods`."""

    PLAIN = "plain"
    DDP = "ddp"
    FSDP = "fsdp"
    PIPELINE = "pipeline"
    HIVEMIND = "hivemind"
    TILES = "tiles"
    STAGES = "stages"
    AUTO = "auto"
    RESIDENT = "resident"
    VIRTUAL = "virtual"

    @property
    def of_cleave(self) -> bool:
        """Return whether this is one of Cleave's methods."""
        return self in (Way.TILES, Way.STAGES, Way.AUTO, Way.RESIDENT, Way.VIRTUAL)

    @property
    def needs_links(self) -> bool:
        """Return whether the method runs processes behind links."""
        return self not in (Way.PLAIN, Way.VIRTUAL)


VARIANTS: Final[dict[Way, tuple[str, ...]]] = {
    Way.PLAIN: (),
    Way.DDP: ("halved",),
    Way.FSDP: ("reshard",),
    Way.PIPELINE: ("v", "1f1b", "gpipe"),
    Way.HIVEMIND: ("fp16", "8bit"),
    **{way: ("off", "on", "apart") for way in Way if way.of_cleave},
    Way.VIRTUAL: ("off", "on"),
}


@dataclass(frozen=True, order=True)
class Method:
    """A way to train, with its dtype.

    Attributes:
        way: the way to train.
        dtype: `fp32` or `bf16`.
        variant: one of the way's variants; empty for the default settings.
    """

    way: Way
    dtype: str
    variant: str = ""

    @property
    def name(self) -> str:
        """Return the method's name as on the command line."""
        return ":".join(filter(None, (self.way.value, self.dtype, self.variant)))

    @classmethod
    def of(cls, text: str) -> Method:
        """Parse a method's name.

        Raises:
            ValueError: when the text names no method.
        """
        name, dtype, variant, *more = [*text.strip().split(":"), "", ""][:4]
        ways = {way.value: way for way in Way}
        if name not in ways:
            raise ValueError(f"{text!r} names no way to train; use {', '.join(ways)}")
        way = ways[name]
        if (dtype or "fp32") not in LOSS_LIMITS or any(more):
            raise ValueError(f"{text!r} has no dtype that is measured; use {name}:fp32 or :bf16")
        if variant and variant not in VARIANTS[way]:
            known = ", ".join(VARIANTS[way]) or "none"
            raise ValueError(f"{text!r}: {name} has no variant {variant!r}; its variants: {known}")
        return cls(way, dtype or "fp32", variant)
