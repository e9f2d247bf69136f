"""Steps by stages emulated by sizes alone, for models that need not fit this machine.

Arrays are sizes: nothing is computed, but every message of a step travels, and devices take the
time that its FLOPs take them. Sizes and FLOPs are those that `cleave.training.stage_work` finds in
a model of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cleave import graph_names as names
from cleave.arrays import DType
from cleave.errors import FleetError, UsageError
from cleave.planner.layer_memory import working_bytes
from cleave.planner.stages import LayerCost, StageModel, StagePlan
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.scheduler.stage_work import (
    LayerWork,
    LossWork,
    OutputReady,
    StageArray,
    StageGraph,
    StepFailed,
    StepResult,
    StepWork,
    SumShape,
)
from cleave.workload.registry import Family, ModelSpec
from emulator.activity import Activity, Direction, Transfer
from emulator.deferred import SizedProduct
from emulator.virtual import VirtualRuntime

_FP32_BYTES: Final = 4
_INDEX_BYTES: Final = 8
_FORWARD_GRAPH_BYTES: Final = 10_000  # of real layers: 7 kB to 11 kB, and 19 kB to 22 kB
_BACKWARD_GRAPH_BYTES: Final = 20_000
_LOSS_GRAPH_BYTES: Final = 6_000


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA: beside a frozen matrix W of a product, B A of low rank is trained, and nothing else.

    Attributes:
        rank: of B A.
        down: whether the last product of a layer has them too, beside those of queries and values.
    """

    rank: int
    down: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter as a matrix; one of one dimension has one row."""

    name: str
    rows: int
    columns: int
    matrix: bool = True
    trained: bool = True

    @property
    def size(self) -> int:
        """Return the number of its elements."""
        return self.rows * self.columns


class SizedModel:
    """A model and a batch of which only sizes exist.

    Frozen parameters, graphs, and what layers are called with beside their input are the same
    objects in every step, so that devices keep them.

    Args:
        spec: the model.
        rows: sequences of the batch.
        sequence: tokens of a sequence.
        micro_batches: into how many parts the batch is cut.
        dtype: in which parameters and activations travel.
        gradients: in which gradients travel; None for `dtype`.
        adapters: what is trained instead of the model's own parameters.

    Attributes:
        layer, head: the parameters of a layer, and of what follows the layers.
        tokens: of each micro-batch.

    Raises:
        UsageError: when there are more micro-batches than sequences, or none.
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
    ) -> None:
        if not 0 < micro_batches <= rows:
            raise UsageError(f"{rows} sequences cannot be cut into {micro_batches} micro-batches")
        self.spec = spec
        self.dtype = dtype
        self.gradients = gradients or dtype
        self.layer = tuple(_adapted(_layer(spec), adapters))
        self.head = tuple(_adapted(_head(spec), adapters))
        self.tokens = [
            sequence * (rows // micro_batches + (number < rows % micro_batches))
            for number in range(micro_batches)
        ]
        self._embeds = adapters is None
        self._sequence = sequence
        self._frozen: dict[tuple[int, str], StageArray] = {}
        self._beside = _beside(spec, sequence)
        self._targets = [
            StageArray(1, tokens, "int64", SizedProduct(_INDEX_BYTES * tokens))
            for tokens in self.tokens
        ]
        self._scale = StageArray(1, 1, "fp32", SizedProduct(_FP32_BYTES))
        self._forward, self._backward, self._loss = self._graphs()

    @property
    def trained_parameters(self) -> int:
        """Return how many parameters are trained; an embedding counts if the model itself is."""
        if self._embeds:
            return self.spec.parameters
        return self.spec.layers * sum(tensor.size for tensor in self.layer if tensor.trained)

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs of a layer's forward pass, for each token."""
        products = sum(tensor.size for tensor in self.layer if tensor.matrix)
        return 2 * products + 4 * self._sequence * self.spec.query_width

    @property
    def backward_flops(self) -> int:
        """Return those of its backward pass, which computes the forward pass again."""
        trained = sum(t.size for t in self.layer if t.matrix and t.trained)
        return 2 * self.forward_flops + 2 * trained

    @property
    def loss_flops(self) -> int:
        """Return the FLOPs of the loss and its gradients, for each token."""
        products = [tensor for tensor in self.head if tensor.matrix]
        return sum((6 if tensor.trained else 4) * tensor.size for tensor in products)

    def costs(self) -> StageModel:
        """Return what the layers cost, for the planner."""
        spec = self.spec
        matrices = [(t.rows, t.columns) for t in self.layer if t.matrix]
        working = working_bytes(matrices, spec.width, spec.heads, self._sequence)
        flops = self.forward_flops + self.backward_flops
        layer = LayerCost(*self._bytes(self.layer), flops, self.forward_flops, working)
        loss = self.loss_flops
        head = LayerCost(*self._bytes(self.head), loss, loss / 3, 16 * spec.vocabulary)
        layers = [layer] * spec.layers
        return StageModel(layers, head, spec.width, self.dtype.itemsize, self.tokens, self._embeds)

    def work(self, plan: StagePlan) -> StepWork:
        """Return a step: trained parameters are new arrays, all else is as in the step before."""
        layers = [
            LayerWork(
                self._forward,
                self._backward,
                self._parameters(number, self.layer),
                _sums(self.layer),
                [self._beside] * len(self.tokens),
                self.forward_flops,
                self.backward_flops,
            )
            for number in range(self.spec.layers)
        ]
        return StepWork(
            layers=layers,
            loss=self._loss_work() if plan.stages[-1].loss else None,
            x=[self.activation(tokens) for tokens in self.tokens],
            width=self.spec.width,
            tokens=self.tokens,
            stages=plan.stages,
            gradients=self.gradients.value,
            embeds=self._embeds,
            kept_batches=plan.kept_batches,
        )

    def activation(self, tokens: int) -> StageArray:
        """Return activations of so many tokens, or their gradients, as they travel."""
        return _array(tokens, self.spec.width, self.dtype)

    def _loss_work(self) -> LossWork:
        parameters = self._parameters(self.spec.layers, self.head) | {names.SCALE: self._scale}
        return LossWork(self._loss, parameters, _sums(self.head), self._targets, self.loss_flops)

    def _parameters(self, number: int, tensors: Sequence[Tensor]) -> dict[str, StageArray]:
        """Return the parameters of a layer, or of the head, whose number is that of layers."""
        found = {}
        for tensor in tensors:
            made = self._frozen.get((number, tensor.name))
            if made is None:
                made = _array(tensor.rows, tensor.columns, self.dtype)
                if not tensor.trained:
                    self._frozen[number, tensor.name] = made
            found[names.parameter(tensor.name)] = made
        return found

    def _bytes(self, tensors: Sequence[Tensor]) -> tuple[int, int, int, int]:
        """Return bytes of frozen and of trained parameters, of gradients and of their sums."""
        trained = sum(tensor.size for tensor in tensors if tensor.trained)
        frozen = sum(tensor.size for tensor in tensors) - trained
        each = self.dtype.itemsize
        return (
            frozen * each,
            trained * each,
            trained * self.gradients.itemsize,
            trained * _FP32_BYTES,
        )

    def _graphs(self) -> tuple[StageGraph, StageGraph, StageGraph]:
        """Return the graphs of a layer, forward and backward, and of the loss."""
        held = (names.X, *(names.parameter(t.name) for t in self.layer), *self._beside)
        of_layer = [tensor.name for tensor in self.layer if tensor.trained]
        of_head = [tensor.name for tensor in self.head if tensor.trained]
        loss_inputs = (names.X, *(names.parameter(t.name) for t in self.head))
        return (
            StageGraph(bytes(_FORWARD_GRAPH_BYTES), held, (names.Y,)),
            StageGraph(
                bytes(_BACKWARD_GRAPH_BYTES),
                (*held, names.DY, *map(names.total, of_layer)),
                (names.DX, *map(names.new_total, of_layer)),
            ),
            StageGraph(
                bytes(_LOSS_GRAPH_BYTES),
                (*loss_inputs, names.TARGETS, names.SCALE, *map(names.total, of_head)),
                (names.LOSS, names.DX, *map(names.new_total, of_head)),
            ),
        )


def _layer(spec: ModelSpec) -> Iterator[Tensor]:
    """Yield the parameters of a layer."""
    width, query, kv, ffn = spec.width, spec.query_width, spec.kv_width, spec.ffn_width
    if spec.family is Family.LLAMA:
        yield Tensor("q_proj.weight", query, width)
        yield Tensor("k_proj.weight", kv, width)
        yield Tensor("v_proj.weight", kv, width)
        yield Tensor("o_proj.weight", width, query)
        yield Tensor("gate_proj.weight", ffn, width)
        yield Tensor("up_proj.weight", ffn, width)
        yield Tensor("down_proj.weight", width, ffn)
        yield Tensor("input_layernorm.weight", 1, width, matrix=False)
        yield Tensor("post_attention_layernorm.weight", 1, width, matrix=False)
        return
    for name, outputs, inputs in (
        ("k_proj", kv, width),
        ("v_proj", kv, width),
        ("q_proj", query, width),
        ("out_proj", width, query),
        ("fc1", ffn, width),
        ("fc2", width, ffn),
    ):
        yield Tensor(f"{name}.weight", outputs, inputs)
        yield Tensor(f"{name}.bias", 1, outputs, matrix=False)
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        yield Tensor(f"{name}.weight", 1, width, matrix=False)
        yield Tensor(f"{name}.bias", 1, width, matrix=False)


def _head(spec: ModelSpec) -> Iterator[Tensor]:
    """Yield the parameters of what follows the layers; a tied embedding is one."""
    if spec.family is Family.LLAMA or spec.pre_norm:
        yield Tensor("norm.weight", 1, spec.width, matrix=False)
    if spec.family is Family.OPT and spec.pre_norm:
        yield Tensor("norm.bias", 1, spec.width, matrix=False)
    if spec.embedding_width != spec.width:
        yield Tensor("project_out.weight", spec.embedding_width, spec.width)
    yield Tensor("lm_head.weight", spec.vocabulary, spec.embedding_width)


def _adapted(tensors: Iterator[Tensor], adapters: Adapters | None) -> Iterator[Tensor]:
    """Yield parameters with adapters, which alone are trained then."""
    if adapters is None:
        yield from tensors
        return
    adapted = {"q_proj.weight", "v_proj.weight"}
    if adapters.down:
        adapted |= {"down_proj.weight", "fc2.weight"}
    for tensor in tensors:
        yield replace(tensor, trained=False)
        if tensor.name in adapted:
            name = tensor.name.removesuffix(".weight")
            yield Tensor(f"{name}.lora_A.weight", adapters.rank, tensor.columns)
            yield Tensor(f"{name}.lora_B.weight", tensor.rows, adapters.rank)


def _beside(spec: ModelSpec, sequence: int) -> dict[str, StageArray]:
    """Return what a layer is called with beside its input: rotations by position, if any."""
    if spec.family is not Family.LLAMA:
        return {}
    return {
        names.beside(f"position_embeddings.{number}"): _array(sequence, spec.head_width, DType.FP32)
        for number in range(2)
    }


def _array(rows: int, columns: int, dtype: DType) -> StageArray:
    return StageArray(rows, columns, dtype.value, SizedProduct(rows * columns * dtype.itemsize))


def _sums(tensors: Sequence[Tensor]) -> dict[str, SumShape]:
    return {t.name: SumShape(t.rows, t.columns) for t in tensors if t.trained}


# --- steps in virtual time ---


@dataclass(frozen=True, slots=True)
class EmulatedStep:
    """What an emulated step by stages took.

    Attributes:
        seconds: virtual seconds until all gradients are at the PS.
        downlink_bytes, uplink_bytes: encoded messages, PS to devices and back.
        kept_bytes: what the PS keeps until the end: inputs and outputs of stages, their gradients,
            and sums.
    """

    seconds: float
    downlink_bytes: int
    uplink_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True)
class EmulatedSteps:
    """What emulated steps by stages took.

    Attributes:
        steps: in order; frozen parameters travel in the first.
        memory_bytes: by device, most that its arrays occupied at once.
    """

    steps: tuple[EmulatedStep, ...]
    memory_bytes: Mapping[int, int]


def run_steps(
    runtime: VirtualRuntime,
    work_of_step: Callable[[], StepWork],
    loss_s: Sequence[float],
    steps: int = 2,
) -> EmulatedSteps:
    """Run steps on a virtual fleet that computes no results.

    The PS computes the loss of one micro-batch after another, while devices go on.

    Args:
        runtime: of the fleet.
        work_of_step: makes the work of the next step.
        loss_s: by micro-batch, seconds that the PS takes for its loss; unused where devices do.
        steps: how many.

    Raises:
        FleetError: when a step cannot be completed.
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
    """Follows messages: what the arrays of devices occupy, and what they were asked to send.

    Attributes:
        most_bytes: by device, most that its arrays occupied at once.
        fetched_bytes: what devices sent to the PS, since this was last set to zero.
    """

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
            case messages.RunGraph():
                made = (name for name in message.outputs if name)
                sizes.update(zip(made, message.output_bytes, strict=True))
                now_bytes += sum(message.output_bytes)
            case messages.Drop():
                now_bytes -= sum(sizes.pop(name, 0) for name in message.ids)
        self._now_bytes[device] = now_bytes
        self.most_bytes[device] = max(self.most_bytes.get(device, 0), now_bytes)
