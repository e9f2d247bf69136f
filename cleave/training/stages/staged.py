"""Gradients of a model whose layers a fleet trains by stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, FleetError, PlanError
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.local_fallback import LOOK_S, STEP_END_S, AbandonedError, FleetPresence
from cleave.graphs.calls import LayerCall
from cleave.graphs.outside import Embedded, OutsideLayers
from cleave.planner.forecast import MethodChoice, StepForecaster
from cleave.planner.plan import DeviceRates, Method
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan, StagePlanner
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    SlicesBack,
    SlicesReady,
    StageOutcome,
    StepFailed,
    StepResult,
    Suspect,
)
from cleave.scheduler.stages.work import StageFailedError, StepWork
from cleave.training.loop.methods import TilesForecaster
from cleave.training.stages.audits import Auditor
from cleave.training.stages.ps_passes import PsPasses
from cleave.training.stages.stage_work import ModelWork, add_gradients
from cleave.training.stages.suspicion import examined

MOST_TRIES: Final = 3
"""Attempts at a step by stages before training fails, if the caller has no alternative."""

RETRY_S: Final = 10.0
"""Seconds before a step is retried with the same devices."""

RESTING_STEPS: Final = 10
"""Steps that the caller computes after a failure, while the same devices are connected."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of a batch.

    Attributes:
        ids: tokens, shape (rows, tokens).
        targets: target tokens, same shape; -100 for positions without loss.
        mask, positions: see `cleave.graphs.packed.called_with`.
    """

    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    def cut(self, parts: int) -> list[Rows]:
        """Split the sequences into `parts` groups."""
        cut = [
            [None] * parts if each is None else each.tensor_split(parts)
            for each in (self.mask, self.positions)
        ]
        ids, targets = self.ids.tensor_split(parts), self.targets.tensor_split(parts)
        return [Rows(*each) for each in zip(ids, targets, *cut, strict=True)]


@dataclass(frozen=True, slots=True)
class NotByStages:
    """The fleet did not compute a step by stages, so the caller computes it.

    Attributes:
        reason: why.
    """

    reason: str


class StagedModel:
    """Computes the gradients of a model's batches by stages, on a fleet.

    Args:
        work: the model, its graphs, and the dtype in which parameters and activations travel.
        runtime: runtime of the fleet.
        planner: chooses the stages.
        ps: speed of the PS.
        gradients: dtype in which gradients travel; that of `work` by default.
        tiles: forecasts a step by tiles. The caller computes the step if tiles or the PS alone are
            faster than stages; None to always train by stages.
        auditor: audits some of the devices' work; None to check only suspicious results.
        in_parts: makes the work with attention and MLP apart if layers do not fit; may be None.
        local_after_s: seconds without devices before the caller computes a step; None to wait.
        stop: returns whether to stop training; the current step then gets `STEP_END_S` seconds.
        note: called with messages for the user.
        presence: called when no device can do a step, and when one can again.
        own_products: makes the context manager for the PS's part of a step, given its devices.

    Attributes:
        plan: plan of the last step.
        work: the current work, which may have replaced the argument; see `in_parts`.
        runtime: runtime of the fleet.
        passes: passes of the layers that devices cannot compute.
        gradients_dtype: dtype in which gradients travel.
    """

    def __init__(
        self,
        work: ModelWork,
        runtime: FleetRuntime,
        planner: StagePlanner,
        ps: PsCompute,
        *,
        gradients: DType | None = None,
        tiles: TilesForecaster | None = None,
        auditor: Auditor | None = None,
        in_parts: Callable[[], ModelWork] | None = None,
        local_after_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        note: Callable[[str], None] = lambda text: None,
        presence: Callable[[FleetPresence], None] = lambda presence: None,
        own_products: Callable[[Set[int]], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.plan: StagePlan | None = None
        self.work = work
        self.runtime = runtime
        self._planner = planner
        self._ps = ps
        self.gradients_dtype = gradients or work.dtype
        self._tiles = tiles
        self._auditor = auditor or Auditor(0.0)
        self._step_work: StepWork | None = None
        self._proven: set[int] = set()  # devices that returned something wrong in this step
        self._in_parts = in_parts
        self._local_after_s = 0.0 if tiles is not None else local_after_s
        # During a step the devices may soon be back, so wait a little longer.
        self._left_after_s = STEP_END_S if local_after_s is None else local_after_s
        self._stop = stop
        self._note = note
        self._presence, self._present = presence, True
        self._own_products = own_products
        self._outside = OutsideLayers(work.model, work.graphs.calls)
        self.passes = PsPasses(work.graphs, self.autocast)
        self._planned_for: object = None
        self._parts = 1
        self._said = ""
        self._worth = True
        self._resting: tuple[int, tuple[int, ...]] = 0, ()  # remaining steps, devices that failed
        self._waited = False  # waited for devices in vain, so that the next step does not wait

    def close(self) -> None:
        """Release what devices hold for the model."""
        self.runtime.end_steps()

    def predicted_s(self, batch: Rows) -> float | NotByStages:
        """Return the forecast seconds of a step on the connected devices.

        Returns:
            The seconds; or why the step would not be done by stages.
        """
        plan = self._plan_for(batch)
        if plan is None or not self._worth:
            return NotByStages("no plan fits the devices, or another method is faster")
        return plan.step_s

    def gradients(self, batch: Rows, learned: int | None = None) -> float | NotByStages:
        """Add the gradients of a batch's mean loss to the parameters; return the loss.

        Args:
            batch: sequences of the batch.
            learned: number of tokens that the loss is divided by; those of the batch by default.
                With several servers it covers the whole step, and the loss is this batch's share.

        Returns:
            The loss; or why the caller must compute the step: no device is connected, the connected
            devices failed in this or an earlier step, or another method is faster.

        Raises:
            AbandonedError: when training must stop.
            FleetError: when the fleet cannot do the step.
        """
        counted = int((batch.targets >= 0).sum()) if learned is None else learned
        scale = 1.0 / max(1, counted)
        failed = 0
        while True:
            plan = self.planned(batch)
            if isinstance(plan, NotByStages):
                return plan
            parts = self.cut(batch)
            embedded = [self.embed(part) for part in parts]
            try:
                with self._own_products(plan.devices):
                    given = self.first_inputs(embedded)
                    work = self.step_work(plan, parts, given, scale)
                    result, losses = self._step(work, parts, given, scale)
            except StageFailedError as error:
                self._begin_again()
                failed += 1
                if not self._tries_again(str(error), failed):
                    return NotByStages(str(error))
                continue
            faults = self._auditor.faults(work, result, self._proven)
            if not faults:
                return self._take(result, embedded, losses, len(work.slices))
            for fault in faults:  # no result was used yet, so the step can be repeated
                self._note(f"device {fault.device} is quarantined: {fault.reason}")
                self.runtime.quarantine(fault.device, fault.reason)
            self._begin_again()

    def _begin_again(self) -> None:
        """Discard the plan and the gradients of a failed step."""
        self.plan = None
        for parameter in self.work.model.parameters():
            parameter.grad = None

    def _tries_again(self, reason: str, failed: int) -> bool:
        """Wait before a retry, and return True; return False if the caller must compute the step.

        Raises:
            AbandonedError: when training must stop meanwhile.
            FleetError: when the step failed too often.
        """
        there = self.runtime.stage_devices().keys()
        if self._local_after_s is not None:
            self._say(f"the next {RESTING_STEPS} steps go without stages: {reason}")
            self._resting = RESTING_STEPS - 1, tuple(sorted(there))
            return False
        if failed >= MOST_TRIES:
            raise FleetError(f"the step by stages cannot be completed: {reason}")
        self._say(f"training waits: {reason}")
        waited_s = 0.0
        while waited_s < RETRY_S and self.runtime.stage_devices().keys() <= there:
            if self._stop():
                raise AbandonedError("training is to stop")
            try:
                self.runtime.next_outcome(LOOK_S)
            except FleetError as error:  # in virtual time, no event is left to wait for
                raise FleetError(f"{error}: {reason}") from error
            waited_s += LOOK_S
        return True

    def first_inputs(self, embedded: Sequence[Embedded]) -> list[Embedded]:
        """Return the first stage's inputs, after the layers that the PS computes before it."""
        self.passes.forget()
        if 0 not in self.passes.runs:
            return list(embedded)
        trains = self.passes.trains(0)
        given = []
        for number, one in enumerate(embedded):
            x = self.passes.forward(0, number, one.x, one.beside)
            given.append(Embedded(x.requires_grad_(trains or one.x.requires_grad), one.beside))
        return given

    def step_work(
        self,
        plan: StagePlan,
        parts: Sequence[Rows],
        embedded: Sequence[Embedded],
        scale: float,
    ) -> StepWork:
        """Return the fleet's work for a step.

        Args:
            plan: plan with the stages.
            parts: the micro-batches.
            embedded: inputs of the first stage, by micro-batch.
            scale: factor of each token's loss.
        """
        targets = [part.targets for part in parts]
        inner = self.passes.runs.keys() - {0, len(self.work.graphs.parts)}
        if missing := inner - {stage.stop for stage in plan.stages}:
            raise PlanError(f"the plan leaves out what is done here before layer {min(missing)}")
        self._proven = set()
        self._step_work = StepWork(
            layers=self.work.layers(embedded),
            loss=self.work.loss(targets, scale) if plan.stages[-1].loss else None,
            x=[self.work.activation(one.x) for one in embedded],
            width=embedded[0].x.shape[-1],
            tokens=[part.ids.numel() for part in parts],
            stages=plan.stages,
            gradients=self.gradients_dtype.value,
            embeds=embedded[0].x.requires_grad,
            kept_batches=plan.kept_batches,
            slices=plan.slices,
            slice_works=self.work.slices(targets, scale, len(plan.slices)),
            ps_after=frozenset(
                n for n, stage in enumerate(plan.stages[:-1]) if stage.stop in self.passes.runs
            ),
            model=id(self.work.model),
        )
        return self._step_work

    def _step(
        self,
        work: StepWork,
        parts: Sequence[Rows],
        embedded: Sequence[Embedded],
        scale: float,
    ) -> tuple[StepResult, dict[int, float]]:
        """Do a step on the fleet; return its result, and the losses computed locally."""
        self.runtime.begin_step(work)
        losses: dict[int, float] = {}
        while True:
            match self.next_outcome():
                case InputWanted() | GradientWanted() as wanted:
                    self.pass_on(wanted, work, embedded)
                case OutputReady(number, payload):
                    part, one = parts[number], embedded[number]
                    y = self.work.tensor(payload, one.x.shape, self.work.dtype)
                    y = self.passes.forward(len(work.layers), number, y, one.beside)
                    losses[number], dy = self._loss(y, part.targets, scale)
                    dy = self.passes.backward(len(work.layers), number, dy)
                    self.runtime.give(number, self.work.activation(dy))
                case SlicesReady(number, payloads):
                    targets = parts[number].targets
                    losses[number], total = self.work.of_slices(payloads, targets, scale)
                    self.runtime.give(number, total)
                case SlicesBack(number, payloads):
                    shape = embedded[number].x.shape
                    each = (self.work.tensor(p, shape, self.work.dtype) for p in payloads)
                    self.runtime.give(number, self.work.activation(sum(each, torch.zeros(shape))))
                case StepFailed(reason, final):
                    if final:
                        raise FleetError(f"the step by stages cannot be completed: {reason}")
                    raise StageFailedError(reason)
                case StepResult() as result:
                    return result, losses

    def pass_on(
        self,
        wanted: InputWanted | GradientWanted,
        work: StepWork,
        embedded: Sequence[Embedded],
    ) -> None:
        """Compute the PS's layers between two stages, and give the fleet the result.

        Args:
            wanted: request of the fleet, for a forward or backward pass.
            work: the step.
            embedded: inputs of the first stage, by micro-batch.
        """
        number, run = wanted.batch, work.stages[wanted.stage].stop
        one = embedded[number]
        came = self.work.tensor(wanted.payload, one.x.shape, self.work.dtype)
        if isinstance(wanted, InputWanted):
            made = self.passes.forward(run, number, came, one.beside)
        else:
            made = self.passes.backward(run, number, came)
        self.runtime.give(number, self.work.activation(made), wanted.stage)

    def _take(
        self,
        result: StepResult,
        embedded: Sequence[Embedded],
        losses: dict[int, float],
        slices: int,
    ) -> float:
        """Add the gradients of a finished step to the parameters; return its loss."""
        for number, payload in sorted(result.dx.items()):
            x = embedded[number].x
            dx = self.work.tensor(payload, x.shape, self.work.dtype)
            dx = self.passes.backward(0, number, dx)
            if x.requires_grad:
                torch.autograd.backward(x, dx.to(x.dtype))
        for number, payload in result.losses.items():
            losses[number] = float(self.work.tensor(payload, (1, 1), DType.FP32))
        found = self.work.gradients_of(result.gradients, self.gradients_dtype, slices)
        add_gradients(self.work.model, self.passes.add_gradients(found))
        return sum(losses[number] for number in sorted(losses))

    @property
    def calls(self) -> Sequence[LayerCall]:
        """Return how the model calls its layers."""
        return self.work.graphs.calls

    def trained_parameters(self) -> list[Tensor]:
        """Return the parameters of the layers that get a gradient, each once."""
        graphs = self.work.graphs
        found: list[Tensor] = []
        for part, of_part in zip(graphs.parts, graphs.layers, strict=True):
            found += [part.held[name] for name in of_part.trainable]
        for run in self.passes.runs:
            found += self.passes.trained(run)
        return list(dict.fromkeys(found))

    def refuse_faults(self, work: StepWork, result: StepResult) -> None:
        """Audit a step that cannot be repeated.

        Raises:
            FleetError: when a device returned wrong results; it is quarantined.
        """
        faults = self._auditor.faults(work, result, self._proven)
        for fault in faults:
            self.runtime.quarantine(fault.device, fault.reason)
        if faults:
            raise FleetError(
                f"device {faults[0].device} is quarantined: {faults[0].reason}; nothing of this "
                f"backward pass was used, do the step again"
            )

    def embed(self, part: Rows) -> Embedded:
        """Compute the inputs of the model's first layer."""
        with self.autocast():
            return self._outside.embed(part.ids, part.mask, part.positions)

    def autocast(self) -> torch.autocast:
        """Return a context manager for local passes in the dtype in which activations travel."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.work.dtype is DType.BF16)

    def _loss(self, y: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Compute a micro-batch's loss and gradients locally; return the loss and dy."""
        y.requires_grad_()
        held: dict[str, Any] = dict(self.work.model.named_parameters())
        with self.autocast():
            logits = self._outside.logits(held, y.reshape(-1, 1, y.shape[-1]))
        each = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = each * scale
        torch.autograd.backward(loss)
        assert y.grad is not None
        return float(loss.detach()), y.grad

    def planned(self, batch: Rows) -> StagePlan | NotByStages:
        """Return the plan for the connected devices; wait for devices while no plan fits.

        Returns:
            The plan; or why the caller must compute the step.

        Raises:
            AbandonedError: when training must stop meanwhile.
        """
        waited_s = 0.0
        while True:
            devices = self.runtime.stage_devices()
            left, those = self._resting
            if left and those == tuple(sorted(devices)):
                self._resting = left - 1, those
                return NotByStages("these devices failed in an earlier step")
            plan = self._plan_for(batch)
            local = self._local_after_s is not None
            if not local:
                self._note_presence(there=plan is not None)
            if plan is not None:
                self._waited = False
                return plan if self._worth else NotByStages("another method is faster")
            if local and (self._waited or waited_s >= (self._local_after_s or 0.0)):
                self._waited = True
                return NotByStages("no device can train layers")
            if self._stop():
                raise AbandonedError("training is to stop")
            self.runtime.next_outcome(LOOK_S)
            waited_s += LOOK_S

    def _plan_for(self, batch: Rows) -> StagePlan | None:
        """Return the plan for the connected devices; plan again if they or the shape changed."""
        devices = self.runtime.stage_devices()
        wanted = (tuple(sorted(devices)), tuple(batch.ids.shape))
        if self.plan is None or wanted != self._planned_for:
            self.plan = self._new_plan(batch, list(devices.values()))
            self._planned_for = wanted
        return self.plan

    def _new_plan(self, batch: Rows, devices: Sequence[DeviceRates]) -> StagePlan | None:
        """Plan stages for these devices, and report the plan; return None if no plan fits."""
        if not devices:
            then = "training waits" if self._local_after_s != 0.0 else "no stages"
            self._say(f"{then}: {self.runtime.why_no_stages()}")
            return None
        began_s = time.perf_counter()
        rows, sequence = batch.ids.shape

        def cut(parts: int) -> StageModel:
            tokens = [len(part) * sequence for part in batch.ids.tensor_split(parts)]
            return self.work.costs(tokens, sequence, self.gradients_dtype)

        forecaster = StepForecaster(cut, rows, self._ps)
        try:
            forecast = forecaster.by_stages(devices, self._planner)
        except DeviceMemoryError as error:
            if self._in_parts is not None:
                self._say(f"layers are cut in parts, attention and MLP apart, for {error}")
                self.runtime.end_steps()
                self.work, self._in_parts = self._in_parts(), None
                self.passes = PsPasses(self.work.graphs, self.autocast)  # runs are numbered by part
                return self._new_plan(batch, devices)
            self._say(f"there is no plan for stages: {error}")
            return None
        except PlanError as error:
            self._say(f"there is no plan for stages: {error}")
            return None
        assert forecast.stages is not None
        costs, plan = forecast.stages
        self._parts = len(costs.tokens)
        took_s = time.perf_counter() - began_s
        said = f"{plan.described(costs)}, planned in {took_s:.2g} s"
        if self._tiles is not None:
            others = self._tiles.forecast(forecaster), forecaster.alone()
            choice = MethodChoice(Method.AUTO, [forecast, *others])
            self._worth = choice.chosen.method is Method.STAGES
            said = f"{said if self._worth else 'no stages'}. {choice.why}"
        self._say(said)
        return plan

    def _note_presence(self, *, there: bool) -> None:
        """Report whether devices can do a step, if that has changed."""
        if there != self._present:
            self._present = there
            self._presence(FleetPresence.PRESENT if there else FleetPresence.ABSENT)

    def _say(self, text: str) -> None:
        """Report a message, unless it equals the last one."""
        if text != self._said:
            self._said = text
            self._note(text)

    def cut(self, batch: Rows) -> list[Rows]:
        """Split a batch into the plan's micro-batches."""
        return batch.cut(self._parts)

    def next_outcome(self) -> StageOutcome:
        """Return the next outcome of the step.

        Raises:
            AbandonedError: when training must stop.
            StageFailedError: when all devices left, and the caller can compute the step.
        """
        stopping_s = left_s = 0.0
        local = self._local_after_s is not None
        while True:
            try:
                outcome = self.runtime.next_outcome(LOOK_S)
            except FleetError as error:  # in virtual time, no event is left to wait for
                if not local:
                    raise
                self.runtime.end_steps()
                raise StageFailedError(str(error)) from error
            if outcome is not None:
                self._note_presence(there=True)
                if not isinstance(outcome, Suspect):
                    return outcome
                self._examine(outcome)
            left_s = 0.0 if self.runtime.stage_devices() else left_s + LOOK_S
            if not local:
                self._note_presence(there=left_s <= LOOK_S)
            if local and left_s > self._left_after_s:
                self.runtime.end_steps()
                raise StageFailedError("all devices that train whole layers left")
            if self._stop():
                stopping_s += LOOK_S
                if stopping_s >= STEP_END_S or not self.runtime.stage_devices():
                    self.runtime.end_steps()
                    raise AbandonedError("training is to stop")

    def _examine(self, suspect: Suspect) -> None:
        """Check suspicious results, and tell the fleet whether they are right."""
        assert self._step_work is not None
        found = examined(self._step_work, suspect, self._auditor)
        if found.proven:
            self._note(f"device {suspect.device} is quarantined: {found.reason}")
            self.runtime.quarantine(suspect.device, found.reason)
            self._proven.add(suspect.device)
        self.runtime.resolve(found.right, found.reason)
