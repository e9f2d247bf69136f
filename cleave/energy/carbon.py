"""The carbon of energy, and of making a device. Pure numbers.

    C_operational = E / 3.6e6 I                         grams from joules and gCO2e/kWh
    C_embodied    = M t_used / (lifetime utilisation)   grams; M for making it, times in seconds

The formulae follow arXiv 2507.01803. E includes a data centre's PUE (`account`).
"""

from __future__ import annotations

from collections.abc import Sequence

J_PER_KWH = 3.6e6
S_PER_YEAR = 365.25 * 24 * 3600
_HOUR_S = 3600.0


def operational_gco2e(energy_j: float, gco2e_per_kwh: float) -> float:
    """Return the grams of CO2 equivalent of this many joules.

    A laptop that draws 36 W for 10 hours takes 0.36 kWh; at 400 g/kWh that is 144 g:

        >>> operational_gco2e(36 * 36000, 400)
        144.0
    """
    return energy_j / J_PER_KWH * gco2e_per_kwh


def embodied_gco2e(
    made_gco2e: float, used_s: float, lifetime_years: float, utilisation: float
) -> float:
    """Return the share of the carbon of making a device for the time it was used, in gCO2e.

    A phone of 53 kg is in use for half of its 2.5 years. A run of 0.0125 years is 1 % of that use,
    and carries 1 % of the carbon:

        >>> round(embodied_gco2e(53000, 0.0125 * S_PER_YEAR, 2.5, 0.5))
        530
    """
    return made_gco2e * used_s / (lifetime_years * S_PER_YEAR * utilisation)


def mean_intensity(hourly: Sequence[float], start_hour: float, duration_s: float) -> float:
    """Return the mean intensity over a run, in gCO2e/kWh, if it differs by hour of the day.

    Power is assumed constant. Two hours from 23:30 are half an hour at 100, one hour at 200 and
    half an hour at 400, if those are the intensities of the hours from 23, 0 and 1:

        >>> mean_intensity([200, 400] + [300] * 21 + [100], 23.5, 7200)
        225.0

    Args:
        hourly: 24 intensities, one per hour from midnight.
        start_hour: hour of the day at which the run begins, 0 to 24.
        duration_s: duration of the run; 0 for the intensity at the start.
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
