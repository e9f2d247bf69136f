"""Steps by stages, beside the scheduler of tasks: the one under way, and what devices hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from cleave.errors import UsageError, choice_of
from cleave.planner.plan import DeviceRates
from cleave.protocol import messages
from cleave.protocol.messages import Feature
from cleave.scheduler.instructions import ForSteps
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.step import StageStep
from cleave.scheduler.stages.usual_sizes import UsualSizes
from cleave.scheduler.stages.view import StepView
from cleave.scheduler.stages.work import StageOrder, StepWork
from cleave.scheduler.tiles.device_memory import Names

_MODELS_KEPT: Final = 8
"""How many models' usual sizes are remembered, those that were trained last."""


class StagesOn(Enum):
    """Which devices may train whole layers; the values are those of `--stages-on`."""

    OWN = "own"
    """The operator's own, because nothing checks what a stage computes."""

    ANY = "any"
    """All that can."""

    @classmethod
    def of(cls, value: StagesOn | str) -> StagesOn:
        """Read a value of `--stages-on`.

        Raises:
            UsageError: when it is none.
        """
        return choice_of(cls, "--stages-on", value)


class StageRuns:
    """The step by stages that is under way, if any. Every call returns what is to be done.

    Args:
        sessions: all sessions.
        ids: where names of arrays and runs come from.
        any_device: whether devices take part that are not the operator's own.
    """

    def __init__(self, sessions: Mapping[int, Session], ids: Names, *, any_device: bool) -> None:
        self._sessions = sessions
        self._ids = ids
        self._any_device = any_device
        self._stores: dict[int, StageDevice] = {}
        self._step: StageStep | None = None
        self._usual: dict[int, UsualSizes] = {}  # by model
        self._repeated = 0  # in steps before it

    @property
    def repeated(self) -> int:
        """Return how many passes had to be done again because a device was lost, in all steps."""
        step = self._step  # the training thread asks as well
        return self._repeated + (step.repeated if step is not None else 0)

    @property
    def able(self) -> dict[int, DeviceRates]:
        """Return the devices that may train whole layers and be given work, as fast as graphs."""
        return {
            s.id: s.rates.for_graphs
            for s in list(self._sessions.values())  # the training thread asks as well
            if s.rates is not None
            and s.state is DeviceState.READY
            and not s.setbacks.aside
            and Feature.GRAPHS in s.features
            and self._may(s)
        }

    def _may(self, session: Session) -> bool:
        return session.own or self._any_device

    def why_none(self) -> str:
        """Say in a sentence why no device can train whole layers now; empty if one can."""
        if self.able:
            return ""
        here = [s for s in list(self._sessions.values()) if s.rates is not None and not s.measure]
        if not here:
            return "no device is connected"
        count = len(here)
        devices = "1 device is" if count == 1 else f"{count:,} devices are"
        none = f"{devices} connected and {'it may not' if count == 1 else 'none may'}"
        capable = [s for s in here if Feature.GRAPHS in s.features]
        if not capable:
            they = "it cannot" if count == 1 else "none can"
            return (
                f"{none} train whole layers: {they} run graphs, as computers with `cleave join` "
                f"can and browsers, phones and older versions cannot"
            )
        if not any(self._may(s) for s in capable):
            of = "" if len(capable) == count else f"of the {len(capable):,} that can run graphs "
            whose = "it is not yours" if count == 1 else f"{of}none is yours"
            return (
                f"{none} train whole layers: {whose} (pair it with `cleave pair --own`, mark it "
                f"with `cleave devices own NAME`, or start the server with --stages-on any)"
            )
        return (
            f"{none} train whole layers now: those that could are being measured, set aside or "
            f"about to leave"
        )

    def busy(self, device: int) -> bool:
        """Say whether a step is under way in which a device takes part."""
        return self._step is not None and not self._step.ended and device in self._stores

    def occupied_bytes(self, device: int) -> int:
        """Return how much of a device's memory stages use."""
        store = self._stores.get(device)
        return store.occupied_bytes if store is not None else 0

    def view(self) -> StepView | None:
        """Return how far the step is that is under way, or was last; None if there is none."""
        return self._step.view() if self._step is not None else None

    def tasks(self) -> tuple[int, int] | None:
        """Return how many tasks of the step under way are done, and of how many; None for none."""
        step = self._step
        return step.tasks() if step is not None and not step.ended else None

    def begin(self, work: StepWork) -> list[ForSteps]:
        """Start a step, without those of the planned devices that left or may not take part now.

        Raises:
            UsageError: when another one is under way.
        """
        if self._step is not None and not self._step.ended:
            raise UsageError(
                "the fleet does another step by stages: do its backward pass first, or "
                "cleave.restore the model that it is of"
            )
        able = self.able
        stages, slices = (
            [replace(stage, devices=tuple(d for d in stage.devices if d in able)) for stage in them]
            for them in (work.stages, work.slices)
        )
        work = replace(work, stages=stages, slices=slices)
        self._repeated = self.repeated
        usual = self._usual[work.model] = self._usual.pop(work.model, UsualSizes())
        for model in list(self._usual)[:-_MODELS_KEPT]:
            del self._usual[model]
        self._step = StageStep(work, self._stores, lambda: self.able, self._ids, usual)
        return self._step.begin()

    def give(self, batch: int, made: StageArray, after: int | None) -> list[ForSteps]:
        """See `StageStep.give`."""
        return self._step.give(batch, made, after) if self._step is not None else []

    def resolve(self, right: bool, reason: str) -> list[ForSteps]:
        """See `StageStep.resolve`."""
        return self._step.resolve(right=right, reason=reason) if self._step is not None else []

    def withdraw(self) -> list[ForSteps]:
        """End the step, if one is under way; devices keep what the next one can use."""
        if self._step is not None:
            self._step.withdraw()
        self._repeated, self._step = self.repeated, None
        return []

    def end(self) -> list[ForSteps]:
        """End the step, if one is under way, and have devices forget what they hold for it."""
        out = self.withdraw()
        for store in self._stores.values():
            store.end()
            out += store.take()
        self._stores.clear()
        return out

    def answered(
        self, order: StageOrder, answer: messages.Computed | messages.Result
    ) -> list[ForSteps]:
        """Take a device's answer to an order of a step."""
        if self._step is None:
            return []
        if isinstance(answer, messages.Computed):
            return self._step.computed(order, answer.id)
        return self._step.fetched(order, answer.id, answer.payload)

    def failed(self, device: int, reason: str) -> list[ForSteps]:
        """Note that a device gets no more work in this step."""
        return self._step.failed(device, reason) if self._step is not None else []

    def refused(self, order: StageOrder, run: int) -> list[ForSteps]:
        """See `StageStep.refused`."""
        return self._step.refused(order, run) if self._step is not None else []

    def lost(self, device: int) -> list[ForSteps]:
        """Note that a device is gone, or is to get nothing new."""
        if self._step is not None:
            return self._step.lost(device)
        self._stores.pop(device, None)
        return []

    def marked(self, device: int) -> list[ForSteps]:
        """Note that a connected device became the operator's own, or is that no more."""
        if self._any_device:
            return []
        if self._sessions[device].own:
            return self.changed()
        out: list[ForSteps] = []
        if (store := self._stores.get(device)) is not None:
            store.end()
            out += store.take()
        return out + self.lost(device)

    def changed(self) -> list[ForSteps]:
        """Note that a device came."""
        return self._step.changed() if self._step is not None else []

    def leftovers(self) -> list[Any]:
        """List what is still kept, in sentences."""
        held = [d for d, store in self._stores.items() if store.occupied_bytes]
        return [f"devices {held} hold arrays of stages"] if held else []
