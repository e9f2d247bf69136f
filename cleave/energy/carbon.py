"""Carbon emissions of electricity and of manufacturing devices.

    C_operational = E / 3.6e6 I                         E in joules, I in gCO2e/kWh
    C_embodied    = M t_used / (lifetime utilisation)   times in seconds

C and M are in grams of CO2 equivalent. M is the carbon of manufacturing a device. E includes the
PUE of a data centre (see `account`). The formulae follow arXiv 2507.01803.
"""

from __future__ import annotations

from collections.abc import Sequence

J_PER_KWH = 3.6e6
S_PER_YEAR = 365.25 * 24 * 3600
_HOUR_S = 3600.0


def operational_gco2e(energy_j: float, gco2e_per_kwh: float) -> float:
    """Return the carbon of an amount of electricity, in grams of CO2 equivalent.

    A laptop that draws 36 W for 10 hours takes 0.36 kWh; at 400 g/kWh that is 144 g:

        >>> operational_gco2e(36 * 36000, 400)
        144.0
    """
    return energy_j / J_PER_KWH * gco2e_per_kwh


def embodied_gco2e(
    made_gco2e: float, used_s: float, lifetime_years: float, utilisation: float
) -> float:
    """Return the share of a device's manufacturing carbon that belongs to a run, in gCO2e.

    Manufacturing a phone emits 53 kgCO2e. The phone is in use for half of its lifetime of 2.5
    years. A run of 0.0125 years is 1 % of this use, so 1 % of the carbon belongs to the run:

        >>> round(embodied_gco2e(53000, 0.0125 * S_PER_YEAR, 2.5, 0.5))
        530

    Args:
        made_gco2e: carbon of manufacturing the device, in gCO2e.
        used_s: seconds for which the run used the device.
        lifetime_years: lifetime of the device.
        utilisation: share of the lifetime for which the device is in use.
    """
    return made_gco2e * used_s / (lifetime_years * S_PER_YEAR * utilisation)


def mean_intensity(hourly: Sequence[float], start_hour: float, duration_s: float) -> float:
    """Return the mean carbon intensity during a run, from a table by hour of the day.

    The power of the run is assumed constant. In this example, the carbon intensity is 100 gCO2e/kWh
    from 23:00, 200 from 0:00 and 400 from 1:00. A run of two hours from 23:30 has half an hour at
    100, one hour at 200 and half an hour at 400:

        >>> mean_intensity([200, 400] + [300] * 21 + [100], 23.5, 7200)
        225.0

    Args:
        hourly: 24 carbon intensities in gCO2e/kWh, one for each hour from midnight.
        start_hour: hour of the day at which the run begins, 0 to 24.
        duration_s: seconds of the run. With 0, the result is the intensity at `start_hour`.
    """
    at = start_hour % 24
    if duration_s < 1e-3:  # below the resolution of the sum over hours
        return hourly[int(at) % 24]
    days, left_s = divmod(duration_s, 24 * _HOUR_S)
    total = days * 24 * sum(hourly) / 24
    left = left_s / _HOUR_S
    while left > 1e-12:
        lasts = min(left, int(at) + 1 - at)
        total += lasts * hourly[int(at) % 24]
        at = (at + lasts) % 24
        left -= lasts
    return total / (duration_s / _HOUR_S)
