"""Devices that carry out a step by stages on symbols, one message at a time."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cleave import graph_names as names
from cleave.planner.stages.model import PlannedStage
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.instructions import ForSteps, SendStage, TellStep
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StageDone
from cleave.scheduler.stages.resident import ResidentParameter
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    EmbeddingWork,
    LayerWork,
    LossWork,
    Resident,
    SliceWork,
    StageGraph,
    StageOrder,
    StepWork,
    SumShape,
)

WIDTH = 2
TOKENS = 3
ACTIVATION_BYTES = 6
LOGITS_BYTES = 12
WEIGHTS = TrafficKind.WEIGHTS
LOST = "lost"  # in place of an array that has no value


@dataclass(frozen=True)
class Symbol:
    """A payload that says what it was made of."""

    value: Any
    nbytes: int = 4 * WIDTH * TOKENS

    def pack(self) -> memoryview:
        return memoryview(bytes(self.nbytes))


def array(
    value: Any, nbytes: int = 4 * WIDTH * TOKENS, kind: TrafficKind = TrafficKind.ACTIVATIONS
) -> StageArray:
    return StageArray(TOKENS, WIDTH, "fp32", Symbol(value, nbytes), kind)


def array_in_parts(value: Any, nbytes: int, kind: TrafficKind) -> StageArray:
    """An array that fits no message, in two parts."""
    parts = (array((value, n), nbytes // 2, kind) for n in range(2))
    return replace(array(value, nbytes, kind), parts=tuple(parts))


MASK_BYTES = 7
STEP_BATCHES = 100  # the first micro-batch of step n has the number n * STEP_BATCHES
SUM_ROWS = 2
MANY_ROWS = 2000  # sums that take an uplink longer than all else


def mask_of(batch: int) -> int:
    """Return the number of a micro-batch's mask, which another one may have as well."""
    return batch // 2


def batch_of(x: Any) -> int:
    """Return of which micro-batch an activation is."""
    while x[0] != "x":
        x = x[-1]
    batch: int = x[1]
    return batch


def is_of_step(weight: Any, layer: str, x: Any) -> bool:
    """Return whether a weight has the updates of all steps before that of an activation."""
    if weight == f"frozen{layer}":
        return True
    name, updates = history_of(weight)
    return name == f"w{layer}" and len(updates) == batch_of(x) // STEP_BATCHES


def history_of(state: Any) -> tuple[str, tuple[Any, ...]]:
    """Return the name of a weight or moment and its updates, oldest first."""
    if isinstance(state, str):
        return state, ()
    kind, name, updates = state
    assert kind == "updated"
    return name, updates


def step_work(
    layers: int,
    batches: int,
    stages: Sequence[PlannedStage],
    sum_rows: int = SUM_ROWS,
    slices: Sequence[PlannedStage] = (),
    step: int = 0,
    frozen: Container[int] = (),
    tied: bool = False,
    **changed: Any,
) -> StepWork:
    """A step whose layers are symbols, with a loss if the last stage has one, or in slices.

    Layers in `frozen` have no gradients. If `tied`, the last stage computes the embedding, too.
    """
    shape = SumShape(sum_rows, 5)
    mask = names.extra("mask")
    before = step * STEP_BATCHES
    masks = [array(("mask", mask_of(before) + n), MASK_BYTES) for n in range(batches)]
    of_batch = [{mask: masks[mask_of(batch)]} for batch in range(batches)]
    held = []
    for number in range(layers):
        sums = {} if number in frozen else {"w": shape}
        inputs = (names.X, names.parameter("w"), mask)
        forward = StageGraph(f"forward {number}".encode(), inputs, (names.Y, names.activation(0)))
        of_backward = (*inputs, names.DY, *map(names.total, sums))
        found = (names.DX, *map(names.new_total, sums))
        backward = StageGraph(f"backward {number}".encode(), of_backward, found)
        from_activations = StageGraph(
            f"from_activations {number}".encode(), (*of_backward, names.activation(0)), found
        )
        made = array_in_parts if number % 2 else array
        name = f"frozen{number}" if number in frozen else f"w{number}"
        parameters = {names.parameter("w"): made(name, 40, WEIGHTS)}
        held.append(
            LayerWork(
                forward, backward, parameters, sums, {}, 10, 30,
                from_activations, {names.activation(0): ACTIVATION_BYTES}, TOKENS, 21, of_batch,
            )
        )  # fmt: skip
    targets = [array(("targets", batch)) for batch in range(batches)]
    loss = None
    if stages[-1].loss:
        graph = StageGraph(
            b"loss",
            (names.X, names.TARGETS, names.parameter("h"), names.total("h")),
            (names.LOSS, names.DX, names.new_total("h")),
        )
        held_by_loss = {names.parameter("h"): array(f"w{LOSS_LAYER}", 40, WEIGHTS)}
        loss = LossWork(graph, held_by_loss, {"h": shape}, targets, 5)
    embedding, ids = None, []
    if tied:
        assert loss is not None
        of_embedding = names.IDS, names.parameter("h")
        embedding = EmbeddingWork(
            StageGraph(b"embed", of_embedding, (names.Y,)),
            StageGraph(
                b"unembed", (*of_embedding, names.DY, names.total("h")), (names.new_total("h"),)
            ),
            loss.parameters,
            loss.sums,
        )
        ids = [array(("ids", before + batch)) for batch in range(batches)]
    x = [array(("x", before + batch)) for batch in range(batches)]
    of_slice = (names.X, names.TARGETS, names.parameter("h"))
    works = [
        SliceWork(
            StageGraph(f"found {number}".encode(), of_slice, (names.Y, names.LOGITS)),
            StageGraph(
                f"back {number}".encode(),
                (*of_slice, names.DY, names.LOGITS, names.total("h")),
                (names.DX, names.new_total("h")),
            ),
            {names.parameter("h"): array(f"h{number}", 8, WEIGHTS)},
            {"h": shape},
            targets,
            5,
            10,
            LOGITS_BYTES,
        )
        for number in range(len(slices))
    ]
    settings: dict[str, Any] = {
        "gradients": "fp32", "slices": slices, "slice_works": works, "embedding": embedding,
        "ids": ids, **changed
    }  # fmt: skip
    return StepWork(held, loss, x, WIDTH, [TOKENS] * batches, stages, **settings)


def resident_of(work: StepWork) -> Resident:
    """Return the trained state of a step's layers: a weight and a moment of each that trains.

    If the step has a loss, that counts as a layer.
    """
    moment = names.moment(0)
    state = names.WEIGHT, moment
    parameters = {}
    for number, layer in enumerate(work.layers):
        if not layer.sums:
            continue
        made = array_in_parts if number % 2 else array
        weight = layer.parameters[names.parameter("w")]
        parameters[number, "w"] = ResidentParameter(weight, (made(f"m{number}", 40, WEIGHTS),), 0)
    if work.loss is not None:
        weight, moment_array = work.loss.parameters[names.parameter("h")], array("m-1", 40, WEIGHTS)
        parameters[LOSS_LAYER, "h"] = ResidentParameter(weight, (moment_array,), 0)
    total, new = names.total(names.SQUARES), names.new_total(names.SQUARES)
    return Resident(
        parameters,
        StageGraph(
            b"update",
            (names.WEIGHT, names.GRADIENT, moment, names.SCALARS),
            tuple(map(names.updated, state)),
        ),
        StageGraph(b"squares", (names.GRADIENT, total), (new,)),
    )


@dataclass
class SymbolicDevice:
    """A device: what it holds, and the orders that it has not answered yet.

    An order that it could not do has `LOST` in place of what it found.
    """

    held: dict[int, Any] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    orders: deque[tuple[StageOrder, int, Any]] = field(default_factory=deque)
    fails: Callable[[], bool] = lambda: False
    failed: bool = False
    sent: list[Any] = field(default_factory=list)
    # what it held before each of the last messages
    before: deque[tuple[dict[int, Any], dict[int, int]]] = field(
        default_factory=lambda: deque(maxlen=8)
    )
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)  # key: run
    lies: Callable[[], bool] = lambda: False  # whether it falsifies the next update
    falsifies: bool = False  # whether it falsifies all state that it returns
    lied: bool = False
    lie: str = ""  # what it puts in the place of coefficients of an update

    def take(self, message: Any, order: StageOrder | None) -> None:
        self.before.append((dict(self.held), dict(self.sizes)))
        match message:
            case messages.Put() | messages.Graph():
                assert message.id not in self.held
                value = message.payload
                self.held[message.id] = getattr(value, "value", value)
                self.sent.append(self.held[message.id])
                self.sizes[message.id] = payload_bytes(message.payload)
            case messages.Concat():
                assert message.id not in self.held
                values = [self.held.pop(id) for id in message.ids]
                assert values == [(values[0][0], n) for n in range(2)]
                self.held[message.id] = values[0][0]
                self.sizes[message.id] = sum(self.sizes.pop(id) for id in message.ids)
            case messages.Drop():
                for id in message.ids:
                    if id in self.held or not self.failed:
                        del self.held[id], self.sizes[id]
            case messages.Cancel():
                self.orders = deque(o for o in self.orders if o[1] not in message.ids)
            case messages.RunGraph():
                assert order is not None
                lost = self.fails() or any(self.held.get(id) == LOST for id in message.inputs)
                self.failed |= lost
                self.orders.append((order, message.id, LOST if lost else None))
                made = [LOST] * len(message.outputs) if lost else self._run(message)
                kept = [id for id in message.outputs if id]
                self.outputs[message.id] = tuple(kept)
                for id, nbytes in zip(kept, message.output_bytes, strict=True):
                    assert id not in self.held or message.inputs.count(id) == 1
                    self.held[id], self.sizes[id] = made[message.outputs.index(id)], nbytes
            case messages.Fetch():
                assert order is not None
                value = self.held[message.array]
                nbytes = 4 * message.rows * message.columns
                found: Any = Symbol((message.first_row, value), nbytes)
                if self.fails() or value == LOST:
                    self.failed, found = True, LOST
                elif order.name == names.SQUARES:
                    assert value[0] == "squares"
                    found = struct.pack("<f", len(value[1]))
                elif self.falsifies and value[0] == "updated":
                    self.lied = True
                    name, updates = history_of(value)
                    value = "updated", name, (*updates[:-1], (self.lie, ()))
                    found = Symbol((message.first_row, value), nbytes)
                elif order.name in (names.Y, names.DX, names.LOSS):
                    found = Symbol(value, nbytes)
                self.orders.append((order, message.id, found))
            case _:
                raise AssertionError(message)

    def lose_connection(self, draw: Callable[[], float]) -> None:
        """Forget the last messages, which did not arrive, and the outputs of unfinished runs."""
        back = int(draw() * len(self.before))
        if back and draw() < 0.5:
            self.held, self.sizes = self.before[-back]
        runs = [run for _, run, _ in self.orders]
        for run in runs[int(draw() * (len(runs) + 1)) :]:
            for id in self.outputs.get(run, ()):
                self.held.pop(id, None)
                self.sizes.pop(id, None)
        for id in [id for id, value in self.held.items() if value == LOST]:
            del self.held[id], self.sizes[id]  # a failed run has made nothing
        self.orders.clear()
        self.before.clear()
        self.failed = False

    def _run(self, message: messages.RunGraph) -> list[Any]:
        kind, _, layer = self.held[message.graph].decode().partition(" ")
        given: list[Any] = [self.held[id] if id else () for id in message.inputs]
        if kind == "forward":
            x, w, mask = given
            assert is_of_step(w, layer, x)
            assert mask == ("mask", mask_of(batch_of(x)))
            return [("y", layer, x), ("within", layer, x)]
        if kind == "found":
            x, targets, h = given
            assert h == f"h{layer}"
            return [("found", layer, x, targets), ("logits", layer, x)]
        if kind == "back":
            x, targets, h, total, logits, sums = given
            assert h == f"h{layer}"
            assert logits == ("logits", layer, x)
            return [("part", layer, x, targets, total), (*sums, (x, targets, total))]
        if kind == "from_activations":
            *given, within = given
            assert within == ("within", layer, given[0])
            kind = "backward"
        if kind == "backward":
            x, w, mask, dy, *totals = given
            assert mask == ("mask", mask_of(batch_of(x)))
            assert is_of_step(w, layer, x)
            return [("dx", layer, x, dy), *((*total, (x, dy)) for total in totals)]
        if kind == "squares":
            gradient, total = given
            return [("squares", (*(total[1] if total else ()), *gradient))]
        if kind == "update":
            weight, gradient, moment, scalars = given
            (name, updates), (moment_name, others) = history_of(weight), history_of(moment)
            assert updates == others
            if self.lies():
                self.lied, scalars = True, self.lie
            updates = (*updates, (scalars, gradient))
            return [("updated", name, updates), ("updated", moment_name, updates)]
        if kind == "embed":
            ids, h = given
            x = "x", ids[1]
            assert is_of_step(h, "-1", x)
            return [x]
        if kind == "unembed":
            ids, h, dy, total = given
            assert is_of_step(h, "-1", ("x", ids[1]))
            return [(*total, (ids, dy))]
        x, targets, h, total = given
        assert h == "w-1" or is_of_step(h, "-1", x)
        return [("loss", x, targets), ("dy", x, targets), (*total, (x, targets))]


class SymbolicFleet:
    """Carries out what a step wants, and keeps what it tells."""

    def __init__(self) -> None:
        self.devices: dict[int, SymbolicDevice] = {}
        self.told: list[Any] = []

    def carry_out(self, wanted: Sequence[ForSteps]) -> None:
        for one in wanted:
            match one:
                case SendStage(device, message, task):
                    if device in self.devices:
                        order = None if task is None else task.detail
                        assert order is None or isinstance(order, StageOrder)
                        self.devices[device].take(message, order)
                case TellStep(outcome) if not isinstance(outcome, StageDone):
                    self.told.append(outcome)

    @property
    def waiting(self) -> Mapping[int, SymbolicDevice]:
        """Return the devices that have orders to answer."""
        return {d: held for d, held in self.devices.items() if held.orders}
