"""Training under churn: resident stages, usual stages and a pipeline with checkpoints."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest

from benchmarks.resident_churn.churn import ChurnedRun, Policy, changes, run_resident, usual_stages
from benchmarks.resident_churn.costs import ResidentCosts, even_stages, resident_model
from cleave.planner.stages.model import PsCompute
from cleave.workload.registry import find_model
from profiles.availability import Availability, Durations
from tests.simulator.conditions import alike

DAY_S = 86_400.0
SPEC = find_model("opt-125m")
MODEL = resident_model(SPEC, 16, 512, 16)
Churn = Sequence[tuple[float, int, bool]]


def fleet(devices: int = 6, stages: int = 3, memory: float = 12e9) -> ResidentCosts:
    """Stages on equal devices, which send slowly and compute fast."""
    rates = alike(devices, down=12.5e6, up=2.5e6, flops=1e12, memory=memory, latency_s=0.01)
    by_id = {device.device: device for device in rates}
    return ResidentCosts(MODEL, even_stages(MODEL, stages), by_id, PsCompute(5e11, 0.0))


COSTS = fleet()
STEP = COSTS.step(range(3))
assert STEP is not None
STEP_S, IDLE_S = STEP.step_s, STEP.idle_s
UPLOADS_S = [COSTS.upload_s(n, n) for n in range(3)]
# Steps between snapshots that use only idle uplinks.
ENOUGH = math.ceil(max(up_s / idle_s for up_s, idle_s in zip(UPLOADS_S, IDLE_S, strict=True)))


def run(policy: Policy, churn: Churn, wall_s: float, costs: ResidentCosts = COSTS) -> ChurnedRun:
    return run_resident(costs, policy, iter(churn), wall_s, random.Random(0))


def all_there(devices: int = 6) -> list[tuple[float, int, bool]]:
    return [(0.0, number, True) for number in range(devices)]


def effective(policy: Policy, minutes: float, seeds: int = 6, days: float = 1.0) -> float:
    """The mean effective training time if one of six devices leaves every few minutes."""
    return statistics.mean(
        random_run(policy, minutes, seed, days).effective(STEP_S) for seed in range(seeds)
    )


def random_run(policy: Policy, minutes: float, seed: int, days: float = 1.0) -> ChurnedRun:
    cycle_s = 60 * minutes * len(COSTS.devices)
    churn = Availability(Durations(0.9 * cycle_s), Durations(0.1 * cycle_s))
    events = changes(churn, list(COSTS.devices), random.Random(seed))
    return run_resident(COSTS, policy, events, days * DAY_S, random.Random(seed))


@pytest.mark.parametrize(
    "policy", [Policy(ENOUGH), Policy(ENOUGH, True), Policy(ENOUGH, False, True)]
)
def test_without_losses_nothing_is_lost(policy: Policy) -> None:
    found = run(policy, all_there(), DAY_S)
    assert found.effective(STEP_S) == pytest.approx(1, abs=1e-9)
    assert (found.losses, found.waited_s) == (0, 0)
    assert found.longest_log < 2 * ENOUGH + 1


def test_one_loss_by_hand() -> None:
    # The first stage is lost before the first snapshot, and another device replays 2.5 steps.
    churn = [*all_there(), (2.5 * STEP_S, 0, False)]
    found = run(Policy(1000), churn, 100 * STEP_S)
    waits_s = 5 + COSTS.download_s(0, 5) + 2.5 * COSTS.replay_s(0, 5)
    assert found.waited_s == pytest.approx(waits_s)
    assert found.steps == pytest.approx(100 - waits_s / STEP_S)
    assert found.losses == 1


def test_a_hot_spare_replays_one_step() -> None:
    churn = [*all_there(), (40.5 * STEP_S, 0, False)]
    found = run(Policy(1000, hot=True), churn, 100 * STEP_S)
    assert found.waited_s == pytest.approx(5 + COSTS.replay_s(0, 5), rel=1e-6)


def test_an_announced_departure_with_a_hot_spare_waits_for_nothing() -> None:
    churn = [*all_there(), (40.5 * STEP_S, 0, False)]
    assert run(Policy(1000, hot=True, announced=1), churn, 100 * STEP_S).waited_s < 1e-6
    # Without a spare, the state is handed over if that is faster than replaying.
    handed = run(Policy(1_000_000, announced=1), [*all_there(), (9e5, 0, False)], 1e6)
    assert handed.waited_s == pytest.approx(UPLOADS_S[0])
    assert run(Policy(1_000_000), [*all_there(), (9e5, 0, False)], 1e6).waited_s > handed.waited_s


def test_what_a_device_kept_needs_no_download() -> None:
    churn = [*all_there(3), (10.5 * STEP_S, 2, False), (10.5 * STEP_S + 1, 2, True)]
    costs = fleet(3, memory=1.7e9)  # no device has the memory for another stage and the last one
    kept, fresh = (run(Policy(1000, keeps=k), churn, 50 * STEP_S, costs) for k in (True, False))
    assert kept.waited_s == pytest.approx(1 + COSTS.replay_s(2, 2) / 2)
    replays_s = COSTS.download_s(2, 2) + 10.5 * COSTS.replay_s(2, 2)
    assert fresh.waited_s == pytest.approx(1 + replays_s)


def test_a_rollback_repeats_steps_on_all_devices() -> None:
    churn = [*all_there(), (2.5 * STEP_S, 0, False)]
    found = run(Policy(1000, rollback=True), churn, 50 * STEP_S)
    waits_s = 5 + COSTS.download_s(0, 5)
    assert found.waited_s == pytest.approx(waits_s)
    assert found.steps == pytest.approx(47.5 - waits_s / STEP_S)


@pytest.mark.slow
def test_the_formula_agrees_with_the_simulation_if_losses_are_rare() -> None:
    between_s = 3 * 3600.0
    # Only holders count: half of the devices have a stage.
    costs = COSTS.rule(5, between_s * 2)
    interval = costs.best_interval()
    found = effective(Policy(interval), between_s / 60, days=20)
    assert found == pytest.approx(STEP_S / costs.step_with_losses_s(interval), rel=0.05)


def test_usual_stages_by_hand() -> None:
    # Two devices: 10 s a step. One is lost after 100 s, which delays by 4 s; then 20 s a step.
    churn = [(0.0, 0, True), (0.0, 1, True), (100.0, 1, False), (150.0, 1, True)]
    found = usual_stages((math.inf, 20, 10), (0, 3, 4), iter(churn), 200)
    assert found.steps == pytest.approx(10 + 46 / 20 + 5)
    assert found.losses == 1
    assert usual_stages((math.inf, 20), (0, 3), iter([(0.0, 0, True)]), 200).steps == 10
