"""Predicted rounds of local updates: who takes part, what travels, and how long it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.errors import DeviceMemoryError, UsageError
from cleave.planner.local_updates import ExchangeKind, Rounds, plan_round, planned_steps
from cleave.planner.plan import DeviceRates
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes

SIZES = StageSizes(find_model("opt-125m"), 128, 4, 4)
ELEMENTS = SIZES.trained_parameters
UP, DOWN, LATENCY_S = 1e6, 4e6, 0.01


def device(number: int, speed: float = 1e12, memory_bytes: int = 2**33) -> DeviceRates:
    return DeviceRates(number, DOWN, UP, speed, LATENCY_S, memory_bytes)


@pytest.mark.parametrize(
    ("exchange", "up", "down"),
    [
        (ExchangeKind.FP32, 4, 4),
        (ExchangeKind.BF16, 2, 2),
        (ExchangeKind.INT8, 1 + 4 / 256, 1 + 4 / 256),
        # A 64th of the values in 2 bytes each; a bit for each value, and a byte for those of two
        # devices. Both with scales.
        (ExchangeKind.SPARSE, 2 / 64 + 8 / 4096, 1 / 8 + 2 / 64 + 4 / 4096),
    ],
)
def test_weights_travel_once_each_way(exchange: ExchangeKind, up: float, down: float) -> None:
    plan = plan_round(
        SIZES.costs([128]), ELEMENTS, [device(1), device(2)], None, Rounds(10, exchange)
    )
    assert plan.uplink_bytes == pytest.approx(2 * up * ELEMENTS)
    assert plan.downlink_bytes == pytest.approx(2 * down * ELEMENTS)
    link_s = ELEMENTS * (up / UP + down / DOWN) + 2 * LATENCY_S
    assert plan.exchange_s == pytest.approx(link_s)
    assert plan.tokens == 2 * 10 * 128


def test_a_sparse_change_is_at_most_a_byte_and_a_bit_per_value() -> None:
    assert ExchangeKind.SPARSE.down_bytes(10**6) == pytest.approx(1.126, rel=1e-3)


def test_devices_without_the_memory_take_no_part() -> None:
    for exchange, held in ((ExchangeKind.INT8, 16), (ExchangeKind.SPARSE, 20)):
        model, rounds = SIZES.costs([128]), Rounds(10, exchange)
        plan = plan_round(model, ELEMENTS, [device(1), device(2, memory_bytes=2**28)], None, rounds)
        assert set(plan.steps) == {1}
        assert plan.device_bytes > (held + 4) * ELEMENTS
        small = device(1, memory_bytes=plan.device_bytes - 1)
        with pytest.raises(DeviceMemoryError, match="for the whole model"):
            plan_round(model, ELEMENTS, [small], None, rounds)


def test_slower_devices_do_fewer_steps() -> None:
    assert planned_steps({1: 10.0, 2: 5.0, 3: 0.1}, 50) == {1: 50, 2: 25, 3: 1}


@given(st.integers(0, 49), st.sampled_from([1, 2, 4, 5, 10]))
def test_overlap_hides_at_most_the_exchange_and_at_most_its_steps(
    overlap: int, fragments: int
) -> None:
    model, devices, each = SIZES.costs([128]), [device(1), device(2)], 100 // fragments
    overlap = min(overlap, each - 1)
    waiting = plan_round(model, ELEMENTS, devices, None, Rounds(100, fragments=fragments))
    streaming = Rounds(100, fragments=fragments, overlap=overlap)
    plan = plan_round(model, ELEMENTS, devices, None, streaming)
    assert sum(streaming.overlapped(2)) == overlap
    assert (plan.tokens, plan.uplink_bytes) == (waiting.tokens, waiting.uplink_bytes)
    saved_s, step_s = waiting.round_s - plan.round_s, (waiting.round_s - waiting.exchange_s) / each
    assert -1e-6 <= saved_s <= min(overlap * step_s, waiting.exchange_s) + 1e-6
    assert saved_s == pytest.approx(waiting.exchange_s - plan.exchange_s)


def test_numbers_that_do_not_go_together_are_refused() -> None:
    for numbers, said in (
        ((50, 3, 0), "a multiple of --fragments"),
        ((50, 5, 10), "must be less than 10"),
    ):
        with pytest.raises(UsageError, match=said):
            Rounds(numbers[0], ExchangeKind.BF16, *numbers[1:])


def test_overlap_hides_no_more_steps_than_a_slow_device_does() -> None:
    """The slow device does one step in a round, so no step can run while its weights travel."""
    devices = [device(1), device(2, speed=1e10)]
    waiting, streaming = (
        plan_round(SIZES.costs([128]), ELEMENTS, devices, None, Rounds(10, overlap=overlap))
        for overlap in (0, 9)
    )
    assert streaming.steps[2] == 1
    assert streaming.round_s == pytest.approx(waiting.round_s)
