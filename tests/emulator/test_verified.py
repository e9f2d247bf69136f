"""Emulated fleets whose results are checked: spoiled memory, and liars of patience."""

from __future__ import annotations

import numpy as np
import pytest

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.device.core import Order
from cleave.errors import UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.scheduler.sessions.reputation import KNOWN_AFTER
from emulator.virtual import Arithmetic, VirtualRuntime, _VirtualDevice, emulated
from profiles.fleet_device import FleetDevice

DEVICES = [FleetDevice(f"d{i}", 1e9, 1e7, 1e7, 1e-3, 10**8) for i in range(3)]


class Spoiled(VirtualRuntime):
    """The first device's first copy of a strip of B has a flipped bit, as long as it is kept."""

    flipped: int = 0
    answered_wrong: int = 0

    def _product(self, device: _VirtualDevice, order: Order) -> Buffer:
        assert isinstance(order, Compute)
        first = device.profile.name == "d0" and order.run < FIRST_ID
        strip = order.pairs[0][1]
        if first and not self.flipped:
            self.flipped = id(strip)
            self._strip = strip  # so that no other gets its place in memory
            payload = strip.payload
            assert isinstance(payload, Buffer)
            copy = payload.array.copy()
            copy[0, 0] = 1e20
            strip.payload = Buffer(copy, payload.dtype)
        self.answered_wrong += first and id(strip) == self.flipped
        return execute(NumpyBackend(), order)


class Patient(VirtualRuntime):
    """The first device is right until it is trusted, and then lies now and then."""

    lies: int = 0
    answers: int = 0

    def _product(self, device: _VirtualDevice, order: Order) -> Buffer:
        assert isinstance(order, Compute)
        block = execute(NumpyBackend(), order)
        if device.profile.name == "d0" and order.run < FIRST_ID:
            self.answers += 1
            if self.answers > KNOWN_AFTER and self.answers % 4 == 0:
                self.lies += 1
                block.array[0, 0] += 1
        return block


def multiply(fleet: Fleet, seed: int) -> tuple[Buffer, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = (Buffer(rng.standard_normal((96, 96), np.float32), DType.FP32) for _ in range(2))
    left, right = (Side(fleet.operand(x)) for x in (a, b))
    return fleet.submit(left, right, arrays.empty(96, 96, DType.FP32)).result(), a.array @ b.array


def test_one_flipped_bit_in_memory_is_one_fault_and_the_strip_is_sent_again() -> None:
    runtime = Spoiled(DEVICES, NumpyBackend(), Arithmetic.BLOCKS, verify="all")
    fleet = Fleet(runtime)
    for seed in range(3):
        ours, plain = multiply(fleet, seed)
        np.testing.assert_allclose(ours.array, plain, rtol=1e-4, atol=1e-4)
    assert runtime.answered_wrong > 0
    (record,) = [s for s in runtime.manager.sessions.values() if s.name == "d0"]
    assert record.reputation.wrong == 1
    assert fleet.device_count == 3
    assert fleet.counters().verify_s > 0


def test_a_sample_finds_a_liar_and_checks_it_from_then_on() -> None:
    runtime = Patient(DEVICES, NumpyBackend(), Arithmetic.BLOCKS, seed=3, verify="sample:0.5")
    fleet = Fleet(runtime)
    seed = 0
    while fleet.device_count == 3:
        multiply(fleet, seed)
        seed += 1
    assert runtime.lies < 12  # three are found, of about four more that were not looked at
    for seed in range(100, 103):
        ours, plain = multiply(fleet, seed)
        np.testing.assert_allclose(ours.array, plain, rtol=1e-4, atol=1e-4)


def test_results_that_never_left_are_checked_only_on_demand() -> None:
    fleet = emulated(DEVICES, backend=NumpyBackend(), whole_tiles=False)
    multiply(fleet, 0)
    assert fleet.counters().verify_s == 0
    with pytest.raises(UsageError, match="whole_tiles=False"):
        emulated(DEVICES, backend=NumpyBackend(), verify="all")
