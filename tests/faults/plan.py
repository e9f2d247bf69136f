"""Which fault befalls which message: drawn from a seed, or written down. Knows no network.

A connection's faults depend on the seed, the connection's number, the direction and the count of
messages that went before; not on time. A run is replayed from its seed as far as the same messages
are sent again; how devices share their work is not decided here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol


class Direction(Enum):
    """Which way a message goes."""

    DOWN = "down"
    UP = "up"


class Fault(Enum):
    """What may happen. The first seven befall one message, the others a connection or process."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    CORRUPT_PAYLOAD = "corrupt payload"
    CORRUPT_HEADER = "corrupt header"
    REORDER = "reorder"
    CUT = "cut"  # the connection breaks
    SILENCE = "silence"  # it stays open, and nothing passes any more
    SLOW = "slow"  # it has a tenth of its rate from now on
    KILL = "kill"  # the device process gets SIGKILL
    STOP = "stop"  # and SIGSTOP


OF_MESSAGES: Final = (
    Fault.DROP,
    Fault.DELAY,
    Fault.DUPLICATE,
    Fault.TRUNCATE,
    Fault.CORRUPT_PAYLOAD,
    Fault.CORRUPT_HEADER,
    Fault.REORDER,
)

LOSSES: Final = (Fault.CUT, Fault.SILENCE, Fault.KILL, Fault.STOP)
"""By these a device is lost, at the latest when it has been silent for too long."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A message that passes.

    Attributes:
        direction: which way.
        index: how many passed before it, this way on this connection.
        kind: its type as in `cleave.protocol.messages`; empty where that is not readable.
        size_bytes: header and payload.
        header_bytes: without the payload.
    """

    direction: Direction
    index: int
    kind: str
    size_bytes: int
    header_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.size_bytes - self.header_bytes


@dataclass(frozen=True, slots=True)
class Happening:
    """A fault that befell a message, as it is logged.

    Attributes:
        slot: which device.
        connection: which of all connections.
        seen: the message that it befell, or that set it off.
        fault: what happened.
    """

    slot: int
    connection: int
    seen: Seen
    fault: Fault

    def __str__(self) -> str:
        seen = self.seen
        return (
            f"connection {self.connection} of device {self.slot}: {self.fault.value} at "
            f"{seen.kind or 'unreadable'} {seen.index} {seen.direction.value} "
            f"({seen.size_bytes} bytes)"
        )


class Faults(Protocol):
    """Decides for one connection."""

    def decide(self, seen: Seen) -> Fault | None:
        """What befalls this message; called once for each, in order."""
        ...


class NoFaults:
    """Everything passes."""

    def decide(self, seen: Seen) -> Fault | None:
        return None


class RandomFaults:
    """Each message has its small chance of each fault.

    Args:
        seed, connection: what chance is drawn from.
        chances: of each fault, for one message; together at most 1.
    """

    def __init__(self, seed: int, connection: int, chances: Mapping[Fault, float]) -> None:
        self._chances = dict(chances)
        self._rng = {
            direction: random.Random(f"{seed}/{connection}/{direction.value}")
            for direction in Direction
        }

    def decide(self, seen: Seen) -> Fault | None:
        drawn = self._rng[seen.direction].random()
        for fault, chance in self._chances.items():
            if drawn < chance:
                return fault if applies(fault, seen) else None
            drawn -= chance
        return None


class Script:
    """Faults that are written down, each once: the first message that fits a line gets its fault.

    Args:
        lines: pairs of a fault and which messages fit. They are taken in order, one after another.
    """

    def __init__(self, lines: Sequence[tuple[Fault, Callable[[Seen], bool]]]) -> None:
        self._lines = list(lines)

    def decide(self, seen: Seen) -> Fault | None:
        if not self._lines:
            return None
        fault, fits = self._lines[0]
        if not (fits(seen) and applies(fault, seen)):
            return None
        del self._lines[0]
        return fault


def applies(fault: Fault, seen: Seen) -> bool:
    """Whether a fault can befall this message."""
    return fault is not Fault.CORRUPT_PAYLOAD or seen.payload_bytes >= BURST_BYTES


@dataclass(frozen=True, slots=True)
class Loss:
    """A device that is to be lost in a step.

    Attributes:
        slot: which.
        fault: how; one of `LOSSES`.
        after: so many of its messages, either way.
    """

    slot: int
    fault: Fault
    after: int


def losses(
    seed: int, step: int, slots: int, share: float, weights: Mapping[Fault, float], messages: int
) -> list[Loss]:
    """Which devices are lost in a step: each with the same chance, somewhere in its messages.

    Args:
        seed, step: what chance is drawn from.
        slots: how many devices there are.
        share: the chance of each.
        weights: how much more often one kind of loss is than another.
        messages: about how many a device gets and sends in a step.
    """
    rng = random.Random(f"{seed}/step {step}")
    kinds, of_kind = list(weights), list(weights.values())
    return [
        Loss(slot, rng.choices(kinds, of_kind)[0], rng.randrange(max(1, messages)))
        for slot in range(slots)
        if rng.random() < share
    ]


# --- damage ---

BURST_BYTES: Final = 64
"""What a burst of errors overwrites. A single low bit of one element may be less than rounding,
which no check of a product can tell; sixteen elements of any bits are not."""


def spoiled_payload(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """The message with a burst of errors in its payload."""
    begin = rng.randrange(header_bytes, len(data) - BURST_BYTES + 1)
    return data[:begin] + rng.randbytes(BURST_BYTES) + data[begin + BURST_BYTES :]


def spoiled_header(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """The message with one byte of its header changed."""
    place = rng.randrange(header_bytes)
    changed = data[place] ^ rng.randrange(1, 256)
    return data[:place] + bytes([changed]) + data[place + 1 :]


def truncated(data: bytes, rng: random.Random) -> bytes:
    """The message without its end, of at least one byte."""
    return data[: rng.randrange(len(data))]
