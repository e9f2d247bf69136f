"""Measures how a device's multiplication speed changes over minutes of load."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from cleave.arrays import DType
from cleave.machine.sensors import PowerMeter, Sensors
from profiles import device_profile as schema
from profiles.measuring.gemm_timer import Bench
from profiles.performance import Layout
from profiles.thermal import fit_thermal

FITTED_FROM_S: Final = 60.0  # minimum duration of a run for a thermal model to be fitted
LARGEST_CUBE: Final = 1024  # maximum rows, columns and depth of the multiplied tile
_RESTS_AT_MOST_S: Final = 90.0


def measure_sustained(
    bench: Bench,
    seconds: float,
    sensors: Sensors,
    meter: PowerMeter | None = None,
    progress: Callable[[float], None] | None = None,
) -> schema.Sustained:
    """Multiply a large fp32 tile repeatedly, and record speed, temperature and clock frequency.

    The run is divided into about 60 windows, or fewer if it is shorter than 15 s. In each window,
    the sensors and the meter are read, and `progress` is called with the elapsed time in seconds.
    """
    side = _side_for(bench, 0.02)
    order = bench.order(side, side, side, Layout.NN, DType.FP32, DType.FP32)
    window_s = max(0.25, seconds / 60)
    began_s = bench.clock()
    rates: list[tuple[float, float]] = []
    temperatures: list[tuple[float, float]] = []
    frequencies: list[tuple[float, float]] = []
    while bench.clock() - began_s < seconds or len(rates) < 3:
        if meter is not None:
            meter.sample()
        busy_s, count = 0.0, 0
        while busy_s < window_s:
            busy_s += bench.once(order)
            count += 1
        at_s = round(bench.clock() - began_s, 3)
        rates.append((at_s, count / busy_s))
        for read, series in (
            (sensors.temperature_c, temperatures),
            (sensors.frequency_hz, frequencies),
        ):
            value = read()
            if value is not None:
                series.append((at_s, value))
        if progress is not None:
            progress(min(at_s, seconds))
    if meter is not None:
        meter.sample()
    found = [rate for _, rate in rates]
    full = max(statistics.median(found[:3]), float(np.quantile(found, 0.9)))  # while cool
    return with_thermal(
        schema.Sustained(
            speeds=tuple((at_s, round(rate / full, 4)) for at_s, rate in rates),
            temperatures=tuple(temperatures),
            frequencies=tuple(frequencies),
            source=f"{side} x {side} x {side} in fp32, again and again",
        )
    )


def with_thermal(sustained: schema.Sustained) -> schema.Sustained:
    """Return a copy of the run. `thermal` is a fitted model; None if the run is short or steady."""
    long = sustained.speeds[-1][0] >= FITTED_FROM_S
    thermal = fit_thermal(sustained.speeds) if long else None
    return msgspec.structs.replace(sustained, thermal=thermal)


def _side_for(bench: Bench, seconds: float) -> int:
    """Return n, from 128 to `LARGEST_CUBE`, such that an n x n x n tile takes about `seconds`."""
    once_s = bench.seconds(bench.order(256, 256, 256, Layout.NN, DType.FP32, DType.FP32))
    side = float(256 * (seconds / max(once_s, 1e-9)) ** (1 / 3))
    return min(LARGEST_CUBE, max(128, round(side / 16) * 16))


def rest(
    bench: Bench,
    sensors: Sensors,
    before_c: float | None,
    sustained: schema.Sustained,
    sleep: Callable[[float], None],
) -> None:
    """Let the device cool to about `before_c`, for at most 90 s or half the run's duration."""
    ran_s = sustained.speeds[-1][0]
    slowed = sustained.speeds[-1][1] < 0.97
    until_s = bench.clock() + min(_RESTS_AT_MOST_S, ran_s / 2)
    while bench.clock() < until_s:
        now_c = sensors.temperature_c()
        if now_c is None or before_c is None:
            if not slowed:
                return
        elif now_c <= before_c + 3:
            return
        sleep(1.0)
