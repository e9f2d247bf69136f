"""Devices that answer late or slowly: planned with as they are, tried again; nobody else blamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.arrays import Buffer, DType, empty
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.machine.backends import NumpyBackend
from cleave.planner.plan import DeviceRates
from cleave.protocol.messages import Message, Result
from cleave.scheduler.instructions import Note
from cleave.scheduler.sessions.pace import (
    AS_STATED,
    ENOUGH,
    LEAST_LATE_S,
    SAMPLES,
    SLOW,
    Pace,
    Sample,
    common_delay_s,
    estimated,
)
from cleave.scheduler.sessions.reputation import MOST_TRIAL_S, TRIAL_S, trial_in_s
from cleave.server.runtime import TICK_S
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice
from tests.emulator.fleets import virtual

RATES = DeviceRates(1, 1e6, 1e6, 1e9, 0.01)
EXPECTED = (0.1, 0.2, 0.5, 0.15, 0.9, 0.3, 0.12, 0.25)


def samples(took: Callable[[float], float]) -> list[Sample]:
    return [Sample(e, took(e)) for e in EXPECTED]


# --- what samples say ---


@pytest.mark.parametrize("common_s", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("late_s", [2.5, 5.0])
def test_answers_that_come_late_are_told_from_slow_work(common_s: float, late_s: float) -> None:
    late = estimated(samples(lambda e: e + common_s + late_s), common_s)
    assert late.slowness == 1.0
    assert late.late_s == pytest.approx(late_s, rel=0.3)
    slow = estimated(samples(lambda e: 5 * (e + common_s)), common_s)
    assert slow.late_s == 0.0
    assert slow.slowness == pytest.approx(5, rel=0.3)


@given(st.lists(st.tuples(st.floats(1e-4, 100), st.floats(0.5, 1.9)), min_size=1, max_size=SAMPLES),
       st.floats(0.0, 50.0))  # fmt: skip
def test_who_is_about_as_slow_as_all_are_is_planned_with_as_stated(
    seen: list[tuple[float, float]], common_s: float
) -> None:
    """A busy server delays every device alike, and nobody is blamed for it."""
    honest = [Sample(e, (e + common_s) * noise) for e, noise in seen]
    assert estimated(honest, common_s) == AS_STATED


@given(st.lists(st.floats(0.01, 2.0), min_size=SAMPLES, max_size=SAMPLES), st.floats(1.0, 20.0))
def test_a_fleet_that_is_slow_as_one_is_planned_with_as_stated(
    shapes: list[float], factor: float
) -> None:
    """Where the server or its card slows all by a factor, too."""
    paces = []
    for number in range(4):
        pace = Pace()
        pace.samples.extend(Sample(e, factor * e * (1 + number / 20)) for e in shapes)
        pace.fresh = SAMPLES
        paces.append(pace)
    common_s = common_delay_s(pace.delay_s for pace in paces)
    for pace in paces:
        pace.judge(common_s, 0.0)
    assert not any(pace.estimate.slow for pace in paces)


def test_what_happens_once_or_twice_says_nothing() -> None:
    often = samples(lambda e: 1.3 * e)
    assert estimated([*often[:4], *(Sample(0.1, 30.0) for _ in range(3))], 0.0) == AS_STATED


def test_less_than_the_server_itself_takes_is_not_looked_at() -> None:
    tiny = [Sample(1e-3, 1e-3 * SLOW * 5) for _ in range(SAMPLES)]
    assert 1e-3 * SLOW * 5 < LEAST_LATE_S
    assert estimated(tiny, 0.0) == AS_STATED


@given(st.lists(st.one_of(st.none(), st.floats(0, 1000)), max_size=9))
def test_the_common_delay_is_a_median_of_those_known(delays_s: list[float | None]) -> None:
    known = sorted(s for s in delays_s if s is not None)
    common_s = common_delay_s(delays_s)
    assert common_s == 0.0 if not known else known[0] <= common_s <= known[len(known) // 2]
    assert common_delay_s([0.1, 40.0]) == 0.1  # of two, the other one is no excuse
    assert common_delay_s([-0.5, -0.1]) == 0.0


def test_links_that_were_measured_as_anything_hide_no_straggler() -> None:
    """On a busy machine one device's link measures as endless, and another's as next to nothing."""
    good, poor = Pace(), Pace()
    good.samples.extend(Sample(1e-5, 0.02) for _ in range(SAMPLES))
    poor.samples.extend(Sample(0.25, 5.25) for _ in range(SAMPLES))
    common_s = common_delay_s([good.delay_s, good.delay_s, good.delay_s, poor.delay_s])
    for pace in (good, poor):
        pace.fresh = SAMPLES
        pace.judge(common_s, 0.0)
    assert poor.estimate.slow
    assert not good.estimate.slow


def test_the_document_states_the_rules_that_hold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    _, _, rules = text.partition("### Devices that are slow")
    words = " ".join(rules.partition("### Devices that fail")[0].split())
    for rule in (
        f"its last {SAMPLES} samples (at least {ENOUGH}) is {SLOW:g} times the prediction or more",
        f"and at least {LEAST_LATE_S:g} s",
        f"is tried after {TRIAL_S:g} s, then after {2 * TRIAL_S:g} s and so on up to "
        f"{MOST_TRIAL_S / 60:g} minutes",
        f"a round trip of more than {2 * LEAST_LATE_S:g} s",
    ):
        assert rule in words, rule


# --- one device's pace ---


def burst(pace: Pace, at_s: float, took_s: float, *, sent_s: float | None = None) -> float:
    """What should take 0.13 s; returns when it is over."""
    for run in (1, 2):
        pace.array(50_000)
        pace.asked(run, 1000, 1000, at_s)
    if sent_s is not None:
        pace.sending(sent_s)
    pace.answered(1, RATES, at_s + took_s / 2)
    pace.answered(2, RATES, at_s + took_s)
    return at_s + took_s


def test_a_burst_is_a_sample_from_when_sending_begins() -> None:
    pace = Pace()
    burst(pace, 10.0, 1.0, sent_s=10.6)  # the PS was busy for 0.6 s
    (sample,) = pace.samples
    assert sample == pytest.approx((0.12 + 2e-6 + 1e-6, 0.4), rel=0.01)


def test_work_that_fails_is_no_sample_and_what_is_given_up_is_one_if_it_took_long() -> None:
    pace = Pace()
    pace.asked(1, 1000, 10, 0.0)
    pace.asked(2, 1000, 10, 0.0)
    pace.answered(1, RATES, 5.0, failed=True)
    pace.answered(2, RATES, 9.0)
    assert not pace.samples
    pace.asked(3, 1000, 10, 10.0)
    pace.given_up((3,), RATES, 10.01)  # another was quicker, before this could answer
    assert not pace.samples
    pace.asked(4, 1000, 10, 20.0)
    pace.given_up((4, 99), RATES, 21.5)
    assert [s.took_s for s in pace.samples] == [1.5]


def test_it_takes_several_samples_to_be_slow_and_a_trial_to_be_so_no_more() -> None:
    pace, now_s = Pace(), 0.0
    for number in range(ENOUGH):
        assert not pace.judge(0.0, now_s), number
        now_s = burst(pace, now_s, 5.1)
    assert pace.judge(0.0, now_s)
    assert pace.estimate.slow
    assert not pace.judge(0.0, now_s)  # nothing new
    assert not pace.due(RATES, now_s + TRIAL_S - 0.1)
    assert pace.due(RATES, now_s + TRIAL_S)
    now_s += TRIAL_S
    pace.tried(Sample(0.02, 5.02), RATES, 0.0, now_s)
    assert not pace.due(RATES, now_s + trial_in_s(2) - 0.1)
    now_s += trial_in_s(2)
    assert pace.due(RATES, now_s)
    assert pace.tried(Sample(0.02, 0.03), RATES, 0.0, now_s) == RATES
    assert pace.estimate == AS_STATED
    now_s = burst(pace, now_s, 5.1)  # it was the trial alone that went well
    assert pace.judge(0.0, now_s)
    assert pace.estimate.slow
    assert pace.trial_s == now_s + trial_in_s(3)
    assert pace.tried(Sample(0.02, 0.03), RATES, 0.0, now_s) == RATES
    for _ in range(ENOUGH):
        now_s = burst(pace, now_s, 0.12)
    pace.judge(0.0, now_s)
    assert pace.estimate == AS_STATED
    assert pace.times == 0


def test_who_was_far_away_when_its_link_was_measured_is_tried_too() -> None:
    pace, far = Pace(), replace(RATES, latency_s=2.5)
    assert not pace.due(RATES, 1e9)
    assert pace.due(far, 0.0)
    assert pace.tried(Sample(5.02, 5.0), far, 0.0, 0.0) == far
    assert not pace.due(far, trial_in_s(2) - 0.1)
    near = pace.tried(Sample(5.02, 0.04), far, 0.0, 100.0)
    assert near.latency_s == 0.02
    assert pace.estimate == AS_STATED
    assert not pace.due(near, 1e9)


def test_plans_are_kept_while_an_estimate_hardly_changes() -> None:
    """Rates that changed with every sample would be planned with anew every time."""
    random, pace, now_s, changes = Random(0), Pace(), 0.0, 0
    for _ in range(500):
        now_s = burst(pace, now_s, 0.12 * 6 * random.uniform(0.8, 1.25))
        changes += pace.judge(0.0, now_s)
    assert changes <= 2
    for _ in range(500):  # close to where it begins to count
        now_s = burst(pace, now_s, 0.12 * SLOW * random.uniform(0.7, 1.4))
        changes += pace.judge(0.0, now_s)
    assert changes <= 12


# --- a fleet with a straggler, in virtual time ---

DEVICE = FleetDevice("good", 2e9, 2e6, 2e6, 0.01, 2**30)
SHAPES = ((96, 96, 96), (64, 192, 96), (192, 64, 128), (128, 128, 64))


class LateRuntime(VirtualRuntime):
    """A virtual fleet in which one device's answers come late, and whose PS looks at its clock."""

    def __init__(self, devices: int, late: int, *, late_s: float, one_by_one: bool) -> None:
        self.late, self.late_s, self.one_by_one = late, 0.0, one_by_one
        self.notes: list[str] = []
        self._free_s = 0.0
        blocks = Arithmetic.BLOCKS
        every = [replace(DEVICE, name=f"device {number}") for number in range(1, devices + 1)]
        super().__init__(every, NumpyBackend(), blocks, observe=True)
        self.late_s = late_s
        self._at(TICK_S, self._look)

    def _look(self) -> None:
        for session in self.manager.sessions.values():
            session.heard_s = self.now_s  # the emulated send no heartbeats
        orders = self.manager.tick(self.now_s)
        self.notes += [order.text for order in orders if isinstance(order, Note)]
        self.execute(orders)
        self._at(self.now_s + TICK_S, self._look)

    def _to_ps(self, device: Any, message: Message, nbytes: int) -> None:
        if device.id != self.late or not self.late_s or not isinstance(message, Result):
            super()._to_ps(device, message, nbytes)
            return
        from_s = max(self.now_s, self._free_s) if self.one_by_one else self.now_s
        self._free_s = from_s + self.late_s
        self._at(self._free_s, super()._to_ps, device, message, nbytes)


def step_s(fleet: Fleet, seed: int) -> float:
    """Virtual seconds of a step: a few products, one after the other."""
    runtime = virtual(fleet)
    rng, began_s = np.random.default_rng(seed), runtime.now_s
    for m, n, k in SHAPES * 2:
        a, b = rng.integers(-3, 4, (m, k)), rng.integers(-3, 4, (k, n))
        sides = [Side(fleet.operand(Buffer(x.astype(np.float32), DType.FP32))) for x in (a, b)]
        product = fleet.submit(sides[0], sides[1], empty(m, n, DType.FP32)).result()
        assert (product.array == a @ b).all()
    return runtime.now_s - began_s


def steps_s(runtime: VirtualRuntime, steps: int) -> list[float]:
    fleet = Fleet(runtime)
    return [step_s(fleet, seed) for seed in range(steps)]


@cache
def good_step_s(devices: int) -> float:
    """Virtual seconds of a step on as many good devices, once they know one another."""
    return mean(steps_s(VirtualRuntime([DEVICE] * devices, NumpyBackend()), 20)[10:])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.5, 5.0])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_straggler_among_three_good_devices_costs_next_to_nothing(
    late_s: float, one_by_one: bool
) -> None:
    runtime = LateRuntime(4, 2, late_s=late_s, one_by_one=one_by_one)
    took_s = steps_s(runtime, 60)
    assert mean(took_s[10:]) <= 1.15 * good_step_s(3)
    session = runtime.manager.sessions[2]
    assert session.pace.estimate.slow
    assert "late" in session.reason or "times as long" in session.reason
    assert [note for note in runtime.notes if session.name in note]
    for other in (1, 3, 4):
        assert not runtime.manager.sessions[other].pace.estimate.slow
    runtime.late_s = 0.0  # it recovers, and is found to have
    blocks, fleet = session.counters.blocks, Fleet(runtime)
    for seed in range(2000):
        took = step_s(fleet, seed)
        if not session.pace.estimate.slow and session.counters.blocks > blocks + 20:
            break
    assert took == pytest.approx(good_step_s(4), rel=0.15)
    assert not session.reason


@pytest.mark.slow
def test_it_is_planned_with_as_it_was_when_it_comes_again() -> None:
    runtime = LateRuntime(4, 2, late_s=5.0, one_by_one=False)
    steps_s(runtime, 40)
    known = runtime.manager.sessions[2].pace.estimate
    assert known.slow
    runtime.lose(2)
    steps_s(runtime, 1)
    runtime.late = again = runtime.join(replace(DEVICE, name="device 2"))
    steps_s(runtime, 1)
    assert runtime.manager.sessions[again].pace.estimate == known


class BusyShell(LateRuntime):
    """The PS itself takes its time for every answer."""

    def _to_ps(self, device: Any, message: Message, nbytes: int) -> None:
        self._at(self.now_s + 0.4, super()._to_ps, device, message, nbytes)


@pytest.mark.slow
def test_a_fleet_of_which_all_are_late_is_not_blamed_for_what_is_the_servers() -> None:
    runtime = BusyShell(3, 0, late_s=0.0, one_by_one=False)
    steps_s(runtime, 12)
    for session in runtime.manager.sessions.values():
        assert len(session.pace.samples) >= ENOUGH
        assert session.pace.estimate == AS_STATED
