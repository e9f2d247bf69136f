"""The work and memory of a training step, for methods that hold whole layers.

All methods use the same conventions. A multiply-add is two floating-point operations. Attention
scores are the full square of a sequence (no causal half). The backward pass is twice the forward
pass. Elementwise operations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.workload.registry import ModelSpec
from cleave.workload.stages import kept_elements
from cleave.workload.step import linear_shapes, step_flops

STATE_BYTES = 16
"""Bytes of state per parameter with mixed-precision Adam (Rajbhandari et al., ZeRO, section 3.1):
weight and gradient of 2 bytes each, master weight and two moments of 4."""


def attention_flops(spec: ModelSpec, samples: float, seq: int) -> float:
    """Return the FLOPs of scores and weighted values, forward: ``2 * 2 S^2 q`` for each sample."""
    return 4.0 * samples * seq * seq * spec.query_width


def train_flops(spec: ModelSpec, batch: int, seq: int) -> float:
    """Return the FLOPs of a whole step: every Linear and the attention, forward and backward."""
    attention = spec.layers * attention_flops(spec, batch, seq)
    return step_flops(spec, batch, seq) + 3 * attention


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The FLOPs and memory of one decoder layer on one sample.

    Attributes:
        parameters: number of parameters.
        forward_flops: FLOPs of the forward pass; the backward pass takes twice as many.
        boundary_bytes: bytes of activations passed to the next layer.
        kept_bytes: bytes of activations kept between forward and backward without recomputation
            (`cleave.workload.stages.kept_elements`).
    """

    parameters: float
    forward_flops: float
    boundary_bytes: float
    kept_bytes: float


def layer_work(spec: ModelSpec, seq: int, element_bytes: int) -> LayerWork:
    """Return the work and memory of a layer; see `LayerWork`."""
    linears = [s for s in linear_shapes(spec) if s.count == spec.layers and s.name != "lm_head"]
    weights = sum(s.inputs * s.outputs for s in linears)
    return LayerWork(
        parameters=(spec.parameters - edge_parameters(spec)) / spec.layers,
        forward_flops=2.0 * weights * seq + attention_flops(spec, 1, seq),
        boundary_bytes=float(seq * spec.width * element_bytes),
        kept_bytes=float(seq * kept_elements(spec) * element_bytes),
    )


def edge_parameters(spec: ModelSpec) -> float:
    """Return the parameters of embedding and LM head, without positions and last norm."""
    return float((1 if spec.tied_head else 2) * spec.vocabulary * spec.embedding_width)


def head_flops(spec: ModelSpec, seq: int) -> float:
    """Return the FLOPs of the LM head on one sample, forward."""
    return 2.0 * seq * spec.vocabulary * spec.embedding_width
