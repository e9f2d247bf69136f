"""A thermal model of a device's slowdown under load, with two parameters and throttle points.

A device is modelled as one body with thermal resistance R (K/W) and heat capacity C (J/K). At full
speed, the body is heated with power P (W). Its temperature T follows

    dT/dt = (R P s(T) - (T - T_ambient)) / tau,      tau = R C

s(T) is the speed and power at temperature T, as a share of full speed and full power. s(T) is 1
below the first throttle point, linear between throttle points, and constant beyond the last. The
parameters are the steady-state temperature rise R P at full speed and the time constant tau.
Without published temperatures, the rise is 1, and temperatures are in units of the rise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec


class ThrottlePoint(NamedTuple):
    """A point of the throttle curve s(T).

    Attributes:
        temperature: temperature T in degrees Celsius, or in units of the model's rise.
        speed: speed s as a share of full speed.
    """

    temperature: float
    speed: float


class ThermalModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of the thermal model in the module's docstring.

    Attributes:
        rise: steady-state temperature above ambient at full speed, in K (or normalized to 1).
        time_constant_s: time constant tau in seconds.
        ambient: ambient temperature, in the unit of the throttle points' temperatures.
        points: throttle points in order of rising temperature; the speed never rises.

    Raises:
        ValueError: if a throttle point is out of range or out of order.
    """

    rise: Annotated[float, msgspec.Meta(gt=0, le=1000)]
    time_constant_s: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]
    ambient: Annotated[float, msgspec.Meta(ge=-100, le=200)] = 0.0
    points: tuple[ThrottlePoint, ...] = ()

    def __post_init__(self) -> None:
        for point in self.points:
            if not 0 < point.speed <= 1:
                raise ValueError(
                    f"the throttle point {list(point)} is invalid; use a temperature, and a "
                    "fraction of full speed above 0 and at most 1"
                )
        for low, high in pairwise(self.points):
            if not (high.temperature > low.temperature and high.speed <= low.speed):
                raise ValueError(
                    f"throttle points must rise in temperature and fall in speed; "
                    f"{list(low)} is followed by {list(high)}"
                )

    def speed(self, temperature: float) -> float:
        """Return the speed at a temperature, as a share of full speed."""
        if not self.points or temperature < self.points[0].temperature:
            return 1.0
        for low, high in pairwise(self.points):
            if temperature <= high.temperature:
                along = (temperature - low.temperature) / (high.temperature - low.temperature)
                return low.speed + along * (high.speed - low.speed)
        return self.points[-1].speed

    def after(self, temperature: float, seconds: float, load: float) -> float:
        """Return the temperature after `seconds` at `load`, a share of full power."""
        steady = self.ambient + self.rise * load
        return steady + (temperature - steady) * math.exp(-seconds / self.time_constant_s)

    @property
    def sustained_speed(self) -> float:
        """Return the long-term speed under full load, as a share of full speed.

        Heating and cooling balance at this speed. If the speed jumps at a throttle point, the
        device switches between two speeds, and the result is their average over time.
        """
        low, high = self.ambient, self.ambient + self.rise
        if self.speed(high) == 1:
            return 1.0
        for _ in range(60):
            middle = (low + high) / 2
            if self.ambient + self.rise * self.speed(middle) > middle:
                low = middle
            else:
                high = middle
        return (low - self.ambient) / self.rise


@dataclass(slots=True)
class ThermalState:
    """The temperature of one device at a point in time, `at_s`."""

    model: ThermalModel
    temperature: float
    at_s: float = 0.0

    def busy(self, begin_s: float, work_s: float) -> float:
        """Simulate an idle period and a task; return the task's throttled duration in seconds.

        Args:
            begin_s: start of the task in seconds, not before `at_s`. The device is idle until then.
            work_s: duration of the task at full speed, in seconds.
        """
        model = self.model
        if begin_s > self.at_s:
            self.temperature = model.after(self.temperature, begin_s - self.at_s, 0.0)
        took_s, piece_s = 0.0, model.time_constant_s / 50
        while work_s > 0:
            speed = model.speed(self.temperature)
            lasts_s = min(work_s / speed, piece_s)
            self.temperature = model.after(self.temperature, lasts_s, speed)
            took_s += lasts_s
            work_s = work_s - lasts_s * speed if lasts_s == piece_s else 0.0
        self.at_s = begin_s + took_s
        return took_s


def fit_thermal(speeds: Sequence[tuple[float, float]]) -> ThermalModel | None:
    """Fit a thermal model to a sustained run. The model's temperature rise is normalized to 1.

    The model assumes full speed until the device is hot, and then the mean of the last three
    speeds. If this mean exceeds 97 % of full speed, the result is None. A grid search finds the
    time constant. `speeds` is a sequence of pairs (seconds since the start, share of full speed).
    """
    settled = min(1.0, sum(s for _, s in speeds[-3:]) / len(speeds[-3:])) if speeds else 1.0
    if settled > 0.97:
        return None
    points = ThrottlePoint(0.9 * settled, 1.0), ThrottlePoint(settled, settled)
    last_s = speeds[-1][0]

    def error(tau_s: float) -> float:
        model = ThermalModel(1.0, tau_s, points=points)
        state, total, clock_s = ThermalState(model, 0.0), 0.0, 0.0
        for at_s, speed in speeds:
            while clock_s < at_s:
                clock_s += state.busy(clock_s, min(tau_s / 50, at_s - clock_s + 1e-9))
            total += (model.speed(state.temperature) - speed) ** 2
        return total

    candidates = [last_s * 10 ** (step / 8 - 2) for step in range(25)]
    return ThermalModel(1.0, min(candidates, key=error), points=points)
