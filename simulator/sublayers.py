"""Resident sub-layers (docs/simulation.md): what a device sends, multiplies and holds for one.

A group of r devices holds a *run* of consecutive sub-layers (attention or FFN) for a step; its
devices share a sample's tokens. With S tokens, width d, W parameters, e bytes an element:

    forward, per sample   down S d e where the run begins with attention, S d e / r for an FFN's own
                          tokens; up S d e / r
    backward, per sample  down 2 S d e (input again, and output gradient); up S d e / r
    once per step         down W e; up 4 W / r (each device owns 1/r of the weight gradient)

The forward pass is recomputed in the backward pass. If r > 1, the extra costs of sharing by tokens
are counted, not only its savings: every device needs keys and values of all tokens; its part of dX
needs the attention gradient of all tokens, so that is replicated; its slice of dW needs a slice of
the hidden activations of all tokens, besides those of its own tokens.

A device alone (r = 1) sends nothing inside its run. In a group, an FFN after an attention already
has its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cleave.workload.registry import Family, ModelSpec
from simulator.method import Conditions


class Kind(Enum):
    """The two kinds of sub-layer of a decoder layer."""

    ATTENTION = "attention"
    FFN = "ffn"


class Pass(Enum):
    """The two passes that a sample makes over resident sub-layers."""

    FORWARD = "forward"
    BACKWARD = "backward"


BOTH = (Pass.FORWARD, Pass.BACKWARD)


@dataclass(frozen=True, slots=True)
class Load:
    """The bytes and FLOPs of one pass of a sample, for a device."""

    download_bytes: float
    flops: float
    upload_bytes: float


@dataclass(frozen=True, slots=True)
class Residence:
    """What each device of a group of r holds and does for a run of sub-layers.

    Attributes:
        forward, backward: load of each sample of the group.
        weights_bytes, gradient_bytes: bytes down and up, once a step.
        memory_bytes: bytes of weights, of the fp32 sums of gradients, and of the buffers of two
            samples.
    """

    run: tuple[Kind, ...]
    forward: Load
    backward: Load
    weights_bytes: float
    gradient_bytes: float
    memory_bytes: float

    def load(self, direction: Pass) -> Load:
        """Return the load of a sample's forward or backward pass."""
        return self.forward if direction is Pass.FORWARD else self.backward


def kinds(spec: ModelSpec) -> tuple[Kind, ...]:
    """Return all sub-layers of the model, in order."""
    return (Kind.ATTENTION, Kind.FFN) * spec.layers


def parameters(spec: ModelSpec, kind: Kind) -> float:
    """Return the number of weights of a sub-layer; biases and norms are left out."""
    if kind is Kind.ATTENTION:
        return 2.0 * spec.width * (spec.query_width + spec.kv_width)
    return (3.0 if spec.family is Family.LLAMA else 2.0) * spec.width * spec.ffn_width


def residence(conditions: Conditions, run: tuple[Kind, ...], r: int) -> Residence:
    """Return what a device of a group of r has to do for a run of sub-layers."""
    spec, seq, element = conditions.spec, conditions.seq, conditions.element.sent
    activations = float(seq * spec.width * element)
    forward_down = backward_down = forward_up = backward_up = 0.0
    forward_flops = backward_flops = weights = working = 0.0
    for position, kind in enumerate(run):
        weights += parameters(spec, kind)
        forward, backward = _flops(spec, seq, kind, r)
        forward_flops += forward
        backward_flops += backward
        working = max(working, _working_bytes(spec, seq, element, kind, r))
        first, last = position == 0, position == len(run) - 1
        handed_over = kind is Kind.FFN and not first
        if first or (r > 1 and not handed_over):
            forward_down += activations / (r if kind is Kind.FFN else 1)
        if last or (r > 1 and run[position + 1] is Kind.ATTENTION):
            forward_up += activations / r
        if r > 1 or first:
            backward_down += activations  # the input
            backward_up += activations / r
        if r > 1 or last:
            backward_down += activations  # the output's gradient
    return Residence(
        run,
        Load(forward_down, forward_flops, forward_up),
        Load(backward_down, backward_flops, backward_up),
        element * weights,
        4 * weights / r,
        element * weights + 4 * weights / r + 2 * 3 * activations + working,
    )


def _flops(spec: ModelSpec, seq: int, kind: Kind, r: int) -> tuple[float, float]:
    """Return a device's FLOPs for a sample: forward, and backward with what it recomputes."""
    if kind is Kind.FFN:
        into = spec.ffn_width * spec.width * (2.0 if spec.family is Family.LLAMA else 1.0)
        out = float(spec.ffn_width * spec.width)
        own = into + out + into  # hidden anew, its gradient, dX
        slice_ = (into + out if r > 1 else 0.0) + into + out  # hidden and gradient; dW
        return 2 * seq * (into + out) / r, 2 * seq * (own + slice_) / r
    query, kv = float(spec.query_width * spec.width), float(2 * spec.kv_width * spec.width)
    scores = 4.0 * seq * seq * spec.query_width
    forward = 2 * seq * (kv + 2 * query / r) + scores / r
    replicated = 2 * seq * (2 * query + kv) + 3 * scores
    shared = 2 * seq * (query + kv + 2 * query + kv) / r  # dX; dW
    return forward, replicated + shared


def _working_bytes(spec: ModelSpec, seq: int, element: int, kind: Kind, r: int) -> float:
    """Return the bytes that one pass of a sample holds besides its inputs and outputs."""
    if kind is Kind.FFN:
        return 2.0 * seq * spec.ffn_width * element / r * (2 if r > 1 else 1)
    return 2.0 * seq * (spec.query_width + 2 * spec.kv_width) * element + 8.0 * seq * seq
