"""The costs of resident stages, whose parameters and optimizer state stay on devices.

Each stage has one *holder*, a device that keeps parameters, gradient sums and AdamW moments in
fp32. The PS relays and logs the activations and gradients at stage boundaries. The planner's
simulation of a step predicts its time and the idle time of each uplink
(`cleave.planner.stages.prediction`). Not counted: the optimizer step on devices, the disk time of
the log, and the memory in which a holder keeps old values until they are uploaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final

from cleave.errors import PlanError
from cleave.planner.coding import coded_ratio
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage, PsCompute, StageModel
from cleave.planner.stages.prediction import held_by_device, predict, simulated_devices
from cleave.planner.stages.simulation import costs_of
from cleave.planner.stages.snapshots import SnapshotCosts
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import StageSizes, cut_batch

_SUM_BYTES: Final = 4  # per parameter, in fp32
_STATE_BYTES: Final = 16  # per parameter on a holder: parameter, gradient sum and two moments
_SNAPSHOT_BYTES: Final = 12  # per parameter: parameter and two moments


def resident_model(spec: ModelSpec, batch: int, seq: int, micro_batches: int) -> StageModel:
    """Return the costs of resident stages: parameters stay on devices, and bf16 data travels.

    A tied LM head is on the last holder, and the embedding on the PS. In each step, the PS sends
    the gradients of the embedding's rows, and receives the rows that the next batch needs.

    Args:
        batch, seq: sequences per step, and tokens per sequence.
    """
    model = StageSizes(spec, seq).costs(cut_batch(batch, seq, micro_batches))
    more = _STATE_BYTES // _SUM_BYTES
    layers = [
        replace(c, weight_bytes=0, gradient_bytes=0, sum_bytes=more * c.sum_bytes)
        for c in model.layers
    ]
    rows = min(spec.vocabulary, batch * seq) if spec.tied_head else 0
    row_bytes = rows * spec.embedding_width * model.element_bytes
    loss = replace(
        model.loss,
        weight_bytes=row_bytes,
        gradient_bytes=row_bytes,
        sum_bytes=more * model.loss.sum_bytes,
    )
    return replace(model, layers=layers, loss=loss)


def even_stages(model: StageModel, count: int) -> list[PlannedStage]:
    """Divide the layers and the loss into `count` stages with nearly equal FLOPs.

    Stage i is on device i, and the last stage has the loss.
    """
    done = list(accumulate(c.flops for c in (*model.layers, model.loss)))
    layers = len(model.layers)
    cuts = [0]
    for number in range(1, count):
        at = number / count * done[-1]
        near = min(range(layers), key=lambda n: abs(done[n] - at)) + 1
        cuts.append(min(max(near, cuts[-1] + 1), layers - count + number))
    cuts.append(layers)
    return [PlannedStage(cuts[n], cuts[n + 1], (n,), loss=n == count - 1) for n in range(count)]


@dataclass(frozen=True, slots=True)
class HeldStep:
    """A step's time in seconds, the idle time per step of each stage's uplink, and the traffic."""

    step_s: float
    idle_s: tuple[float, ...]
    traffic_bytes: int


@dataclass(frozen=True)
class ResidentCosts:
    """The costs of a model's resident stages on a fleet.

    Attributes:
        stages: the stages in order. Their devices are ignored.
        devices: rates by device ID. Their links may be compressed.
    """

    model: StageModel
    stages: Sequence[PlannedStage]
    devices: Mapping[int, DeviceRates]
    ps: PsCompute
    _steps: dict[tuple[tuple[int, int], ...], HeldStep | None] = field(default_factory=dict)
    _fits: dict[tuple[int, ...], bool] = field(default_factory=dict)

    @cached_property
    def _kinds(self) -> dict[int, int]:
        """Return the first device that equals each device, because equal devices share results."""
        rates = [replace(device, device=0) for device in self.devices.values()]
        return {device: rates.index(of) for device, of in zip(self.devices, rates, strict=True)}

    def step(self, holders: Sequence[int]) -> HeldStep | None:
        """Return a step's costs if `holders[i]` holds stage i; None if memory is not enough."""
        key = tuple((holders.index(d), self._kinds[d]) for d in holders)
        if key not in self._steps:
            self._steps[key] = self._predicted(holders)
        return self._steps[key]

    def _predicted(self, holders: Sequence[int]) -> HeldStep | None:
        pairs = zip(self.stages, holders, strict=True)
        stages = [replace(stage, devices=(holder,)) for stage, holder in pairs]
        try:
            plan = predict(self.model, stages, self.devices, self.ps)
        except PlanError:
            return None
        busy = simulated_devices(self.model, plan, self.devices, self.ps)
        idle = (
            (plan.step_s - busy[d].y_s - busy[d].gradients_s) / holders.count(d) for d in holders
        )
        traffic = plan.downlink_bytes + plan.uplink_bytes
        return HeldStep(plan.step_s, tuple(max(0.0, each) for each in idle), traffic)

    def fits(self, device: int, stages: Sequence[int]) -> bool:
        """Return True if a device has the memory for the stages with these indices."""
        key = self._kinds[device], *sorted(stages)
        if key not in self._fits:
            plans = [replace(self.stages[n], devices=(device,)) for n in stages]
            needed = held_by_device(self.model, plans)[device]
            self._fits[key] = needed <= self.devices[device].memory_bytes
        return self._fits[key]

    def snapshot_bytes(self, stage: int) -> float:
        """Return the size of a stage's snapshot, uncompressed."""
        sums = sum(cost.sum_bytes for cost in costs_of(self.model, self.stages[stage]))
        return sums * _SNAPSHOT_BYTES / _STATE_BYTES

    def upload_s(self, stage: int, device: int) -> float:
        """Return the time in seconds to upload a snapshot over an idle uplink."""
        rates = self.devices[device]
        nbytes = rates.up_bytes(self.snapshot_bytes(stage), coded_ratio("fp32"))
        return nbytes / rates.uplink_bytes_per_s

    def download_s(self, stage: int, device: int) -> float:
        """Return the time in seconds to download a snapshot."""
        rates = self.devices[device]
        nbytes = rates.down_bytes(self.snapshot_bytes(stage), coded_ratio("fp32"))
        return nbytes / rates.downlink_bytes_per_s

    def logged_bytes(self, stage: int) -> float:
        """Return the uncompressed size of a stage's log of one step: its x and its dy."""
        arrays = 1 if self.stages[stage].loss else 2
        return arrays * sum(self.model.tokens) * self.model.width * self.model.element_bytes

    def replay_s(self, stage: int, device: int) -> float:
        """Return the time in seconds to replay a logged step of a stage.

        A backward pass recomputes the forward pass. Downloading the log overlaps with computing.
        """
        rates = self.devices[device]
        costs = costs_of(self.model, self.stages[stage])
        flops = sum(self.model.tokens) * math.fsum(c.flops - c.forward_flops for c in costs)
        nbytes = rates.down_bytes(self.logged_bytes(stage), self.model.coded_ratio)
        return max(flops / rates.flops_per_s, nbytes / rates.downlink_bytes_per_s)

    def rule(self, detection_s: float, between_losses_s: float) -> SnapshotCosts:
        """Return the input to the rule for the snapshot interval, for the largest stage."""
        holders = list(self.devices)[: len(self.stages)]
        held = self.step(holders)
        assert held is not None, "the devices are too small"
        worst = max(range(len(holders)), key=lambda n: self.upload_s(n, holders[n]))
        return SnapshotCosts(
            held.step_s,
            self.upload_s(worst, holders[worst]),
            held.idle_s[worst],
            self.replay_s(worst, holders[worst]),
            detection_s + self.download_s(worst, holders[worst]),
            between_losses_s,
        )
