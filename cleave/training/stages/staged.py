"""Compute a batch's loss and gradients on a fleet, by stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, FleetError, LayerGraphError, PlanError, UsageError
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.local_fallback import LOOK_S, STEP_END_S, AbandonedError, FleetPresence
from cleave.graphs.calls import Embedded, LayerCall, OutsideLayers
from cleave.machine.graph_choice import MakeGraph
from cleave.machine.graph_session import GraphError
from cleave.planner.forecast import ON_SERVER, Forecast, choose_state
from cleave.planner.plan import Method
from cleave.planner.stages.model import PlannedStage, PsCompute, StagePlan, StagePlanner
from cleave.planner.stages.resident import plan_again, plan_resident
from cleave.scheduler.rounds.work import RoundResult
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.holders import RETURN_S
from cleave.scheduler.stages.outcomes import (
    DeviceUse,
    GradientWanted,
    InputWanted,
    OutputReady,
    PassDone,
    SlicesBack,
    SlicesReady,
    StageDone,
    StageOutcome,
    StepFailed,
    StepResult,
    Suspect,
    UpdateWanted,
)
from cleave.scheduler.stages.resident import Snapshot
from cleave.scheduler.stages.work import StageFailedError, StepWork
from cleave.training.loop.methods import TilesForecaster
from cleave.training.loop.optimizer import DeviceUpdates, Optimizer
from cleave.training.stages.audits import Auditor, Fault, Watch
from cleave.training.stages.gradients import StepGradients, add_gradients
from cleave.training.stages.ps_loss import PsLoss, SumsLostError
from cleave.training.stages.ps_passes import PsPasses
from cleave.training.stages.replay_audits import ReplayAudits, RolledBackError
from cleave.training.stages.resident import ResidentState, StateStorage, check_resident
from cleave.training.stages.stage_plans import StagePlans
from cleave.training.stages.stage_work import ModelWork, indices
from cleave.training.stages.stored_steps import Returned, StoredStep
from cleave.training.stages.suspicion import examined

# Number of attempts at a step by stages before training fails, unless the caller can compute it.
MOST_TRIES: Final = 3

RETRY_S: Final = 10.0  # seconds before a failed step is retried on the same devices

_MOST_NAMED: Final = 3  # maximum number of devices named in a message

# After a step by stages has failed, the caller computes this number of steps, unless devices join
# or leave.
RESTING_STEPS: Final = 10


@dataclass(frozen=True, slots=True)
class Rows:
    """Token sequences of a batch or a micro-batch.

    Attributes:
        ids: token IDs, shape (rows, tokens).
        targets: target token IDs, same shape; -100 for positions without loss.
        mask: padding mask or attention mask, as in `cleave.graphs.packed.called_with`; None if the
            model needs no mask.
        positions: position of each token in its document, same shape; None if each row is one
            document.
    """

    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None
    positions: Tensor | None = None

    @property
    def is_ids_only(self) -> bool:
        """Return whether the model gets nothing but token IDs."""
        return self.mask is None and self.positions is None

    def cut(self, parts: int) -> list[Rows]:
        """Split the sequences into `parts` groups of nearly equal size."""
        cut = [
            [None] * parts if each is None else each.tensor_split(parts)
            for each in (self.mask, self.positions)
        ]
        ids, targets = self.ids.tensor_split(parts), self.targets.tensor_split(parts)
        return [Rows(*each) for each in zip(ids, targets, *cut, strict=True)]


@dataclass(frozen=True, slots=True)
class NotByStages:
    """Result that tells the caller to compute the step without stages, with the reason."""

    reason: str


class StagedModel:
    """A model whose loss and gradients are computed by stages on a fleet.

    Args:
        work: the model, its graphs, and the wire dtype of parameters and activations.
        planner: plans the stages for the connected devices.
        ps: speed of the PS.
        gradients: wire dtype of parameter gradients; by default, the wire dtype of `work`.
        tiles: forecasts the duration of a step by tiles. If tiles or the PS alone would be faster
            than stages, the caller must compute the step. None to always train by stages.
        auditor: audits a random selection of device results. If None, only suspicious results
            are checked.
        in_parts: returns a replacement of `work` in which each layer's attention and MLP are
            separate, for devices with too little memory for a layer. None to never split layers.
        local_after_s: seconds without devices after which the caller must compute a step; None to
            wait for devices without limit.
        stop: returns whether training must stop. The current step then gets `STEP_END_S` seconds to
            finish.
        note: called with messages for the user.
        presence: called with `ABSENT` when devices can no longer run a step, and with `PRESENT`
            when they can again.
        own_products: returns the context manager in which the PS runs its part of a step; called
            with the IDs of the devices in the plan.
        loss_on: opens the graph of the loss on an accelerator of the PS; None to compute the PS's
            losses in PyTorch on the CPU.

    Attributes:
        plans: plans the stages for the connected devices.
        resident: the trained state on devices; None if the PS sends the parameters in each step.
        replays: audits of the trained state on devices; None without audits.
        work: the current `ModelWork`; after layers were split, the result of `in_parts`.
        passes: runs the layers without graphs on the PS.
        gradients_dtype: wire dtype of parameter gradients.
        predicted_s, audit_s, loss_s, sums_s: total seconds over all steps: predicted duration,
            waiting for audits, the PS's loss and layers, and gradient sums; see `FleetCounters`.
        used: how long each device was busy in the last step.
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
        loss_on: MakeGraph | None = None,
    ) -> None:
        self.predicted_s = self.audit_s = self.loss_s = self.sums_s = 0.0
        self.used: Sequence[DeviceUse] = ()
        self.work = work
        self.runtime = runtime
        self.resident: ResidentState | None = None
        self.replays: ReplayAudits | None = None
        # Both call `keep_on_devices` with `head`: `_offered` if the next step is predicted to be
        # faster with state on devices, `_undecided` in any case, once devices are connected.
        self._offered: Callable[..., None] | None = None
        self._undecided: Callable[..., None] | None = None
        self._planner = planner
        self._wanted: UpdateWanted | None = None  # set until the step's update is in the log
        self._updates = False  # whether devices may already run this step's update
        self._returned: list[Returned] = []  # results of this step, for the log
        self._repeats: StoredStep | None = None  # the logged step that is being repeated
        self._resumes = False  # whether the next step is the first one after repeated steps
        self._moves = False  # whether the trained state moves to the devices of another plan
        self._updated_s = 0.0  # seconds in which devices updated their weights in the last step
        # Plan of the steps in the log; None if the log is empty.
        self._log_plan: StagePlan | None = None
        self.plans = StagePlans(
            runtime,
            planner,
            ps,
            work.dtype,
            gradients or work.dtype,
            tiles=tiles,
            waits=tiles is None and local_after_s != 0.0,
            stop=stop,
            say=self._say,
        )
        self.gradients_dtype = gradients or work.dtype
        self._auditor = auditor or Auditor(0.0)
        self._step_work: StepWork | None = None
        self._step_plan: StagePlan | None = None
        self._proven: set[int] = set()  # devices that returned a wrong result in this step
        self._faults: list[Fault] = []  # faults that audits of finished stages found in this step
        self._audited: set[int] = set()  # indices of the stages whose audits are done
        self._watches: list[dict[int, Watch]] = []  # this step's audits, by stage and device
        self._passes: deque[PassDone] = deque()  # passes that have not been audited yet
        self._buffers: dict[int, Tensor] = {}  # reusable memory for gradients, by parameter `id`
        self._read = StepGradients(work, self.gradients_dtype)  # this step's gradients
        self._in_parts = in_parts
        self._local_after_s = 0.0 if tiles is not None else local_after_s
        # Devices that leave during a step may reconnect soon, so the step waits longer for them.
        self._left_after_s = STEP_END_S if local_after_s is None else local_after_s
        self._stop = stop
        self._note = note
        self._presence, self._present = presence, True
        self._own_products = own_products
        self._outside = OutsideLayers(work.model, work.graphs.calls)
        self.passes = PsPasses(work.graphs, self.autocast)
        self._ps_loss: PsLoss | None = None
        if loss_on is not None and work.graphs.loss is not None:
            try:
                self._ps_loss = PsLoss(work, loss_on)
            except GraphError as error:
                note(f"the CPU computes the loss: {error}")
        self._own_s = 0.0  # time in the last step in which devices waited for the PS
        self._loss_before_s = 0.0  # `loss_s` before the last step
        self._said = ""
        # Number of further steps that the caller computes, and the devices that failed.
        self._resting: tuple[int, tuple[int, ...]] = 0, ()
        self._renews = False  # whether the last step ran by stages
        self._waited = False  # whether the last step waited in vain, so the next does not wait

    @property
    def plan(self) -> StagePlan | None:
        """Return the current plan for the connected devices; None if there is none."""
        return self.plans.plan

    def close(self) -> None:
        """End the step, free the model's arrays on devices, and stop the PS's own device."""
        self.runtime.end_steps()
        if self.replays is not None:
            self.replays.close()
        if self.runtime.own_device is not None:
            self.runtime.own_device.stop()

    def forecast_s(self, batch: Rows) -> float | NotByStages:
        """Return the predicted time of a step by stages for a batch of this shape, in seconds."""
        plan = self._plan_for(batch)
        if plan is None or not self.plans.worthwhile:
            return NotByStages("no plan is feasible, or another method is faster")
        return plan.step_s

    def gradients(self, batch: Rows, learned: int | None = None) -> float | NotByStages:
        """Compute a batch's loss and accumulate its gradients in the parameters' `grad`.

        Args:
            learned: number of target tokens by which the summed loss is divided; by default, the
                number in the batch. With several servers, pass the number in the batches of all
                servers. The returned loss is then this batch's share of the mean.

        Returns:
            The loss, or `NotByStages` if no device can train layers, if the connected devices
            failed in this or an earlier step, or if another method is faster.

        Raises:
            AbandonedError: if training must stop and the step is abandoned.
            FleetError: if the fleet cannot complete the step.
            RolledBackError: if a replay audit found a wrong result; see `ReplayAudits`.
        """
        self._renews = False
        self._withdraw_unfinished()
        self._roll_back_if_due()
        if self.runtime.state_leaves or self._moves:
            self.sync()
        if self._moves:
            self.plans.plan, self._moves = None, False
        counted = int((batch.targets >= 0).sum()) if learned is None else learned
        scale = 1.0 / max(1, counted)
        if self.resident is not None and (stored := self.resident.next_stored) is not None:
            return self._repeat(batch, stored, scale)
        failed = 0
        while True:
            plan = self.planned(batch)
            if isinstance(plan, NotByStages):
                return self._not_by_stages(plan.reason)
            if self._moves_state(batch, plan):
                continue
            began_s = time.perf_counter()
            parts = self.cut(batch)
            x, embedded = self._embedded(batch, parts)
            self._read = StepGradients(
                self.work, self.gradients_dtype, plan.head_slices, self._buffers_of_step()
            )
            try:
                with self._own_products(plan.devices):
                    given = self.first_inputs(embedded)
                    work = self.step_work(plan, parts, given, scale)
                    self._own_s = time.perf_counter() - began_s
                    result, losses = self._step(work, parts, given, scale)
            except StageFailedError as error:
                self._quarantine(self._faults)
                self._begin_again()
                failed += 1
                if not self._tries_again(str(error), failed):
                    return self._not_by_stages(str(error))
                continue
            except SumsLostError as error:
                self._note(f"the step is repeated, and the CPU computes the loss: {error}")
                self._ps_loss = None
                self.runtime.withdraw_step()
                self._begin_again()
                continue
            if isinstance(result, UpdateWanted):
                self.predicted_s += plan.step_s
                self._wanted = result
                return self._take(StepResult(result.losses, result.dx, {}), x, embedded, losses)
            faults = self._faults
            if result is not None:
                self._say_who_left(result)
                began_s = time.perf_counter()
                faults = self._auditor.faults(work, result, self._proven, self._audited)
                self.audit_s += time.perf_counter() - began_s
            if result is not None and not faults:
                self.predicted_s += plan.step_s
                self.used = result.used
                began_s = time.perf_counter()
                loss = self._take(result, x, embedded, losses)
                took_s = time.perf_counter() - began_s
                self.sums_s += took_s
                self._own_s += took_s
                self._renews = True
                return loss
            self._quarantine(faults)  # no result of the step has been used, so it can be repeated
            self._begin_again()

    def keep_on_devices(
        self,
        optimizer: Optimizer,
        storage: StateStorage | None = None,
        *,
        planner: StagePlanner = plan_resident,
        if_faster: bool = False,
        head: bool | None = False,
    ) -> None:
        """Make devices keep and update the layers' weights and optimizer state.

        From now on, each step ends with `DeviceUpdates.update`, which `optimizer` calls. Call
        `sync` before anything else uses the weights or the optimizer state.

        Args:
            storage: where the PS keeps the snapshot and the log; None to keep them in memory.
            planner: plans the stages from now on.
            if_faster: whether to decide at the next step: devices then keep the state only if this
                is predicted to be faster with the connected devices. Ignored if `storage` has
                logged steps.
            head: whether a device also keeps the LM head and, if they are tied, the embedding; None
                to decide when the next step is planned. Ignored if `storage` has logged steps.

        Raises:
            UsageError: if devices cannot update the layers.
        """
        if not self.runtime.keeps_state:
            raise UsageError(
                "devices cannot keep the layers' state when a server on Ray trains the model; use "
                "--state server"
            )
        storage = storage or StateStorage()
        if storage.stored:
            head = bool(storage.stored[-1].losses)
        elif if_faster:
            self._offered = partial(self.keep_on_devices, optimizer, storage, planner=planner)
            return
        elif head is None:
            check_resident(self.work, optimizer.rule)
            self._undecided = partial(self.keep_on_devices, optimizer, storage, planner=planner)
            return
        self.resident = state = ResidentState(
            self.work, optimizer, storage, self.runtime.now(), self._say, head=bool(head)
        )
        self.plans.planner, self._planner, self._in_parts = planner, planner, None
        self.plans.leave_updates(sum(optimizer.parameters[n].numel() for n in state.names))
        if rate := self._auditor.rate:
            waits = self.runtime.clock == "virtual"
            self.replays = ReplayAudits(
                state, self._auditor, storage.folder, waits=waits, note=self._say
            )
        audited = (
            f"whenever the server has fetched this state, it repeats the steps of each stage with "
            f"probability {rate:g}, and goes back to an earlier step if a result was wrong"
            if rate
            else "their results are not audited, so use only devices that you trust"
        )
        and_head = "and LM head's " if head else ""
        self._note(f"devices keep the layers' {and_head}weights and optimizer state; {audited}")
        self._auditor = Auditor(0.0)  # the PS cannot repeat steps without the current weights
        optimizer.on_devices = DeviceUpdates(state.names, self._squares, self._update)

    def _moves_state(self, batch: Rows, plan: StagePlan) -> bool:
        """Move the state to devices if that was offered and is predicted to be faster.

        Return True if the state has moved, so that the step must be planned again.
        """
        offered, self._offered = self._offered, None
        if offered is None:
            return False
        there = self.plans.with_state_on_devices(batch.ids, self.work)
        on_devices, why = choose_state(Forecast(Method.STAGES, plan.step_s), there)
        try:
            if on_devices:
                offered(head=self._head_moves(batch, there))
        except UsageError as error:
            on_devices, why = False, f"{ON_SERVER}: {error}"
        self._say(why)
        if not on_devices:
            return False
        self.runtime.end_steps()
        self.plans.plan = None
        return True

    def _head_moves(self, batch: Rows, forecast: Forecast) -> bool:
        """Return whether a device should keep the LM head, and can also embed this batch."""
        if forecast.stages is None or not forecast.stages[0].resident_head:
            return False
        if not self.work.is_tied:
            return True
        try:
            return batch.is_ids_only and bool(self.work.embedding_graphs.trainable)
        except LayerGraphError as error:  # the embedding cannot be exported
            self._say(f"the server computes the embedding and the loss: {error}")
            return False

    def sync(self) -> None:
        """Fetch the layers' weights and optimizer state from devices.

        Does nothing if no step has changed them since the last call.

        Raises:
            AbandonedError: if training must stop and no device can return the state.
            FleetError: if the fleet cannot return the state.
        """
        if self.resident is None or self.resident.is_current:
            return
        assert self._step_work is not None
        self._withdraw_unfinished()
        self.runtime.begin_step(self.resident.of_fetch(self._step_work))
        result = self._end_of_step()
        self._use_snapshot(Snapshot(self.resident.updates, result.state, result.holders))
        self._log_plan = None
        if self.plans.planner is not self._planner:  # layers may now be divided differently
            self.plans.planner, self.plans.plan = self._planner, None

    def evaluate(self, batch: Rows) -> float | None:
        """Return the mean loss of a batch's target tokens, computed on the devices with the state.

        Return None if the caller must compute the loss, or can do so without a fetch of the state.

        Args:
            batch: at most as many sequences as in a training step.

        Raises:
            AbandonedError: if training must stop and the evaluation is abandoned.
        """
        state = self.resident
        if state is None or state.is_current or state.next_stored is not None:
            return None
        self._withdraw_unfinished()
        if self.runtime.state_leaves or isinstance(plan := self.planned(batch), NotByStages):
            return None
        parts = batch.cut(min(self.plans.micro_batches, len(batch.ids)))
        scale = 1.0 / max(1, int((batch.targets >= 0).sum()))
        with torch.no_grad(), self._own_products(plan.devices):
            given = self.first_inputs(self._embedded(batch, parts)[1])
            work = self.step_work(plan, parts, given, scale)
            assert work.resident is not None
            work = replace(work, resident=replace(work.resident, evaluates=True))
            self._step_work = work
            try:
                result, losses = self._evaluation(work, parts, given, scale)
            except StageFailedError as error:
                self._say(f"the server evaluates the model: {error}")
                return None
        if self.replays is not None:
            self.replays.evaluated(work, result)
        state.under_way = result.fetching
        if result.snapshot is not None:
            self._use_snapshot(result.snapshot)
        for number, payload in result.losses.items():
            losses[number] = float(self.work.tensor(payload, (1, 1), DType.FP32))
        return sum(losses[number] for number in sorted(losses))

    def _evaluation(
        self, work: StepWork, parts: Sequence[Rows], embedded: Sequence[Embedded], scale: float
    ) -> tuple[StepResult, dict[int, float]]:
        """Run an evaluation on the fleet. Return its result, and losses by micro-batch.

        Losses that devices computed are not included.
        """
        self.runtime.begin_step(work)
        losses: dict[int, float] = {}
        while True:
            match self.next_outcome():
                case InputWanted() as wanted:
                    self.pass_on(wanted, work, embedded)
                case OutputReady(number, payload):
                    one, targets = embedded[number], parts[number].targets
                    y = self.work.tensor(payload, one.x.shape)
                    y = self.passes.forward(len(work.layers), number, y, one.extras)
                    losses[number] = float(self._sum_of_losses(y, targets, scale))
                case StepResult() as result:
                    return result, losses
                case StepFailed(reason):
                    raise StageFailedError(reason)

    def _withdraw_unfinished(self) -> None:
        """Undo a step that is not in the log.

        Such a step exists if its update was refused, for example because training diverged, or if
        an exception such as KeyboardInterrupt interrupted the update. After an interruption,
        devices may have run the update, so they must drop their state.
        """
        if self._wanted is None:
            return
        if self._updates:
            self.runtime.end_steps()
        else:
            self.runtime.withdraw_step()
        self._wanted, self._updates = None, False

    def _repeat(self, batch: Rows, stored: StoredStep, scale: float) -> float:
        """Repeat the PS's part of a step that an earlier process logged."""
        last, loss = len(stored.bounds) - 1, bool(stored.losses)
        stages = tuple(
            PlannedStage(*bound, (), loss and n == last) for n, bound in enumerate(stored.bounds)
        )
        plan = StagePlan(stages, {}, 0.0, {}, 0, 0)
        parts = batch.cut(stored.micro_batches)
        x, embedded = self._embedded(batch, parts)
        self._read = StepGradients(self.work, self.gradients_dtype, [], self._buffers_of_step())
        given = self.first_inputs(embedded)
        work, losses = self.step_work(plan, parts, given, scale), dict[int, float]()
        for one in stored.returned:
            self._answer(one, work, parts, given, scale, losses)
        self._repeats = stored
        return self._take(StepResult(stored.losses, stored.dx, {}), x, embedded, losses)

    def _squares(self) -> float:
        if self._repeats is not None:
            return self._repeats.squares
        assert self._wanted is not None
        return self._wanted.squares

    def _update(self, rate: float, clip: float) -> None:
        """Run the optimizer step on devices and add the step to the log."""
        assert self.resident is not None
        assert self._step_work is not None
        self.resident.changing(False)
        if self._repeats is not None:
            self.resident.repeated(self._step_work)
            if self.replays is not None:
                self.replays.repeated()
            self._repeats, self._log_plan = None, self._step_plan
            self._resumes = self.resident.next_stored is None
            return
        began_s, scalars = time.perf_counter(), self.resident.scalars(rate, clip)
        self._updates = True
        self.runtime.update(scalars)
        result = self._end_of_step()
        self._updated_s = time.perf_counter() - began_s
        self._say_who_left(result)
        self.used = result.used
        assert self._wanted is not None
        stored = StoredStep(
            rate=rate,
            bounds=[(stage.first, stage.stop) for stage in self._step_work.stages],
            x=[one.x for one in result.records],
            dy=[one.dy for one in result.records],
            scalars=scalars,
            returned=self._returned,
            dx=self._wanted.dx,
            squares=self._wanted.squares,
            kept=result.kept,
            losses=self._wanted.losses,
        )
        stored = self.resident.add(self._step_work, result, stored)
        if self.replays is not None:
            self.replays.add(result, stored)
        self._wanted, self._updates = None, False
        self._log_plan = self._step_plan
        if result.snapshot is not None:
            self._use_snapshot(result.snapshot)
        present = {*self.plans.devices()}
        times = self.resident.between_losses_s(self.runtime.now(), present)
        self.resident.protection = self.plans.protection(*times) or self.resident.protection
        if self.resident.snapshot_is_due:
            self.resident.under_way = self.resident.updates
            self.runtime.begin_snapshot(self._step_work, self.resident.updates)

    def _use_snapshot(self, snapshot: Snapshot) -> None:
        assert self.resident is not None
        before = self.resident.log.steps
        self.resident.take(snapshot)
        if self.replays is not None:
            self.replays.taken(snapshot, before[: len(before) - len(self.resident.log.steps)])

    @property
    def undoable(self) -> int:
        """Return the number of steps since the last verified state; 0 if no step can be undone."""
        if self.resident is None or self.replays is None:
            return 0
        return self.resident.updates - self.replays.verified

    def settle(self) -> None:
        """Fetch the state from devices, and wait until all audits have ended.

        Raises:
            RolledBackError: if an audit found a wrong result.
        """
        self.sync()
        self._roll_back_if_due(wait=True)

    def _roll_back_if_due(self, *, wait: bool = False) -> None:
        """If a replay audit found a wrong result, undo all steps since the last verified snapshot.

        Args:
            wait: whether to wait for audits in progress.

        Raises:
            RolledBackError: if steps were undone.
        """
        if self.replays is None or (lie := self.replays.lie(wait=wait)) is None:
            return
        self._quarantine(lie.blamed)
        for fault in lie.faults if not lie.blamed else ():
            self._note(
                f"a device returned a wrong result, but it is not known which device, because the "
                f"stage has moved between devices: {fault.reason}"
            )
        self.runtime.end_steps()  # all state on devices may depend on the wrong result
        steps = self.replays.roll_back()
        self._begin_again()
        self._log_plan = None
        raise RolledBackError(steps)

    def _end_of_step(self) -> StepResult:
        """Wait for the end of a step that needs nothing more from the PS."""
        while True:
            match self.next_outcome():
                case StepResult() as result:
                    return result
                case StepFailed(reason):
                    self.runtime.end_steps()  # some devices may have run the update
                    raise FleetError(f"the step by stages cannot be completed: {reason}")

    def _not_by_stages(self, reason: str) -> NotByStages:
        """Drop the arrays that `updated` prepared for the step, and return a `NotByStages`."""
        self.work.forget_renewed()
        return NotByStages(reason)

    def updated(self, parameter: Tensor) -> None:
        """Send a parameter's new value to the devices that trained it in the last step.

        Call this for each parameter that the optimizer has updated. Devices then receive the first
        layers while the last layers are still being updated.
        """
        if self._renews:
            self.runtime.renew(self.work.renewed(parameter))

    def _quarantine(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._note(f"device {fault.device} is quarantined: {fault.reason}")
            self.runtime.quarantine(fault.device, fault.reason)

    def learn(self, step_s: float, update_s: float) -> None:
        """Correct the speeds that plans assume; see `StagePlans.learn`.

        Args:
            step_s: duration of the whole last step in seconds, without planning.
            update_s: part of `step_s` in which the optimizer updated the parameters.
        """
        loss_s = self.loss_s - self._loss_before_s
        own_s = self._own_s + update_s - self._updated_s
        self._moves = self.plans.learn(step_s, own_s, loss_s, stays=self._log_plan is not None)

    def _begin_again(self) -> None:
        """Discard a failed step's plan and the gradients of all parameters."""
        self.plans.plan = None
        for parameter in self.work.model.parameters():
            parameter.grad = None

    def _tries_again(self, reason: str, failed: int) -> bool:
        """Wait and return True to retry a step, or return False if the caller must compute it."""
        there = self.plans.devices().keys()
        if self._local_after_s is not None:
            self._say(f"running the next {RESTING_STEPS} steps without stages: {reason}")
            self._resting = RESTING_STEPS - 1, tuple(sorted(there))
            return False
        if failed >= MOST_TRIES:
            raise FleetError(f"the step by stages cannot be completed: {reason}")
        self._say(f"training waits: {reason}")
        waited_s = 0.0
        while waited_s < RETRY_S and self.plans.devices().keys() <= there:
            if self._stop():
                raise AbandonedError("training is stopping")
            try:
                self.runtime.next_outcome(LOOK_S)
            except FleetError as error:  # in virtual time: no event that could help will follow
                raise FleetError(f"{error}: {reason}") from error
            waited_s += LOOK_S
        return True

    def first_inputs(self, embedded: Sequence[Embedded]) -> list[Embedded]:
        """Run the PS's layers before the first stage, and return the first stage's inputs."""
        self.passes.forget()
        if self._ps_loss is not None:
            self._ps_loss.forget()
        if 0 not in self.passes.runs:
            return list(embedded)
        trains = bool(self.passes.trained(0))
        given = []
        for number, one in enumerate(embedded):
            x = self.passes.forward(0, number, one.x, one.extras)
            given.append(Embedded(x.requires_grad_(trains or one.x.requires_grad), one.extras))
        return given

    def step_work(
        self,
        plan: StagePlan,
        parts: Sequence[Rows],
        embedded: Sequence[Embedded],
        scale: float,
    ) -> StepWork:
        """Return the `StepWork` of a step, which contains all that the fleet needs to run it.

        Args:
            embedded: the first stage's input for each micro-batch.
            scale: factor by which each token's loss is multiplied.
        """
        targets = [part.targets for part in parts]
        inner = self.passes.runs.keys() - {0, len(self.work.graphs.parts)}
        if missing := inner - {stage.stop for stage in plan.stages}:
            raise PlanError(f"the plan has no stage that ends before layer {min(missing)}")
        self._proven = set()
        self._step_plan = plan
        own = self.runtime.own_devices()
        self._watches = [
            self._auditor.watch(each.devices, len(parts), own) for each in plan.planned
        ]
        layers = self.work.layers(embedded)
        x, embeds = [self.work.activation(one.x) for one in embedded], embedded[0].x.requires_grad
        embedding = self.work.embedding() if self._device_embeds else None
        if embedding is not None:
            x, embeds = [replace(one, payload=b"") for one in x], bool(embedding.sums)
        self._step_work = StepWork(
            layers=layers,
            loss=self.work.loss(targets, scale) if plan.stages[-1].loss else None,
            x=x,
            width=embedded[0].x.shape[-1],
            tokens=[part.ids.numel() for part in parts],
            stages=plan.stages,
            gradients=self.gradients_dtype.value,
            embeds=embeds,
            kept_batches=plan.kept_batches,
            slices=plan.slices,
            slice_works=self.work.slices(targets, scale, plan.head_slices),
            ps_after=frozenset(
                n for n, stage in enumerate(plan.stages[:-1]) if stage.stop in self.passes.runs
            ),
            forward_first=plan.forward_first,
            watched=frozenset(
                (number, device)
                for number, watches in enumerate(self._watches)
                for device, watch in watches.items()
                if watch.selected
            ),
            resident=self.resident.of_step() if self.resident is not None else None,
            model=id(self.work.model),
            embedding=embedding,
            ids=[indices(part.ids) for part in parts] if embedding is not None else (),
        )
        return self._step_work

    def _step(
        self, work: StepWork, parts: Sequence[Rows], embedded: Sequence[Embedded], scale: float
    ) -> tuple[StepResult | UpdateWanted | None, dict[int, float]]:
        """Run a step on the fleet. Return its result, and losses by micro-batch.

        Losses that devices computed are not included. If the audit of a stage finds a fault, the
        result is None, and the fault is in `_faults`.
        """
        self.runtime.begin_step(work)
        self._faults, self._audited, self._loss_before_s = [], set(), self.loss_s
        self._passes.clear()
        self._returned = []
        losses: dict[int, float] = {}
        while True:
            outcome, began_s = self.next_outcome(), time.perf_counter()
            if isinstance(outcome, StageDone):
                self._take_early(work, outcome)
            if self._faults:  # the step must be repeated without the faulty device
                self.runtime.withdraw_step()
                return None, losses
            match outcome:
                case InputWanted() | GradientWanted() | OutputReady() as returned:
                    if work.resident is not None:
                        self._returned.append(returned)
                    made = self._answer(returned, work, parts, embedded, scale, losses)
                    after = None if isinstance(returned, OutputReady) else returned.stage
                    self.runtime.give(returned.batch, made, after)
                case SlicesReady(number, payloads):
                    targets = parts[number].targets
                    losses[number], total = self.work.of_slices(payloads, targets, scale)
                    self.runtime.give(number, total)
                case SlicesBack(number, payloads):
                    shape = embedded[number].x.shape
                    each = (self.work.tensor(p, shape) for p in payloads)
                    self.runtime.give(number, self.work.activation(sum(each, torch.zeros(shape))))
                case PassDone():
                    self._passes.append(outcome)
                    continue
                case StageDone():
                    continue
                case StepFailed(reason, final):
                    if final:
                        raise FleetError(f"the step by stages cannot be completed: {reason}")
                    raise StageFailedError(reason)
                case StepResult() | UpdateWanted() as result:
                    return result, losses
            self.loss_s += time.perf_counter() - began_s

    def _answer(
        self,
        returned: Returned,
        work: StepWork,
        parts: Sequence[Rows],
        embedded: Sequence[Embedded],
        scale: float,
        losses: dict[int, float],
    ) -> StageArray:
        """Run the PS's part of a micro-batch pass, and return its output for the devices.

        After the last layer, the PS runs both a forward and a backward pass, and adds the loss to
        `losses`.
        """
        if not isinstance(returned, OutputReady):
            return self._passed_on(returned, work, embedded)
        number = returned.batch
        part, one = parts[number], embedded[number]
        y = self.work.tensor(returned.payload, one.x.shape)
        y = self.passes.forward(len(work.layers), number, y, one.extras)
        losses[number], dy = self._loss(y, part.targets, scale)
        if self._ps_loss is not None and len(losses) == len(parts):
            add_gradients(self.work.model, self._ps_loss.take())
        return self.work.activation(self.passes.backward(len(work.layers), number, dy))

    def pass_on(
        self, wanted: InputWanted | GradientWanted, work: StepWork, embedded: Sequence[Embedded]
    ) -> None:
        """Run a pass through the PS's layers between two stages; send the output to the fleet."""
        self.runtime.give(wanted.batch, self._passed_on(wanted, work, embedded), wanted.stage)

    def _passed_on(
        self, wanted: InputWanted | GradientWanted, work: StepWork, embedded: Sequence[Embedded]
    ) -> StageArray:
        number, run = wanted.batch, work.stages[wanted.stage].stop
        one = embedded[number]
        came = self.work.tensor(wanted.payload, one.x.shape)
        if isinstance(wanted, InputWanted):
            made = self.passes.forward(run, number, came, one.extras)
        else:
            made = self.passes.backward(run, number, came)
        return self.work.activation(made)

    def _buffers_of_step(self) -> dict[int, Tensor] | None:
        """Return reusable memory for gradients; None if a parameter's `grad` may still use it."""
        clear = all(parameter.grad is None for parameter in self.work.model.parameters())
        return self._buffers if clear else None

    def _take_early(self, work: StepWork, done: StageDone) -> None:
        """Audit a stage and read its gradient sums while devices work on other stages."""
        while any(each.stage == done.number for each in self._passes):
            self._audit_pass()
        began_s = time.perf_counter()
        watches = self._watches[done.number] if done.number < len(self._watches) else {}
        self._faults += self._auditor.faults_of(work, done.record, done.losses, watches)
        self._audited.add(done.number)
        audited_s = time.perf_counter()
        self._read.read(done.gradients)
        self.audit_s += audited_s - began_s
        self.sums_s += time.perf_counter() - audited_s

    def _audit_pass(self) -> PassDone:
        """Run the part of `Auditor.passed` for the oldest unaudited pass, and return the pass."""
        began_s = time.perf_counter()
        assert self._step_work is not None
        done = self._passes.popleft()
        watch = self._watches[done.stage][done.device]
        self._faults += self._auditor.passed(self._step_work, done, watch)
        self.audit_s += time.perf_counter() - began_s
        return done

    def _take(
        self,
        result: StepResult,
        x: Tensor,
        embedded: Sequence[Embedded],
        losses: dict[int, float],
    ) -> float:
        """Accumulate a step's gradients in the parameters' `grad`, and return the step's loss."""
        dx = [
            self.passes.backward(0, n, self.work.tensor(payload, embedded[n].x.shape))
            for n, payload in sorted(result.dx.items())
        ]
        if x.requires_grad:
            torch.autograd.backward(x, torch.cat(dx).to(x.dtype))
        for number, payload in result.losses.items():
            losses[number] = float(self.work.tensor(payload, (1, 1), DType.FP32))
        self._read.read(result.gradients)
        add_gradients(self.work.model, self.passes.add_gradients(self._read.total()))
        return sum(losses[number] for number in sorted(losses))

    @property
    def calls(self) -> Sequence[LayerCall]:
        return self.work.graphs.calls

    def trained_parameters(self) -> list[Tensor]:
        """Return the trained parameters of all layers without duplicates, the PS's layers last."""
        graphs = self.work.graphs
        found: list[Tensor] = []
        for part, of_part in zip(graphs.parts, graphs.layers, strict=True):
            found += [part.held[name] for name in of_part.trainable]
        for run in self.passes.runs:
            found += self.passes.trained(run)
        return list(dict.fromkeys(found))

    def refuse_faults(self, work: StepWork, result: StepResult) -> None:
        """Audit a step that cannot be repeated. Raise FleetError if a result is wrong."""
        faults = self._auditor.faults(work, result, self._proven, watches=self._watches)
        for fault in faults:
            self.runtime.quarantine(fault.device, fault.reason)
        if faults:
            raise FleetError(
                f"device {faults[0].device} is quarantined: {faults[0].reason}; no result of this "
                f"backward pass was used, so run the step again"
            )

    def _embedded(self, batch: Rows, parts: Sequence[Rows]) -> tuple[Tensor, list[Embedded]]:
        """Return the embedded batch, and the arguments of all layers for each micro-batch.

        The embedding runs once for the whole batch. Its backward pass computes a gradient of the
        whole embedding matrix, which takes about as long for a micro-batch as for the batch.

        If a device computes the embedding, only the shape of the result is valid, and the result
        does not require a gradient.

        Raises:
            FleetError: if a device computes the embedding but lacks what this batch needs.
        """
        if self._device_embeds and not batch.is_ids_only:
            raise FleetError(
                "this batch has positions or masks that the embedding on a device cannot use; use "
                "--state server"
            )
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._device_embeds):
            x = self.embed(batch).x
        with torch.no_grad():
            extras = [self.embed(part).extras for part in parts]
        pieces = torch.split(x.detach(), [len(part.ids) for part in parts])
        return x, [
            Embedded(piece.requires_grad_(x.requires_grad), each)
            for piece, each in zip(pieces, extras, strict=True)
        ]

    @property
    def _device_embeds(self) -> bool:
        """Return whether a device computes the embedding."""
        return self.work.resident_head and self.work.is_tied

    def embed(self, part: Rows) -> Embedded:
        """Run the model's embedding locally, and return the arguments of all layers."""
        with self.autocast():
            return self._outside.embed(part.ids, part.mask, part.positions)

    def autocast(self) -> torch.autocast:
        """Return an autocast context manager in which local passes use the wire dtype."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.work.dtype is DType.BF16)

    def _loss(self, y: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Compute, on the PS, a micro-batch's loss and the gradient of the last layer's output."""
        if self._ps_loss is not None:
            try:
                return self._ps_loss(y, targets, scale)
            except GraphError as error:  # for example, the accelerator has no memory left
                self._note(f"from now on, the CPU computes the loss: {error}")
                accelerated, self._ps_loss = self._ps_loss, None
                add_gradients(self.work.model, accelerated.take())
        y.requires_grad_()
        loss = self._sum_of_losses(y, targets, scale)
        torch.autograd.backward(loss)
        assert y.grad is not None
        return float(loss.detach()), y.grad

    def _sum_of_losses(self, y: Tensor, targets: Tensor, scale: float) -> Tensor:
        held: dict[str, Any] = dict(self.work.model.named_parameters())
        with self.autocast():
            logits = self._outside.logits(held, y.reshape(-1, 1, y.shape[-1]))
        return scale * F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum"
        )

    def planned(self, batch: Rows) -> StagePlan | NotByStages:
        """Return a plan for the connected devices. If none is feasible, wait until devices join.

        Returns:
            The plan, or `NotByStages` if the caller must compute the step.

        Raises:
            AbandonedError: if training must stop.
        """
        waited_s = 0.0
        while True:
            devices = self.plans.devices()
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
                return plan if self.plans.worthwhile else NotByStages("another method is faster")
            if local and (self._waited or waited_s >= (self._local_after_s or 0.0)):
                self._waited = True
                return NotByStages("no device can train layers")
            if self._stop():
                raise AbandonedError("training is stopping")
            self.runtime.next_outcome(LOOK_S)
            waited_s += LOOK_S

    def _plan_for(self, batch: Rows) -> StagePlan | None:
        """Return the plan for a batch. Split layers if devices lack memory for whole layers."""
        if self._resumes and self._log_plan is not None:
            self._resumes = False
            self._resume(self._log_plan, batch)
        if self._undecided is not None and self.plans.devices():
            keep, self._undecided = self._undecided, None
            there = self.plans.with_state_on_devices(batch.ids, self.work)
            keep(head=self._head_moves(batch, there))
        if self._log_plan is not None:
            # `StageStep` replaces devices that have left. `plan` may have a newer forecast.
            return self.plan or self._log_plan
        try:
            plan = self.plans.plan_for(batch.ids, self.work)
            if plan is not None and self._undecided is not None:
                self.plans.plan = None  # the first devices have just joined
                return self._plan_for(batch)
            return plan
        except DeviceMemoryError as error:
            if self._in_parts is None:
                self._say(f"there is no plan for stages: {error}")
                return None
            self._say(f"layers are divided into attention and MLP, because {error}")
            self.runtime.end_steps()
            self.work, self._in_parts = self._in_parts(), None
            # The key of a run counts parts of layers, so the keys have changed.
            self.passes = PsPasses(self.work.graphs, self.autocast)
            return self._plan_for(batch)

    def _resume(self, logged: StagePlan, batch: Rows) -> None:
        """Assign the stages of the logged steps to the devices that are connected now.

        Wait until there is a device for each stage, but at most `RETURN_S` seconds after the first
        device is connected.
        """
        waited_s = 0.0
        while (there := len(self.plans.devices())) < len(logged.stages) and waited_s < RETURN_S:
            if self._stop():
                raise AbandonedError("training is stopping")
            try:
                self.runtime.next_outcome(LOOK_S)
            except FleetError:  # in virtual time: no further device will join
                break
            self._note_presence(there=bool(there))
            waited_s += LOOK_S if there else 0.0
        self.plans.planner = partial(plan_again, stages=logged.stages)
        self.plans.plan_for(batch.ids, self.work)

    def _note_presence(self, *, there: bool) -> None:
        """Call `presence` if `there` has changed since the last call.

        Args:
            there: whether devices can run a step.
        """
        if there != self._present:
            self._present = there
            self._presence(FleetPresence.PRESENT if there else FleetPresence.ABSENT)

    def _say_who_left(self, result: StepResult) -> None:
        """Report the devices that left in the middle of a step."""
        if names := list(dict.fromkeys(result.left)):
            who = ", ".join(names[:_MOST_NAMED])
            who += f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
            whose = "its" if len(names) == 1 else "their"
            self._note(f"{who} left during a step; other devices did {whose} unfinished work")

    def _say(self, text: str) -> None:
        """Report a message to the user unless it equals the last message."""
        if text != self._said:
            self._said = text
            self._note(text)

    def cut(self, batch: Rows) -> list[Rows]:
        """Split a batch into the plan's number of micro-batches."""
        return batch.cut(self.plans.micro_batches)

    def next_outcome(self) -> StageOutcome:
        """Return the step's next request or result. Check suspicious results while waiting.

        Raises:
            AbandonedError: if training must stop and the step is abandoned.
            StageFailedError: if all devices have left and the caller can compute the step.
        """
        stopping_s = left_s = 0.0
        local = self._local_after_s is not None
        while True:
            try:
                outcome = self.runtime.next_outcome(0.0 if self._passes else LOOK_S)
            except FleetError as error:  # in virtual time: no event that could help will follow
                if not local:
                    raise
                self.runtime.end_steps()
                raise StageFailedError(str(error)) from error
            if outcome is not None:
                self._note_presence(there=True)
                assert not isinstance(outcome, RoundResult)
                if not isinstance(outcome, Suspect):
                    return outcome
                self._examine(outcome)
            elif self._passes:
                done = self._audit_pass()
                if self._faults:
                    return done
                continue
            left_s = 0.0 if self.plans.devices() else left_s + LOOK_S
            if not local:
                self._note_presence(there=left_s <= LOOK_S)
            if local and left_s > self._left_after_s:
                self.runtime.end_steps()
                raise StageFailedError("all devices that can train whole layers have left")
            if self._stop():
                stopping_s += LOOK_S
                if stopping_s >= STEP_END_S or not self.plans.devices():
                    self.runtime.end_steps()
                    raise AbandonedError("training is stopping")

    def _examine(self, suspect: Suspect) -> None:
        """Check a suspicious result, report the finding, and quarantine a faulty device."""
        assert self._step_work is not None
        found = examined(self._step_work, suspect, self._auditor)
        if found.proven:
            self._note(f"device {suspect.device} is quarantined: {found.reason}")
            self.runtime.quarantine(suspect.device, found.reason)
            self._proven.add(suspect.device)
        self.runtime.resolve(found.right, found.reason)
