"""Memory, samples and fit of methods whose devices hold whole layers and their optimizer.

Everything that is not known is decided in favour of these methods. They may recompute activations,
and do so only if that makes them fit. Embedding and LM head take no memory in a pipeline. The
memory of a framework and its buffers is left out. A device may use all that it offers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.planner.tiles.shape import Floats
from simulator.work import STATE_BYTES, LayerWork

RECOMPUTE = 4 / 3
"""Forward twice: what a step's compute grows by where activations are recomputed."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a device needs, and whether it recomputes activations."""

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
    """Return the memory of a device that holds whole layers and samples between the two passes.

    Args:
        layers: number of layers that it holds, or shares with others.
        samples: number of samples kept at the same time, between forward and backward.
        offered_bytes: memory that the device offers; it recomputes only if not all activations fit.
        state_bytes: bytes of state for each parameter.
        sharded: number of devices that share what a layer keeps of a sample.
    """
    state = state_bytes * layers * layer.parameters
    everything = state + samples * layers * layer.kept_bytes / sharded
    if everything <= offered_bytes:
        return Need(everything, recompute=False)
    inputs = samples * layers * layer.boundary_bytes + layer.kept_bytes / sharded
    less = state + inputs
    # What does not fit either way is timed without the recomputation.
    return Need(min(less, everything), recompute=less <= offered_bytes)


def misfit(needed: Floats, offered: Floats) -> str:
    """Say why devices do not fit what they hold; return an empty text if they do."""
    short = needed > offered
    if not short.any():
        return ""
    worst = int(np.argmax(needed / offered))
    return (
        f"{int(short.sum())} of {len(needed)} devices are too small: "
        f"{needed[worst] / 1e9:.3g} GB needed, {offered[worst] / 1e9:.3g} GB offered"
    )


def tightest(needed: Floats, offered: Floats) -> tuple[float, float]:
    """Return bytes needed and offered of the device that has the least memory for what it holds."""
    worst = int(np.argmax(needed / offered))
    return float(needed[worst]), float(offered[worst])


def dealt(count: int, rates: Floats) -> Floats:
    """Return whole samples for each device, so that the last one is done soonest.

    Args:
        count: number of samples.
        rates: speed of each device, above zero, in any unit.
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
    """Return the seconds of a ring all-reduce: 2 (n - 1) steps of a 1/n part each."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (payload_bytes / members / bytes_per_s + latency_s)
