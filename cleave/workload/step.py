"""The matrix multiplications of one training step.

A Linear with weight ``W[out, in]`` needs three matrix multiplications (GEMMs), where
``tokens = batch * seq`` and k is the depth:

    forward          Y[tokens, out] = X[tokens, in]  @ W^T           k = in
    input gradient   dX[tokens, in] = dY[tokens, out] @ W            k = out
    weight gradient  dW[out, in]    = dY^T           @ X             k = tokens

Each weight gradient is computed once per batch. The matrix multiplications inside attention
(scores and weighted sums) are not included, because the parameter server computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleave.errors import UsageError
from cleave.gemm import Gemm
from cleave.planner.plan import GemmKind, StepGemm
from cleave.workload.registry import Family, ModelSpec

MAX_TOKENS: Final = 2**24  # per step, as in the largest published training runs


@dataclass(frozen=True, slots=True)
class LinearShape:
    """``count`` Linear modules of the same name and shape, with weights ``W[outputs, inputs]``."""

    name: str
    inputs: int
    outputs: int
    count: int


def linear_shapes(spec: ModelSpec, fused_siblings: bool = False) -> tuple[LinearShape, ...]:
    """Return the shapes of a model's Linear modules in the order of the forward pass.

    The LM head is last. Each Linear of the layers is returned once, for all layers together. With
    `fused_siblings`, q, k and v become ``qkv_proj``, and gate and up become ``gate_up_proj``.
    """
    width, ffn, layers = spec.width, spec.ffn_width, spec.layers
    query, kv = spec.query_width, spec.kv_width
    found = [("q_proj", width, query), ("k_proj", width, kv), ("v_proj", width, kv)]
    if fused_siblings:
        found = [("qkv_proj", width, query + 2 * kv)]
    match spec.family:
        case Family.OPT:
            found += [("out_proj", query, width), ("fc1", width, ffn), ("fc2", ffn, width)]
        case Family.LLAMA:
            gated = [("gate_proj", width, ffn), ("up_proj", width, ffn)]
            if fused_siblings:
                gated = [("gate_up_proj", width, 2 * ffn)]
            found += [("o_proj", query, width), *gated, ("down_proj", ffn, width)]
    shapes = [LinearShape(*each, layers) for each in found]
    if spec.embedding_width != width:
        shapes.insert(0, LinearShape("project_in", spec.embedding_width, width, 1))
        shapes.append(LinearShape("project_out", width, spec.embedding_width, 1))
    return *shapes, LinearShape("lm_head", spec.embedding_width, spec.vocabulary, 1)


_SIBLINGS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})


def siblings_in_order(spec: ModelSpec) -> tuple[tuple[LinearShape, ...], ...]:
    """Return a model's groups of siblings in the order of the forward pass, layer by layer.

    Siblings are Linear modules with the same input, such as q, k and v. Each shape has a ``count``
    of 1.
    """
    groups: list[list[LinearShape]] = []
    for shape in linear_shapes(spec):
        one = replace(shape, count=1)
        last = groups[-1][-1].name if groups else ""
        if any({last, shape.name} <= names for names in _SIBLINGS):
            groups[-1].append(one)
        else:
            groups.append([one])
    layer = [tuple(g) for g in groups if g[0].name not in ONCE]
    first = groups.index(list(layer[0]))
    after = groups[first + len(layer) :]
    return (*map(tuple, groups[:first]), *layer * spec.layers, *map(tuple, after))


ONCE = ("project_in", "project_out", "lm_head")  # outside the layers; at most one of each


def step_gemms(
    spec: ModelSpec, batch: int, seq: int, fused_siblings: bool = False
) -> tuple[StepGemm, ...]:
    """Return the GEMMs of one training step on ``batch`` sequences of ``seq`` tokens.

    The forward GEMMs come first, in order. They are followed by the input gradient and the weight
    gradient of each Linear, from the last Linear to the first.

    Raises:
        UsageError: if `check_step` does.
    """
    check_step(spec, batch, seq)
    tokens = batch * seq
    shapes = linear_shapes(spec, fused_siblings)
    gemms = [
        StepGemm(GemmKind.FORWARD, Gemm(tokens, s.outputs, s.inputs), s.count, s.name, after)
        for s, after in zip(shapes, _after_siblings(shapes), strict=True)
    ]
    backward = tuple(reversed(shapes))
    for s, after in zip(backward, _after_siblings(backward), strict=True):
        d_input = Gemm(tokens, s.inputs, s.outputs)
        d_weight = Gemm(s.outputs, s.inputs, tokens)
        gemms.append(StepGemm(GemmKind.INPUT_GRADIENT, d_input, s.count, s.name, after))
        gemms.append(StepGemm(GemmKind.WEIGHT_GRADIENT, d_weight, s.count, s.name, after))
    return tuple(gemms)


def check_step(spec: ModelSpec, batch: int, seq: int) -> None:
    """Raise UsageError if the model has no training step on ``batch`` sequences of ``seq`` tokens.

    The sizes must be 1 or more, the sequences must fit the model's positions, and the step must
    have at most `MAX_TOKENS` tokens.
    """
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value < 1:
            raise UsageError(f"{name} must be 1 or more, not {value}")
    if seq > spec.max_positions:
        raise UsageError(
            f"--seq {seq} exceeds the {spec.max_positions} positions of {spec.name}; use "
            f"{spec.max_positions} or less"
        )
    if batch * seq > MAX_TOKENS:
        raise UsageError(
            f"a step of {batch:,} sequences of {seq:,} tokens has {batch * seq:,} tokens; use "
            f"{MAX_TOKENS // seq:,} sequences or fewer"
        )


def check_rank(spec: ModelSpec, rank: int) -> None:
    """Raise UsageError if adapters of this rank are larger than the matrices that they adapt."""
    if rank > spec.width:
        raise UsageError(
            f"--lora {rank} exceeds the width of {spec.name}; use {spec.width} or less"
        )


def _after_siblings(shapes: Sequence[LinearShape]) -> list[bool]:
    """Return, for each Linear, whether a sibling of equal shape precedes it in ``shapes``."""

    def alike(one: LinearShape, other: LinearShape) -> bool:
        siblings = any({one.name, other.name} <= names for names in _SIBLINGS)
        return siblings and one.outputs == other.outputs

    return [any(alike(one, other) for other in shapes[:n]) for n, one in enumerate(shapes)]


def step_flops(spec: ModelSpec, batch: int, seq: int) -> int:
    """Return the FLOPs of the GEMMs of all Linear modules in one step, forward and backward.

    Attention scores and elementwise operations are not counted. Fusing siblings does not change
    the result.
    """
    return sum(step_gemm.flops for step_gemm in step_gemms(spec, batch, seq))
