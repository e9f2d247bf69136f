"""The energy of devices, computed from their power and their activity. Pure numbers.

    E = P_idle (T - t) + P_compute t + P_radio (b_down / r_down + b_up / r_up)

T is the time a device was connected and t the time it multiplied. b are the bytes received and
sent, and r the rates of its link. Units are joules, watts, seconds, bytes and bytes/s. P_idle and
P_compute are the power of the whole device. P_radio is added while the radio is active, also while
the device multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from profiles.device_profile import Power


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a device in a session.

    Attributes:
        present_s: seconds connected.
        compute_s: seconds multiplying; at most `present_s` counts.
        down_bytes, up_bytes: bytes from PS to device, and from device to PS.
        downlink_bytes_per_s, uplink_bytes_per_s: rates of its link, above 0.
    """

    present_s: float
    compute_s: float
    down_bytes: float
    up_bytes: float
    downlink_bytes_per_s: float
    uplink_bytes_per_s: float

    @property
    def radio_s(self) -> float:
        """Return the seconds of an active radio; both directions at once count twice."""
        return self.down_bytes / self.downlink_bytes_per_s + self.up_bytes / self.uplink_bytes_per_s


class Basis(Enum):
    """The basis of a figure."""

    MEASURED = "measured"
    MODELLED = "modelled"
    UNKNOWN = "unknown"


class Gap(Enum):
    """A gap in what is known about a device; the values say what is assumed (`typical`)."""

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
    """The energy that a device used, in joules, and the distinct assumptions for it."""

    energy_j: float
    gaps: tuple[Gap, ...] = ()


def used_by(power: Power | None, did: Activity, assumed: tuple[Gap, ...] = ()) -> Used | None:
    """Return the energy of a session by the module's formula; None if the power is unknown.

    A phone (idle 0.5 W, 4 W multiplying, 0.8 W radio) was connected for 100 s and multiplied for
    40 s. It received 100 MB at 10 MB/s and sent 20 MB at 2 MB/s, so it used
    0.5*60 + 4*40 + 0.8*(10 + 10) J:

        >>> did = Activity(100, 40, 100e6, 20e6, 10e6, 2e6)
        >>> used_by(Power(idle_w=0.5, compute_w=4, radio_w=0.8), did)
        Used(energy_j=206.0, gaps=())

    Args:
        power: power of the device; None, or without `compute_w`, if unknown.
        assumed: assumptions in `power` for figures that the profile lacks.
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
    """The energy of a device for multiplying, for waiting, and for its radio."""

    compute_j: float
    idle_j: float
    radio_j: float

    @property
    def energy_j(self) -> float:
        return self.compute_j + self.idle_j + self.radio_j


def parts_of(power: Power, present_s: float, compute_s: float, radio_s: float) -> Parts:
    """Return the energy of a device by parts; unknown powers count as 0.

    Times may be sums over devices.

    Args:
        power: power of the device, with `compute_w`.
        compute_s: seconds multiplying, at most `present_s`.
    """
    return Parts(
        (power.compute_w or 0.0) * compute_s,
        (power.idle_w or 0.0) * (present_s - compute_s),
        (power.radio_w or 0.0) * radio_s,
    )
