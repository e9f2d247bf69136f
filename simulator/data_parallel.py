"""Methods in which every device holds the whole model.

`data-parallel`: the whole model on every device. A ring all-reduce sums the gradients.

    compute     Each device gets a whole number of samples, based on its throughput. The device
                that finishes last determines the compute time.
    all-reduce  2 (n - 1) steps that each send P e / n bytes at the lowest uplink or downlink rate
                in the ring (Patarasu and Yuan 2009), for n devices and P parameters of e bytes.

A ring has at most one device per sample. The sizes tried are 2, 4, 8 ... and the maximum. Each size
is tried twice: with the devices that have the fastest links, and with the fastest-linked devices
among the devices with enough memory for the model. After the loss of a device, the others divide
and recompute its samples.

`diloco`: local updates (DiLoCo, arXiv 2311.08105), which are not exact.

Devices train whole models alone, and exchange weights with the server every 50 steps in bf16. The
planner predicts a round. The `Outcome` is scaled from the round to the tokens of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.errors import DeviceMemoryError
from cleave.planner.local_updates import Rounds, plan_round
from cleave.planner.tiles.shape import Floats
from simulator.method import Conditions, Outcome, Part, best
from simulator.work import (
    RECOMPUTE,
    Need,
    all_reduce_s,
    dealt,
    edge_parameters,
    layer_work,
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
        worst_needed, worst_offered, misfit = tightest(needed, rates.memory)
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
            misfit=misfit,
            recovery=(Part("samples again", compute_s / max(1, n - 1)),),
        )


def _needs(conditions: Conditions, offered: Floats) -> list[Need]:
    """Return the memory requirement of each device, including the embedding and the LM head."""
    spec = conditions.spec
    layer = layer_work(spec, conditions.seq, conditions.element.sent)
    layers = spec.layers + edge_parameters(spec) / layer.parameters
    return [stage_need(layer, layers, 1, each) for each in offered]


_ENDLESS_BYTES: Final = 2**60


class LocalUpdates:
    """Rounds of local updates. All devices train on equal shares of the sequences."""

    name = "diloco"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the predicted round. If memory is too small, all take part anyway."""
        sizes, devices = conditions.stage_sizes, conditions.graph_devices
        each = -(-conditions.batch // max(1, len(devices)))
        model, elements = sizes.costs([conditions.seq]), sizes.trained_parameters
        misfit = ""
        try:
            plan = plan_round(model, elements, devices, conditions.ps, Rounds(), each)
        except DeviceMemoryError as error:
            misfit = str(error)
            endless = [replace(device, memory_bytes=_ENDLESS_BYTES) for device in devices]
            plan = plan_round(model, elements, endless, conditions.ps, Rounds(), each)
        share, used = conditions.batch * conditions.seq / plan.tokens, len(plan.steps)
        offered = [device.memory_bytes for device in devices if device.device in plan.steps]
        return [
            Outcome(
                method=self.name,
                setting=f"not exact; weights in bf16 every {plan.rounds.every} steps",
                devices_used=used,
                parts=(
                    Part("local steps", share * (plan.round_s - plan.exchange_s)),
                    Part("weight exchange", share * plan.exchange_s),
                ),
                download_bytes=share * plan.downlink_bytes / used,
                upload_bytes=share * plan.uplink_bytes / used,
                memory_offered_bytes=float(max(offered) if misfit else min(offered)),
                memory_needed_bytes=plan.device_bytes,
                misfit=misfit,
                ps_egress_bytes_per_s=plan.downlink_bytes / plan.exchange_s,
                ps_ingress_bytes_per_s=plan.uplink_bytes / plan.exchange_s,
                flops=share * plan.flops,
            )
        ]
