"""Gradients on their way up: by hand, and staggered behind a card."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cleave.planner.plan import PsRates
from cleave.planner.shape import RateArrays
from simulator.flushes import flushed_s, staggered_s, tail_s
from simulator.resident_events import Assignment, Step, simulate
from simulator.sublayers import Kind, Load, Pass, Residence
from tests.simulator.conditions import alike


def test_a_tail_by_hand() -> None:
    # Ten seconds for each device alone; the card needs 4, 10 and 40 for all together.
    assert tail_s(10.0, 4.0, 1) == 10
    assert tail_s(1.0, 10.0, 1) == 10  # a stage's only group cannot stop early
    assert tail_s(1.0, 40.0, 2) == 40 * (1 / 2 + 1 / 8)
    assert tail_s(1.0, 40.0, 1000) == pytest.approx(20, rel=0.01)


def test_flushes_through_a_card_by_hand() -> None:
    ready, own = np.array([0.0, 10.0, 10.0]), np.array([5.0, 1.0, 1.0])
    nbytes = np.array([30.0, 30.0, 30.0])
    assert flushed_s(ready, own, nbytes, math.inf) == 11
    # The first is gone when the others are ready; 60 bytes at 3 a second follow.
    assert flushed_s(ready, own, nbytes, 3.0) == 30
    assert flushed_s(ready, own, nbytes, 1.0) == 90


def test_groups_stop_one_after_another() -> None:
    assert staggered_s(100.0, 40.0, 4).tolist() == [70.0, 80.0, 90.0, math.inf]


def stage(gradient_bytes: float, each: float = 10.0) -> Residence:
    load = Load(each, each, each)
    return Residence((Kind.FFN,), load, load, 0.0, gradient_bytes, 1.0)


def test_a_burst_is_spread_but_never_beats_the_card() -> None:
    # Four groups of one device: 4 x 400 bytes of gradients through 20 a second are 80 s. Samples
    # need 2 x 32 x 10 bytes up, 32 s.
    rates = RateArrays.of(alike(4, down=10, up=10, flops=10))
    places = Assignment((np.arange(4)[:, None],))
    stages, ps = [stage(400.0)], PsRates(egress_bytes_per_s=1e9, ingress_bytes_per_s=20.0)
    free = simulate(stages, places, rates, Step(32))
    run = simulate(stages, places, rates, Step(32, ps=ps))
    unplanned_s = run.samples_s + 80
    assert free.step_s < run.step_s < unplanned_s
    # A group that stops so early that it sees no sample come back has no gradients.
    assert run.step_s >= (3 * 400 + 2 * 32 * 10) / 20


def test_samples_pass_a_card_one_after_the_other() -> None:
    # Eight devices of 10 bytes/s each behind 20: 16 samples of 20 bytes down and 20 up, both ways.
    rates = RateArrays.of(alike(8, down=10, up=10, flops=1e9))
    places = Assignment((np.arange(8)[:, None],))
    for ps in (PsRates(20.0, math.inf), PsRates(math.inf, 20.0)):
        run = simulate([stage(0.0, 20.0)], places, rates, Step(16, ps=ps))
        assert 2 * 16 * 20 / 20 <= run.samples_s <= 2 * 16 * 20 / 20 + 8
    assert simulate([stage(0.0, 20.0)], places, rates, Step(16)).samples_s < 20


def test_forward_alone_sends_no_gradients() -> None:
    rates = RateArrays.of(alike(1, down=10, up=10, flops=10))
    places = Assignment((np.array([[0]]),))
    forward = simulate([stage(400.0)], places, rates, Step(1, (Pass.FORWARD,)))
    backward = simulate([stage(400.0)], places, rates, Step(1, (Pass.BACKWARD,)))
    assert forward.step_s == forward.samples_s == pytest.approx(3)
    assert backward.step_s == pytest.approx(3 + 40)


def test_more_flushes_take_longer() -> None:
    rates = RateArrays.of(alike(2, down=10, up=10, flops=10))
    places = Assignment((np.arange(2)[:, None],))
    once, often = (simulate([stage(50.0)], places, rates, Step(16, flushes=n)) for n in (1, 4))
    # Three more of 5 s for each of the two, and as much waiting for samples at most.
    assert once.step_s + 3 * 5 <= often.step_s <= once.step_s + 2 * 3 * 5
