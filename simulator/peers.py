"""Memory requirements and the ring all-reduce of methods whose devices hold layers and optimizer.

Assumptions favour these methods. A device recomputes activations only if the stage does not fit in
its memory otherwise. The embedding and the LM head take no memory in a pipeline. The memory of
frameworks and buffers is not counted. A device may use all the memory that it offers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.planner.tiles.shape import Floats
from simulator.work import STATE_BYTES, LayerWork

RECOMPUTE = 4 / 3
"""Ratio of a step's FLOPs with and without recomputation, which runs the forward pass twice."""


@dataclass(frozen=True, slots=True)
class Need:
    """A device's memory requirement, and whether the device recomputes activations."""

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
    """Return the memory requirement of a device for the layers of a stage and their activations.

    Args:
        layer: parameters and activations of one layer.
        layers: number of layers of the stage.
        samples: number of samples whose activations the device keeps between the forward and the
            backward pass.
        offered_bytes: memory that the device offers. The device recomputes activations only if the
            requirement without recomputation exceeds this memory.
        state_bytes: bytes of weights, gradients and optimizer state that the device holds per
            parameter.
        sharded: number of devices among which a layer's activations of a sample are divided.
    """
    state = state_bytes * layers * layer.parameters
    everything = state + samples * layers * layer.kept_bytes / sharded
    if everything <= offered_bytes:
        return Need(everything, recompute=False)
    inputs = samples * layers * layer.boundary_bytes + layer.kept_bytes / sharded
    less = state + inputs
    # If the stage does not fit either way, the device's time is without recomputation.
    return Need(min(less, everything), recompute=less <= offered_bytes)


def misfit(needed: Floats, offered: Floats) -> str:
    """Return text on devices with too little memory; empty if every device has enough memory.

    Args:
        needed, offered: bytes that each device needs and offers.
    """
    short = needed > offered
    if not short.any():
        return ""
    worst = int(np.argmax(needed / offered))
    return (
        f"{int(short.sum())} of {len(needed)} devices are too small: "
        f"{needed[worst] / 1e9:.3g} GB needed, {offered[worst] / 1e9:.3g} GB offered"
    )


def tightest(needed: Floats, offered: Floats) -> tuple[float, float]:
    """Return the needed and the offered bytes of the device with the highest ratio of the two."""
    worst = int(np.argmax(needed / offered))
    return float(needed[worst]), float(offered[worst])


def dealt(count: int, rates: Floats) -> Floats:
    """Divide samples among devices so that the last device finishes as early as possible.

    Args:
        count: number of samples.
        rates: positive speed of each device, in any unit.

    Returns:
        Number of samples of each device, as whole numbers in a float array.
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
    """Return the seconds of a ring all-reduce: 2 (n - 1) steps that each send 1/n of the payload.

    Args:
        payload_bytes: bytes that each device contributes.
        members: number n of devices.
        bytes_per_s: rate of the slowest hop in the ring.
        latency_s: latency of a hop.
    """
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (payload_bytes / members / bytes_per_s + latency_s)
