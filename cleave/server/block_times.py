"""When a device's last blocks were transferred and computed, as far as the PS can tell. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

KEPT: Final = 64
"""Blocks of a device that are remembered."""


class Lane(Enum):
    """What a device does with a block at some time; users read the values."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


class TimeSpan(NamedTuple):
    """A period in a device's timeline, in seconds on the runtime's clock."""

    lane: Lane
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Block:
    began_s: float  # when writing its inputs began
    asked_s: float  # when its inputs and its run were written
    answered_s: float  # when its whole result had arrived
    compute_s: float  # as the device states it


class BlockTimes:
    """The times of the last blocks of one session.

    The PS knows four times of a block: when it began to write the block's inputs, when all of them
    were written, when the result had arrived, and how long the device says that it computed. From
    these it reconstructs the device's timeline. It assumes what the protocol demands: the device
    works in the order of the runs and sends each result at once. Time that bytes spend in the
    system's buffers counts as time of computing or sending.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._asked: dict[int, tuple[float, float]] = {}
        self._blocks: deque[_Block] = deque(maxlen=KEPT)

    def sending(self, now_s: float) -> None:
        """Note that a message to the device is about to be written."""
        if self._began_s is None:
            self._began_s = now_s

    def asked(self, run: int, now_s: float) -> None:
        """Note that a run was written; its inputs were written before it."""
        began_s = now_s if self._began_s is None else self._began_s
        self._asked[run] = (began_s, now_s)
        self._began_s = None

    def answered(self, run: int, compute_s: float, now_s: float) -> None:
        """Note that the result of a run has arrived."""
        asked = self._asked.pop(run, None)
        if asked is not None:
            self._blocks.append(_Block(*asked, now_s, compute_s))

    def given_up(self, runs: tuple[int, ...]) -> None:
        """Forget runs whose results are no longer expected."""
        for run in runs:
            self._asked.pop(run, None)

    def spans(self) -> list[TimeSpan]:
        """Return the last blocks as spans (receive, compute, send), in the order of their
        results."""
        found = []
        computed_s = sent_s = 0.0
        for block in self._blocks:
            start_s = min(max(block.asked_s, computed_s), block.answered_s)
            computed_s = min(start_s + block.compute_s, block.answered_s)
            sending_s = max(computed_s, sent_s)
            sent_s = block.answered_s
            found += [
                TimeSpan(Lane.RECEIVE, block.began_s, block.asked_s),
                TimeSpan(Lane.COMPUTE, start_s, computed_s),
                TimeSpan(Lane.SEND, sending_s, sent_s),
            ]
        return found
