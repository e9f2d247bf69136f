"""A step by stages, simulated event by event.

The simulated PS gives out units as `cleave.scheduler.stage_step` does: forward and backward passes
in turn, the last stage first, two units at once to each device, idle devices first and of these the
fastest, and it takes a stage's sums when every micro-batch has passed it. Trained weights go to all
devices when the step begins, layer by layer; frozen ones are there from the step before.

A device has a downlink, a processor and an uplink, each of which does one thing after another. What
passes a link also passes the PS's network card in pieces, each after everything that began to pass
it before. Where a device codes, what passes its link and the card is as long as it is coded. A
micro-batch that is computed in pieces comes and goes in pieces. The PS does one thing after another
while devices go on: layers that no device can do, and the loss. Where slices of the loss are on
devices, each of them gets the last stage's output; when all have answered forward they go backward,
and the gradient is there when all have answered that.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages import (
    NOTHING_KEPT,
    Keep,
    KeptBatches,
    LayerCost,
    PlannedStage,
    PsCompute,
    StageModel,
)

UNITS_AT_ONCE: Final = 2
"""Units that a device is asked for at once, as in `cleave.scheduler.stage_step`."""

PIECE_BYTES: Final = 2.0**20
"""What of a message passes the PS's card at once: other devices get a turn between pieces."""

_SUMMARY_BYTES: Final = 8
"""What a slice's forward pass returns of a token."""

_TOTAL_BYTES: Final = 4
"""What its backward pass is sent of a token."""


def costs_of(model: StageModel, stage: PlannedStage) -> list[LayerCost]:
    """Return what a stage's layers cost, then the loss, or its slice, if it is there."""
    if stage.slice is not None:
        return [model.slice_of_loss(stage.slice.of)]
    return [*model.layers[stage.first : stage.stop], *([model.loss] if stage.loss else [])]


@dataclass(frozen=True, slots=True)
class _Message:
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

    def to(self, rates: DeviceRates) -> _Message:
        """Return the same, to a device."""
        passes_s = self.nbytes / rates.downlink_bytes_per_s
        computes_s = self.flops / rates.flops_per_s
        return replace(self, passes_s=passes_s, computes_s=computes_s)


@dataclass(frozen=True, slots=True)
class _Errand:
    """What passes a device's links for a unit.

    Attributes:
        sent: to the device.
        sends: the sizes of what goes back, the last one first; of each piece of a micro-batch.
        x_s, y_s: how long all of it takes on the downlink, and on the uplink.
    """

    sent: Sequence[_Message]
    sends: Sequence[float]
    x_s: float
    y_s: float


@dataclass(slots=True)
class _Card:
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
        went_back: whether its last unit was a backward pass.
        computes_s: how long it computes in all.
        weights_s, x_s: how long weights, and activations, take on its downlink in all.
        y_s, gradients_s: how long activations, and gradients, take on its uplink in all.
        errands: what units take, by stage, tokens, pass and what is kept.
        allowed: of how many micro-batches it may keep what.
        latency_s: of its links.
        piece_down_s, piece_up_s: how long so much takes its links as passes the card at once.
    """

    rates: DeviceRates
    coming: deque[tuple[_Message, _Unit | None]] = field(default_factory=deque)
    left_bytes: float = 0.0
    going: deque[tuple[_Unit, list[float]]] = field(default_factory=deque)
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
    errands: dict[tuple[int, int, bool, Keep], _Errand] = field(default_factory=dict)
    allowed: KeptBatches = NOTHING_KEPT
    latency_s: float = field(init=False)
    piece_down_s: float = field(init=False)
    piece_up_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.latency_s = self.rates.latency_s
        self.piece_down_s = PIECE_BYTES / self.rates.downlink_bytes_per_s
        self.piece_up_s = PIECE_BYTES / self.rates.uplink_bytes_per_s


@dataclass(slots=True, eq=False)
class _Stage:
    """The state of one stage.

    Attributes:
        number, plan: which it is.
        costs: of its layers, then of the loss, if it is there.
        forward, backward: heaps of micro-batches that any of its devices may do next.
        kept_by: by micro-batch, the device that keeps something of it, and what.
        own: by device, a heap of micro-batches that it keeps, and may do backward next.
        passed: number of micro-batches whose backward pass is done.
        summed: devices that have sums.
    """

    number: int
    plan: PlannedStage
    costs: list[LayerCost]
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    kept_by: dict[int, tuple[int, Keep]] = field(default_factory=dict)
    own: dict[int, list[int]] = field(default_factory=dict)
    passed: int = 0
    summed: set[int] = field(default_factory=set)

    def next_backward(self, device: int) -> tuple[int, Keep]:
        """Take the micro-batch that a device is to do backward; say what it keeps of it."""
        if own := self.own.get(device):
            batch = heapq.heappop(own)
            return batch, self.kept_by.pop(batch)[1]
        return heapq.heappop(self.backward), Keep.NOTHING

    def messages(
        self, model: StageModel, tokens: int, *, forward: bool, keep: Keep, coded: bool
    ) -> list[_Message]:
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
        one = [_Message(float(round(n * ratio)), flops / pieces) for n, flops in found]
        one[-1] = replace(one[-1], answered=True)
        return one * pieces


@dataclass(slots=True, eq=False)
class _Unit:
    """What a device was asked for.

    Attributes:
        batch: the micro-batch; -1 for sums.
        sends: see `_Errand`.
        pieces: how many are not sent yet.
    """

    stage: _Stage
    batch: int
    device: SimulatedDevice
    forward: bool
    sends: Sequence[float]
    pieces: int = 1


class StageSimulation:
    """One step.

    Attributes:
        stages, slices, devices: their states.
        egress, ingress: the PS's card.
    """

    def __init__(
        self,
        model: StageModel,
        stages: Sequence[PlannedStage],
        kept_batches: Mapping[int, KeptBatches],
        devices_by_id: Mapping[int, DeviceRates],
        ps: PsCompute,
        slices: Sequence[PlannedStage] = (),
    ) -> None:
        card = ps.rates or PsRates()
        self.egress = _Card(max(1 / card.egress_bytes_per_s, card.byte_s))
        self.ingress = _Card(max(1 / card.ingress_bytes_per_s, card.byte_s))
        self.stages = [_Stage(n, plan, costs_of(model, plan)) for n, plan in enumerate(stages)]
        self.slices = [
            _Stage(n, plan, costs_of(model, plan)) for n, plan in enumerate(slices, len(stages))
        ]
        self.devices = {
            d: SimulatedDevice(devices_by_id[d], allowed=kept_batches.get(d, NOTHING_KEPT))
            for plan in (*stages, *slices)
            for d in plan.devices
        }
        self._free = set(self.devices)  # those that have fewer units than they may have
        self._stages_of: dict[int, list[_Stage]] = {}
        for stage in reversed([*self.stages, *self.slices]):
            for device in stage.plan.devices:
                self._stages_of.setdefault(device, []).append(stage)
        self._model = model
        tokens = max(model.tokens)
        activation = float(tokens * model.width * model.element_bytes)
        self._unit_s = {
            d: devices_by_id[d].unit_s(activation, math.fsum(c.flops for c in stage.costs) * tokens)
            for stage in (*self.stages, *self.slices)
            for d in stage.plan.devices
        }
        # What the PS does for a token: layers before the next stage, forward and both ways; or all
        # that follows the last one.
        self._between_s = {
            layers.before: (layers.forward_flops / ps.flops_per_s, layers.flops / ps.flops_per_s)
            for layers in model.ps_layers
        }
        _, last_s = self._between_s.get(len(model.layers), (0.0, 0.0))
        self._loss_s = model.loss.flops / ps.flops_per_s + last_s
        self._ps_free_s = self._end_s = 0.0
        self._answers: Counter[tuple[int, bool]] = Counter()  # of slices, by batch and pass
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._count = 0
        # Each the same object every time, which tells events apart.
        self._received_event, self._send_up_event = self._received, self._send_up

    def end_s(self) -> float:
        """Simulate the step; return when the last sums are there."""
        for stage in (*self.stages, *self.slices):
            self._load(stage)
        first = self.stages[0]
        for batch in range(len(self._model.tokens)):
            heapq.heappush(first.backward if first.plan.loss else first.forward, batch)
        self._ask(0.0, first.plan.devices)
        limited = bool(self.egress.byte_s or self.ingress.byte_s)
        while self._events:
            if limited:
                self._pass_pieces()
            now_s, _, happens, what = heapq.heappop(self._events)
            happens(now_s, what)
        return self._end_s

    def _pass_pieces(self) -> None:
        """Let pieces of messages pass the card as long as nothing else is next.

        It does what `_received` and `_send_up` do where more of a message follows; most events are
        such, so that what they take is what a simulation takes.
        """
        events, count = self._events, self._count
        received, send_up = self._received_event, self._send_up_event
        down, up = self.egress, self.ingress
        down_piece_s, up_piece_s = PIECE_BYTES * down.byte_s, PIECE_BYTES * up.byte_s
        while True:
            now_s, _, happens, device = events[0]
            if happens is received:
                if (left_bytes := device.left_bytes) <= PIECE_BYTES:
                    break
                device.left_bytes = left_bytes - PIECE_BYTES
                card, piece_s = down, down_piece_s
                passed_s = now_s + device.piece_down_s
            elif happens is send_up:
                sends = device.going[0][1]
                if sends[-1] <= PIECE_BYTES:
                    break
                sends[-1] -= PIECE_BYTES
                card, piece_s = up, up_piece_s
                passed_s = now_s + device.piece_up_s
            else:
                break
            card.passed_bytes += PIECE_BYTES
            free_s = (card.free_s if card.free_s > now_s else now_s) + piece_s
            card.free_s = free_s
            if free_s > passed_s:
                passed_s = free_s
            if happens is send_up:
                device.sent_s = passed_s
            count += 1
            heapq.heapreplace(events, (passed_s, count, happens, device))
        self._count = count

    def _at(self, time_s: float, happens: Callable[[float, Any], None], what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, happens, what))

    # --- the PS ---

    def _ask(self, now_s: float, devices: Iterable[int]) -> None:
        """Give each of these devices a unit in turn, until none takes another."""
        turn = list(self._free.intersection(devices))
        while turn:
            if len(turn) > 1:
                turn.sort(key=lambda d: (self.devices[d].under_way, self._unit_s[d], d))
            turn = [n for n in turn if self._ask_one(now_s, n) and n in self._free]

    def _ask_one(self, now_s: float, number: int) -> bool:
        """Give a device a unit: backward if its last one was forward, where there are both.

        Returns:
            Whether there was any.
        """
        device = self.devices[number]
        ahead = back = None
        for stage in self._stages_of[number]:
            if ahead is None and stage.forward:
                ahead = stage
            if back is None and (stage.backward or stage.own.get(number)):
                back = stage
        if ahead is not None and (device.went_back or back is None):
            self._go_forward(now_s, device, ahead)
        elif back is not None:
            self._go_backward(now_s, device, back)
        return ahead is not None or back is not None

    def _go_backward(self, now_s: float, device: SimulatedDevice, stage: _Stage) -> None:
        number = device.rates.device
        batch, keep = stage.next_backward(number)
        if stage.plan.loss:
            keep = self._next_kept(device)
        else:
            device.kept[keep] -= 1
        device.went_back = True
        stage.summed.add(number)
        self._give(now_s, stage, device, batch, forward=False, keep=keep)

    def _go_forward(self, now_s: float, device: SimulatedDevice, stage: _Stage) -> None:
        batch = heapq.heappop(stage.forward)
        device.went_back = False
        if (keep := self._next_kept(device)) is not Keep.NOTHING:
            device.kept[keep] += 1
            stage.kept_by[batch] = device.rates.device, keep
        self._give(now_s, stage, device, batch, forward=True, keep=keep)

    @staticmethod
    def _next_kept(device: SimulatedDevice) -> Keep:
        return device.allowed.next(device.kept[Keep.INPUTS], device.kept[Keep.ACTIVATIONS])

    def _give(
        self,
        now_s: float,
        stage: _Stage,
        device: SimulatedDevice,
        batch: int,
        *,
        forward: bool,
        keep: Keep,
    ) -> None:
        tokens = self._model.tokens[batch]
        key = stage.number, tokens, forward, keep
        if (errand := device.errands.get(key)) is None:
            errand = device.errands[key] = self._errand(stage, device.rates, tokens, forward, keep)
        unit = _Unit(stage, batch, device, forward, errand.sends, stage.plan.pieces)
        self._begin(device)
        device.x_s += errand.x_s
        device.y_s += errand.y_s
        self._send_down(now_s, device, errand.sent, unit)

    def _errand(
        self, stage: _Stage, rates: DeviceRates, tokens: int, forward: bool, keep: Keep
    ) -> _Errand:
        """Return what a unit of so many tokens takes on a device's links."""
        model, pieces = self._model, stage.plan.pieces
        coded = rates.codes_downlink
        messages = stage.messages(model, tokens, forward=forward, keep=keep, coded=coded)
        sent = [message.to(rates) for message in messages]
        x_s = sum(message.nbytes for message in sent) / rates.downlink_bytes_per_s
        if not (forward or stage.number > 0 or model.embeds):
            return _Errand(sent, (), x_s, 0.0)
        activation = tokens * model.width * model.element_bytes
        returned = float(round(rates.up_bytes(activation / pieces, model.coded_ratio)))
        if forward and stage.plan.slice is not None:
            returned = float(tokens * _SUMMARY_BYTES)
        return _Errand(sent, (returned,), x_s, pieces * returned / rates.uplink_bytes_per_s)

    def _begin(self, device: SimulatedDevice) -> None:
        """Count one more unit of a device."""
        device.under_way += 1
        if device.under_way >= UNITS_AT_ONCE:
            self._free.discard(device.rates.device)

    def _passed(self, now_s: float, unit: _Unit) -> None:
        """Note at the PS that all of a unit is back."""
        self._end_s = now_s
        unit.device.under_way -= 1
        if unit.device.under_way < UNITS_AT_ONCE:
            self._free.add(unit.device.rates.device)
        devices = {unit.device.rates.device}
        stage, batch = unit.stage, unit.batch
        if batch >= 0 and stage.plan.slice is not None:
            stage.passed += not unit.forward
            self._answered(now_s, batch, forward=unit.forward)
        elif batch >= 0 and unit.forward:
            if stage.number + 1 < len(self.stages):
                forward_s, _ = self._between_s.get(stage.plan.stop, (0.0, 0.0))
                if forward_s:
                    made = self.stages[stage.number + 1], batch
                    self._at(self._ps_done_s(now_s, batch, forward_s), self._input_made, made)
                else:
                    devices.update(self._put_forward(self.stages[stage.number + 1], batch))
            elif self.slices:
                for one in self.slices:
                    heapq.heappush(one.forward, batch)
                    devices.update(one.plan.devices)
            else:
                self._at(self._ps_done_s(now_s, batch, self._loss_s), self._loss_known, batch)
        elif batch >= 0:
            stage.passed += 1
            if stage.number > 0:
                before = self.stages[stage.number - 1]
                forward_s, both_s = self._between_s.get(before.plan.stop, (0.0, 0.0))
                if both_s:
                    done_s = self._ps_done_s(now_s, batch, both_s - forward_s)
                    self._at(done_s, self._gradient_made, (before, batch))
                else:
                    self._differentiated(before, batch)
                    devices.update(before.plan.devices)
        self._ask(now_s, devices)
        if batch >= 0 and stage.passed == len(self._model.tokens):
            self._take_sums(now_s, stage)

    def _ps_done_s(self, now_s: float, batch: int, token_s: float) -> float:
        """Return when the PS has done something for every token, after what it does before."""
        self._ps_free_s = max(self._ps_free_s, now_s) + token_s * self._model.tokens[batch]
        return self._ps_free_s

    def _put_forward(self, stage: _Stage, batch: int) -> Sequence[int]:
        """Note that a stage's input is there; return the devices that may take it."""
        heapq.heappush(stage.backward if stage.plan.loss else stage.forward, batch)
        return stage.plan.devices

    def _input_made(self, now_s: float, made: tuple[_Stage, int]) -> None:
        self._ask(now_s, self._put_forward(*made))

    def _gradient_made(self, now_s: float, made: tuple[_Stage, int]) -> None:
        stage, batch = made
        self._differentiated(stage, batch)
        self._ask(now_s, stage.plan.devices)

    def _answered(self, now_s: float, batch: int, *, forward: bool) -> None:
        """Note that a slice has passed a micro-batch; with the last one others may go on."""
        self._answers[batch, forward] += 1
        if self._answers[batch, forward] == len(self.slices):
            # The training thread is told, after which devices get what is there already.
            self._at(now_s, self._loss_summarized if forward else self._loss_known, batch)

    def _loss_summarized(self, now_s: float, batch: int) -> None:
        for stage in self.slices:
            self._differentiated(stage, batch)
        self._ask(now_s, [device for stage in self.slices for device in stage.plan.devices])

    def _loss_known(self, now_s: float, batch: int) -> None:
        self._differentiated(self.stages[-1], batch)
        self._ask(now_s, self.stages[-1].plan.devices)

    @staticmethod
    def _differentiated(stage: _Stage, batch: int) -> None:
        """Note that the gradient of a stage's output is there."""
        kept = stage.kept_by.get(batch)
        heap = stage.backward if kept is None else stage.own.setdefault(kept[0], [])
        heapq.heappush(heap, batch)

    def _take_sums(self, now_s: float, stage: _Stage) -> None:
        plain = [cost.gradient_bytes for cost in stage.costs if cost.gradient_bytes]
        ratio = self._model.gradient_coded_ratio
        for number in sorted(stage.summed) if plain else ():
            device = self.devices[number]
            sizes = [float(round(device.rates.up_bytes(nbytes, ratio))) for nbytes in plain]
            self._begin(device)
            device.gradients_s += sum(sizes) / device.rates.uplink_bytes_per_s
            unit = _Unit(stage, -1, device, False, sizes[::-1])
            begin_s = max(now_s + device.rates.latency_s, device.computed_s)
            self._answer(begin_s, unit, sizes[::-1])

    # --- devices ---

    def _load(self, stage: _Stage) -> None:
        """Send the weights of a stage to its devices."""
        plain = [cost.weight_bytes for cost in stage.costs if cost.weight_bytes]
        for number in stage.plan.devices if plain else ():
            device = self.devices[number]
            sizes = [self._down_bytes(device, nbytes) for nbytes in plain]
            device.weights_s += sum(sizes) / device.rates.downlink_bytes_per_s
            self._send_down(0.0, device, [_Message(size).to(device.rates) for size in sizes], None)

    def _down_bytes(self, device: SimulatedDevice, plain_bytes: float) -> float:
        """Return what of weights or activations passes a device's downlink."""
        return float(round(device.rates.down_bytes(plain_bytes, self._model.coded_ratio)))

    def _send_down(
        self,
        now_s: float,
        device: SimulatedDevice,
        messages: Sequence[_Message],
        unit: _Unit | None,
    ) -> None:
        """Send messages, of a unit if there is one, after those that are on their way."""
        if not self.egress.byte_s:  # no device waits for others: it is known when each is there
            received_s = device.received_s if device.received_s > now_s else now_s
            for message in messages:
                received_s += message.passes_s
                self.egress.passed_bytes += message.nbytes
                self._compute(received_s, device, message, unit)
            device.received_s = received_s
            return
        idle = not device.coming
        device.coming.extend((message, unit) for message in messages)
        if idle:
            device.left_bytes = messages[0].nbytes
            self._send_next(now_s, device)

    def _send_next(self, now_s: float, device: SimulatedDevice) -> None:
        """Send as much of a message as passes the card at once."""
        nbytes = min(device.left_bytes, PIECE_BYTES)
        device.left_bytes -= nbytes
        own_s = now_s + nbytes / device.rates.downlink_bytes_per_s
        self._at(self.egress.passed_s(now_s, own_s, nbytes), self._received_event, device)

    def _received(self, now_s: float, device: SimulatedDevice) -> None:
        if device.left_bytes:
            self._send_next(now_s, device)
            return
        message, unit = device.coming.popleft()
        self._compute(now_s, device, message, unit)
        if device.coming:
            device.left_bytes = device.coming[0][0].nbytes
            self._send_next(now_s, device)

    def _compute(
        self, received_s: float, device: SimulatedDevice, message: _Message, unit: _Unit | None
    ) -> None:
        """Compute what a message is for, after what the device computes already."""
        if message.flops or message.answered:
            begin_s = received_s + device.latency_s
            if device.computed_s > begin_s:
                begin_s = device.computed_s
            device.computes_s += message.computes_s
            device.computed_s = begin_s + message.computes_s
        if unit is not None and message.answered:
            self._answer(device.computed_s, unit, unit.sends)

    def _answer(self, made_s: float, unit: _Unit, sends: Sequence[float]) -> None:
        """Have what goes back of a unit, or of a piece of one, sent when it is made."""
        if self.ingress.byte_s:
            self._at(made_s, self._made, (unit, list(sends)))
            return
        device = unit.device
        for nbytes in reversed(sends):  # no device waits for others: it is known when each is there
            if device.sent_s > made_s:
                made_s = device.sent_s
            made_s += nbytes / device.rates.uplink_bytes_per_s
            device.sent_s = made_s
            self.ingress.passed_bytes += nbytes
        self._pass(made_s, unit)

    def _pass(self, sent_s: float, unit: _Unit) -> None:
        """Note that a piece of a unit is sent: with the last one all of it will be back."""
        unit.pieces -= 1
        if not unit.pieces:
            self._at(sent_s + unit.device.rates.latency_s, self._passed, unit)

    def _made(self, now_s: float, what: tuple[_Unit, list[float]]) -> None:
        """Send what was made, after what is on its way or waits to be sent."""
        unit, sends = what
        device = unit.device
        if not sends:
            self._pass(now_s, unit)
            return
        idle = not device.going
        device.going.append(what)
        if idle and device.sent_s > now_s:
            self._at(device.sent_s, self._send_up_event, device)
        elif idle:
            self._send_up(now_s, device)

    def _send_up(self, now_s: float, device: SimulatedDevice) -> None:
        """Send as much as passes the card at once."""
        unit, sends = device.going[0]
        nbytes = sends[-1]
        if nbytes > PIECE_BYTES:
            sends[-1] -= PIECE_BYTES
            nbytes = PIECE_BYTES
        else:
            sends.pop()
        own_s = now_s + nbytes / device.rates.uplink_bytes_per_s
        device.sent_s = sent_s = self.ingress.passed_s(now_s, own_s, nbytes)
        if not sends:
            device.going.popleft()
            self._pass(sent_s, unit)
        if device.going:
            self._at(sent_s, self._send_up_event, device)
