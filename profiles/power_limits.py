"""Upper bounds on the power of each kind of device, to reject impossible energy reports.

The bounds are not estimates. They lie above measurements and power supply ratings. Phones draw up
to 18 W in bursts (notebookcheck), laptop power supplies deliver up to 330 W and desktop power
supplies up to 1600 W, and a DGX A100 draws 6.5 kW.
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
_STRANGER_W = 1600.0  # a device without a known profile is assumed to be a desktop, not a server

SLACK_S = 30.0
"""Maximum number of seconds by which a device's energy report may be ahead of the PS's clock."""


def most_w(profile: str) -> float:
    """Return the upper bound on a device's power in watts.

    Args:
        profile: profile name that the device reports. It may be any text; an unknown name gets the
            bound of a desktop.
    """
    return _by_profile().get(profile, _STRANGER_W)


def believable_j(energy_j: float, profile: str, present_s: float) -> bool:
    """Return True if a device can have used `energy_j` joules since the device connected.

    Args:
        energy_j: joules that the device reports. They may be any number, even NaN.
        profile: profile name that the device reports.
        present_s: seconds since the device connected.
    """
    return 0 <= energy_j <= most_w(profile) * (present_s + SLACK_S)


@cache
def _by_profile() -> dict[str, float]:
    return {
        name: max(_MOST_W[profile.kind], (profile.power.compute_w or 0.0) if profile.power else 0.0)
        for name, profile in load_profiles().items()
    }
