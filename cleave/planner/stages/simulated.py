"""The state of a simulated step: its stages, its devices, and what passes their links.

See `cleave.planner.stages.simulation`, which changes it.
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
"""What of a message passes the PS's card at once: other devices get a turn between pieces."""

_TOTAL_BYTES: Final = 4
"""What the backward pass of a slice of the loss is sent of a token."""


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message to a device.

    Attributes:
        nbytes: its size.
        flops: of the run that waits for it.
        answered: whether what that run makes is fetched then.
        passes_s: how long it takes on the device's downlink.
        computes_s: how long the device computes that run.
    """

    nbytes: float
    flops: float = 0.0
    answered: bool = False
    passes_s: float = 0.0
    computes_s: float = 0.0

    def to(self, rates: DeviceRates) -> SimulatedMessage:
        """Return the same, to a device."""
        passes_s = self.nbytes / rates.downlink_bytes_per_s
        computes_s = self.flops / rates.flops_per_s
        return replace(self, passes_s=passes_s, computes_s=computes_s)


@dataclass(frozen=True, slots=True)
class Errand:
    """What passes a device's links for a unit.

    Attributes:
        sent: to the device.
        sends: the sizes of what goes back, the last one first; of each piece of a micro-batch.
        x_s, y_s: how long all of it takes on the downlink, and on the uplink.
        sends_s: how long each of `sends` takes on the uplink.
        sent_bytes, returned_bytes: of all of it; whole numbers, so that their sums are exact.
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
        byte_s: how long a byte takes; 0 where no device waits for others.
        free_s: when everything known so far will be through.
        passed_bytes: of that.
    """

    byte_s: float
    free_s: float = 0.0
    passed_bytes: float = 0.0

    def passed_s(self, begin_s: float, own_s: float, nbytes: float) -> float:
        """Return when bytes are through, after those before them, and through a device's link.

        Args:
            begin_s: when they begin.
            own_s: when the device's link has passed them.
            nbytes: how many.
        """
        self.passed_bytes += nbytes
        free_s = self.free_s if self.free_s > begin_s else begin_s
        self.free_s = free_s = free_s + nbytes * self.byte_s
        return own_s if own_s > free_s else free_s


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """The state of one device.

    Attributes:
        rates: of its links and processor.
        coming: messages on their way to it, and the unit that each belongs to, if any.
        left_bytes: of the first of them.
        going: units of which something is sent or waits for that, and the sizes that are left.
        received_s, computed_s, sent_s: when its downlink, its processor and its uplink will have
            done what is known; its downlink only where the PS's card has no limit.
        under_way: number of units.
        kept: of how many micro-batches it keeps what.
        stages: those that it is in, the last one first, and its own micro-batches there.
        unit_s: how long a unit takes it alone.
        went_back: whether its last unit was a backward pass.
        computes_s: how long it computes in all.
        weights_s, x_s: how long weights, and activations, take on its downlink in all.
        y_s, gradients_s: how long activations, and gradients, take on its uplink in all.
        errands: what units take, by stage, tokens, pass and what is kept.
        allowed: of how many micro-batches it may keep what.
        number: its own.
        latency_s: of its links.
        downlink_bytes_per_s: of its downlink.
        piece_up_s: how long so much takes its uplink as passes the card at once.
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
        number, plan: which it is.
        costs: of its layers, then of the loss, if it is there.
        devices: that are in it.
        forward, backward: heaps of micro-batches that any of its devices may do next.
        kept_by: by micro-batch, the device that keeps something of it, and what.
        own: by device, a heap of micro-batches that it keeps, and may do backward next.
        went, passed: number of micro-batches whose forward, and backward, pass is done.
        summed: devices that have sums.
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
        """Take the micro-batch that a device is to do backward; say what it keeps of it."""
        if own := self.own[device]:
            batch = heapq.heappop(own)
            return batch, self.kept_by.pop(batch)[1]
        return heapq.heappop(self.backward), Keep.NOTHING

    def messages(
        self, model: StageModel, tokens: int, *, forward: bool, keep: Keep, coded: bool
    ) -> list[SimulatedMessage]:
        """Return what goes to a device for a unit, in order.

        Args:
            model: the model.
            tokens: of the micro-batch.
            forward: whether it is a forward pass alone.
            keep: what the device keeps of the micro-batch, or has kept.
            coded: whether it travels so.
        """
        activation = float(tokens * model.width * model.element_bytes)
        x = activation
        if self.plan.stop > self.plan.first:  # what layers are called with comes with x
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
        else:  # x, from which the inputs of the layers are computed again, and dy
            found = [(x, through - last), (dy, back)]
        pieces = self.plan.pieces
        ratio = (model.coded_ratio if coded else 1.0) / pieces
        one = [SimulatedMessage(float(round(n * ratio)), flops / pieces) for n, flops in found]
        one[-1] = replace(one[-1], answered=True)
        return one * pieces


@dataclass(slots=True, eq=False)
class SimulatedUnit:
    """What a device was asked for.

    Attributes:
        batch: the micro-batch; -1 for sums.
        sends: see `Errand`.
        pieces: how many are not sent yet.
    """

    stage: SimulatedStage
    batch: int
    device: SimulatedDevice
    forward: bool
    sends: Sequence[float]
    pieces: int = 1
