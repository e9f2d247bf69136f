"""Manage the current step by stages, and the arrays that devices store for stages."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from cleave.errors import UsageError, choice_of
from cleave.planner.plan import DeviceRates
from cleave.protocol import messages
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import Feature
from cleave.scheduler.instructions import ForSteps
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.holders import Holders, kept_by_holders
from cleave.scheduler.stages.hot_spares import HotSpares
from cleave.scheduler.stages.outcomes import TIMELINE_PARTS, DeviceUse
from cleave.scheduler.stages.resident import KeptState, Snapshot
from cleave.scheduler.stages.snapshots import SnapshotRun
from cleave.scheduler.stages.state import StepView
from cleave.scheduler.stages.step import StageStep
from cleave.scheduler.stages.usual_sizes import UsualSizes
from cleave.scheduler.stages.work import StageOrder, StepWork
from cleave.scheduler.tiles.device_memory import Names

# number of models whose usual magnitudes are remembered, most recently trained first
_MODELS_KEPT: Final = 8
_MOST_USED: Final = 16  # number of devices whose use in a step is reported

# Limits for a device's throughput in layer graphs, as measured in a step.
_LEAST_COMPUTE_S: Final = 0.2  # shorter computations say little
_BELIEVED: Final = 2.0  # largest ratio of measured to stated throughput
_CHANGED: Final = 1.1  # smallest ratio of the new to the old throughput


class StagesOn(Enum):
    """The devices that may train whole layers. Each enum value is a value of `--stages-on`."""

    # only the operator's own devices, because the server does not verify every stage result
    OWN = "own"
    ANY = "any"  # all devices that can run graphs

    @classmethod
    def of(cls, value: StagesOn | str) -> StagesOn:
        """Parse a value of `--stages-on`.

        Raises:
            UsageError: if the value is not valid.
        """
        return choice_of(cls, "--stages-on", value)


class StageRuns:
    """Manages the current step by stages and the arrays that devices store for stages.

    Methods that handle an event return the instructions to carry out.

    Args:
        any_device: whether all capable devices may take part, not only the operator's own devices.

    Attributes:
        any_device: as in the arguments.
        holders: the devices that hold trained state.
        results: number of graph runs and fetches that devices have completed in all steps.
        flops: number of floating-point operations that devices have completed in all steps.
        left: names of the devices that left while they had a stage in the current step.
    """

    def __init__(self, sessions: Mapping[int, Session], ids: Names, *, any_device: bool) -> None:
        self._sessions = sessions
        self._ids = ids
        self.any_device = any_device
        self._stores: dict[int, StageDevice] = {}
        self._step: StageStep | None = None
        self._snapshot: SnapshotRun | None = None
        self._spares = HotSpares(self._stores, ids)
        self.holders = Holders(self._stores, ids)
        self._dtype = "fp32"  # in which devices may compute the last step's products
        self._usual: dict[int, UsualSizes] = {}  # key: model ID
        self._repeated = 0  # passes repeated in earlier steps
        # counters of all devices when the current step began, by device
        self._before: dict[int, DeviceCounters] = {}
        self._names: dict[int, str] = {}  # of all devices when the current step began
        self.left: list[str] = []
        # downlink bytes of devices before they received weights of the next step, by device
        self._before_renewal: dict[int, int] = {}
        self._began_s = 0.0  # time when the current step began
        # begin and end of each device's computations in the current step, in seconds
        self._computed: dict[int, list[tuple[float, float]]] = {}
        self.results = self.flops = 0

    @property
    def repeated(self) -> int:
        """Return the number of passes repeated in all steps because a device was lost or failed."""
        step = self._step  # read once, because the training thread also calls this
        return self._repeated + (step.repeated if step is not None else 0)

    @property
    def able(self) -> dict[int, DeviceRates]:
        """Return the graph rates of the devices that may train whole layers now, by device ID."""
        return {
            s.id: s.rates.for_graphs(self._dtype)
            for s in list(self._sessions.values())  # the training thread also calls this
            if s.rates is not None
            and s.state is DeviceState.READY
            and not s.setbacks.aside
            and not s.returning
            and Feature.GRAPHS in s.features
            and self._may(s)
        }

    def _may(self, session: Session) -> bool:
        return session.own or self.any_device

    def why_none(self) -> str:
        """Return why no device can train whole layers now; an empty string if a device can."""
        if self.able:
            return ""
        here = [s for s in list(self._sessions.values()) if s.rates is not None and not s.measure]
        if not here:
            return "no device is connected"
        count = len(here)
        none = "1 device is connected, but it cannot train whole layers now"
        if count > 1:
            none = f"{count:,} devices are connected, but none can train whole layers now"
        capable = [s for s in here if Feature.GRAPHS in s.features]
        if not capable:
            return f"{none}: graphs need a newer version of Cleave, or ONNX Runtime on the device"
        if not any(self._may(s) for s in capable):
            of = "" if len(capable) == count else f"of the {len(capable):,} that could, "
            whose = "it is not yours" if count == 1 else f"{of}none is yours"
            return (
                f"{none}: {whose} (pair it with `cleave pair --own`, mark it with "
                f"`cleave devices own NAME`, or start the server with --stages-on any)"
            )
        that = "it is" if count == 1 else "all that could are"
        return f"{none}: {that} being measured, set aside or about to leave"

    def busy(self, device: int) -> bool:
        """Return whether a device is working on a step or receiving weights for the next step."""
        if device in self._before_renewal:
            return True
        return self._step is not None and not self._step.ended and device in self._stores

    @property
    def _holders(self) -> set[int]:
        """Return the devices that have stages in the current step."""
        return self._step.devices if self._step is not None else set()

    @property
    def in_use(self) -> set[int]:
        """Return the devices that have stages in the current step, and all hot spares."""
        return self._holders | self._spares.devices

    def occupied_bytes(self, device: int) -> int:
        """Return the size of all arrays and graphs for stages on a device, in bytes."""
        store = self._stores.get(device)
        if store is not None:
            return store.occupied_bytes
        return self.holders.expected_bytes(self._sessions[device])

    def view(self) -> StepView | None:
        """Return a snapshot of the current or last step; None if no step exists."""
        return self._step.view() if self._step is not None else None

    def tasks(self) -> tuple[int, int] | None:
        """Return the number of completed tasks and of all tasks; None if no step is running."""
        step = self._step
        return step.tasks() if step is not None and not step.ended else None

    def begin(self, work: StepWork, now_s: float) -> list[ForSteps]:
        """Start a step on the planned devices that can still take part.

        Raises:
            UsageError: if another step is running.
        """
        if self._step is not None and not self._step.ended:
            raise UsageError(
                "the fleet is running another step by stages; run its backward pass first, or call "
                "cleave.restore on its model"
            )
        self._before = {s.id: replace(s.counters) for s in self._sessions.values()}
        for device, nbytes in self._before_renewal.items():
            if device in self._before:
                self._before[device].downlink_bytes = nbytes
        self._before_renewal = {}
        self._names, self.left = {s.id: s.name for s in self._sessions.values()}, []
        self._began_s, self._computed = now_s, {}
        out = self._abandon_snapshot() if work.resident and work.resident.fetches else []
        able = self.able
        there = set(able)
        if work.resident is not None:
            self.holders.begin(work, now_s)
            out += self._returned_early()
            there |= self.holders.leaving if work.resident.fetches else set()
        else:
            out += self.expect_none()
        stages, slices = (
            [replace(s, devices=tuple(d for d in s.devices if d in there)) for s in them]
            for them in (work.stages, work.slices)
        )
        kept = work.kept_batches
        if work.resident is not None:
            last = self._step.devices_of if self._step is not None else lambda _: []
            stages = [self.holders.held(work, each, there, last(each)) for each in stages]
            kept = kept_by_holders(kept, work.stages, stages, able)
        work = replace(work, stages=stages, slices=slices, kept_batches=kept)
        self._repeated = self.repeated
        usual = self._usual[work.model] = self._usual.pop(work.model, UsualSizes())
        for model in list(self._usual)[:-_MODELS_KEPT]:
            del self._usual[model]
        self._dtype = next((layer.forward.products for layer in work.layers), "") or "fp32"
        if work.resident is not None:
            planned = {device for stage in work.stages for device in stage.devices}
            self._spares.revise(work, able, planned)
        self._step = StageStep(
            work,
            self._stores,
            lambda: self.able,
            self._ids,
            usual,
            self.holders.awaited,
            self._spares,
        )
        out += self._step.begin()
        if work.resident is not None:
            out += self._spares.begin(work, self._step.devices)
        return out

    def begin_snapshot(self, work: StepWork, position: int) -> list[ForSteps]:
        """Begin to fetch the trained state after the last step.

        Do nothing if an earlier snapshot is unfinished, or if no device has a stage's state.

        Args:
            work: the last step.
            position: number of all updates until then.
        """
        if self._snapshot is not None:
            return []
        assert work.resident is not None
        able = self.able.keys()
        holders = {
            number: self.holders.store_of(work.resident.arrays_of(stage), position, able)
            for number, stage in enumerate(work.planned)
        }
        found = {number: store for number, store in holders.items() if store is not None}
        if len(found) < len(holders):
            return []
        self._snapshot = SnapshotRun(work, position, found)
        return [*self._snapshot.begin()]

    def finished_snapshot(self, model: int) -> Snapshot | None:
        """Return a model's finished snapshot, once; None if no snapshot has finished."""
        if self._snapshot is None or self._snapshot.model != model:
            return None
        if (found := self._snapshot.finished) is not None:
            self._snapshot = None
        return found

    def fetching(self, model: int) -> int | None:
        """Return the position of the snapshot that is being fetched; None if there is no fetch."""
        snapshot = self._snapshot
        return snapshot.position if snapshot is not None and snapshot.model == model else None

    def _abandon_snapshot(self, device: int | None = None) -> list[ForSteps]:
        """Abandon the snapshot; if `device` is given, only if that device has a part of it."""
        snapshot = self._snapshot
        if snapshot is None or (device is not None and not snapshot.involves(device)):
            return []
        self._snapshot = None
        return [*snapshot.abandon()]

    def hands_over(self, device: int) -> bool:
        """Return whether a device that wants to leave should first return its trained state."""
        rates = {s.id: s.rates for s in self._sessions.values() if s.rates is not None}
        return self.holders.hands_over(device, self._step, self.able.keys(), rates)

    def keep(self, session: Session, now_s: float) -> list[ForSteps]:
        """Remember a disconnected device's trained state, in case the device returns."""
        if not self.holders.keep(session, now_s):
            return []
        self._spares.forget(session.id)
        return self._abandon_snapshot(session.id)

    def returned(self, session: Session) -> list[ForSteps]:
        """Let a returned device continue with the arrays that it still has."""
        in_step = self._step is not None and not self._step.ended
        return [*self.holders.returned(session, in_step=in_step), *self.changed()]

    def _returned_early(self) -> list[ForSteps]:
        """Let devices that rejoined a restarted PS continue, or tell them to drop their arrays."""
        early = [s for s in self._sessions.values() if s.held is not None and not s.returning]
        ready = [s for s in early if s.state is DeviceState.READY]
        return [one for s in ready for one in self.holders.returned(s, in_step=False)]

    def kept(self) -> list[KeptState]:
        """Return records of the trained state that connected devices would still have on return."""
        return [
            store.kept(session.arrays)
            for device, store in self._stores.items()
            if (session := self._sessions.get(device)) and session.arrays and store.has_state
        ]

    def expire(self, now_s: float) -> list[ForSteps]:
        """Stop waiting for devices that have not returned in time."""
        if not self.holders.expire(now_s):
            return []
        return [*self._returned_early(), *self.changed()]

    def expect_none(self) -> list[ForSteps]:
        """Tell devices to drop state from before a restart of the PS, because other work begins."""
        self.holders.expect(())
        return self._returned_early()

    def renew(self, arrays: Mapping[StageArray, StageArray]) -> list[ForSteps]:
        """Replace weights on devices between steps. Do nothing while a step is running.

        `arrays` maps arrays of the last step to the arrays that replace them.
        """
        out: list[ForSteps] = []
        if self._step is not None and not self._step.ended:
            return out
        for device, store in self._stores.items():
            sent_bytes = self._sessions[device].counters.downlink_bytes
            self._before_renewal.setdefault(device, sent_bytes)
            store.renew(arrays)
            out += store.take()
        return out

    def give(self, batch: int, made: StageArray, after: int | None) -> list[ForSteps]:
        """Pass an array from the training thread to `StageStep.give` of the current step."""
        return self._step.give(batch, made, after) if self._step is not None else []

    def update(self, scalars: Sequence[StageArray]) -> list[ForSteps]:
        """Pass the coefficients of an optimizer step to `StageStep.update` of the current step."""
        return self._step.update(scalars) if self._step is not None else []

    def resolve(self, right: bool, reason: str) -> list[ForSteps]:
        """Accept or reject the step's first suspect result. `reason` says what is wrong with it."""
        return self._step.resolve(right=right, reason=reason) if self._step is not None else []

    def withdraw(self) -> None:
        """End the current step. Devices retain their arrays for the next step."""
        if self._step is not None:
            if not self._step.ended:
                self.holders.withdraw()
            self._step.withdraw()
        self._repeated, self._step = self.repeated, None

    def end(self) -> list[ForSteps]:
        """End the current step and tell devices to drop all arrays for stages."""
        self.withdraw()
        out = self._abandon_snapshot()
        for store in self._stores.values():
            store.end()
            out += store.take()
        self._stores.clear()
        self.holders.end()
        out += self._returned_early()
        self._spares = HotSpares(self._stores, self._ids)
        self._before_renewal = {}
        return out

    def used(self, now_s: float) -> list[DeviceUse]:
        """Return the busy times of the busiest devices since the last step began."""
        found = []
        for session in self._sessions.values():
            used = self._counted(session)
            if used.compute_s and session.rates is not None:
                down_s = used.downlink_bytes / session.rates.downlink_bytes_per_s
                up_s = used.uplink_bytes / session.rates.uplink_bytes_per_s
                timeline = self._timeline(session.id, now_s)
                found.append(DeviceUse(session.name, used.compute_s, down_s, up_s, timeline))
        return heapq.nlargest(
            _MOST_USED, found, key=lambda use: max(use.compute_s, use.down_s, use.up_s)
        )

    def _timeline(self, device: int, now_s: float) -> list[float]:
        """Return the share of each part of the step that a device spent computing, in order."""
        part_s = max(now_s - self._began_s, 1e-9) / TIMELINE_PARTS
        found = [0.0] * TIMELINE_PARTS
        for begin_s, end_s in self._computed.get(device, ()):
            first = (begin_s - self._began_s) / part_s
            last = min((end_s - self._began_s) / part_s, TIMELINE_PARTS)
            for part in range(int(first), math.ceil(last)):
                found[part] += max(0.0, min(part + 1, last) - max(part, first))
        return [min(1.0, round(share, 3)) for share in found]

    def sustained(self) -> list[tuple[Session, DeviceRates]]:
        """Return the devices whose throughput in layer graphs has changed, with their new rates.

        A device's own measurement is short and may not reflect a quota, heat or other programs. The
        new throughput is the one sustained in the last step, but at most `_BELIEVED` times the
        stated throughput.
        """
        found = []
        for session in self._sessions.values():
            used, rates = self._counted(session), session.rates
            if rates is None or used.compute_s < _LEAST_COMPUTE_S:
                continue
            most = _BELIEVED * max(session.claimed_flops_per_s, session.claimed_graph_flops_per_s)
            flops_per_s = min(used.flops / used.compute_s, most)
            before = rates.for_graphs(self._dtype).flops_per_s
            if 1 / _CHANGED < flops_per_s / before < _CHANGED:
                continue
            # What slows a device down in one dtype does so in the other.
            change = flops_per_s / before
            found.append(
                (
                    session,
                    replace(
                        rates,
                        graph_flops_per_s=change * rates.for_graphs().flops_per_s,
                        graph_bf16_flops_per_s=change * rates.graph_bf16_flops_per_s,
                    ),
                )
            )
        return found

    def _counted(self, session: Session) -> DeviceCounters:
        """Return the increase of a device's counters since the last step began."""
        return session.counters - self._before.get(session.id, DeviceCounters())

    def answered(
        self,
        order: StageOrder,
        answer: messages.Computed | messages.Result,
        flops: int,
        now_s: float,
    ) -> list[ForSteps]:
        """Handle a device's answer to a task that required `flops` floating-point operations."""
        if answer.compute_s:
            spans = self._computed.setdefault(order.request.device, [])
            begin_s = max(now_s - answer.compute_s, spans[-1][1] if spans else self._began_s)
            spans.append((begin_s, now_s))
        self.results += 1
        self.flops += flops
        snapshot = self._snapshot
        if snapshot is not None and snapshot.owns(order):
            assert isinstance(answer, messages.Result)
            return [*snapshot.arrived(order, answer.id, answer.payload)]
        out: list[ForSteps]
        if self._spares.owns(order):
            out = [*self._spares.answered(order, answer.id)]
        elif self._step is None:
            return []
        elif isinstance(answer, messages.Computed):
            out = self._step.computed(order, answer.id)
        else:
            out = self._step.fetched(order, answer.id, answer.payload)
        return [*out, *snapshot.more(order.request.device)] if snapshot is not None else out

    def failed(self, device: int, reason: str) -> list[ForSteps]:
        """Record that a device failed. The device gets no more tasks in this step."""
        out = [*self._abandon_snapshot(device), *self._spares.failed(device, self._holders)]
        return out + self._step.failed(device, reason) if self._step is not None else out

    def refused(self, order: StageOrder, run: int) -> list[ForSteps]:
        """Repeat a failed task, or all of the device's unfinished passes if necessary."""
        out = self._abandon_snapshot(order.request.device)
        if of_spare := self._spares.owns(order):
            out += self._spares.failed(order.request.device, self._holders)
        if self._step is None:
            return out
        return out + self._step.refused(order, run, of_spare=of_spare)

    def lost(self, device: int) -> list[ForSteps]:
        """Record that a device left or is draining."""
        self._before_renewal.pop(device, None)
        out = self._abandon_snapshot(device)
        self._spares.forget(device)
        self.holders.leaving.discard(device)
        if self._step is not None:
            if not self._step.ended and device in self._step.devices:
                self.left.append(self._names.get(device, f"device {device}"))
            return out + self._step.lost(device)
        self._stores.pop(device, None)
        return out

    def marked(self, device: int) -> list[ForSteps]:
        """Update the step after the operator marked or unmarked a connected device as their own."""
        if self.any_device:
            return []
        if self._sessions[device].own:
            return self.changed()
        out: list[ForSteps] = []
        if (store := self._stores.get(device)) is not None:
            self._spares.forget(device)
            store.end()
            out += store.take()
        return out + self.lost(device)

    def changed(self) -> list[ForSteps]:
        """Continue the step after a device became available. Reconsider the hot spares."""
        if self._step is None:
            return []
        out, work = self._step.changed(), self._step.work
        if work.resident is None or self._step.ended:
            return out
        self._spares.revise(work, self.able, self._step.devices)
        return out + self._spares.begin(work, self._step.devices)

    def leftovers(self) -> list[str]:
        """Return descriptions of arrays that devices still store, for leak checks."""
        held = [d for d, store in self._stores.items() if store.occupied_bytes]
        return [f"devices {held} hold arrays of stages"] if held else []
