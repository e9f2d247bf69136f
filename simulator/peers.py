"""What methods share whose devices hold whole layers and their optimizer: memory, samples, fit.

Everything left open is decided in their favour. They may recompute activations, and do so only
where that makes them fit; embedding and LM head take no memory in a pipeline; what a framework and
its buffers take is left out; a device may use all it offers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.planner.shape import Floats
from simulator.work import STATE_BYTES, LayerWork

RECOMPUTE = 4 / 3
"""Forward twice: what a step's compute grows by where activations are recomputed."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a device needs, and whether it recomputes activations for that."""

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
    """Memory of a device that holds whole layers, with samples between forward and backward.

    Args:
        layers: that it holds, or shares with others.
        samples: kept at the same time.
        offered_bytes: by the device; it recomputes only where all activations do not fit.
        state_bytes: for each parameter.
        sharded: how many devices share what a layer keeps of a sample.
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
    """Why devices do not fit what they are to hold; empty where they do."""
    short = needed > offered
    if not short.any():
        return ""
    worst = int(np.argmax(needed / offered))
    return (
        f"{int(short.sum())} of {len(needed)} devices are too small: "
        f"{needed[worst] / 1e9:.3g} GB needed, {offered[worst] / 1e9:.3g} GB offered"
    )


def tightest(needed: Floats, offered: Floats) -> tuple[float, float]:
    """Bytes needed and offered, of the device that has least for what it is to hold."""
    worst = int(np.argmax(needed / offered))
    return float(needed[worst]), float(offered[worst])


def dealt(count: int, rates: Floats) -> Floats:
    """Whole samples for each device, so that the last one is done soonest.

    Args:
        count: samples.
        rates: of each device, in any unit above zero.
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
    """Ring all-reduce: 2 (n - 1) steps of the n-th part each (Patarasu and Yuan 2009)."""
    if members < 2:
        return 0.0
    return 2 * (members - 1) * (payload_bytes / members / bytes_per_s + latency_s)
