"""The setting of a row of the comparison: model, batch, links, adapters, fault."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from benchmarks.links import MBIT

SCHEDULE: Final = "constant"
"""Schedule of the learning rate; independent of the number of steps, so that losses compare."""

WARMUP_STEPS: Final = 1
_SHORT_BATCH: Final = 2048  # tokens, up to which sequences are short


class Fault(Enum):
    """The fault of the last device in the middle of a step."""

    NONE = "none"
    STOP = "stop"
    """The device is stopped (SIGSTOP) for a minute, and continues."""

    KILL = "kill"
    """The device is killed (SIGKILL), and does not return."""


@dataclass(frozen=True, order=True)
class Link:
    """The link of each device.

    Attributes:
        down_mbit, up_mbit: rates in Mbit/s.
    """

    down_mbit: float
    up_mbit: float

    @property
    def name(self) -> str:
        """Return the link's name as on the command line."""
        return f"{self.down_mbit:g}/{self.up_mbit:g}"

    @property
    def down(self) -> float:
        """Return bytes per second to the device."""
        return self.down_mbit * MBIT

    @property
    def up(self) -> float:
        """Return bytes per second from the device."""
        return self.up_mbit * MBIT

    @classmethod
    def of(cls, text: str) -> Link:
        """Parse a link such as `100/20`.

        Raises:
            ValueError: when the text is no link.
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
    """The setting in which a method is measured.

    Attributes:
        model: name in the registry or in `benchmarks.side_by_side.shapes`.
        tokens: tokens per step, on all devices together.
        seq: tokens per sequence.
        link: link of each device.
        rank: rank of the adapters, if only adapters are trained; 0 to train the model.
        fault: fault of the last device.
        devices: number of devices.
        round_trip_ms: round trip from a device to this machine.
        memory: memory that a device offers to Cleave.
        cores: cores of this machine for each device; 0 if devices share all cores.
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
        """Return the number of sequences per step."""
        return self.tokens // self.seq


def usual_seq(tokens: int, devices: int) -> int:
    """Return the default tokens per sequence: 256, or 512 for large batches."""
    usual = 256 if tokens <= _SHORT_BATCH else 512
    return max(1, min(usual, tokens // devices))
