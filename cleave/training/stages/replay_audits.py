"""Replay audits: the server repeats logged steps of stages whose state is on devices.

When a new snapshot has arrived, the server selects each stage with a certain probability.
`StageReplay` repeats the selected stages' steps since the previous snapshot. Devices cannot foresee
the selection, because by then they have returned everything that is compared.

If a device returned a wrong result, training rolls back to the last *verified* snapshot, which is
kept in a file. A snapshot is verified once every stage has been audited since the snapshot arrived,
and the audits found only rounding errors. So a device that falsifies the results of all steps
cannot have changed a verified snapshot. A device that falsifies the results of a few steps may have
changed it, if no audit covered those steps.

Only the server repeats steps, so two devices never contradict each other. A device is blamed only
if it certainly began with the same state as the server. This holds if the previous snapshot is the
server's own, is sound, or has the same lineage. Otherwise, no device is blamed. After a rollback,
all lineages are new, and all stages are audited until a snapshot is verified. A device that still
returns wrong results is then blamed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.outcomes import StepResult
from cleave.scheduler.stages.resident import Holding, Snapshot
from cleave.scheduler.stages.work import LoggedStep, StepWork, layers_of
from cleave.training.stages.audits import Auditor, Fault
from cleave.training.stages.resident import ResidentState
from cleave.training.stages.saved_state import SavedState, SavedTensors
from cleave.training.stages.stage_replay import ReturnedStep, StageReplay
from cleave.training.stages.stored_steps import StoredStep


class RolledBackError(Exception):
    """Raised when training has gone back to an earlier step because an audit found a wrong result.

    Weights and optimizer state are those after that step. The caller must repeat the later steps
    with the same data.

    Attributes:
        steps: number of steps to repeat.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(f"{steps} steps must be repeated")
        self.steps = steps


@dataclass(frozen=True, slots=True)
class Lie:
    """The faults found by the audits of one snapshot.

    Attributes:
        faults: all faults.
        blamed: the faults of devices that are certainly to blame.
    """

    faults: Sequence[Fault]
    blamed: Sequence[Fault]


@dataclass
class ReplayCounters:
    """Counters of replay audits.

    Attributes:
        stages: number of audited stages.
        steps: number of repeated steps, summed over the audited stages.
        spent_s: total duration of the audits in seconds. Training may have continued meanwhile.
    """

    stages: int = 0
    steps: int = 0
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Findings:
    """The result of a stage's audit.

    Attributes:
        proves: whether all results were compared, and rounding explains all differences.
    """

    faults: Sequence[Fault]
    proves: bool


@dataclass(frozen=True, slots=True)
class _Audit:
    """Audits in progress of the stages selected between two snapshots.

    Attributes:
        layers: the layers of every stage, by stage number.
        holders: the device of each selected stage, by stage number.
    """

    start: SavedState
    end: SavedState
    layers: Mapping[int, Sequence[int]]
    holders: Mapping[int, Holding]
    findings: Future[dict[int, _Findings]]


class ReplayAudits:
    """Audits a run whose layers' state is on devices, and rolls the run back after a wrong result.

    Args:
        state: the state on devices. Its snapshot is the initial state.
        auditor: recomputes passes. Its rate is the probability that a stage is audited when a
            snapshot arrives.
        folder: folder for copies of the state; None to keep them in memory.
        waits: whether `taken` waits for its audits instead of running them in the background.
        note: called with messages for the user.
    """

    def __init__(
        self,
        state: ResidentState,
        auditor: Auditor,
        folder: Path | None,
        *,
        waits: bool,
        note: Callable[[str], None],
    ) -> None:
        self.counters = ReplayCounters()
        self._state, self._auditor = state, auditor
        self._folder, self._waits, self._note = folder, waits, note
        self._thread = ThreadPoolExecutor(1, "cleave-replay")
        self._returned: list[ReturnedStep] = []  # results of the steps in the log
        # evaluations to audit: number of updates before, stage, inputs and results
        self._evaluated: list[tuple[int, int, LoggedStep, ReturnedStep]] = []
        self._keep_own(state.updates)
        self._last = self._base = self._saved(state.updates, frozenset())
        # Devices that kept state across a restart did not begin with the server's snapshot.
        if not state.found_on_devices:
            self._base.sound.update(state.layers)
        # The next snapshot to be verified, and the layers that were audited since it arrived.
        self._candidate: SavedState | None = None
        self._audited: set[int] = set()
        self._all = False  # whether all stages are selected, because of a rollback
        self._audit: _Audit | None = None
        self._lie: Lie | None = None

    def close(self) -> None:
        """Stop the thread without waiting for an audit in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def verified(self) -> int:
        """Return the number of updates before the snapshot to which a rollback would go."""
        return self._base.position

    def _keep_own(self, position: int) -> None:
        """Copy the parameters that are not on devices, and their optimizer state.

        `position` is the number of updates that these parameters have had.
        """
        own = SavedTensors(self._folder, self._state.own_tensors(), self._note)
        self._own = position, own

    def add(self, result: StepResult, stored: StoredStep) -> None:
        """Record what devices returned in the last step of the log.

        Call this before the parameters that are not on devices are updated in this step.
        """
        self._returned.append(ReturnedStep.of(result, stored))
        snapshot, before = result.snapshot, self._state.updates - 1
        if before in (result.fetching, snapshot.position if snapshot is not None else None):
            self._keep_own(before)

    def repeated(self) -> None:
        """Record a step that an earlier process ran. Only the state after it can be audited."""
        self._returned.append(ReturnedStep())

    def evaluated(self, work: StepWork, result: StepResult) -> None:
        """Record what randomly selected stages returned in an evaluation."""
        for number, record in enumerate(result.records):
            if self._draws(record.plan):
                losses = result.losses if record.plan.loss else {}
                x = [record.x if n == number else {} for n in range(len(result.records))]
                step = LoggedStep(work, x, [{}] * len(x), ())
                returned = ReturnedStep.of_evaluation(number, record, losses)
                self._evaluated.append((self._state.updates, number, step, returned))

    def taken(self, snapshot: Snapshot, steps: Sequence[LoggedStep]) -> None:
        """Copy a new snapshot and audit randomly selected stages.

        Args:
            snapshot: the snapshot, which `ResidentState` has already taken.
            steps: the logged steps since the previous snapshot.
        """
        self._collect(wait=True)  # so at most one snapshot waits for its audits
        if self._lie is not None:  # this snapshot will be undone
            return
        returned, self._returned = self._returned[: len(steps)], self._returned[len(steps) :]
        start, stages = self._last, steps[0].work.stages
        lineages = frozenset(h.lineage for h in snapshot.holders.values() if h.lineage is not None)
        if self._state.is_current:
            self._keep_own(snapshot.position)
        self._last = end = self._saved(snapshot.position, lineages)
        if self._candidate is None:
            self._candidate, self._audited = end, set()
        layers = {n: layers_of(stage) for n, stage in enumerate(stages)}
        past = [each for each in self._evaluated if each[0] < snapshot.position]
        self._evaluated = [each for each in self._evaluated if each[0] >= snapshot.position]
        drawn = {n for n in layers if self._draws(stages[n])} | {number for _, number, *_ in past}
        chosen = [n for n in layers if n in snapshot.holders and n in drawn]
        replays: list[StageReplay] = []
        for n in chosen:
            pairs = [*zip(steps, returned, strict=True)]
            for position, number, step, found in reversed(past):
                if number == n:
                    pairs.insert(position - start.position, (step, found))
            replays.append(
                StageReplay(
                    n,
                    [step for step, _ in pairs],
                    [each for _, each in pairs],
                    start.layers,
                    end.layers,
                    snapshot.holders[n].device,
                )
            )
        self.counters.stages += len(replays)
        self.counters.steps += len(replays) * len(steps)
        self._audit = _Audit(
            start,
            end,
            layers,
            {n: snapshot.holders[n] for n in chosen},
            self._thread.submit(self._findings, replays),
        )
        self._collect(wait=self._waits)

    def _findings(self, replays: Sequence[StageReplay]) -> dict[int, _Findings]:
        """Audit stages in the thread. Return the findings by stage number."""
        began_s, found = time.perf_counter(), dict[int, _Findings]()
        for each in replays:
            faults = each.faults(self._auditor)
            pairs = zip(each.steps, each.returned, strict=True)
            whole = all(one.squares for step, one in pairs if not step.work.evaluates)
            found[each.number] = _Findings(faults, whole and self._auditor.excess <= 1)
        self.counters.spent_s += time.perf_counter() - began_s
        return found

    def _draws(self, stage: PlannedStage) -> bool:
        """Return whether to audit a stage now. Stages without trained layers are never audited."""
        trained = not self._state.layers.isdisjoint(layers_of(stage))
        return trained and (self._all or self._auditor.rng.random() < self._auditor.rate)

    def lie(self, *, wait: bool = False) -> Lie | None:
        """Return the faults that finished audits found; None if they found none.

        After a fault, the caller must call `roll_back`.

        Args:
            wait: whether to wait for audits in progress.
        """
        self._collect(wait=wait)
        return self._lie

    def _collect(self, *, wait: bool) -> None:
        """Use the results of the audits in progress, if they have ended."""
        audit = self._audit
        if audit is None or not (wait or audit.findings.done()):
            return
        found, self._audit = audit.findings.result(), None
        if faults := [fault for each in found.values() for fault in each.faults]:
            blamed = [
                fault
                for number, each in found.items()
                for fault in each.faults
                if fault.device == audit.holders[number].device and _is_certain(audit, number)
            ]
            # Other devices had the stage earlier. Their initial state is unknown.
            self._lie = Lie(faults, blamed)
            return
        for number in (number for number, each in found.items() if each.proves):
            layers = {*audit.layers[number]}
            self._audited |= layers
            audit.end.sound |= layers & audit.start.sound
        if self._state.layers <= self._audited and self._candidate is not None:
            self._base, self._candidate, self._all = self._candidate, None, False

    def roll_back(self) -> int:
        """Restore the last verified state and return the number of steps to repeat."""
        base, self._lie, self._audit = self._base, None, None
        steps = self._state.restore(base)
        self._own = base.position, base.own
        self._last, self._candidate, self._returned, self._all = base, None, [], True
        self._evaluated = []
        return steps

    def _saved(self, position: int, lineages: frozenset[Any]) -> SavedState:
        """Copy the snapshot of the `ResidentState`."""
        at, own = self._own
        assert at == position, f"own parameters are from update {at}, not {position}"
        layers = SavedTensors(self._folder, self._state.tensors, self._note)
        return SavedState(position, layers, own, lineages)


def _is_certain(audit: _Audit, number: int) -> bool:
    """Return whether a stage's device certainly began with the same state as the server."""
    start, holder = audit.start, audit.holders[number]
    sound = {*audit.layers[number]} <= start.sound
    return sound or holder.continues(start.position, start.lineages)
