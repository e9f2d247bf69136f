"""The work and the memory of a training step, for methods that hold whole layers.

All methods use one convention: a multiply-add is two floating-point operations, attention scores
are the full square of a sequence (no causal half), the backward pass is twice the forward pass.
Elementwise operations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.workload.registry import ModelSpec
from cleave.workload.stages import kept_elements
from cleave.workload.step import linear_shapes, step_flops

STATE_BYTES = 16
"""Per parameter where the optimizer lives with the model: weight and gradient of 2 bytes, and
master weight and two moments of 4 (mixed-precision Adam; Rajbhandari et al., ZeRO, section 3.1)."""


def attention_flops(spec: ModelSpec, samples: float, seq: int) -> float:
    """Return the FLOPs of scores and weighted values, forward: ``2 * 2 S^2 q`` for each sample."""
    return 4.0 * samples * seq * seq * spec.query_width


def train_flops(spec: ModelSpec, batch: int, seq: int) -> float:
    """Return the FLOPs of a whole step: every Linear and the attention, forward and backward."""
    attention = spec.layers * attention_flops(spec, batch, seq)
    return step_flops(spec, batch, seq) + 3 * attention


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The FLOPs of one decoder layer on one sample, and what it holds.

    Attributes:
        parameters: number of the layer's parameters.
        forward_flops: FLOPs forward for a sample; backward is twice that.
        boundary_bytes: bytes of a sample's activations that go from one layer to the next.
        kept_bytes: bytes of a sample kept between forward and backward if nothing is recomputed
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
    """Return the parameters of embedding and LM head; positions and last norm are left out."""
    return float((1 if spec.tied_head else 2) * spec.vocabulary * spec.embedding_width)


def head_flops(spec: ModelSpec, seq: int) -> float:
    """Return the FLOPs of the LM head on one sample, forward."""
    return 2.0 * seq * spec.vocabulary * spec.embedding_width
