"""Selection of the GEMMs that run on the fleet, by predicted time on the fleet and on the PS.

The PS measures its own speed once per dtype. With `--offload auto`, it keeps the GEMMs that it does
faster alone. With `--offload all`, it makes the comparison only for the summary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import PlanError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Finished, Multiplier, Operand, Pending, Side, product_of
from cleave.gemm import Gemm
from cleave.machine.backends import MatmulBackend
from cleave.planner.coding import payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, Planner

_SIDE = 512
_FEWEST, _MOST, _ENOUGH_S = 3, 200, 0.1
_MOST_REASONS = 20  # experts' shapes depend on routing and change every step


@dataclass(frozen=True, slots=True)
class PsSpeed:
    """The PS's own throughput in one dtype.

    Attributes:
        flops_per_s: FLOP/s of a square GEMM of side 512.
        call_s: seconds of a GEMM of side 1.
    """

    flops_per_s: float
    call_s: float

    def predicted_s(self, gemm: Gemm) -> float:
        """Return the predicted seconds of a GEMM on the PS alone."""
        return self.call_s + gemm.flops / self.flops_per_s


def measure_ps(backend: MatmulBackend, dtype: DType, clock: Callable[[], float]) -> PsSpeed:
    """Time GEMMs on this machine for about a tenth of a second per size, and take the fastest.

    The fastest time is least affected by other processes.

    Args:
        clock: returns seconds, like `time.perf_counter`.
    """

    def best_s(side: int) -> float:
        a, b, out = (arrays.empty(side, side, dtype) for _ in range(3))
        for buffer in (a, b):
            buffer.array[...] = 0
        backend.matmul(a, b, out)  # starts threads, loads kernels
        times: list[float] = []
        while len(times) < _FEWEST or (sum(times) < _ENOUGH_S and len(times) < _MOST):
            began_s = clock()
            backend.matmul(a, b, out)
            times.append(clock() - began_s)
        return max(min(times), 1e-9)

    return PsSpeed(2 * _SIDE**3 / best_s(_SIDE), best_s(1))


@dataclass(frozen=True, slots=True)
class Decision:
    """The predicted times of a GEMM on the fleet and on the PS."""

    gemm: Gemm
    dtype: DType
    fleet_s: float
    ps_s: float

    @property
    def on_fleet(self) -> bool:
        return self.fleet_s < self.ps_s

    @property
    def reason(self) -> str:
        """Describe the decision for people."""
        faster = "fleet" if self.on_fleet else "PS"
        return (
            f"{self.gemm.m}x{self.gemm.n}x{self.gemm.k} {self.dtype.value}: "
            f"{self.fleet_s:.3g} s on the fleet, {self.ps_s:.3g} s on the PS, "
            f"so the {faster} is faster"
        )


class Selector:
    """Decides whether GEMMs are faster on the fleet or on the PS, and caches its decisions.

    Args:
        planner: predicts the fleet's time.
        backend: the PS's backend, measured on the first use of a dtype.
        clock: returns seconds, for the measurement.
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
        """Compare the current fleet with the PS alone.

        Args:
            gemm: the GEMM, with positive sides.
            devices: the fleet; the PS is faster if no device has enough memory.
            epoch: changes with the fleet; decisions are cached until then.
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
                with suppress(PlanError):  # devices may have no free memory for it
                    of_payloads = payload_rates(able, dtype.value)
                    plan = self._planner.plan(gemm, element, of_payloads)
                    fleet_s = plan.makespan_s + plan.fill_s
            decision = Decision(gemm, dtype, fleet_s, self._speed(dtype).predicted_s(gemm))
            self._known[key] = decision
        return decision


@dataclass(frozen=True, slots=True)
class Kept:
    """Counts of the submitted GEMMs that stay on the PS, or would.

    Attributes:
        gemms: number of GEMMs that stay, out of `total`.
        total: number of submitted GEMMs.
        saves_s: predicted seconds saved, compared with sending everything to the fleet.
        reasons: a sentence for each of the shapes that save most, largest saving first.
    """

    gemms: int
    total: int
    saves_s: float
    reasons: tuple[str, ...]


def summarise(decisions: Counter[Decision]) -> Kept:
    """Sum decisions, weighted by how often each GEMM was submitted."""
    kept = [(d, count) for d, count in decisions.items() if not d.on_fleet]
    kept.sort(key=lambda item: (item[0].ps_s - item[0].fleet_s) * item[1])
    return Kept(
        sum(count for _, count in kept),
        sum(decisions.values()),
        sum((d.fleet_s - d.ps_s) * count for d, count in kept),
        tuple(f"{count} times {d.reason}" for d, count in kept[:_MOST_REASONS]),
    )


class SelectiveFleet:
    """A fleet that sends devices only the GEMMs that they do faster than the PS.

    Args:
        inner: multiplies on the fleet.
        fleet: the fleet that is compared with the PS.
        selector: decides.
        keep: whether to keep GEMMs on the PS. If not, all go to the fleet, and `kept` reports which
            might have stayed.
    """

    def __init__(self, inner: Multiplier, fleet: Fleet, selector: Selector, *, keep: bool) -> None:
        self._inner = inner
        self._fleet = fleet
        self._selector = selector
        self._keep = keep
        self._left_alone = False
        self._submitted: Counter[tuple[Gemm, ElementBytes, DType]] = Counter()
        self._decisions: Counter[Decision] = Counter()

    def operand(self, buffer: Buffer) -> Operand:
        """Register a matrix; see `Fleet.operand`."""
        return self._inner.operand(buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start a product on the fleet or do it here; see `Fleet.submit`."""
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
        """Multiply everything on the PS meanwhile, because the fleet does something else."""
        self._left_alone = True
        try:
            yield
        finally:
            self._left_alone = False

    def kept(self) -> Kept:
        """Return what stayed on the PS, or what would have with the current fleet."""
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
