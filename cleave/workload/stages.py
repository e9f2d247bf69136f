"""The costs of a model's layers in a step by stages: parameters, bytes and FLOPs.

The costs are computed from the model's sizes, without torch. They equal the costs that
`cleave.training.stages.stage_work` computes from a loaded model of the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final

from cleave.errors import UsageError
from cleave.planner.coding import coded_ratio
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import (
    LayerCost,
    PsCompute,
    StageModel,
    dequantized_bytes,
    pieces_of_sequence,
    working_bytes,
)
from cleave.workload.registry import Family, ModelSpec
from cleave.workload.step import ONCE, linear_shapes

if TYPE_CHECKING:
    from cleave.planner.forecast import StepForecaster


# Consecutive elements of a row that share one scale (QLoRA, arXiv 2305.14314, section 4).
BLOCK: Final = 64
SCALE_BYTES: Final = 2  # a scale is bf16
_MOST_BYTES: Final = 255 * 2**20  # largest message; it must fit the codes of a matrix


class Bits(IntEnum):
    """Number of bits of each quantized weight."""

    FOUR = 4
    """NF4 codes. Each byte holds two codes, the first code in the low 4 bits."""

    EIGHT = 8
    """Integers. The quantization levels are equally spaced."""

    @property
    def codes_per_byte(self) -> int:
        return 8 // self


def can_quantize(rows: int, columns: int, bits: Bits) -> bool:
    """Return True if a matrix can be quantized.

    Each row must consist of whole blocks of `BLOCK` elements. The codes of the matrix must fit in
    one protocol message.
    """
    return columns % BLOCK == 0 and rows * columns // bits.codes_per_byte <= _MOST_BYTES


def quantized_bytes(rows: int, columns: int, bits: Bits) -> int:
    """Return the size in bytes of a quantized matrix: the codes and the scales."""
    return rows * columns // bits.codes_per_byte + rows * columns // BLOCK * SCALE_BYTES


_FP32_BYTES: Final = 4
HEAD: Final = "lm_head.weight"  # the LM head, with one row per token of the vocabulary
_LAST: Final = ("fc2", "down_proj")  # the last Linear of a layer
_LAST_OF_ATTENTION: Final = ("out_proj", "o_proj")
_ATTENTION: Final = (
    *("q_proj", "k_proj", "v_proj", *_LAST_OF_ATTENTION),
    *("self_attn_layer_norm", "input_layernorm"),
)
_DTYPES: Final = {2: "bf16", 4: "fp32"}  # maps bytes per element to the dtype in messages
_OPTIMIZER_PER_S: Final = 1e9  # parameters per second that an optimizer on several cores updates
_STATE_BYTES: Final = 16  # per trained parameter: weight, gradient and two moments, in fp32


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters: pairs of small trained matrices A and B, each for one frozen matrix W.

    Attributes:
        targets: names of the Linear modules that have an adapter in each layer, such as `q_proj`;
            empty for all of them, which is the default of `--lora`.
        bits: bits per element of the frozen matrices in the layers (QLoRA); None if these matrices
            are not quantized.
    """

    rank: int
    targets: tuple[str, ...] = ()
    bits: Bits | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """The shape and kind of a model's parameter. A vector has 1 row.

    Attributes:
        matrix: whether the parameter is a matrix that is multiplied, not a bias or norm weight.
        bits: bits per element if the parameter is quantized; None if elements are floating-point.
    """

    name: str
    rows: int
    columns: int
    matrix: bool = True
    trained: bool = True
    bits: Bits | None = None

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def travelling_bytes(self, element_bytes: int) -> int:
        """Return the parameter's size in messages, in bytes.

        `element_bytes` is the size of an unquantized element.
        """
        if self.bits is None:
            return self.size * element_bytes
        return quantized_bytes(self.rows, self.columns, self.bits)


@dataclass(frozen=True)
class LayerSizes:
    """The parameter shapes and other sizes of a layer, or of its attention or MLP alone.

    Attributes:
        sequence: tokens per sequence.
        heads_width: total width of all attention heads; 0 for an MLP.
    """

    parameters: tuple[Parameter, ...]
    sequence: int
    heads_width: int

    @property
    def pieces(self) -> int:
        """Return the number of chunks into which a sequence can be cut; 1 if there is attention."""
        return 1 if self.heads_width else pieces_of_sequence(self.sequence)

    @property
    def forward_flops(self) -> int:
        """Return the FLOPs per token of the forward pass."""
        products = sum(p.size for p in self.parameters if p.matrix)
        return 2 * products + self.attention_flops

    @property
    def backward_flops(self) -> int:
        """Return the FLOPs per token of the backward pass, including activation recomputation.

        For each multiplication by a parameter, the input gradient costs as much as the forward
        multiplication. The gradient of a trained parameter costs as much again. Each of attention's
        two multiplications needs the gradients of both operands.
        """
        trained = sum(p.size for p in self.parameters if p.matrix and p.trained)
        return 2 * self.forward_flops + 2 * trained + self.attention_flops

    @property
    def attention_flops(self) -> int:
        """Return the forward FLOPs per token for attention scores and weighted sums of values."""
        return 4 * self.sequence * self.heads_width

    @property
    def spared_flops(self) -> int:
        """Return the FLOPs per token that retaining activations saves in the backward pass.

        Attention scores are always recomputed, because they need more memory than queries and keys.
        """
        return self.forward_flops - self.attention_flops // 2

    @property
    def activations(self) -> tuple[int, ...]:
        """Return the number of elements per token of each activation that can be retained.

        The activations are the results of all matrix multiplications, except attention scores and
        results that are only added to the layer's output.
        """
        mlp = any(_module_of(p) in _LAST for p in self.parameters)
        added = _LAST if mlp else _LAST_OF_ATTENTION
        products = (
            p.rows
            for p in self.parameters
            if p.matrix and not (_module_of(p) in added and ".lora_A." not in p.name)
        )
        return (*products, *([self.heads_width] if self.heads_width else []))


def _module_of(parameter: Parameter) -> str:
    return parameter.name.partition(".")[0]


def cut_batch(rows: int, sequence: int, parts: int) -> list[int]:
    """Return the number of tokens in each of `parts` micro-batches of a batch of `rows` sequences.

    Raises:
        UsageError: if `parts` is below 1 or above `rows`.
    """
    if not 0 < parts <= rows:
        raise UsageError(f"{rows} sequences cannot be divided into {parts} micro-batches")
    return [sequence * (rows // parts + (number < rows % parts)) for number in range(parts)]


@dataclass(frozen=True)
class StageSizes:
    """The sizes of a model that is trained by stages.

    Attributes:
        sequence: tokens per sequence.
        element_bytes: bytes per element of parameters and activations in messages.
        gradient_bytes: bytes per element of weight gradients in messages.
        adapters: the adapters to train; None to train all parameters of the model.
        in_parts: whether each layer is divided into attention and MLP.
    """

    spec: ModelSpec
    sequence: int
    element_bytes: int = 2
    gradient_bytes: int = 2
    adapters: Adapters | None = None
    in_parts: bool = False

    @cached_property
    def layer(self) -> tuple[Parameter, ...]:
        return tuple(_adapted(_layer(self.spec), self.adapters))

    @cached_property
    def parts(self) -> tuple[LayerSizes, ...]:
        heads_width = self.spec.query_width
        if not self.in_parts:
            return (LayerSizes(self.layer, self.sequence, heads_width),)
        attention = tuple(p for p in self.layer if _module_of(p) in _ATTENTION)
        mlp = tuple(p for p in self.layer if _module_of(p) not in _ATTENTION)
        return (
            LayerSizes(attention, self.sequence, heads_width),
            LayerSizes(mlp, self.sequence, 0),
        )

    @cached_property
    def head(self) -> tuple[Parameter, ...]:
        """Return the parameters of the modules after the last layer, including the LM head."""
        trained = self.adapters is None
        return tuple(replace(each, trained=trained) for each in _head(self.spec))

    @property
    def embeds(self) -> bool:
        """Return True if the token embedding is trained.

        Its gradient is computed from the input gradient of the first layer.
        """
        return self.adapters is None

    @property
    def trained_parameters(self) -> int:
        """Return the number of trained parameters; with adapters, only those of the layers."""
        if self.adapters is None:
            return self.spec.parameters
        return self.spec.layers * sum(p.size for p in self.layer if p.trained)

    @property
    def state_bytes(self) -> int:
        """Return the PS's memory for parameters, gradients and optimizer moments, in bytes."""
        trained = self.trained_parameters
        if self.adapters is None:
            return _STATE_BYTES * trained
        coded = [p for p in self.layer if p.bits is not None]
        plain = self.spec.parameters - self.spec.layers * sum(p.size for p in coded)
        kept = self.spec.layers * sum(p.travelling_bytes(_FP32_BYTES) for p in coded)
        return _STATE_BYTES * trained + _FP32_BYTES * plain + kept

    @property
    def loss_flops(self) -> int:
        """Return the forward and backward FLOPs per token for the matrices after the last layer."""
        return sum((6 if p.trained else 4) * p.size for p in self.head if p.matrix)

    @property
    def loss_forward_flops(self) -> int:
        """Return the FLOPs per token of computing the logits."""
        return 2 * sum(p.size for p in self.head if p.matrix)

    def costs(self, tokens: Sequence[int]) -> StageModel:
        """Return the model's costs as planner input. `tokens` lists the tokens per micro-batch."""
        spec = self.spec
        layers = [self._cost(part) for part in self.parts] * spec.layers
        forward = self.loss_forward_flops
        largest = _FP32_BYTES * max(p.size for p in self.head)
        head = LayerCost(
            *self._bytes(self.head), self.loss_flops, forward, 16 * spec.vocabulary, largest
        )
        return StageModel(
            layers,
            head,
            spec.width,
            self.element_bytes,
            tokens,
            self.embeds,
            coded_ratio(_DTYPES[self.element_bytes]),
            coded_ratio(_DTYPES[self.gradient_bytes]),
            self.in_parts,
            spec.vocabulary,
            head_may_move=True,
            tied=spec.tied_head and self.adapters is None,
            embedding_bytes=self._embedding_bytes,
        )

    @property
    def _embedding_bytes(self) -> int:
        """Return the size in fp32 of the parameters that only the embedding uses."""
        if self.adapters is not None:
            return 0
        inside = self.spec.layers * sum(p.size for p in self.layer) + sum(p.size for p in self.head)
        return _FP32_BYTES * max(0, self.spec.parameters - inside)

    def server(self, flops_per_s: float, card: PsRates | None = None) -> PsCompute:
        """Return the speed of a PS with the given throughput and a typical optimizer speed."""
        each_s = 1 / _OPTIMIZER_PER_S
        return PsCompute(flops_per_s, self.trained_parameters * each_s, card, parameter_s=each_s)

    def forecaster(self, rows: int, ps: PsCompute) -> StepForecaster:
        """Return a forecaster of training steps on a batch of `rows` sequences."""
        from cleave.planner.forecast import StepForecaster  # imports numpy, which sizes do not need

        parts = replace(self, in_parts=True)
        return StepForecaster(
            lambda count: self.costs(cut_batch(rows, self.sequence, count)),
            rows,
            ps,
            self.state_bytes,
            self.spec.layers * kept_elements(self.spec) * self.element_bytes,
            lambda count: parts.costs(cut_batch(rows, self.sequence, count)),
        )

    def _cost(self, part: LayerSizes) -> LayerCost:
        matrices = [(p.rows, p.columns) for p in part.parameters if p.matrix]
        heads = self.spec.heads if part.heads_width else 0
        return LayerCost(
            *self._bytes(part.parameters),
            part.forward_flops + part.backward_flops,
            part.forward_flops,
            working_bytes(matrices, self.spec.width, heads, self.sequence),
            _FP32_BYTES * max(p.size for p in part.parameters if p.bits is None),
            _FP32_BYTES * sum(part.activations),
            part.spared_flops,
            dequantized_bytes([p.size for p in part.parameters if p.bits is not None]),
            part.pieces,
        )

    def _bytes(self, parameters: Sequence[Parameter]) -> tuple[int, int, int, int]:
        """Return the byte sizes of frozen weights, trained weights, gradients and gradient sums."""
        trained = sum(p.size for p in parameters if p.trained)
        each = self.element_bytes
        frozen = sum(p.travelling_bytes(each) for p in parameters if not p.trained)
        return frozen, trained * each, trained * self.gradient_bytes, trained * _FP32_BYTES


def kept_elements(spec: ModelSpec) -> int:
    """Return the number of activation elements per token that a layer retains for backward.

    The layer retains the inputs of every Linear, norm and nonlinearity (Korthikanti et al. 2022,
    arXiv 2205.05198, section 4.1). Dropout masks are not counted, nor are attention scores, which
    flash attention does not retain.
    """
    hidden = (3 if spec.family is Family.LLAMA else 2) * spec.ffn_width
    norms, attention = 2 * spec.width, spec.width + 2 * spec.query_width + 2 * spec.kv_width
    return norms + attention + spec.width + hidden


def recomputed_elements(spec: ModelSpec) -> int:
    """Return the number of activation elements per token that recomputation saves.

    With recomputation, the PS retains the input of every layer and all activations of one layer.
    """
    return (spec.layers - 1) * kept_elements(spec) - spec.layers * spec.width


def _layer(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters of a layer in the order of the modules in transformers."""
    llama = spec.family is Family.LLAMA
    linears = [linear for linear in linear_shapes(spec) if linear.name not in ONCE]
    norms = "input_layernorm", "post_attention_layernorm"
    if not llama:
        linears.insert(2, linears.pop(0))  # k, v, q
        norms = "self_attn_layer_norm", "final_layer_norm"
    for linear in linears:
        yield Parameter(f"{linear.name}.weight", linear.outputs, linear.inputs)
        if not llama:
            yield Parameter(f"{linear.name}.bias", 1, linear.outputs, matrix=False)
    for name in norms:
        yield Parameter(f"{name}.weight", 1, spec.width, matrix=False)
        if not llama:
            yield Parameter(f"{name}.bias", 1, spec.width, matrix=False)


def _head(spec: ModelSpec) -> Iterator[Parameter]:
    """Yield the parameters of the modules after the last layer, including a tied LM head."""
    if spec.family is Family.LLAMA or spec.pre_norm:
        yield Parameter("norm.weight", 1, spec.width, matrix=False)
    if spec.family is Family.OPT and spec.pre_norm:
        yield Parameter("norm.bias", 1, spec.width, matrix=False)
    if spec.embedding_width != spec.width:
        yield Parameter("project_out.weight", spec.embedding_width, spec.width)
    yield Parameter(HEAD, spec.vocabulary, spec.embedding_width)


def _adapted(parameters: Iterator[Parameter], adapters: Adapters | None) -> Iterator[Parameter]:
    """Yield `parameters`. With adapters, freeze these and also yield the adapters' parameters."""
    if adapters is None:
        yield from parameters
        return
    for parameter in parameters:
        bits = adapters.bits if parameter.matrix else None
        coded = bits is not None and can_quantize(parameter.rows, parameter.columns, bits)
        yield replace(parameter, trained=False, bits=bits if coded else None)
        name = parameter.name.removesuffix(".weight")
        if parameter.matrix and (not adapters.targets or name in adapters.targets):
            yield Parameter(f"{name}.lora_A.weight", adapters.rank, parameter.columns)
            yield Parameter(f"{name}.lora_B.weight", parameter.rows, adapters.rank)
