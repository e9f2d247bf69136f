"""The energy of a device, computed from its power and its activity.

    E = P_idle (T - t) + P_compute t + P_radio (b_down / r_down + b_up / r_up)

The device was connected for T seconds and computed for t seconds. b_down and b_up are the bytes
that its link received and sent, and r_down and r_up are the link's rates. P_idle and P_compute are
the power of the whole device. P_radio is the additional power while the radio is active.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from profiles.device_profile import Power


class Basis(Enum):
    """The source of an energy figure."""

    MEASURED = "measured"
    MODELLED = "modelled"
    UNKNOWN = "unknown"


class Gap(Enum):
    """A missing or implausible figure. Enum values tell the user what is assumed or omitted."""

    TYPICAL_PHONE = "power of a typical phone, because theirs is unknown"
    TYPICAL_LAPTOP = "power of a typical laptop, because theirs is unknown"
    TYPICAL_SBC = "power of a typical single-board computer, because theirs is unknown"
    TYPICAL_DESKTOP = "power of a typical desktop computer, because theirs is unknown"
    TYPICAL_CARD = "maximum power of their graphics card, without the rest of the laptop"
    TYPICAL_IDLE = "idle power of their class, because theirs is unknown"
    TYPICAL_RADIO = "radio power unknown: 0.5 W, as assumed in arXiv 2507.01803"
    STATED = "power above idle, as stated in their fleet file"
    DOUBTED = "they report more energy than such a device can use: not believed"
    RADIO = "radio power unknown: not counted"
    IDLE = "idle power unknown: not counted"


def gaps_of(power: Power, assumed: tuple[Gap, ...]) -> tuple[Gap, ...]:
    """Return `assumed`, plus a gap for unknown idle power and a gap for unknown radio power."""
    idle = (Gap.IDLE,) if power.idle_w is None else ()
    radio = (Gap.RADIO,) if power.radio_w is None else ()
    return (*assumed, *idle, *radio)


@dataclass(frozen=True, slots=True)
class Parts:
    """The energy of a device in joules, by purpose."""

    compute_j: float
    idle_j: float
    radio_j: float

    @property
    def energy_j(self) -> float:
        return self.compute_j + self.idle_j + self.radio_j


def parts_of(power: Power, present_s: float, compute_s: float, radio_s: float) -> Parts:
    """Return the energy of computing, idling and the radio. An unknown power counts as 0.

    The times may also be totals over several devices with equal power.

    Example: a phone draws 0.5 W when idle and 4 W when computing, plus 0.8 W for the radio. The
    phone was connected for 100 s and computed for 40 s. It received 100 MB at 10 MB/s and sent
    20 MB at 2 MB/s. So the phone used 0.5*60 + 4*40 + 0.8*(10 + 10) J:

        >>> parts_of(Power(idle_w=0.5, compute_w=4, radio_w=0.8), 100, 40, 10 + 10).energy_j
        206.0

    Args:
        compute_s: time for which the device computed. Values above `present_s` count as
            `present_s`.
        radio_s: time spent receiving plus time spent sending.
    """
    compute_s = min(compute_s, present_s)
    return Parts(
        (power.compute_w or 0.0) * compute_s,
        (power.idle_w or 0.0) * (present_s - compute_s),
        (power.radio_w or 0.0) * radio_s,
    )
