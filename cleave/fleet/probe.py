"""Measuring the link of a device that joined: ordinary `put` and `run`, timed at the PS.

A row times a column is all download (one number comes back), a column times a row all upload. A
first round trip of one element gives the latency. A fast link is measured with more bytes, a few
times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

_SIZES_BYTES: Final = (64 * 1024, 2 * 1024 * 1024, 2 * 1024 * 1024, 2 * 1024 * 1024)
_ENOUGH_S: Final = 0.1  # a measurement this long needs no other
_LEAST_S: Final = 20e-6


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


@dataclass(slots=True)
class Probe:
    """The probe of one device. Feed it results until `rates` is there."""

    memory_bytes: int
    rates: LinkRates | None = None
    _ids: count[int] = field(default_factory=lambda: count(FIRST_ID))
    _steps: list[tuple[int, int, int]] = field(default_factory=list)  # rows, depth, columns
    _run: int = 0
    _arrays: tuple[int, int] = (0, 0)
    _sent_s: float = 0.0
    _took_s: list[float] = field(default_factory=list)

    def begin(self, now_s: float) -> list[Message]:
        """The first messages to send."""
        self._steps = [(1, 1, 1)]
        for size in _SIZES_BYTES:
            if 4 * size > self.memory_bytes:
                break
            depth, side = size // 8, int((size // 4) ** 0.5)
            self._steps += [(1, depth, 1), (side, 1, side)]
        return self._next(now_s)

    def result(self, message: messages.Result, now_s: float) -> list[Message]:
        """Take an answer; returns what to send next, nothing when `rates` is known.

        Raises:
            ProtocolError: when it is not the answer to the probe.
        """
        rows, _, columns = self._steps[len(self._took_s)]
        nbytes = rows * columns * DType.FP32.itemsize
        answer = (message.id, message.rows, message.columns, payload_bytes(message.payload))
        if answer != (self._run, rows, columns, nbytes):
            raise ProtocolError(f"result {message.id} is not the answer to the probe {self._run}")
        self._took_s.append(max(_LEAST_S, now_s - self._sent_s))
        drop: Message = messages.Drop(self._arrays)
        done = len(self._took_s)
        enough = done > 1 and done % 2 == 1 and max(self._took_s[-2:]) > _ENOUGH_S
        if done == len(self._steps) or enough:
            self._conclude()
            return [drop]
        return [drop, *self._next(now_s)]

    def _next(self, now_s: float) -> list[Message]:
        rows, depth, columns = self._steps[len(self._took_s)]
        left, right, self._run = next(self._ids), next(self._ids), next(self._ids)
        self._arrays = (left, right)
        self._sent_s = now_s
        return [
            _zeros(left, rows, depth),
            _zeros(right, depth, columns),
            messages.Run(self._run, Op.MATMUL.value, self._arrays, False, False, DType.FP32.value),
        ]

    def _conclude(self) -> None:
        round_trip_s = min(self._took_s)
        if len(self._took_s) < 3:  # a tiny memory left no room for more
            self.rates = LinkRates(1e6, 1e6, round_trip_s / 2)
            return
        # The best of each direction: whatever disturbs a measurement makes it slower. The round
        # trip is not subtracted: the first one of a connection is often its slowest.
        took_s = self._took_s
        down = [8 * d / t for (_, d, _), t in zip(self._steps[1::2], took_s[1::2], strict=False)]
        up = [4 * r * c / t for (r, _, c), t in zip(self._steps[2::2], took_s[2::2], strict=False)]
        self.rates = LinkRates(max(down), max(up), round_trip_s / 2)


def _zeros(id: int, rows: int, columns: int) -> messages.Put:
    array = Buffer(np.zeros((rows, columns), np.float32), DType.FP32)
    return messages.Put(id, rows, columns, DType.FP32.value, array)
