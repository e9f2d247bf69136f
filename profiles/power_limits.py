"""Maximum power of a device by its kind: bounds on the device's own claims, not estimates.

The bounds lie above measurements and power supply ratings. Phones were measured at up to 18 W in
bursts (notebookcheck); laptop supplies give up to 330 W, desktop supplies up to 1600 W; a DGX A100
draws 6.5 kW.
"""

from __future__ import annotations

from functools import cache

from profiles.device_profile import DeviceKind
from profiles.library import load_profiles

_MOST_W = {
    DeviceKind.PHONE: 25.0,
    DeviceKind.TABLET: 60.0,
    DeviceKind.LAPTOP: 330.0,
    DeviceKind.SBC: 150.0,
    DeviceKind.DESKTOP: 1600.0,
    DeviceKind.SERVER: 10_000.0,
    DeviceKind.CLOUD_GPU: 10_000.0,
}
_STRANGER_W = 1600.0  # a device without a profile is assumed to be no data-centre machine

SLACK_S = 30.0
"""Seconds by which telemetry may be ahead of the PS's clock."""


def most_w(profile: str) -> float:
    """Return the maximum power of a device with a profile, in watts.

    Args:
        profile: profile name as the device states it; any text.
    """
    return _by_profile().get(profile, _STRANGER_W)


def believable_j(energy_j: float, profile: str, present_s: float) -> bool:
    """Return whether a device can have used this energy in the time it was connected.

    Args:
        energy_j: joules as the device reports them; any number, even NaN.
    """
    return 0 <= energy_j <= most_w(profile) * (present_s + SLACK_S)


@cache
def _by_profile() -> dict[str, float]:
    return {
        name: max(_MOST_W[profile.kind], (profile.power.compute_w or 0.0) if profile.power else 0.0)
        for name, profile in load_profiles().items()
    }
