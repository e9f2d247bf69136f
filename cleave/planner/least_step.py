"""A time that no step by stages is shorter than, however layers and devices are put together.

Every micro-batch passes all stages forward and then backward, on a device of its own in each. There
are at least as many stages as the largest memory asks for; some stage has no more than its share of
the devices, which have to do all micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cleave.planner.plan import DeviceRates
from cleave.planner.stage_estimate import StageTables
from cleave.planner.stages import PsCompute

_ROUNDING: Final = 1e-6
"""Relative: what rounded bytes and sums may add to a bound."""


def least_step_s(tables: StageTables, devices: Sequence[DeviceRates], ps: PsCompute) -> float:
    """Return seconds that every step by stages takes at least.

    Args:
        tables: of the model.
        devices: that may take part.
        ps: the PS.
    """
    model = tables.model
    tokens, batches = min(model.tokens), len(model.tokens)
    activation = tokens * model.width * model.element_bytes
    ratio, first = model.coded_ratio, model.layers[0]
    # What a device does in pieces it does while others come and go; all but the longest of it.
    pieces = max(layer.pieces for layer in model.layers)
    most_flops_per_s = max(device.flops_per_s for device in devices)
    sent_s = [d.up_bytes(activation, ratio) / d.uplink_bytes_per_s for d in devices]
    passed_s = sorted(
        2 * d.latency_s + up_s + d.down_bytes(activation, ratio) / d.downlink_bytes_per_s / pieces
        for d, up_s in zip(devices, sent_s, strict=True)
    )
    stages = min(_fewest_stages(tables, devices), len(devices))
    # With the loss there, the last stage has no forward pass; the first may have nothing to return.
    passes_s = sum(passed_s[: stages - 1]) + sum(passed_s[: stages - (not model.embeds)])
    flops = math.fsum(max(0.0, c.flops - c.spared_flops) for c in model.layers)
    computes_s = tokens * flops / most_flops_per_s / pieces
    each = -(-batches // (len(devices) // stages))  # micro-batches on one of a stage's devices
    others_s = (each - 1) * min(sent_s)
    loaded_s = min(
        d.down_bytes(first.weight_bytes, ratio) / d.downlink_bytes_per_s for d in devices
    )
    gradients_s = min(
        d.up_bytes(first.gradient_bytes, model.gradient_coded_ratio) / d.uplink_bytes_per_s
        for d in devices
    )
    total_s = loaded_s + passes_s + computes_s + others_s + gradients_s
    return total_s * (1 - _ROUNDING) + ps.optimizer_s


def _fewest_stages(tables: StageTables, devices: Sequence[DeviceRates]) -> int:
    """Return how many stages there are at least: each takes what fits the largest memory."""
    largest = max(device.memory_bytes for device in devices) * (1 + _ROUNDING)
    fits = tables.memory_of_layers <= largest
    stages = first = 0
    while first < tables.layers:
        stop = first + 1
        while stop < tables.layers and fits[first, stop + 1]:
            stop += 1
        stages, first = stages + 1, stop
    return stages
