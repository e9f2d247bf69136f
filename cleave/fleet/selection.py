"""Select the GEMMs that run on the fleet, by predicted time on the fleet and on the PS.

With `--offload auto`, the PS computes a GEMM itself if that is faster. With `--offload all`, all
GEMMs run on the fleet, and the predictions are used only for the run's summary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Final

from cleave.arrays import Buffer, DType
from cleave.errors import PlanError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Finished, Multiplier, Pending, Side, product_of
from cleave.gemm import Gemm
from cleave.machine.backends import MatmulBackend, measure
from cleave.planner.coding import payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, Planner

_CALL_S: Final = 0.02  # duration of the measurement of the overhead per GEMM, in seconds
_MOST_REASONS = 20  # limits the list: expert routing changes the GEMM shapes in every step


@dataclass(frozen=True, slots=True)
class PsSpeed:
    """Measured speed of GEMMs on the PS in one dtype."""

    flops_per_s: float  # measured with 512 x 512 matrices
    call_s: float  # overhead per GEMM: time of a GEMM of 1 x 1 matrices

    def predicted_s(self, gemm: Gemm) -> float:
        """Return the predicted duration of a GEMM on the PS, in seconds."""
        return self.call_s + gemm.flops / self.flops_per_s


def measure_ps(backend: MatmulBackend, dtype: DType, clock: Callable[[], float]) -> PsSpeed:
    """Measure the speed that this machine sustains in GEMMs. `clock` returns seconds."""
    call = measure(backend, 1, dtype, clock, least_s=_CALL_S)
    return PsSpeed(measure(backend, 512, dtype, clock).flops_per_s, 2 / call.flops_per_s)


@dataclass(frozen=True, slots=True)
class Decision:
    """The predicted durations of a GEMM on the fleet and on the PS, and the faster choice."""

    gemm: Gemm
    dtype: DType
    fleet_s: float  # infinity if no device can run the GEMM
    ps_s: float

    @property
    def on_fleet(self) -> bool:
        """Return whether the fleet is predicted to be faster than the PS."""
        return self.fleet_s < self.ps_s

    @property
    def reason(self) -> str:
        """Return a sentence that tells users both durations and the faster choice."""
        faster = "fleet" if self.on_fleet else "PS"
        return (
            f"{self.gemm.m}x{self.gemm.n}x{self.gemm.k} {self.dtype.value}: "
            f"{self.fleet_s:.3g} s on the fleet, {self.ps_s:.3g} s on the PS, "
            f"so the {faster} is faster"
        )


class Selector:
    """A cache of decisions on whether a GEMM is faster on the fleet or on the PS.

    Before the first decision for a dtype, the selector measures the speed of `backend` with
    `clock`, which returns seconds.
    """

    def __init__(
        self,
        planner: Planner,
        backend: MatmulBackend,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.backend = backend
        self._planner = planner
        self._speed = cache(lambda dtype: measure_ps(backend, dtype, clock))
        self._known: dict[tuple[Gemm, ElementBytes, DType], Decision] = {}
        self._epoch = -1

    def decide(
        self,
        gemm: Gemm,
        element: ElementBytes,
        dtype: DType,
        devices: Sequence[DeviceRates],
        epoch: int,
    ) -> Decision:
        """Decide whether the fleet or the PS computes a GEMM faster.

        Choose the PS if no device supports the dtype or the devices lack memory. Discard all cached
        decisions if the fleet's epoch has changed. The dimensions of the GEMM must be positive.
        """
        if epoch != self._epoch:
            self._known.clear()
            self._epoch = epoch
        key = (gemm, element, dtype)
        decision = self._known.get(key)
        if decision is None:
            able = [d for d in devices if dtype.value in d.dtypes]
            fleet_s = float("inf")
            if able:
                with suppress(PlanError):  # the devices may have too little free memory
                    of_payloads = payload_rates(able, dtype.value)
                    plan = self._planner.plan(gemm, element, of_payloads)
                    fleet_s = plan.makespan_s + plan.fill_s
            decision = Decision(gemm, dtype, fleet_s, self._speed(dtype).predicted_s(gemm))
            self._known[key] = decision
        return decision


@dataclass(frozen=True, slots=True)
class Kept:
    """Summary of the submitted GEMMs that the PS computes faster than the fleet."""

    gemms: int  # number of GEMMs that are faster on the PS
    total: int  # number of all submitted GEMMs
    saves_s: float  # predicted time saved if these GEMMs run on the PS instead of the fleet
    reasons: tuple[str, ...]  # a sentence for each GEMM shape, largest savings first; at most 20


def summarise(decisions: Counter[Decision]) -> Kept:
    """Summarize decisions. `decisions` counts the submitted GEMMs for each decision."""
    kept = [(d, count) for d, count in decisions.items() if not d.on_fleet]
    kept.sort(key=lambda item: (item[0].ps_s - item[0].fleet_s) * item[1])
    return Kept(
        sum(count for _, count in kept),
        sum(decisions.values()),
        sum((d.fleet_s - d.ps_s) * count for d, count in kept),
        tuple(f"{count} times {d.reason}" for d, count in kept[:_MOST_REASONS]),
    )


class SelectiveFleet:
    """A fleet wrapper that computes a GEMM on the PS if that is faster.

    Args:
        inner: the fleet that runs GEMMs: `fleet` itself, or a wrapper around it.
        fleet: the fleet whose devices are compared with the PS.
        keep: whether GEMMs that are faster on the PS run there. If False, `kept` only reports them.
    """

    def __init__(self, inner: Multiplier, fleet: Fleet, selector: Selector, *, keep: bool) -> None:
        self.operand = inner.operand
        self._inner = inner
        self._fleet = fleet
        self._selector = selector
        self._keep = keep
        self._left_alone = False
        self._submitted: Counter[tuple[Gemm, ElementBytes, DType]] = Counter()
        self._decisions: Counter[Decision] = Counter()

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start a GEMM on the fleet, or compute it on the PS immediately."""
        kind = product_of(a, b, out)
        if kind[0].volume and self._left_alone:
            return self._here(a, b, out)
        if kind[0].volume:
            self._submitted[kind] += 1
            if self._keep:
                decision = self._decide(*kind)
                self._decisions[decision] += 1
                if not decision.on_fleet:
                    return self._here(a, b, out)
        return self._inner.submit(a, b, out)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Run all GEMMs on the PS in the `with` block, while a step by stages uses the devices."""
        self._left_alone = True
        try:
            yield
        finally:
            self._left_alone = False

    def kept(self) -> Kept:
        """Summarize the submitted GEMMs that the PS computes faster than the fleet.

        If `keep` is False, the summary compares the PS with the current devices.
        """
        if self._keep:
            return summarise(self._decisions)
        decisions: Counter[Decision] = Counter()
        for kind, times in self._submitted.items():
            decisions[self._decide(*kind)] += times
        return summarise(decisions)

    def _here(self, a: Side, b: Side, out: Buffer) -> Pending:
        self._selector.backend.matmul(a.matrix, b.matrix, out)
        return Finished(out)

    def _decide(self, gemm: Gemm, element: ElementBytes, dtype: DType) -> Decision:
        epoch, devices = self._fleet.runtime.fleet_rates()
        return self._selector.decide(gemm, element, dtype, devices, epoch)
