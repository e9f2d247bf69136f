"""What a row of the comparison is measured with: model, batch, links, adapters, fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from benchmarks.links import MBIT

SCHEDULE: Final = "constant"
"""Of the learning rate: it may not depend on how many steps a run has, as losses are compared."""

WARMUP_STEPS: Final = 1
_SHORT_BATCH: Final = 2048  # tokens, up to which sequences are short


class Fault(Enum):
    """What happens to the last device in the middle of a step."""

    NONE = "none"
    STOP = "stop"
    """It is stopped (SIGSTOP) for a minute, and goes on."""

    KILL = "kill"
    """It is killed (SIGKILL), and does not come back."""


@dataclass(frozen=True, order=True)
class Link:
    """The link of each device.

    Attributes:
        down_mbit, up_mbit: its rates.
    """

    down_mbit: float
    up_mbit: float

    @property
    def name(self) -> str:
        """Return it as it is given on the command line."""
        return f"{self.down_mbit:g}/{self.up_mbit:g}"

    @property
    def down(self) -> float:
        """Return bytes a second to the device."""
        return self.down_mbit * MBIT

    @property
    def up(self) -> float:
        """Return bytes a second from the device."""
        return self.up_mbit * MBIT

    @classmethod
    def of(cls, text: str) -> Link:
        """Read one, as `100/20`.

        Raises:
            ValueError: when it is none.
        """
        down, _, up = text.partition("/")
        try:
            link = cls(float(down), float(up))
        except ValueError:
            raise ValueError(f"{text!r} is no link; give Mbit/s down and up, as 100/20") from None
        if min(link.down_mbit, link.up_mbit) <= 0:
            raise ValueError(f"the link {text!r} carries nothing; give rates above 0, as 100/20")
        return link


@dataclass(frozen=True)
class Setting:
    """What a method is measured with.

    Attributes:
        model: its name: one of the registry, or of `benchmarks.side_by_side.shapes`.
        tokens: of a step, on all devices together.
        seq: tokens of a sequence.
        link: of each device.
        rank: of the adapters that are trained alone; 0 to train the model.
        fault: what happens to the last device.
        devices: how many.
        round_trip_ms: from a device to this machine and back.
        memory: what a device offers, to Cleave.
        cores: of this machine, for each device; 0 where they share them all.
    """

    model: str
    tokens: int
    seq: int
    link: Link
    rank: int = 0
    fault: Fault = Fault.NONE
    devices: int = 4
    round_trip_ms: float = 20.0
    memory: str = "2GB"
    cores: float = 0.0

    def __post_init__(self) -> None:
        if min(self.devices, self.tokens, self.seq) < 1:
            raise ValueError(
                f"{self.tokens} tokens in sequences of {self.seq} on {self.devices} devices: "
                f"give 1 or more of each"
            )
        if min(self.rank, self.round_trip_ms, self.cores) < 0:
            raise ValueError(
                f"a rank of {self.rank}, a round trip of {self.round_trip_ms} ms and {self.cores} "
                f"cores a device: give 0 or more"
            )
        if self.tokens % (self.seq * self.devices):
            raise ValueError(
                f"{self.tokens} tokens in sequences of {self.seq} cannot be split {self.devices} "
                f"ways, as data parallelism does; give another --tokens or --seq"
            )

    @property
    def batch(self) -> int:
        """Return the sequences of a step."""
        return self.tokens // self.seq


def usual_seq(tokens: int, devices: int) -> int:
    """Return the tokens of a sequence where they are not given: 256, or 512 of many tokens."""
    usual = 256 if tokens <= _SHORT_BATCH else 512
    return max(1, min(usual, tokens // devices))
