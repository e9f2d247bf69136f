"""Ways to spread sub-layers over a fleet, and the closed form that ranks them.

With a fleet of mean rates D, U, F, behind a card of E and I bytes/s, P stages of G groups of r
devices, and B / G samples for each group:

    time = max over stages of (down / D, up / U, compute / F), all down / E, all up / I
           + sum over stages of one sample's forward and backward hop
           + the last flush of gradients (`flushes`)

where down includes the weights. The estimates by hand in docs/simulation.md count the gradients in
`up` instead, but gradients can only be sent when all samples are through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from simulator.flushes import tail_s
from simulator.method import Conditions
from simulator.sublayers import BOTH, Kind, Load, Pass, Residence, residence

_LONGEST_RUN: Final = 16  # sub-layers


@dataclass(frozen=True, slots=True)
class ResidentLayout:
    """Some sub-layers on a fleet, with the times of the closed form.

    Attributes:
        stages: what each stage's devices hold.
        r: devices in a group.
        groups: number of groups of each stage.
        most_groups: most groups that a stage may have on a real fleet, if devices are left over.
        passes: the passes that samples make over the stages.
        steady_s, fill_s, flush_s: the terms of the closed form.
    """

    stages: tuple[Residence, ...]
    r: int
    groups: int
    most_groups: int
    passes: tuple[Pass, ...]
    steady_s: float
    fill_s: float
    flush_s: float

    @property
    def time_s(self) -> float:
        return self.steady_s + self.fill_s + self.flush_s

    @property
    def devices(self) -> int:
        return len(self.stages) * self.groups * self.r

    @property
    def needed_bytes(self) -> float:
        """Return the memory of the device that holds most."""
        return max(held.memory_bytes for held in self.stages)

    def flops(self, batch: int) -> float:
        """Return the FLOPs of all devices together for this many samples."""
        loads = [held.load(each) for held in self.stages for each in self.passes]
        return self.r * batch * sum(load.flops for load in loads)

    def moved_bytes(self, batch: int, groups: Sequence[int]) -> tuple[float, float]:
        """Return the bytes down and up, of all devices together.

        Args:
            batch: number of samples; one group of every stage gets each.
            groups: number of groups of each stage.
        """
        down = up = 0.0
        for held, count in zip(self.stages, groups, strict=True):
            loads = [held.load(each) for each in self.passes]
            down += self.r * batch * sum(load.download_bytes for load in loads)
            up += self.r * batch * sum(load.upload_bytes for load in loads)
            down += self.r * count * held.weights_bytes
            if Pass.BACKWARD in self.passes:
                up += self.r * count * held.gradient_bytes
        return down, up


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sub-layers that are resident at the same time, for one or two visits of all samples.

    Attributes:
        visits: layouts that differ only in the passes of their samples.
    """

    visits: tuple[ResidentLayout, ...]

    @property
    def layout(self) -> ResidentLayout:
        """Return the layout of the first visit; all visits have its stages and groups."""
        return self.visits[0]

    @property
    def time_s(self) -> float:
        return sum(visit.time_s for visit in self.visits)


ONE_VISIT: Final = (BOTH,)
"""Samples go forward and backward without a break."""

TWO_VISITS: Final = ((Pass.FORWARD,), (Pass.BACKWARD,))
"""All samples go forward; when they come back, the weights are fetched again."""


class LayoutSearch:
    """The search for layouts of sub-layers on a fleet."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        rates = conditions.rates
        self._memory = np.sort(rates.memory)
        self._down, self._up = float(rates.downlink.mean()), float(rates.uplink.mean())
        self._flops, self._latency_s = float(rates.flops.mean()), float(rates.latency_s.mean())
        self._known: dict[tuple[tuple[Kind, ...], int], Residence] = {}

    def closed_form(
        self,
        order: tuple[Kind, ...],
        run: int,
        r: int,
        passes: tuple[Pass, ...] = BOTH,
        most_groups: int | None = None,
    ) -> ResidentLayout | None:
        """Return the layout with runs of `run` sub-layers in groups of r devices.

        Return None if too few devices can hold them.

        Args:
            order: the sub-layers that are resident at the same time.
            most_groups: most groups of a stage; by default one for each sample.
        """
        conditions = self._conditions
        most_groups = most_groups or conditions.batch
        stages = tuple(self._residence(order[i : i + run], r) for i in range(0, len(order), run))
        need = max(held.memory_bytes for held in stages)
        able = len(self._memory) - int(np.searchsorted(self._memory, need))
        groups = min(most_groups, able // (len(stages) * r))
        if not groups:
            return None
        samples = -(-conditions.batch // groups)
        steady_s = fill_s = own_s = card_s = all_down = all_up = 0.0
        for held in stages:
            loads = [held.load(each) for each in passes]
            down = sum(load.download_bytes for load in loads)
            up = sum(load.upload_bytes for load in loads)
            flops = sum(load.flops for load in loads)
            down_s = (samples * down + held.weights_bytes) / self._down
            busy_s = samples * max(up / self._up, flops / self._flops)
            steady_s = max(steady_s, down_s, busy_s)
            all_down += r * (conditions.batch * down + groups * held.weights_bytes)
            all_up += r * conditions.batch * up
            fill_s += sum(map(self._hop_s, loads))
            if Pass.BACKWARD in passes:
                own_s = max(own_s, held.gradient_bytes / self._up)
                card_s += r * groups * held.gradient_bytes / conditions.ps.ingress_bytes_per_s
        steady_s = max(
            steady_s,
            all_down / conditions.ps.egress_bytes_per_s,
            all_up / conditions.ps.ingress_bytes_per_s,
        )
        flush_s = tail_s(own_s, card_s, groups)
        return ResidentLayout(stages, r, groups, most_groups, passes, steady_s, fill_s, flush_s)

    def best_first(
        self,
        order: tuple[Kind, ...],
        visits: Sequence[tuple[Pass, ...]] = ONE_VISIT,
        *,
        coarse: bool = False,
    ) -> list[Stretch]:
        """Return the layouts that are tried, ranked by the closed form.

        Args:
            order: the sub-layers that are resident at the same time.
            visits: passes of samples in each visit.
            coarse: try fewer numbers of groups if there are many.
        """
        found = []
        for run in range(1, min(_LONGEST_RUN, len(order)) + 1):
            most = len(self._memory) // -(-len(order) // run)
            counts = _numbers(min(most, self._conditions.batch), coarse=coarse)
            sizes = {most // groups for groups in counts}
            for r in sorted(sizes | {1} if most else sizes):
                for limit in self._limits(most // r):
                    layouts = [self.closed_form(order, run, r, each, limit) for each in visits]
                    fitting = tuple(layout for layout in layouts if layout is not None)
                    if fitting:
                        found.append(Stretch(fitting))
        return sorted(found, key=lambda each: each.time_s)

    def fits(self, order: tuple[Kind, ...]) -> bool:
        """Say whether these sub-layers can be resident at the same time in some layout."""
        longest = min(_LONGEST_RUN, len(order))
        # One group as large as there are devices for holds least.
        return any(
            self.closed_form(order, run, most, most_groups=1) is not None
            for run in range(1, longest + 1)
            if (most := len(self._memory) // -(-len(order) // run))
        )

    def _limits(self, most: int) -> list[int]:
        """Return limits on groups: behind a card fewer may be faster, as each sends gradients."""
        batch, ps = self._conditions.batch, self._conditions.ps
        if math.isinf(ps.egress_bytes_per_s) and math.isinf(ps.ingress_bytes_per_s):
            return [batch]
        return [batch, *(1 << i for i in range(min(most, batch).bit_length()))]

    def _residence(self, run: tuple[Kind, ...], r: int) -> Residence:
        if (run, r) not in self._known:
            self._known[run, r] = residence(self._conditions, run, r)
        return self._known[run, r]

    def _hop_s(self, load: Load) -> float:
        links_s = load.download_bytes / self._down + load.upload_bytes / self._up
        return links_s + load.flops / self._flops + self._latency_s


def _numbers(most: int, *, coarse: bool) -> list[int]:
    """Return all numbers from one to `most`, or if coarse only steps of about a fifth."""
    if not coarse:
        return list(range(1, most + 1))
    numbers, number = [], 1
    while number <= most:
        numbers.append(number)
        number = max(number + 1, number * 6 // 5)
    return numbers
