"""FLOPs, memory and all-reduce time of training methods whose devices hold whole layers.

A multiply-add counts as two FLOPs. Attention computes the scores of all token pairs, not only of
the causal half. The backward pass takes twice the FLOPs of the forward pass. Elementwise operations
do not count. Memory assumptions favour these methods: a device may use all memory that it offers.
In a pipeline, the memory of frameworks, buffers, embedding and LM head does not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.planner.tiles.shape import Floats
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import kept_elements
from cleave.workload.step import ONCE, linear_shapes, step_flops

# Bytes per parameter with mixed-precision Adam (Rajbhandari et al., ZeRO, section 3.1): weight 2,
# gradient 2, master weight 4, two moments of 4 each.
STATE_BYTES = 16
RECOMPUTE = 4 / 3  # ratio of FLOPs with recomputation, which runs the forward pass twice


def attention_flops(spec: ModelSpec, samples: float, seq: int) -> float:
    """Return the forward FLOPs of attention in one layer.

    The scores and the weighted sum of values each take ``2 S^2 q`` FLOPs per sample of S tokens,
    where q is the total width of all query heads.
    """
    return 4.0 * samples * seq * seq * spec.query_width


def train_flops(spec: ModelSpec, batch: int, seq: int) -> float:
    """Return the forward and backward FLOPs of all Linears and all attention in a step."""
    attention = spec.layers * attention_flops(spec, batch, seq)
    return step_flops(spec, batch, seq) + 3 * attention


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The FLOPs and memory of one decoder layer for one sample.

    Attributes:
        forward_flops: FLOPs of the forward pass. The backward pass takes twice as many.
        boundary_bytes: size of the activations that the layer passes to the next layer.
        kept_bytes: size of the activations that a device stores for the backward pass.
    """

    parameters: float
    forward_flops: float
    boundary_bytes: float
    kept_bytes: float


def layer_work(spec: ModelSpec, seq: int, element_bytes: int) -> LayerWork:
    """Return the FLOPs and memory of a decoder layer for one sample of `seq` tokens."""
    linears = [s for s in linear_shapes(spec) if s.name not in ONCE]
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


@dataclass(frozen=True, slots=True)
class Need:
    """Memory requirement of a device, and whether the device recomputes activations."""

    memory_bytes: float
    recompute: bool


def stage_need(
    layer: LayerWork,
    layers: float,
    samples: float,
    offered_bytes: float,
    state_bytes: float = STATE_BYTES,
    sharded: float = 1.0,
) -> Need:
    """Return a device's memory requirement for the layers of a stage and their activations.

    Args:
        layers: number of layers, which may include fractions of a layer.
        samples: number of samples in flight between the forward and backward passes.
        offered_bytes: memory of the device. If it is too small, the device recomputes activations.
        state_bytes: bytes of weights, gradients and optimizer state per parameter.
        sharded: number of devices among which each layer's activations are divided.
    """
    state = state_bytes * layers * layer.parameters
    everything = state + samples * layers * layer.kept_bytes / sharded
    if everything <= offered_bytes:
        return Need(everything, recompute=False)
    less = state + samples * layers * layer.boundary_bytes + layer.kept_bytes / sharded
    # If the stage does not fit either way, its time is computed without recomputation.
    return Need(min(less, everything), recompute=less <= offered_bytes)


def tightest(needed: Floats, offered: Floats) -> tuple[float, float, str]:
    """Return needed and offered bytes of the device with the highest ratio of needed to offered.

    The last value is a message about devices with too little memory; empty if all have enough.
    """
    worst, short = int(np.argmax(needed / offered)), int((needed > offered).sum())
    most, least = float(needed[worst]), float(offered[worst])
    text = (
        f"{short} of {len(needed)} devices have too little memory: "
        f"{most / 1e9:.3g} GB needed, {least / 1e9:.3g} GB offered"
    )
    return most, least, text if short else ""


def dealt(count: int, rates: Floats) -> Floats:
    """Divide samples among devices so that the last device finishes as early as possible.

    `rates` are the devices' speeds, in any unit. Return the number of samples for each device.
    """
    low, high = 0.0, (count + 1) / float(rates.max())
    for _ in range(100):
        middle = (low + high) / 2
        enough = np.floor(middle * rates).sum() >= count
        low, high = (low, middle) if enough else (middle, high)
    shares = np.floor(high * rates)
    latest_first = np.lexsort((np.arange(len(rates)), -shares / rates))
    surplus = int(shares.sum()) - count
    shares[latest_first[:surplus]] -= 1
    return shares


def all_reduce_s(payload_bytes: float, members: int, bytes_per_s: float, latency_s: float) -> float:
    """Return a ring all-reduce's time (s): 2 (n - 1) steps that each send 1/n of the payload.

    Args:
        payload_bytes: size of the array that each device contributes.
        bytes_per_s, latency_s: rate and latency of the slowest hop in the ring.
    """
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (payload_bytes / members / bytes_per_s + latency_s)
