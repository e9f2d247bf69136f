"""`cleave-stages`: training by stages. Cleave's planner assigns whole layers to devices for a step.

The planner chooses the stages and simulates the step event by event, as for training and `cleave
plan`. Layers run in fp32. The planner decides what computes the loss: the last stage, other devices
(in slices of the vocabulary) or the PS.

When a device is lost, so are its accumulated gradients: on average, the gradients of half of its
micro-batches. The stage's other devices recompute these micro-batches. If the stage has no other
device, another device first downloads the stage's weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from cleave.errors import PlanError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.planner.stages.simulation import costs_of
from simulator.method import Conditions, Outcome, Part, impossible


class Stages:
    """Cleave's training by stages. Devices exchange data only with the PS."""

    name = "cleave-stages"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome: the planner's fastest plan, or the reason why no plan exists."""
        whole, devices = conditions.stage_sizes, conditions.graph_devices
        ps = PsCompute(conditions.ps_flops_per_s, 0.0, conditions.ps)
        try:
            found = whole.forecaster(conditions.batch, ps).by_stages(devices)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        assert found.stages is not None
        model, plan = found.stages
        by_id = {device.device: device for device in devices}
        used = len(plan.memory_bytes)
        tightest = max(
            plan.memory_bytes, key=lambda d: plan.memory_bytes[d] / by_id[d].memory_bytes
        )
        lost = list(recoveries(model, plan, by_id))
        weights_s, again_s = (math.fsum(part) / len(lost) for part in zip(*lost, strict=True))
        flops = math.fsum(c.flops for stage in plan.planned for c in costs_of(model, stage))
        return [
            Outcome(
                method=self.name,
                setting=f"{len(plan.stages)} stages, {len(model.tokens)} micro-batches, "
                f"loss {plan.where_loss}",
                devices_used=used,
                parts=(Part("stages", plan.step_s),),
                download_bytes=plan.downlink_bytes / used,
                upload_bytes=plan.uplink_bytes / used,
                memory_offered_bytes=float(by_id[tightest].memory_bytes),
                memory_needed_bytes=plan.memory_bytes[tightest],
                ps_egress_bytes_per_s=plan.downlink_bytes / plan.step_s,
                ps_ingress_bytes_per_s=plan.uplink_bytes / plan.step_s,
                recovery=(Part("weights", weights_s), Part("micro-batches again", again_s)),
                flops=sum(model.tokens) * flops,  # including the recomputed forward pass
            )
        ]


def recoveries(
    model: StageModel, plan: StagePlan, devices: Mapping[int, DeviceRates]
) -> Iterator[tuple[float, float]]:
    """Yield the two parts of the recovery time after a loss, for each device of each stage.

    The parts, in seconds, are the time to download the stage's weights (0 if the stage has other
    devices) and the time to recompute the lost micro-batches.
    """
    tokens, ratio = sum(model.tokens), model.coded_ratio
    activation = model.width * model.element_bytes
    for stage in plan.planned:
        costs, count = costs_of(model, stage), len(stage.devices)
        flops = math.fsum(cost.flops for cost in costs)
        weights = sum(cost.weight_bytes + cost.frozen_bytes for cost in costs)
        # Tokens to recompute on each remaining device of the stage.
        again = tokens / (2 * count * max(1, count - 1))
        for number in stage.devices:
            device = devices[number]
            again_s = again * max(
                flops / device.flops_per_s,
                2 * device.down_bytes(activation, ratio) / device.downlink_bytes_per_s,
                device.up_bytes(activation, ratio) / device.uplink_bytes_per_s,
            )
            loaded_s = device.down_bytes(weights, ratio) / device.downlink_bytes_per_s
            yield loaded_s if count == 1 else 0.0, again_s
