"""Audits of stages: what devices returned is computed again here, at random and in secret.

There is no algebraic check for a stage, so work is drawn by lot and repeated. An *output audit*
repeats one micro-batch of a device and compares its output and its input's gradient. A *sums audit*
repeats all micro-batches whose gradients a device summed, and compares the sums. Both happen after
everything of a step has come and before any of it is used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import Array, Buffer, DType
from cleave.machine.graph_run import NUMPY_DTYPES
from cleave.machine.graph_session import GraphSession
from cleave.scheduler.stage_arrays import StageArray
from cleave.scheduler.stage_device import sums_of
from cleave.scheduler.stage_outcomes import StageRecord, StepResult, SumsRecord
from cleave.scheduler.stage_work import LOSS_LAYER, StageGraph, StepWork, slice_layer

MOST_OFF: Final = {DType.FP32: 1e-4, DType.BF16: 2e-2, DType.FP16: 4e-3}
"""By how much an honest device may be off, relative to the largest element of what is compared. In
fp32 honest devices are off by some 1e-6; 16-bit numbers are off by what rounding to them costs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a device returned and that is wrong.

    Attributes:
        device: the device.
        reason: what is wrong, with the values.
    """

    device: int
    reason: str


@dataclass
class AuditCounters:
    """What was audited: micro-batches that were repeated for outputs and for sums, and faults."""

    outputs: int = 0
    sums: int = 0
    faults: int = 0


class Auditor:
    """Repeats some of a step's work.

    Args:
        rate: the chance that a device is audited in a step, for outputs; for each of its sums it is
            this over the number of micro-batches in them, so that both cost the same.
        rng: secret.

    Attributes:
        counters: what was audited so far.
    """

    def __init__(self, rate: float, rng: random.Random | None = None) -> None:
        self.counters = AuditCounters()
        self._rate = rate
        self._rng = rng or random.SystemRandom()
        self._sessions: dict[StageGraph, GraphSession] = {}

    def faults(self, work: StepWork, result: StepResult) -> list[Fault]:
        """Audit a step; return what is wrong."""
        return list(self._faults(work, result)) if self._rate else []

    def _faults(self, work: StepWork, result: StepResult) -> Iterator[Fault]:
        for record in result.records:
            by_device: dict[int, list[int]] = {}
            for batch, device in {**record.forward_by, **record.backward_by}.items():
                by_device.setdefault(device, []).append(batch)
            for _, batches in sorted(by_device.items()):
                if self._rng.random() < self._rate:
                    batch = self._rng.choice(sorted(batches))
                    yield from self._output_faults(work, record, result, batch)
            for sums in record.sums:
                if self._rng.random() < self._rate / len(sums.batches):
                    yield from self._sums_faults(work, record, sums)

    def _output_faults(
        self, work: StepWork, record: StageRecord, result: StepResult, batch: int
    ) -> Iterator[Fault]:
        self.counters.outputs += 1
        totals: dict[tuple[int, str], Array] = {}
        y, dx, loss = self._repeat(work, record, batch, totals)
        travels = DType(work.dtype)
        of_y = travels if record.plan.slice is None else DType.FP32
        returned = [("output", record.y.get(batch), y, record.forward_by.get(batch), of_y)]
        back = record.backward_by.get(batch)
        returned.append(("gradient", record.dx.get(batch), dx, back, travels))
        for what, payload, wanted, device, dtype in returned:
            if payload is None or device is None:
                continue
            found = _floats(payload, wanted.size // wanted.shape[-1], wanted.shape[-1], dtype)
            wrong = _off(found, wanted.reshape(found.shape), dtype)
            if wrong:
                yield self._fault(device, record, f"the {what} of micro-batch {batch}", wrong)
        if loss is not None and (device := record.backward_by.get(batch)) is not None:
            found = _floats(result.losses[batch], 1, 1, DType.FP32)
            if wrong := _off(found, loss.reshape(1, 1), DType.FP32):
                yield self._fault(device, record, f"the loss of micro-batch {batch}", wrong)

    def _sums_faults(
        self, work: StepWork, record: StageRecord, sums: SumsRecord
    ) -> Iterator[Fault]:
        totals: dict[tuple[int, str], Array] = {}
        for batch in sorted(sums.batches):
            self.counters.sums += 1
            self._repeat(work, record, batch, totals)
        dtype = DType(work.gradients)
        layers: dict[int, float] = {}
        for (layer, _), total in totals.items():
            largest = float(np.abs(total).max(initial=0.0))
            layers[layer] = max(layers.get(layer, 0.0), largest)
        wanted = {(layer, name) for layer, name, _ in sums.found}  # others return the rest
        for (layer, name), total in totals.items():
            if (layer, name) not in wanted:
                continue
            shape = sums_of(work, layer)[name]
            parts = sorted(
                (first, part)
                for (number, held, first), part in sums.found.items()
                if (number, held) == (layer, name)
            )
            found = np.concatenate(
                [
                    _floats(
                        part, len(part) // (shape.columns * dtype.itemsize), shape.columns, dtype
                    )
                    for _, part in parts
                ]
            )
            wrong = _off(found, total.reshape(found.shape), dtype, layers[layer])
            if wrong:
                yield self._fault(sums.device, record, f"the sum of {name}'s gradients", wrong)
                return

    def _fault(self, device: int, record: StageRecord, what: str, wrong: str) -> Fault:
        self.counters.faults += 1
        return Fault(device, f"{what} of {record.plan.named} is {wrong}")

    # --- doing it again ---

    def _repeat(
        self,
        work: StepWork,
        record: StageRecord,
        batch: int,
        totals: dict[tuple[int, str], Array],
    ) -> tuple[Array, Array, Array | None]:
        """Return a micro-batch's output, gradient and loss; add its gradients to the totals."""
        if record.plan.slice is not None:
            return self._repeat_slice(work, record, batch, totals, record.plan.slice.number)
        numbers = range(record.plan.first, record.plan.stop)
        given = [_array(record.x[batch])]
        for number in numbers:
            layer = work.layers[number]
            feed = {names.X: given[-1], **_arrays(layer.inputs(batch))}
            given.append(self._run(layer.forward, feed)[names.Y])
        loss = None
        if record.plan.loss and work.loss is not None:
            feed = {
                names.X: given[-1],
                names.TARGETS: _array(work.loss.targets[batch]),
                **_arrays(work.loss.parameters),
            }
            found = self._add(work, work.loss.graph, feed, LOSS_LAYER, totals)
            loss, dy = found[names.LOSS], found[names.DX]
        else:
            dy = _array(record.dy[batch])
        for number in reversed(numbers):
            layer = work.layers[number]
            feed = {names.X: given[number - record.plan.first], names.DY: dy}
            feed |= _arrays(layer.inputs(batch))
            dy = self._add(work, layer.backward, feed, number, totals)[names.DX]
        return given[-1], dy, loss

    def _repeat_slice(
        self,
        work: StepWork,
        record: StageRecord,
        batch: int,
        totals: dict[tuple[int, str], Array],
        number: int,
    ) -> tuple[Array, Array, None]:
        """Do the same for a slice of the loss."""
        part = work.slice_works[number]
        feed = {names.X: _array(record.x[batch]), names.TARGETS: _array(part.targets[batch])}
        feed |= _arrays(part.parameters)
        y = self._run(part.forward, feed)[names.Y]
        feed[names.DY] = _array(record.dy[batch])
        found = self._add(work, part.backward, feed, slice_layer(number), totals)
        return y, found[names.DX], None

    def _add(
        self,
        work: StepWork,
        graph: StageGraph,
        feed: dict[str, Array],
        number: int,
        totals: dict[tuple[int, str], Array],
    ) -> dict[str, Array]:
        for name, shape in sums_of(work, number).items():
            zeros = np.zeros((shape.rows, shape.columns), np.float32)
            feed[names.total(name)] = totals.get((number, name), zeros)
        found = self._run(graph, feed)
        for name in sums_of(work, number):
            totals[number, name] = found[names.new_total(name)]
        return found

    def _run(self, graph: StageGraph, feed: Mapping[str, Array]) -> dict[str, Array]:
        if graph not in self._sessions:
            self._sessions[graph] = GraphSession(graph.model)
        session = self._sessions[graph]
        shaped = {
            name: feed[name].reshape([n if isinstance(n, int) else -1 for n in shape])
            for name, shape in session.inputs.items()
        }
        return session.run(shaped)


def escape_chance(audited: float, steps: int) -> float:
    """Return the chance that a device that lies in every step is not caught in so many steps.

    Args:
        audited: the chance that its lie of one step is audited.
        steps: how many steps.
    """
    return float((1 - audited) ** steps)


def _arrays(held: Mapping[str, StageArray]) -> dict[str, Array]:
    return {name: _array(array) for name, array in held.items()}


def _array(given: StageArray) -> Array:
    if given.dtype in NUMPY_DTYPES:
        payload = given.payload
        held = payload if isinstance(payload, bytes | memoryview) else payload.pack()
        return np.frombuffer(held, NUMPY_DTYPES[given.dtype])
    return _floats(given.payload, given.rows, given.columns, DType(given.dtype))


def _floats(payload: Any, rows: int, columns: int, dtype: DType) -> Array:
    if isinstance(payload, Buffer):
        return payload.float32()
    return arrays.unpack(payload, rows, columns, dtype).float32()


def _off(found: Array, wanted: Array, dtype: DType, largest: float | None = None) -> str:
    """Say how far off an array is, if no honest device is that far off; empty otherwise.

    Args:
        found: what came.
        wanted: what was computed here.
        dtype: in which it travelled.
        largest: what errors are relative to; the largest element of `wanted` unless given.
    """
    scale = float(np.abs(wanted).max(initial=0.0)) if largest is None else largest
    with np.errstate(invalid="ignore"):
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))  # of a run that diverges
        worst = float(np.where(same, 0.0, np.abs(found - wanted)).max(initial=0.0))
    if worst <= MOST_OFF[dtype] * scale or worst == 0.0:
        return ""
    return f"off by {worst:.3g}, where the largest element is {scale:.3g}"
