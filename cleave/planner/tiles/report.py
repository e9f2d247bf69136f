"""Report a tile plan's gap to the lower bounds, bottleneck, traffic and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import groupby

import numpy as np

from cleave.gemm import Gemm
from cleave.planner.plan import (
    DeviceRates,
    ElementBytes,
    HeldSide,
    Plan,
    PlannedTile,
    Planner,
    PsRates,
    StepGemm,
)
from cleave.planner.tiles.bound import overlap_bound_s
from cleave.planner.tiles.boxes import box_sizes, collector_paused
from cleave.planner.tiles.shape import Floats, RateArrays
from cleave.planner.tiles.streaming import finish_times_s, held_bytes


class Bottleneck(Enum):
    """The main limit on the predicted time. Enum values are shown to the user."""

    DOWNLINK = "downlink"
    UPLINK = "uplink"
    COMPUTE = "compute"
    LATENCY = "latency"
    PS_EGRESS = "PS egress"
    PS_INGRESS = "PS ingress"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan of one GEMM, compared with the lower bounds on its time.

    Attributes:
        gap: predicted makespan divided by the isolated bound, minus one.
        overlap_bound_s: lower bound on the time of any plan, in seconds.
        predicted_s: predicted time of the plan with its actual strips, in seconds.
        bottleneck: the limit whose improvement would shorten the predicted time most.
        download_bytes, upload_bytes: largest download and largest upload of any device.
        memory_bytes: memory requirement of the largest tile.
        tightest: the tile that uses the largest share of its device's memory.
    """

    plan: Plan
    gap: float
    overlap_bound_s: float
    predicted_s: float
    bottleneck: Bottleneck
    download_bytes: int
    upload_bytes: int
    memory_bytes: int
    tightest: PlannedTile

    @property
    def egress_bytes_per_s(self) -> float:
        """Return the PS's mean sending rate during the makespan, in bytes/s."""
        return self.plan.egress_bytes / self.plan.makespan_s

    @property
    def ingress_bytes_per_s(self) -> float:
        """Return the PS's mean receiving rate during the makespan, in bytes/s."""
        return self.plan.ingress_bytes / self.plan.makespan_s


def report(
    plan: Plan, element: ElementBytes, devices: Sequence[DeviceRates], ps: PsRates
) -> PlanReport:
    """Return a report that compares a plan with the lower bounds for `devices` and `ps`."""
    return _report(plan, element, _Fleet(devices), ps)


class _Fleet:
    """The rates of devices as arrays, and a map from each device ID to its index in the arrays."""

    def __init__(self, devices: Sequence[DeviceRates]) -> None:
        self.rates = RateArrays.of(devices)
        self.places = {device.device: place for place, device in enumerate(devices)}


def _report(plan: Plan, element: ElementBytes, fleet: _Fleet, ps: PsRates) -> PlanReport:
    tiles, places = plan.tiles, fleet.places
    owner = np.array([places[tile.device] for tile in tiles], np.intp)
    down = np.array([tile.download_bytes for tile in tiles], np.float64)
    up = np.array([tile.upload_bytes for tile in tiles], np.float64)
    used = np.unique(owner)
    alone = fleet.rates.take(used)
    behind = alone.throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
    by_tile = behind.take(np.searchsorted(used, owner))
    tightest = int(np.argmax((down + up) / fleet.rates.memory[owner]))
    return PlanReport(
        plan,
        plan.makespan_s / plan.bound_s - 1,
        # The overlap bound must not exceed the isolated bound, which a search error may lower.
        min(plan.bound_s, overlap_bound_s(plan.gemm, element, fleet.rates, ps)),
        _together_s([(plan, "")], element, fleet, ps),
        _bottleneck(plan, down, up, by_tile, alone, ps),
        int(np.bincount(owner, down).max()),
        int(np.bincount(owner, up).max()),
        int((down + up).max()),
        tiles[tightest],
    )


def _together_s(
    work: Sequence[tuple[Plan, HeldSide]], element: ElementBytes, fleet: _Fleet, ps: PsRates
) -> float:
    """Return the time in seconds of GEMMs that are submitted together, with the actual strips."""
    devices = dict.fromkeys(tile.device for plan, _ in work for tile in plan.tiles)
    used = np.array([fleet.places[device] for device in devices], np.intp)
    rates = fleet.rates.take(used).throttled(math.inf, ps.ingress_bytes_per_s)
    places = {device: place for place, device in enumerate(devices)}
    return float(finish_times_s(work, element, rates, places, ps.egress_bytes_per_s).max())


def _bottleneck(
    plan: Plan, down: Floats, up: Floats, rates: RateArrays, alone: RateArrays, ps: PsRates
) -> Bottleneck:
    """Return the limit with the largest share of the total time of all tiles.

    The time of a tile is ``T = 2 L + X + d^2 / (4 X)`` if ``X > d / 2``, where L is the one-way
    latency, d the download time, and X the larger of compute and upload time. A share is T's
    derivative with respect to the logarithm of a time: ``d^2 / (2 X)`` for the download, and
    ``X - d^2 / (4 X)`` for the slower of compute and upload. Otherwise, T is ``2 L + d``.

    `down` and `up` are the traffic of each tile in bytes. `rates` contains the rates of each
    tile's device, limited by the PS's network card. `alone` contains the unlimited rates of each
    device in the plan.
    """
    egress_bound = alone.downlink.sum() > ps.egress_bytes_per_s
    ingress_bound = alone.uplink.sum() > ps.ingress_bytes_per_s
    downlink = Bottleneck.PS_EGRESS if egress_bound else Bottleneck.DOWNLINK
    uplink = Bottleneck.PS_INGRESS if ingress_bound else Bottleneck.UPLINK
    m, n, k = box_sizes([tile.tile for tile in plan.tiles])
    download_s, upload_s = down / rates.downlink, up / rates.uplink
    compute_s = 2 * (m * n * k) / rates.flops
    slower_s = np.maximum(compute_s, upload_s)
    hidden = slower_s <= download_s / 2
    wave_s = download_s**2 / (2 * np.maximum(slower_s, 1e-300))
    slow_s = slower_s - wave_s / 2
    computes = ~hidden & (compute_s > upload_s)
    shares = dict.fromkeys(Bottleneck, 0.0)
    shares[Bottleneck.LATENCY] = float(rates.latency_s.sum())
    shares[downlink] += float(np.where(hidden, download_s, wave_s).sum())
    shares[Bottleneck.COMPUTE] += float(slow_s[computes].sum())
    shares[uplink] += float(slow_s[~hidden & ~computes].sum())
    return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True, slots=True)
class Together:
    """GEMMs of a step that are submitted together. `places` contains their indices in the step.

    `seconds` is the time from the first sent byte to the end of the last GEMM. `held_bytes` is the
    size of operands that need no download, because devices already store them.
    """

    places: tuple[int, ...]
    seconds: float
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """The plans of all GEMMs of a training step.

    Attributes:
        together: submissions of several GEMMs, and of GEMMs that reuse operands on devices.
    """

    reports: tuple[PlanReport, ...]
    counts: tuple[int, ...]
    together: tuple[Together, ...] = ()

    def _sum(self, values: Iterable[float]) -> float:
        return sum(value * count for value, count in zip(values, self.counts, strict=True))

    @property
    def submissions(self) -> tuple[Together, ...]:
        """Return all submissions of the step in order, including submissions of a single GEMM."""
        first = {each.places[0]: each for each in self.together}
        others = {place for each in self.together for place in each.places}
        return tuple(
            first[n] if n in first else Together((n,), found.predicted_s)
            for n, found in enumerate(self.reports)
            if n in first or n not in others
        )

    @property
    def predicted_s(self) -> float:
        """Return the predicted time of all GEMMs of the step, including repetitions, in seconds."""
        return sum(each.seconds * self.counts[each.places[0]] for each in self.submissions)

    @property
    def apart_s(self) -> float:
        """Return the time in seconds of all GEMMs if they are submitted one after another.

        If the PS's network card is the bottleneck, `predicted_s` may be longer than `apart_s`.
        """
        return self._sum(r.predicted_s for r in self.reports)

    @property
    def makespan_s(self) -> float:
        return self._sum(r.plan.makespan_s for r in self.reports)

    @property
    def fill_s(self) -> float:
        return self._sum(r.plan.fill_s for r in self.reports)

    @property
    def bound_s(self) -> float:
        return self._sum(r.plan.bound_s for r in self.reports)

    @property
    def overlap_bound_s(self) -> float:
        return self._sum(r.overlap_bound_s for r in self.reports)

    @property
    def egress_bytes(self) -> int:
        held = sum(each.held_bytes * self.counts[each.places[0]] for each in self.together)
        return round(self._sum(r.plan.egress_bytes for r in self.reports)) - held

    @property
    def ingress_bytes(self) -> int:
        return round(self._sum(r.plan.ingress_bytes for r in self.reports))

    @property
    def blocks(self) -> int:
        """Return the number of blocks that the PS receives in the step."""
        return round(
            self._sum(
                sum(len(cut.m_cuts) * len(cut.n_cuts) for cut in (t.cut for t in r.plan.tiles))
                for r in self.reports
            )
        )

    @property
    def peak_egress_bytes_per_s(self) -> float:
        """Return the PS's highest mean sending rate during any GEMM of the step, in bytes/s."""
        return max(r.egress_bytes_per_s for r in self.reports)

    @property
    def peak_ingress_bytes_per_s(self) -> float:
        """Return the PS's highest mean receiving rate during any GEMM of the step, in bytes/s."""
        return max(r.ingress_bytes_per_s for r in self.reports)

    @property
    def bottleneck(self) -> Bottleneck:
        """Return the bottleneck that limits the GEMMs with the largest total time."""
        shares = dict.fromkeys(Bottleneck, 0.0)
        for r, count in zip(self.reports, self.counts, strict=True):
            shares[r.bottleneck] += r.plan.makespan_s * count
        return max(shares, key=lambda name: shares[name])


def plan_step(
    planner: Planner,
    gemms: Sequence[StepGemm],
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    ps: PsRates,
) -> StepReport:
    """Plan every GEMM of a step. Equal GEMMs are planned only once.

    `gemms` are in the order of submission.

    Raises:
        PlanError: if no device has enough memory for a tile of some GEMM.
    """
    known: dict[Gemm, PlanReport] = {}
    fleet = _Fleet(devices)
    with collector_paused():
        for each in gemms:
            if each.gemm not in known:
                plan = planner.plan(each.gemm, element, devices)
                known[each.gemm] = _report(plan, element, fleet, ps)

        @cache
        def together(*work: tuple[Gemm, HeldSide]) -> tuple[float, int]:
            plans = [(known[gemm].plan, held) for gemm, held in work]
            seconds = _together_s(plans, element, fleet, ps)
            return seconds, sum(held_bytes(plan, held, element) for plan, held in plans)

        grouped = groupby(range(len(gemms)), key=lambda n: gemms[n].submission)
        submissions = [tuple(group) for _, group in grouped]
        not_alone = tuple(
            Together(places, *together(*((gemms[n].gemm, gemms[n].held) for n in places)))
            for places in submissions
            if len(places) > 1 or gemms[places[0]].held
        )
    return StepReport(tuple(known[g.gemm] for g in gemms), tuple(g.count for g in gemms), not_alone)


_ADVICE = {
    Bottleneck.DOWNLINK: "faster downlinks would help most; more devices help too",
    Bottleneck.UPLINK: "faster uplinks would help most; more devices help too",
    Bottleneck.COMPUTE: "faster devices would help most; links are not the bottleneck",
    Bottleneck.LATENCY: "latency takes most of the time: use a larger batch, or fewer and nearer "
    "devices",
    Bottleneck.PS_EGRESS: "the PS's network card limits sending: a faster card would help, but "
    "more devices would not",
    Bottleneck.PS_INGRESS: "the PS's network card limits receiving: a faster card would help, but "
    "more devices would not",
}


def advice(step: StepReport) -> str:
    """Return a sentence that states what limits a step and what would make the step faster."""
    return f"{step.bottleneck.value} limits most of the step: {_ADVICE[step.bottleneck]}."
