"""Repeat a stage's logged steps on the server, and compare the results with the devices' results.

The server begins with the stage's state in a snapshot. In each step, it compares its outputs, input
gradients and sum of squared gradients with the devices' results. At the end, it compares its
state with the next snapshot. A device can falsify no other results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Self, TypeAlias

import numpy as np

from cleave import graph_names as names
from cleave.arrays import Array, Buffer, DType
from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    StageRecord,
    StepResult,
)
from cleave.scheduler.stages.work import LayerWork, LoggedStep, StepWork
from cleave.training.stages.audits import Auditor, DeviceResult, Fault, Rounding, Sums, floats
from cleave.training.stages.honest_error import Comparison
from cleave.training.stages.saved_state import SavedTensors
from cleave.training.stages.stored_steps import StoredStep

# Allowed error, as a multiple of the largest error in recomputations. It exceeds 1, because state
# has many error measures, and each step amplifies the errors of the steps before it.
MARGIN: Final = 4.0

_MOST_DOUBTED: Final = 4  # maximum number of a stage's outputs to recompute with coarser rounding


class _Result(Enum):
    """Kinds of compared results. Each value is a phrase for messages."""

    OUTPUT = "the output"
    GRADIENT = "the input gradient"
    LOSS = "the loss"
    SQUARES = "the sum of squared gradients"
    CHANGE = "the change"  # of a weight
    MOMENT = "a moment"

    @property
    def is_state(self) -> bool:
        return self in (_Result.CHANGE, _Result.MOMENT)


# A kind of result, and its location: step and micro-batch or, for state, layer and parameter.
_Key: TypeAlias = tuple[_Result, int, Any]
_State: TypeAlias = dict[StageArray, Array]


@dataclass(frozen=True, slots=True)
class ReturnedStep:
    """What devices returned in a step, keyed by stage number and micro-batch unless noted.

    Attributes:
        y, dx: outputs and input gradients that the PS used. `LoggedStep` has all others, because
            other stages used them.
        losses: losses that the last stage returned, by micro-batch.
        forward_by, backward_by: the devices that returned the outputs and the input gradients.
        squares: sums of squared gradients, by stage number.
    """

    y: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    dx: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    forward_by: Mapping[tuple[int, int], int] = field(default_factory=dict)
    backward_by: Mapping[tuple[int, int], int] = field(default_factory=dict)
    squares: Mapping[int, float] = field(default_factory=dict)
    losses: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of_evaluation(cls, number: int, record: StageRecord, losses: Mapping[int, Any]) -> Self:
        """Return what devices returned for stage `number` in an evaluation."""

        def keyed(found: Mapping[int, Any]) -> dict[tuple[int, int], Any]:
            return {(number, batch): each for batch, each in found.items()}

        by = keyed(record.forward_by), keyed(record.backward_by)
        return cls(keyed(record.y), {}, *by, {}, losses)

    @classmethod
    def of(cls, result: StepResult, stored: StoredStep) -> Self:
        """Return what devices returned in a completed step, with arrays that are in the log."""
        y: dict[tuple[int, int], Any] = {}
        dx = {(0, batch): payload for batch, payload in stored.dx.items()}
        last = len(stored.bounds) - 1
        for one in stored.returned:
            match one:
                case OutputReady(batch, payload):  # if a pass was repeated, keep the first output
                    y.setdefault((last, batch), payload)
                case InputWanted(stage, batch, payload):
                    y[stage, batch] = payload
                case GradientWanted(stage, batch, payload):
                    dx[stage + 1, batch] = payload
        records = list(enumerate(result.records))
        return cls(
            y,
            dx,
            {(n, batch): device for n, r in records for batch, device in r.forward_by.items()},
            {(n, batch): device for n, r in records for batch, device in r.backward_by.items()},
            dict(enumerate(result.squares)),
            stored.losses,
        )


@dataclass(frozen=True, slots=True)
class StageReplay:
    """Repeats the steps of a stage between two snapshots.

    Attributes:
        number: number of the stage.
        steps, returned: the logged steps and evaluations, and what devices returned in them.
        start, end: the states in the two snapshots.
        device: ID of the device that returned the stage's state in `end`.
    """

    number: int
    steps: Sequence[LoggedStep]
    returned: Sequence[ReturnedStep]
    start: SavedTensors
    end: SavedTensors
    device: int

    @property
    def plan(self) -> PlannedStage:
        """Return the repeated stage."""
        return self.steps[0].work.stages[self.number]

    def faults(self, auditor: Auditor) -> list[Fault]:
        """Repeat the steps and return the faults found, at most one per device."""
        work = self.steps[-1].work
        narrow = auditor.rounds_products(self.device)
        found: dict[_Key, DeviceResult] = {}
        wanted: dict[_Key, Array] = {}
        doubted: dict[_Key, float] = {}

        def see(key: _Key, local: Array) -> None:
            """Keep all state, but only those outputs that have the largest errors."""
            if (result := self._result(key, local)) is None:
                return
            if not key[0].is_state:
                excess = Comparison.of(result.found, local, result.dtype, MARGIN).excess
                if excess <= 1:
                    return
                doubted[key] = excess
                if len(doubted) > _MOST_DOUBTED:
                    least = min(doubted, key=doubted.__getitem__)
                    del doubted[least]
                    if least == key:
                        return
                    del found[least], wanted[least]
            found[key], wanted[key] = result, local

        self._repeat(auditor, Rounding(narrow), see)

        def again(rounding: Rounding) -> dict[_Key, Array]:
            made: dict[_Key, Array] = {}

            def keep(key: _Key, local: Array) -> None:
                if key in wanted:
                    made[key] = local

            self._repeat(auditor, rounding, keep)
            return made

        return list(
            auditor.compare(
                work, self.plan.named, found, wanted, again, narrow=narrow, margin=MARGIN
            )
        )

    def _repeat(
        self, auditor: Auditor, rounding: Rounding, see: Callable[[_Key, Array], None]
    ) -> None:
        """Repeat all steps and pass each local result to `see`."""
        resident = self.steps[0].work.resident
        assert resident is not None
        state: _State = {a: self.start.floats(a) for a in resident.arrays_of(self.plan)}
        for at, step in enumerate(self.steps):
            work = _with(step.work, self.plan, state)
            x, dy = step.x[self.number], step.dy[self.number]
            record = StageRecord(self.plan, x, dy, {}, {}, {}, {}, [])
            totals: Sums = {}
            for batch in sorted(x):
                if work.embedding is not None and batch >= work.batches:
                    y = auditor.repeat_embedding(
                        work.embedding, x[batch], dy.get(batch), totals, rounding
                    )
                    see((_Result.OUTPUT, at, batch), y)
                    continue
                if work.evaluates:
                    y, loss = auditor.evaluate(work, record, batch, rounding)
                else:
                    y, dx, loss = auditor.repeat(work, record, batch, totals, rounding)
                    see((_Result.GRADIENT, at, batch), dx)
                see((_Result.OUTPUT, at, batch), y)
                if loss is not None:
                    see((_Result.LOSS, at, batch), loss.reshape(1, 1))
            if work.evaluates:
                continue
            squares = sum(
                float(np.square(each, dtype=np.float64).sum()) for each in totals.values()
            )
            see((_Result.SQUARES, at, None), np.array([squares], np.float32))
            _update(auditor, step, totals, state)
        for (layer, name), one in resident.of_stage(self.plan):
            change = state[one.weight] - self.start.floats(one.weight)
            see((_Result.CHANGE, layer, name), change)
            for number, moment in enumerate(one.moments):
                see((_Result.MOMENT, layer, (name, number)), state[moment])

    def _result(self, key: _Key, local: Array) -> DeviceResult | None:
        """Return the device's result; None if no device had to return it."""
        what, at, which = key
        device: int | None = self.device
        if what.is_state:
            return DeviceResult(self.device, self._words(key), self._state(key), DType.FP32)
        returned, dtype = self.returned[at], DType.FP32
        if what == _Result.LOSS:
            payload = returned.losses.get(which)
            device = returned.backward_by.get((self.number, which))
            found: Array | None = None if payload is None else floats(payload, 1, 1, dtype)
        elif what == _Result.SQUARES:
            squares = returned.squares.get(self.number)
            found = None if squares is None else np.array([squares], np.float32)
        else:
            by = returned.forward_by if what == _Result.OUTPUT else returned.backward_by
            device = by.get((self.number, which))
            dtype = DType(self.steps[at].work.dtype)
            payload = self._payload(what, at, which)
            columns = local.shape[-1]
            found = (
                None if payload is None else floats(payload, local.size // columns, columns, dtype)
            )
        if found is None or device is None:
            return None
        return DeviceResult(device, self._words(key), found, dtype)

    def _payload(self, what: _Result, at: int, batch: int) -> Any:
        """Return an output or input gradient that the PS or another stage received."""
        step, returned, number = self.steps[at], self.returned[at], self.number
        embeds, count = step.work.embedding is not None, step.work.batches
        if what == _Result.OUTPUT and embeds and batch >= count:
            others, number, batch = step.x, 0, batch - count
        elif what == _Result.GRADIENT and embeds and number == 0:
            others, number, batch = step.dy, len(step.dy) - 1, batch + count
        elif what == _Result.OUTPUT:
            if (own := returned.y.get((number, batch))) is not None:
                return own
            others, number = step.x, number + 1
        else:
            if (own := returned.dx.get((number, batch))) is not None:
                return own
            others, number = step.dy, number - 1
        if not 0 <= number < len(others) or batch not in others[number]:
            return None
        return others[number][batch].payload

    def _state(self, key: _Key) -> Array:
        """Return the change of a weight, or a moment, as returned by the device."""
        resident = self.steps[0].work.resident
        assert resident is not None
        what, layer, which = key
        if what == _Result.CHANGE:
            weight = resident.parameters[layer, which].weight
            return self.end.floats(weight) - self.start.floats(weight)
        name, number = which
        return self.end.floats(resident.parameters[layer, name].moments[number])

    def _words(self, key: _Key) -> str:
        what, at, which = key
        match what:
            case _Result.CHANGE:
                return f"{what.value} of {which}"
            case _Result.MOMENT:
                return f"{what.value} of {which[0]}"
            case _:
                batch = "" if which is None else f" of micro-batch {which}"
                updates = sum(not step.work.evaluates for step in self.steps[: at + 1])
                when = "an evaluation after step" if self.steps[at].work.evaluates else "step"
                return f"{what.value}{batch} in {when} {updates} after a snapshot"


def _with(work: StepWork, plan: PlannedStage, state: Mapping[StageArray, Array]) -> StepWork:
    """Return the work of a step with a stage's weights from `state`."""

    def present(parameters: Mapping[str, StageArray]) -> dict[str, StageArray]:
        return {name: _with_values(array, state) for name, array in parameters.items()}

    layers: list[LayerWork] = [*work.layers]
    for number in range(plan.first, plan.stop):
        layers[number] = replace(layers[number], parameters=present(layers[number].parameters))
    loss, embedding = work.loss, work.embedding
    if plan.loss and loss is not None:
        loss = replace(loss, parameters=present(loss.parameters))
    if plan.loss and embedding is not None:
        embedding = replace(embedding, parameters=present(embedding.parameters))
    return replace(work, layers=layers, loss=loss, embedding=embedding)


def _with_values(array: StageArray, state: Mapping[StageArray, Array]) -> StageArray:
    if array not in state:  # the parameter is frozen
        return array
    values = state[array].reshape(array.rows, array.columns)
    return replace(array, payload=Buffer(values, DType.FP32), parts=())


def _update(auditor: Auditor, step: LoggedStep, totals: Sums, state: _State) -> None:
    """Run an optimizer step in fp32. Errors of coarser rounding could be as large as the update."""
    resident = step.work.resident
    assert resident is not None
    for (layer, name), gradient in totals.items():
        one = resident.parameters[layer, name]
        keys = [names.WEIGHT, *map(names.moment, range(len(one.moments)))]
        given = step.scalars[one.group]
        scalars = floats(given.payload, given.rows, given.columns, DType.FP32)
        feed = {key: state[array] for key, array in zip(keys, one.arrays, strict=True)}
        feed |= {names.GRADIENT: gradient.reshape(-1), names.SCALARS: scalars}
        made = auditor.run(resident.update, feed, Rounding())
        for key, array in zip(keys, one.arrays, strict=True):
            state[array] = made[names.updated(key)].reshape(-1)
