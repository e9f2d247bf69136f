"""Energy of a server: what devices say is bounded, jobs are accounted for, its power is read."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.energy.account import Ps
from cleave.energy.grid import load_grid
from cleave.energy.meter import Basis, Gap
from cleave.energy.run_energy import RunEnergy, in_succession, run_energy
from cleave.energy.typical import load_typical
from cleave.machine.sensors import PowerMeter, Sensors
from cleave.planner.plan import DeviceRates
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.sessions.session_manager import MOVED, SessionManager
from cleave.server.jobs.energy import (
    EnergyMeter,
    EnergySums,
    JobLog,
    JobMeter,
    OwnPower,
    ServerLog,
    usages_of,
)
from cleave.server.runtime import LiveRuntime
from profiles.device_profile import DeviceKind
from profiles.library import believable_j, load_profiles, most_w
from tests.server.clocks import Clock

RATES = DeviceRates(1, 1e7, 5e6, 1e10, 0.0, 10**9)


def session(id: int = 1, profile: str = "snapdragon-888", **changes: Any) -> Session:
    made = Session(id, 0.0, state=DeviceState.READY, profile=profile, rates=RATES)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def meter() -> EnergyMeter:
    return EnergyMeter(load_profiles().values(), load_typical(), load_grid("DEU"))


def counters(folder: Path, microjoules: int) -> None:
    zone = folder / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True, exist_ok=True)
    (zone / "name").write_text("package-0")
    (zone / "energy_uj").write_text(str(microjoules))


def test_what_a_device_measured_is_believed_and_marked() -> None:
    used = meter().used(session(telemetry={"energy_j": 300.0}), 100.0)
    assert (used.energy_j, used.basis, used.gaps) == (300.0, Basis.MEASURED, ())


@pytest.mark.parametrize("absurd", [1e4, 1e300, -1.0, float("nan"), float("inf")])
def test_absurd_energy_is_marked_and_the_modelled_figure_used(absurd: float) -> None:
    # 6.75 W for 40 s; 100 MB at 10 MB/s and 10 MB at 5 MB/s by a radio of 0.5 W.
    liar = session(
        telemetry={"energy_j": absurd},
        counters=DeviceCounters(downlink_bytes=10**8, uplink_bytes=10**7, compute_s=40.0),
    )
    energy = meter()
    used = energy.used(liar, 100.0)
    assert used.basis is Basis.MODELLED
    assert used.energy_j == pytest.approx(6.75 * 40 + 0.5 * (10 + 2))
    assert Gap.DOUBTED in used.gaps
    answer = energy.answer(EnergySums.of([used]))
    assert answer["devices_j"] == used.energy_j
    assert answer["devices_measured"] == 0
    assert f"1 of 1 devices: {Gap.DOUBTED.value}" in answer["assumed"]  # type: ignore[operator]


def test_a_device_on_the_servers_machine_uses_no_radio() -> None:
    did = DeviceCounters(downlink_bytes=10**8, uplink_bytes=10**7, compute_s=40.0)
    here = ({"address": "127.0.0.1"}, {"address": "192.0.2.1", "here": True})
    for where, radio_j in (({"address": "192.0.2.1"}, 6.0), (here[0], 0.0), (here[1], 0.0)):
        used = meter().used(session(counters=did, **where), 100.0)
        assert used.energy_j == pytest.approx(6.75 * 40 + radio_j)


def test_an_absurd_stranger_stays_unknown_and_is_marked() -> None:
    used = meter().used(session(profile="", telemetry={"energy_j": 1e9}), 100.0)
    assert (used.energy_j, used.basis, used.gaps) == (None, Basis.UNKNOWN, (Gap.DOUBTED,))


def test_what_several_servers_assumed_is_told_of_all_their_devices() -> None:
    """As one server tells it that has all of them."""
    every = [session(id, profile) for id, profile in enumerate(("", "iphone-12", "iphone-12"), 1)]
    one, first, second = meter(), meter(), meter()
    for energy, gone in ((one, every[:1]), (first, every[:1])):
        energy.ended(gone[0], 10.0)
    whole = one.sums(one.used(each, 100.0) for each in every)
    parts = (
        first.sums([first.used(every[0], 100.0)]),
        second.sums(second.used(each, 100.0) for each in every[1:]),
    )
    assert sum(parts[1:], parts[0]) == whole
    answer = one.answer(whole)
    said = [f"{count} of 3 devices" for count in (2, 1)]
    assert all(any(text in line for line in answer["assumed"]) for text in said)  # type: ignore[attr-defined]
    lost = parts[0] + parts[1].when_ended()
    assert lost.energy_j == whole.energy_j
    assert (lost.here.total(), lost.ended.total()) == (1, 3)


def test_bounds_go_by_class() -> None:
    assert most_w("snapdragon-888") < most_w("macbook-air-m1") < most_w("h100-sxm-80gb")
    assert most_w("../../etc/passwd") == most_w("")
    assert believable_j(3600 * 20, "snapdragon-888", 3600)
    assert not believable_j(3600 * 60, "snapdragon-888", 3600)
    assert believable_j(3600 * 60, "macbook-air-m1", 3600)
    profiles = load_profiles().values()
    stated = [(p.name, p.power.compute_w or 0.0) for p in profiles if p.power is not None]
    assert all(watts <= most_w(name) for name, watts in stated)


def test_a_job_has_what_devices_did_between_its_begin_and_its_end() -> None:
    stays = session(1, counters=DeviceCounters(compute_s=5.0))
    leaves = session(2, counters=DeviceCounters(compute_s=7.0))
    sessions = {1: stays, 2: leaves}
    log = JobLog(sessions, 100.0)
    stays.counters += DeviceCounters(downlink_bytes=10**8, uplink_bytes=10**7, compute_s=20.0)
    leaves.counters.compute_s = 17.0
    log.ended(sessions.pop(2), 130.0)
    sessions[3] = session(3, "raspberry-pi-5", opened_s=140.0, telemetry={"energy_j": 90.0})
    sessions[3].address = "127.0.0.1"
    usages, here = usages_of(log.did(sessions, 150.0))
    phones, board = sorted(usages, key=lambda usage: usage.profile, reverse=True)
    assert (phones.profile, phones.devices) == ("snapdragon-888", 2)
    assert phones.present_s == 50.0 + 30.0
    assert phones.compute_s == 20.0 + 10.0
    assert (phones.radio_s, phones.down_bytes, phones.up_bytes) == (12.0, 10**8, 10**7)
    assert phones.measured_j is None
    assert (board.present_s, board.measured_j) == (10.0, 90.0)
    assert here == 1


def test_a_job_keeps_the_kinds_of_devices_without_a_profile() -> None:
    slow, fast = session(1, "", kind=DeviceKind.PHONE), session(2, "", kind=DeviceKind.PHONE)
    fast.rates = replace(RATES, flops_per_s=3e10)
    sessions = {1: slow, 2: fast, 3: session(3, "", kind=DeviceKind.LAPTOP)}
    usages, _ = usages_of(JobLog({}, 0.0).did(sessions, 10.0))
    found = {usage.kind: (usage.devices, usage.flops_per_s) for usage in usages}
    assert found == {DeviceKind.PHONE: (2, 3e10), DeviceKind.LAPTOP: (1, 1e10)}


def test_what_a_device_measured_before_a_job_is_not_the_jobs() -> None:
    known = session(1, telemetry={"energy_j": 100.0})
    silent = session(2)
    log = JobLog({1: known, 2: silent}, 100.0)
    known.telemetry["energy_j"], silent.telemetry["energy_j"] = 150.0, 400.0
    usages, _ = usages_of(log.did({1: known, 2: silent}, 200.0))
    assert sorted(usage.measured_j or 0.0 for usage in usages) == [0.0, 50.0]


def test_a_device_that_comes_again_is_one_device() -> None:
    log = JobLog({}, 0.0)
    log.ended(session(1, identity=7), 10.0)
    (usage,), _ = usages_of(log.did({2: session(2, identity=7, opened_s=12.0)}, 20.0))
    assert (usage.devices, usage.present_s) == (1, 18.0)


def test_a_device_that_was_sent_to_another_server_is_counted_there() -> None:
    first, second = JobLog({}, 0.0), JobLog({}, 0.0)
    first.ended(session(1, reason=MOVED, address="127.0.0.1"), 10.0)
    there = session(2, opened_s=12.0, address="127.0.0.1")
    (usage,), here = usages_of([*first.did({}, 20.0), *second.did({2: there}, 20.0)])
    assert (usage.devices, usage.present_s, here) == (1, 18.0, 1)


def test_the_power_of_other_machines_is_unknown(tmp_path: Path) -> None:
    clock = Clock(0.0)
    power = OwnPower(PowerMeter(Sensors(tmp_path)), 40.0, clock)
    meters = [JobMeter([], power, clock, alone=alone) for alone in (True, False)]
    clock.now_s = 10.0
    assert [meter.record()["machine_j"] for meter in meters] == [400.0, None]


def test_the_servers_own_power(tmp_path: Path) -> None:
    assert OwnPower(PowerMeter(Sensors(tmp_path))).used() == Ps()
    clock = Clock(0.0)
    stated = OwnPower(PowerMeter(Sensors(tmp_path)), 40.0, clock)
    clock.now_s = 10.0
    assert stated.used() == Ps(400.0, Basis.MODELLED)
    counters(tmp_path, 1_000_000)
    measured = OwnPower(PowerMeter(Sensors(tmp_path), clock), clock=clock)
    clock.now_s = 20.0
    counters(tmp_path, 251_000_000)
    assert measured.used() == Ps(250.0, Basis.MEASURED)
    answer = meter().answer(EnergySums(), measured.used())
    assert (answer["ps_j"], answer["ps_basis"]) == (250.0, "measured")
    unknown = meter().answer(EnergySums())
    assert (unknown["ps_j"], unknown["ps_basis"]) == (None, "unknown")


def test_a_meter_measures_in_the_servers_loop(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runtime, energy, clock = LiveRuntime(SessionManager()), meter(), Clock(100.0)
        runtime.loop = loop
        there = session(1, counters=DeviceCounters(compute_s=5.0))
        runtime.manager.sessions[1] = there
        power = OwnPower(PowerMeter(Sensors(tmp_path)), 40.0, clock)
        job = JobMeter([ServerLog(runtime, energy, clock)], power, clock)
        there.counters.compute_s, clock.now_s = 15.0, 200.0
        energy.ended(runtime.manager.sessions.pop(1), 200.0)
        found = run_energy([job.record()])
        job.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert (found.duration_s, found.virtual, found.devices_here) == (100.0, False, 0)
    assert found.usages[0].compute_s == 10.0
    assert found.ps == Ps(4000.0, Basis.MODELLED)
    assert energy.watchers == []
    assert any("joined the server" in note for note in found.notes())


def test_the_servers_own_device_runs_here_at_any_address() -> None:
    for here in (True, False):
        device = session(1, address="192.0.2.1", here=here)
        device.counters.downlink_bytes, device.counters.uplink_bytes = 10**8, 10**7
        (usage,), count = usages_of(JobLog({}, 0.0).did({1: device}, 10.0))
        assert count == here
        # Its bytes cross no network, and use no radio.
        assert usage.crossing_bytes == (0.0 if here else 1.1e8)
        assert (usage.radio_s == 0.0) == here
        again = in_succession([RunEnergy(1.0, 1.0, (usage,)), RunEnergy(1.0, 1.0, (usage,))])
        assert again.usages[0].crossing_bytes == 2 * usage.crossing_bytes


def test_a_machine_that_runs_devices_too_is_not_the_servers_energy() -> None:
    usage = usages_of(JobLog({}, 0.0).did({1: session(1)}, 10.0))[0]
    shared = RunEnergy(10.0, 10.0, usage, 500.0, "RAPL", virtual=False, devices_here=1)
    assert shared.ps == Ps()
    assert "runs devices, too: not counted" in shared.notes()[1]
    assert run_energy([shared.to_record()]) == shared
