"""`data-parallel`: the whole model on every device, with gradients summed by a ring all-reduce.

    compute     Each device gets a whole number of samples, by its throughput. The device that
                finishes last determines the compute time.
    all-reduce  2 (n - 1) steps of P e / n bytes, each as slow as the ring's slowest hop (Patarasu
                and Yuan 2009). The rate of a hop is the lower of the sender's uplink and the
                receiver's downlink. The slowest hop is therefore limited by the lowest uplink or
                downlink rate in the ring.

A ring has at most one device per sample. Rings of 2, 4, 8 ... devices and of the maximum size are
tried. Each size is tried with the fastest links of all devices, and with the fastest links of the
devices whose memory holds the model. The result is the fastest ring that fits in memory, or the
fastest ring if no ring fits. After the loss of a device, the other devices divide and recompute the
samples of the lost device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.method import Conditions, Outcome, Part
from simulator.work import (
    RECOMPUTE,
    LayerWork,
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

    Attributes:
        name: name of the method.
        every_device: True to use as many devices as possible, up to one per sample. False to use
            the number of devices with the shortest step.
    """

    name: str = "data-parallel"
    every_device: bool = False

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the fastest ring that fits in memory, or else the fastest ring."""
        rates = conditions.rates
        fastest = np.argsort(-np.minimum(rates.uplink, rates.downlink), kind="stable")
        layer, layers = _held(conditions)
        memory = rates.memory[fastest]
        roomy = [
            stage_need(layer, layers, 1, offered).memory_bytes <= offered for offered in memory
        ]
        tried = [
            self._on(conditions, members[:size])
            for members in (fastest, fastest[np.array(roomy)])
            for size in self._sizes(min(conditions.batch, len(members)))
        ]
        return [min(tried, key=lambda outcome: (not outcome.fits, outcome.step_s))]

    def _sizes(self, most: int) -> list[int]:
        """Return the ring sizes to try; none is larger than `most`."""
        if self.every_device or not most:
            return [most] if most else []
        return sorted({*(1 << i for i in range(1, most.bit_length())), most})

    def _on(self, conditions: Conditions, members: npt.NDArray[np.intp]) -> Outcome:
        spec, rates, n = conditions.spec, conditions.rates.take(members), len(members)
        layer, layers = _held(conditions)
        needs = [stage_need(layer, layers, 1, offered) for offered in rates.memory]
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


def _held(conditions: Conditions) -> tuple[LayerWork, float]:
    """Return the cost of one layer, and the size of the model in layers.

    The size counts the embedding and the LM head as fractions of a layer, by parameters.
    """
    spec = conditions.spec
    layer = layer_work(spec, conditions.seq, conditions.element.sent)
    return layer, spec.layers + edge_parameters(spec) / layer.parameters
