"""The vectors that all clients share, read by the Python codec and the Python device."""

from __future__ import annotations

import pytest

from cleave import coding
from cleave.arrays import DType
from cleave.device.core import DeviceCore
from cleave.device.graph_check import check_graph
from cleave.errors import ProtocolError
from cleave.machine.backends import Compute, MatmulBackend, NumpyBackend, TorchBackend, execute
from cleave.machine.graph_run import FetchRun, GraphRun
from cleave.machine.graph_session import GraphError
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode, wire_size
from cleave.protocol.messages import Message
from tests.protocol.vectors import FOLDER, TYPES, Vector, each, load, message, octets
from tests.vectors import generate


def test_generation_reproduces_the_files() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    assert generate.build() == files


def test_names_are_unique_and_every_type_has_a_vector() -> None:
    for path in FOLDER.glob("*.json"):
        names = [vector["name"] for vector in load(path.stem)]
        assert len(names) == len(set(names))
    assert {vector["type"] for vector in load("messages")} == set(TYPES)


@pytest.mark.parametrize("name", ["messages", "decode"])
def test_vectors_name_the_feature_that_a_client_needs_for_them(name: str) -> None:
    for vector in load(name):
        feature = TYPES[vector["type"]].FEATURE
        assert vector.get("feature") == (feature and feature.value)


@each("messages")
def test_messages(vector: Vector) -> None:
    data = octets(vector["header"]) + octets(vector.get("payload", ""))
    parts = encode(message(vector))
    assert b"".join(parts) == data
    assert bytes(parts[0]) == octets(vector["header"])
    assert wire_size(message(vector)) == len(data)
    assert decode(data) == message(vector)


@each("decode")
def test_decode_of_other_forms(vector: Vector) -> None:
    assert decode(octets(vector["bytes"])) == message(vector)


@each("invalid")
def test_invalid(vector: Vector) -> None:
    with pytest.raises(ProtocolError):
        decode(octets(vector["bytes"]))


# --- products ---------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def backend(request: pytest.FixtureRequest) -> MatmulBackend:
    if request.param == "numpy":
        return NumpyBackend()
    pytest.importorskip("torch")
    return TorchBackend()


def _through_the_wire(sent: Message) -> Message:
    return decode(b"".join(encode(sent)))


@each("matmul")
def test_matmul(vector: Vector, backend: MatmulBackend) -> None:
    core = DeviceCore(memory_bytes=2**20)
    for put in vector["put"]:
        values = {name: put[name] for name in ("id", "rows", "columns", "dtype")}
        received = messages.Put(**values, payload=octets(put["payload"]))
        assert core.received(_through_the_wire(received)) == []
    run = messages.Run(**{**vector["run"], "inputs": tuple(vector["run"]["inputs"])})
    (order,) = core.received(_through_the_wire(run))
    assert isinstance(order, Compute)
    product = execute(backend, order)
    (result,) = core.computed(order.run, product.pack(), 0.25)
    result = _through_the_wire(result)  # type: ignore[arg-type]
    expected = vector["result"]
    assert result == messages.Result(
        id=run.id,
        rows=expected["rows"],
        columns=expected["columns"],
        dtype=expected["dtype"],
        compute_s=0.25,
        payload=octets(expected["payload"]),
    )


@each("graphs")
def test_models(vector: Vector) -> None:
    model = octets(vector["model"])
    if vector["is_graph"]:
        check_graph(model)
        return
    with pytest.raises(GraphError):
        check_graph(model)


@each("coding")
def test_coded_payloads(vector: Vector) -> None:
    coded, dtype, nbytes = octets(vector["coded"]), DType(vector["dtype"]), vector["payload_bytes"]
    if "payload" not in vector:
        with pytest.raises(ProtocolError):
            coding.decode(coded, dtype, nbytes)
        return
    payload = octets(vector["payload"])
    assert len(payload) == nbytes
    assert coding.decode(coded, dtype, nbytes) == payload
    assert coding.decode(coding.encode(payload, dtype), dtype, nbytes) == payload


@each("faults")
def test_faults(vector: Vector) -> None:
    feature = vector.get("feature", "")
    core = DeviceCore(vector["memory_bytes"], [feature])
    core.received(messages.Welcome(device=1, features=(feature,)))
    *before, last = [_through_the_wire(message(received)) for received in vector["receive"]]
    for received in before:
        orders = core.received(received)
        assert all(isinstance(order, Compute | GraphRun | FetchRun) for order in orders)
    match vector["answer"]:
        case "none":
            assert core.received(last) == []
        case "task_error":
            assert isinstance(last, messages.Run | messages.RunGraph | messages.Fetch)
            (answer,) = core.received(last)
            assert isinstance(answer, messages.TaskError)
            assert answer.id == last.id
            assert answer.reason
            assert core.failed(last.id, "no") == []  # the run is answered
        case "error":
            with pytest.raises(ProtocolError):
                core.received(last)
        case other:
            raise AssertionError(other)
