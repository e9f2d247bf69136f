"""Estimate the pace of devices, to correct the rates that plans use. This module does no I/O.

A sample starts when an idle device gets a request, and ends when the device is idle again. The
sample consists of the time that the rates predict and the measured time from the PS's first send to
the device's last answer. Delays at the PS affect every sample, so the median delay over all devices
is attributed to the PS. A device is slow if most of its samples take much longer than the predicted
time plus this median.

A slow device either takes longer by a constant factor, or delays each answer by a constant time.
The model that fits the samples better corrects the device's rates, so that the device gets fewer
tasks or none. Slow devices and devices with a large latency are tested periodically while idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Final, NamedTuple

from cleave.planner.plan import DeviceRates, tile_s
from cleave.scheduler.sessions.reputation import trial_in_s

# A device is slow if it takes this many times its predicted time plus the fleet's median delay.
SLOW: Final = 2.0
LEAST_LATE_S: Final = 0.05  # shorter delays do not count, because the PS may cause them

# Number of samples stored per device. Their lower median is used, so one outlier has no effect.
SAMPLES: Final = 8
ENOUGH: Final = 2  # number of new samples that a device needs before it is judged again
_STEPS: Final = 2  # estimates are rounded to this many steps per doubling, so plans rarely change
_CLEARLY: Final = 0.8  # choose a delay if its misfit is below this share of a factor's misfit
_STILL: Final = 0.7  # a slow device counts as slow until it falls below this share of a limit
_CHANGE: Final = 1.5  # an estimate must change by this factor to be replaced


class Sample(NamedTuple):
    """A predicted and a measured time in seconds. For cancelled runs, `took_s` is a lower bound."""

    expected_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Corrections that are applied to a device's rates for planning."""

    # factor by which transfers and computation take longer than the rates predict
    slowness: float = 1.0
    late_s: float = 0.0  # additional delay of each answer, in seconds

    @property
    def slow(self) -> bool:
        """Return whether this estimate changes the device's rates."""
        return self.slowness > 1 or self.late_s > 0

    @property
    def text(self) -> str:
        """Return a description of the estimate for users; empty if the device is not slow."""
        if self.late_s:
            how = f"its answers arrive {self.late_s:.2g} s late"
        elif self.slowness > 1:
            how = f"it takes {self.slowness:.2g} times as long as its rates predict"
        else:
            return ""
        return f"{how}; it gets fewer tasks, or none, until this changes"

    def of(self, rates: DeviceRates) -> DeviceRates:
        """Return a device's rates with these corrections applied."""
        if not self.slow:
            return rates
        return replace(
            rates,
            downlink_bytes_per_s=rates.downlink_bytes_per_s / self.slowness,
            uplink_bytes_per_s=rates.uplink_bytes_per_s / self.slowness,
            flops_per_s=rates.flops_per_s / self.slowness,
            graph_flops_per_s=rates.graph_flops_per_s / self.slowness,
            graph_bf16_flops_per_s=rates.graph_bf16_flops_per_s / self.slowness,
            latency_s=rates.latency_s + self.late_s / 2,
        )

    def near(self, other: Estimate) -> bool:
        """Return whether another estimate is so similar that replanning is not worthwhile."""
        if (self.late_s > 0) != (other.late_s > 0) or self.slow != other.slow:
            return False
        pairs = (self.slowness, other.slowness), (self.late_s or 1.0, other.late_s or 1.0)
        return all(1 / _CHANGE < a / b < _CHANGE for a, b in pairs)


AS_STATED: Final = Estimate()


@dataclass(slots=True)
class _Burst:
    """The requests that a device received since it was last idle."""

    asked_s: float
    begun_s: float | None = None  # time when the PS began to send
    runs: set[int] = field(default_factory=set)
    down_bytes: float = 0.0
    flops: int = 0
    up_bytes: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class Pace:
    """One device's samples, and the pace estimated from them."""

    estimate: Estimate = AS_STATED
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    fresh: int = 0  # number of samples since the device was last judged
    # number of consecutive trials that failed or after which the device was slow again
    times: int = 0
    trial_s: float = 0.0  # earliest time of the next trial of a device without tasks
    _burst: _Burst | None = None
    _wary: bool = False  # the device passed a trial, but no sample has confirmed its pace
    _waiting_bytes: float = 0.0  # bytes of arrays sent for the next run

    # --- observations ---

    def array(self, nbytes: float) -> None:
        """Count an array sent for the device's next run. `nbytes` is its predicted wire size."""
        self._waiting_bytes += nbytes

    def asked(self, run: int, flops: int, up_bytes: float, now_s: float) -> None:
        """Record a requested run. `up_bytes` is the predicted wire size of the run's result."""
        burst = self._burst
        if burst is None:
            burst = self._burst = _Burst(now_s)
        burst.runs.add(run)
        burst.down_bytes += self._waiting_bytes
        burst.flops += flops
        burst.up_bytes += up_bytes
        self._waiting_bytes = 0.0

    def sending(self, now_s: float) -> None:
        """Record that the PS started to send requests to the device."""
        if self._burst is not None and self._burst.begun_s is None:
            self._burst.begun_s = now_s

    def answered(self, run: int, rates: DeviceRates, now_s: float, *, failed: bool = False) -> None:
        """Record an answered run. Take no sample if a run failed since the device was last idle."""
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
        """Record cancelled runs. Take a sample only if the runs took longer than predicted."""
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
        """Return the median delay beyond the prediction in seconds; None with too few samples."""
        if len(self.samples) < ENOUGH:
            return None
        return median_low(sample.took_s - sample.expected_s for sample in self.samples)

    def judge(self, common_s: float, now_s: float) -> bool:
        """Update the estimate if enough new samples exist. Return whether the estimate changed.

        Args:
            common_s: delay common to all devices, in seconds (see `common_delay_s`).
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
        """Return whether a pace trial is due. Only slow or high-latency devices need one."""
        far = rates.latency_s >= LEAST_LATE_S
        return (self.estimate.slow or far) and now_s >= self.trial_s

    def tried(
        self, sample: Sample, rates: DeviceRates, common_s: float, now_s: float
    ) -> DeviceRates:
        """Update the estimate if a trial took at most half of the time that the estimate predicted.

        Returns:
            The device's rates, with a new latency if the trial took less than half of the time that
            the rates predicted.
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
        """Postpone the next trial after a trial that the device did not pass."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times + 1)


def estimated(samples: Sequence[Sample], common_s: float, *, slow: bool = False) -> Estimate:
    """Return the estimate that fits the samples best: no correction, a factor, or a delay.

    Args:
        common_s: delay common to all devices, in seconds.
        slow: whether the device counts as slow now. If so, the limits for slowness are lower.
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
    """Return the delay attributed to the PS: the lower median of the known delays, at least 0."""
    known = sorted(delay_s for delay_s in delays_s if delay_s is not None)
    return max(0.0, known[(len(known) - 1) // 2]) if known else 0.0


def _misfit(took: Sequence[float], predicted: Sequence[float]) -> float:
    return sum(abs(math.log(t / p)) for t, p in zip(took, predicted, strict=True))


def _stepped(value: float) -> float:
    return float(2.0 ** (round(_STEPS * math.log2(value)) / _STEPS))


def _sample(burst: _Burst, rates: DeviceRates, now_s: float) -> Sample:
    began_s = burst.asked_s if burst.begun_s is None else burst.begun_s
    expected_s = tile_s(rates, burst.down_bytes, burst.flops, burst.up_bytes)
    return Sample(max(1e-6, expected_s), max(1e-6, now_s - began_s))
