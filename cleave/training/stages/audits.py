"""Audits of training by stages: the PS recomputes a random, secret selection of device results.

An *output audit* recomputes one of a device's micro-batches, and compares the output, the input
gradient and the loss. A *sums audit* recomputes all micro-batches whose gradients a device
accumulated. The PS selects audits before the step, and recomputes micro-batches while devices work.
If a device takes over a stage, its audits are selected once all results of the stage have arrived.
The results of a step change the model only after all audits of the step. `honest_error` defines
which differences are allowed.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import Array, Buffer, DType
from cleave.graphs.noise import noisy, with_narrow_products
from cleave.machine.graph_choice import MakeGraph, open_on_cpu
from cleave.machine.graph_run import NUMPY_DTYPES
from cleave.machine.graph_session import GraphError, GraphSession, OpenGraph
from cleave.scheduler.stages.arrays import StageArray, packed
from cleave.scheduler.stages.outcomes import PassDone, StageRecord, StepResult, SumsRecord
from cleave.scheduler.stages.passes import sums_of
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    EmbeddingWork,
    LossWork,
    SliceWork,
    StageGraph,
    StepWork,
    SumName,
    SumShape,
    slice_layer,
)
from cleave.training.stages.honest_error import MOST_REPEATS, ROUNDING, Comparison, Evidence, moved

# Allowed error of products in bf16, as a multiple of the largest error in recomputations. An honest
# result has many error measures, and most are above `NEGLIGIBLE`. By chance, some exceed
# the largest error of a few recomputations.
_NARROW_MARGIN: Final = 4.0

Key = TypeVar("Key")
Sums = dict[SumName, Array]  # sums of parameter gradients


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a local result is rounded.

    Attributes:
        narrow: whether factors and results of matrix products are rounded to bf16, which only
            bf16 runs allow.
        noise: random number generator for coarser rounding errors; None for normal rounding.
    """

    narrow: bool = False
    noise: np.random.Generator | None = None


def roundings(work: StepWork) -> Sequence[Rounding]:
    """Return the roundings that honest devices may use in a step."""
    graphs = (layer.forward for layer in work.layers)
    narrow = any(graph.products for graph in graphs)
    return (Rounding(), Rounding(narrow=True)) if narrow else (Rounding(),)


@dataclass(frozen=True, slots=True)
class Fault:
    """An audit's finding that a device returned a wrong result.

    Attributes:
        device: ID of the device.
        reason: message with the measured error and the largest error that rounding can explain.
    """

    device: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """A device's result.

    Attributes:
        what: name of the result in messages.
        found: the result, upcast to fp32.
        dtype: dtype in which the device sent the result.
    """

    device: int
    what: str
    found: Array
    dtype: DType


@dataclass
class Watch:
    """The audits of one device's part of a stage. They may begin before the stage finishes.

    Attributes:
        outputs: indices of the backward passes that output audits recompute, in the order in which
            the device runs passes. An index is removed once its audit is done.
        sums: whether a sums audit is selected.
        narrow: whether the device rounded products to bf16 in its last audit. If so, the local sums
            are computed with rounded products, too.
        share: number of consecutive passes among which at most one output audit is selected.
        batches: micro-batches of the device's finished backward passes.
        totals: sums of the parameter gradients of `batches`, for the sums audit. None if the device
            has repeated a pass, because it is then unknown what the device's sums contain.
    """

    outputs: set[int] = field(default_factory=set)
    sums: bool = False
    narrow: bool = False
    share: int = 1
    batches: set[int] = field(default_factory=set)
    totals: Sums | None = field(default_factory=dict)

    @property
    def selected(self) -> bool:
        """Return True if an audit is selected."""
        return self.sums or bool(self.outputs)

    @property
    def output_is_due(self) -> bool:
        """Return True if the pass selected among the last `share` passes has not run yet."""
        last = max(0, len(self.batches) - 1) // self.share
        return any(n >= len(self.batches) and n // self.share == last for n in self.outputs)


@dataclass
class AuditCounters:
    """Counters of audits.

    Attributes:
        outputs: number of micro-batches that output audits recomputed.
        sums: number of micro-batches that sums audits recomputed.
        again: number of audits that found a large error and recomputed with coarser rounding.
        faults: number of wrong results found.
    """

    outputs: int = 0
    sums: int = 0
    again: int = 0
    faults: int = 0


class Auditor:
    """Audits training by stages by recomputing randomly selected device results on the PS.

    Args:
        rate: probability of an output audit, per device of a stage and per share of a step's
            micro-batches. A share is the number of micro-batches divided by the number of the
            stage's devices. The probability of a sums audit is `rate` divided by the share.
        rng: random number generator that devices cannot predict; the system's by default.
        open_graph: opens graphs in fp32; by default with ONNX Runtime on the CPU.
    """

    def __init__(
        self,
        rate: float,
        rng: random.Random | None = None,
        open_graph: MakeGraph = open_on_cpu,
    ) -> None:
        self.counters = AuditCounters()
        self.excess = 0.0  # largest error in the last comparison, in units of the allowed error
        self.rate = rate
        self.rng = rng or random.SystemRandom()
        self._open_graph = open_graph
        self._sessions: dict[tuple[StageGraph, bool, bool], OpenGraph] = {}
        self._narrow: dict[int, bool] = {}  # whether a device rounded products in its last audit
        self._evidence: defaultdict[int, Evidence] = defaultdict(Evidence)

    def faults(
        self,
        work: StepWork,
        result: StepResult,
        surely: Collection[int] = (),
        audited: Collection[int] = (),
        watches: Sequence[Mapping[int, Watch]] = (),
    ) -> list[Fault]:
        """Audit a finished step and return all faults that the audits find.

        Args:
            surely: IDs of devices that are known to have returned a wrong result in this step. All
                results of these devices are audited.
            audited: indices of the records that `faults_of` has already audited.
            watches: for each record, the audits that were selected before the step, by device.
        """
        found: list[Fault] = []
        for number, record in enumerate(result.records):
            if number not in audited:
                selected = watches[number] if number < len(watches) else {}
                found += self.faults_of(work, record, result.losses, selected)
            if surely:
                found += self._faults_of_devices(work, record, result.losses, surely)
        return found

    def watch(
        self, devices: Collection[int], batches: int, trusted: Collection[int] = ()
    ) -> dict[int, Watch]:
        """Select audits of a stage before the step and return them by device.

        Which device will run which micro-batch is not known yet. So passes are selected by their
        position in the sequence of the device's passes.

        Args:
            devices: the stage's devices.
            batches: number of micro-batches in the step.
            trusted: devices for which no audit is selected, for example the PS's own device.
        """
        share = math.ceil(batches / max(1, len(devices)))
        watches = {}
        for device in devices:
            watches[device] = watch = Watch(share=share, narrow=self._narrow.get(device, False))
            if device in trusted:
                continue
            for first in range(0, batches, share):
                if self.rng.random() < self.rate:
                    watch.outputs.add(first + self.rng.randrange(share))
            watch.sums = self.rng.random() < self.rate / share
        return watches

    def passed(self, work: StepWork, done: PassDone, watch: Watch) -> list[Fault]:
        """Run the part of the audits in `watch` that needs only the finished backward pass `done`.

        Return all faults found.
        """
        if done.batch in watch.batches:
            watch.totals = None
            return []
        found: list[Fault] = []
        if (number := len(watch.batches)) in watch.outputs:
            found += self._output_faults(work, done.record, done.losses, done.batch)
            watch.outputs.remove(number)
        if watch.sums and watch.totals is not None:
            rounding = Rounding(watch.narrow)
            self.repeat(work, done.record, done.batch, watch.totals, rounding)
        watch.batches.add(done.batch)
        return found

    def faults_of(
        self,
        work: StepWork,
        record: StageRecord,
        losses: Mapping[int, Any],
        watches: Mapping[int, Watch] = MappingProxyType({}),
    ) -> list[Fault]:
        """Audit a finished stage and return all faults that the audits find.

        Args:
            losses: maps micro-batches to losses, if the stage computed them.
            watches: audits that were selected before the step, by device. The audits of all other
                devices are selected now.
        """
        found: list[Fault] = []
        if not self.rate:
            return found
        by_device: dict[int, list[int]] = {}
        for batch, device in {**record.forward_by, **record.backward_by}.items():
            by_device.setdefault(device, []).append(batch)
        for device, batches in sorted(by_device.items()):
            watch = watches.get(device)
            if self.rng.random() < self.rate if watch is None else watch.output_is_due:
                batch = self.rng.choice(sorted(batches))
                found += self._output_faults(work, record, losses, batch)
        for sums in record.sums:
            watch = watches.get(sums.device)
            few = self.rng.random() < self.rate / len(sums.batches)
            if few if watch is None else watch.sums:
                is_known = watch is not None and watch.batches == sums.batches
                found += self._sums_faults(work, record, sums, watch if is_known else None)
        return found

    def _faults_of_devices(
        self,
        work: StepWork,
        record: StageRecord,
        losses: Mapping[int, Any],
        devices: Collection[int],
    ) -> Iterator[Fault]:
        """Audit all results of `devices` in a stage and yield the faults found."""
        by = [*record.forward_by.items(), *record.backward_by.items()]
        for batch in sorted({batch for batch, device in by if device in devices}):
            yield from self._output_faults(work, record, losses, batch)
        for sums in record.sums:
            if sums.device in devices:
                yield from self._sums_faults(work, record, sums)

    def _output_faults(
        self, work: StepWork, record: StageRecord, losses: Mapping[int, Any], batch: int
    ) -> Iterator[Fault]:
        self.counters.outputs += 1

        def repeat(rounding: Rounding) -> dict[str, Array]:
            y, dx, loss = self.repeat(work, record, batch, {}, rounding)
            return {"output": y, "gradient": dx} | ({} if loss is None else {"loss": loss})

        back = record.backward_by.get(batch)
        device = record.forward_by.get(batch) if back is None else back
        narrow = device is not None and self._narrow.get(device, False)
        wanted = repeat(Rounding(narrow))
        travels = DType(work.dtype)
        of_y = travels if record.plan.slice is None else DType.FP32
        returned: dict[str, DeviceResult] = {}
        for what, payload, device, dtype in (
            ("output", record.y.get(batch), record.forward_by.get(batch), of_y),
            ("gradient", record.dx.get(batch), back, travels),
            ("loss", losses.get(batch) if "loss" in wanted else None, back, DType.FP32),
        ):
            if payload is None or device is None:
                continue
            columns = wanted[what].shape[-1] if wanted[what].ndim else 1
            found = floats(payload, wanted[what].size // columns, columns, dtype)
            words = f"the {what} of micro-batch {batch}"
            returned[what] = DeviceResult(device, words, found, dtype)
        yield from self.compare(work, record.plan.named, returned, wanted, repeat, narrow=narrow)

    def _sums_faults(
        self, work: StepWork, record: StageRecord, sums: SumsRecord, known: Watch | None = None
    ) -> Iterator[Fault]:
        """Audit gradient sums. `known` holds the local sums; if it is None, compute them here."""
        self.counters.sums += len(sums.batches)

        def repeat(rounding: Rounding) -> Sums:
            totals: Sums = {}
            for batch in sorted(sums.batches):
                self.repeat(work, record, batch, totals, rounding)
            return totals

        if known is not None and known.totals:
            wanted, narrow = known.totals, known.narrow
        else:
            narrow = self._narrow.get(sums.device, False)
            wanted = repeat(Rounding(narrow))
        dtype = DType(work.gradients)
        returned: dict[SumName, DeviceResult] = {}
        for layer, name in {(layer, name): None for layer, name, _ in sorted(sums.found)}:
            columns = sums_of(work, layer)[name].columns
            rows = [
                floats(part, len(part) // (columns * dtype.itemsize), columns, dtype)
                for (number, held, _), part in sorted(sums.found.items(), key=lambda each: each[0])
                if (number, held) == (layer, name)
            ]
            words = f"the sum of {name}'s gradients"
            returned[layer, name] = DeviceResult(sums.device, words, np.concatenate(rows), dtype)
        yield from self.compare(work, record.plan.named, returned, wanted, repeat, narrow=narrow)

    def rounds_products(self, device: int) -> bool:
        """Return whether a device rounded products to bf16 in its last audit."""
        return self._narrow.get(device, False)

    def compare(
        self,
        work: StepWork,
        stage: str,
        returned: Mapping[Key, DeviceResult],
        wanted: Mapping[Key, Array],
        repeat: Callable[[Rounding], Mapping[Key, Array]],
        *,
        narrow: bool,
        margin: float = 1.0,
    ) -> Iterator[Fault]:
        """Compare device results with local results. Yield at most one fault per device.

        Args:
            stage: name of the stage in messages.
            repeat: recomputes the local results with the given rounding.
            narrow: whether the local results `wanted` were computed with products rounded to bf16.
            margin: allowed error, as a multiple of the largest error in recomputations.
        """

        def comparisons(local: Mapping[Key, Array], *, narrow: bool) -> dict[Key, Comparison]:
            most = max(margin, _NARROW_MARGIN) if narrow else margin
            return {
                key: Comparison.of(one.found, local[key], one.dtype, most)
                for key, one in returned.items()
            }

        self.excess = 0.0
        compared = {narrow: comparisons(wanted, narrow=narrow)}
        if len(roundings(work)) > 1 and any(one.excess > 1 for one in compared[narrow].values()):
            compared[not narrow] = comparisons(repeat(Rounding(not narrow)), narrow=not narrow)
        for device in sorted({one.device for one in returned.values()}):
            ways = {
                way: {key: one for key, one in each.items() if returned[key].device == device}
                for way, each in compared.items()
            }
            self._explain(ways, repeat)
            excesses = {way: max(one.excess for one in each.values()) for way, each in ways.items()}
            self._narrow[device] = best = min(excesses, key=excesses.__getitem__)
            self.excess = max(self.excess, excesses[best])
            if not self._evidence[device].add(excesses[best]):
                continue
            self.counters.faults += 1
            key = max(ways[best], key=lambda each: ways[best][each].excess)
            error, explained, size = ways[best][key].worst
            yield Fault(
                device,
                f"{returned[key].what} of {stage} is off by {error:.2g} in elements "
                f"of magnitude {size:.2g}, but rounding explains at most {explained:.2g}",
            )

    def _explain(
        self,
        ways: Mapping[bool, Mapping[Key, Comparison]],
        repeat: Callable[[Rounding], Mapping[Key, Array]],
    ) -> None:
        """Recompute up to `MOST_REPEATS` times, until coarser rounding explains all errors.

        `ways` maps each value of `Rounding.narrow` to the comparisons with that rounding. A device
        rounds all its results in the same way, so explaining all errors of one way is enough.
        """
        if any(all(one.excess <= 1 for one in each.values()) for each in ways.values()):
            return
        self.counters.again += 1
        random_numbers = np.random.default_rng(self.rng.getrandbits(64))
        excesses: dict[bool, float] = {}
        for _ in range(MOST_REPEATS):
            # Try each way once, then the way with the smaller errors.
            narrow = next((way for way in ways if way not in excesses), None)
            if narrow is None:
                narrow = min(excesses, key=excesses.__getitem__)
            again = repeat(Rounding(narrow, random_numbers))
            doubted = {key: one for key, one in ways[narrow].items() if one.excess > 1}
            for key, one in doubted.items():
                one.repeated(again[key])
            excesses[narrow] = max(one.excess for one in doubted.values())
            if excesses[narrow] <= 1:
                return

    def output(self, work: StepWork, record: StageRecord, batch: int, rounding: Rounding) -> Array:
        """Recompute a stage's output with a forward pass only. For the arguments, see `repeat`."""
        if record.plan.slice is not None:
            part = work.slice_works[record.plan.slice.number]
            feed = _slice_feed(part, record, batch, rounding)
            return self.run(part.forward, feed, rounding)[names.Y]
        return self._forward(work, record, batch, rounding)[-1]

    def _forward(
        self, work: StepWork, record: StageRecord, batch: int, rounding: Rounding
    ) -> list[Array]:
        """Return the input of each layer of a stage, followed by the stage's output."""
        x = _array(record.x[batch])
        if work.inner_embedding is not None:
            x = self._embedded(work.inner_embedding, record.x[batch], rounding)
        given = [moved(x, rounding.noise)]
        for number in range(record.plan.first, record.plan.stop):
            layer = work.layers[number]
            feed = {names.X: given[-1], **_arrays(layer.inputs(batch))}
            given.append(moved(self.run(layer.forward, feed, rounding)[names.Y], rounding.noise))
        return given

    def repeat(
        self, work: StepWork, record: StageRecord, batch: int, totals: Sums, rounding: Rounding
    ) -> tuple[Array, Array, Array | None]:
        """Recompute a stage's forward and backward passes for one micro-batch.

        Args:
            totals: sums of parameter gradients. The micro-batch's gradients are added in place.

        Returns:
            The stage's output, input gradient and loss. The loss is None unless the stage computes
            the whole loss.
        """
        if record.plan.slice is not None:
            return self._repeat_slice(
                work, record, batch, totals, record.plan.slice.number, rounding
            )
        numbers = range(record.plan.first, record.plan.stop)
        given = self._forward(work, record, batch, rounding)
        loss = None
        if record.plan.loss and work.loss is not None:
            loss, dy = self._loss(work.loss, given[-1], batch, totals, rounding)
        else:
            dy = _array(record.dy[batch])
        for number in reversed(numbers):
            layer = work.layers[number]
            feed = {names.X: given[number - record.plan.first], names.DY: moved(dy, rounding.noise)}
            feed |= _arrays(layer.inputs(batch))
            dy = self._add(layer.backward, feed, number, layer.sums, totals, rounding)[names.DX]
        if work.inner_embedding is not None:
            self._add_embedding(work.inner_embedding, record.x[batch], dy, totals, rounding)
        return given[-1], dy, loss

    def evaluate(
        self, work: StepWork, record: StageRecord, batch: int, rounding: Rounding
    ) -> tuple[Array, Array | None]:
        """Recompute a stage's forward pass for one micro-batch; return the output and the loss.

        The loss is None unless the stage computes the loss.
        """
        y = self.output(work, record, batch, rounding)
        if not record.plan.loss or work.loss is None:
            return y, None
        return y, self._loss(work.loss, y, batch, {}, rounding)[0]

    def _loss(
        self, loss: LossWork, y: Array, batch: int, totals: Sums, rounding: Rounding
    ) -> tuple[Array, Array]:
        """Recompute a micro-batch's loss. Return it, and the gradient of the last output `y`."""
        feed = {names.X: y, names.TARGETS: _array(loss.targets[batch]), **_arrays(loss.parameters)}
        found = self._add(loss.graph, feed, LOSS_LAYER, loss.sums, totals, rounding)
        return found[names.LOSS], found[names.DX]

    def repeat_embedding(
        self,
        embedding: EmbeddingWork,
        ids: StageArray,
        dy: StageArray | None,
        totals: Sums,
        rounding: Rounding,
    ) -> Array:
        """Recompute the embedding of a micro-batch, and return the first stage's input.

        Args:
            dy: gradient of the first stage's input; None if it is unknown.
            totals: sums of parameter gradients. The micro-batch's gradients are added in place.
        """
        if dy is not None:
            self._add_embedding(embedding, ids, _array(dy), totals, rounding)
        return self._embedded(embedding, ids, rounding)

    def _embedded(self, embedding: EmbeddingWork, ids: StageArray, rounding: Rounding) -> Array:
        feed = {names.IDS: _array(ids), **_arrays(embedding.parameters)}
        return self.run(embedding.forward, feed, rounding)[names.Y]

    def _add_embedding(
        self,
        embedding: EmbeddingWork,
        ids: StageArray,
        dy: Array,
        totals: Sums,
        rounding: Rounding,
    ) -> None:
        """Add an embedding's gradients to the sums, if it is trained."""
        if embedding.backward is not None:
            feed = {names.IDS: _array(ids), names.DY: moved(dy, rounding.noise)}
            feed |= _arrays(embedding.parameters)
            self._add(embedding.backward, feed, LOSS_LAYER, embedding.sums, totals, rounding)

    def _repeat_slice(
        self,
        work: StepWork,
        record: StageRecord,
        batch: int,
        totals: Sums,
        number: int,
        rounding: Rounding,
    ) -> tuple[Array, Array, None]:
        """Implement `repeat` for slice `number` of a vocabulary-parallel loss."""
        part = work.slice_works[number]
        feed = _slice_feed(part, record, batch, rounding)
        made = self.run(part.forward, feed, rounding)
        feed[names.LOGITS] = made[names.LOGITS]
        # `dy` is the log-sum-exp. No kink depends on it, so no noise is added to it.
        feed[names.DY] = _array(record.dy[batch])
        layer = slice_layer(number)
        found = self._add(part.backward, feed, layer, part.sums, totals, rounding)
        return made[names.Y], found[names.DX], None

    def _add(
        self,
        graph: StageGraph,
        feed: dict[str, Array],
        number: int,
        sums: Mapping[str, SumShape],
        totals: Sums,
        rounding: Rounding,
    ) -> dict[str, Array]:
        for name, shape in sums.items():
            zeros = np.zeros((shape.rows, shape.columns), np.float32)
            feed[names.total(name)] = totals.get((number, name), zeros)
        found = self.run(graph, feed, rounding)
        for name in sums:
            totals[number, name] = found[names.new_total(name)]
        return found

    def run(
        self, graph: StageGraph, feed: Mapping[str, Array], rounding: Rounding
    ) -> dict[str, Array]:
        """Run a graph locally. Inputs may have any shape with the right number of elements."""
        key = graph, rounding.narrow, rounding.noise is not None
        if key not in self._sessions:
            self._sessions[key] = self._open_graph(_audited(graph, rounding), (), None)
        session = self._sessions[key]
        shaped = {
            name: feed[name].reshape([n if isinstance(n, int) else -1 for n in shape])
            for name, shape in session.inputs.items()
        }
        try:
            return session.run(shaped)
        except GraphError:  # for example, because an accelerator ran out of memory
            if isinstance(session, GraphSession):
                raise
            session = self._sessions[key] = open_on_cpu(_audited(graph, rounding))
            return session.run(shaped)


def _audited(graph: StageGraph, rounding: Rounding) -> bytes:
    """Return the ONNX model that an audit runs to recompute the results of a graph."""
    if rounding.noise is not None:
        return noisy(graph.model, ROUNDING, narrow=rounding.narrow)
    return with_narrow_products(graph.model) if rounding.narrow else graph.model


def _slice_feed(
    part: SliceWork, record: StageRecord, batch: int, rounding: Rounding
) -> dict[str, Array]:
    """Return the inputs of the forward graph of one slice of a vocabulary-parallel loss."""
    x = moved(_array(record.x[batch]), rounding.noise)
    return {names.X: x, names.TARGETS: _array(part.targets[batch])} | _arrays(part.parameters)


def _arrays(held: Mapping[str, StageArray]) -> dict[str, Array]:
    return {name: _array(array) for name, array in held.items()}


def _array(given: StageArray) -> Array:
    if given.dtype in NUMPY_DTYPES:
        return np.frombuffer(packed(given.payload), NUMPY_DTYPES[given.dtype])
    return floats(given.payload, given.rows, given.columns, DType(given.dtype))


def floats(payload: Any, rows: int, columns: int, dtype: DType) -> Array:
    if isinstance(payload, Buffer):
        return payload.float32()
    return arrays.unpack(payload, rows, columns, dtype).float32()
