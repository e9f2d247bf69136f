"""Resident sub-layers on unequal devices, sample by sample: who holds what, and what that takes.

Devices of alike speed form groups, and groups are dealt to stages so that all stages are alike
fast; none gets what its memory does not hold. A sample passes all stages forward and then backward,
through the parameter server, at each stage by the group that returns it soonest. A group has a
downlink, its processors and an uplink, each serving one sample at a time in the order of arrival;
it is as slow in each as its slowest member.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cleave.planner.shape import Floats, RateArrays
from cleave.simulation.sublayers import Load, Residence

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Assignment:
    """By stage, its groups: device numbers (groups, r)."""

    stages: tuple[Indices, ...]

    @property
    def devices(self) -> int:
        return sum(groups.size for groups in self.stages)


@dataclass(frozen=True, slots=True)
class Run:
    """What the events of a step came to.

    Attributes:
        samples_s: when the last sample is through.
        step_s: when the last gradient is up.
    """

    samples_s: float
    step_s: float


def sample_s(held: Residence, rates: RateArrays) -> Floats:
    """By device, seconds for a sample of its group when its links and processors overlap."""
    down = held.forward.download_bytes + held.backward.download_bytes
    up = held.forward.upload_bytes + held.backward.upload_bytes
    flops = held.forward.flops + held.backward.flops
    slowest: Floats = np.maximum.reduce(
        [down / rates.downlink, up / rates.uplink, flops / rates.flops]
    )
    return slowest


def assign(
    stages: Sequence[Residence], rates: RateArrays, r: int, most_groups: int
) -> Assignment | None:
    """Groups to stages; None where a stage stays without one.

    Args:
        stages: what each holds.
        r: devices in a group.
        most_groups: of a stage; more would have no sample.
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


class _Groups:
    """The groups of one stage, and until when each of their three parts is busy."""

    def __init__(self, held: Residence, members: Indices, rates: RateArrays) -> None:
        down, up = rates.downlink[members], rates.uplink[members]
        flops, self.latency_s = rates.flops[members], rates.latency_s[members].max(axis=1)

        def slowest(load: Load) -> Floats:
            parts = (load.download_bytes / down, load.flops / flops, load.upload_bytes / up)
            return np.stack([part.max(axis=1) for part in parts])

        self.takes_s = (slowest(held.forward), slowest(held.backward))
        self.gradient_s: Floats = (held.gradient_bytes / up).max(axis=1)
        self.free_s = np.zeros((3, len(members)))
        self.free_s[0] = (held.weights_bytes / down).max(axis=1)

    def serve(self, now_s: float, direction: int) -> float:
        """Give a sample to the group that returns it soonest; when it is back."""
        takes, ends = self.takes_s[direction], np.empty_like(self.free_s)
        ready = now_s + self.latency_s / 2
        for part in range(3):
            ready = ends[part] = np.maximum(ready, self.free_s[part]) + takes[part]
        back = ready + self.latency_s / 2
        best = int(back.argmin())
        self.free_s[:, best] = ends[:, best]
        return float(back[best])

    def flushed_s(self, now_s: float) -> float:
        """When all gradients are up, after the stage's last sample."""
        return float((np.maximum(self.free_s[2], self.free_s[1]) + self.gradient_s).max())


def simulate(
    stages: Sequence[Residence], assignment: Assignment, rates: RateArrays, batch: int
) -> Run:
    """A step of `batch` samples."""
    groups = [
        _Groups(held, members, rates)
        for held, members in zip(stages, assignment.stages, strict=True)
    ]
    last = 2 * len(groups)
    # (time, sample, hop): hops 0 .. P - 1 forward, P .. 2 P - 1 backward.
    events = [(0.0, sample, 0) for sample in range(batch)]
    through_s = 0.0
    while events:
        now_s, sample, hop = heapq.heappop(events)
        backward = hop >= len(groups)
        stage = last - 1 - hop if backward else hop
        back_s = groups[stage].serve(now_s, int(backward))
        if hop + 1 < last:
            heapq.heappush(events, (back_s, sample, hop + 1))
        else:
            through_s = max(through_s, back_s)
    flushed_s = max(group.flushed_s(through_s) for group in groups)
    return Run(through_s, max(through_s, flushed_s))
