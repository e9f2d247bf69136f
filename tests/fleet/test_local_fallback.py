"""A fleet without devices: training waits and says so, or goes on on the PS."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cleave.arrays import Buffer, DType, empty
from cleave.errors import FleetError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import Fallback, FallbackFleet, FleetPresence
from cleave.fleet.product import Multiplier, Pending, Side
from cleave.machine.backends import NumpyBackend
from cleave.protocol import limits
from emulator.virtual import VirtualRuntime
from profiles.fleet_device import FleetDevice
from tests.invariants import check_state

DEVICE = FleetDevice("test", 1e6, 1e5, 1e5, 0.01, 2**30)
RNG = np.random.default_rng(0)
A, B = RNG.integers(-9, 9, (40, 30)), RNG.integers(-9, 9, (30, 20))


def submit(fleet: Multiplier) -> Pending:
    left, right = (Side(fleet.operand(Buffer(x.astype(np.float32), DType.FP32))) for x in (A, B))
    return fleet.submit(left, right, empty(40, 20, DType.FP32))


def come(runtime: VirtualRuntime) -> None:
    runtime.join(DEVICE)


def is_right(future: Pending) -> bool:
    return bool((future.result().array == A @ B).all())


def virtual(
    devices: int, after_s: float | None
) -> tuple[FallbackFleet, VirtualRuntime, list[FleetPresence]]:
    runtime = VirtualRuntime([DEVICE] * devices, NumpyBackend())
    told = list[FleetPresence]()
    fallback = None if after_s is None else Fallback(NumpyBackend(), after_s)
    return FallbackFleet(Fleet(runtime), told.append, fallback), runtime, told


def test_nothing_is_said_while_devices_are_there() -> None:
    fleet, runtime, told = virtual(2, 1.0)
    runtime.lose(1, in_s=0.01)
    assert is_right(submit(fleet))
    assert told == []
    assert fleet.counters().local_gemms == 0


@pytest.mark.parametrize("lost_s", [0.0, 0.02])
def test_the_ps_takes_over_and_gives_back(lost_s: float) -> None:
    """Whenever the devices vanish, pending products are finished, and later ones, until one is."""
    fleet, runtime, told = virtual(2, 5.0)
    pending = [submit(fleet) for _ in range(3)]
    for device in (1, 2):
        runtime.lose(device, in_s=lost_s)
    assert all(is_right(future) for future in pending)
    assert all(is_right(submit(fleet)) for _ in range(2))
    assert told == [FleetPresence.ABSENT, FleetPresence.LOCAL]
    assert runtime.now_s >= 5.0
    assert 2 <= fleet.counters().local_gemms <= 5
    local = fleet.counters().local_gemms
    runtime.join(DEVICE)
    runtime._at(runtime.now_s + 60.0, lambda: None)
    runtime.advance_for_local_work(60.0 * 50e9)  # it is welcomed meanwhile
    assert is_right(submit(fleet))
    assert told[2:] == [FleetPresence.PRESENT]
    assert fleet.counters().local_gemms == local
    assert runtime.manager.scheduler.idle
    check_state(runtime.manager)


def test_a_device_that_comes_in_time_keeps_the_work() -> None:
    fleet, runtime, told = virtual(1, 5.0)
    future = submit(fleet)
    runtime.lose(1, in_s=0.01)
    runtime._at(3.0, come, runtime)
    assert is_right(future)
    assert told == [FleetPresence.ABSENT, FleetPresence.PRESENT]
    assert fleet.counters().local_gemms == 0


def test_while_the_ps_works_devices_that_are_due_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulator.virtual.ASSUMED_FLOPS_PER_S", 1e7)  # some ms for each product
    fleet, runtime, told = virtual(1, 0.0)
    runtime.lose(1)
    runtime._at(1.0, come, runtime)
    futures = 0
    while told[-1:] != [FleetPresence.PRESENT]:
        assert is_right(submit(fleet))
        futures += 1
        assert futures < 1000
    assert told == [FleetPresence.ABSENT, FleetPresence.LOCAL, FleetPresence.PRESENT]


@pytest.mark.parametrize("local", [True, False])
def test_what_no_device_can_do_is_said_and_done_on_the_ps_if_that_may(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for nothing is one reason of several; what every device fails is another."""
    monkeypatch.setattr(limits, "MIN_DEVICE_MEMORY_BYTES", 0)
    said: list[str] = []
    runtime = VirtualRuntime([replace(DEVICE, memory_bytes=4)] * 2, NumpyBackend())
    told = list[FleetPresence]()
    fallback = Fallback(NumpyBackend(), 100.0) if local else None
    fleet = FallbackFleet(Fleet(runtime), told.append, fallback, say=said.append)
    begun_s = runtime.now_s
    for _ in range(3):
        if local:
            assert is_right(submit(fleet))
        else:
            with pytest.raises(FleetError, match="memory"):
                submit(fleet).result()
    assert runtime.now_s - begun_s < 10.0  # nothing is waited for
    assert fleet.counters().local_gemms == (3 if local else 0)
    assert told == []
    (reason,) = said
    assert "memory" in reason


def test_without_fallback_it_waits_and_knows_when_nobody_is_due() -> None:
    fleet, runtime, told = virtual(1, None)
    future = submit(fleet)
    runtime.lose(1, in_s=0.01)
    with pytest.raises(FleetError, match="none will join"):
        future.result()
    assert told == [FleetPresence.ABSENT]
