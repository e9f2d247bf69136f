"""How long emulated devices multiply: their fitted models, their owners, their temperature."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cleave.arrays import DType
from cleave.machine.backends import Compute, StoredArray
from cleave.machine.graph_run import GraphRun, StoredGraph
from emulator.device_model import EmulatedProcessor
from profiles.fleet_device import FleetDevice
from profiles.library import load_profile
from profiles.performance import ComputeModel, Layout, PerformanceModel
from profiles.thermal import ThermalModel, ThrottlePoint

PLAIN = FleetDevice("test", 1e9, 1e6, 1e6, 0.0, 2**30)
FITTED = replace(PLAIN, compute=load_profile("snapdragon-888").compute_model())
HOT = replace(
    PLAIN, thermal=ThermalModel(1.0, 60.0, 0.0, (ThrottlePoint(0.4, 1.0), ThrottlePoint(0.6, 0.5)))
)


def order(
    rows: int,
    columns: int,
    *depths: int,
    dtype: DType = DType.FP32,
    out: DType | None = None,
    transposed: tuple[bool, bool] = (False, False),
) -> Compute:
    """A multiplication of as many pieces as depths are given."""
    pairs = []
    for depth in depths:
        sides = [(rows, depth), (depth, columns)]
        a, b = (s[::-1] if t else s for s, t in zip(sides, transposed, strict=True))
        pairs.append(
            tuple(StoredArray(*s, dtype, None, s[0] * s[1] * dtype.itemsize) for s in (a, b))
        )
    flops = 2 * rows * columns * sum(depths)
    return Compute(1, pairs, *transposed, rows, columns, out or dtype, flops)  # type: ignore[arg-type]


def test_multiplications_follow_one_another() -> None:
    processor = EmulatedProcessor(PLAIN)
    times = [processor.run(order(100, 100, 50), now_s) for now_s in (0.0, 0.0, 1.0)]
    assert times == [(0.0, 1e-3), (1e-3, 2e-3), (1.0, pytest.approx(1.001))]


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("transposed", [(a, b) for a in (False, True) for b in (False, True)])
def test_the_fitted_model_gives_the_time(dtype: DType, transposed: tuple[bool, bool]) -> None:
    model = FITTED.compute
    assert model is not None
    asked = order(96, 160, 224, dtype=dtype, transposed=transposed)
    expected_s = model.seconds(dtype.value, dtype.value, Layout.of(*transposed), 96, 160, 224)
    assert EmulatedProcessor(FITTED).full_speed_s(asked) == expected_s > 0


def test_the_first_product_of_a_strip_and_after_a_pause_takes_longer() -> None:
    model = PerformanceModel(0.0, 1e-9, fresh_left_s=1e-6, fresh_right_s=3e-6, wake_s=0.5)
    device = replace(PLAIN, compute=ComputeModel({("fp32", Layout.NN): model}))
    processor = EmulatedProcessor(device)
    first, second = order(10, 20, 30), order(10, 20, 30)
    second.pairs = [(first.pairs[0][0], second.pairs[0][1])]  # the next strip of B
    times = [processor.run(o, now_s) for o, now_s in ((first, 1.0), (second, 1.0), (second, 9.0))]
    took_s = [end_s - begin_s for begin_s, end_s in times]
    product_s, left_s, right_s = 6e-6, 300e-6, 1800e-6
    assert took_s[0] == pytest.approx(0.5 + product_s + left_s + right_s)
    assert took_s[1] == pytest.approx(product_s + right_s)
    assert took_s[2] == pytest.approx(0.5 + product_s)


def test_a_sum_of_pieces_takes_each_of_them_in_fp32() -> None:
    model = FITTED.compute
    assert model is not None
    asked = order(96, 160, 100, 60, 7, dtype=DType.BF16)
    expected_s = sum(
        model.seconds("bf16", "fp32", Layout.NN, 96, 160, depth) for depth in (100, 60, 7)
    )
    assert EmulatedProcessor(FITTED).full_speed_s(asked) == pytest.approx(expected_s)


@pytest.mark.parametrize("load", [0.0, 0.25, 0.9])
def test_what_the_owner_uses_is_missing(load: float) -> None:
    begin_s, end_s = EmulatedProcessor(replace(PLAIN, load=load)).run(order(100, 100, 50), 0.0)
    assert end_s - begin_s == pytest.approx(1e-3 / (1 - load))


@pytest.mark.parametrize(("in_graphs", "seconds"), [(None, 1.0), (2e9, 0.5)])
def test_graphs_have_a_speed_of_their_own(in_graphs: float | None, seconds: float) -> None:
    device = replace(PLAIN, graph_flops_per_s=in_graphs, load=0.75)
    run = GraphRun(1, StoredGraph(b"", 0), [], [], flops=10**9)
    begin_s, end_s = EmulatedProcessor(device).run(run, 0.0)
    assert end_s - begin_s == pytest.approx(4 * seconds)


def test_under_load_a_device_settles_at_its_sustained_speed() -> None:
    assert HOT.thermal is not None
    processor = EmulatedProcessor(HOT)
    second = order(1000, 1000, 500)  # of work, cool
    durations = []
    for _ in range(600):
        begin_s, end_s = processor.run(second, 0.0)
        durations.append(end_s - begin_s)
    assert durations[0] == pytest.approx(1.0)
    assert 1 / durations[-1] == pytest.approx(HOT.thermal.sustained_speed, rel=0.02)
    assert HOT.thermal.sustained_speed < 0.7
    assert all(b >= a - 1e-2 for a, b in pairwise(durations))
