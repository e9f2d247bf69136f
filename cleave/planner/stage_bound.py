"""Whether a step by stages may end by some time: a bound that is found without simulating it.

It is never stricter than `stage_events`. A stage cannot begin before the first micro-batch has
passed the stages before it, each on the device that is soonest done; and after its last one that
has to pass the others on its way back, and gradients are sent. In between, a stage's devices have
to do all micro-batches: links and processors do one thing after another, and a device has a few
units at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cleave.planner.stage_events import UNITS_AT_ONCE, StageSimulation
from cleave.planner.stage_state import Errand, SimulatedDevice, SimulatedStage
from cleave.planner.stages import Keep

_ROUNDING: Final = 1e-6
"""Relative: what rounded bytes and sums may add to a bound."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one of a link or processor does for a unit.

    Attributes:
        busy_s: how long.
        before_s, after_s: how long a unit takes before and after that at least.
    """

    busy_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a forward or backward pass takes on an idle device.

    Attributes:
        alone_s: from when it is given out until it is back.
        parts: what its downlink, its processor and its uplink do.
    """

    alone_s: float
    parts: tuple[_Part, _Part, _Part]

    @classmethod
    def of(cls, errand: Errand, latency_s: float) -> _Pass:
        """Return what a unit takes."""
        received_s = computed_s = sent_s = made_s = computes_s = 0.0
        until_made_s = math.inf
        for message in errand.sent:
            received_s += message.passes_s
            computed_s = max(computed_s, received_s + latency_s) + message.computes_s
            computes_s += message.computes_s
            if message.answered:
                until_made_s = min(until_made_s, computed_s)
                made_s = computed_s
                for each_s in errand.sends_s:
                    sent_s = made_s = max(made_s, sent_s) + each_s
        first, last = errand.sent[0], errand.sent[-1]
        after_s = sum(errand.sends_s) + latency_s
        return cls(
            made_s + latency_s,
            (
                _Part(received_s, 0.0, latency_s + last.computes_s + after_s),
                _Part(computes_s, first.passes_s + latency_s, after_s),
                _Part(errand.y_s, until_made_s, latency_s),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Units:
    """Units of one kind, or of several, as if each took as little of everything as any of them.

    Attributes:
        alone_s: from when one is given out until it is back.
        parts: by link or processor, how long it is busy for one; and how long the first and the
            last of several take before and after that.
    """

    alone_s: float
    parts: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, *passes: _Pass) -> _Units:
        """Return units that are any of these passes."""
        return cls(
            min(one.alone_s for one in passes),
            tuple(
                (
                    min(part.busy_s for part in parts),
                    min(part.before_s for part in parts) + min(part.after_s for part in parts),
                )
                for parts in zip(*(one.parts for one in passes), strict=True)
            ),
        )

    def most(self, left_s: float) -> float:
        """Return how many a device may do in a time."""
        if left_s < self.alone_s:
            return 0
        most = UNITS_AT_ONCE * math.floor(left_s / self.alone_s * (1 + _ROUNDING))
        for busy_s, around_s in self.parts:
            if busy_s and (left_s - around_s) * (1 + _ROUNDING) < most * busy_s:
                most = math.floor((left_s - around_s) / busy_s * (1 + _ROUNDING))
        return max(0, most)


@dataclass(frozen=True, slots=True)
class _Member:
    """A device of a stage.

    Attributes:
        loaded_s: when all weights are there.
        passes: forward and backward, with as much kept as may be; only the latter where the loss is
            there.
        kinds: units of each pass.
        both: units of any.
        gradients_s: how long its gradients take.
    """

    loaded_s: float
    passes: tuple[_Pass, ...]
    kinds: tuple[_Units, ...]
    both: _Units
    gradients_s: float


def _most_units(
    members: Sequence[_Member], kind: int | None, begin_s: float, end_s: float
) -> float:
    """Return how many units devices may do from one time until another.

    Args:
        members: the devices.
        kind: of which pass; None for all.
        begin_s, end_s: the times.
    """
    total = 0.0
    for member in members:
        units = member.both if kind is None else member.kinds[kind]
        left_s = end_s - (begin_s if begin_s > member.loaded_s else member.loaded_s)
        total += units.most(left_s)
    return total


def _may_do_all(
    members: Sequence[_Member], ahead: float, back: float, begin_s: float, end_s: float
) -> bool:
    """Say whether each kind of link or processor may do so many passes forward and backward.

    Forward and backward passes of one may be on different devices. So what is backward counts as
    the least multiple of what is forward that it is on any of them.
    """
    for number in range(3):
        done, least = 0.0, math.inf
        for member in members:
            first_s, last_s = (one.parts[number].busy_s for one in member.passes)
            if not first_s:
                break
            left_s = end_s - max(begin_s, member.loaded_s) - member.both.parts[number][1]
            done += max(0.0, left_s) / first_s
            least = min(least, last_s / first_s)
        else:
            if done * (1 + _ROUNDING) < max(0.0, ahead) + max(0.0, back) * least:
                return False
    return True


def _forward_s(members: Sequence[_Member]) -> float:
    """Return how long a forward pass takes at least; none where all is done backward."""
    return min(m.passes[0].alone_s if len(m.passes) > 1 else 0.0 for m in members)


def _back_s(members: Sequence[_Member]) -> float:
    """Return how long a backward pass takes at least."""
    return min(member.passes[-1].alone_s for member in members)


class StepBound:
    """When the parts of a step can begin, and how long it goes on after them, at least.

    Args:
        run: a step that is not simulated yet.
    """

    def __init__(self, run: StageSimulation) -> None:
        self._run = run
        self._batches = len(run.model.tokens)
        self._stages = [self._members(stage) for stage in run.stages]
        self._slices = [self._members(stage) for stage in run.slices]
        # Until the first micro-batch is at each stage, and then at what follows them.
        self._arrives_s = [0.0]
        for members in self._stages:
            begin_s = self._arrives_s[-1]
            if len(members[0].passes) > 1:
                begin_s = min(max(begin_s, m.loaded_s) + m.passes[0].alone_s for m in members)
            self._arrives_s.append(begin_s)
        # That is the loss on the PS, or slices of it forward and then backward.
        at_ps = not run.slices and not run.stages[-1].plan.loss
        self._ps_s = run.loss_s * min(run.model.tokens) if at_ps else 0.0
        self._summarize_s = max((_forward_s(members) for members in self._slices), default=0.0)
        self._differentiate_s = max((_back_s(members) for members in self._slices), default=0.0)
        # From when a micro-batch has passed each stage backward.
        self._ends_s: list[float] = []
        for number, members in enumerate(self._stages):
            end_s = min(m.gradients_s for m in members)
            if number:
                end_s = max(end_s, _back_s(self._stages[number - 1]) + self._ends_s[-1])
            self._ends_s.append(end_s)

    def may_end_by(self, limit_s: float, now_s: float = 0.0) -> bool:
        """Say whether the step may end by a time; if not, its simulation ends later.

        Args:
            limit_s: that time.
            now_s: until when it is simulated.
        """
        limit_s *= 1 + _ROUNDING
        known_s = self._arrives_s[-1]
        end_s = limit_s - _back_s(self._stages[-1]) - self._ends_s[-1]  # then all losses are known
        if known_s + self._batches * self._ps_s > end_s:
            return False
        for stage, members in zip(self._run.slices, self._slices, strict=True):
            between_s, summarized_s = known_s + self._summarize_s, end_s - self._differentiate_s
            begin_s, back_s = max(now_s, known_s), max(now_s, between_s)
            if not self._may_pass(stage, members, begin_s, back_s, summarized_s, end_s):
                return False
        loss_s = self._ps_s + self._summarize_s + self._differentiate_s
        back_s, ahead_end_s = known_s + loss_s, end_s - loss_s
        for stage in reversed(self._run.stages):
            members = self._stages[stage.number]
            begin_s = max(now_s, self._arrives_s[stage.number])
            end_s = limit_s - self._ends_s[stage.number]
            if not self._may_pass(stage, members, begin_s, max(now_s, back_s), ahead_end_s, end_s):
                return False
            back_s += _back_s(members)
            ahead_end_s -= _forward_s(members)
        return True

    def _may_pass(
        self,
        stage: SimulatedStage,
        members: Sequence[_Member],
        begin_s: float,
        back_s: float,
        ahead_end_s: float,
        end_s: float,
    ) -> bool:
        """Say whether devices may do what is left of a stage; what is under way counts as done.

        Args:
            stage: the stage.
            members: the devices.
            begin_s, back_s: from when a micro-batch may be given out, forward and backward.
            ahead_end_s, end_s: by when the last one has to be back, forward and backward.
        """
        under_way = sum(device.under_way for device in stage.devices)
        back = self._batches - stage.passed - under_way
        if _most_units(members, -1, back_s, end_s) < back:
            return False
        if len(members[0].passes) == 1:
            return True
        ahead = self._batches - stage.went - under_way
        if _most_units(members, 0, begin_s, ahead_end_s) < ahead:
            return False
        both = _most_units(members, None, begin_s, end_s)
        return both >= ahead + back + under_way and _may_do_all(
            members, ahead, back, begin_s, end_s
        )

    def _members(self, stage: SimulatedStage) -> list[_Member]:
        return [self._member(stage, device) for device in stage.devices]

    def _member(self, stage: SimulatedStage, device: SimulatedDevice) -> _Member:
        run, rates, latency_s = self._run, device.rates, device.latency_s
        tokens, allowed = min(run.model.tokens), device.allowed
        keep = Keep.NOTHING
        if allowed.activations:
            keep = Keep.ACTIVATIONS
        elif allowed.inputs:
            keep = Keep.INPUTS

        def one(*, forward: bool) -> _Pass:
            errand = run.errand(stage, device, tokens, forward=forward, keep=keep)
            return _Pass.of(errand, latency_s)

        directions = (False,) if stage.plan.loss else (True, False)
        passes = tuple(one(forward=forward) for forward in directions)
        loaded = sum(sum(run.weights(each, device)) for each, _ in device.stages)
        gradients = sum(run.gradients(stage, device))
        return _Member(
            loaded / rates.downlink_bytes_per_s,
            passes,
            tuple(_Units.of(each) for each in passes),
            _Units.of(*passes),
            gradients / rates.uplink_bytes_per_s + 2 * latency_s if gradients else 0.0,
        )
