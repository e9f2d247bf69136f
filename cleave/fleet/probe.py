"""Measuring the link of a device: ordinary `put` and `run`, timed at the PS, one way each.

A row times a column is all download (one number comes back), a column times a row all upload, and
a 1 x 1 product is a round trip. Each direction goes on to larger arrays until one takes a while;
what a round trip and the device's own arithmetic took is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import Message, Op

FIRST_ID: Final = 2**52
"""Probes name their arrays and runs from here on, so that they never meet the dispatcher's; still
a whole number in JavaScript."""

_FIRST_BYTES: Final = 8 * 1024  # over within 12 s on the slowest link that a device may have
_GROWTH: Final = 4
_LEAST_S: Final = 20e-6


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly a link is measured.

    Attributes:
        round_trips: of which the shortest counts.
        largest_bytes: most that is sent at once.
        enough_s: an array that takes this long needs no larger one.
    """

    round_trips: int
    largest_bytes: int
    enough_s: float


JOINING: Final = Effort(2, 2 * 2**20, 0.1)
"""A device wants to work soon."""

THOROUGH: Final = Effort(5, 8 * 2**20, 0.2)
"""A device came to have its link measured."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What a probe found.

    Attributes:
        downlink_bytes_per_s, uplink_bytes_per_s: PS to device, device to PS.
        latency_s: half of the shortest round trip.
    """

    downlink_bytes_per_s: float
    uplink_bytes_per_s: float
    latency_s: float


_Step = tuple[int, int, int]  # rows, depth, columns


class Probe:
    """The probe of one device. Feed it results until `rates` is there.

    Args:
        memory_bytes: what the device offers.
        effort: how thorough it is.
    """

    def __init__(self, memory_bytes: int, effort: Effort = JOINING) -> None:
        self.rates: LinkRates | None = None
        self._effort = effort
        self._largest = min(effort.largest_bytes, memory_bytes // 4)
        self._ids = count(FIRST_ID)
        self._plan = self._steps()
        self._step: _Step = (1, 1, 1)
        self._run = 0
        self._arrays: tuple[int, int] = (0, 0)
        self._sent_s = 0.0
        self._took_s = 0.0  # the step before

    def begin(self, now_s: float) -> list[Message]:
        """The first messages to send."""
        self._step = next(self._plan)
        return self._send(now_s)

    def result(self, message: messages.Result, now_s: float) -> list[Message]:
        """Take an answer; returns what to send next.

        Raises:
            ProtocolError: when it is not the answer that is awaited.
        """
        rows, _, columns = self._step
        nbytes = rows * columns * DType.FP32.itemsize
        answer = (message.id, message.rows, message.columns, payload_bytes(message.payload))
        if answer != (self._run, rows, columns, nbytes):
            raise ProtocolError(f"result {message.id} is not the answer to the probe {self._run}")
        self._took_s = max(_LEAST_S, now_s - self._sent_s - message.compute_s)
        drop: Message = messages.Drop(self._arrays)
        step = next(self._plan, None)
        if step is None:
            return [drop]
        self._step = step
        return [drop, *self._send(now_s)]

    def _steps(self) -> Iterator[_Step]:
        """What to multiply, one after the other; `_took_s` is known when it is resumed."""
        round_trip_s = float("inf")
        for _ in range(self._effort.round_trips):
            yield (1, 1, 1)
            round_trip_s = min(round_trip_s, self._took_s)
        rates = []
        for download in (True, False):
            size, last, before = _FIRST_BYTES, False, 0.0
            while True:
                side = int((size // 4) ** 0.5)
                step = (1, size // 8, 1) if download else (side, 1, side)
                yield step
                sent = 8 * step[1] if download else 4 * side * side
                rate = sent / max(_LEAST_S, self._took_s - round_trip_s)
                if last:  # the better of two: whatever disturbs a measurement makes it slower
                    rates.append(max(rate, before))
                    break
                last = self._took_s >= self._effort.enough_s or size * _GROWTH > self._largest
                before = rate
                size = size if last else size * _GROWTH
        self.rates = LinkRates(rates[0], rates[1], round_trip_s / 2)

    def _send(self, now_s: float) -> list[Message]:
        rows, depth, columns = self._step
        left, right, self._run = next(self._ids), next(self._ids), next(self._ids)
        self._arrays = (left, right)
        self._sent_s = now_s
        return [
            _zeros(left, rows, depth),
            _zeros(right, depth, columns),
            messages.Run(self._run, Op.MATMUL.value, self._arrays, False, False, DType.FP32.value),
        ]


def _zeros(id: int, rows: int, columns: int) -> messages.Put:
    array = Buffer(np.zeros((rows, columns), np.float32), DType.FP32)
    return messages.Put(id, rows, columns, DType.FP32.value, array)
