"""What a fleet and a GPU would do for a training step."""

from __future__ import annotations

import pytest

from cleave.energy.predict import Work, cloud_usage, fits, fleet_usages
from cleave.workload.registry import find_model
from cleave.workload.step import step_flops
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet
from profiles.library import load_profile

WORK = Work(find_model("opt-125m"), 2, 64, 3, "bf16")


def test_a_fleet_multiplies_all_of_it() -> None:
    fleet = [
        FleetDevice(f"d{i}", 1e12, 1e8, 5e7, 0.0, 10**10, profile="iphone-12") for i in range(3)
    ]
    usages, duration_s = fleet_usages(WORK, fleet)
    assert len(usages) == 1
    usage = usages[0]
    assert usage.devices == 3
    assert usage.compute_s == pytest.approx(WORK.flops / 1e12)
    assert usage.present_s == pytest.approx(3 * duration_s)
    assert usage.radio_s == pytest.approx(usage.down_bytes / 1e8 + usage.up_bytes / 5e7)
    assert usage.compute_s <= usage.present_s


@pytest.mark.slow
def test_phones_multiply_at_the_speed_they_settle_at() -> None:
    fleet = find_fleet("phones-5g-5", dtype="bf16")
    hot = {d.profile: d.thermal.sustained_speed for d in fleet if d.thermal is not None}
    assert hot  # some throttle
    usages, _ = fleet_usages(WORK, fleet)
    done = sum(
        usage.compute_s * device.stated_flops_per_s * hot.get(device.profile, 1.0)
        for usage in usages
        for device in fleet
        if device.profile == usage.profile
    )
    assert done == pytest.approx(WORK.flops)


def test_a_gpu_does_the_same_work() -> None:
    # An A100 at half of the 252.9 TFLOP/s that it reaches in bf16.
    gpu = load_profile("a100-pcie-40gb")
    usage = cloud_usage(WORK, gpu, 0.5)
    assert usage.time_s == pytest.approx(3 * step_flops(WORK.spec, 2, 64) / 126.45e12)


def test_what_fits_a_gpu() -> None:
    # OPT-1.3B needs 21 GB for parameters, gradients and Adam; OPT-2.7B needs 42.
    a5000 = load_profile("a5000")
    assert fits(Work(find_model("opt-1.3b"), 1, 1, 1, "bf16"), a5000)
    assert not fits(Work(find_model("opt-2.7b"), 1, 1, 1, "bf16"), a5000)
