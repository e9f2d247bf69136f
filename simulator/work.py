"""FLOPs and memory of a training step, for methods whose devices hold whole layers.

All methods use the same conventions. A multiply-add counts as two FLOPs. Attention computes the
full S x S scores of a sequence, not only the causal half. The backward pass takes twice the FLOPs
of the forward pass. Elementwise operations are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.workload.registry import ModelSpec
from cleave.workload.stages import kept_elements
from cleave.workload.step import linear_shapes, step_flops

STATE_BYTES = 16
"""Bytes of state per parameter with mixed-precision Adam (Rajbhandari et al., ZeRO, section 3.1).
The weight and its gradient have 2 bytes each; the master weight and the two moments have 4 each."""


def attention_flops(spec: ModelSpec, samples: float, seq: int) -> float:
    """Return the FLOPs of attention in the forward pass of one layer.

    The scores and the weighted sum of values take ``2 S^2 q`` FLOPs each per sample.

    Args:
        spec: the model, with a total width q of all query heads.
        samples: number of samples.
        seq: tokens S per sample.
    """
    return 4.0 * samples * seq * seq * spec.query_width


def train_flops(spec: ModelSpec, batch: int, seq: int) -> float:
    """Return the FLOPs of all Linears and attentions in a step, forward and backward.

    Args:
        spec: the model.
        batch: samples per step.
        seq: tokens per sample.
    """
    attention = spec.layers * attention_flops(spec, batch, seq)
    return step_flops(spec, batch, seq) + 3 * attention


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The FLOPs and memory of one decoder layer for one sample.

    Attributes:
        parameters: number of parameters of the layer.
        forward_flops: FLOPs of the forward pass. The backward pass takes twice as many.
        boundary_bytes: bytes of the activations that the layer passes to the next layer.
        kept_bytes: bytes of the activations that the layer keeps from the forward to the backward
            pass if it does not recompute them (`cleave.workload.stages.kept_elements`).
    """

    parameters: float
    forward_flops: float
    boundary_bytes: float
    kept_bytes: float


def layer_work(spec: ModelSpec, seq: int, element_bytes: int) -> LayerWork:
    """Return the FLOPs and memory of a decoder layer for one sample.

    Args:
        spec: the model.
        seq: tokens per sample.
        element_bytes: bytes per element of activations.
    """
    linears = [s for s in linear_shapes(spec) if s.count == spec.layers and s.name != "lm_head"]
    weights = sum(s.inputs * s.outputs for s in linears)
    return LayerWork(
        parameters=(spec.parameters - edge_parameters(spec)) / spec.layers,
        forward_flops=2.0 * weights * seq + attention_flops(spec, 1, seq),
        boundary_bytes=float(seq * spec.width * element_bytes),
        kept_bytes=float(seq * kept_elements(spec) * element_bytes),
    )


def edge_parameters(spec: ModelSpec) -> float:
    """Return the number of parameters of the token embedding and the LM head.

    A weight that both share counts once. Position embeddings and the final norm do not count.
    """
    return float((1 if spec.tied_head else 2) * spec.vocabulary * spec.embedding_width)


def head_flops(spec: ModelSpec, seq: int) -> float:
    """Return the FLOPs of the LM head in the forward pass of one sample of `seq` tokens."""
    return 2.0 * seq * spec.vocabulary * spec.embedding_width
