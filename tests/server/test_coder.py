"""The server codes an array once for all, in threads, and keeps nothing of it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.coding import coded
from cleave.coding.exponents import LEAST_BYTES, Each, encode
from cleave.errors import ProtocolError
from cleave.gemm import Span
from cleave.protocol.messages import Put, PutCoded, Result, ResultCoded
from cleave.server import coder as coder_module
from cleave.server.coder import Coder

SHAPE = (256, 128)


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
    code = coded.coded_payload

    def counted(message: coded.Plain, each: Each) -> bytes | None:
        calls.append(message)
        return code(message, each)

    monkeypatch.setattr(coder_module.coded, "coded_payload", counted)

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
        assert coded.put_of(message).payload == payload.pack()


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
    noise = np.random.default_rng(0).bytes(LEAST_BYTES)
    integers = np.arange(LEAST_BYTES // 8, dtype=np.int64).tobytes()
    for message in (
        Put(1, 1, LEAST_BYTES // 2, "bf16", noise),
        Put(1, 1, LEAST_BYTES // 8, "int64", integers),
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
    with pytest.raises(ProtocolError, match="cut off"):
        asyncio.run(coder.result(message))
