"""What a plan amounts to: gap to the bounds, what limits it, bytes, memory, energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from cleave.gemm import Gemm
from cleave.planner.bound import overlap_bound_s
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, Planner, PsRates
from cleave.planner.shape import RateArrays
from cleave.planner.streaming import predicted_s


class Bottleneck(Enum):
    """What makes most of the predicted time; the values are what users read."""

    DOWNLINK = "downlink"
    UPLINK = "uplink"
    COMPUTE = "compute"
    LATENCY = "latency"
    PS_EGRESS = "PS egress"
    PS_INGRESS = "PS ingress"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan held against its bounds.

    Attributes:
        gap: predicted makespan over the isolated bound, less one.
        overlap_bound_s: what no plan beats.
        predicted_s: makespan with the strips as they are cut (`cleave.planner.streaming`).
        bottleneck: what a little more of would shorten the plan most.
        download_bytes: of the device that is sent most.
        memory_bytes: of the device that holds most at once.
    """

    plan: Plan
    gap: float
    overlap_bound_s: float
    predicted_s: float
    bottleneck: Bottleneck
    download_bytes: int
    upload_bytes: int
    memory_bytes: int

    @property
    def egress_bytes_per_s(self) -> float:
        """What the PS sends, on average over the makespan."""
        return self.plan.egress_bytes / self.plan.makespan_s

    @property
    def ingress_bytes_per_s(self) -> float:
        """What the PS receives, on average over the makespan."""
        return self.plan.ingress_bytes / self.plan.makespan_s


def report(
    plan: Plan, element: ElementBytes, devices: Sequence[DeviceRates], ps: PsRates
) -> PlanReport:
    """Hold a plan against its bounds.

    Args:
        plan: made for these devices behind this PS.
        element: bytes per element, as it was planned with.
    """
    down: dict[int, int] = {}
    up: dict[int, int] = {}
    for tile in plan.tiles:
        down[tile.device] = down.get(tile.device, 0) + tile.download_bytes
        up[tile.device] = up.get(tile.device, 0) + tile.upload_bytes
    return PlanReport(
        plan,
        plan.makespan_s / plan.bound_s - 1,
        # The isolated bound allows for its search; no bound is above a better one.
        min(plan.bound_s, overlap_bound_s(plan.gemm, element, RateArrays.of(devices), ps)),
        predicted_s(plan, element, _behind_card(plan, devices, ps)),
        _bottleneck(plan, {d.device: d for d in devices}, ps),
        max(down.values()),
        max(up.values()),
        max(tile.memory_bytes for tile in plan.tiles),
    )


def _behind_card(plan: Plan, devices: Sequence[DeviceRates], ps: PsRates) -> dict[int, DeviceRates]:
    """The devices that a plan uses, their links slowed alike to fit through the PS's card."""
    used_ids = {tile.device for tile in plan.tiles}
    used = [d for d in devices if d.device in used_ids]
    behind = RateArrays.of(used).throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
    return {
        device.device: replace(
            device, downlink_bytes_per_s=float(down), uplink_bytes_per_s=float(up)
        )
        for device, down, up in zip(used, behind.downlink, behind.uplink, strict=True)
    }


def _bottleneck(plan: Plan, rates: Mapping[int, DeviceRates], ps: PsRates) -> Bottleneck:
    """The resource with the largest share in the times of the tiles.

    By the cost model ``T = 2 L + X + d^2 / (4 X)``: a share of ``d^2 / (2 X)`` falls to the
    download, ``X - d^2 / (4 X)`` to the slower of compute and upload (their elasticities).
    """
    used = [rates[device] for device in {tile.device for tile in plan.tiles}]
    egress_bound = sum(d.downlink_bytes_per_s for d in used) > ps.egress_bytes_per_s
    ingress_bound = sum(d.uplink_bytes_per_s for d in used) > ps.ingress_bytes_per_s
    downlink = Bottleneck.PS_EGRESS if egress_bound else Bottleneck.DOWNLINK
    uplink = Bottleneck.PS_INGRESS if ingress_bound else Bottleneck.UPLINK
    behind = RateArrays.of(used).throttled(ps.egress_bytes_per_s, ps.ingress_bytes_per_s)
    slow_down = behind.downlink[0] / used[0].downlink_bytes_per_s
    slow_up = behind.uplink[0] / used[0].uplink_bytes_per_s
    shares = dict.fromkeys(Bottleneck, 0.0)
    for tile in plan.tiles:
        device = rates[tile.device]
        download_s = tile.download_bytes / (device.downlink_bytes_per_s * slow_down)
        upload_s = tile.upload_bytes / (device.uplink_bytes_per_s * slow_up)
        compute_s = 2 * tile.tile.volume / device.flops_per_s
        slower_s = max(compute_s, upload_s)
        shares[Bottleneck.LATENCY] += 2 * device.latency_s
        if slower_s <= download_s / 2:
            shares[downlink] += download_s
        else:
            shares[downlink] += download_s**2 / (2 * slower_s)
            slower = Bottleneck.COMPUTE if compute_s > upload_s else uplink
            shares[slower] += slower_s - download_s**2 / (4 * slower_s)
    return max(shares, key=lambda name: shares[name])


class CountedGemm(Protocol):
    """A GEMM that occurs so many times in a step (`cleave.workload.step.StepGemm`)."""

    @property
    def gemm(self) -> Gemm: ...

    @property
    def count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """All GEMMs of a training step, one after another.

    Attributes:
        reports: by GEMM, in the order they were given.
        counts: how often each occurs.
    """

    reports: tuple[PlanReport, ...]
    counts: tuple[int, ...]

    def _sum(self, values: Iterable[float]) -> float:
        return sum(value * count for value, count in zip(values, self.counts, strict=True))

    @property
    def makespan_s(self) -> float:
        return self._sum(r.plan.makespan_s for r in self.reports)

    @property
    def fill_s(self) -> float:
        return self._sum(r.plan.fill_s for r in self.reports)

    @property
    def predicted_s(self) -> float:
        return self._sum(r.predicted_s for r in self.reports)

    @property
    def bound_s(self) -> float:
        return self._sum(r.plan.bound_s for r in self.reports)

    @property
    def overlap_bound_s(self) -> float:
        return self._sum(r.overlap_bound_s for r in self.reports)

    @property
    def egress_bytes(self) -> int:
        return round(self._sum(r.plan.egress_bytes for r in self.reports))

    @property
    def ingress_bytes(self) -> int:
        return round(self._sum(r.plan.ingress_bytes for r in self.reports))

    @property
    def blocks(self) -> int:
        """Results that the PS receives in the step."""
        return round(
            self._sum(
                sum(len(cut.m_cuts) * len(cut.n_cuts) for cut in (t.cut for t in r.plan.tiles))
                for r in self.reports
            )
        )

    @property
    def peak_egress_bytes_per_s(self) -> float:
        """The PS bandwidth that the busiest GEMM needs, out."""
        return max(r.egress_bytes_per_s for r in self.reports)

    @property
    def peak_ingress_bytes_per_s(self) -> float:
        """The PS bandwidth that the busiest GEMM needs, in."""
        return max(r.ingress_bytes_per_s for r in self.reports)

    @property
    def bottleneck(self) -> Bottleneck:
        """What limits most of the step's time."""
        shares = dict.fromkeys(Bottleneck, 0.0)
        for r, count in zip(self.reports, self.counts, strict=True):
            shares[r.bottleneck] += r.plan.makespan_s * count
        return max(shares, key=lambda name: shares[name])


def plan_step(
    planner: Planner,
    gemms: Sequence[CountedGemm],
    element: ElementBytes,
    devices: Sequence[DeviceRates],
    ps: PsRates,
) -> StepReport:
    """Plan every GEMM of a step; equal ones are planned once.

    Raises:
        PlanError: when one of them fits no device.
    """
    known: dict[Gemm, PlanReport] = {}
    for each in gemms:
        if each.gemm not in known:
            plan = planner.plan(each.gemm, element, devices)
            known[each.gemm] = report(plan, element, devices, ps)
    return StepReport(tuple(known[g.gemm] for g in gemms), tuple(g.count for g in gemms))


_ADVICE = {
    Bottleneck.DOWNLINK: "faster downlinks would help most; more devices help too",
    Bottleneck.UPLINK: "faster uplinks would help most; more devices help too",
    Bottleneck.COMPUTE: "faster devices would help most; links are not what limits",
    Bottleneck.LATENCY: "latency makes most of the time: use a larger batch, or fewer and nearer "
    "devices",
    Bottleneck.PS_EGRESS: "the PS's card limits what is sent: a faster card would help, more "
    "devices would not",
    Bottleneck.PS_INGRESS: "the PS's card limits what comes back: a faster card would help, more "
    "devices would not",
}


def advice(step: StepReport) -> str:
    """One sentence: what to change to go faster."""
    return f"{step.bottleneck.value} limits most of the step: {_ADVICE[step.bottleneck]}."
