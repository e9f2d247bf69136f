"""An endpoint does a fleet's work for a worker in another process, and outlives the worker.

Ray only carries calls: here they are carried by pickling what goes in and what comes out.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleave.arrays import Buffer, DType, empty
from cleave.cluster.endpoint import Endpoint
from cleave.cluster.endpoints import EndpointRuntime
from cleave.cluster.message_packing import Packer, Unpacker
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import OutputReady
from cleave.scheduler.stages.work import StageGraph
from cleave.server.fleet_server import serve
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from tests.fleet.products import submit
from tests.integration.emulation import DEVICE, emulation
from tests.integration.processes import PATIENCE_S, started, until, wait_for_event
from tests.training.runs import losses, notes_of, steps_of, trained

JOB = JobSpec("opt-nano", steps=2, batch=4, seq=32, checkpoint_every=0, audit=1.0)


def carried(value: Any) -> Any:
    """What the other process gets."""
    return pickle.loads(pickle.dumps(value))


def attached(endpoint: Endpoint) -> Fleet:
    """The fleet of a new worker."""

    def call(name: str, *arguments: Any) -> Any:
        return carried(getattr(endpoint, name)(*carried(arguments)))

    return Fleet(EndpointRuntime(call, call))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    opened = Endpoint(serve(credential="secret"))
    yield opened
    opened.close()


@contextmanager
def processes(endpoint: Endpoint, count: int) -> Iterator[None]:
    """Devices that can do whatever devices do."""
    url, _ = endpoint.urls()
    with ExitStack() as stack:
        for _ in range(count):
            _, lines = stack.enter_context(started("join", url, "--threads", "1", "--json"))
            wait_for_event(lines, "ready")
        until(lambda: endpoint.view().device_count == count)
        yield


@contextmanager
def device(endpoint: Endpoint) -> Iterator[None]:
    """One that multiplies."""
    url, _ = endpoint.urls()
    with emulation(url, [DEVICE]):
        until(lambda: endpoint.view().device_count == 1)
        yield


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("method", ["tiles", "stages"])
def test_training_behind_a_endpoint_is_that_of_one_process_and_a_new_worker_goes_on(
    endpoint: Endpoint, tmp_path: Path, method: str
) -> None:
    job = JobSpec(**{**JOB.to_dict(), "method": method})
    plain = losses(job, RunFolder(tmp_path / "plain"))
    with processes(endpoint, 2):
        lost = attached(endpoint)
        a = np.ones((400, 400))
        futures = [submit(lost, a, a) for _ in range(4)]  # of a worker that dies now
        for number in range(2):
            seen = trained(job, RunFolder(tmp_path / f"{number}"), attached(endpoint))
            steps = steps_of(seen)
            assert [step.loss for step in steps] == pytest.approx(plain, rel=1e-4)
            assert all(step.clock == "wall" and step.downlink_bytes > 0 for step in steps)
            assert "quarantine" not in notes_of(seen)
            assert endpoint.view().device_count == 2
        assert len(futures) == 4


@pytest.mark.slow
def test_products_are_withdrawn_and_waited_for_with_a_time_limit(endpoint: Endpoint) -> None:
    fleet = attached(endpoint)
    a = np.arange(12.0).reshape(3, 4)
    waiting = submit(fleet, a, a.T)
    assert not fleet.runtime.wait(waiting, 0.05)
    assert not waiting.done
    fleet.abandon()
    assert waiting.done
    late = submit(fleet, a, a.T)
    with device(endpoint):
        assert fleet.runtime.wait(late, PATIENCE_S)
        np.testing.assert_array_equal(late.result().array, (a @ a.T).astype(np.float32))
        fleet.wait_for(1)
        assert len(fleet.runtime.fleet_rates()[1]) == 1
        assert not fleet.runtime.stuck(late)


@pytest.mark.slow
def test_a_matrix_whose_memory_is_freed_is_not_sent_to_devices_again(endpoint: Endpoint) -> None:
    fleet = attached(endpoint)
    runtime = fleet.runtime
    a, b = (np.random.default_rng(n).random((300, 300), np.float32) for n in range(2))
    held = endpoint_arrays(endpoint)
    with device(endpoint):
        weight, sent = fleet.operand(Buffer(a.copy(), DType.FP32)), []
        number = weight.id
        for _ in range(2):
            before = runtime.counters().downlink_bytes
            right = Side(fleet.operand(Buffer(b, DType.FP32)))
            out = empty(300, 300, DType.FP32)
            product = fleet.submit(Side(weight), right, out).result()
            np.testing.assert_allclose(product.array, a @ b, rtol=1e-4)
            sent.append(runtime.counters().downlink_bytes - before)
            assert held[number]() is not None
            weight.unbind()
            until(lambda: held[number]() is None)  # the endpoint has let go of it as well
            weight.bind(Buffer(a.copy(), DType.FP32))
        assert sent[1] <= sent[0] - a.nbytes / 2  # the device has kept it
        weight.unbind()
        del weight
        until(lambda: number not in endpoint._operands)


def endpoint_arrays(endpoint: Endpoint) -> dict[int, weakref.ref[Any]]:
    """The matrices that an endpoint was given, by their numbers, from now on."""
    found: dict[int, weakref.ref[Any]] = {}
    given = endpoint.operand

    def noted(number: int, array: Any, dtype: DType) -> None:
        found[number] = weakref.ref(array)
        given(number, array, dtype)

    endpoint.operand = noted  # type: ignore[method-assign]
    return found


def array(rows: int, columns: int) -> StageArray:
    made = np.random.default_rng(rows).random((rows, columns), np.float32)
    return StageArray(rows, columns, "fp32", Buffer(made, DType.FP32))


def test_what_was_sent_before_is_the_very_same_object_until_it_is_forgotten() -> None:
    packer, unpacker = Packer(), Unpacker()
    frozen, graph = array(3, 2), StageGraph(b"model", ("x",), ("y",))
    first = unpacker.unpack(carried(packer.pack({"frozen": frozen, "graph": graph})))
    packed = packer.pack([graph, frozen, array(4, 2)])
    again = unpacker.unpack(carried(packed))
    assert again[0] is first["graph"]
    assert again[1] is first["frozen"]
    assert len(pickle.dumps(packed)) < 1000  # only the new one has elements
    gone = packer.forget_others([graph])
    assert len(gone) == 2
    unpacker.forget(gone)
    assert packer.pack(graph).content is None
    assert packer.pack(frozen).content is not None


def test_parts_of_an_array_are_views_of_it_and_small_payloads_stay() -> None:
    whole = array(10, 3)
    parts = [array(4, 3), array(6, 3)]
    values = whole.payload.array  # type: ignore[union-attr]
    for part, rows in zip(parts, (slice(0, 4), slice(4, 10)), strict=True):
        part.payload.array[...] = values[rows]  # type: ignore[union-attr]
    sent = StageArray(10, 3, "fp32", whole.payload, parts=tuple(parts))
    indices = StageArray(1, 3, "int64", memoryview(np.arange(3).tobytes()))
    got, of_ids = Unpacker().unpack(carried(Packer().pack((sent, indices))))
    for part, expected in zip(got.parts, parts, strict=True):
        assert part.rows == expected.rows
        np.testing.assert_array_equal(part.payload.array, expected.payload.array)  # type: ignore[union-attr]
    assert bytes(of_ids.payload) == np.arange(3).tobytes()


def test_an_outcome_names_what_the_worker_has_and_brings_what_it_has_not() -> None:
    packer, unpacker = Packer(), Unpacker()
    mine = array(2, 2)
    there = unpacker.unpack(carried(packer.pack(mine)))
    theirs = StageArray(5000, 1, "fp32", memoryview(bytes(20_000)))
    outcome = OutputReady(3, [there, theirs, memoryview(b"abc")])
    back = packer.received_back(carried(unpacker.sent_back(outcome)))
    assert back.batch == 3
    assert back.payload[0] is mine
    assert bytes(back.payload[1].payload) == bytes(20_000)
    assert bytes(back.payload[2]) == b"abc"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_device_at_work_is_not_sent_away(endpoint: Endpoint) -> None:
    fleet = attached(endpoint)
    with processes(endpoint, 1):
        a = np.ones((3000, 3000))
        futures = [submit(fleet, a, a) for _ in range(4)]
        assert endpoint.send(1, "ws://127.0.0.1:9/ws#c=") == 0
        for future in futures:
            assert float(future.result().array[0, 0]) == 3000.0
        assert endpoint.load() == 1
