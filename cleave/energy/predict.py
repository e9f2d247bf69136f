"""Predict the duration of training steps on a fleet or a GPU, and the usage of the devices.

The fleet or the GPU computes the GEMMs of the Linear modules. Attention scores and elementwise
operations are not counted. With a fleet, the PS computes them. Throughputs are those of matrix
multiplication, in FLOP/s.

    fleet:  The planner predicts time and bytes. A device computes a tile in 2 M N K / F seconds,
            where F is its sustained throughput when hot, and is idle for the rest of the step.
    GPU:    t = FLOPs / (share peak), where `share` is the part of the peak that training reaches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cleave.energy.account import CloudUsage, DeviceUsage
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.workload.registry import ModelSpec
from cleave.workload.step import step_flops, step_gemms
from profiles.device_profile import DeviceProfile
from profiles.fleet_device import FleetDevice
from profiles.performance import Layout

# Mixed-precision Adam: 2 each for weight and gradient; 4 each for fp32 weight and two moments.
TRAINING_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True)
class Work:
    """A model, and the number and size of the training steps.

    Attributes:
        batch, seq: sequences per step, and tokens per sequence.
        dtype: dtype of the GEMM operands: `bf16`, `fp16` or `fp32`.
    """

    spec: ModelSpec
    batch: int
    seq: int
    steps: int
    dtype: str

    @property
    def flops(self) -> int:
        """Return the FLOPs of all Linear modules' GEMMs in all steps, forward and backward."""
        return step_flops(self.spec, self.batch, self.seq) * self.steps

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2


def fleet_usages(work: Work, fleet: Sequence[FleetDevice]) -> tuple[list[DeviceUsage], float]:
    """Return the usage of a fleet's devices by profile, and the duration of the run in seconds.

    Raises:
        PlanError: if no device has enough memory for a tile of some GEMM.
    """
    rates = stated_rates(fleet, hot=True)
    element = ElementBytes(work.element_bytes, work.element_bytes)
    gemms = step_gemms(work.spec, work.batch, work.seq, fused_siblings=True)
    step = plan_step(TilePlanner(), gemms, element, rates, PsRates())
    compute_s: defaultdict[int, float] = defaultdict(float)
    down: defaultdict[int, float] = defaultdict(float)
    up: defaultdict[int, float] = defaultdict(float)
    for report, count in zip(step.reports, step.counts, strict=True):
        for tile in report.plan.tiles:
            compute_s[tile.device] += 2 * tile.tile.volume / rates[tile.device].flops_per_s * count
            down[tile.device] += tile.download_bytes * count
            up[tile.device] += tile.upload_bytes * count
    members: defaultdict[tuple[str, float | None], list[int]] = defaultdict(list)
    for number, device in enumerate(fleet):
        members[device.profile, device.active_power_w].append(number)
    usages = [
        DeviceUsage(
            profile,
            len(numbers),
            step.predicted_s * work.steps * len(numbers),
            sum(compute_s[n] for n in numbers) * work.steps,
            sum(
                down[n] / rates[n].downlink_bytes_per_s + up[n] / rates[n].uplink_bytes_per_s
                for n in numbers
            )
            * work.steps,
            sum(down[n] for n in numbers) * work.steps,
            sum(up[n] for n in numbers) * work.steps,
            active_power_w,
        )
        for (profile, active_power_w), numbers in members.items()
    ]
    return usages, step.predicted_s * work.steps


def stated_rates(devices: Sequence[FleetDevice], *, hot: bool = False) -> list[DeviceRates]:
    """Return the stated rates of devices as planner input. IDs are positions in `devices`.

    If `hot` is True, return the throughput that each device sustains when hot.
    """
    speeds = [d.thermal.sustained_speed if hot and d.thermal else 1.0 for d in devices]
    return [
        DeviceRates(
            number,
            device.stated_downlink_bytes_per_s,
            device.stated_uplink_bytes_per_s,
            device.stated_flops_per_s * speed,
            device.latency_s,
            device.memory_bytes,
            graph_flops_per_s=device.stated_graph_flops_per_s * speed,
        )
        for number, (device, speed) in enumerate(zip(devices, speeds, strict=True))
    ]


def cloud_usage(work: Work, gpu: DeviceProfile, share: float) -> CloudUsage:
    """Return the usage of one GPU that trains at `share` (0 to 1) of its peak GEMM throughput."""
    model = gpu.compute_model().model(work.dtype, work.dtype, Layout.NN)
    return CloudUsage(gpu, work.flops / (model.flops_per_s * share))


def fits(work: Work, gpu: DeviceProfile) -> bool:
    """Return True if parameters, gradients and optimizer state fit in the GPU's memory.

    Activations are not counted, so training may still need more memory.
    """
    needed = TRAINING_BYTES_PER_PARAMETER * work.spec.parameters
    return needed <= (gpu.memory.installed_bytes or gpu.memory.bytes)
