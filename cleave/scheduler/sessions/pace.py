"""How a device's measured pace compares with its rates, and how to plan with it. No I/O.

A sample covers the requests from when a device leaves idle until it is idle again. It holds the
time predicted by the device's rates, and the time from the PS's first send to the last answer.
What the PS then does with the answers makes no difference. The PS's own delays are part of every
sample, so a device is compared with the fleet. The median delay of all devices is nobody's fault;
a device is slow if it takes much longer than that in most samples.

A slow device either takes some factor longer for everything or returns each answer some time
late. It is planned with the one that explains its samples better, so the planner gives it less
work or none. A device without work is tried from time to time, so that it returns when it has
recovered. So is a device whose measured latency was large when it joined.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Final, NamedTuple

from cleave.planner.plan import DeviceRates
from cleave.planner.tiles.cost import streamed_s
from cleave.scheduler.sessions.setbacks import trial_in_s

SLOW: Final = 2.0
"""A device is slow if it takes this many times its predicted time plus the fleet's median delay,
and also `LEAST_LATE_S` longer."""

LEAST_LATE_S: Final = 0.05
"""The shortest delay, in seconds, that makes a device slow; shorter delays depend on the PS."""

SAMPLES: Final = 8
"""Number of latest samples kept. Their lower median counts, so one slow sample has no effect."""

ENOUGH: Final = 2
"""Number of new samples needed each time before a device is judged."""

_STEPS: Final = 2  # steps of an estimate per doubling: plans stay valid while it does not change
_CLEARLY: Final = 0.8  # if lateness does not explain the samples clearly better, the device is slow
_STILL: Final = 0.7  # share of the limits below which a slow device is no longer slow
_CHANGE: Final = 1.5  # smaller changes of an estimate are ignored


class Sample(NamedTuple):
    """Predicted and measured seconds; if the work was given up, `took_s` is a lower bound."""

    expected_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Corrections of a device's rates for planning.

    Attributes:
        slowness: factor by which everything takes longer.
        late_s: additional delay of each answer, in seconds.
    """

    slowness: float = 1.0
    late_s: float = 0.0

    @property
    def slow(self) -> bool:
        """Return whether the device is slower or later than its rates predict."""
        return self.slowness > 1 or self.late_s > 0

    @property
    def text(self) -> str:
        """Return a description for people; empty if the device is not slow."""
        if self.late_s:
            how = f"its answers come {self.late_s:.2g} s late"
        elif self.slowness > 1:
            how = f"it takes {self.slowness:.2g} times as long as its rates say"
        else:
            return ""
        return f"{how}; it gets less work, or none, until that changes"

    def of(self, rates: DeviceRates) -> DeviceRates:
        """Return the rates to plan with."""
        if not self.slow:
            return rates
        return replace(
            rates,
            downlink_bytes_per_s=rates.downlink_bytes_per_s / self.slowness,
            uplink_bytes_per_s=rates.uplink_bytes_per_s / self.slowness,
            flops_per_s=rates.flops_per_s / self.slowness,
            graph_flops_per_s=rates.graph_flops_per_s / self.slowness,
            latency_s=rates.latency_s + self.late_s / 2,
        )

    def near(self, other: Estimate) -> bool:
        """Return whether another estimate is too close to justify replanning."""
        if (self.late_s > 0) != (other.late_s > 0) or self.slow != other.slow:
            return False
        pairs = (self.slowness, other.slowness), (self.late_s or 1.0, other.late_s or 1.0)
        return all(1 / _CHANGE < a / b < _CHANGE for a, b in pairs)


AS_STATED: Final = Estimate()


@dataclass(slots=True)
class _Burst:
    """The requests to a device since it was last idle."""

    asked_s: float
    begun_s: float | None = None  # when the PS began to send
    runs: set[int] = field(default_factory=set)
    down_bytes: float = 0.0
    flops: int = 0
    up_bytes: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class Pace:
    """One device's samples and the resulting estimate.

    Attributes:
        estimate: the estimate that the device is planned with.
        samples: the latest samples.
        fresh: number of new samples since the last judgement.
        times: consecutive trials that it failed or that were followed by slow work.
        trial_s: time of the next trial, if the device gets no work until then.
    """

    estimate: Estimate = AS_STATED
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    fresh: int = 0
    times: int = 0
    trial_s: float = 0.0
    _burst: _Burst | None = None
    _wary: bool = False  # it passed a trial, but its pace is not confirmed yet
    _waiting_bytes: float = 0.0  # arrays sent for the next run

    # --- observations ---

    def array(self, nbytes: float) -> None:
        """Count the bytes on the wire of an array sent for the next run."""
        self._waiting_bytes += nbytes

    def asked(self, run: int, flops: int, up_bytes: float, now_s: float) -> None:
        """Count a run sent to the device, with the bytes on the wire of its result."""
        burst = self._burst
        if burst is None:
            burst = self._burst = _Burst(now_s)
        burst.runs.add(run)
        burst.down_bytes += self._waiting_bytes
        burst.flops += flops
        burst.up_bytes += up_bytes
        self._waiting_bytes = 0.0

    def sending(self, now_s: float) -> None:
        """Record that the PS begins to send requests to the device."""
        if self._burst is not None and self._burst.begun_s is None:
            self._burst.begun_s = now_s

    def answered(self, run: int, rates: DeviceRates, now_s: float, *, failed: bool = False) -> None:
        """Record an answered run; a burst with a failed run gives no sample."""
        burst = self._burst
        if burst is None or run not in burst.runs:
            return
        burst.runs.discard(run)
        burst.failed |= failed
        if not burst.runs:
            self._burst = None
            if not burst.failed:
                self._take(_sample(burst, rates, now_s), now_s)

    def given_up(self, runs: Iterable[int], rates: DeviceRates, now_s: float) -> None:
        """Record cancelled runs; their time so far is a sample only if longer than predicted."""
        burst = self._burst
        if burst is None:
            return
        waited_for = burst.runs & set(runs)
        burst.runs -= waited_for
        if burst.runs or not waited_for:
            return
        self._burst = None
        sample = _sample(burst, rates, now_s)
        if not burst.failed and sample.took_s > self._predicted_s(sample.expected_s):
            self._take(sample, now_s)

    def _predicted_s(self, expected_s: float) -> float:
        return self.estimate.slowness * expected_s + self.estimate.late_s

    def _take(self, sample: Sample, now_s: float) -> None:
        self.samples.append(sample)
        self.fresh += 1
        self.trial_s = max(self.trial_s, now_s + trial_in_s(self.times + 1))

    # --- judgement ---

    @property
    def delay_s(self) -> float | None:
        """Return the device's median delay beyond prediction; None with too few samples."""
        if len(self.samples) < ENOUGH:
            return None
        return median_low(sample.took_s - sample.expected_s for sample in self.samples)

    def judge(self, common_s: float, now_s: float) -> bool:
        """Judge the device if it has enough new samples; return whether its estimate changed.

        Args:
            common_s: delay common to all devices (`common_delay_s`).
        """
        if self.fresh < (1 if self._wary else ENOUGH):
            return False
        found = estimated(self.samples, common_s, slow=self.estimate.slow)
        if self._wary and (found.slow or self.fresh >= ENOUGH):
            self._wary = False
            self.times = self.times + 1 if found.slow else 0
            self.trial_s = now_s + trial_in_s(self.times + 1)
        if found.near(self.estimate):
            return False
        self.estimate, self.fresh = found, 0
        return True

    def due(self, rates: DeviceRates, now_s: float) -> bool:
        """Return whether a trial is due: the device is slow or far away, and had no recent work."""
        far = rates.latency_s >= LEAST_LATE_S
        return (self.estimate.slow or far) and now_s >= self.trial_s

    def tried(
        self, sample: Sample, rates: DeviceRates, common_s: float, now_s: float
    ) -> DeviceRates:
        """Update the estimate if a trial took at most half of the predicted time.

        Returns:
            The device's rates, with a new latency if the measured one proved too large.
        """
        if sample.took_s < sample.expected_s / 2:
            rates = replace(rates, latency_s=sample.took_s / 2)
        usual_s = sample.expected_s + common_s
        if sample.took_s > self._predicted_s(usual_s) / 2:
            self.put_off(now_s)
            return rates
        late_s = sample.took_s - usual_s
        still_late = late_s > max(LEAST_LATE_S, self.estimate.late_s / 100)
        self.estimate = Estimate(1.0, _stepped(late_s)) if still_late else AS_STATED
        self.samples.clear()
        self.fresh, self._wary = 0, True
        self.trial_s = now_s + trial_in_s(self.times + 1)
        return rates

    def put_off(self, now_s: float) -> None:
        """Postpone the next trial because the device did not do one as it should."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times + 1)


def estimated(samples: Sequence[Sample], common_s: float, *, slow: bool = False) -> Estimate:
    """Return the estimate that explains samples best: as stated, slower by a factor, or late.

    Args:
        samples: one device's samples, at least one.
        common_s: delay common to all devices, in seconds.
        slow: whether the device counts as slow now; it then stays slow until it clearly is not.
    """
    expected = [sample.expected_s + common_s for sample in samples]
    took = [sample.took_s for sample in samples]
    slowness = median_low(t / e for t, e in zip(took, expected, strict=True))
    late_s = median_low(t - e for t, e in zip(took, expected, strict=True))
    share = _STILL if slow else 1.0
    if slowness < share * SLOW or late_s < share * LEAST_LATE_S:
        return AS_STATED
    as_slow = _misfit(took, [slowness * e for e in expected])
    as_late = _misfit(took, [e + late_s for e in expected])
    if as_late < _CLEARLY * as_slow:
        return Estimate(1.0, _stepped(late_s))
    return Estimate(_stepped(slowness), 0.0)


def common_delay_s(delays_s: Iterable[float | None]) -> float:
    """Return the PS's own delay: the lower median of the known delays, at least 0."""
    known = sorted(delay_s for delay_s in delays_s if delay_s is not None)
    return max(0.0, known[(len(known) - 1) // 2]) if known else 0.0


def _misfit(took: Sequence[float], predicted: Sequence[float]) -> float:
    return sum(abs(math.log(t / p)) for t, p in zip(took, predicted, strict=True))


def _stepped(value: float) -> float:
    return float(2.0 ** (round(_STEPS * math.log2(value)) / _STEPS))


def _sample(burst: _Burst, rates: DeviceRates, now_s: float) -> Sample:
    began_s = burst.asked_s if burst.begun_s is None else burst.begun_s
    expected_s = expected(rates, burst.down_bytes, burst.flops, burst.up_bytes)
    return Sample(max(1e-6, expected_s), max(1e-6, now_s - began_s))


def expected(rates: DeviceRates, down_bytes: float, flops: float, up_bytes: float) -> float:
    """Return the predicted seconds from the first byte sent to the last byte received."""
    return 2 * rates.latency_s + streamed_s(
        down_bytes / rates.downlink_bytes_per_s,
        flops / rates.flops_per_s,
        up_bytes / rates.uplink_bytes_per_s,
    )
