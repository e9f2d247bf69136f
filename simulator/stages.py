"""`cleave-stages`: devices hold whole layers for a step, as Cleave's own planner assigns them.

The planner (`cleave.planner.stages.search`) chooses the stages and simulates the step event by
event, as it does for training and for `cleave plan`. Layers run in fp32. A device of the last stage
computes the loss. The parameter server (PS) computes the loss if this is faster, or if no device
has enough memory for the loss.

The gradients that a lost device has accumulated are lost as well. On average, the device had
completed half of its micro-batches. The stage's other devices recompute these micro-batches. If the
stage has no other device, a device from elsewhere downloads the stage's weights and recomputes the
micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cleave.errors import PlanError
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import LayerCost, PlannedStage, PsCompute, StageModel, StagePlan
from cleave.planner.stages.simulation import costs_of
from cleave.workload.stages import StageSizes
from simulator.method import Conditions, Outcome, Part, impossible


class Stages:
    """Cleave's method of training by stages. All traffic is between devices and the PS."""

    name = "cleave-stages"

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Return one outcome, which is that of the planner's fastest plan."""
        element = conditions.element.sent
        whole = StageSizes(conditions.spec, conditions.seq, element, element)
        devices = conditions.fp32_devices or conditions.devices
        ps = PsCompute(conditions.ps_flops_per_s, 0.0, conditions.ps)
        try:
            found = whole.forecaster(conditions.batch, ps).by_stages(devices)
        except PlanError as error:
            return [impossible(self.name, str(error))]
        assert found.stages is not None
        model, plan = found.stages
        return [_outcome(self.name, StagedStep(model, plan, {d.device: d for d in devices}))]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A planned training step by stages.

    Attributes:
        model: sizes of the layers and of the micro-batches.
        plan: stages with their devices, and the predicted duration and traffic of the step.
        devices: maps a device ID to the rates of the device.
    """

    model: StageModel
    plan: StagePlan
    devices: dict[int, DeviceRates]

    def costs(self, stage: PlannedStage) -> list[LayerCost]:
        """Return the costs of a stage's layers, and of the loss or loss slice that it computes."""
        return costs_of(self.model, stage)

    @property
    def flops(self) -> float:
        """Return the FLOPs of all devices in the step, including the recomputed forward pass."""
        costs = (cost for stage in self.plan.planned for cost in self.costs(stage))
        return sum(self.model.tokens) * math.fsum(cost.flops for cost in costs)

    def recoveries(self) -> Iterator[tuple[float, float]]:
        """Yield, for the loss of each device of each stage, the two parts of the recovery time.

        These are the seconds to download the stage's weights (0 if the stage has other devices),
        and the seconds to recompute the lost micro-batches.
        """
        tokens, ratio = sum(self.model.tokens), self.model.coded_ratio
        for stage in self.plan.planned:
            costs, count = self.costs(stage), len(stage.devices)
            flops = math.fsum(cost.flops for cost in costs)
            weights = sum(cost.weight_bytes + cost.frozen_bytes for cost in costs)
            activation = self.model.width * self.model.element_bytes
            for number in stage.devices:
                device = self.devices[number]
                # tokens to recompute on each remaining device of the stage
                again = tokens / (2 * count * max(1, count - 1))
                again_s = again * max(
                    flops / device.flops_per_s,
                    2 * device.down_bytes(activation, ratio) / device.downlink_bytes_per_s,
                    device.up_bytes(activation, ratio) / device.uplink_bytes_per_s,
                )
                loaded_s = device.down_bytes(weights, ratio) / device.downlink_bytes_per_s
                weights_s = loaded_s if count == 1 else 0.0
                yield weights_s, again_s


def _outcome(name: str, step: StagedStep) -> Outcome:
    plan = step.plan
    used = len(plan.memory_bytes)
    tightest = max(plan.memory_bytes, key=lambda d: plan.memory_bytes[d] / offered(step, d))
    recoveries = list(step.recoveries())
    return Outcome(
        method=name,
        setting=f"{len(plan.stages)} stages, {len(step.model.tokens)} micro-batches, "
        f"loss {plan.where_loss}",
        devices_used=used,
        parts=(Part("stages", plan.step_s),),
        download_bytes=plan.downlink_bytes / used,
        upload_bytes=plan.uplink_bytes / used,
        memory_offered_bytes=offered(step, tightest),
        memory_needed_bytes=plan.memory_bytes[tightest],
        ps_egress_bytes_per_s=plan.downlink_bytes / plan.step_s,
        ps_ingress_bytes_per_s=plan.uplink_bytes / plan.step_s,
        recovery=(
            Part("weights", math.fsum(w for w, _ in recoveries) / len(recoveries)),
            Part("micro-batches again", math.fsum(a for _, a in recoveries) / len(recoveries)),
        ),
        flops=step.flops,
    )


def offered(step: StagedStep, device: int) -> float:
    """Return the bytes of memory that the device with this ID offers."""
    return float(step.devices[device].memory_bytes)
