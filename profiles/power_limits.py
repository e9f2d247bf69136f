"""The most power that a device can draw, by its kind: bounds on its own claims, not estimates.

The bounds lie above what was measured or what power supplies can give: phones were measured at up
to 18 W in bursts (notebookcheck), laptops' supplies give up to 330 W, desktops' up to 1600 W; a DGX
A100 draws 6.5 kW.
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
_STRANGER_W = 1600.0  # a device that states no profile is no data centre

SLACK_S = 30.0
"""Telemetry may be ahead of the time that the PS counts by so much."""


def most_w(profile: str) -> float:
    """Return the most power that a device of a profile can draw, in watts.

    Args:
        profile: as the device states it; any text.
    """
    return _by_profile().get(profile, _STRANGER_W)


def believable_j(energy_j: float, profile: str, present_s: float) -> bool:
    """Return whether a device can have used this energy in the time it was connected.

    Args:
        energy_j: joules, as the device reports them; any number, even NaN.
    """
    return 0 <= energy_j <= most_w(profile) * (present_s + SLACK_S)


@cache
def _by_profile() -> dict[str, float]:
    return {
        name: max(_MOST_W[profile.kind], (profile.power.compute_w or 0.0) if profile.power else 0.0)
        for name, profile in load_profiles().items()
    }
