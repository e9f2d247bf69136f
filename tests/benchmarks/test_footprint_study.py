"""The study of the edge-sustainability paper: formulae by hand, and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.footprint_study.__main__ import (
    central,
    judged,
    one_by_one,
    ratios,
)
from benchmarks.footprint_study.rows import gpu_usage, rows_of
from benchmarks.footprint_study.setups import published

LAPTOP, PHONE, LAPTOPS, PHONES = published()

pytestmark = pytest.mark.slow


def test_a_laptop_alone_by_hand() -> None:
    # OPT-125M, 8192 tokens: 6 FLOPs for each of 84,934,656 + 38,608,896 weights and token, and
    # 3 * 12 * 4 * 16 * 512^2 * 768 of attention: 6.536e12, in 3.182 s at half of 4.1084 TFLOP/s.
    # 100 steps at 26.1 W are 8305 J. The A5000 takes 0.1438 s at half of 90.9 TFLOP/s: 3308 J at
    # 230 W, times 1.59 for what is around it, times 1.58 for the building: 8310 J.
    (row,), gpu = rows_of(LAPTOP, 0), gpu_usage(LAPTOP)
    assert row.flops == pytest.approx(100 * 6.536e12, rel=1e-4)
    assert row.step_s == pytest.approx(3.182, rel=1e-3)
    found = judged(row, gpu)
    assert found.fleet.energy_j == pytest.approx(8305, rel=1e-3)
    assert found.gpu.energy_j == pytest.approx(8310, rel=1e-3)
    assert found.energy.central == pytest.approx(8310 / 8305, rel=1e-3)
    assert found.compute_over_gpu == pytest.approx(8305 / 3308, rel=1e-3)
    # Making: 221 kg of laptop over half of 3 years, 318 kg of GPU over half of 3 years.
    half_s = 0.5 * 3 * 365.25 * 24 * 3600
    fleet_g = 8305 / 3.6e6 * 485.08 + 221_000 * 318.2 / half_s
    gpu_g = 8310 / 3.6e6 * 485.08 + 318_000 * 14.38 / half_s
    assert found.attributed.central == pytest.approx(gpu_g / fleet_g, rel=2e-3)
    assert found.sunk_cost.central == pytest.approx(gpu_g / (8305 / 3.6e6 * 485.08), rel=2e-3)


def test_devices_and_gpu_reach_equal_shares_in_the_central_case() -> None:
    (row,), gpu, middle = rows_of(LAPTOP, 0), gpu_usage(LAPTOP), central()
    equal = ratios(row, gpu, middle).energy
    both = replace(middle, device_share=1.0, gpu_share=1.0)
    assert middle.device_share == middle.gpu_share
    assert ratios(row, gpu, both).energy == pytest.approx(equal)
    # The other way: laptops at all of their multiplication, the GPU at half of its own.
    unequal = ratios(row, gpu, replace(middle, device_share=1.0)).energy
    assert unequal == pytest.approx(2 * 8310 / 8305, rel=1e-3)
    # Without the machine around the GPU, which the paper's formulae do not have: 1.59 times less.
    (alone,) = (each for _, setting, each in one_by_one(row, gpu) if setting == "PUE alone")
    assert alone.energy == pytest.approx(8310 / 8305 / 1.59, rel=1e-3)
    assert (found := judged(row, gpu)).energy.tried == 180
    assert found.sunk_cost.tried == 4500


def test_a_charger_that_loses_more_and_a_bare_gpu_make_devices_worse() -> None:
    row = rows_of(PHONE, 0)[0]
    found = judged(row, gpu_usage(PHONE))
    # From a charger of 1.17 to one of 2.9, of 6.75 W to 7.2 W, a bare GPU, twice as fast.
    worst = found.energy.central * (1.17 / 2.9) * (6.75 / 7.2) / (1.59 * 1.58) / 2
    assert found.energy.least == pytest.approx(worst, rel=1e-3)
    assert found.energy.held == 0
    # The phone's processor does 3.1 GFLOP for a joule, the bare card at half its speed 198.
    gpu_per_j, phone_per_j = 0.5 * 90.9e12 / 230, 0.5 * 4.25e10 / 6.75
    assert found.compute_over_gpu == pytest.approx(gpu_per_j / phone_per_j, rel=1e-3)
