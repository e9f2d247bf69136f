"""Convert a model's tensors to inputs of steps by stages, and device results to tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import Buffer, DType
from cleave.graphs.calls import Embedded
from cleave.graphs.embedding_graph import EmbeddingGraphs
from cleave.graphs.layer_parts import LayerPart, tensors_of
from cleave.graphs.loss_graph import SliceGraphs, combined
from cleave.graphs.model_graphs import ModelGraphs
from cleave.graphs.model_state import content
from cleave.planner.coding import coded_ratio
from cleave.planner.stages.model import (
    NO_COST,
    HeadSlice,
    LayerCost,
    PsLayers,
    StageModel,
    dequantized_bytes,
    working_bytes,
)
from cleave.planner.stages.resident import kept_on_devices
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.resident import ResidentParameter
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    EmbeddingWork,
    LayerWork,
    LossWork,
    SliceWork,
    StageGraph,
    SumShape,
)
from cleave.training.lora.quantized import matrix_shapes
from cleave.training.stages.ps_passes import runs_of
from cleave.workload.stages import LayerSizes, Parameter

_FP32_BYTES: Final = 4
_MESSAGE_BYTES: Final = 255 * 2**20  # size of the largest array that fits in one protocol message
# Larger arrays are sent in parts of this size, so that other messages can be sent in between.
_PART_BYTES: Final = 64 * 2**20
_TORCH: Final = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}
_INDICES: Final = {torch.int64: "int64", torch.bool: "bool", torch.uint8: "uint8"}


class Sent:
    """Cache of graphs and frozen parameters in the wire format.

    Devices keep an array as long as steps contain the same `StageArray` object. So the cache
    returns the same object for a parameter until the parameter changes.

    Args:
        changing: whether the caller may change frozen parameters between steps without notice. If
            so, each step hashes all frozen parameters to detect changes.
    """

    def __init__(self, *, changing: bool = False) -> None:
        self._changing = changing
        self._graphs: dict[tuple[bytes, DType], StageGraph] = {}
        # The last part of the key is the range (first, stop) of sent rows; None for all rows.
        self._frozen: dict[tuple[int, DType, tuple[int, int] | None], _Frozen] = {}

    def graph(self, model: bytes, dtype: DType) -> StageGraph:
        """Return the `StageGraph` of a serialized ONNX model. Each model is parsed only once.

        Args:
            dtype: dtype in which devices may compute matrix products.
        """
        if (model, dtype) not in self._graphs:
            graph = onnx.load_model_from_string(model).graph
            inputs = tuple(one.name for one in graph.input)
            outputs = tuple(one.name for one in graph.output)
            products = "" if dtype is DType.FP32 else dtype.value
            self._graphs[model, dtype] = StageGraph(model, inputs, outputs, products)
        return self._graphs[model, dtype]

    def frozen(
        self,
        tensor: Tensor,
        dtype: DType,
        rows: tuple[int, int] | None,
        values: Tensor,
        make: Callable[[Tensor], StageArray],
    ) -> StageArray:
        """Return the cached wire array of a frozen parameter, or a new one if it has changed.

        Args:
            tensor: the whole parameter.
            rows: first row and stop (exclusive) of the sent rows; None for all rows.
            values: the rows of `tensor` that are sent.
            make: converts `values` to a wire array.
        """
        key = id(tensor), dtype, rows
        known = self._frozen.get(key)
        digest = content(values) if self._changing else b""
        if known is None or known.digest != digest:
            known = self._frozen[key] = _Frozen(tensor, digest, make(values))
        return known.array

    def keep_rows(self, rows: Collection[tuple[int, int]]) -> None:
        """Remove all frozen rows of the LM head from the cache, except the ranges in `rows`."""
        self._frozen = {k: held for k, held in self._frozen.items() if k[2] in {None, *rows}}

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Remove all frozen parameters except `tensors` from the cache."""
        those = {id(tensor) for tensor in tensors}
        self._frozen = {key: held for key, held in self._frozen.items() if key[0] in those}


# `id` of a parameter, and the first row and the stop of the sent rows; None for all rows.
_Key = tuple[int, tuple[int, int] | None]


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes if a tensor is modified in place or gets other memory."""
    return tensor._version, tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class _Trained:
    tensor: Tensor  # this reference keeps other tensors from getting the same `id`
    state: tuple[int, int]  # `_state` of the tensor when the array was made
    array: StageArray


@dataclass(frozen=True, slots=True)
class _Frozen:
    tensor: Tensor  # this reference keeps other tensors from getting the same `id`
    digest: bytes
    array: StageArray


class ModelWork:
    """Converts a model's tensors to inputs of steps by stages, and device results to tensors.

    Graphs, frozen parameters and unchanged keyword arguments of layers (masks, position embeddings)
    are the same objects in each step, so that devices keep them between steps.

    Args:
        model: transformers causal language model.
        graphs: graphs of the model's layers and loss.
        dtype: dtype of parameters and activations on the wire.
        message_bytes: parameters larger than this number of bytes are sent in several messages.
        sent: cache that all `ModelWork` objects of a model may share; a new cache by default.

    Attributes:
        resident: the trained state on devices, by parameter `id`; empty if the PS sends the
            parameters in each step.
        resident_head: whether a device keeps the state of the LM head and the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: ModelGraphs,
        dtype: DType,
        message_bytes: int = _MESSAGE_BYTES,
        sent: Sent | None = None,
    ) -> None:
        self.model = model
        self.graphs = graphs
        self.dtype = dtype
        self._message_bytes = message_bytes
        self._sent = sent or Sent()
        self._layers = [
            tuple(
                self._sent.graph(model, dtype)
                for model in (g.forward, g.backward, g.from_activations)
            )
            for g in graphs.layers
        ]
        self._loss = None if graphs.loss is None else self._sent.graph(graphs.loss.graph, dtype)
        self._held = [part.held for part in graphs.parts]
        self.held_by_loss = tensors_of(model)
        self._slice_graphs: dict[int, SliceGraphs] = {}
        # Arrays of trained parameters: those used in this step, those prepared for this step before
        # it began, and those prepared for the next step.
        self._trained: dict[_Key, _Trained] = {}
        self._ready: dict[_Key, _Trained] = {}
        self._renewed: dict[_Key, _Trained] = {}
        self.resident: Mapping[int, ResidentParameter] = {}
        self.resident_head = False
        # Keyword arguments of this step and the previous step, by digest. Older ones are dropped,
        # because the masks of earlier batches may never occur again.
        self._extras: dict[bytes, StageArray] = {}
        self._extras_before: dict[bytes, StageArray] = {}

    def layers(self, embedded: Sequence[Embedded]) -> list[LayerWork]:
        """Return the graphs, current parameters and costs of each layer for one step.

        Call this method before `loss` and `slices` of the same step.

        Args:
            embedded: for each micro-batch, the first layer's input and all layers' other arguments.
        """
        found = []
        tokens = embedded[0].x.shape[1]
        self._extras_before, self._extras = self._extras, {}
        self._ready, self._renewed, self._trained = self._renewed, {}, {}
        for number, (forward, backward, from_activations) in enumerate(self._layers):
            part, graphs = self.graphs.parts[number], self.graphs.layers[number]
            held = part.held
            used = {*forward.inputs, *backward.inputs, *from_activations.inputs}
            parameters = {
                names.parameter(n): self._parameter(held[n])
                for n in graphs.parameters
                if names.parameter(n) in used
            }
            extras = [
                {
                    names.extra(n): self._extra_array(t)
                    for n, t in one.extras[part.layer].items()
                    if names.extra(n) in used
                }
                for one in embedded
            ]
            same = {n for n, a in extras[0].items() if all(other[n] is a for other in extras)}
            of_batch = [{n: a for n, a in one.items() if n not in same} for one in extras]
            sizes = _sizes(part, graphs.trainable, tokens)
            sums = {n: sum_shape(held[n]) for n in graphs.trainable}
            found.append(
                LayerWork(
                    forward,
                    backward,
                    parameters,
                    sums,
                    {n: a for n, a in extras[0].items() if n in same},
                    sizes.forward_flops,
                    sizes.backward_flops,
                    from_activations,
                    {name: _FP32_BYTES * each for name, each in graphs.activations.items()},
                    tokens // part.pieces,
                    sizes.backward_flops - sizes.spared_flops,
                    of_batch if any(of_batch) else (),
                )
            )
        return found

    def loss(self, targets: Sequence[Tensor], scale: float) -> LossWork:
        """Return the graph, parameters and targets of the final norm, LM head and loss.

        Args:
            targets: target tokens of each micro-batch, shape (batch, tokens).
            scale: factor by which each token's loss is multiplied.
        """
        held, graphs = self.held_by_loss, self.graphs.loss
        assert graphs is not None
        assert self._loss is not None
        parameters = {names.parameter(n): self._parameter(held[n]) for n in graphs.parameters}
        parameters[names.SCALE] = floats(np.full((1, 1), scale))
        sums = {n: sum_shape(held[n]) for n in graphs.trainable}
        given = [indices(t) for t in targets]
        return LossWork(self._loss, parameters, sums, given, self.loss_flops)

    @property
    def is_tied(self) -> bool:
        """Return whether the embedding and the LM head share a trained parameter."""
        model: Any = self.model
        weight: Tensor = model.get_input_embeddings().weight
        loss = self.graphs.loss
        trained = () if loss is None else loss.trainable
        return any(self.held_by_loss[name] is weight for name in trained)

    @cached_property
    def embedding_graphs(self) -> EmbeddingGraphs:
        """Return the graphs of everything before the first layer.

        Raises:
            LayerGraphError: if this part of the model cannot be exported.
        """
        assert self.graphs.embedding is not None
        return self.graphs.embedding()

    @property
    def head_trainable(self) -> tuple[str, ...]:
        """Return the trained parameters in the loss and, if it is tied, in the embedding."""
        loss = self.graphs.loss
        embedding = self.embedding_graphs.trainable if self.is_tied else ()
        return (*dict.fromkeys((*embedding, *(() if loss is None else loss.trainable))),)

    def embedding(self) -> EmbeddingWork:
        """Return the graphs and parameters of everything before the first layer."""
        held, graphs = self.held_by_loss, self.embedding_graphs
        return EmbeddingWork(
            self.graph(graphs.forward),
            self.graph(graphs.backward) if graphs.trainable else None,
            {names.parameter(n): self._parameter(held[n]) for n in graphs.parameters},
            {n: sum_shape(held[n]) for n in graphs.trainable},
        )

    def slices(
        self, targets: Sequence[Tensor], scale: float, parts: Sequence[HeadSlice]
    ) -> list[SliceWork]:
        """Return the `SliceWork` of each slice in `parts`. For the other arguments, see `loss`."""
        if not parts:
            return []
        self._sent.keep_rows([part.rows(self.vocabulary) for part in parts])
        given = [indices(t) for t in targets]
        one = floats(np.full((1, 1), scale))
        return [self._slice(part, given, one) for part in parts]

    def _slice(
        self, part: HeadSlice, targets: Sequence[StageArray], scale: StageArray
    ) -> SliceWork:
        held, graphs = self.held_by_loss, self.graphs_of_slice(part)
        first, stop = part.rows(self.vocabulary)
        parameters = {
            names.parameter(n): self._parameter(held[n][first:stop], held[n], (first, stop))
            if n in graphs.cut
            else self._parameter(held[n])
            for n in graphs.parameters
        }
        parameters |= {names.SCALE: scale, names.FIRST: self._extra_array(torch.tensor([first]))}
        rows = {n: held[n][first:stop] if n in graphs.cut else held[n] for n in graphs.trainable}
        return SliceWork(
            self._sent.graph(graphs.forward, self.dtype),
            self._sent.graph(graphs.backward, self.dtype),
            parameters,
            {n: sum_shape(tensor) for n, tensor in rows.items()},
            targets,
            self.loss_forward_flops * part.share,
            (self.loss_flops - self.loss_forward_flops) * part.share,
            _FP32_BYTES * (stop - first),
        )

    def graphs_of_slice(self, part: HeadSlice) -> SliceGraphs:
        """Return the graphs of a slice of the loss. Slices of equal size share graphs."""
        first, stop = part.rows(self.vocabulary)
        if (rows := stop - first) not in self._slice_graphs:
            assert self.graphs.slice_of_loss is not None
            self._slice_graphs[rows] = self.graphs.slice_of_loss(rows)
        return self._slice_graphs[rows]

    @property
    def vocabulary(self) -> int:
        """Return the vocabulary size, which is the number of rows of the LM head."""
        model: Any = self.model
        rows: int = model.get_output_embeddings().out_features
        return rows

    @property
    def loss_flops(self) -> int:
        """Return the LM head's FLOPs per token, forward and backward; 0 without a loss graph."""
        held, loss = self.held_by_loss, self.graphs.loss
        if loss is None:
            return 0
        matrices = [n for n in loss.parameters if held[n].dim() > 1]
        return sum((6 if n in loss.trainable else 4) * held[n].numel() for n in matrices)

    @property
    def loss_forward_flops(self) -> int:
        """Return the LM head's forward FLOPs per token; 0 without a loss graph."""
        parameters = self.graphs.loss.parameters if self.graphs.loss is not None else ()
        held = (self.held_by_loss[n] for n in parameters)
        return sum(2 * tensor.numel() for tensor in held if tensor.dim() > 1)

    def activation(self, tensor: Tensor) -> StageArray:
        """Convert activations or activation gradients to a wire array in the wire dtype."""
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(_TORCH[self.dtype]).contiguous()
        return _array(matrix, self.dtype)

    def of_slices(
        self, payloads: Sequence[Any], targets: Tensor, scale: float
    ) -> tuple[float, StageArray]:
        """Combine the forward results of all loss slices for one micro-batch.

        Returns:
            The loss, and the log-sum-exp over the vocabulary, which the slices' backward passes
            need.
        """
        shape = targets.numel(), names.SLICE_COLUMNS
        found = [arrays.unpack(each, *shape, DType.FP32).float32() for each in payloads]
        loss, total = combined(found, targets.flatten().numpy(), scale)
        return loss, floats(total)

    def tensor(self, payload: Any, shape: Sequence[int], dtype: DType | None = None) -> Tensor:
        """Convert a device's payload to an fp32 tensor. `dtype` is the wire dtype by default."""
        rows = int(np.prod(shape[:-1]))
        values = arrays.unpack(payload, rows, shape[-1], dtype or self.dtype).float32()
        return torch.from_numpy(np.array(values, copy=True)).reshape(tuple(shape))

    def held(self, layer: int) -> Mapping[str, Tensor]:
        """Return the parameters of a layer by name. The loss and its slices count as layers."""
        return self.held_by_loss if layer <= LOSS_LAYER else self._held[layer]

    def costs(self, tokens: Sequence[int], sequence: int, gradients: DType) -> StageModel:
        """Return the planner's cost model: FLOPs, bytes and memory of the layers and the loss.

        Args:
            tokens: number of tokens of each micro-batch.
            sequence: number of tokens per sequence.
            gradients: wire dtype of parameter gradients.
        """
        width = self.graphs.calls[0].x.shape[-1]
        layers = []
        for part, graphs in zip(self.graphs.parts, self.graphs.layers, strict=True):
            held = part.held
            sizes = _sizes(part, graphs.trainable, sequence)
            cost = self._cost(held, graphs.parameters, graphs.trainable, gradients)
            heads = getattr(self.model.config, "num_attention_heads", 1) if part.attends else 0
            shapes = matrix_shapes(held)
            matrices = [shape for name, shape in shapes.items() if held[name].dim() == 2]
            squeezed = getattr(self.model.config, "attn_logit_softcapping", None) is not None
            working = working_bytes(matrices, width, heads, sequence, squeezed=squeezed)
            floats = (t.numel() for t in held.values() if t.is_floating_point())
            largest = _FP32_BYTES * max(floats, default=0)
            coded = [m * n for name, (m, n) in shapes.items() if held[name].dtype is torch.uint8]
            layers.append(
                LayerCost(
                    *cost,
                    sizes.forward_flops + sizes.backward_flops,
                    sizes.forward_flops,
                    working,
                    largest,
                    _FP32_BYTES * sum(graphs.activations.values()) * part.pieces / sequence,
                    sizes.spared_flops,
                    dequantized_bytes(coded),
                    part.pieces,
                )
            )
        head = self._head_cost(gradients)
        inside = {id(t) for held in self._held for t in held.values()}
        outside = {id(t): t for t in self.held_by_loss.values() if id(t) not in inside}
        outside = {key: t for key, t in outside.items() if t.requires_grad}
        in_loss = {id(t) for t in self.outside()}
        embedding = _FP32_BYTES * sum(t.numel() for i, t in outside.items() if i not in in_loss)
        ratios = coded_ratio(self.dtype.value), coded_ratio(gradients.value)
        in_parts = not all(part.is_whole for part in self.graphs.parts)
        here = [self._ps_layers(*run, sequence) for run in sorted(runs_of(self.graphs).items())]
        # The loss cannot be sliced if the PS runs layers between the last stage and the loss.
        cut = self.graphs.slice_of_loss is not None and all(p.before < len(layers) for p in here)
        slices = self.vocabulary if cut else 1
        model = StageModel(
            layers, head, width, self.dtype.itemsize, tokens, bool(outside), *ratios, in_parts,
            slices, here, self._mask_bytes(), self.graphs.loss is not None and not here,
            self.is_tied, embedding,
        )  # fmt: skip
        return kept_on_devices(model, head=self.resident_head) if self.resident else model

    def _head_cost(self, gradients: DType) -> LayerCost:
        """Return the cost of the LM head and the loss; all 0 without a loss graph."""
        loss = self.graphs.loss
        if loss is None:
            return NO_COST
        cost = self._cost(self.held_by_loss, loss.parameters, loss.trainable, gradients)
        largest = _FP32_BYTES * max(self.held_by_loss[n].numel() for n in loss.parameters)
        working = 16 * self.vocabulary
        return LayerCost(*cost, self.loss_flops, self.loss_forward_flops, working, largest)

    def _mask_bytes(self) -> float:
        """Return the bytes per token of those layer arguments that differ between sequences."""
        found: dict[int, Tensor] = {}
        for number, part in enumerate(self.graphs.parts):
            forward, *_ = self._layers[number]
            for name, tensor in part.call.extras.items():
                by_sample = tensor.shape[:1] == part.call.x.shape[:1]
                differs = by_sample and bool((tensor != tensor[:1]).any())
                if differs and names.extra(name) in forward.inputs:
                    found[id(tensor)] = tensor
        samples, tokens = self.graphs.calls[0].x.shape[:2]
        return sum(self._extra_array(t).nbytes for t in found.values()) / (samples * tokens)

    def _ps_layers(self, before: int, numbers: Sequence[int], sequence: int) -> PsLayers:
        """Return a run of layers on the PS and its FLOPs per token with only active experts."""
        experts: int = getattr(self.model.config, "num_experts_per_tok", 0)
        forward = flops = 0.0
        for number in numbers:
            part = LayerPart.whole(self.graphs.calls[number], number)
            many = {n: t for n, t in part.held.items() if t.dim() == 3}
            used = {n: t.numel() * min(1.0, experts / t.shape[0]) for n, t in many.items()}
            used |= {n: t.numel() for n, t in part.held.items() if t.dim() == 2}
            attention = _sizes(part, (), sequence).attention_flops
            through = 2 * sum(used.values()) + attention
            trained = sum(size for n, size in used.items() if part.held[n].requires_grad)
            forward += through
            flops += 2 * through + 2 * trained + attention
        return PsLayers(before, forward, flops)

    def _cost(
        self,
        held: Mapping[str, Tensor],
        parameters: Sequence[str],
        trainable: Sequence[str],
        gradients: DType,
    ) -> tuple[int, int, int, int]:
        trained = sum(held[n].numel() for n in trainable)
        each = self.dtype.itemsize
        frozen = sum(
            t.numel() * (self._dtype_of(t).itemsize if t.is_floating_point() else t.itemsize)
            for t in (held[n] for n in parameters if n not in trainable)
        )
        return frozen, trained * each, trained * gradients.itemsize, trained * _FP32_BYTES

    def _parameter(
        self, tensor: Tensor, of: Tensor | None = None, rows: tuple[int, int] | None = None
    ) -> StageArray:
        """Convert a parameter to a wire array. The arrays of frozen parameters are cached.

        If `tensor` contains only some rows of a parameter, `of` is the whole parameter, and `rows`
        is the range of the rows: the first row, and the row after the last.
        """
        if (held := self.resident.get(id(tensor))) is not None:
            return held.weight
        if tensor.dtype in (torch.int64, torch.bool):
            return self._extra_array(tensor)
        whole = tensor if of is None else of
        if tensor.requires_grad:
            ready = self._ready.pop((id(whole), rows), None)
            if ready is None or ready.state != _state(whole):
                ready = _Trained(whole, _state(whole), self.array_of(tensor))
            self._trained[id(whole), rows] = ready
            return ready.array
        make = _codes if tensor.dtype is torch.uint8 else self.array_of
        return self._sent.frozen(whole, self.dtype, rows, tensor, make)

    def renewed(self, parameter: Tensor) -> dict[StageArray, StageArray]:
        """Convert an updated parameter to wire arrays before the next step begins.

        The next step uses these arrays unless the parameter changes again.

        Returns:
            A mapping from the parameter's wire arrays in the last step to its new wire arrays.
        """
        found: dict[StageArray, StageArray] = {}
        for key, held in self._trained.items():
            if held.tensor is parameter:
                array = self.array_of(parameter if key[1] is None else parameter[slice(*key[1])])
                self._renewed[key] = _Trained(parameter, _state(parameter), array)
                found[held.array] = array
        return found

    def forget_renewed(self) -> None:
        """Drop the arrays made by `renewed`, because the next step will not use them."""
        self._renewed = {}

    def _dtype_of(self, tensor: Tensor) -> DType:
        """Return a parameter's dtype on the wire. Frozen bf16 parameters are never upcast."""
        narrow = tensor.dtype is torch.bfloat16 and not tensor.requires_grad
        return DType.BF16 if narrow else self.dtype

    def graph(self, model: bytes) -> StageGraph:
        """Return the `StageGraph` of an ONNX model that devices run in fp32."""
        return self._sent.graph(model, DType.FP32)

    def outside(self) -> list[Tensor]:
        """Return the parameters of the final norm, the LM head and the loss."""
        loss = self.graphs.loss
        return [] if loss is None else [self.held_by_loss[name] for name in loss.parameters]

    def array_of(self, tensor: Tensor, dtype: DType | None = None) -> StageArray:
        """Return a weight's wire array. In fp32, the array shares the tensor's memory."""
        dtype = dtype or self._dtype_of(tensor)
        matrix = tensor.detach().to(_TORCH[dtype])
        matrix = matrix.reshape(-1, matrix.shape[-1] if matrix.dim() > 1 else matrix.numel())
        whole = _array(matrix, dtype, TrafficKind.WEIGHTS)
        if whole.nbytes <= self._message_bytes:
            return whole
        row_bytes = whole.nbytes // whole.rows
        step = max(1, min(self._message_bytes, _PART_BYTES) // row_bytes)
        parts = (
            _array(matrix[n : n + step], dtype, TrafficKind.WEIGHTS)
            for n in range(0, whole.rows, step)
        )
        return replace(whole, parts=tuple(parts))

    def _extra_array(self, tensor: Tensor) -> StageArray:
        """Return a layer argument's wire array, reusing an equal array of this or the last step."""
        tensor = tensor.detach()
        if tensor.is_floating_point():
            matrix = tensor.float().reshape(-1, tensor.shape[-1]).contiguous()
            made = _array(matrix, DType.FP32)
        else:
            made = indices(tensor)
        payload = made.payload.pack() if isinstance(made.payload, Buffer) else made.payload
        digest = hashlib.blake2b(f"{made.rows} {made.dtype} ".encode())
        digest.update(payload)  # type: ignore[arg-type]
        key = digest.digest()
        return self._extras.setdefault(key, self._extras_before.get(key, made))


def floats(matrix: Any) -> StageArray:
    """Return an fp32 wire array with the values of a matrix."""
    rows, columns = matrix.shape
    held = Buffer(np.ascontiguousarray(matrix, np.float32), DType.FP32)
    return StageArray(rows, columns, "fp32", held)


def _array(matrix: Tensor, dtype: DType, kind: TrafficKind = TrafficKind.ACTIVATIONS) -> StageArray:
    rows, columns = matrix.shape
    return StageArray(rows, columns, dtype.value, arrays.from_torch(matrix), kind)


def sum_shape(tensor: Tensor) -> SumShape:
    """Return the shape of a parameter's gradient sum."""
    if tensor.dim() < 2:
        return SumShape(1, max(1, tensor.numel()))
    return SumShape(tensor.numel() // tensor.shape[-1], tensor.shape[-1])


def indices(tensor: Tensor) -> StageArray:
    """Return a wire array of integers or booleans, such as token IDs."""
    array = tensor.detach().contiguous().numpy()
    payload = memoryview(array.tobytes())
    return StageArray(1, tensor.numel(), _INDICES[tensor.dtype], payload)


def _codes(tensor: Tensor) -> StageArray:
    """Return a quantized weight's codes as a wire array that shares the tensor's memory."""
    payload = memoryview(tensor.contiguous().numpy().data).cast("B")
    return StageArray(1, tensor.numel(), _INDICES[tensor.dtype], payload, TrafficKind.WEIGHTS)


def _sizes(part: LayerPart, trainable: Collection[str], tokens: int) -> LayerSizes:
    """Return a layer's matrices, from which its FLOPs in sequences of `tokens` tokens follow.

    The number of heads times the head size is assumed to equal the activation width.
    """
    shapes = matrix_shapes(part.held).items()
    matrices = tuple(Parameter(name, *shape, trained=name in trainable) for name, shape in shapes)
    return LayerSizes(matrices, tokens, part.x.shape[-1] if part.attends else 0)
