"""Training steps by stages on an emulated fleet, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.planner.coding import CodingPolicy
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import StageSizes
from emulator.activity import Activity
from emulator.sized_stages import EmulatedStep, EmulatedSteps, SizedModel, run_steps
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice

OPTIMIZER_PER_S = 1e9
"""Parameters per second that the PS's optimizer updates, on several cores with fast memory."""


@dataclass(frozen=True, slots=True)
class EmulatedStages:
    """Result of emulated steps by stages.

    Attributes:
        model: the planner's model, with the tokens of each micro-batch.
        plan: the plan of the stages.
        ran: time, traffic and memory of the emulated steps.
        ps: throughput of the PS, and the seconds of its optimizer step.
        alone_s: predicted seconds of a step on the PS without devices.
    """

    model: StageModel
    plan: StagePlan
    ran: EmulatedSteps
    ps: PsCompute
    alone_s: float

    @property
    def steps(self) -> Sequence[EmulatedStep]:
        """Return the steps, in order. Frozen parameters are sent only in the first step."""
        return self.ran.steps

    @property
    def step_s(self) -> float:
        """Return the virtual seconds of the last step, including the optimizer step."""
        return self.steps[-1].seconds + self.ps.optimizer_s


def emulate_stages(
    spec: ModelSpec,
    rows: int,
    sequence: int,
    members: Sequence[FleetDevice],
    ps_flops_per_s: float,
    card: PsRates,
    *,
    dtype: DType = DType.BF16,
    steps: int = 2,
    coding: CodingPolicy | str = CodingPolicy.AUTO,
    seed: int = 0,
    observers: Sequence[Callable[[Activity], None]] = (),
) -> EmulatedStages:
    """Plan stages for a fleet, and emulate training steps from array sizes only.

    Args:
        spec: the model.
        rows: number of sequences in the batch.
        sequence: number of tokens in a sequence.
        members: the devices. Their throughput must be the fp32 throughput, because graphs compute
            in fp32.
        ps_flops_per_s: throughput of the PS, for the loss and for a step without devices.
        card: rates of the PS's network card.
        dtype: dtype of parameters, activations and gradients in messages.
        steps: number of steps to emulate.
        coding: links on which payloads count as compressed; a value of `--coding`.
        seed: seed of jitter, drift and the presence of devices.
        observers: functions that are called with every activity of every device.

    Raises:
        PlanError: when the devices cannot run the model in stages, for example for lack of memory.
    """
    runtime = VirtualRuntime(
        members, None, Arithmetic.NONE, card, verify=False, coding=coding, seed=seed
    )
    runtime.observers.extend(observers)

    sizes = StageSizes(spec, sequence, dtype.itemsize, dtype.itemsize)
    ps = PsCompute(ps_flops_per_s, sizes.trained_parameters / OPTIMIZER_PER_S, card)
    forecaster = sizes.forecaster(rows, ps)
    found = forecaster.by_stages(list(runtime.stage_devices().values()))
    assert found.stages is not None
    model, plan = found.stages
    sized = SizedModel(spec, rows, sequence, len(model.tokens), dtype, in_parts=model.in_parts)
    loss_s = [tokens * sized.sizes.loss_flops / ps_flops_per_s for tokens in model.tokens]
    ran = run_steps(runtime, lambda: sized.work(plan), loss_s, steps)
    return EmulatedStages(model, plan, ran, ps, forecaster.alone().step_s)
