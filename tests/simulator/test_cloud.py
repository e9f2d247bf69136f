"""Cloud GPUs against figures worked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from cleave.planner.plan import ElementBytes
from simulator.cloud import A100, H100, Cloud
from simulator.method import Outcome
from simulator.work import train_flops
from tests.simulator.conditions import paper


def parts(outcome: Outcome) -> dict[str, float]:
    return {p.name: p.seconds for p in outcome.parts}


def test_thirteen_billion_on_one_a100() -> None:
    conditions = paper(1)
    resident, offloaded = Cloud(A100, 1).outcomes(conditions)
    # 72 B s l h^2 (1 + s / 6h) + 6 B s h V = 1.04e16 FLOPs at 156e12 a second.
    assert parts(resident)["compute"] == pytest.approx(67, abs=1.5)
    assert not resident.fits
    assert resident.memory_needed_bytes > 16 * 12.8e9
    assert "80 GB" in resident.misfit
    assert offloaded.fits
    # 25.7 GB of weights through 25 GB/s (gradients under the compute); 28 bytes x 12.85e9 at 200e9.
    assert parts(offloaded)["weights back"] == pytest.approx(1.03, rel=0.02)
    assert parts(offloaded)["host's Adam"] == pytest.approx(1.80, rel=0.02)


def test_eight_gpus_take_an_eighth_where_the_model_fits() -> None:
    conditions = paper(1)
    (eight,) = Cloud(H100, 8, 1.0).outcomes(conditions)
    assert eight.fits
    flops = train_flops(conditions.spec, conditions.batch, conditions.seq)
    assert eight.step_s == pytest.approx(flops / (8 * 989e12), rel=1e-9)


def test_weights_beyond_the_gpu_are_streamed() -> None:
    resident, offloaded = Cloud(A100, 1).outcomes(paper(1, "opt-175b"))
    assert not resident.fits
    # The host would need 14 bytes x 175e9 = 2.45 TB and has 2.
    assert not offloaded.fits
    assert "host" in offloaded.misfit
    assert offloaded.memory_offered_bytes == 2e12
    assert offloaded.memory_needed_bytes == pytest.approx(14 * 175e9, rel=0.01)


def test_four_bytes_an_element_have_half_the_peak() -> None:
    two = paper(1, "opt-125m")
    four = dataclasses.replace(two, element=ElementBytes(4, 4))
    fast, slow = (Cloud(A100, 1).outcomes(c)[0] for c in (two, four))
    assert parts(slow)["compute"] == pytest.approx(2 * parts(fast)["compute"])
