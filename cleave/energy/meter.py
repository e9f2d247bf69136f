"""The energy that devices use, computed from their power and what they did. Pure numbers.

With T the time a device was connected, t the time it multiplied, b the bytes that it received and
sent and r the rates of its link,

    E = P_idle (T - t) + P_compute t + P_radio (b_down / r_down + b_up / r_up)

in joules, from watts, seconds, bytes and bytes/s. P_idle and P_compute are of the whole device.
P_radio is what an active radio draws on top, also while the device multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from profiles.device_profile import Power


@dataclass(frozen=True, slots=True)
class Activity:
    """What a device did in a session.

    Attributes:
        present_s: seconds connected.
        compute_s: seconds multiplying; at most `present_s` counts.
        down_bytes, up_bytes: PS to device, device to PS.
        downlink_bytes_per_s, uplink_bytes_per_s: of its link, above 0.
    """

    present_s: float
    compute_s: float
    down_bytes: float
    up_bytes: float
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float

    @property
    def radio_s(self) -> float:
        """Return the seconds that its radio was active; both directions at once count twice."""
        return self.down_bytes / self.downlink_bytes_per_s + self.up_bytes / self.uplink_bytes_per_s


class Basis(Enum):
    """How a figure was found."""

    MEASURED = "measured"
    MODELLED = "modelled"
    UNKNOWN = "unknown"


class Gap(Enum):
    """What is unknown about a device; the values say what is assumed instead (`typical`)."""

    TYPICAL_PHONE = "power of a typical phone, as theirs is not known"
    TYPICAL_LAPTOP = "power of a typical laptop, as theirs is not known"
    TYPICAL_SBC = "power of a typical single-board computer, as theirs is not known"
    TYPICAL_CARD = "the most that their graphics card draws, without the rest of the laptop"
    TYPICAL_IDLE = "what they draw while they wait is not known: that of their class"
    TYPICAL_RADIO = "what their radios draw is not known: 0.5 W, an assumption of arXiv 2507.01803"
    STATED = "power as their fleet file states it, above what they draw anyway"
    DOUBTED = "they report more energy than such a device can draw: not believed"
    RADIO = "what their radios draw is not known: left out"
    IDLE = "what they draw while they wait is not known: left out"


@dataclass(frozen=True, slots=True)
class Used:
    """Energy that a device used, in joules, and what was assumed for it, each assumption once."""

    energy_j: float
    gaps: tuple[Gap, ...] = ()


def used_by(power: Power | None, did: Activity, assumed: tuple[Gap, ...] = ()) -> Used | None:
    """Return the energy of a session by the formula above, or None if the power is unknown.

    A phone (idle 0.5 W, 4 W multiplying, 0.8 W radio) that was connected 100 s, multiplied 40 s,
    received 100 MB at 10 MB/s and sent 20 MB at 2 MB/s used 0.5*60 + 4*40 + 0.8*(10 + 10) J:

        >>> did = Activity(100, 40, 100e6, 20e6, 10e6, 2e6)
        >>> used_by(Power(idle_w=0.5, compute_w=4, radio_w=0.8), did)
        Used(energy_j=206.0, gaps=())

    Args:
        power: from its profile; None, or without `compute_w`, if unknown.
        did: what it did.
        assumed: what was used for figures of `power` that its profile lacks.
    """
    if power is None or power.compute_w is None:
        return None
    gaps = list(assumed)
    if power.idle_w is None:
        gaps.append(Gap.IDLE)
    if power.radio_w is None:
        gaps.append(Gap.RADIO)
    computing_s = min(did.compute_s, did.present_s)
    parts = parts_of(power, did.present_s, computing_s, did.radio_s)
    return Used(parts.energy_j, tuple(gaps))


@dataclass(frozen=True, slots=True)
class Parts:
    """The energy of a device while it multiplies and waits, and of its radio."""

    compute_j: float
    idle_j: float
    radio_j: float

    @property
    def energy_j(self) -> float:
        """Return the sum of the parts."""
        return self.compute_j + self.idle_j + self.radio_j


def parts_of(power: Power, present_s: float, compute_s: float, radio_s: float) -> Parts:
    """Return the parts by the formula above; unknown powers count as 0.

    Times may be sums over devices.

    Args:
        power: with `compute_w`.
        compute_s: at most `present_s`.
    """
    return Parts(
        (power.compute_w or 0.0) * compute_s,
        (power.idle_w or 0.0) * (present_s - compute_s),
        (power.radio_w or 0.0) * radio_s,
    )
