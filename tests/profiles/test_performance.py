"""The performance model: its formula, and what a fit recovers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import to_install
from profiles.performance import (
    EDGE_WIDTHS,
    ComputeModel,
    Layout,
    PerformanceModel,
    TimedTile,
    fit,
    fit_and_judge,
)
from tests.examples import examples

sides = st.integers(1, 5000)
costs = st.floats(0, 1e-6)
models = st.builds(
    PerformanceModel,
    startup_s=st.floats(0, 1e-2),
    volume_s=st.floats(1e-15, 1e-8),
    out_s=costs,
    left_s=costs,
    right_s=costs,
)


def _shapes(seed: int, count: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.uniform(np.log(8), np.log(1500), (count, 3))).astype(int)
    drawn[::2, :2] = (drawn[::2, :2] + 47) // 48 * 48
    return [(int(a), int(b), int(c)) for a, b, c in drawn]


def _samples(
    model: PerformanceModel, seed: int = 0, count: int = 150, noise: float = 0.0
) -> list[TimedTile]:
    rng = np.random.default_rng(seed + 1000)
    return [
        TimedTile(a, b, c, Layout.NN, model.seconds(a, b, c) * float(rng.lognormal(0, noise)))
        for a, b, c in _shapes(seed, count)
    ]


# --- the formula ---


@given(models, sides, sides, sides)
def test_throughput_saturates_as_the_docstring_says(
    model: PerformanceModel, a: int, b: int, c: int
) -> None:
    a0, b0, c0 = (x / model.volume_s for x in (model.right_s, model.left_s, model.out_s))
    saturated = model.flops_per_s / (1 + a0 / a + b0 / b + c0 / c)
    spent_s = model.startup_s + 2 * a * b * c / saturated
    assert model.seconds(a, b, c) == pytest.approx(spent_s, rel=1e-9)


def test_edges_cost_where_the_width_does_not_divide() -> None:
    edge_a = tuple(1e-9 if width == 16 else 0.0 for width in EDGE_WIDTHS)
    edge_b = tuple(1e-9 if width == 4 else 0.0 for width in EDGE_WIDTHS)
    plain = PerformanceModel(0.0, 1e-11)
    model = PerformanceModel(0.0, 1e-11, edge_a_s=edge_a, edge_b_s=edge_b)
    assert model.seconds(32, 8, 10) == plain.seconds(32, 8, 10)
    assert model.seconds(33, 8, 10) == pytest.approx(plain.seconds(33, 8, 10) + 1e-9 * 80)
    assert model.seconds(32, 9, 10) == pytest.approx(plain.seconds(32, 9, 10) + 1e-9 * 320)


@given(models, sides, sides, sides, st.floats(0.1, 10))
def test_a_slower_device_of_the_same_kind(
    model: PerformanceModel, a: int, b: int, c: int, factor: float
) -> None:
    slower = model.scaled(factor)
    assert slower.seconds(a, b, c) == pytest.approx(factor * model.seconds(a, b, c), rel=1e-9)


# --- the fit ---


@given(
    st.floats(1e-6, 1e-4), st.floats(1e-13, 1e-10), st.floats(0, 100), st.floats(0, 100),
    st.floats(0, 100), st.sampled_from(range(len(EDGE_WIDTHS))), st.integers(0, 10),
)  # fmt: skip
@settings(max_examples=examples(30))
def test_the_fit_of_a_known_model_predicts_like_it(
    startup_s: float, volume_s: float, a0: float, b0: float, c0: float, edge: int, seed: int
) -> None:
    edges = tuple(20 * volume_s if i == edge else 0.0 for i in range(len(EDGE_WIDTHS)))
    model = PerformanceModel(
        startup_s, volume_s, c0 * volume_s, b0 * volume_s, a0 * volume_s, edges, edges
    )
    found = fit(_samples(model, seed))
    for a, b, c in _shapes(seed + 77, 30):
        assert found.seconds(a, b, c) == pytest.approx(model.seconds(a, b, c), rel=1e-4)


def test_the_fit_tells_what_fresh_strips_and_waking_cost() -> None:
    model = PerformanceModel(
        1e-5, 2e-11, 1e-10, 3e-10, 2e-10, fresh_left_s=2e-10, fresh_right_s=5e-10, wake_s=8e-5
    )
    shapes = [TimedTile(*s, Layout.NN, 1.0, 1 + 2 * (i % 2)) for i, s in enumerate(_shapes(0, 150))]
    found = fit([replace(s, seconds=model.expected(s)) for s in shapes])
    assert found.wake_s == pytest.approx(8e-5, rel=0.02)
    for shape in _shapes(77, 30):
        for state in ((0, 0, 0), (1, 0, 0), (0, 1, 1)):
            assert found.seconds(*shape, *state) == pytest.approx(
                model.seconds(*shape, *state), rel=0.02
            )


def test_of_a_tile_each_strip_is_fresh_once() -> None:
    model = PerformanceModel(
        1e-5, 2e-11, 1e-10, 3e-10, 2e-10, fresh_left_s=2e-10, fresh_right_s=5e-10, wake_s=8e-5
    )
    shape = (40, 50, 60)
    blocks_s = sum(
        model.seconds(*shape, column == 0, row == 0, row == column == 0)
        for row in range(3)
        for column in range(3)
    )
    assert model.expected(TimedTile(*shape, Layout.NN, 1.0, 3)) == pytest.approx(blocks_s / 9)


def test_noise_is_not_fitted() -> None:
    model = PerformanceModel(1e-5, 2e-11, 1e-10, 3e-10, 2e-10)
    samples = _samples(model, count=150, noise=0.05)
    found, report = fit_and_judge(samples)
    assert 0.01 < report.median_error < 0.08  # of the noise
    errors = [abs(found.seconds(*s) / model.seconds(*s) - 1) for s in _shapes(5, 100)]
    assert float(np.median(errors)) < 0.02  # of the device


@given(st.integers(0, 30), st.floats(0, 1.0))
@settings(max_examples=examples(30))
def test_no_coefficient_is_negative_whatever_was_measured(seed: int, noise: float) -> None:
    found = fit(_samples(PerformanceModel(1e-5, 2e-11, 1e-10), seed, 40, noise))
    assert found.volume_s > 0
    rest = (found.startup_s, found.out_s, found.left_s, found.right_s)
    assert min(*rest, *found.edge_a_s, *found.edge_b_s) >= 0


def test_errors_are_relative() -> None:
    """A tenth more on the smallest and a tenth more on the largest product weigh the same."""
    model = PerformanceModel(1e-6, 2e-11)
    samples = sorted(_samples(model), key=lambda s: s.seconds)
    low, high = list(samples), list(samples)
    for changed, i in ((low, 2), (high, -3)):
        s = changed[i]
        changed[i] = TimedTile(s.a, s.b, s.c, s.layout, 1.5 * s.seconds)
    for changed in (low, high):
        report = fit_and_judge(changed)[1]
        assert report.median_error < 0.02
        assert report.p95_error < 0.6


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="7 samples are too few"):
        fit(_samples(PerformanceModel(1e-6, 2e-11), count=7))


def test_samples_that_show_no_throughput() -> None:
    samples = [TimedTile(a, b, c, Layout.NN, 1e-6) for a, b, c in _shapes(0, 20)]
    assert fit(samples).volume_s > 0


def test_without_scipy_the_way_out_is_named() -> None:
    code = """
import sys
sys.modules["scipy.optimize"] = None
from profiles.performance import Layout, TimedTile, fit
try:
    fit([TimedTile(8, 8, 8, Layout.NN, 1e-6)] * 20)
except ValueError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert to_install("profile") in done.stdout


# --- asking ---


def test_a_device_answers_for_what_it_has_not_measured() -> None:
    fp32, bf16, partial = (PerformanceModel.saturated(f) for f in (1e9, 2e9, 3e9))
    model = ComputeModel(
        {("fp32", Layout.NN): fp32, ("bf16", Layout.NN): bf16, ("bf16>fp32", Layout.TN): partial}
    )
    assert model.model("bf16", "bf16", Layout.NN) is bf16
    assert model.model("bf16", "bf16", Layout.TT) is bf16  # of another layout
    assert model.model("bf16", "fp32", Layout.NN) is partial
    assert model.model("fp16", "fp32", Layout.NN) is fp32
    assert model.seconds("bf16", "bf16", Layout.NN, 10, 10, 10) == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="needs a performance model"):
        ComputeModel({})
