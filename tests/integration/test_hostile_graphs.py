"""A hostile server sends small graphs that make large arrays to the process of a device."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from cleave.machine.onnx_graph import ArrayType, Node, written
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Feature, Message
from tests.integration.processes import PATIENCE_S
from tests.vectors.graph_runs import all_runs

_OFFERED_MB = 100
_ROW = ArrayType(["batch", 4])
_BASE_BYTES = 150_000_000
"""What a device's process takes that holds nothing: Python, numpy and ONNX Runtime."""

_HONEST = written([Node("Neg", ["x"], ["y"])], {"x": _ROW}, {"y": _ROW})


def _resident_most(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def _run(number: int, model: bytes, elements: Sequence[int | None], outputs: int) -> list[Message]:
    """The messages of one run, under ids of its own, of which the last is answered."""
    first = 100 * number
    sent: list[Message] = [messages.Graph(first, model)]
    inputs = []
    for at, count in enumerate(elements, 1):
        if count is not None:
            payload = np.ones(count, "<f4").tobytes()
            sent.append(messages.Put(first + at, 1, count, "fp32", payload))
        inputs.append(0 if count is None else first + at)
    sent.append(messages.RunGraph(first, first, tuple(inputs), (0,) * outputs, ()))
    return sent


@pytest.fixture
def device() -> Iterator[tuple[ServerConnection, messages.Hello, subprocess.Popen[bytes]]]:
    """A device's process that joined, its connection and hello."""
    joined: Queue[tuple[ServerConnection, messages.Hello]] = Queue()
    done: Queue[None] = Queue()

    def handle(connection: ServerConnection) -> None:
        hello = _answer(connection)
        assert isinstance(hello, messages.Hello)
        if hello.measure:  # it only asks whether it would be admitted
            connection.send(b"".join(encode(messages.Welcome(1))))
            return
        joined.put((connection, hello))
        done.get()

    with serve(handle, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        url = f"ws://127.0.0.1:{port}/ws#c=any"
        command = [sys.executable, "-m", "cleave_cli", "join", url, "--once"]
        process = subprocess.Popen(
            [*command, "--memory", str(_OFFERED_MB), "--backend", "numpy"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield *joined.get(timeout=PATIENCE_S), process
        finally:
            process.kill()
            process.wait()
            done.put(None)
            server.shutdown()
            thread.join()


def _answer(connection: ServerConnection) -> Message:
    """The next message that is no sign of life."""
    while True:
        data = connection.recv(timeout=PATIENCE_S)
        assert isinstance(data, bytes)
        message = decode(data)
        if not isinstance(message, messages.Heartbeat | messages.Telemetry):
            return message


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory as Linux says it")
def test_a_device_takes_no_more_memory_than_it_offered(
    device: tuple[ServerConnection, messages.Hello, subprocess.Popen[bytes]],
) -> None:
    connection, hello, process = device
    assert Feature.GRAPHS.value in hello.features
    connection.send(b"".join(encode(messages.Welcome(1, features=(Feature.GRAPHS.value,)))))
    large = [
        run
        for run in all_runs()
        if run.expected == "size" or (isinstance(run.expected, int) and run.expected > 10**8)
    ]
    assert len(large) > 8
    for number, run in enumerate(large, 1):
        elements = [one[0] if isinstance(one, list) else one for one in run.inputs]
        if run.name == "hidden-in-a-branch":
            continue  # it takes a truth value
        for message in _run(number, run.model, elements, len(run.kept)):
            connection.send(b"".join(encode(message)))
        answer = _answer(connection)
        assert isinstance(answer, messages.TaskError), run.name
        assert "bytes, but only" in answer.reason or "shape" in answer.reason
        assert len(answer.reason) <= limits.MAX_TEXT
    for message in _run(len(large) + 1, _HONEST, [4], 1):
        connection.send(b"".join(encode(message)))
    assert isinstance(_answer(connection), messages.Computed)
    assert _resident_most(process.pid) < _OFFERED_MB * 10**6 + _BASE_BYTES
