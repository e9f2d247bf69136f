"""The server codes an array once for all, in threads, and keeps nothing of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cleave import coding as codes
from cleave.arrays import Buffer, DType, empty
from cleave.coding import Coder, Each, Plain, encode
from cleave.device.compute_thread import ComputeThread
from cleave.device.session import DeviceSession, device_hello
from cleave.errors import ProtocolError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.gemm import Span
from cleave.machine.backends import NumpyBackend
from cleave.planner.coding import LINK_BYTES_PER_S
from cleave.protocol import codec, messages
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import ErrorCode, Message, Put, PutCoded, Result, ResultCoded
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.server.runtime import LiveRuntime
from tests.memory_link import memory_link

SHAPE = (256, 128)
PATIENCE_S = 60.0


@pytest.fixture
def coder() -> Iterator[Coder]:
    coder = Coder()
    yield coder
    coder.close()


def matrix(seed: int = 0) -> Buffer:
    values = np.random.default_rng(seed).standard_normal(SHAPE, np.float32)
    return Buffer(values, DType.FP32)


def put(id: int, payload: object) -> Put:
    return Put(id, *SHAPE, "fp32", payload)


def test_an_array_for_several_devices_is_coded_once(
    coder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload, calls = matrix(), []
    code = codes.coded_payload

    def counted(message: Plain, each: Each) -> bytes | None:
        calls.append(message)
        return code(message, each)

    monkeypatch.setattr(codes, "coded_payload", counted)

    async def send(id: int) -> Put | PutCoded:
        message = put(id, payload)
        shared = coder.shared(message)
        assert shared is not None
        return await coder.put(message, shared)

    async def all_at_once() -> list[Put | PutCoded]:
        return await asyncio.gather(*map(send, range(1, 6)))

    sent = asyncio.run(all_at_once())
    assert len(calls) == 1
    assert [message.id for message in sent] == [1, 2, 3, 4, 5]
    for message in sent:
        assert isinstance(message, PutCoded)
        assert codes.put_of(message).payload == payload.pack()


def test_arrays_are_told_apart_and_forgotten(coder: Coder) -> None:
    first, second = matrix(1), matrix(1)
    kept = coder.shared(put(1, first))
    assert kept is not None
    assert coder.shared(put(2, first)) is kept
    assert coder.shared(put(3, second)) is not kept
    gc.collect()
    assert len(coder._shared) == 1
    del kept
    gc.collect()
    assert not coder._shared


def test_one_that_waits_and_is_cancelled_does_not_disturb_the_others(coder: Coder) -> None:
    async def scenario() -> bytes | None:
        shared = coder.shared(put(1, matrix()))
        assert shared is not None
        impatient = asyncio.create_task(shared.coded())
        patient = asyncio.create_task(shared.coded())
        await asyncio.sleep(0)
        impatient.cancel()
        return await patient

    assert asyncio.run(scenario())


def test_what_is_not_worth_it_travels_as_it_is(coder: Coder) -> None:
    assert coder.shared(Put(1, 1, 4, "fp32", bytes(16))) is None
    noise = np.random.default_rng(0).bytes(CODED_LEAST_BYTES)
    integers = np.arange(CODED_LEAST_BYTES // 8, dtype=np.int64).tobytes()
    for message in (
        Put(1, 1, CODED_LEAST_BYTES // 2, "bf16", noise),
        Put(1, 1, CODED_LEAST_BYTES // 8, "int64", integers),
    ):
        shared = coder.shared(message)
        assert shared is not None
        assert asyncio.run(coder.put(message, shared)) is message


@pytest.mark.parametrize("rows", [2, 256])
def test_results_are_decoded(coder: Coder, rows: int) -> None:
    payload = matrix().region(Span(0, rows), Span(0, SHAPE[1])).pack()
    message = ResultCoded(7, rows, SHAPE[1], "fp32", 0.5, encode(payload, DType.FP32))
    assert asyncio.run(coder.result(message)) == Result(7, rows, SHAPE[1], "fp32", 0.5, payload)
    message.payload = message.payload[:-1]
    with pytest.raises(ProtocolError, match="ends after"):
        asyncio.run(coder.result(message))


CODED = codes.with_coded(Result(1, 256, 64, "fp32", 0.0), encode(bytes(2**16), DType.FP32))
SPOILED = bytes(CODED.payload[:6]).ljust(len(CODED.payload), b"\0")


@pytest.mark.parametrize(
    ("features", "message", "reason"),
    [
        (("coding",), replace(CODED, payload=CODED.payload[:-1]), "ends after"),
        (("coding",), replace(CODED, rows=2**62, columns=2**62), "ends after"),
        (
            ("coding",),
            replace(CODED, dtype="int64"),
            "an array of dtype 'int64'",
        ),
        (("coding",), replace(CODED, payload=SPOILED), "inflate"),
        ((), CODED, "without the feature"),
        (("coding", "fast"), CODED, "before `code_results`"),
    ],
)
def test_a_coded_result_that_is_none_ends_its_session_alone(
    features: tuple[str, ...], message: Message, reason: str
) -> None:
    async def scenario() -> messages.Error:
        # On a fast link the feature is agreed on, and results are to come plain.
        coding = "auto" if "fast" in features else "on"
        runtime = LiveRuntime(SessionManager("secret", coding=coding))
        runtime.loop = asyncio.get_running_loop()
        near, far = memory_link()
        serving = asyncio.create_task(runtime.session(near))
        hello = replace(said(), features=features)
        if "fast" in features:
            hello.uplink_bytes_per_s = 1e12
        await far.send(codec.encode(hello))
        await far.send(codec.encode(message))
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(answer := codec.decode(await far.receive()), messages.Error):
                pass
            await serving
        assert not runtime.manager.sessions
        runtime.close()
        return answer

    error = asyncio.run(scenario())
    assert error.code is ErrorCode.PROTOCOL
    assert reason in error.message


def said() -> messages.Hello:
    return device_hello(
        credential="secret",
        name="memory",
        memory_bytes=10**9,
        downlink_bytes_per_s=LINK_BYTES_PER_S,
        uplink_bytes_per_s=LINK_BYTES_PER_S,
    )


@pytest.mark.parametrize("coding", ["auto", "off"])
def test_operands_and_products_travel_coded(coding: str) -> None:
    rng = np.random.default_rng(0)
    sides = (rng.integers(-5, 5, (768, 768)).astype(np.float32) for _ in "ab")
    a, b = (Buffer(side, DType.FP32) for side in sides)

    async def scenario() -> tuple[Any, Any, DeviceSession]:
        runtime = LiveRuntime(SessionManager("secret", coding=coding))
        runtime.loop = asyncio.get_running_loop()
        fleet = Fleet(runtime)
        near, far = memory_link()
        device = DeviceSession(far, ComputeThread(NumpyBackend()), said())
        running = asyncio.gather(runtime.session(near), device.run())
        left, right = (Side(fleet.operand(side)) for side in (a, b))
        future = fleet.submit(left, right, empty(768, 768, DType.FP32))
        result = await asyncio.to_thread(future.result)
        await far.close()
        await running
        runtime.close()
        return result.array, fleet.counters(), device

    result, done, device = asyncio.run(scenario())
    np.testing.assert_array_equal(result, a.array @ b.array)
    assert (device.downlink_bytes, device.uplink_bytes) == (done.downlink_bytes, done.uplink_bytes)
    down, up = done.saved.down.tiles, done.saved.up.tiles
    if coding == "off":
        assert (down, up) == (0, 0)
        return
    assert down > 0.1 * 2 * a.nbytes
    assert up > 0.1 * a.nbytes
    assert 2 * a.nbytes <= done.downlink_bytes + down < 2.05 * a.nbytes
    assert a.nbytes <= done.uplink_bytes + up < 1.05 * a.nbytes
