"""The replicas of the benchmark of local updates lose what emulated devices lose."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.local_losses import Setting, Trial
from cleave.planner.local_updates import ExchangeKind, Rounds
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice


@pytest.mark.parametrize(
    "rounds",
    [
        Rounds(3, ExchangeKind.BF16),
        Rounds(3, ExchangeKind.SPARSE),
        Rounds(6, ExchangeKind.BF16, fragments=2, overlap=2),
    ],
)
def test_replicas_lose_what_devices_lose(rounds: Rounds) -> None:
    trial = Trial("opt-nano", 0, warm=3)
    setting = Setting(12, rounds, devices=2)
    replicas = trial.locally(setting)
    devices = [FleetDevice(f"d{n}", 1e11, 1e8, 1e8, 0.001, 2**31) for n in range(2)]
    with emulated(devices) as fleet:
        emulated_losses = trial.locally(setting, fleet)
    assert [step for step, _ in replicas] == [0, 3, 6, 9, 12]
    for (_, mine), (_, theirs) in islice(zip(replicas, emulated_losses, strict=True), 1, None):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert replicas[-1][1] < replicas[0][1]


def test_lost_devices_and_a_killed_server_change_losses_little() -> None:
    trial, rounds = Trial("opt-nano", 0, warm=3), Rounds(3, ExchangeKind.BF16)
    calm = trial.locally(Setting(12, rounds, devices=5))[-1][1]
    lost = trial.locally(Setting(12, rounds, devices=5, lost=1))[-1][1]
    killed = trial.locally(Setting(12, rounds, devices=5, killed=True))[-1][1]
    assert lost != calm != killed
    assert [lost, killed] == pytest.approx([calm, calm], rel=0.05)
