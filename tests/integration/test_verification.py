"""A fleet with liars in it: right results, the liar quarantined, nobody else blamed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest

import cleave
from cleave.arrays import Buffer, DType
from cleave.device.compute_thread import ComputeThread, Outcome
from cleave.device.core import Order
from cleave.device.session import DeviceSession, device_hello
from cleave.errors import CleaveError, FleetError
from cleave.fleet.product import GemmFuture
from cleave.fleet.runtime import BlockChecks
from cleave.machine.backends import Compute, NumpyBackend
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.scheduler.sessions.reputation import KNOWN_AFTER
from cleave.scheduler.tiles.tasks import Task
from cleave.server.fleet_server import Server
from cleave.transport.connection import open_connection
from cleave.transport.join_url import parse_join_url
from cleave.verify import Judgement
from tests.fleet.products import submit
from tests.integration.processes import PATIENCE_S


class Liar(ComputeThread):
    """Answers with one element changed, or as its lie says."""

    def __init__(self, lie: Callable[[Buffer], None]) -> None:
        super().__init__(NumpyBackend())
        self._lie = lie

    def start(self, order: Order, done: Callable[[Order, Outcome], None]) -> None:
        def lied(order: Order, outcome: Outcome) -> None:
            assert isinstance(order, Compute)
            assert not isinstance(outcome, str)
            if order.run < FIRST_ID:  # probes are answered honestly
                block = np.frombuffer(bytearray(outcome[0]), np.float32)
                buffer = Buffer(block.reshape(order.rows, order.columns), DType.FP32)
                self._lie(buffer)
                outcome = buffer.pack(), outcome[1]
            done(order, outcome)

        super().start(order, lied)


@contextmanager
def device(server: Server, name: str, computer: ComputeThread) -> Iterator[list[str]]:
    """A device of this process; yields why its session ended, once it has."""
    ended: list[str] = []

    async def serve() -> None:
        target = parse_join_url(server.url)
        hello = device_hello(
            credential=target.credential,
            name=name,
            memory_bytes=10**9,
            flops_per_s=1e10,
            downlink_bytes_per_s=1e9,
            uplink_bytes_per_s=1e9,
        )
        connection = await open_connection(target)
        session = DeviceSession(connection, computer, hello, lambda _: ready.set())
        try:
            ended.append(await session.run())
        except CleaveError as error:
            ended.append(str(error))

    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield ended


def multiply(server: Server, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A product by the fleet, and by numpy."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((300, 300), np.float32) for _ in range(2))
    return submit(server.fleet, a, b).result().array, a @ b


def one_wrong(block: Buffer) -> None:
    block.array[0, 0] += 1


def stale(block: Buffer) -> None:
    block.array[...] = 7


@pytest.mark.parametrize(("lie", "after"), [(one_wrong, "3 wrong results"), (stale, "1 wrong")])
def test_a_liar_changes_nothing_and_is_quarantined(
    lie: Callable[[Buffer], None], after: str, notes: list[str]
) -> None:
    with (
        cleave.serve() as server,
        device(server, "honest", ComputeThread(NumpyBackend())) as honest,
        device(server, "liar", Liar(lie)) as liar,
    ):
        for seed in range(8):
            ours, plain = multiply(server, seed)
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
        assert server.fleet.device_count == 1
        assert server.fleet.counters().verify_s > 0
        assert f"quarantined after {after}" in liar[0]
        assert not honest
    assert any("liar sent a wrong result: row" in note for note in notes)


def not_a_number(block: Buffer) -> None:
    block.array[0, 0] = np.nan


@pytest.mark.parametrize("scope", ["auto", "sample:1e-9"])
def test_a_result_that_is_not_finite_is_always_checked(scope: str, notes: list[str]) -> None:
    """Also one of a device that was always right and is hardly ever looked at."""
    lies = [False]

    def lie(block: Buffer) -> None:
        if lies[0]:
            not_a_number(block)

    with (
        cleave.serve(verify=scope) as server,
        device(server, "honest", ComputeThread(NumpyBackend())),
        device(server, "liar", Liar(lie)),
    ):
        for seed in range(KNOWN_AFTER + 4):
            multiply(server, seed)
        lies[0] = True
        for seed in range(4):
            ours, plain = multiply(server, seed)
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
    assert any("liar sent a wrong result: row 0 has an element of nan" in note for note in notes)


def test_with_liars_only_work_waits_for_somebody_honest() -> None:
    with cleave.serve() as server, device(server, "liar", Liar(stale)):
        rng = np.random.default_rng(0)
        a, b = (rng.standard_normal((300, 300), np.float32) for _ in range(2))
        future = submit(server.fleet, a, b)
        with device(server, "honest", ComputeThread(NumpyBackend())):
            np.testing.assert_allclose(future.result().array, a @ b, rtol=1e-4, atol=1e-3)


def test_who_switches_checking_off_trusts_everybody() -> None:
    with cleave.serve(verify=False) as server, device(server, "liar", Liar(stale)):
        ours, _ = multiply(server, 0)
        assert (ours == 7).all()
        assert server.fleet.counters().verify_s == 0


@pytest.mark.parametrize("inline_flops", [0, 1e18], ids=["in a thread", "in the loop"])
def test_a_check_that_breaks_once_costs_no_device_and_no_other_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, inline_flops: float
) -> None:
    checks = count()
    whole = BlockChecks.judge

    def breaks_once(
        kept: BlockChecks, future: GemmFuture, task: Task, payload: object
    ) -> Judgement:
        if not next(checks):
            raise MemoryError("no room")
        return whole(kept, future, task, payload)

    monkeypatch.setattr("cleave.fleet.runtime.BlockChecks.judge", breaks_once)
    monkeypatch.setattr("cleave.server.runtime.CHECK_INLINE_FLOPS", inline_flops)
    outcomes: list[object] = []
    with (
        cleave.serve() as server,
        device(server, "honest", ComputeThread(NumpyBackend())) as honest,
    ):

        def work() -> None:
            for seed in range(2):
                try:
                    ours, plain = multiply(server, seed)
                    outcomes.append(np.allclose(ours, plain, rtol=1e-4, atol=1e-3))
                except FleetError as error:
                    outcomes.append(str(error))

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(PATIENCE_S)
        assert outcomes == ["unexpected MemoryError while checking a result: no room", True]
        assert not honest
    assert not caplog.records
