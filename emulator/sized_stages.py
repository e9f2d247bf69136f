"""Emulate steps by stages from array sizes alone, for models too large for this machine.

The devices compute no results. Every message is still sent over the emulated links, and each graph
run takes the time that its FLOPs require. Sizes and FLOPs come from `cleave.workload.stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cleave import graph_names as names
from cleave.arrays import DType
from cleave.errors import FleetError
from cleave.planner.coding import CodingPolicy
from cleave.planner.stages.model import HeadSlice, PsCompute, StageModel, StagePlan
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import (
    OutputReady,
    SlicesBack,
    SlicesReady,
    StepFailed,
    StepResult,
)
from cleave.scheduler.stages.work import (
    LayerWork,
    LossWork,
    SliceWork,
    StageGraph,
    StepWork,
    SumShape,
)
from cleave.workload.registry import Family, ModelSpec
from cleave.workload.stages import HEAD, Adapters, LayerSizes, Parameter, StageSizes, cut_batch
from emulator.activity import Activity, Direction, Transfer
from emulator.deferred import SizedProduct
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 8
_FORWARD_GRAPH_BYTES: Final = 10_000  # real graphs: 7 to 11 kB forward, 19 to 22 kB backward
_BACKWARD_GRAPH_BYTES: Final = 20_000
_LOSS_GRAPH_BYTES: Final = 6_000


_Graphs = tuple[StageGraph, StageGraph, StageGraph]  # forward; backward; backward from activations


class SizedModel:
    """A model and a batch whose arrays have sizes but no elements.

    Frozen parameters, graphs and the layers' keyword arguments are the same objects in every step,
    so the PS does not resend them.

    Args:
        dtype: dtype of parameters and activations in messages.
        gradients: dtype of gradients in messages; None to use `dtype`.
        adapters: adapters to train while the model's parameters are frozen; None to train the whole
            model.
        in_parts: whether a layer's attention and MLP may run on different devices.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rows: int,
        sequence: int,
        micro_batches: int,
        dtype: DType = DType.BF16,
        gradients: DType | None = None,
        adapters: Adapters | None = None,
        in_parts: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.gradients = gradients or dtype
        self.sizes = StageSizes(
            spec, sequence, dtype.itemsize, self.gradients.itemsize, adapters, in_parts
        )
        self.tokens = cut_batch(rows, sequence, micro_batches)
        self._frozen: dict[tuple[int, Parameter, int], StageArray] = {}
        self._extras = _extras(spec, sequence)
        self._targets = [
            StageArray(1, tokens, "int64", SizedProduct(_INDEX_BYTES * tokens))
            for tokens in self.tokens
        ]
        self._scale = StageArray(1, 1, "fp32", SizedProduct(_FP32_BYTES))
        self._first = StageArray(1, 1, "int64", SizedProduct(_INDEX_BYTES))
        self._graphs = [self._graphs_of(part) for part in self.sizes.parts]
        self._loss = self._graph_of_loss()
        self._slice = self._graphs_of_slice()

    def costs(self) -> StageModel:
        """Return the planner's cost model for the layers and the batch."""
        return self.sizes.costs(self.tokens)

    def work(self, plan: StagePlan) -> StepWork:
        """Return the work of one step, with new arrays for the inputs and trained parameters."""
        layers = [
            self._layer_work(number, part, graphs)
            for number in range(self.spec.layers)
            for part, graphs in zip(self.sizes.parts, self._graphs, strict=True)
        ]
        return StepWork(
            layers=layers,
            loss=self._loss_work() if plan.stages[-1].loss else None,
            x=[_array(tokens, self.spec.width, self.dtype) for tokens in self.tokens],
            width=self.spec.width,
            tokens=self.tokens,
            stages=plan.stages,
            gradients=self.gradients.value,
            embeds=self.sizes.embeds,
            kept_batches=plan.kept_batches,
            slices=plan.slices,
            slice_works=[self._slice_work(part) for part in plan.head_slices],
            forward_first=plan.forward_first,
        )

    def _layer_work(self, number: int, part: LayerSizes, graphs: _Graphs) -> LayerWork:
        tokens = self.sizes.sequence // part.pieces
        forward, backward, from_activations = graphs
        return LayerWork(
            forward,
            backward,
            self._parameters(number, part.parameters),
            _sums(part.parameters),
            self._extras if part.heads_width else {},
            part.forward_flops,
            part.backward_flops,
            from_activations,
            {
                names.activation(place): _FP32_BYTES * elements * self.sizes.sequence // part.pieces
                for place, elements in enumerate(part.activations)
            },
            tokens,
            part.backward_flops - part.spared_flops,
        )

    def _loss_work(self) -> LossWork:
        sizes = self.sizes
        parameters = self._parameters(self.spec.layers, sizes.head) | {names.SCALE: self._scale}
        return LossWork(self._loss, parameters, _sums(sizes.head), self._targets, sizes.loss_flops)

    def _slice_work(self, part: HeadSlice) -> SliceWork:
        """Return the work of one slice of the vocabulary-parallel loss."""
        first, stop = part.rows(self.spec.vocabulary)
        head = [replace(p, rows=stop - first) if p.name == HEAD else p for p in self.sizes.head]
        parameters = self._parameters(self.spec.layers, head, first)
        return SliceWork(
            *self._slice,
            parameters | {names.SCALE: self._scale, names.FIRST: self._first},
            _sums(head),
            self._targets,
            self.sizes.loss_forward_flops * part.share,
            (self.sizes.loss_flops - self.sizes.loss_forward_flops) * part.share,
            _FP32_BYTES * (stop - first),
        )

    def _parameters(
        self, number: int, parameters: Sequence[Parameter], first: int = 0
    ) -> dict[str, StageArray]:
        """Return the parameters' arrays by name. `first` is the first row of an LM head slice."""
        found = {}
        for one in parameters:
            made = self._frozen.get((number, one, first)) or self._parameter(one)
            if not one.trained:
                self._frozen[number, one, first] = made
            found[names.parameter(one.name)] = made
        return found

    def _parameter(self, one: Parameter) -> StageArray:
        """Return a parameter's array. A quantized parameter's array contains codes and scales."""
        if one.bits is None:
            return _array(one.rows, one.columns, self.dtype, TrafficKind.WEIGHTS)
        nbytes = one.travelling_bytes(self.dtype.itemsize)
        return StageArray(1, nbytes, "uint8", SizedProduct(nbytes), TrafficKind.WEIGHTS)

    def _graphs_of(self, part: LayerSizes) -> _Graphs:
        extras = self._extras if part.heads_width else {}
        parameters, totals, new_totals = _names(part.parameters)
        held = (names.X, *parameters, *extras)
        activations = [names.activation(number) for number in range(len(part.activations))]
        of_backward, found = (*held, names.DY, *totals), (names.DX, *new_totals)
        return (
            StageGraph(bytes(_FORWARD_GRAPH_BYTES), held, (names.Y, *activations)),
            StageGraph(bytes(_BACKWARD_GRAPH_BYTES), of_backward, found),
            StageGraph(bytes(_BACKWARD_GRAPH_BYTES), (*of_backward, *activations), found),
        )

    def _graph_of_loss(self) -> StageGraph:
        parameters, totals, new_totals = _names(self.sizes.head)
        return StageGraph(
            bytes(_LOSS_GRAPH_BYTES),
            (names.X, *parameters, names.TARGETS, names.SCALE, *totals),
            (names.LOSS, names.DX, *new_totals),
        )

    def _graphs_of_slice(self) -> tuple[StageGraph, StageGraph]:
        """Return the forward and backward graphs of a slice of the vocabulary-parallel loss."""
        parameters, totals, new_totals = _names(self.sizes.head)
        held = (names.X, names.TARGETS, names.FIRST, *parameters)
        of_backward = (*held, names.SCALE, names.DY, names.LOGITS, *totals)
        size = bytes(_LOSS_GRAPH_BYTES)
        backward = StageGraph(size, of_backward, (names.DX, *new_totals))
        return StageGraph(size, held, (names.Y, names.LOGITS)), backward


def _names(parameters: Sequence[Parameter]) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the parameters, the old gradient sums, and the new gradient sums."""
    trained = [one.name for one in parameters if one.trained]
    every = [names.parameter(one.name) for one in parameters]
    return every, list(map(names.total, trained)), list(map(names.new_total, trained))


def _extras(spec: ModelSpec, sequence: int) -> dict[str, StageArray]:
    """Return a layer's keyword arguments: rotary position embeddings for Llama, else none."""
    if spec.family is not Family.LLAMA:
        return {}
    return {
        names.extra(f"position_embeddings.{number}"): _array(sequence, spec.head_width, DType.FP32)
        for number in range(2)
    }


def _array(
    rows: int, columns: int, dtype: DType, kind: TrafficKind = TrafficKind.ACTIVATIONS
) -> StageArray:
    payload = SizedProduct(rows * columns * dtype.itemsize)
    return StageArray(rows, columns, dtype.value, payload, kind)


def _sums(parameters: Sequence[Parameter]) -> dict[str, SumShape]:
    return {one.name: SumShape(one.rows, one.columns) for one in parameters if one.trained}


# --- steps in virtual time ---


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """Result of an emulated step by stages. The step ends when the PS has received all gradients.

    `kept_bytes` is the size of the data that the PS stores until the step ends: inputs, outputs and
    gradients of stages, and accumulated weight gradients.
    """

    seconds: float
    downlink_bytes: int
    uplink_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class EmulatedSteps:
    """Results of consecutive steps. `memory_bytes` maps device numbers to peak memory in bytes."""

    steps: tuple[EmulatedStep, ...]
    memory_bytes: Mapping[int, int]


def run_steps(
    runtime: VirtualRuntime,
    work_of_step: Callable[[], StepWork],
    loss_s: Sequence[float],
    steps: int = 2,
) -> EmulatedSteps:
    """Emulate steps by stages on a virtual fleet that computes no results.

    If no device computes the loss, the PS computes it for one micro-batch at a time. The PS
    needs `loss_s[i]` seconds for micro-batch i. Raises FleetError if a step cannot be completed.
    """
    meter = _Meter()
    runtime.observers.append(meter)
    found = []
    try:
        for _ in range(steps):
            found.append(_run_step(runtime, work_of_step(), loss_s, meter))
    finally:
        runtime.observers.remove(meter)
    return EmulatedSteps(tuple(found), dict(meter.most_bytes))


def _run_step(
    runtime: VirtualRuntime, work: StepWork, loss_s: Sequence[float], meter: _Meter
) -> EmulatedStep:
    began_s, before = runtime.now_s, runtime.counters()
    loss_free_s = began_s
    meter.fetched_bytes = 0
    kept_bytes = sum(x.nbytes for x in work.x)
    runtime.begin_step(work)
    while True:
        match runtime.next_outcome():
            case OutputReady(batch, payload):
                dy = replace(work.x[batch], payload=SizedProduct(payload_bytes(payload)))
                kept_bytes += dy.nbytes
                loss_free_s = max(loss_free_s, runtime.now_s) + loss_s[batch]
                runtime._at(loss_free_s, runtime.give, batch, dy)
            case SlicesReady(batch, _):
                runtime.give(batch, _array(work.tokens[batch], 1, DType.FP32))
            case SlicesBack(batch, (payload, *_)):
                dy = replace(work.x[batch], payload=SizedProduct(payload_bytes(payload)))
                kept_bytes += dy.nbytes
                runtime.give(batch, dy)
            case StepFailed(reason):
                raise FleetError(f"the emulated step cannot be completed: {reason}")
            case StepResult():
                break
    counters = runtime.counters() - before
    return EmulatedStep(
        runtime.now_s - began_s,
        counters.downlink_bytes,
        counters.uplink_bytes,
        kept_bytes + meter.fetched_bytes,
    )


@dataclass(slots=True)
class _Meter:
    """Observer that records each device's peak memory and the total size of a step's results."""

    most_bytes: dict[int, int] = field(default_factory=dict)
    fetched_bytes: int = 0
    _sizes: dict[int, dict[int, int]] = field(default_factory=dict)
    _now_bytes: dict[int, int] = field(default_factory=dict)

    def __call__(self, activity: Activity) -> None:
        if not isinstance(activity, Transfer):
            return
        if activity.direction is Direction.DOWN:
            self._down(activity.device, activity.message)
        elif isinstance(activity.message, messages.Result):
            self.fetched_bytes += payload_bytes(activity.message.payload)

    def _down(self, device: int, message: messages.Message) -> None:
        sizes = self._sizes.setdefault(device, {})
        now_bytes = self._now_bytes.get(device, 0)
        match message:
            case messages.Put(id=name) | messages.Graph(id=name):
                sizes[name] = payload_bytes(message.payload)
                now_bytes += sizes[name]
            case messages.Concat():
                sizes[message.id] = sum(sizes.pop(name) for name in message.ids)
            case messages.RunGraph():
                made = (name for name in message.outputs if name)
                for name, nbytes in zip(made, message.output_bytes, strict=True):
                    now_bytes += nbytes - sizes.get(name, 0)  # an output may replace an input
                    sizes[name] = nbytes
            case messages.Drop():
                now_bytes -= sum(sizes.pop(name, 0) for name in message.ids)
        self._now_bytes[device] = now_bytes
        self.most_bytes[device] = max(self.most_bytes.get(device, 0), now_bytes)


@dataclass(frozen=True, slots=True)
class EmulatedStages:
    """Result of `emulate_stages`. `alone_s` is the predicted time (s) of a step on the PS alone."""

    model: StageModel
    plan: StagePlan
    steps: Sequence[EmulatedStep]
    ps: PsCompute
    alone_s: float

    @property
    def step_s(self) -> float:
        """Return the duration of the last step in virtual seconds, including the optimizer step."""
        return self.steps[-1].seconds + self.ps.optimizer_s


def emulate_stages(
    spec: ModelSpec,
    rows: int,
    sequence: int,
    members: Sequence[FleetDevice],
    ps: PsCompute,
    *,
    dtype: DType = DType.BF16,
    steps: int = 2,
    coding: CodingPolicy | str = CodingPolicy.AUTO,
    seed: int = 0,
    observers: Sequence[Callable[[Activity], None]] = (),
) -> EmulatedStages:
    """Plan stages for a fleet and emulate training steps from array sizes alone.

    Args:
        members: devices of the fleet, with their fp32 throughput, because graphs run in fp32.
        ps: speed of the PS, used for the PS's part of a step and for a step without devices.
        dtype: dtype of parameters, activations and gradients in messages.
        coding: links on which payloads count as compressed, as for `cleave serve --coding`.
        seed: random seed for jitter, drift and the devices' availability.
        observers: functions that are called with every activity of every device.

    Raises:
        PlanError: if the devices cannot run the model in stages, for example because they lack
            memory.
    """
    runtime = VirtualRuntime(
        members, None, Arithmetic.NONE, ps.rates, verify=False, coding=coding, seed=seed
    )
    runtime.observers.extend(observers)

    sizes = StageSizes(spec, sequence, dtype.itemsize, dtype.itemsize)
    forecaster = sizes.forecaster(rows, ps)
    found = forecaster.by_stages(list(runtime.stage_devices().values()))
    assert found.stages is not None
    model, plan = found.stages
    sized = SizedModel(spec, rows, sequence, len(model.tokens), dtype, in_parts=model.in_parts)
    loss_s = [tokens * ps.loss_s(model.loss) for tokens in model.tokens]
    ran = run_steps(runtime, lambda: sized.work(plan), loss_s, steps)
    return EmulatedStages(model, plan, ran.steps, ps, forecaster.alone().step_s)
