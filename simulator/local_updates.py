"""`diloco`: local updates (DiLoCo, arXiv 2311.08105). This is not exact training.

Devices train whole models alone, and exchange weights with the server every 50 steps in bf16. The
planner predicts a round. An `Outcome` is the part of it in which devices train on as many tokens as
a step has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cleave.errors import DeviceMemoryError
from cleave.planner.local_updates import Rounds, plan_round
from simulator.method import Conditions, Outcome, Part

_ENDLESS_BYTES: Final = 2**60


class LocalUpdates:
    """Rounds of local updates. Each device's local step has an equal share of the sequences."""

    name = "diloco"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the predicted round. If no device has the memory, all take part."""
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
                    Part("exchange of weights", share * plan.exchange_s),
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
