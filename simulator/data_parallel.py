"""`data-parallel`: the whole model on every device. A ring all-reduce sums the gradients.

    compute     Each device gets a whole number of samples, based on its throughput. The device
                that finishes last determines the compute time.
    all-reduce  2 (n - 1) steps that each send P e / n bytes at the lowest uplink or downlink rate
                in the ring (Patarasu and Yuan 2009), for n devices and P parameters of e bytes.

A ring has at most one device per sample. The sizes tried are 2, 4, 8 ... and the maximum. Each size
is tried twice: with the devices that have the fastest links, and with those that have the fastest
links among the devices with enough memory for the model. After the loss of a device, the others
divide and recompute its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.tiles.shape import Floats
from simulator.method import Conditions, Outcome, Part, best
from simulator.work import (
    RECOMPUTE,
    Need,
    all_reduce_s,
    dealt,
    edge_parameters,
    layer_work,
    misfit,
    stage_need,
    tightest,
    train_flops,
)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Data parallelism over a ring of devices.

    If `every_device` is True, only the largest possible ring is tried.
    """

    name: str = "data-parallel"
    every_device: bool = False

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest ring that fits in memory, or else the fastest ring."""
        fastest, offered = conditions.fastest_links, conditions.rates.memory
        needed = np.array([need.memory_bytes for need in _needs(conditions, offered)])
        return [
            best(
                self._on(conditions, members[:size])
                for members in (fastest, fastest[(needed <= offered)[fastest]])
                for size in self._sizes(min(conditions.batch, len(members)))
            )
        ]

    def _sizes(self, most: int) -> list[int]:
        """Return the ring sizes to try, up to `most` devices."""
        if self.every_device or not most:
            return [most] if most else []
        return sorted({*(1 << i for i in range(1, most.bit_length())), most})

    def _on(self, conditions: Conditions, members: npt.NDArray[np.intp]) -> Outcome:
        spec, rates, n = conditions.spec, conditions.rates.take(members), len(members)
        needs = _needs(conditions, rates.memory)
        samples = dealt(conditions.batch, rates.flops)
        each = train_flops(spec, conditions.batch, conditions.seq) / conditions.batch
        again = np.array([RECOMPUTE if need.recompute else 1.0 for need in needs])
        link = float(min(rates.uplink.min(), rates.downlink.min()))
        gradient = conditions.element.sent * spec.parameters
        moved = 2 * (n - 1) / n * gradient
        needed = np.array([need.memory_bytes for need in needs])
        worst_needed, worst_offered = tightest(needed, rates.memory)
        compute_s = float((samples * each * again / rates.flops).max())
        return Outcome(
            method=self.name,
            setting=f"{n} devices",
            devices_used=n,
            parts=(
                Part("compute", compute_s),
                Part("all-reduce", all_reduce_s(gradient, n, link, float(rates.latency_s.max()))),
            ),
            download_bytes=moved,
            upload_bytes=moved,
            memory_offered_bytes=worst_offered,
            memory_needed_bytes=worst_needed,
            misfit=misfit(needed, rates.memory),
            recovery=(Part("samples again", compute_s / max(1, n - 1)),),
        )


def _needs(conditions: Conditions, offered: Floats) -> list[Need]:
    """Return the memory requirement of each device, including the embedding and the LM head."""
    spec = conditions.spec
    layer = layer_work(spec, conditions.seq, conditions.element.sent)
    layers = spec.layers + edge_parameters(spec) / layer.parameters
    return [stage_need(layer, layers, 1, each) for each in offered]
