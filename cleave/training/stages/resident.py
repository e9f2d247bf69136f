"""Training by stages in which devices keep the layers' weights and optimizer state.

The PS holds a *snapshot* of the trained state in the memory of the model and the optimizer, and a
log of all steps since the snapshot. `ResidentState.take` replaces the snapshot with the state that
devices returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from cleave import arrays
from cleave.arrays import DType
from cleave.errors import UsageError
from cleave.graphs.optimizer_graphs import (
    adamw_graph,
    adamw_scalars,
    sgd_graph,
    sgd_scalars,
    squares_graph,
)
from cleave.planner.stages.resident import Protection
from cleave.scheduler.stages.arrays import StageArray, packed
from cleave.scheduler.stages.outcomes import StepResult
from cleave.scheduler.stages.resident import ResidentParameter, Snapshot
from cleave.scheduler.stages.work import LOSS_LAYER, Resident, StepWork, SumName
from cleave.training.loop.job import OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.loop.state_files import StateFiles
from cleave.training.stages.saved_state import SavedState
from cleave.training.stages.stage_work import ModelWork, floats
from cleave.training.stages.step_log import LogFolder, StepLog
from cleave.training.stages.stored_steps import StoredStep

_STAYS_S: Final = 8 * 3600.0  # seconds that a device is expected to stay, before any has left
_MODEL: Final = "model"  # prefix of parameter names among copied tensors
_FIRST_INTERVAL: Final = 8  # steps between snapshots until a plan sets the interval


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that have the same coefficients in every step.

    Attributes:
        updates: number of updates before the snapshot.
    """

    decay: float
    updates: int


@dataclass(frozen=True, slots=True)
class StateStorage:
    """Where the PS keeps the snapshot and the log, and what they contain at the start.

    Attributes:
        log: log folder of `StepLog`; None to keep the log in memory.
        files: keeps the snapshot, and a new snapshot while devices return it, in files; None to
            keep them in memory.
        updates: number of updates in the snapshot, since the run began.
        stored: later steps that an earlier process logged. The PS repeats its own part of these
            steps, and devices repeat their part before the next step.
        changing: called before tensors change, with True if these may be the snapshot's, and with
            False if only the rest of the model changes.
    """

    log: LogFolder | Path | None = None
    files: StateFiles | None = None
    updates: int = 0
    stored: Sequence[StoredStep] = ()
    changing: Callable[[bool], None] = lambda layers: None

    @property
    def folder(self) -> Path | None:
        """Return the folder of the log; None if the log is in memory."""
        return self.log.path if isinstance(self.log, LogFolder) else self.log


class ResidentState:
    """The trained state of a model's layers on devices: its snapshot and the log since then.

    The LM head, together with all other parameters after the last layer, counts as a layer with the
    number `LOSS_LAYER`.

    Args:
        work: the model's layers. Devices keep the layers' parameters once this object exists.
        optimizer: the optimizer whose steps the devices run.
        storage: where to keep the snapshot and the log, and what they already contain.
        now_s: current time in seconds.
        note: called with messages for the user.
        head: whether a device also keeps the LM head and, if they are tied, the embedding.

    Attributes:
        log: the steps since the snapshot.
        position: number of optimizer updates, from the start of the run, that the snapshot
            includes.
        under_way: the same number for the snapshot that is being fetched; None if no fetch is in
            progress.
        tensors: maps each array on the devices to the tensor that holds its snapshot.
        protection: when new snapshots begin, and how many stages hot spares may follow.
        losses: number of times that a device rebuilt a stage from the snapshot and the log.

    Raises:
        UsageError: if devices cannot update the layers.
    """

    def __init__(
        self,
        work: ModelWork,
        optimizer: Optimizer,
        storage: StateStorage,
        now_s: float,
        note: Callable[[str], None],
        *,
        head: bool = False,
    ) -> None:
        self._work = work
        self._optimizer = optimizer
        self.log = StepLog(storage.log, note)
        self.position = storage.updates
        self.under_way: int | None = None
        self._stored = deque(storage.stored)
        self.changing = storage.changing
        self._files = storage.files
        self._pieces = storage.files.pieces() if storage.files is not None else None
        self.protection = Protection(_FIRST_INTERVAL, 0)
        self._departures = 0
        self._present: Set[int] = frozenset()  # devices in the last step
        self.losses = 0
        self._began_s = now_s
        self._stages = 1  # number of stages in the last step
        self._names = {id(tensor): name for name, tensor in optimizer.parameters.items()}
        self.tensors: dict[StageArray, Tensor] = {}
        self._groups: list[_Group] = []
        self._keys = _keys(work, head=head)
        update = update_graph(optimizer.rule)
        held = {id(tensor): self._held(tensor) for tensor in self._keys.values()}
        work.resident, work.resident_head = held, head
        self._resident = Resident(
            {key: held[id(tensor)] for key, tensor in self._keys.items()},
            work.graph(update),
            work.graph(squares_graph()),
        )
        if storage.stored:
            self._resident = replace(self._resident, kept=storage.stored[-1].kept)
        if self._pieces is not None:
            self._resident = replace(self._resident, keep=self._pieces.keep)

    @property
    def names(self) -> set[str]:
        """Return the names of the parameters that devices update."""
        return {self._names[id(tensor)] for tensor in self._keys.values()}

    @property
    def is_current(self) -> bool:
        """Return whether the snapshot is the current state, because no step has followed it."""
        return not self.log.steps

    @property
    def found_on_devices(self) -> bool:
        """Return whether devices may have kept state from before a restart of the PS."""
        return bool(self._resident.kept)

    def of_step(self) -> Resident:
        """Return the state for a step's `StepWork`."""
        return replace(
            self._resident,
            log=self.log.steps,
            position=self.position,
            copies=self.protection.copies,
        )

    def of_fetch(self, work: StepWork) -> StepWork:
        """Return the work of a step that only fetches the state.

        Args:
            work: work of an earlier step.
        """
        return replace(work, resident=replace(self.of_step(), fetches=True), token=object())

    def scalars(self, rate: float, clip: float) -> list[StageArray]:
        """Return the coefficients of the next step's updates, by group.

        Args:
            rate: learning rate.
            clip: factor by which gradients are multiplied.
        """
        rule, logged = self._optimizer.rule, len(self.log.steps)
        return [
            coefficients(rule, group.decay, rate, clip, group.updates + logged + 1)
            for group in self._groups
        ]

    @property
    def next_stored(self) -> StoredStep | None:
        """Return the next step if an earlier process logged it, otherwise None."""
        return self._stored[0] if self._stored else None

    def repeated(self, work: StepWork) -> None:
        """Add the next stored step to the log."""
        self.log.repeat(work, self._resident, self._stored.popleft())

    def add(self, work: StepWork, result: StepResult, step: StoredStep) -> StoredStep:
        """Add a step to the log after all devices have run its updates; see `StepLog.add`."""
        self.losses += result.restored
        self.under_way = result.fetching
        self._stages = len(result.records)
        return self.log.add(self.updates + 1, work, self._resident, step)

    @property
    def snapshot_is_due(self) -> bool:
        """Return whether a new snapshot should begin now."""
        return self.under_way is None and len(self.log.steps) >= self.protection.interval

    @property
    def updates(self) -> int:
        """Return the number of updates so far, since the run began."""
        return self.position + len(self.log.steps)

    def between_losses_s(self, now_s: float, present: Set[int]) -> tuple[float, float]:
        """Return the mean times between events that need a snapshot, in seconds.

        The first time is between losses of a stage that a device rebuilds from the snapshot. The
        second is between all departures of devices with a stage. Before the first event, a device
        is expected to stay for eight hours. Devices with and without a stage leave equally often.

        Args:
            present: devices that can train layers now.
        """
        self._departures += len(self._present - present)
        self._present = frozenset(present)
        passed_s = now_s - self._began_s
        expected_s = passed_s + _STAYS_S / self._stages
        share = min(1.0, self._stages / max(1, len(present)))  # fraction of devices with a stage
        departures = self._departures * share
        between_s = passed_s / departures if departures else expected_s
        return expected_s / (1 + self.losses), between_s

    def take(self, snapshot: Snapshot) -> None:
        """Replace the snapshot of all layers, and remove the steps that it contains from the log.

        Do not call this during a step, because devices may be receiving the old snapshot.
        """
        self.changing(True)
        rows: dict[StageArray, dict[int, Any]] = {}
        for (array, first), payload in snapshot.state.items():
            rows.setdefault(array, {})[first] = payload
        assert rows.keys() == self.tensors.keys()
        for array, parts in rows.items():
            values, done = self.tensors[array].detach().reshape(-1).numpy(), 0
            for _, payload in sorted(parts.items()):
                part = np.frombuffer(packed(payload), np.float32)
                values[done : done + part.size] = part
                done += part.size
            assert done == values.size
        if self._pieces is not None:
            self._pieces.clear()
        steps = snapshot.position - self.position
        self.log.forget(steps)
        self._count_updates(steps)

    @property
    def layers(self) -> set[int]:
        """Return the numbers of all layers with trained state on devices."""
        return {layer for layer, _ in self._keys}

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters that are not on devices, with their optimizer state, by name."""
        on_devices, optimizer = self.names, self._optimizer
        found = {f"{_MODEL}.{n}": p for n, p in optimizer.parameters.items() if n not in on_devices}
        state = optimizer.tensors().items()
        return found | {
            key: tensor for key, tensor in state if optimizer.parameter_of(key) not in on_devices
        }

    def restore(self, saved: SavedState) -> int:
        """Make an earlier state the snapshot, and restore all other parameters to that state.

        Devices must hold no state. Afterwards, the log is empty.

        Returns:
            The number of updates that are undone.
        """
        self.changing(True)
        undone = self.updates - saved.position
        for array, tensor in self.tensors.items():
            saved.layers.copy_to(array, tensor)
        for name, tensor in self.own_tensors().items():
            if name in saved.own:
                saved.own.copy_to(name, tensor)
            else:  # the parameter had not been updated yet
                self._optimizer.forget_state(self._optimizer.parameter_of(name))
        self.log.forget(len(self.log.steps))
        self._stored.clear()
        self.under_way = None
        self._count_updates(saved.position - self.position)
        return undone

    def _count_updates(self, steps: int) -> None:
        """Add `steps`, which may be negative, to the numbers of updates in the snapshot."""
        for tensor in self._keys.values():
            self._optimizer.count_updates(self._names[id(tensor)], steps)
        self._groups = [replace(group, updates=group.updates + steps) for group in self._groups]
        self.position += steps

    def _held(self, tensor: Tensor) -> ResidentParameter:
        name = self._names[id(tensor)]
        updates, moments = self._optimizer.hand_over(name, self._files)
        group = _Group(self._optimizer.rule.decay_of(tensor), updates)
        if group not in self._groups:
            self._groups.append(group)
        made = [self._work.array_of(each, DType.FP32) for each in (tensor, *moments)]
        for array, each in zip(made, (tensor, *moments), strict=True):
            payload = array.payload
            if isinstance(payload, arrays.Buffer) and _begin(payload) != each.data_ptr():
                raise UsageError(
                    f"{name} is not a contiguous fp32 tensor, so devices cannot keep it; use "
                    f"--state server"
                )
        self.tensors |= zip(made, (tensor, *moments), strict=True)
        return ResidentParameter(made[0], tuple(made[1:]), self._groups.index(group))


def check_resident(work: ModelWork, rule: UpdateRule) -> None:
    """Check that devices can keep and update a model's layers.

    Raises:
        UsageError: if they cannot.
    """
    update_graph(rule)
    _keys(work, head=False)


def update_graph(rule: UpdateRule) -> bytes:
    """Return the graph that devices run for an optimizer step.

    Raises:
        UsageError: if devices cannot run steps of this optimizer.
    """
    match rule.kind:
        case OptimizerKind.ADAMW:
            return adamw_graph()
        case OptimizerKind.SGD:
            return sgd_graph(momentum=bool(rule.momentum))
    raise UsageError(
        f"devices cannot run steps of the optimizer {rule.kind.value!r}; use adamw or sgd"
    )


def coefficients(
    rule: UpdateRule, decay: float, rate: float, clip: float, step: float
) -> StageArray:
    """Return the coefficients that devices use in an optimizer step.

    Args:
        decay: weight decay.
        rate: learning rate.
        clip: factor by which gradients are multiplied.
        step: number of this update, from 1; infinite if moments need no bias correction.
    """
    if rule.kind is OptimizerKind.SGD:
        return floats(sgd_scalars(rate=rate, decay=decay, momentum=rule.momentum, clip=clip))
    betas, eps = rule.betas, rule.eps
    return floats(adamw_scalars(rate=rate, decay=decay, betas=betas, eps=eps, step=step, clip=clip))


def _begin(buffer: arrays.Buffer) -> int:
    """Return the address of a buffer's first element."""
    return int(buffer.array.ctypes.data)


def _keys(work: ModelWork, *, head: bool) -> Mapping[SumName, Tensor]:
    """Return all trained parameters of the layers, and of the LM head if `head`, by layer and name.

    Raises:
        UsageError: if a parameter is used in several places, or if no layer has a trained
            parameter.
    """
    found: dict[SumName, Tensor] = {}
    for number, graphs in enumerate(work.graphs.layers):
        found |= {(number, name): work.held(number)[name] for name in graphs.trainable}
    outside = {id(parameter) for parameter in work.outside()}
    if head:
        in_head = {(LOSS_LAYER, name): work.held_by_loss[name] for name in work.head_trainable}
        found, outside = found | in_head, set()
    ids = [id(tensor) for tensor in found.values()]
    if len(ids) != len(set(ids)) or outside & set(ids):
        raise UsageError(
            "this model uses a layer's weights in several places, so one device cannot keep them; "
            "use --state server"
        )
    if not found:
        raise UsageError("this job trains none of the layers; use --state server")
    return found
