"""The model of an emulated device: its links, the bottlenecks that links share, and its processor.

A device has one link per direction. A link sends one message at a time. A message arrives one
latency after its last byte is sent.

Drift multiplies the rate by exp(sigma x - sigma^2/2), where x is fractional Gaussian noise. Jitter
adds to the latency and never reorders messages. If a fraction p of the packets is lost, a TCP
connection reaches at most MSS / RTT sqrt(3 / 2p) (Mathis et al. 1997) and resends these packets.

The compute time depends on the device's profile, its temperature and its owner's load.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cleave.device.core import Order
from cleave.machine.backends import Compute
from profiles.fleet_device import FleetDevice, SharedBottleneck
from profiles.performance import Layout
from profiles.thermal import ThermalState

_MSS_BYTES: Final = 1460
_NOISE_BLOCK: Final = 1024

PIECE_BYTES: Final = 2**18  # a message crosses a shared bottleneck in pieces of this size


class FractionalNoise:
    """Fractional Gaussian noise with unit variance. Read the values in ascending index order.

    Each block of 1024 values is drawn independently by circulant embedding, an exact method (Davies
    and Harte 1987). `hurst` is the Hurst exponent, from 0.5 (white noise) to 1.
    """

    def __init__(self, hurst: float, rng: np.random.Generator) -> None:
        self._rng = rng
        lags = np.arange(_NOISE_BLOCK + 1, dtype=float)
        power = 2 * hurst
        covariance = ((lags + 1) ** power - 2 * lags**power + np.abs(lags - 1) ** power) / 2
        eigenvalues = np.fft.fft(np.concatenate([covariance, covariance[-2:0:-1]])).real
        self._scale = np.sqrt(np.maximum(eigenvalues, 0) / (2 * _NOISE_BLOCK))
        self._number = -1  # index of the stored block
        self._block: list[float] = []

    def __getitem__(self, index: int) -> float:
        number, place = divmod(index, _NOISE_BLOCK)
        if number != self._number:
            size = len(self._scale)
            normal = self._rng.standard_normal(size) + 1j * self._rng.standard_normal(size)
            self._block = np.fft.fft(self._scale * normal).real[:_NOISE_BLOCK].tolist()
            self._number = number
        return self._block[place]


@dataclass(slots=True)
class Shared:
    """One direction of a shared bottleneck. Bytes pass in the order in which they are queued."""

    bytes_per_s: float
    free_s: float = 0.0

    def passes(self, now_s: float, nbytes: int) -> float:
        """Queue `nbytes` at `now_s`; return the time in seconds at which all bytes have passed."""
        self.free_s = max(now_s, self.free_s) + nbytes / self.bytes_per_s
        return self.free_s


class SharedLines:
    """The shared bottlenecks of a fleet. `card` models the PS's network card; None for no limit."""

    def __init__(self, card: SharedBottleneck | None = None) -> None:
        self._lines: dict[str, tuple[Shared, Shared]] = {}
        self._card = card

    def of(self, device: FleetDevice) -> tuple[list[Shared], list[Shared]]:
        """Return the shared bottlenecks on a device's downlink and uplink, as two lists."""
        found = []
        for line in filter(None, (device.bottleneck, self._card)):
            rates = line.downlink_bytes_per_s, line.uplink_bytes_per_s
            made = Shared(rates[0]), Shared(rates[1])
            found.append(self._lines.setdefault(line.name, made))
        return [down for down, _ in found], [up for _, up in found]


@dataclass(slots=True)
class Departure:
    """A message that a link sends in pieces over shared bottlenecks.

    When the last piece is sent, `left` is called with the times in seconds at which the first and
    last bytes of the message leave the sender.
    """

    left_bytes: int
    left: Callable[[float, float], None]
    begin_s: float | None = None

    def depart(self, link: Link, now_s: float) -> bool:
        """Send the next piece of the message over `link`; return True if no bytes remain."""
        piece = min(PIECE_BYTES, self.left_bytes)
        begin_s, end_s = link.occupy(now_s, piece)
        self.left_bytes -= piece
        self.begin_s = begin_s if self.begin_s is None else self.begin_s
        if self.left_bytes == 0:
            self.left(self.begin_s, end_s)
        return self.left_bytes == 0


@dataclass(slots=True)
class Link:
    """One direction of a device's link.

    Attributes:
        bytes_per_s: mean rate, after the reduction for packet loss.
        latency_s: one-way latency.
        jitter_s: mean of the random delay that is added to the latency.
        sigma: standard deviation of the logarithm of the drifting rate.
        interval_s: time in seconds for which the drifting rate stays constant.
        noise: fractional Gaussian noise of the drift; None for a constant rate.
        free_s: time at which all queued bytes have been sent.
        arrived_s: latest arrival time so far, if the link has jitter.
        shared: bottlenecks on the path. With a bottleneck, the caller sends each message in pieces
            of `PIECE_BYTES`, so that a long message does not block other devices' messages.
        queue: messages to send on a link with bottlenecks; the first message is being sent.
    """

    bytes_per_s: float
    latency_s: float
    jitter_s: float = 0.0
    sigma: float = 0.0
    interval_s: float = 10.0
    noise: FractionalNoise | None = None
    rng: random.Random | None = None
    shared: list[Shared] = field(default_factory=list)
    free_s: float = 0.0
    arrived_s: float = 0.0
    queue: deque[Departure] = field(default_factory=deque)

    def transmit(self, now_s: float, nbytes: int) -> tuple[float, float, float]:
        """Send a message; return its begin, end and arrival times in seconds.

        The first byte leaves at the begin time, and the last byte leaves at the end time.
        """
        begin_s, end_s = self.occupy(now_s, nbytes)
        return begin_s, end_s, self.arrival_s(end_s)

    def occupy(self, now_s: float, nbytes: int) -> tuple[float, float]:
        """Queue `nbytes`; return the times in seconds at which the first and last bytes leave."""
        begin_s = self.free_s if self.free_s > now_s else now_s
        if self.noise is None:
            end_s = begin_s + nbytes / self.bytes_per_s
        else:
            end_s = self._drifting(begin_s, nbytes)
        for line in self.shared:
            end_s = max(end_s, line.passes(begin_s, nbytes))
        self.free_s = end_s
        return begin_s, end_s

    def arrival_s(self, end_s: float) -> float:
        """Return the arrival time in seconds of a message whose last byte leaves at `end_s`."""
        arrives_s = end_s + self.latency_s
        if self.rng is not None and self.jitter_s:
            arrives_s = max(self.arrived_s, arrives_s + self.rng.expovariate(1 / self.jitter_s))
            self.arrived_s = arrives_s
        return arrives_s

    def _drifting(self, begin_s: float, nbytes: float) -> float:
        assert self.noise is not None
        index = int(begin_s / self.interval_s)
        while True:
            factor = math.exp(self.sigma * self.noise[index] - self.sigma**2 / 2)
            rate = self.bytes_per_s * factor
            until_s = (index + 1) * self.interval_s
            if begin_s + nbytes / rate <= until_s:
                return begin_s + nbytes / rate
            nbytes -= (until_s - begin_s) * rate
            begin_s, index = until_s, index + 1


def links_of(
    device: FleetDevice, rng: random.Random, lines: SharedLines, now_s: float = 0.0
) -> tuple[Link, Link]:
    """Return the downlink and the uplink of a device that connects at `now_s`."""

    def link(bytes_per_s: float, shared: list[Shared]) -> Link:
        noise = None
        if device.drift_sigma:
            generator = np.random.default_rng(rng.getrandbits(64))
            noise = FractionalNoise(device.drift_hurst, generator)
        return Link(
            _with_loss(bytes_per_s, device),
            device.latency_s,
            device.jitter_s,
            device.drift_sigma,
            device.drift_interval_s,
            noise,
            rng,
            shared,
            now_s,
        )

    down_lines, up_lines = lines.of(device)
    down = link(device.downlink_bytes_per_s, down_lines)
    return down, link(device.uplink_bytes_per_s, up_lines)


def _with_loss(bytes_per_s: float, device: FleetDevice) -> float:
    if not device.loss:
        return bytes_per_s
    rate = bytes_per_s * (1 - device.loss)
    round_trip_s = 2 * (device.latency_s + device.jitter_s)
    if round_trip_s:
        rate = min(rate, _MSS_BYTES / round_trip_s * math.sqrt(1.5 / device.loss))
    return rate


class EmulatedProcessor:
    """Model of a device's processor. Tasks run in sequence, and the last one ends at `free_s`."""

    __slots__ = ("_device", "_share", "_thermal", "free_s")

    def __init__(self, device: FleetDevice, now_s: float = 0.0) -> None:
        self._device = device
        self._share = 1 - device.load
        thermal = device.thermal
        self._thermal = ThermalState(thermal, thermal.ambient, now_s) if thermal else None
        self.free_s = now_s

    def run(self, order: Order, now_s: float) -> tuple[float, float]:
        """Queue a task at `now_s`; return the times in seconds at which it begins and ends."""
        begin_s = self.free_s if self.free_s > now_s else now_s
        woken = now_s > self.free_s
        if isinstance(order, Compute):
            work_s = self.full_speed_s(order, woken) / self._share
        else:
            work_s = order.flops / self._device.stated_graph_flops_per_s
        if self._thermal is not None:
            work_s = self._thermal.busy(begin_s, work_s)
        self.free_s = begin_s + work_s
        return begin_s, self.free_s

    def full_speed_s(self, order: Compute, woken: bool = False) -> float:
        """Return the seconds that a multiplication takes on a cool device without other load.

        Also mark the operands as used, because only the first use of an operand takes longer.
        `woken` is True if the processor was idle before this task.
        """
        model = self._device.compute
        if model is None:
            return order.flops / self._device.flops_per_s
        layout = Layout.of(order.transpose_a, order.transpose_b)
        out = order.out.value if len(order.pairs) == 1 else "fp32"
        total_s = 0.0
        rows, columns = order.rows, order.columns
        for left, right in order.pairs:
            depth = left.rows if order.transpose_a else left.columns
            fresh = not left.used, not right.used
            dtype = left.dtype.value
            total_s += model.seconds(dtype, out, layout, rows, columns, depth, *fresh, woken)
            left.used = right.used = True
            woken = False
        return total_s
