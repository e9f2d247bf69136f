"""Memory, samples and fit of methods whose devices hold whole layers and their optimizer.

Unknowns are decided in favour of these methods. They recompute activations only if that makes them
fit. Embedding and LM head take no memory in a pipeline. Memory of frameworks and buffers is not
counted. A device may use all the memory that it offers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.planner.tiles.shape import Floats
from simulator.work import STATE_BYTES, LayerWork

RECOMPUTE = 4 / 3
"""Factor on a step's compute if activations are recomputed: the forward pass runs twice."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a device needs, and whether the device recomputes activations."""

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
    """Return the memory need of a device that holds whole layers and their activations.

    Args:
        layers: number of layers that the device holds, or shares with others.
        samples: number of samples kept at a time between forward and backward pass.
        offered_bytes: memory that the device offers; it recomputes only if not all activations fit.
        state_bytes: bytes of state per parameter.
        sharded: number of devices that share a layer's activations of a sample.
    """
    state = state_bytes * layers * layer.parameters
    everything = state + samples * layers * layer.kept_bytes / sharded
    if everything <= offered_bytes:
        return Need(everything, recompute=False)
    inputs = samples * layers * layer.boundary_bytes + layer.kept_bytes / sharded
    less = state + inputs
    # A device that does not fit either way is timed without recomputation.
    return Need(min(less, everything), recompute=less <= offered_bytes)


def misfit(needed: Floats, offered: Floats) -> str:
    """Return text on why devices do not fit what they hold; empty if all fit."""
    short = needed > offered
    if not short.any():
        return ""
    worst = int(np.argmax(needed / offered))
    return (
        f"{int(short.sum())} of {len(needed)} devices are too small: "
        f"{needed[worst] / 1e9:.3g} GB needed, {offered[worst] / 1e9:.3g} GB offered"
    )


def tightest(needed: Floats, offered: Floats) -> tuple[float, float]:
    """Return the bytes needed and offered by the device with the largest ratio of the two."""
    worst = int(np.argmax(needed / offered))
    return float(needed[worst]), float(offered[worst])


def dealt(count: int, rates: Floats) -> Floats:
    """Return the number of samples of each device that minimizes the time of the slowest device.

    Args:
        count: number of samples.
        rates: positive speed of each device, in any unit.
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
    """Return the seconds of a ring all-reduce: 2 (n - 1) steps, each with 1/n of the payload."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (payload_bytes / members / bytes_per_s + latency_s)
