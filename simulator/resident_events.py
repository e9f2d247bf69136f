"""Resident sub-layers on unequal devices, sample by sample: who holds what, and what that takes.

Devices of similar speed form groups, and groups are dealt to stages so that all stages are about as
fast; no device gets more than its memory holds. A sample passes all stages forward and then
backward, through the parameter server. At each stage the group that returns it soonest computes it.
A group has a downlink, its processors and an uplink; each serves one sample at a time in the order
of arrival, and is as slow as that of its slowest member.

Samples pass the PS's card one after the other, each way. Weights are sent stage by stage; samples
go first. Gradients go up as in `flushes`; if the last flush waits for the card, groups are stopped
one after another, over the best of a few windows. Devices may be lost: their group is then away
until a spare has fetched the weights and computed again what was not flushed; other groups go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from cleave.planner.plan import PsRates
from cleave.planner.shape import Floats, RateArrays
from simulator.flushes import flushed_s, staggered_s
from simulator.sublayers import BOTH, Load, Pass, Residence

Indices = npt.NDArray[np.intp]

_WINDOWS: Final = (0.5, 1.0, 1.5)  # of the burst, in which groups are stopped


@dataclass(frozen=True, slots=True)
class Assignment:
    """Groups by stage: arrays of device numbers, (groups, r)."""

    stages: tuple[Indices, ...]

    @property
    def devices(self) -> int:
        return sum(groups.size for groups in self.stages)

    @property
    def members(self) -> Indices:
        """Return the numbers of all devices that have a place."""
        return np.concatenate([groups.ravel() for groups in self.stages])


@dataclass(frozen=True, slots=True)
class ResidentRun:
    """The outcome of a simulated step.

    Attributes:
        samples_s: time when the last sample is through.
        step_s: time when the last gradient is up.
        losses: number of devices lost until then.
    """

    samples_s: float
    step_s: float
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Losses:
    """Devices that leave at random.

    Attributes:
        per_s: rate at which each device is lost.
        detection_s: seconds until a loss is noticed.
        seed: seed of the times of losses.
    """

    per_s: float
    detection_s: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """How samples pass resident sub-layers.

    Attributes:
        batch: number of samples.
        passes: the passes that samples make.
        ps: rates of the PS's card.
        flushes: number of gradient flushes by each group, with the last one.
        losses: how devices leave; None if none do.
    """

    batch: int
    passes: tuple[Pass, ...] = BOTH
    ps: PsRates = field(default_factory=PsRates)
    flushes: int = 1
    losses: Losses | None = None


def sample_s(held: Residence, rates: RateArrays) -> Floats:
    """Return by device the seconds for a sample of its group if links and processors overlap."""
    down = held.forward.download_bytes + held.backward.download_bytes
    up = held.forward.upload_bytes + held.backward.upload_bytes
    flops = held.forward.flops + held.backward.flops
    slowest: Floats = np.maximum.reduce(
        [down / rates.downlink, up / rates.uplink, flops / rates.flops]
    )
    return slowest


def spare_s(held: Residence, rates: RateArrays) -> tuple[float, float]:
    """Return the seconds of a spare for the weights, and for a sample's gradients.

    The spare has the fleet's median rates. It is sent the sample's input and output gradient, and
    sends nothing until the flush.
    """
    downlink, flops = float(np.median(rates.downlink)), float(np.median(rates.flops))
    sample = held.backward
    again_s = max(sample.download_bytes / downlink, sample.flops / flops)
    return held.weights_bytes / downlink, again_s


def assign(
    stages: Sequence[Residence], rates: RateArrays, r: int, most_groups: int
) -> Assignment | None:
    """Assign groups to stages; return None if a stage gets none.

    Args:
        stages: what each stage's devices hold.
        r: devices in a group.
        most_groups: most groups of a stage; more would have no sample.
    """
    needs = np.array([stage.memory_bytes for stage in stages])
    able = np.flatnonzero(rates.memory >= needs.min())
    # Devices with room for anything apart from those with little, alike fast ones together.
    levels = np.searchsorted(np.unique(needs), rates.memory[able], side="right")
    largest = stages[int(needs.argmax())]
    speed = sample_s(largest, rates.take(able))
    ordered = able[np.lexsort((able, speed, levels))]
    level_of = np.sort(levels)
    groups: list[Indices] = []
    for level in np.unique(level_of):
        members = ordered[level_of == level]
        groups += list(members[: len(members) // r * r].reshape(-1, r))
    distinct = {id(stage): stage for stage in stages}
    rate = (
        {
            key: 1 / np.array([sample_s(stage, rates.take(g)).max() for g in groups])
            for key, stage in distinct.items()
        }
        if groups
        else {}
    )
    given: list[list[Indices]] = [[] for _ in stages]
    heap = [(0.0, number) for number in range(len(stages))]
    # Little memory first, as it has least choice; among alike, the fastest first.
    for number, group in enumerate(groups):
        room = float(rates.memory[group].min())
        skipped = []
        while heap:
            total, stage = heapq.heappop(heap)
            if needs[stage] <= room:
                given[stage].append(group)
                if len(given[stage]) < most_groups:
                    total += float(rate[id(stages[stage])][number])
                    heapq.heappush(heap, (total, stage))
                break
            skipped.append((total, stage))
        for entry in skipped:
            heapq.heappush(heap, entry)
    if not all(given):
        return None
    return Assignment(tuple(np.array(each) for each in given))


@dataclass(slots=True)
class _Card:
    """One direction of the PS's card."""

    bytes_per_s: float
    free_s: float = 0.0
    passed_bytes: float = 0.0

    def passed_s(self, begin_s: float, nbytes: float) -> float:
        """Return when these bytes are through, after those before them."""
        self.passed_bytes += nbytes
        self.free_s = max(begin_s, self.free_s) + nbytes / self.bytes_per_s
        return self.free_s


@dataclass(slots=True)
class _Visit:
    """A sample at a group.

    Attributes:
        upload_s, back_s: times when its result begins to go up, and when it is back.
    """

    group: int
    upload_s: float
    back_s: float


class _Groups:
    """The groups of one stage, and until when each of their three parts is busy."""

    def __init__(
        self, held: Residence, members: Indices, rates: RateArrays, step: Step, stage: int
    ) -> None:
        down, up = rates.downlink[members], rates.uplink[members]
        flops, self.latency_s = rates.flops[members], rates.latency_s[members].max(axis=1)

        def slowest(load: Load) -> Floats:
            parts = (load.download_bytes / down, load.flops / flops, load.upload_bytes / up)
            return np.stack([part.max(axis=1) for part in parts])

        groups, self._r = members.shape
        self._held = held
        self._takes_s = {each: slowest(held.load(each)) for each in step.passes}
        self.weights_s: Floats = (held.weights_bytes / down).max(axis=1)
        self.weights_bytes = members.size * held.weights_bytes
        self.flush_s: Floats = (held.gradient_bytes / up).max(axis=1)
        self.flush_bytes = np.full(groups, self._r * held.gradient_bytes)
        self._free_s = np.zeros((3, groups))
        self.stops_s = np.full(groups, np.inf)
        self.unflushed = np.zeros(groups, np.intp)
        self._flush_every = -(-step.batch // (groups * step.flushes)) if step.flushes > 1 else 0
        self.losses = 0
        self._detection_s = self._fetch_s = self._again_s = 0.0
        self._lost_s = np.full(groups, np.inf)
        if step.losses is not None and step.losses.per_s:
            self._fetch_s, self._again_s = spare_s(held, rates)
            self._detection_s = step.losses.detection_s
            self._rng = np.random.default_rng((step.losses.seed, stage))
            self._between_s = 1 / (self._r * step.losses.per_s)
            self._lost_s = self._rng.exponential(self._between_s, groups)

    def load_weights(self, from_s: float) -> None:
        """Note that the weights arrive as fast as links allow, but not before `from_s`."""
        self._free_s[0] = np.maximum(self.weights_s, from_s)

    def serve(self, now_s: float, direction: Pass, egress: _Card) -> _Visit:
        """Give a sample to the group that returns it soonest, if the way up is free."""
        takes, ends = self._takes_s[direction], np.empty_like(self._free_s)
        while True:
            self._lose_until(now_s)
            ready = now_s + self.latency_s / 2
            for part in range(3):
                ready = ends[part] = np.maximum(ready, self._free_s[part]) + takes[part]
            back = ready + self.latency_s / 2
            back[self.stops_s < now_s] = np.inf
            best = int(back.argmin())
            if self._lost_s[best] >= back[best]:
                break
            # Lost with the sample, which is given away again when that is noticed.
            now_s = max(now_s, float(self._lost_s[best]) + self._detection_s)
            self._lose(best)
        nbytes = self._r * self._held.load(direction).download_bytes
        late_s = egress.passed_s(now_s, nbytes) + self.latency_s[best] / 2 - ends[0, best]
        if late_s > 0:
            ends[0, best] += late_s
            for part in (1, 2):
                begin_s = max(ends[part - 1, best], self._free_s[part, best])
                ends[part, best] = begin_s + takes[part, best]
        self._free_s[:, best] = ends[:, best]
        up_s = float(ends[2, best])
        if direction is Pass.BACKWARD:
            self._summed(best)
        back_s = up_s + float(self.latency_s[best]) / 2
        return _Visit(best, up_s - float(takes[2, best]), back_s)

    def returned_s(self, visit: _Visit, direction: Pass, ingress: _Card) -> float:
        """Return when a result that goes up now is back."""
        nbytes = self._r * self._held.load(direction).upload_bytes
        half_s = float(self.latency_s[visit.group]) / 2
        back_s = max(visit.back_s, ingress.passed_s(visit.upload_s, nbytes) + half_s)
        self._free_s[2, visit.group] = max(self._free_s[2, visit.group], back_s - half_s)
        return back_s

    def ready_s(self) -> Floats:
        """Return when each group may send its last gradients, after the stage's last sample."""
        while True:
            ready: Floats = self._free_s[1:].max(axis=0)
            due = self.unflushed > 0
            lost = np.flatnonzero(due & (self._lost_s < ready + self.flush_s))
            if not len(lost):
                return ready
            for group in lost:
                self._lose(int(group))

    def _summed(self, group: int) -> None:
        """Note that a sample's gradients were added, and flush them if a flush is due."""
        self.unflushed[group] += 1
        if self.unflushed[group] == self._flush_every:
            # The sums may not change while they are sent.
            self._free_s[1:, group] = self._free_s[1:, group].max() + self.flush_s[group]
            self.unflushed[group] = 0

    def _lose_until(self, now_s: float) -> None:
        while self._lost_s.min() <= now_s:
            self._lose(int(self._lost_s.argmin()))

    def _lose(self, group: int) -> None:
        """Note that a device is lost with its sums since the last flush; a spare takes its part."""
        self.losses += 1
        again_s = float(self.unflushed[group] * self._again_s)
        away_s = self._detection_s + self._fetch_s + again_s
        lost_s = float(self._lost_s[group])
        self._free_s[:, group] = np.maximum(self._free_s[:, group], lost_s) + away_s
        self._lost_s[group] = lost_s + away_s + self._rng.exponential(self._between_s)


def simulate(
    stages: Sequence[Residence], assignment: Assignment, rates: RateArrays, step: Step
) -> ResidentRun:
    """Simulate a step, with its flushes staggered if that is faster."""
    best, burst_s = _simulated(stages, assignment, rates, step, None)
    if burst_s:
        for share in _WINDOWS:
            window = best.samples_s, share * burst_s
            other, _ = _simulated(stages, assignment, rates, step, window)
            best = min((best, other), key=lambda run: run.step_s)
    return best


def _simulated(
    stages: Sequence[Residence],
    assignment: Assignment,
    rates: RateArrays,
    step: Step,
    window: tuple[float, float] | None,
) -> tuple[ResidentRun, float]:
    """Return a run, and how many seconds the card adds to its last flushes.

    Args:
        window: its end and its length in seconds; groups are stopped in it.
    """
    egress, ingress = _Card(step.ps.egress_bytes_per_s), _Card(step.ps.ingress_bytes_per_s)
    groups = [
        _Groups(held, members, rates, step, stage)
        for stage, (held, members) in enumerate(zip(stages, assignment.stages, strict=True))
    ]
    hops = [(each, Pass.FORWARD) for each in groups]
    hops += [(each, Pass.BACKWARD) for each in reversed(groups)]
    hops = [hop for hop in hops if hop[1] in step.passes]
    weights = _Card(step.ps.egress_bytes_per_s)
    for each in groups if Pass.FORWARD in step.passes else reversed(groups):
        each.load_weights(weights.passed_s(0.0, each.weights_bytes))
        if window is not None:
            each.stops_s = staggered_s(*window, len(each.stops_s))
    unlimited = np.isinf(ingress.bytes_per_s)
    # Time, sample, hop, and where it is when its result is about to go up.
    events: list[tuple[float, int, int, _Visit | None]]
    events = [(0.0, sample, 0, None) for sample in range(step.batch)]
    through_s = 0.0
    while events:
        now_s, sample, hop, visit = heapq.heappop(events)
        each, direction = hops[hop]
        if visit is None:
            visit = each.serve(now_s, direction, egress)
            if not unlimited:
                heapq.heappush(events, (visit.upload_s, sample, hop, visit))
                continue
            back_s = visit.back_s
        else:
            back_s = each.returned_s(visit, direction, ingress)
        if hop + 1 < len(hops):
            heapq.heappush(events, (back_s, sample, hop + 1, None))
        else:
            through_s = max(through_s, back_s)
    sent = (egress.passed_bytes + weights.passed_bytes) / egress.bytes_per_s
    through_s = max(through_s, sent)
    if Pass.BACKWARD not in step.passes:
        return ResidentRun(through_s, through_s, sum(each.losses for each in groups)), 0.0
    ready_s = np.concatenate([each.ready_s() for each in groups])
    due = np.concatenate([each.unflushed > 0 for each in groups])
    own_s = due * np.concatenate([each.flush_s for each in groups])
    nbytes = due * np.concatenate([each.flush_bytes for each in groups])
    flush = ready_s, own_s, nbytes
    alone_s, together_s = flushed_s(*flush, np.inf), flushed_s(*flush, ingress.bytes_per_s)
    received_s = (ingress.passed_bytes + float(nbytes.sum())) / ingress.bytes_per_s
    together_s = max(together_s, received_s)
    run = ResidentRun(through_s, max(through_s, together_s), sum(each.losses for each in groups))
    return run, max(0.0, together_s - max(through_s, alone_s))
