"""What stands in for powers that a profile does not state."""

from __future__ import annotations

import msgspec

from cleave.energy.meter import Gap
from cleave.energy.typical import load_typical
from profiles.device_profile import DeviceKind, Power
from profiles.library import load_profile


def test_the_median_of_what_was_measured() -> None:
    classes = load_typical().classes
    assert classes[DeviceKind.PHONE].power == Power(compute_w=6.75)
    assert classes[DeviceKind.LAPTOP].power == Power(1.75, 26.1, at_wall=True)
    assert classes[DeviceKind.SBC].power == Power(2.8, 11.5, at_wall=True)


def test_a_phone_that_says_nothing() -> None:
    known = load_typical().power_of(load_profile("iphone-12"))
    assert known.power == Power(compute_w=6.75, radio_w=0.5)
    assert known.assumed == (Gap.TYPICAL_PHONE, Gap.TYPICAL_RADIO)


def test_its_own_figures_are_kept() -> None:
    profile = load_profile("macbook-pro-m4-max")  # 120 W, no more
    known = load_typical().power_of(profile)
    assert known.power == Power(1.75, 120.0, 0.5, at_wall=True)
    assert known.assumed == (Gap.TYPICAL_IDLE, Gap.TYPICAL_RADIO)
    stated = msgspec.structs.replace(profile, power=Power(1, 2, 3, "me"))
    assert load_typical().power_of(stated).power == Power(1, 2, 3)


def test_devices_unlike_those_that_were_measured_stay_unknown() -> None:
    typical = load_typical()
    for name in ("rtx-5090-laptop", "jetson-thor", "ipad-10", "rtx-4090", "l4"):
        known = typical.power_of(load_profile(name))
        assert known.power is None, name
        assert known.assumed == ()


def test_a_laptop_with_a_graphics_card() -> None:
    known = load_typical().power_of(load_profile("rtx-4060-laptop"))
    assert known.power == Power(1.75, 115.0, 0.5)
    assert known.assumed[0] is Gap.TYPICAL_CARD
