"""The state of a simulated step: its stages, its devices and their traffic.

`cleave.planner.stages.simulation` changes it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    NOTHING_KEPT,
    Keep,
    KeptBatches,
    LayerCost,
    PlannedStage,
    StageModel,
)

PIECE_BYTES: Final = 2.0**20
"""Bytes of a message that pass the PS's card at once; other devices get a turn between pieces."""

_TOTAL_BYTES: Final = 4
"""Bytes per token sent to a slice of the loss for its backward pass."""


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message to a device.

    Attributes:
        flops: FLOPs of the run that waits for it.
        answered: whether the results of that run are then fetched.
        passes_s: seconds on the device's downlink.
        computes_s: seconds of that run on the device.
    """

    nbytes: float
    flops: float = 0.0
    answered: bool = False
    passes_s: float = 0.0
    computes_s: float = 0.0

    def to(self, rates: DeviceRates) -> SimulatedMessage:
        """Return the message with its times for a device."""
        passes_s = self.nbytes / rates.downlink_bytes_per_s
        computes_s = self.flops / rates.flops_per_s
        return replace(self, passes_s=passes_s, computes_s=computes_s)


@dataclass(frozen=True, slots=True)
class Errand:
    """The traffic of one micro-batch pass on a device's links.

    Attributes:
        sent: messages to the device.
        sends: sizes of the device's replies for each chunk, the last one first.
        x_s, y_s: total seconds on the downlink and on the uplink.
        sends_s: seconds of each of `sends` on the uplink.
        sent_bytes, returned_bytes: total bytes; whole numbers, so that sums are exact.
    """

    sent: Sequence[SimulatedMessage]
    sends: Sequence[float]
    x_s: float
    y_s: float
    sends_s: Sequence[float]
    sent_bytes: float
    returned_bytes: float


@dataclass(slots=True)
class SimulatedCard:
    """One direction of the PS's network card.

    Attributes:
        byte_s: seconds per byte; 0 if the card has no limit.
        free_s: when all traffic so far will have passed.
        passed_bytes: bytes of all traffic so far.
    """

    byte_s: float
    free_s: float = 0.0
    passed_bytes: float = 0.0

    def passed_s(self, begin_s: float, own_s: float, nbytes: float) -> float:
        """Return when bytes have passed both the card and the device's link; queue them.

        Args:
            begin_s: when they begin.
            own_s: when they will have passed the device's link.
        """
        self.passed_bytes += nbytes
        free_s = self.free_s if self.free_s > begin_s else begin_s
        self.free_s = free_s = free_s + nbytes * self.byte_s
        return own_s if own_s > free_s else free_s


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """The state of one device.

    Attributes:
        coming: messages in transit to it, each with its unit, if any.
        left_bytes: bytes left of the first of these messages.
        going: units with replies in transit or waiting, and the sizes left to send.
        received_s, computed_s, sent_s: when its downlink, processor and uplink will be free.
            `received_s` is used only without a card limit.
        under_way: number of units in flight.
        kept: number of micro-batches that it keeps, by kind.
        stages: its stages, the last one first, each with the micro-batches it keeps there.
        unit_s: seconds of one micro-batch on this device alone.
        went_back: whether its last unit was a backward pass.
        computes_s: total seconds of computing.
        weights_s, x_s: total seconds of weights and of activations on its downlink.
        y_s, gradients_s: total seconds of activations and of gradients on its uplink.
        errands: traffic of units, by stage, tokens, forward and what is kept.
        allowed: number of micro-batches that it may keep.
        piece_up_s: seconds of `PIECE_BYTES` on its uplink.
    """

    rates: DeviceRates
    coming: deque[tuple[SimulatedMessage, SimulatedUnit | None]] = field(default_factory=deque)
    left_bytes: float = 0.0
    going: deque[tuple[SimulatedUnit, list[float]]] = field(default_factory=deque)
    received_s: float = 0.0
    computed_s: float = 0.0
    sent_s: float = 0.0
    under_way: int = 0
    kept: dict[Keep, int] = field(default_factory=lambda: dict.fromkeys(Keep, 0))
    went_back: bool = False
    weights_s: float = 0.0
    computes_s: float = 0.0
    x_s: float = 0.0
    y_s: float = 0.0
    gradients_s: float = 0.0
    errands: dict[tuple[int, int, bool, Keep], Errand] = field(default_factory=dict)
    allowed: KeptBatches = NOTHING_KEPT
    stages: list[tuple[SimulatedStage, list[int]]] = field(default_factory=list)
    unit_s: float = 0.0
    number: int = field(init=False)
    latency_s: float = field(init=False)
    downlink_bytes_per_s: float = field(init=False)
    piece_up_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.rates.device
        self.latency_s = self.rates.latency_s
        self.downlink_bytes_per_s = self.rates.downlink_bytes_per_s
        self.piece_up_s = PIECE_BYTES / self.rates.uplink_bytes_per_s


@dataclass(slots=True, eq=False)
class SimulatedStage:
    """The state of one stage.

    Attributes:
        number, plan: index of the stage, and its plan.
        costs: costs of its layers, then of the loss or its slice, if it computes that.
        devices: devices of the stage.
        forward, backward: heaps of micro-batches that any of its devices may take next.
        kept_by: by micro-batch, the device that keeps part of it, and what it keeps.
        own: by device, a heap of kept micro-batches that are ready for their backward pass.
        went, passed: number of micro-batches whose forward and whose backward pass is done.
        summed: devices that hold gradient sums.
    """

    number: int
    plan: PlannedStage
    costs: list[LayerCost]
    devices: list[SimulatedDevice] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    kept_by: dict[int, tuple[SimulatedDevice, Keep]] = field(default_factory=dict)
    own: dict[int, list[int]] = field(default_factory=dict)
    went: int = 0
    passed: int = 0
    summed: set[int] = field(default_factory=set)

    def next_backward(self, device: int) -> tuple[int, Keep]:
        """Take the next micro-batch for a device's backward pass; return it and what was kept."""
        if own := self.own[device]:
            batch = heapq.heappop(own)
            return batch, self.kept_by.pop(batch)[1]
        return heapq.heappop(self.backward), Keep.NOTHING

    def messages(
        self, model: StageModel, tokens: int, *, forward: bool, keep: Keep, coded: bool
    ) -> list[SimulatedMessage]:
        """Return the messages to a device for a unit, in order.

        Args:
            tokens: tokens of the micro-batch.
            forward: whether the unit is a forward pass alone.
            keep: what the device keeps of the micro-batch, or has kept.
            coded: whether the messages are compressed.
        """
        activation = float(tokens * model.width * model.element_bytes)
        x = activation
        if self.plan.stop > self.plan.first:  # layer arguments are sent with x
            x += tokens * model.beside_bytes
        sliced = self.plan.slice is not None
        dy = float(tokens * _TOTAL_BYTES) if sliced else activation
        through = math.fsum(cost.forward_flops for cost in self.costs) * tokens
        back = math.fsum(cost.flops - cost.forward_flops for cost in self.costs) * tokens
        last = self.costs[-1].forward_flops * tokens
        if keep is Keep.ACTIVATIONS:
            back -= math.fsum(cost.spared_flops for cost in self.costs) * tokens
        if forward:
            found = [(x, through)]
        elif self.plan.loss:
            found = [(x, through + back)]
        elif keep is not Keep.NOTHING:
            found = [(dy, back)]
        else:  # x, to recompute the inputs of the layers, and dy
            found = [(x, through - last), (dy, back)]
        pieces = self.plan.pieces
        ratio = (model.coded_ratio if coded else 1.0) / pieces
        one = [SimulatedMessage(float(round(n * ratio)), flops / pieces) for n, flops in found]
        one[-1] = replace(one[-1], answered=True)
        return one * pieces


@dataclass(slots=True, eq=False)
class SimulatedUnit:
    """A unit in flight on a device.

    Attributes:
        batch: index of the micro-batch; -1 for gradient sums.
        sends: see `Errand`.
        pieces: number of chunks that are not sent yet.
    """

    stage: SimulatedStage
    batch: int
    device: SimulatedDevice
    forward: bool
    sends: Sequence[float]
    pieces: int = 1
