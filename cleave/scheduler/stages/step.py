"""One training step by stages: the assignment of micro-batch passes to devices.

The module has no I/O. Micro-batches go through the stages independently. The PS keeps the input and
the output's gradient of every micro-batch and stage until the step ends. From these, lost work is
computed again. Sums are exact: a *generation* of sums is used whole or not at all. Each micro-batch
is in exactly one used generation of each stage, or of each part of a divided stage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from cleave import arrays
from cleave import graph_names as names
from cleave.arrays import DType
from cleave.planner.plan import DeviceRates
from cleave.planner.stages import rules as rules
from cleave.planner.stages.model import NOTHING_KEPT, Keep
from cleave.planner.stages.rules import Pass
from cleave.scheduler.instructions import ForSteps, Note, TellStep
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import Generation, StageDevice, arrays_of
from cleave.scheduler.stages.outcomes import (
    GradientWanted,
    InputWanted,
    OutputReady,
    SlicesBack,
    SlicesReady,
    StageRecord,
    StepFailed,
    StepResult,
    SumsRecord,
    Suspect,
)
from cleave.scheduler.stages.state import StageState
from cleave.scheduler.stages.takeover import Candidate, Takeover, all_sums, soonest, soonest_parts
from cleave.scheduler.stages.usual_sizes import Place, Returned, UsualSizes
from cleave.scheduler.stages.view import StepView, UnitCount
from cleave.scheduler.stages.work import (
    StageGraph,
    StageOrder,
    StepWork,
    Unit,
    UnitKind,
)
from cleave.scheduler.tiles.device_memory import Names

MAX_FAILURES: Final = 4
"""Number of device failures after which a step ends."""


class StageStep:
    """Assigns the work of one step by stages. Every call returns instructions.

    Args:
        work: the step.
        stores: by device, its arrays; other devices get a store when they are first used.
        present: returns the devices that may be given work.
        ids: the source of array and run ids.
        usual: usual magnitudes of returned values for this model.
    """

    def __init__(
        self,
        work: StepWork,
        stores: dict[int, StageDevice],
        present: Callable[[], Mapping[int, DeviceRates]],
        ids: Names,
        usual: UsualSizes | None = None,
    ) -> None:
        self.work = work
        self.ended = False
        self.failures = 0
        self.repeated = 0  # micro-batch passes that must be repeated
        self._stores = stores
        self._present = present
        self._ids = ids
        self._stages = [
            StageState(plan, len(work.x), frozenset(all_sums(work, plan)), list(plan.devices))
            for plan in work.planned
        ]
        # In layer order; slices of the loss and parts of divided stages follow.
        self._last = self._stages[len(work.stages) - 1]
        self._slices = self._stages[len(work.stages) :]
        self._units: set[Unit] = set()
        self._taking: dict[Unit, Generation] = {}
        self._went_back: set[int] = set()  # devices whose last unit was a backward pass
        self._unit_s: dict[int, float] = {}  # by device, for its first stage
        self._failed: dict[int, str] = {}  # devices that get no more work in this step, and why
        self._losses: dict[int, Any] = {}
        self._dx: dict[int, Any] = {}
        self._out: list[ForSteps] = []
        self._noted = False  # whether missing devices were reported
        self._usual = usual or UsualSizes()
        self._suspects: deque[Unit] = deque()  # the caller examines the first
        self._diverged = False  # non-finite values are correct in this step
        self._stages[0].x = dict(enumerate(work.x))

    # --- events ---

    def begin(self) -> list[ForSteps]:
        """Start the step: free memory, request the first passes, and preload later stages."""
        wanted: dict[int, set[Any]] = {device: set() for device in self._stores}
        for stage in self._stages:
            for device in stage.devices:
                wanted.setdefault(device, set()).update(self._arrays_of(stage, device))
        for device, arrays_wanted in wanted.items():
            self._store(device).end(arrays_wanted)
            self._out += self._store(device).take()
        out = self._go_on()
        # Later stages load their parameters while the first one computes.
        for stage in self._stages[1:]:
            for device in stage.devices:
                self._store(device).load(self._arrays_of(stage, device))
                out += self._store(device).take()
        return out

    def computed(self, order: StageOrder, run: int) -> list[ForSteps]:
        """Record that a device ran a graph."""
        return self._answered(order, run)

    def fetched(self, order: StageOrder, run: int, payload: Any) -> list[ForSteps]:
        """Record an array that a device returned."""
        order.unit.found[order.name] = payload
        values = isinstance(payload, bytes | bytearray | memoryview)  # else emulated
        if values and order.unit in self._units:
            size = arrays.largest(payload, DType(order.out))
            order.unit.note_size(self._place(order), size)
        return self._answered(order, run)

    def resolve(self, *, right: bool, reason: str = "") -> list[ForSteps]:
        """Resolve the first `Suspect`.

        Args:
            right: whether the numbers are correct; if not, another device computes them.
            reason: what is wrong with the numbers.
        """
        if not self._suspects:  # the step has ended
            return []
        unit = self._suspects.popleft()
        out: list[ForSteps] = []
        if unit in self._units and right:
            self._accept(unit, repeated=True)
        elif unit in self._units:
            out = self.failed(unit.device, reason)
        while self._suspects and not self._stands_out(self._suspects[0]):
            self._accept(self._suspects.popleft())
        if self._suspects:
            self._tell_suspect()
        return out + self._go_on()

    def failed(self, device: int, reason: str) -> list[ForSteps]:
        """Record that a device failed: it gets no more work in this step."""
        if device in self._failed:
            return []
        self.failures += 1
        self._failed[device] = reason
        if (store := self._stores.get(device)) is not None:
            store.start_over()
            self._out += store.take()
        return self.lost(device)

    def refused(self, order: StageOrder, run: int) -> list[ForSteps]:
        """Repeat a refused order or, if necessary, all of the device's work but sums at the PS."""
        unit = order.unit
        store = self._stores.get(unit.device)
        if store is None:
            return []
        if unit not in self._units:  # the unit's step has ended
            store.answered(run)
            return [*store.take()]
        if store.ask_again(run, unit):
            return [*store.take()]
        device, present = unit.device, self._present()
        store.be_careful(present[device].memory_bytes if device in present else 0)
        stages = [stage for stage in self._stages if device in stage.devices]
        store.start_over({array for one in stages for array in self._arrays_of(one, device)})
        self._out += store.take()
        self._lose_work(device)
        return self._go_on()

    def lost(self, device: int) -> list[ForSteps]:
        """Record that a device left, and that every array it held is lost."""
        self._stores.pop(device, None)
        if self.ended:
            return []
        left = [stage for stage in self._stages if device in stage.devices]
        self._lose_work(device)
        for stage in left:
            stage.devices.remove(device)
        for stage in left:
            if stage.has_landed:
                continue
            if stage.devices or stage.generations:
                self._reinforce(stage)
            else:
                self._divide(stage)
        return self._go_on()

    def _lose_work(self, device: int) -> None:
        """Discard the requests to a device and its arrays, so that the work is repeated."""
        for unit in [unit for unit in self._units if unit.device == device]:
            self._units.discard(unit)
            self._taking.pop(unit, None)
            self.repeated += unit.kind is not UnitKind.SUMS
            if unit.kind is UnitKind.FORWARD:
                self._stages[unit.stage].forward.discard(unit.batch)
        self.repeated += sum(stage.forget(device) for stage in self._stages)

    def changed(self) -> list[ForSteps]:
        """Continue after a change of the fleet: a stage may wait for a device that joined."""
        return [] if self.ended else self._go_on()

    def give(self, batch: int, made: StageArray, after: int | None = None) -> list[ForSteps]:
        """Record an array that the training thread computed for a micro-batch.

        Args:
            made: the gradient of its last output. With slices of the loss on devices, first the
                log-sum-exp over the whole vocabulary. With `after`, first the next stage's input,
                then the gradient of stage `after`'s output.
            after: the stage followed by layers on the PS, if they made the array.
        """
        if self.ended:
            return []
        if after is not None:
            following = self._stages[after + 1]
            to = self._stages[after].dy if batch in following.x else following.x
            to[batch] = made
        elif any(batch not in stage.dy for stage in self._slices):
            for stage in self._slices:
                stage.dy[batch] = made
        else:
            self._last.dy[batch] = made
        return self._go_on()

    def withdraw(self) -> list[ForSteps]:
        """End the step because nobody waits for it."""
        self.ended = True
        self._units.clear()
        self._suspects.clear()
        return []

    def view(self) -> StepView:
        """Return a snapshot of the step's progress."""
        asked = UnitCount(self._units)
        stages = tuple(
            asked.stage(number, s.plan, s.devices, len(s.y), s.generations)
            for number, s in sorted(enumerate(self._stages), key=lambda each: each[1].plan.first)
        )
        return StepView(len(self.work.x), self.ended, self.repeated, stages)

    def tasks(self) -> tuple[int, int]:
        """Return the number of completed tasks and of all tasks. Any thread may call this.

        The tasks are the micro-batch passes through stages, plus one per stage for its sums.
        """
        counts = [stage.tasks() for stage in tuple(self._stages)]
        return sum(done for done, _ in counts), sum(of for _, of in counts)

    def validate(self) -> None:
        """Check that the state is consistent.

        Raises:
            AssertionError: the state is inconsistent; the message names the problem.
        """
        for number, stage in enumerate(self._stages):
            stage.validate()
            for unit in self._units:
                if unit.stage == number and unit.kind is not UnitKind.SUMS:
                    known = stage.forward if unit.kind is UnitKind.FORWARD else stage.backward
                    if unit.batch not in known:
                        raise AssertionError(f"{unit.kind.value} of {unit.batch} is not noted")

    # --- answers ---

    def _answered(self, order: StageOrder, run: int) -> list[ForSteps]:
        """Handle an answer to an order; the last answer finishes its unit."""
        unit = order.unit
        unit.answers.pop(run, None)
        store = self._stores.get(unit.device)
        if store is None:
            return []
        store.answered(run)
        if unit not in self._units:
            return [*store.take()]
        if unit.rest:
            store.more_sums(self.work, unit)
            return [*store.take()]
        if unit.answers:
            return [*store.take()]
        if not self._stands_out(unit):
            self._accept(unit)
        else:
            self._suspects.append(unit)
            if len(self._suspects) == 1:
                self._tell_suspect()
        self._out += store.take()
        return self._go_on()

    def _place(self, order: StageOrder) -> Place:
        """Return the place whose usual magnitude a fetched array is compared with."""
        unit, plan = order.unit, self._stages[order.unit.stage].plan
        if unit.kind is UnitKind.SUMS:
            layer, parameter, _ = order.name
            return Returned.SUM, parameter, layer
        slice = "" if plan.slice is None else plan.named
        match order.name[0] if isinstance(order.name, tuple) else order.name:
            case names.Y:
                return Returned.OUTPUT, slice, plan.stop
            case names.LOSS:
                return Returned.LOSS, "", 0
            case _:
                return Returned.GRADIENT, slice, plan.first

    def _stands_out(self, unit: Unit) -> dict[Place, float]:
        """Return the unusual magnitudes of a unit's results, by place."""
        if self._diverged or unit not in self._units:
            return {}
        return {p: size for p, size in unit.sizes.items() if not self._usual.explains(p, size)}

    def _tell_suspect(self) -> None:
        unit = self._suspects[0]
        stage, batches = self._stages[unit.stage], {unit.batch}
        y: dict[int, Any] = {}
        dx: dict[int, Any] = {}
        sums = []
        if unit.kind is UnitKind.SUMS:
            batches = self._taking[unit].batches
            sums = [SumsRecord(unit.device, frozenset(batches), dict(unit.found))]
        elif unit.kind is UnitKind.FORWARD:
            y = {unit.batch: unit.fetched(names.Y)}
        else:
            dx = {unit.batch: unit.fetched(names.DX)}
        record = StageRecord(
            stage.plan,
            {batch: stage.x[batch] for batch in batches},
            {batch: stage.dy[batch] for batch in batches if batch in stage.dy},
            y,
            dx,
            dict.fromkeys(y, unit.device),
            dict.fromkeys(dx, unit.device),
            sums,
        )
        losses = {unit.batch: unit.found[names.LOSS]} if names.LOSS in unit.found else {}
        suspect = Suspect(unit.device, record, losses, self._stands_out(unit))
        self._out.append(TellStep(suspect, self.work))

    def _accept(self, unit: Unit, *, repeated: bool = False) -> None:
        """Use a unit's results, unless another device was asked for them meanwhile.

        Args:
            repeated: whether the caller computed the same results.
        """
        if unit not in self._units:
            return
        self._units.discard(unit)
        for place, size in unit.sizes.items():
            if math.isfinite(size):
                self._usual.saw(place, size, repeated=repeated)
            else:  # training diverges, or the model's own numbers are not finite
                self._diverged = True
        self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        stage = self._stages[unit.stage]
        match unit.kind:
            case UnitKind.FORWARD:
                if unit.kept:
                    stage.kept[unit.batch] = unit.device, unit.kept
                self._passed(unit, unit.fetched(names.Y))
            case UnitKind.BACKWARD | UnitKind.LAST:
                self._added(stage, unit)
            case UnitKind.SUMS:
                generation = self._taking.pop(unit)
                generation.found, generation.landed = unit.found, True
                store = self._store(unit.device)
                store.drop(generation.sums.values())
                self._out += store.take()

    def _passed(self, unit: Unit, payload: Any) -> None:
        """Record a forward pass; its output goes to the next stage, or to the PS for the loss."""
        stage = self._stages[unit.stage]
        is_new = unit.batch not in stage.y
        if is_new:
            stage.y[unit.batch], stage.forward_by[unit.batch] = payload, unit.device
        if stage.plan.slice is not None:
            if is_new and all(unit.batch in one.y for one in self._slices):
                found = [one.y[unit.batch] for one in self._slices]
                self._out.append(TellStep(SlicesReady(unit.batch, found), self.work))
            return
        if stage is self._last and self._slices:
            x = self._activation(unit.batch, payload)
            for one in self._slices:
                one.x.setdefault(unit.batch, x)
            return
        if stage is self._last:
            self._out.append(TellStep(OutputReady(unit.batch, payload), self.work))
            return
        if unit.stage in self.work.ps_after:
            if is_new:
                wanted = InputWanted(unit.stage, unit.batch, payload)
                self._out.append(TellStep(wanted, self.work))
            return
        following = self._stages[unit.stage + 1]
        if unit.batch not in following.x:  # may be set by an earlier pass
            following.x[unit.batch] = self._activation(unit.batch, payload)

    def _added(self, stage: StageState, unit: Unit) -> None:
        """Record a backward pass in its generation; dx goes to the previous stage."""
        for generation in stage.generations:
            if generation.device == unit.device and unit.batch in generation.asked:
                generation.asked.discard(unit.batch)
                generation.batches.add(unit.batch)
        if unit.kind is UnitKind.LAST:
            self._losses.setdefault(unit.batch, unit.found[names.LOSS])
        dx = unit.fetched(names.DX)
        if dx is None:
            return
        is_new = unit.batch not in stage.dx
        if is_new:
            stage.dx[unit.batch], stage.backward_by[unit.batch] = dx, unit.device
        if stage.plan.slice is not None:
            if is_new and all(unit.batch in one.dx for one in self._slices):
                found = [one.dx[unit.batch] for one in self._slices]
                self._out.append(TellStep(SlicesBack(unit.batch, found), self.work))
        elif unit.stage == 0:
            self._dx.setdefault(unit.batch, dx)
        elif unit.stage - 1 in self.work.ps_after:
            if is_new:
                wanted = GradientWanted(unit.stage - 1, unit.batch, dx)
                self._out.append(TellStep(wanted, self.work))
        elif unit.batch not in self._stages[unit.stage - 1].dy:
            self._stages[unit.stage - 1].dy[unit.batch] = self._activation(unit.batch, dx)

    def _activation(self, batch: int, payload: Any) -> StageArray:
        return StageArray(self.work.tokens[batch], self.work.width, self.work.dtype, payload)

    # --- scheduling ---

    def _go_on(self) -> list[ForSteps]:
        """Request all passes that can run now, and report the end of the step."""
        if not self.ended and self.failures >= MAX_FAILURES:
            self._end_failed("too many devices failed")
        while not self.ended and self._ask_once():
            pass
        if not self.ended:
            self._take_sums()
            self._finish_step()
        out, self._out = self._out, []
        return out

    def _ask_once(self) -> bool:
        """Give each device with a turn one unit; return whether any device got one."""
        self._replace_missing()
        if self.ended:
            return False
        busy: dict[int, int] = {}
        for unit in self._units:
            busy[unit.device] = busy.get(unit.device, 0) + 1
        asked = False
        for device in self._turns(busy):
            asked |= self._ask(device)
        return asked

    def _turns(self, busy: Mapping[int, int]) -> list[int]:
        """Return the devices that may take another unit, in the order of `rules.turn`."""
        able = {d for stage in self._stages for d in stage.devices}
        if not able <= self._unit_s.keys():
            self._time_units()
        free = [device for device in able if rules.may_have_another(busy.get(device, 0))]
        return sorted(free, key=lambda d: rules.turn(busy.get(d, 0), self._unit_s[d], d))

    def _time_units(self) -> None:
        """Predict how long a unit of its stage takes each device."""
        present, tokens = self._present(), max(self.work.tokens)
        activation = max(x.nbytes for x in self.work.x)
        for stage in self._stages:
            flops = tokens * Takeover(self.work, stage.plan, stage.sums).flops
            for device in stage.devices:
                rates = present.get(device)
                unit_s = rates.unit_s(activation, flops) if rates is not None else math.inf
                self._unit_s.setdefault(device, unit_s)

    def _ask(self, device: int) -> bool:
        """Request a ready unit from a device; return whether one was ready."""
        mine = [(n, s) for n, s in enumerate(self._stages) if device in s.devices]
        mine.sort(key=lambda each: (each[1].passes, each[0]), reverse=True)
        backward = _first((n, stage, stage.next_backward(device)) for n, stage in mine)
        forward = _first((n, stage, stage.next_forward()) for n, stage in mine)
        direction = rules.next_pass(
            forward=forward is not None,
            backward=backward is not None,
            last_was_backward=device in self._went_back,
        )
        if direction is Pass.BACKWARD and backward is not None:
            self._went_back.add(device)
            number, stage, batch = backward
            self._ask_backward(number, stage, device, batch)
        elif direction is Pass.FORWARD and forward is not None:
            self._went_back.discard(device)
            number, stage, batch = forward
            self._ask_forward(number, stage, device, batch)
        return direction is not None

    def _ask_forward(self, number: int, stage: StageState, device: int, batch: int) -> None:
        keep = self._next_kept(stage, device)
        unit = self._unit(UnitKind.FORWARD, number, batch, device, keep)
        stage.forward.add(batch)
        store = self._store(device)
        ask = store.forward if stage.plan.slice is None else store.slice_forward
        ask(self.work, stage.plan, unit, stage.x[batch])
        self._out += store.take()

    def _next_kept(self, stage: StageState, device: int) -> Keep:
        """Return what a device keeps of its next micro-batch for the backward pass."""
        kept = [
            layers for s in self._stages for place, layers in s.kept.values() if place == device
        ]
        kept += [unit.kept for unit in self._units if unit.device == device and unit.kept]
        activations = sum(len(layers[0]) > 1 for layers in kept if layers)
        return rules.next_kept(
            self.work.kept_batches.get(device, NOTHING_KEPT),
            len(kept) - activations,
            activations,
            planned=device in stage.plan.devices,
        )

    def _ask_backward(self, number: int, stage: StageState, device: int, batch: int) -> None:
        """Request the backward pass of a micro-batch, with the loss in the last stage."""
        generation = stage.generation_on(device)
        generation.asked.add(batch)
        stage.backward.add(batch)
        store = self._store(device)
        dx_wanted = stage.passes and batch not in stage.dx
        if stage.plan.loss:
            unit = self._unit(UnitKind.LAST, number, batch, device, self._next_kept(stage, device))
            x = stage.x[batch]
            store.last(self.work, stage.plan, unit, generation, x, dx_wanted=dx_wanted)
        else:
            unit = self._unit(UnitKind.BACKWARD, number, batch, device)
            kept = stage.kept.pop(batch, None)
            given = stage.x[batch] if kept is None else kept[1]
            dy = stage.dy[batch]
            ask = store.backward if stage.plan.slice is None else store.slice_backward
            ask(self.work, stage.plan, unit, generation, given, dy, dx_wanted=dx_wanted)
        self._out += store.take()

    def _unit(
        self, kind: UnitKind, stage: int, batch: int, device: int, keep: Keep = Keep.NOTHING
    ) -> Unit:
        unit = Unit(kind, stage, batch, device, keep)
        self._units.add(unit)
        return unit

    def _take_sums(self) -> None:
        """Request the sums of stages that every micro-batch has passed."""
        for number, stage in enumerate(self._stages):
            left = stage.left
            for generation in stage.generations:
                awaited = not left and self._is_waited_for(generation.device)
                if generation.taken or not rules.may_take_sums(left, gradients_awaited=awaited):
                    continue
                generation.taken = True
                if not generation.sums:
                    generation.landed = True
                    continue
                unit = self._unit(UnitKind.SUMS, number, -1, generation.device)
                self._taking[unit] = generation
                store = self._store(generation.device)
                store.sums(self.work, unit, generation, stage.sums)
                self._out += store.take()

    def _is_waited_for(self, device: int) -> bool:
        """Return whether an earlier stage still needs gradients from a device."""
        return any(
            stage.passes and device in stage.devices and len(stage.dx) < len(self.work.x)
            for stage in self._stages[1:]
        )

    def _finish_step(self) -> None:
        """End the step with its result once the sums of all stages are at the PS."""
        if not all(stage.has_landed for stage in self._stages):
            return
        gradients: dict[tuple[int, str], list[list[Any]]] = {}
        for stage in self._stages:
            # Use a fixed order, independent of which device was first.
            for generation in sorted(stage.generations, key=lambda g: (g.device, min(g.batches))):
                parts: dict[tuple[int, str], list[Any]] = {}
                for layer, name, _ in sorted(generation.found):
                    parts.setdefault((layer, name), [])
                for layer, name, first in sorted(generation.found):
                    parts[layer, name].append(generation.found[layer, name, first])
                for key, part in parts.items():
                    gradients.setdefault(key, []).append(part)
        records = [stage.record for stage in self._stages]
        self._end(StepResult(self._losses, self._dx, gradients, records))

    def _end_failed(self, why: str) -> None:
        reasons = "; ".join(f"device {d}: {reason}" for d, reason in self._failed.items())
        self._end(StepFailed(f"{why}: {reasons}"))

    def _end(self, outcome: StepResult | StepFailed) -> None:
        self.ended = True
        self._units.clear()
        self._suspects.clear()
        self._out.append(TellStep(outcome, self.work))

    # --- devices ---

    def _replace_missing(self) -> None:
        """Assign devices to every unfinished stage that lost all its devices."""
        missing = [s for s in self._stages if not s.devices and not s.has_landed]
        if not missing:
            return
        for stage in missing:
            self._reinforce(stage)
        if self._failed and not self._present().keys() - self._failed.keys():
            self._end_failed("no device is left that did not fail")
            return
        if not self._noted and not all(stage.devices for stage in missing):
            self._noted = True
            what = ", ".join(s.plan.named for s in missing)
            self._out.append(Note(f"{what} wait for a device that can run them"))

    def _reinforce(self, stage: StageState) -> None:
        """Add the devices that finish a stage's remaining work soonest."""
        chosen = soonest(self._candidates(stage), stage.left)
        stage.devices = sorted({*stage.devices, *chosen})

    def _divide(self, stage: StageState) -> None:
        """Reassign a stage that is wholly lost, in the number of parts that finishes soonest."""
        groups = soonest_parts(
            lambda parts: self._candidates(stage, parts), stage.left, max(1, len(stage.sums))
        )
        if not groups:
            return
        takeover = Takeover(self.work, stage.plan, stage.sums)
        stage.sums, *others = takeover.divided(len(groups))
        stage.devices = groups[0]
        for sums, devices in zip(others, groups[1:], strict=True):
            self._stages.append(stage.part(sums, devices))

    def _candidates(self, stage: StageState, parts: int = 1) -> list[Candidate]:
        """Return the candidates for taking over a stage; empty if no device can work."""
        able = {d: rates for d, rates in self._present().items() if d not in self._failed}
        if not able:
            return []
        self._noted = False
        takeover = Takeover(self.work, stage.plan, stage.sums)
        fitting = [
            rates
            for d, rates in able.items()
            if d in stage.devices or takeover.fits(rates, self._stores.get(d))
        ]
        if not fitting:  # the device with the most memory has to try
            fitting = [max(able.values(), key=lambda r: (r.memory_bytes, -r.device))]
        return [
            takeover.candidate(
                r, self._stores.get(r.device), self._own_s(r, stage), parts, stage.returned
            )
            for r in fitting
        ]

    def _own_s(self, rates: DeviceRates, besides: StageState) -> float:
        """Return the seconds a device still needs for its share of other stages."""
        total_s = 0.0
        for stage in self._stages:
            if stage is not besides and rates.device in stage.devices:
                takeover = Takeover(self.work, stage.plan, stage.sums)
                each_s = takeover.batch_s(rates, stage.returned)
                total_s += stage.left / len(stage.devices) * each_s
                total_s += self._sums_left(stage, rates.device) * takeover.sums_s(rates)
        return total_s

    def _sums_left(self, stage: StageState, device: int) -> float:
        """Return the share of a stage's sums that a device still has to return, at most 1."""
        if stage.has_landed:
            return 0.0
        for unit, generation in self._taking.items():
            if generation.device == device and generation in stage.generations:
                left = len(unit.answers) + len(unit.rest)
                return left / (left + len(unit.found))
        return 1.0

    def _arrays_of(self, stage: StageState, device: int) -> Iterator[StageArray | StageGraph]:
        kept = self.work.kept_batches.get(device, NOTHING_KEPT)
        return arrays_of(self.work, stage.plan, kept)

    def _store(self, device: int) -> StageDevice:
        if device not in self._stores:
            self._stores[device] = StageDevice(device, self._ids)
        return self._stores[device]


def _first(
    found: Iterable[tuple[int, StageState, int | None]],
) -> tuple[int, StageState, int] | None:
    """Return the first stage that has a micro-batch, with its number and the micro-batch."""
    return next(((n, stage, b) for n, stage, b in found if b is not None), None)
