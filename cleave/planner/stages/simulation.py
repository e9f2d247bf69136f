"""Event-driven simulation of a training step by stages.

The simulated PS first sends the trained weights, layer by layer. It assigns requests by the rules
in `rules.py`. Each link carries one message at a time, and each processor runs one graph at a time.
The PS's network card transfers pieces of messages in order of arrival. The PS computes PS layers
and losses one at a time. Each slice of the loss receives the output of the last stage. A slice's
backward pass starts after the forward passes of all slices. The last stage's backward pass starts
after the backward passes of all slices.

A device with the state of a tied LM head also computes the embedding. It returns the first stage's
inputs, and receives their gradients, unless it has all layers. Only these transfers are simulated.

A device on the PS's computer shares its processor with the PS, whose work interrupts the device's
graph runs. If devices keep the trained state, they return squared gradients after all passes, and
then update their layers.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages import rules as rules
from cleave.planner.stages.model import (
    NOTHING_KEPT,
    Keep,
    KeptBatches,
    LayerCost,
    PlannedStage,
    PsCompute,
    StageModel,
)
from cleave.planner.stages.rules import REQUESTS_AT_ONCE, Pass
from cleave.planner.stages.simulated import (
    PIECE_BYTES,
    PassMessages,
    SimulatedCard,
    SimulatedDevice,
    SimulatedMessage,
    SimulatedRequest,
    SimulatedStage,
)

_SUMMARY_BYTES: Final = 8  # bytes per token that a loss slice returns for its forward pass


def costs_of(model: StageModel, stage: PlannedStage) -> list[LayerCost]:
    """Return the costs of a stage's layers, followed by the costs of its loss or loss slice."""
    if stage.slice is not None:
        return [model.slice_of_loss(stage.slice.share)]
    return [*model.layers[stage.first : stage.stop], *([model.loss] if stage.loss else [])]


def _turn(device: SimulatedDevice) -> tuple[int, float, int]:
    return rules.turn(device.under_way, device.request_s, device.number)


def _next_kept(device: SimulatedDevice) -> Keep:
    return rules.next_kept(device.allowed, device.kept[Keep.INPUTS], device.kept[Keep.ACTIVATIONS])


class StageSimulation:
    """The simulation of one training step by stages.

    Attributes:
        egress, ingress: sending and receiving direction of the PS's network card.
        loss_s: time per token that the PS needs for the loss and the layers after the last stage.
    """

    def __init__(
        self,
        model: StageModel,
        stages: Sequence[PlannedStage],
        kept_batches: Mapping[int, KeptBatches],
        devices_by_id: Mapping[int, DeviceRates],
        ps: PsCompute,
        slices: Sequence[PlannedStage] = (),
        *,
        forward_first: bool = False,
    ) -> None:
        self._forward_first = forward_first
        card = ps.rates or PsRates()
        self.egress = SimulatedCard(max(1 / card.egress_bytes_per_s, card.byte_s))
        self.ingress = SimulatedCard(max(1 / card.ingress_bytes_per_s, card.byte_s))
        every = [
            SimulatedStage(n, plan, costs_of(model, plan))
            for n, plan in enumerate((*stages, *slices))
        ]
        self.stages, self.slices = every[: len(stages)], every[len(stages) :]
        self.devices = {
            d: SimulatedDevice(devices_by_id[d], allowed=kept_batches.get(d, NOTHING_KEPT))
            for plan in (*stages, *slices)
            for d in plan.devices
        }
        self.model = model
        tokens = max(model.tokens)
        activation = float(tokens * model.width * model.element_bytes)
        for stage in every:
            flops = math.fsum(cost.flops for cost in stage.costs) * tokens
            for number in stage.plan.devices:
                device = self.devices[number]
                if not device.stages:
                    device.request_s = device.rates.request_s(activation, flops)
                own = stage.own[number] = []
                device.stages.insert(0, (stage, own))
                stage.devices.append(device)
        self._of_slices = [device for stage in self.slices for device in stage.devices]
        # For each stage: seconds per token of the preceding PS layers, in one and in both passes.
        self._between_s = {
            layers.before: (layers.forward_flops / ps.flops_per_s, layers.flops / ps.flops_per_s)
            for layers in model.ps_layers
        }
        _, last_s = self._between_s.get(len(model.layers), (0.0, 0.0))
        self.loss_s = ps.loss_s(model.loss) + last_s
        self._ps_free_s = self._end_s = self._squares_s = self._dx_s = 0.0
        embeds = model.embeds_on_device(stages)
        self._embeds = self.stages[-1].devices[0] if embeds else None
        # The device on the PS's computer, and its queued and running graph runs.
        self._own = self.devices.get(-1 if ps.own_device is None else ps.own_device)
        self._own_runs: deque[tuple[SimulatedMessage, SimulatedRequest | None]] = deque()
        self._own_free_s = 0.0
        self._answers: Counter[tuple[int, bool]] = Counter()  # finished slices by batch and pass
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._numbers = count()  # simultaneous events happen in the order in which they were added
        # Bound once, so that events can be compared with `is`.
        self._received_event, self._send_up_event = self._received, self._send_up

    def end_s(self) -> float:
        """Simulate the step and return the time in seconds until all results have arrived."""
        for stage in (*self.stages, *self.slices):
            self._load(stage)
        first = self.stages[0]
        if self._embeds is not None:
            self._embed(self._embeds)
        else:
            for batch in range(len(self.model.tokens)):
                self._put_forward(first, batch)
            self._ask(0.0, first.devices)
        events, replace_first, numbers = self._events, heapq.heapreplace, self._numbers
        # Most events are transfers of pieces on the network card. They are handled here for speed.
        received, send_up = self._received_event, self._send_up_event
        while events:
            now_s, _, happens, what = events[0]
            if happens is received:
                if left_bytes := what.left_bytes:  # the next piece of the same message
                    nbytes = PIECE_BYTES if left_bytes > PIECE_BYTES else left_bytes
                    what.left_bytes = left_bytes - nbytes
                    own_s = now_s + nbytes / what.downlink_bytes_per_s
                    passed_s = self.egress.passed_s(now_s, own_s, nbytes)
                    replace_first(events, (passed_s, next(numbers), received, what))
                    continue
            elif happens is send_up:
                sends = what.going[0][1]
                if sends[-1] > PIECE_BYTES:  # `_send_up` sends the last piece
                    sends[-1] -= PIECE_BYTES
                    passed_s = self.ingress.passed_s(now_s, now_s + what.piece_up_s, PIECE_BYTES)
                    replace_first(events, (passed_s, next(numbers), send_up, what))
                    continue
            heapq.heappop(events)
            happens(now_s, what)
        if not self._squares_s:
            return self._end_s
        if self._embeds is not None:  # this device needs the last gradient for its squares
            self._squares_s = max(self._squares_s, self._dx_s + 2 * self._embeds.latency_s)
        return self._squares_s + max(self._update_s(device) for device in self.devices.values())

    @staticmethod
    def _update_s(device: SimulatedDevice) -> float:
        """Return the time in seconds between an update request to a device and its reply."""
        flops = math.fsum(c.update_flops for stage, _ in device.stages for c in stage.costs)
        return 2 * device.latency_s + flops / device.rates.flops_per_s

    def _embed(self, device: SimulatedDevice) -> None:
        """Let a device return the first stage's input of each micro-batch."""
        model, rates = self.model, device.rates
        device.sent_s = 2 * device.latency_s
        for batch, tokens in enumerate(model.tokens):
            activation = tokens * model.width * model.element_bytes
            nbytes = round(rates.up_bytes(activation, model.coded_ratio))
            took_s = nbytes / rates.uplink_bytes_per_s
            device.y_s += took_s
            device.sent_s = self.ingress.passed_s(device.sent_s, device.sent_s + took_s, nbytes)
            self._at(device.sent_s, self._input_made, (self.stages[0], batch))

    def _at(self, time_s: float, happens: Callable[[float, Any], None], what: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), happens, what))

    # --- the PS ---

    # After each event, no device with a free slot has a ready request. So an event assigns requests
    # only to devices for which the event may have made a request ready.

    def _ask(self, now_s: float, devices: Iterable[SimulatedDevice]) -> None:
        """Assign requests to `devices` in turn, until no device gets another request."""
        turn = [device for device in devices if device.under_way < REQUESTS_AT_ONCE]
        while turn:
            if len(turn) > 1:
                turn.sort(key=_turn)
            turn = [
                device
                for device in turn
                if self._ask_one(now_s, device) and device.under_way < REQUESTS_AT_ONCE
            ]

    def _ask_first(self, now_s: float, devices: Sequence[SimulatedDevice]) -> None:
        """Assign an arrived micro-batch to the first eligible device."""
        free = [device for device in devices if device.under_way < REQUESTS_AT_ONCE]
        if free:
            self._ask_one(now_s, min(free, key=_turn))

    def _ask_both(
        self, now_s: float, device: SimulatedDevice, others: Sequence[SimulatedDevice]
    ) -> None:
        """Assign an arrived micro-batch to one of `others`, and the next request to `device`."""
        free = [other for other in others if other.under_way < REQUESTS_AT_ONCE]
        if not free:
            self._ask_one(now_s, device)
        elif device in free:
            self._ask(now_s, free)
        else:
            for one in sorted((device, min(free, key=_turn)), key=_turn):
                self._ask_one(now_s, one)

    def _ask_one(self, now_s: float, device: SimulatedDevice) -> bool:
        """Assign a ready request to a device, or return False if no request is ready."""
        ahead = back = None
        for stage, own in device.stages:
            if ahead is None and stage.forward:
                ahead = stage
            if back is None and (own or stage.backward):
                back = stage
        direction = rules.next_pass(
            forward=ahead is not None,
            backward=back is not None,
            last_was_backward=device.went_back,
            forward_first=self._forward_first,
        )
        if direction is Pass.FORWARD and ahead is not None:
            self._go_forward(now_s, device, ahead)
        elif direction is Pass.BACKWARD and back is not None:
            self._go_backward(now_s, device, back)
        return direction is not None

    def _go_backward(self, now_s: float, device: SimulatedDevice, stage: SimulatedStage) -> None:
        number = device.number
        batch, keep = stage.next_backward(number)
        if stage.plan.loss:
            keep = _next_kept(device)
        else:
            device.kept[keep] -= 1
        device.went_back = True
        stage.summed.add(number)
        self._give(now_s, stage, device, batch, forward=False, keep=keep)

    def _go_forward(self, now_s: float, device: SimulatedDevice, stage: SimulatedStage) -> None:
        batch = heapq.heappop(stage.forward)
        device.went_back = False
        if (keep := _next_kept(device)) is not Keep.NOTHING:
            device.kept[keep] += 1
            stage.kept_by[batch] = device, keep
        self._give(now_s, stage, device, batch, forward=True, keep=keep)

    def _give(
        self,
        now_s: float,
        stage: SimulatedStage,
        device: SimulatedDevice,
        batch: int,
        *,
        forward: bool,
        keep: Keep,
    ) -> None:
        tokens = self.model.tokens[batch]
        messages = self._messages(stage, device, tokens, forward=forward, keep=keep)
        request = SimulatedRequest(stage, batch, device, forward, messages.sends, stage.plan.pieces)
        device.under_way += 1
        device.x_s += messages.x_s
        device.y_s += messages.y_s
        self._send_down(now_s, device, messages.sent, request)

    def _messages(
        self,
        stage: SimulatedStage,
        device: SimulatedDevice,
        tokens: int,
        *,
        forward: bool,
        keep: Keep,
    ) -> PassMessages:
        """Return the messages between the PS and a device for one forward or backward pass."""
        key = stage.number, tokens, forward, keep
        if (known := device.pass_messages.get(key)) is not None:
            return known
        model, rates, pieces = self.model, device.rates, stage.plan.pieces
        coded = rates.codes_downlink
        messages = stage.messages(model, tokens, forward=forward, keep=keep, coded=coded)
        sent = [message.to(rates) for message in messages]
        x_s = sum(message.nbytes for message in sent) / rates.downlink_bytes_per_s
        found = PassMessages(sent, (), x_s, 0.0)
        returns_dx = model.embeds and not model.is_from_ids(stage.plan)
        if forward or stage.number > 0 or returns_dx:
            activation = tokens * model.width * model.element_bytes
            returned = float(round(rates.up_bytes(activation / pieces, model.coded_ratio)))
            if forward and stage.plan.slice is not None:
                returned = float(tokens * _SUMMARY_BYTES)
            y_s = pieces * returned / rates.uplink_bytes_per_s
            found = PassMessages(sent, (returned,), x_s, y_s)
        device.pass_messages[key] = found
        return found

    def _passed(self, now_s: float, request: SimulatedRequest) -> None:
        """Record the arrival of all results of a request and assign the next requests."""
        self._end_s = now_s
        device, stage, batch = request.device, request.stage, request.batch
        device.under_way -= 1
        others: Sequence[SimulatedDevice] = ()
        if batch >= 0:
            if stage.plan.slice is not None:
                stage.went += request.forward
                stage.passed += not request.forward
                self._answered(now_s, batch, forward=request.forward)
            elif request.forward:
                others = self._passed_forward(now_s, stage, batch)
            else:
                stage.passed += 1
                if stage.passed == len(self.model.tokens) and stage.costs[0].update_flops:
                    self._squares_s = now_s + 2 * device.latency_s
                if stage.number > 0:
                    others = self._passed_backward(now_s, self.stages[stage.number - 1], batch)
                elif self._embeds is not None:
                    self._return_dx(now_s, self._embeds, batch)
        if others is self._of_slices:
            self._ask(now_s, dict.fromkeys((device, *others)))
        elif device.under_way == REQUESTS_AT_ONCE - 1:
            self._ask_both(now_s, device, others)
        elif others:
            self._ask_first(now_s, others)
        if batch >= 0 and rules.may_take_sums(len(self.model.tokens) - stage.passed):
            self._take_sums(now_s, stage)

    def _return_dx(self, now_s: float, device: SimulatedDevice, batch: int) -> None:
        """Send the gradient of the first stage's input to the device with the embedding."""
        model, rates = self.model, device.rates
        activation = model.tokens[batch] * model.width * model.element_bytes
        nbytes = round(rates.down_bytes(activation, model.coded_ratio))
        message = SimulatedMessage(float(nbytes)).to(rates)
        device.x_s += message.passes_s
        self._send_down(now_s, device, [message], None)
        self._dx_s = max(now_s + message.passes_s, device.received_s, self.egress.free_s)

    def _passed_forward(
        self, now_s: float, stage: SimulatedStage, batch: int
    ) -> Sequence[SimulatedDevice]:
        """Record that a stage's output has arrived, and return the devices that can continue."""
        stage.went += 1
        if stage.number + 1 < len(self.stages):
            after = self.stages[stage.number + 1]
            forward_s, _ = self._between_s.get(stage.plan.stop, (0.0, 0.0))
            if not forward_s:
                return self._put_forward(after, batch)
            self._at(self._ps_done_s(now_s, batch, forward_s), self._input_made, (after, batch))
        elif self.slices:
            for one in self.slices:
                heapq.heappush(one.forward, batch)
            return self._of_slices
        else:
            self._at(self._ps_done_s(now_s, batch, self.loss_s), self._loss_known, batch)
        return ()

    def _passed_backward(
        self, now_s: float, before: SimulatedStage, batch: int
    ) -> Sequence[SimulatedDevice]:
        """Record an output gradient of stage `before`; return the devices that can continue."""
        forward_s, both_s = self._between_s.get(before.plan.stop, (0.0, 0.0))
        if not both_s:
            return self._differentiated(before, batch)
        done_s = self._ps_done_s(now_s, batch, both_s - forward_s)
        self._at(done_s, self._gradient_made, (before, batch))
        return ()

    def _ps_done_s(self, now_s: float, batch: int, token_s: float) -> float:
        """Queue a task of `token_s` seconds per token on the PS and return the task's end time."""
        took_s = token_s * self.model.tokens[batch]
        self._ps_free_s = max(self._ps_free_s, now_s) + took_s
        if self._own is not None and self._own_runs:
            self._own_free_s += took_s
            self._own.delayed_s += took_s
        return self._ps_free_s

    @staticmethod
    def _put_forward(stage: SimulatedStage, batch: int) -> Sequence[SimulatedDevice]:
        """Record that a micro-batch is ready for a forward pass; return the eligible devices."""
        heapq.heappush(stage.backward if stage.plan.loss else stage.forward, batch)
        return stage.devices

    def _input_made(self, now_s: float, made: tuple[SimulatedStage, int]) -> None:
        self._ask_first(now_s, self._put_forward(*made))

    def _gradient_made(self, now_s: float, made: tuple[SimulatedStage, int]) -> None:
        self._ask_first(now_s, self._differentiated(*made))

    def _answered(self, now_s: float, batch: int, *, forward: bool) -> None:
        """Record a finished pass of a loss slice. After the last slice, start the next pass."""
        self._answers[batch, forward] += 1
        if self._answers[batch, forward] == len(self.slices):
            # The training thread is notified first. In the meantime, devices get other ready
            # requests.
            self._at(now_s, self._loss_summarized if forward else self._loss_known, batch)

    def _loss_summarized(self, now_s: float, batch: int) -> None:
        may = [device for stage in self.slices for device in self._differentiated(stage, batch)]
        self._ask(now_s, dict.fromkeys(may))

    def _loss_known(self, now_s: float, batch: int) -> None:
        self._ask_first(now_s, self._differentiated(self.stages[-1], batch))

    @staticmethod
    def _differentiated(stage: SimulatedStage, batch: int) -> Sequence[SimulatedDevice]:
        """Record that a micro-batch is ready for a backward pass; return the eligible devices."""
        if (kept := stage.kept_by.get(batch)) is None:
            heapq.heappush(stage.backward, batch)
            return stage.devices
        device, _ = kept
        heapq.heappush(stage.own[device.number], batch)
        return (device,)

    def _take_sums(self, now_s: float, stage: SimulatedStage) -> None:
        """Fetch the accumulated gradients of finished stages from the devices of a stage.

        Devices from which an earlier stage awaits input gradients are skipped.
        """
        batches = len(self.model.tokens)
        for number in sorted(stage.summed):
            device = self.devices[number]
            awaited = any(one.number and one.passed < batches for one, _ in device.stages)
            for one, _ in reversed(device.stages):
                left = batches - one.passed
                if number in one.summed and rules.may_take_sums(left, gradients_awaited=awaited):
                    one.summed.discard(number)
                    self._take_sums_of(now_s, one, device)

    def _take_sums_of(self, now_s: float, stage: SimulatedStage, device: SimulatedDevice) -> None:
        rates, ratio = device.rates, self.model.gradient_coded_ratio
        sizes = [
            float(round(rates.up_bytes(cost.gradient_bytes, ratio)))
            for cost in reversed(stage.costs)
            if cost.gradient_bytes
        ]
        if sizes:
            device.under_way += 1
            device.gradients_s += sum(sizes) / rates.uplink_bytes_per_s
            request = SimulatedRequest(stage, -1, device, False, sizes)
            self._answer(max(now_s + rates.latency_s, device.computed_s), request)

    # --- devices ---

    def _load(self, stage: SimulatedStage) -> None:
        for device in stage.devices:
            rates, ratio = device.rates, self.model.coded_ratio
            messages = [
                SimulatedMessage(float(round(rates.down_bytes(nbytes, ratio)))).to(rates)
                for nbytes in (cost.weight_bytes for cost in stage.costs)
                if nbytes
            ]
            if messages:
                sent_bytes = sum(message.nbytes for message in messages)
                device.weights_s += sent_bytes / rates.downlink_bytes_per_s
                self._send_down(0.0, device, messages, None)

    def _send_down(
        self,
        now_s: float,
        device: SimulatedDevice,
        messages: Sequence[SimulatedMessage],
        request: SimulatedRequest | None,
    ) -> None:
        """Queue messages behind those in transit to a device. `request` is None for weights."""
        if not self.egress.byte_s:  # the network card limits nothing: arrival times are known
            received_s = device.received_s if device.received_s > now_s else now_s
            for message in messages:
                received_s += message.passes_s
                self.egress.passed_bytes += message.nbytes
                self._compute(received_s, device, message, request)
            device.received_s = received_s
            return
        idle = not device.coming
        device.coming.extend((message, request) for message in messages)
        if idle:
            self._send_message(now_s, device)

    def _send_message(self, now_s: float, device: SimulatedDevice) -> None:
        """Send the first piece of the next message. `end_s` sends the remaining pieces."""
        left_bytes = device.coming[0][0].nbytes
        nbytes = min(left_bytes, PIECE_BYTES)
        device.left_bytes = left_bytes - nbytes
        own_s = now_s + nbytes / device.downlink_bytes_per_s
        self._at(self.egress.passed_s(now_s, own_s, nbytes), self._received_event, device)

    def _received(self, now_s: float, device: SimulatedDevice) -> None:
        """Start the graph run for a message that has arrived, and send the next message."""
        message, request = device.coming.popleft()
        self._compute(now_s, device, message, request)
        if device.coming:
            self._send_message(now_s, device)

    def _compute(
        self,
        received_s: float,
        device: SimulatedDevice,
        message: SimulatedMessage,
        request: SimulatedRequest | None,
    ) -> None:
        """Queue, on the device's simulated processor, the graph run that a message triggers."""
        if device is self._own:
            self._at(received_s + device.latency_s, self._own_received, (message, request))
            return
        if message.flops or message.answered:
            begin_s = received_s + device.latency_s
            if device.computed_s > begin_s:
                begin_s = device.computed_s
            device.computes_s += message.computes_s
            device.computed_s = begin_s + message.computes_s
        if request is not None and message.answered:
            self._answer(device.computed_s, request)

    def _own_received(
        self, now_s: float, what: tuple[SimulatedMessage, SimulatedRequest | None]
    ) -> None:
        """Queue a graph run on the processor that a device shares with the PS."""
        self._own_runs.append(what)
        if len(self._own_runs) == 1:
            self._begin_own_run(now_s)

    def _begin_own_run(self, now_s: float) -> None:
        message, _ = self._own_runs[0]
        assert self._own is not None
        self._own.computes_s += message.computes_s
        self._own_free_s = max(now_s, self._ps_free_s) + message.computes_s
        self._at(self._own_free_s, self._own_run_ended, None)

    def _own_run_ended(self, now_s: float, _: None) -> None:
        """End a graph run, unless the PS's work has interrupted it since it began."""
        if now_s < self._own_free_s:
            self._at(self._own_free_s, self._own_run_ended, None)
            return
        message, request = self._own_runs.popleft()
        if request is not None and message.answered:
            self._answer(now_s, request)
        if self._own_runs:
            self._begin_own_run(now_s)

    def _answer(self, made_s: float, request: SimulatedRequest) -> None:
        """Queue the results of a request or chunk. Its computation ends at `made_s`."""
        if self.ingress.byte_s:
            self._at(made_s, self._made, (request, list(request.sends)))
            return
        device = request.device
        for nbytes in reversed(request.sends):  # the network card limits no transfer
            if device.sent_s > made_s:
                made_s = device.sent_s
            made_s += nbytes / device.rates.uplink_bytes_per_s
            device.sent_s = made_s
            self.ingress.passed_bytes += nbytes
        self._pass(made_s, request)

    def _pass(self, sent_s: float, request: SimulatedRequest) -> None:
        """Record the arrival of a chunk's results. After the last chunk, finish the request."""
        request.pieces -= 1
        if not request.pieces:
            self._at(sent_s + request.device.rates.latency_s, self._passed, request)

    def _made(self, now_s: float, what: tuple[SimulatedRequest, list[float]]) -> None:
        """Queue computed results on the uplink behind other results of the device."""
        request, sends = what
        device = request.device
        if not sends:
            self._pass(now_s, request)
            return
        idle = not device.going
        device.going.append(what)
        if idle and device.sent_s > now_s:
            self._at(device.sent_s, self._send_up_event, device)
        elif idle:
            self._send_up(now_s, device)

    def _send_up(self, now_s: float, device: SimulatedDevice) -> None:
        """Send the next piece of the first result in the device's queue."""
        request, sends = device.going[0]
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
            self._pass(sent_s, request)
        if device.going:
            self._at(sent_s, self._send_up_event, device)
