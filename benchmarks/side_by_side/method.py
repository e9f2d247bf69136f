"""The methods that are compared: a way to train, its dtype and its variant, as `ddp:fp32:halved`.

- `plain`: plain PyTorch in one process of this machine, on all of its cores.
- `ddp`: `torch.distributed` DDP over gloo; `halved`: gradients travel as bf16.
- `fsdp`: FSDP2 (`fully_shard`) over gloo. Weights stay whole from the forward to the backward pass;
  `reshard`: they do not, and are gathered twice.
- `pipeline`: `torch.distributed.pipelining` over gloo. Two stages a device in a V where embedding
  and head share a weight that is trained, one stage each and 1F1B else; `v`, `1f1b`, `gpipe`: that.
- `hivemind`: `hivemind.Optimizer`, which averages gradients in every step; `fp16`, `8bit`: they
  travel so.
- `tiles`, `stages`, `auto`: `cleave train --server`, devices by `cleave join`; `off`, `on`: coding.
- `virtual`: stages on emulated devices, in virtual time; `off`, `on`: coding.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

LOSS_LIMITS: Final = {"fp32": 1e-4, "bf16": 2e-2}
"""The largest relative difference of losses, by dtype."""


class Way(Enum):
    """What trains; the values are those of `--methods`."""

    PLAIN = "plain"
    DDP = "ddp"
    FSDP = "fsdp"
    PIPELINE = "pipeline"
    HIVEMIND = "hivemind"
    TILES = "tiles"
    STAGES = "stages"
    AUTO = "auto"
    VIRTUAL = "virtual"

    @property
    def of_cleave(self) -> bool:
        """Say whether it is Cleave's."""
        return self in (Way.TILES, Way.STAGES, Way.AUTO, Way.VIRTUAL)

    @property
    def needs_links(self) -> bool:
        """Say whether it runs processes behind links."""
        return self not in (Way.PLAIN, Way.VIRTUAL)


VARIANTS: Final[dict[Way, tuple[str, ...]]] = {
    Way.PLAIN: (),
    Way.DDP: ("halved",),
    Way.FSDP: ("reshard",),
    Way.PIPELINE: ("v", "1f1b", "gpipe"),
    Way.HIVEMIND: ("fp16", "8bit"),
    **{way: ("off", "on") for way in Way if way.of_cleave},
}


@dataclass(frozen=True, order=True)
class Method:
    """A way to train, with its dtype.

    Attributes:
        way: what trains.
        dtype: `fp32` or `bf16`.
        variant: one of the way's variants; empty for its usual settings.
    """

    way: Way
    dtype: str
    variant: str = ""

    @property
    def name(self) -> str:
        """Return it as it is given on the command line."""
        return ":".join(filter(None, (self.way.value, self.dtype, self.variant)))

    @classmethod
    def of(cls, text: str) -> Method:
        """Read one.

        Raises:
            ValueError: when it is none.
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
