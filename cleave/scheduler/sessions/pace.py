"""How long a device's answers take, compared with its rates, and how to plan with it. Pure.

A sample covers what a device was asked from when it was idle until it is idle again: how long that
should take by its rates, and how long it took, from when the PS began to send until the last answer
came. What the PS then does with the answers makes no difference. The PS's own delays are part of
every device's samples, so a device is compared with the fleet: the median delay of all devices is
nobody's fault, and a device is slow if it takes much longer than that in most samples.

A device is slow in one of two ways: everything takes some factor longer, or each answer comes some
time late. It is planned with the one that explains its samples better. The planner then gives it
less work, or none, as it would any device of such rates. A device that gets none is tried from time
to time, so that it comes back when it has recovered. So is one whose latency was found to be large
when it joined.
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
"""A device is slow when it takes this many times as long as it should, allowing for the fleet's
median delay, and takes `LEAST_LATE_S` longer as well."""

LEAST_LATE_S: Final = 0.05
"""The shortest delay, in seconds, that makes a device slow; below it, what the PS does itself
decides."""

SAMPLES: Final = 8
"""Latest samples that are kept. Their lower median counts, so a single slow one has no effect."""

ENOUGH: Final = 2
"""New samples that are needed to judge a device, and each time to judge it again."""

_STEPS: Final = 2  # of an estimate, for each doubling: plans are kept as long as it does not change
_CLEARLY: Final = 0.8  # of samples that look alike both explain all: then it is slow
_STILL: Final = 0.7  # of where a device begins to be slow, it ceases to be
_CHANGE: Final = 1.5  # an estimate changes by so much, or not at all


class Sample(NamedTuple):
    """How long something should have taken, and took; if given up, how long it took at least."""

    expected_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """How a device is planned with.

    Attributes:
        slowness: how many times longer it takes for everything.
        late_s: how much later each of its answers comes, besides.
    """

    slowness: float = 1.0
    late_s: float = 0.0

    @property
    def slow(self) -> bool:
        """Say whether the device differs from what its rates say."""
        return self.slowness > 1 or self.late_s > 0

    @property
    def text(self) -> str:
        """Describe the estimate for people; empty where there is nothing to say."""
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
        """Say whether the difference to another estimate is too small to plan anew."""
        if (self.late_s > 0) != (other.late_s > 0) or self.slow != other.slow:
            return False
        pairs = (self.slowness, other.slowness), (self.late_s or 1.0, other.late_s or 1.0)
        return all(1 / _CHANGE < a / b < _CHANGE for a, b in pairs)


AS_STATED: Final = Estimate()


@dataclass(slots=True)
class _Burst:
    """What a device was asked since it was last idle."""

    asked_s: float
    begun_s: float | None = None  # when the PS began to send it
    runs: set[int] = field(default_factory=set)
    down_bytes: float = 0.0
    flops: int = 0
    up_bytes: float = 0.0
    failed: bool = False


@dataclass(slots=True)
class Pace:
    """One device's samples, and what follows from them.

    Attributes:
        estimate: how the device is planned with now.
        samples: the latest samples.
        fresh: how many of them are new since it was last judged.
        times: trials in a row that it failed, or that were followed by slow work.
        trial_s: when it is to be tried, if it gets no work until then.
    """

    estimate: Estimate = AS_STATED
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    fresh: int = 0
    times: int = 0
    trial_s: float = 0.0
    _burst: _Burst | None = None
    _wary: bool = False  # it passed a trial, and has not shown yet that it works as it should
    _waiting_bytes: float = 0.0  # of arrays on their way, for the run that comes next

    # --- what happens ---

    def array(self, nbytes: float) -> None:
        """Count an array that travels to the device, coded or not, for the run that follows."""
        self._waiting_bytes += nbytes

    def asked(self, run: int, flops: int, up_bytes: float, now_s: float) -> None:
        """Count a run that the device is asked to do, and what of its result is to travel."""
        burst = self._burst
        if burst is None:
            burst = self._burst = _Burst(now_s)
        burst.runs.add(run)
        burst.down_bytes += self._waiting_bytes
        burst.flops += flops
        burst.up_bytes += up_bytes
        self._waiting_bytes = 0.0

    def sending(self, now_s: float) -> None:
        """Note that the PS begins to send the device something that it was asked."""
        if self._burst is not None and self._burst.begun_s is None:
            self._burst.begun_s = now_s

    def answered(self, run: int, rates: DeviceRates, now_s: float, *, failed: bool = False) -> None:
        """Note that the device answered a run; a burst with a failed run gives no sample."""
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
        """Note that the device need not answer some runs any more.

        It would have taken longer than until now; that is a sample if it is longer than predicted.
        """
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

    # --- what follows ---

    @property
    def delay_s(self) -> float | None:
        """Return how much longer than predicted the device takes; None where that is not known."""
        if len(self.samples) < ENOUGH:
            return None
        return median_low(sample.took_s - sample.expected_s for sample in self.samples)

    def judge(self, common_s: float, now_s: float) -> bool:
        """Judge the device again if there are enough new samples.

        Args:
            common_s: the delay that all devices have (`common_delay_s`).
            now_s: the time.

        Returns:
            Whether the device is to be planned with another estimate.
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
        """Say whether to try the device: it is slow or far away, and had no work for a while."""
        far = rates.latency_s >= LEAST_LATE_S
        return (self.estimate.slow or far) and now_s >= self.trial_s

    def tried(
        self, sample: Sample, rates: DeviceRates, common_s: float, now_s: float
    ) -> DeviceRates:
        """Take a trial's time: if it is at most half of what was predicted, change the estimate.

        Returns:
            The device's rates, with a new latency if the trial shows that the measured one was too
                large.
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
        """Put the next trial off, because the device did not do one as it should."""
        self.times += 1
        self.trial_s = now_s + trial_in_s(self.times + 1)


def estimated(samples: Sequence[Sample], common_s: float, *, slow: bool = False) -> Estimate:
    """Return the estimate that explains samples best: as stated, a factor slower, or a delay later.

    Args:
        samples: one device's samples, at least one.
        common_s: how much longer than predicted all devices take.
        slow: whether the device counts as slow now; then it stays slow until it clearly is not.
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
    """Return the delay that the PS itself causes: the lower median of all delays, 0 without any."""
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
    """Return the seconds something takes by a device's rates, first byte sent to last back."""
    return 2 * rates.latency_s + streamed_s(
        down_bytes / rates.downlink_bytes_per_s,
        flops / rates.flops_per_s,
        up_bytes / rates.uplink_bytes_per_s,
    )
