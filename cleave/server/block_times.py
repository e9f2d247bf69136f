"""When the last blocks of a device travelled and were computed, as the PS can tell. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

KEPT: Final = 64
"""Blocks of a device that are remembered."""


class Lane(Enum):
    """What a device does with a block; the values are what users read."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"


class TimeSpan(NamedTuple):
    """Some time in a device's life, in seconds of the runtime's clock."""

    lane: Lane
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Block:
    began_s: float  # the first byte of what it needs was written
    asked_s: float  # the last one was
    answered_s: float  # all of its result was there
    compute_s: float  # as the device states it


class BlockTimes:
    """The last blocks of one session.

    The PS knows when it began to write what a block needs, when all of that was written, when the
    result was there, and how long the device says it computed. From these the device's own times
    are put together as the protocol has it work: in the order of the runs, sending each result at
    once. Bytes that wait in the system's buffers count as computing's or sending's time.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._asked: dict[int, tuple[float, float]] = {}
        self._blocks: deque[_Block] = deque(maxlen=KEPT)

    def sending(self, now_s: float) -> None:
        """A message to the device is about to be written."""
        if self._began_s is None:
            self._began_s = now_s

    def asked(self, run: int, now_s: float) -> None:
        """A run was written, and before it what it needs."""
        began_s = now_s if self._began_s is None else self._began_s
        self._asked[run] = (began_s, now_s)
        self._began_s = None

    def answered(self, run: int, compute_s: float, now_s: float) -> None:
        """The result of a run is there."""
        asked = self._asked.pop(run, None)
        if asked is not None:
            self._blocks.append(_Block(*asked, now_s, compute_s))

    def given_up(self, runs: tuple[int, ...]) -> None:
        """Nobody waits for these runs any more."""
        for run in runs:
            self._asked.pop(run, None)

    def spans(self) -> list[TimeSpan]:
        """The last blocks, each as receiving, computing and sending, in the order of answers."""
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
