"""Footprints of fleets and data centres, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cleave.energy.account import (
    CloudUsage,
    DeviceUsage,
    Footprint,
    Ps,
    cloud_footprint,
    fleet_footprint,
)
from cleave.energy.comparison import Case, ComparisonQuestion, sensitivities
from cleave.energy.grid import S_PER_YEAR
from cleave.energy.meter import Basis
from cleave.energy.typical import load_assumptions, load_typical
from profiles.device_profile import DeviceKind, DeviceProfile, Embodied, Power
from profiles.library import load_profile, load_profiles

HOUR_S = 3600.0


def phone(power: Power) -> DeviceProfile:
    made = Embodied(gco2e=50_000, lifetime_years=2.0)
    return msgspec.structs.replace(
        load_profile("iphone-12"), name="mine", power=power, embodied=made
    )


def parts_of(found: Footprint) -> dict[str, float | None]:
    return {part.name: part.energy_j for part in found.parts}


MADE, TYPICAL = load_assumptions(), load_typical()
PHONE = phone(Power(0.5, 4.0, 0.8))
SPELL = DeviceUsage("mine", 2, 2 * HOUR_S, HOUR_S, 100.0, 4e9, 1e9)


def test_a_fleet_by_hand() -> None:
    # Two phones, an hour each: together an hour multiplying at 4 W, an hour waiting at 0.5 W, and
    # 100 s of radio at 0.8 W; a charger takes 1.17 times that; 5 GB at 0.007 kWh/GB.
    found = fleet_footprint([SPELL], {"mine": PHONE}, TYPICAL, MADE, 400.0)
    parts = parts_of(found)
    assert parts["devices, multiplying"] == 4 * 3600
    assert parts["devices, waiting"] == 0.5 * 3600
    assert parts["devices, radio"] == pytest.approx(80)
    assert parts["chargers and power supplies"] == pytest.approx(0.17 * (14400 + 1800 + 80))
    assert parts["network"] == pytest.approx(5 * 0.007 * 3.6e6)
    assert parts["parameter server"] is None
    kwh = found.energy_j / 1000 / 3600
    assert kwh == pytest.approx(1.17 * 16280 / 3.6e6 + 0.035)
    assert found.operational_gco2e == pytest.approx(400 * kwh)
    # Two hours of a lifetime of two years of which half is use.
    assert found.embodied_gco2e == pytest.approx(50_000 * 7200 / (2 * S_PER_YEAR * 0.5))
    assert found.operational_gco2e is not None
    assert found.attributed_gco2e == pytest.approx(found.operational_gco2e + found.embodied_gco2e)
    assert found.complete


def test_what_was_measured_at_the_wall_has_the_charger_in_it() -> None:
    profile = phone(Power(0.5, 4.0, 0.8, at_wall=True))
    parts = parts_of(fleet_footprint([SPELL], {"mine": profile}, TYPICAL, MADE, None))
    assert parts["chargers and power supplies"] == pytest.approx(0.17 * 80)  # the radio's only


def test_the_parameter_server_counts_where_it_is_known() -> None:
    without = fleet_footprint([SPELL], {"mine": PHONE}, TYPICAL, MADE, 400.0)
    measured = Ps(1000.0, Basis.MEASURED)
    found = fleet_footprint([SPELL], {"mine": PHONE}, TYPICAL, MADE, 400.0, measured)
    assert found.energy_j == pytest.approx(without.energy_j + 1000)
    assert found.parts[-1].basis is Basis.MEASURED
    unknown = "the parameter server's energy is unknown, and not counted"
    assert unknown not in found.assumed
    assert unknown in without.assumed
    # Its making is in no sum, and that is said either way.
    assert found.embodied_gco2e == without.embodied_gco2e
    for each in (found, without):
        assert any("making the parameter server" in text for text in each.assumed)


def test_unknown_devices_are_said_and_not_counted() -> None:
    stranger = replace(SPELL, profile="", devices=3)
    found = fleet_footprint([SPELL, stranger], {"mine": PHONE}, TYPICAL, MADE, None)
    assert (found.devices, found.devices_unknown, found.embodied_unknown) == (5, 3, 3)
    assert not found.complete
    assert found.operational_gco2e is found.attributed_gco2e is None
    assert "3 of 5 devices: power unknown, not counted" in found.assumed


def test_what_is_unknown_of_all_devices_is_unknown_and_not_zero() -> None:
    stranger = replace(SPELL, profile="", devices=3)
    found = fleet_footprint([stranger], {}, TYPICAL, MADE, None)
    parts = {part.name: part.energy_j for part in found.parts}
    known = {name for name, joules in parts.items() if joules is not None}
    assert known == {"network"}
    assert all(p.basis is Basis.UNKNOWN for p in found.parts if p.name != "network")
    measured = replace(stranger, devices=1, measured_j=7.0)
    both = fleet_footprint([stranger, measured], {}, TYPICAL, MADE, None)
    assert "devices, waiting" not in {p.name for p in both.parts if p.energy_j is not None}
    assert both.parts[0].energy_j == 7.0


def test_a_run_without_devices_on_a_machine_that_measures_nothing_is_unknown() -> None:
    found = fleet_footprint([], {}, TYPICAL, MADE, 400.0)
    assert found.parts[-1].energy_j is None
    assert not found.known
    assert found.operational_gco2e is None
    assert fleet_footprint([SPELL], {"mine": PHONE}, TYPICAL, MADE, 400.0).known


def test_a_kind_stands_in_where_nobody_knows_the_profile() -> None:
    stranger = replace(SPELL, profile="", kind=DeviceKind.PHONE, flops_per_s=1e11)
    iphone = load_profile("iphone-12")
    silent = msgspec.structs.replace(iphone, name="mine", power=None, embodied=None)
    assert silent.kind is DeviceKind.PHONE  # nothing else of it is known either
    by_kind, by_profile = (
        fleet_footprint([usage], {"mine": silent}, TYPICAL, MADE, 400.0)
        for usage in (stranger, replace(SPELL, profile="mine"))
    )
    assert by_kind == by_profile
    assert by_kind.complete
    assert by_kind.energy_j > 0
    fast = replace(stranger, flops_per_s=1e15)  # faster than any phone that was measured
    found = fleet_footprint([fast], {}, TYPICAL, MADE, 400.0)
    assert found.devices_unknown == 2


def test_a_data_centre_by_hand() -> None:
    with pytest.raises(ValueError, match="the power of 'l4' is unknown"):
        cloud_footprint(CloudUsage(load_profile("l4"), HOUR_S), MADE, 100)
    # One A100 PCIe at 300 W for an hour: 0.3 kWh, 59 % around it, all times 1.58.
    found = cloud_footprint(CloudUsage(load_profile("a100-pcie-40gb"), HOUR_S), MADE, 100)
    assert found.energy_j / 3.6e6 == pytest.approx(0.3 * 1.59 * 1.58)
    assert found.operational_gco2e == pytest.approx(0.3 * 1.59 * 1.58 * 100)
    assert found.embodied_gco2e == pytest.approx(181_000 * HOUR_S / (3 * S_PER_YEAR * 0.5))


def test_what_the_ratio_depends_on() -> None:
    gpu = CloudUsage(load_profile("a100-pcie-40gb"), HOUR_S)

    question = ComparisonQuestion([SPELL], {"mine": PHONE}, TYPICAL, cloud=gpu)

    def ratio(case: Case) -> float:
        return question.figure(case) or 0.0

    case = Case(MADE, 400.0, 400.0)
    every = sensitivities(ratio, case, range(20, 800), cloud=True, kinds=list(DeviceKind))
    bars = {bar.name: bar for bar in every}
    swings = [bar.swing for bar in bars.values()]
    assert swings == sorted(swings, reverse=True)
    assert {"lifetime", "utilisation", "PUE", "charger and power supply loss"} <= set(bars)
    pue = bars["PUE"]
    assert pue.low < ratio(case) < pue.high  # a worse data centre makes the fleet better
    charger = bars["charger and power supply loss"]
    assert charger.low > ratio(case) > charger.high
    with_all = Case(replace(case.assumptions, one_lifetime_years=2.0), 400.0, 400.0)
    assert bars["lifetime"].low == pytest.approx(ratio(with_all))
    assert "making of devices without a sheet" not in bars  # both have their own


def test_a_byte_between_devices_crosses_the_network_once() -> None:
    # 1 GB that one device sends and another receives: 0.007 kWh, with the radio at both ends.
    peers = replace(SPELL, down_bytes=1e9, up_bytes=1e9, network_bytes=1e9)
    direct, through_ps = (
        parts_of(fleet_footprint([usage], {"mine": PHONE}, TYPICAL, MADE, None))
        for usage in (peers, replace(peers, network_bytes=None))
    )
    assert direct["network"] == pytest.approx(0.007 * 3.6e6)
    assert through_ps["network"] == pytest.approx(2 * 0.007 * 3.6e6)
    assert direct["devices, radio"] == through_ps["devices, radio"]


def test_power_that_a_fleet_file_states_stands_in() -> None:
    # 10 W for 40 s above what the devices draw anyway, of which nothing is known: 400 J.
    usage = DeviceUsage("", 2, 200.0, 40.0, 5.0, 1e6, 1e6, active_power_w=10.0)
    free = replace(MADE.network_j_per_byte, value=0.0)
    found = fleet_footprint([usage], {}, TYPICAL, replace(MADE, network_j_per_byte=free), 100)
    assert found.energy_j == pytest.approx(400)
    assert found.complete
    assert found.embodied_unknown == 2
    assert any("fleet file" in line for line in found.assumed)
    # A profile's own power, or its class's, goes first.
    phone = replace(usage, profile="iphone-12")
    known = fleet_footprint([phone], load_profiles(), TYPICAL, MADE, None)
    assert known.parts[0].energy_j == pytest.approx(6.75 * 40)


def test_what_devices_measured_themselves_is_marked() -> None:
    modelled = DeviceUsage("iphone-12", 1, 100.0, 40.0, 0.0, 0, 0)
    measured = replace(modelled, measured_j=500.0)
    found = fleet_footprint([modelled, measured], load_profiles(), TYPICAL, MADE, None)
    by_name = {part.name: part for part in found.parts}
    own = by_name["devices, measured by themselves"]
    assert (own.energy_j, own.basis) == (500.0, Basis.MEASURED)
    assert by_name["devices, multiplying"].energy_j == pytest.approx(6.75 * 40)
    # A phone's charger loses 17 % on either.
    assert by_name["chargers and power supplies"].energy_j == pytest.approx(0.17 * (500 + 270))
    assert "1 of 2 devices: energy measured by the devices" in found.assumed


def test_what_is_not_known_of_power_is_in_the_sensitivity() -> None:
    profiles, typical = load_profiles(), TYPICAL
    laptop = DeviceUsage("macbook-air-m1", 1, 3600.0, 3600.0, 0.0, 0, 0)
    question = ComparisonQuestion([laptop], profiles, typical)
    bars = sensitivities(
        question.figure,
        Case(MADE, 400.0, None),
        [100.0, 300.0, 500.0],
        cloud=False,
        kinds=question.kinds,
    )
    by_name = {bar.name: bar for bar in bars}
    power = by_name["power of devices whose profile has none"]
    # From the 10.6 W of one laptop to the 41.6 W of the other, for an hour at 400 g/kWh.
    assert power.high - power.low == pytest.approx(0.4 * (41.6 - 10.6))
    assert {"lifetime", "utilisation", "electricity of the fleet"} <= by_name.keys()
    assert [bar.swing for bar in bars] == sorted((bar.swing for bar in bars), reverse=True)
