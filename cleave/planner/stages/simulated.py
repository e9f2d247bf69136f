"""The state of a simulated training step: stages, devices, messages and the PS's network card.

`cleave.planner.stages.simulation` updates this state event by event.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import (
    NOTHING_KEPT,
    Keep,
    KeptBatches,
    LayerCost,
    PlannedStage,
    StageModel,
)

# The PS's network card transfers messages in pieces of this size, and interleaves the pieces of
# messages for different devices.
PIECE_BYTES: Final = 2.0**20
_TOTAL_BYTES: Final = 4  # bytes per token that a loss slice receives for its backward pass
_ID_BYTES: Final = 16  # bytes per token of token IDs and targets


@dataclass(frozen=True, slots=True)
class SimulatedMessage:
    """A message from the PS to a device.

    Attributes:
        flops: FLOPs of the graph run that the message triggers.
        answered: whether the device returns the results of this run.
        passes_s, computes_s: transfer time of the message on the device's downlink, and time of the
            graph run, in seconds.
    """

    nbytes: float
    flops: float = 0.0
    answered: bool = False
    passes_s: float = 0.0
    computes_s: float = 0.0

    def to(self, rates: DeviceRates) -> SimulatedMessage:
        """Return a copy of the message with `passes_s` and `computes_s` set for a device."""
        passes_s = self.nbytes / rates.downlink_bytes_per_s
        computes_s = self.flops / rates.flops_per_s
        return replace(self, passes_s=passes_s, computes_s=computes_s)


class PassMessages(NamedTuple):
    """The messages of one micro-batch pass between the PS and a device.

    Attributes:
        sends: sizes in bytes of the messages that the device returns for each chunk, last first.
        x_s, y_s: total transfer times in seconds on the downlink, and on the uplink.
    """

    sent: Sequence[SimulatedMessage]
    sends: Sequence[float]
    x_s: float
    y_s: float


@dataclass(slots=True)
class SimulatedCard:
    """One direction of the PS's network card.

    Attributes:
        byte_s: transfer time per byte in seconds; 0 if the card limits no transfer.
        free_s: time in seconds at which the card finishes all queued traffic.
        passed_bytes: total size of all traffic queued so far.
    """

    byte_s: float
    free_s: float = 0.0
    passed_bytes: float = 0.0

    def passed_s(self, begin_s: float, own_s: float, nbytes: float) -> float:
        """Queue `nbytes` at `begin_s`; return the time at which card and link have sent them.

        `own_s` is the time at which the device's own link has sent the bytes.
        """
        self.passed_bytes += nbytes
        free_s = self.free_s if self.free_s > begin_s else begin_s
        self.free_s = free_s = free_s + nbytes * self.byte_s
        return own_s if own_s > free_s else free_s


@dataclass(slots=True, eq=False)
class SimulatedDevice:
    """The simulated state of one device.

    Attributes:
        coming: messages in transit to the device, each with its request (None for weights).
        left_bytes: unsent bytes of the first message in `coming`.
        going: requests whose results wait for the uplink, each with the sizes of its unsent
            results.
        received_s, computed_s, sent_s: times at which the device's downlink, processor and uplink
            become free. `received_s` is used only if the PS's network is unlimited.
        kept: for each value of `Keep`, the number of micro-batches retained in this way.
        went_back: whether the device's last request was a backward pass.
        delayed_s: total time in seconds by which the PS's work has delayed the device's graph runs.
        weights_s, x_s: total transfer time of weights, and of activations, on the downlink.
        y_s, gradients_s: total transfer time of activations, and of gradients, on the uplink.
        pass_messages: cached messages of requests, by stage, tokens, forward and keep.
        stages: stages of the device, the last stage first, each with the heap of retained
            micro-batches that are ready for their backward pass.
        request_s: time of one micro-batch pass on the otherwise idle device.
        piece_up_s: transfer time of `PIECE_BYTES` on the device's uplink.
    """

    rates: DeviceRates
    coming: deque[tuple[SimulatedMessage, SimulatedRequest | None]] = field(default_factory=deque)
    left_bytes: float = 0.0
    going: deque[tuple[SimulatedRequest, list[float]]] = field(default_factory=deque)
    received_s: float = 0.0
    computed_s: float = 0.0
    sent_s: float = 0.0
    under_way: int = 0
    kept: dict[Keep, int] = field(default_factory=lambda: dict.fromkeys(Keep, 0))
    went_back: bool = False
    weights_s: float = 0.0
    computes_s: float = 0.0
    delayed_s: float = 0.0
    x_s: float = 0.0
    y_s: float = 0.0
    gradients_s: float = 0.0
    pass_messages: dict[tuple[int, int, bool, Keep], PassMessages] = field(default_factory=dict)
    allowed: KeptBatches = NOTHING_KEPT
    stages: list[tuple[SimulatedStage, list[int]]] = field(default_factory=list)
    request_s: float = 0.0
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
    """The simulated state of one stage, or of one slice of the loss.

    Attributes:
        costs: costs of the stage's layers, followed by the costs of its loss or loss slice.
        forward, backward: heaps of micro-batches that any device of the stage may process.
        kept_by: maps a micro-batch to the device that retains its data, and to the kind of data.
        own: heaps of micro-batches that are ready for their backward pass on the device that
            retains them, by device ID.
        went, passed: numbers of finished forward passes and finished backward passes.
        summed: IDs of the devices whose accumulated gradients the PS has not fetched yet.
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
        """Dequeue a device's next backward pass; return its micro-batch and what is retained."""
        if own := self.own[device]:
            batch = heapq.heappop(own)
            return batch, self.kept_by.pop(batch)[1]
        return heapq.heappop(self.backward), Keep.NOTHING

    def messages(
        self, model: StageModel, tokens: int, *, forward: bool, keep: Keep, coded: bool
    ) -> list[SimulatedMessage]:
        """Return the messages to a device for one micro-batch pass, in sending order.

        Args:
            forward: whether this is a forward pass; if not, it is a backward pass.
            keep: what the device retains of the micro-batch after a forward pass, or has retained
                for a backward pass.
        """
        activation = float(tokens * model.width * model.element_bytes)
        x = activation
        if self.plan.stop > self.plan.first:  # layer arguments are sent with x
            x += tokens * model.beside_bytes
        if model.is_from_ids(self.plan):
            x = float(tokens * _ID_BYTES)
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
class SimulatedRequest:
    """A micro-batch pass in flight on a device, or a transfer of accumulated gradients.

    Attributes:
        batch: index of the micro-batch; -1 for the transfer of accumulated gradients.
        sends: sizes in bytes of the messages that the device returns for each chunk, last first.
        pieces: number of chunks whose results have not fully arrived.
    """

    stage: SimulatedStage
    batch: int
    device: SimulatedDevice
    forward: bool
    sends: Sequence[float]
    pieces: int = 1
