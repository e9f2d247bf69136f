"""Simulate training under churn: resident stages, usual stages, a pipeline with checkpoints.

Every `interval` steps, each holder uploads a snapshot of its stage (parameters and moments) while
its uplink is idle. When a holder is lost, training waits until the next holder has downloaded the
snapshot and replayed the logged steps: backward passes only, without pipeline bubbles. A *hot
spare* of a stage is a device without a stage that follows the stage's log, one step behind. It also
uploads the stage's snapshots if that is faster.

Between two events, all rates are constant. Events are: a device joins or leaves, a snapshot starts
or is complete, a device has downloaded a snapshot or has caught up with a stage.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final

from benchmarks.resident_churn.costs import HeldStep, ResidentCosts
from profiles.availability import Availability

_FOLLOWS: Final = 0.9  # share of a step's time for which a hot spare may be busy
_CLOSE: Final = 1e-6  # seconds or steps that count as nothing


@dataclass(frozen=True, slots=True)
class Policy:
    """What protects a run against losses.

    Attributes:
        interval: number of steps between snapshots, or more if an upload takes more.
        hot: whether each stage has a hot spare, if a device without a stage has the memory and the
            time.
        keeps: whether a device that comes back still has the state of its stages, so that it only
            replays the steps that it missed, if the log still has them.
        rollback: whether all holders go back to the last complete checkpoint after a loss, as in a
            pipeline without a log. Generously, checkpoints cost no more than snapshots, and other
            holders have a copy of their checkpoint.
        detection_s: time in seconds until the PS notices a lost device.
        announced: share of departures that are announced. The device then stays until its state
            is handed over, unless replaying the log is faster.
    """

    interval: int
    hot: bool = False
    keeps: bool = False
    rollback: bool = False
    detection_s: float = 5.0
    announced: float = 0.0


@dataclass(frozen=True, slots=True)
class ChurnedRun:
    """The result of a simulated run.

    Attributes:
        steps: number of useful steps: steps that were not repeated.
        wall_s: simulated time in seconds.
        losses: number of departures of a device with a stage.
        waited_s: time during which training waited for a new holder.
        uploaded_s: uplink time of all snapshots.
        longest_log: largest number of steps that the log of a stage had.
    """

    steps: float
    wall_s: float
    losses: int = 0
    waited_s: float = 0.0
    uploaded_s: float = 0.0
    longest_log: float = 0.0

    def effective(self, step_s: float) -> float:
        """Return the effective training time: time without losses, divided by time with losses.

        `step_s` is the time of a step, in seconds, if no device is ever absent.
        """
        return self.steps * step_s / self.wall_s


def changes(
    availability: Availability, devices: Sequence[int], rng: random.Random
) -> Iterator[tuple[float, int, bool]]:
    """Yield when devices join (True) or leave (False): (seconds, device ID, joins), in order."""

    def of_device(device: int, own: random.Random) -> Iterator[tuple[float, int, bool]]:
        for begin_s, end_s in availability.presences(own):
            yield begin_s, device, True
            if math.isfinite(end_s):
                yield end_s, device, False

    return heapq.merge(*(of_device(d, random.Random(rng.random())) for d in devices))


def usual_stages(
    step_s: Sequence[float],
    lost_s: Sequence[float],
    churn: Iterator[tuple[float, int, bool]],
    wall_s: float,
) -> ChurnedRun:
    """Simulate usual stages, which send weights and gradients in every step.

    After a change, the remaining devices continue with a new plan.

    Args:
        step_s: time of a step by number of devices; infinite if they are too few.
        lost_s: delay of a lost device, by the number of devices before the loss.
        churn: changes of the fleet, as `changes` yields them.
        wall_s: time to simulate, in seconds.
    """
    now_s = owed_s = steps = 0.0
    count = losses = 0
    for at_s, _, joins in churn:
        free_s = max(0.0, min(at_s, wall_s) - now_s - owed_s)
        owed_s = max(0.0, owed_s - (min(at_s, wall_s) - now_s))
        steps += free_s / step_s[count]
        now_s = min(at_s, wall_s)
        if at_s >= wall_s:
            break
        if not joins:
            losses += 1
            owed_s += lost_s[count]
        count += 1 if joins else -1
    else:
        steps += (wall_s - now_s - owed_s) / step_s[count]
    return ChurnedRun(steps, wall_s, losses)


def run_resident(
    costs: ResidentCosts,
    policy: Policy,
    churn: Iterator[tuple[float, int, bool]],
    wall_s: float,
    rng: random.Random,
) -> ChurnedRun:
    """Simulate resident stages, or a pipeline with checkpoints, for `wall_s` seconds.

    Args:
        churn: changes of the fleet, as `changes` yields them. Devices that are present at the start
            hold the stages from the start.
        rng: decides which departures are announced.
    """
    return _Run(costs, policy, rng).run(churn, wall_s)


@dataclass(slots=True)
class _Copy:
    """A copy of a stage that is not its holder: a hot spare's, or the next holder's.

    Attributes:
        left_s: time until the snapshot is downloaded.
        position: number of steps that the copy contains.
        taking: whether training waits for this copy.
    """

    stage: int
    device: int
    left_s: float
    position: float
    taking: bool = False


class _Run:
    """The state of a simulated run. `sending[i]` is the rest of stage i's upload in seconds."""

    def __init__(self, costs: ResidentCosts, policy: Policy, rng: random.Random) -> None:
        self._costs, self._policy, self._rng = costs, policy, rng
        count = len(costs.stages)
        self._stages = range(count)
        self._present: list[int] = []
        self._holders: list[int | None] = [None] * count
        self._copies: list[_Copy] = []
        self._kept: dict[tuple[int, int], float] = {}  # steps in what absent devices keep
        self._saved = [0] * count
        self._sending: list[tuple[int, float] | None] = [None] * count
        self._next_snapshot = policy.interval
        self._steps = self._waited_s = self._uploaded_s = self._longest = 0.0
        self._losses = 0
        self._step: HeldStep | None = None  # None while training waits

    def run(self, churn: Iterator[tuple[float, int, bool]], wall_s: float) -> ChurnedRun:
        now_s = 0.0
        never = (math.inf, -1, True)
        change = next(churn, never)
        while change[0] <= 0:
            self._present.append(change[1])
            change = next(churn, never)
        for stage in self._stages if self._present else ():
            self._holders[stage] = self._present[stage % len(self._present)]
        self._assign()
        while now_s < wall_s:
            step_s = self._step.step_s if self._step else math.inf
            uploads = self._uploads()
            speeds = [self._speed(copy, step_s) for copy in self._copies]
            until_s = min(change[0], wall_s) - now_s
            next_s = [until_s, (self._next_snapshot - self._steps) * step_s]
            next_s += [left / uploads[n] for n, (_, left) in self._open() if n in uploads]
            next_s += map(self._copy_s, self._copies, speeds, repeat(step_s))
            passed_s = max(0.0, min(next_s))
            self._advance(passed_s, step_s, uploads, speeds)
            now_s += passed_s
            if passed_s >= until_s:
                now_s = min(change[0], wall_s)
                if now_s < wall_s:
                    self._changed(change[1], joins=change[2])
                    change = next(churn, never)
            self._settle()
            self._assign()
        counts = self._losses, self._waited_s, self._uploaded_s, self._longest
        return ChurnedRun(self._steps, wall_s, *counts)

    # --- rates, constant until the next event ---

    def _open(self) -> list[tuple[int, tuple[int, float]]]:
        """Return each stage whose snapshot is under way, with the snapshot's step and rest."""
        return [(n, sending) for n, sending in enumerate(self._sending) if sending is not None]

    def _uploads(self) -> dict[int, float]:
        """Return the rate of each upload: uplink time per second. Uploads never delay a step."""
        held = self._step
        if held is None:
            return {n: 1 / self._holders.count(self._holders[n]) for n, _ in self._open()}
        idle_s = {stage: held.idle_s[stage] for stage, _ in self._open()}
        for copy in self._copies:  # the uplink of a hot spare is idle
            if copy.stage in idle_s and self._current(copy):
                spare_s = held.step_s / len(self._copies_on(copy.device))
                idle_s[copy.stage] = max(idle_s[copy.stage], spare_s)
        return {stage: each_s / held.step_s for stage, each_s in idle_s.items() if each_s > 0}

    def _held(self, device: int) -> list[int]:
        return [n for n, holder in enumerate(self._holders) if holder == device]

    def _copies_on(self, device: int) -> list[_Copy]:
        return [copy for copy in self._copies if copy.device == device]

    def _current(self, copy: _Copy) -> bool:
        return copy.left_s <= 0 and copy.position >= self._steps - 1 - _CLOSE

    def _speed(self, copy: _Copy, step_s: float) -> float:
        """Return the speed of a copy: seconds downloaded or steps replayed, per second."""
        mine = self._copies_on(copy.device)
        if any(each.taking for each in mine):
            if not copy.taking:
                return 0.0  # the device recovers another stage first
            mine = [each for each in mine if each.taking]
        if copy.left_s > 0:
            return 1 / sum(each.left_s > 0 for each in mine)
        if not copy.taking and self._current(copy):
            return 1 / step_s
        return 1 / sum(self._costs.replay_s(each.stage, copy.device) for each in mine)

    def _copy_s(self, copy: _Copy, speed: float, step_s: float) -> float:
        """Return the time in seconds until a copy is downloaded or has caught up."""
        if copy.left_s > 0:
            return copy.left_s / speed if speed > 0 else math.inf
        behind = self._steps - copy.position - (0 if copy.taking else 1)
        closing = speed - 1 / step_s
        if closing <= 0 or (not copy.taking and behind <= _CLOSE):
            return math.inf
        return behind / closing

    # --- events ---

    def _advance(
        self,
        passed_s: float,
        step_s: float,
        uploads: Mapping[int, float],
        speeds: Sequence[float],
    ) -> None:
        self._steps += passed_s / step_s
        self._waited_s += passed_s * (self._step is None)
        for stage, rate in uploads.items():
            step, left = self._sending[stage] or (0, 0.0)
            self._sending[stage] = step, left - rate * passed_s
            self._uploaded_s += rate * passed_s
        for copy, speed in zip(self._copies, speeds, strict=True):
            if copy.left_s > 0:
                copy.left_s -= speed * passed_s
                copy.left_s *= copy.left_s > _CLOSE
            else:
                copy.position = min(self._steps, copy.position + speed * passed_s)
        self._longest = max(self._longest, self._steps - min(self._saved))

    def _settle(self) -> None:
        """Complete snapshots and copies, and start the next snapshot."""
        for stage, (step, left) in self._open():
            if left <= _CLOSE:
                self._saved[stage], self._sending[stage] = step, None
        if self._steps >= self._next_snapshot - _CLOSE:
            self._next_snapshot += self._policy.interval
        for stage, holder in enumerate(self._holders):
            due = self._saved[stage] < self._next_snapshot - self._policy.interval
            if due and holder is not None and self._sending[stage] is None:
                upload_s = self._costs.upload_s(stage, holder)
                self._sending[stage] = math.floor(self._steps + _CLOSE), upload_s
        for copy in list(self._copies):
            holder = self._holders[copy.stage]
            shared = holder is not None and len(self._held(holder)) > 1
            relieves = shared and not self._held(copy.device) and self._current(copy)
            whole = copy.left_s <= 0 and copy.position >= self._steps - _CLOSE
            if copy in self._copies and ((copy.taking and whole) or relieves):
                self._take(copy)

    def _take(self, copy: _Copy) -> None:
        """Make a copy's device the holder. It stops following stages."""
        self._holders[copy.stage] = copy.device
        self._copies.remove(copy)
        mine = [other for other in self._copies_on(copy.device) if not other.taking]
        self._copies = [other for other in self._copies if other not in mine]

    def _changed(self, device: int, *, joins: bool) -> None:
        if joins:
            self._present.append(device)
            self._resume(device)
            return
        self._present.remove(device)
        lost = self._held(device)
        if self._policy.keeps:
            self._kept |= {(device, n): float(math.floor(self._steps)) for n in lost}
            whole = (copy for copy in self._copies_on(device) if copy.left_s <= 0)
            self._kept |= {(device, copy.stage): copy.position for copy in whole}
        self._copies = [copy for copy in self._copies if copy.device != device]
        announced = self._rng.random() < self._policy.announced
        if not lost:
            return
        self._losses += 1
        for stage in lost:
            self._holders[stage] = self._sending[stage] = None
        if self._policy.rollback and not announced:
            self._roll_back()
        self._assign()
        for copy in self._copies:
            if copy.stage not in lost or not copy.taking:
                continue
            if not announced:
                copy.left_s += self._policy.detection_s
            elif self._current(copy):  # the holder waits until the hot spare has the same step
                copy.position = self._steps
            else:
                up_s = self._costs.upload_s(copy.stage, device)
                handed_s = max(up_s, self._costs.download_s(copy.stage, copy.device))
                if handed_s < self._behind_s(copy):
                    copy.left_s, copy.position = handed_s, self._steps

    def _resume(self, device: int) -> None:
        """Let a device that is back replace copies that need more time than what it kept."""
        for number, copy in enumerate(self._copies):
            mine = self._copy(copy.stage, device)
            slower = self._behind_s(copy) > self._behind_s(mine) and not self._current(copy)
            stages = [copy.stage, *(other.stage for other in self._copies_on(device))]
            if mine.left_s <= 0 and slower and self._costs.fits(device, stages):
                self._copies[number] = replace(mine, taking=copy.taking)

    def _behind_s(self, copy: _Copy) -> float:
        """Return the time in seconds that a copy needs for its download and for replaying."""
        replay_s = self._costs.replay_s(copy.stage, copy.device)
        return copy.left_s + (self._steps - copy.position) * replay_s

    def _roll_back(self) -> None:
        """Continue from the last checkpoint that every stage has completed."""
        step = min(self._saved)
        self._steps, self._saved = float(step), [step for _ in self._saved]
        self._sending = [None for _ in self._sending]
        self._next_snapshot = step + self._policy.interval
        for copy in self._copies:
            copy.position = float(step)
        self._kept = {key: min(at, step) for key, at in self._kept.items()}

    # --- which device does what ---

    def _assign(self) -> None:
        """Give stages without a holder to devices, and stages to hot spares."""
        copies = {copy.stage: copy for copy in self._copies}  # a stage has one copy at most
        for stage in self._stages:
            if self._holders[stage] is None:
                copy = copies.get(stage) or self._start(stage, self._next_holder(stage))
                if copy is not None:
                    copy.taking = True
        held = [holder for holder in self._holders if holder is not None]
        whole = len(held) == len(self._holders)
        self._step = self._costs.step(held) if whole else None
        if self._step is None:
            return
        copied = {copy.stage for copy in self._copies}
        for stage in self._stages:
            shared = held.count(held[stage]) > 1
            if stage not in copied and (shared or self._policy.hot):
                self._start(stage, self._spare(stage, self._step.step_s))

    def _copy(self, stage: int, device: int) -> _Copy:
        """Return the copy with which a device begins: what it kept, or the last snapshot."""
        kept = self._kept.get((device, stage), -1.0)
        if kept >= self._saved[stage]:
            return _Copy(stage, device, 0.0, kept)
        left_s = self._costs.download_s(stage, device)
        return _Copy(stage, device, left_s, float(self._saved[stage]))

    def _start(self, stage: int, device: int | None) -> _Copy | None:
        if device is None:
            return None
        self._copies.append(copy := self._copy(stage, device))
        return copy

    def _next_holder(self, stage: int) -> int | None:
        """Return the device that recovers a stage: one without a stage, else one with memory."""

        def load(device: int) -> list[int]:
            taking = [copy.stage for copy in self._copies_on(device) if copy.taking]
            return [*self._held(device), *taking]

        able = [d for d in self._present if self._costs.fits(d, [*load(d), stage])]
        behind = {d: self._behind_s(self._copy(stage, d)) for d in able}
        return min(able, key=lambda d: (len(load(d)), behind[d]), default=None)

    def _spare(self, stage: int, step_s: float) -> int | None:
        """Return the device without a stage that can follow one more stage, or None."""

        def able(device: int) -> bool:
            followed = [*(copy.stage for copy in self._copies_on(device)), stage]
            busy_s = sum(self._costs.replay_s(n, device) for n in followed)
            return busy_s <= _FOLLOWS * step_s and self._costs.fits(device, followed)

        idle = [d for d in self._present if not self._held(d) and able(d)]
        behind = {d: self._behind_s(self._copy(stage, d)) for d in idle}
        load = {d: len(self._copies_on(d)) * step_s for d in idle}
        return min(idle, key=lambda d: load[d] + behind[d], default=None)
