"""Real sockets and real processes: a server, devices that join it, jobs that it runs."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect

import cleave
from cleave.device.compute_thread import ComputeThread
from cleave.device.session import DeviceSession, device_hello
from cleave.errors import FleetError, UsageError
from cleave.machine.backends import NumpyBackend
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Role
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.server.fleet_server import Server
from cleave.server.runtime import LiveRuntime
from cleave.transport.join_url import parse_join_url
from tests.fleet.products import submit
from tests.integration.emulation import DEVICE, emulation
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    started,
    until,
    wait_for_event,
)
from tests.integration.strangers import hello
from tests.memory_link import memory_link


def integers(rows: int, columns: int) -> Any:
    """Small integers: their products are exact in any order."""
    return np.random.default_rng(rows * 1000 + columns).integers(-8, 8, (rows, columns))


def test_processes_join_multiply_and_leave(served: Server) -> None:
    a, b = integers(200, 300), integers(300, 150)
    early = submit(served.fleet, a, b)  # waits for the first device
    with ExitStack() as stack:
        devices = [stack.enter_context(started("join", served.url, *JOIN)) for _ in range(2)]
        for _, lines in devices:
            wait_for_event(lines, "ready")
        until(lambda: served.fleet.device_count == 2)
        np.testing.assert_array_equal(early.result().array, a @ b)
        np.testing.assert_array_equal(submit(served.fleet, a, b).result().array, a @ b)

        process, lines = devices[0]
        process.send_signal(signal.SIGINT)  # its owner wants it back: it drains
        left = wait_for_event(lines, "left")
        assert left["blocks"] > 0
        assert process.wait(PATIENCE_S) == 0
        until(lambda: served.fleet.device_count == 1)
        np.testing.assert_array_equal(submit(served.fleet, a, b).result().array, a @ b)


# --- strangers ---


def talk(url: str, *parts: bytes | str) -> messages.Message:
    """Send raw messages and return the last answer before the connection closes."""
    with connect(parse_join_url(url).address, max_size=None) as socket:
        for part in parts:
            socket.send(part)
        last = None
        for data in socket:
            assert isinstance(data, bytes)
            last = decode(data)
    assert last is not None
    return last


def of_version_2(role: str) -> bytes:
    """A hello of another version, whose fields mean something else; role and version do not."""
    fields = {"role": role, "version": 2, "credential": {"key": 1}, "name": 7, "memory": "all"}
    return bytes(msgpack.packb(["hello", fields]))


def test_strangers_are_refused_and_others_go_on(served: Server) -> None:
    secret = parse_join_url(served.url).credential
    with emulation(served.url, [DEVICE]):
        until(lambda: served.fleet.device_count == 1)
        cases: list[tuple[list[bytes | str], ErrorCode, str]] = [
            ([hello("wrong")], ErrorCode.CREDENTIAL, "credential"),
            ([of_version_2("operator")], ErrorCode.VERSION, "2"),
            ([of_version_2("relay")], ErrorCode.VERSION, "2"),
            ([hello(secret), "a text message"], ErrorCode.PROTOCOL, "text"),
            ([b"\xc1garbage"], ErrorCode.PROTOCOL, "message"),
            ([hello(secret, role=Role.OPERATOR)], ErrorCode.CREDENTIAL, "operator"),
            ([hello(secret), b"\x93\x01"], ErrorCode.PROTOCOL, "message"),
            ([hello(secret), hello(secret)], ErrorCode.PROTOCOL, "hello"),
        ]
        for parts, code, words in cases:
            answer = talk(served.url, *parts)
            assert isinstance(answer, messages.Error), answer
            assert (answer.code, words in answer.message) == (code, True), answer
            assert answer.versions == ((1,) if code is ErrorCode.VERSION else ())
        a, b = integers(30, 40), integers(40, 20)
        np.testing.assert_array_equal(submit(served.fleet, a, b).result().array, a @ b)
        assert served.fleet.device_count == 1


def test_a_port_in_use_is_said(served: Server) -> None:
    port = int(served.url.split(":")[2].split("/")[0])
    with pytest.raises(UsageError, match=f"{port}.*already in use.*--port"):
        cleave.serve(port=port)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("http://127.0.0.1:9",), 2, ["is not a join URL"]),
        (("ws://127.0.0.1:9/ws#c=x",), 1, ["no server answers"]),
        (
            ("http://127.0.0.1:1/join#c=x", "--profile", "nokia-3310"), 2,
            ["'nokia-3310'", "cleave profile list"],
        ),
    ],
)  # fmt: skip
def test_who_cannot_join_is_told_why(
    arguments: tuple[str, ...], code: int, words: list[str]
) -> None:
    answer = here("join", *arguments, "--backend", "numpy")
    assert answer.returncode == code
    assert all(word in answer.stderr for word in words)
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize("policy", [(), ("--max-data", "1GB")], ids=["", "policy"])
def test_a_refused_device_learns_it_before_it_measures_itself(
    served: Server, policy: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring would fail, because this machine has no such backend."""
    # With a policy, the process lowers its priority. Here, the process is that of all other tests.
    monkeypatch.setattr("cleave.device.owner.step_aside", lambda: None)
    wrong = f"{served.url.partition('#')[0]}#c=wrong"
    answer = here("join", wrong, *policy, "--backend", "mps")
    assert answer.returncode == 1
    assert "refused" in answer.stderr
    assert "mps" not in answer.stderr


def test_a_closed_fleet_says_so() -> None:
    server = cleave.serve()
    future = submit(server.fleet, integers(3, 3), integers(3, 3))
    server.close()
    with pytest.raises(FleetError, match="closed"):
        future.result()
    with pytest.raises(FleetError, match="closed"):
        submit(server.fleet, integers(3, 3), integers(3, 3))
    server.close()


def test_a_device_that_sends_one_message_for_long_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of 8 MB take longer than `SILENCE_S` on the uplinks of many homes."""

    async def scenario() -> list[bool]:
        runtime = LiveRuntime(SessionManager("secret"))
        runtime.loop = asyncio.get_running_loop()
        now_s = 0.0
        monkeypatch.setattr(runtime, "now", lambda: now_s)
        near, far = memory_link()
        serving = asyncio.create_task(runtime.session(near))
        hello = device_hello(credential="secret", name="slow", memory_bytes=10**9)
        await far.send(encode(hello))
        welcome = decode(await far.receive())
        assert isinstance(welcome, messages.Welcome)
        there = []
        for came in [2000] * 10 + [10] * 3:
            now_s += limits.SILENCE_S / 2
            near.data_bytes += came  # of a message that is not complete
            runtime.tick()
            there.append(welcome.device in runtime.manager.sessions)
        await far.close()
        await serving
        return there

    assert asyncio.run(scenario()) == [True] * 12 + [False]


def test_a_device_tells_what_it_measured_as_soon_as_it_is_welcome() -> None:
    async def scenario() -> float:
        runtime = LiveRuntime(SessionManager("secret"))
        runtime.loop = asyncio.get_running_loop()
        near, far = memory_link()
        said = device_hello(credential="secret", name="battery", memory_bytes=10**9)
        computer = ComputeThread(NumpyBackend())
        device = DeviceSession(far, computer, said, telemetry=lambda: {"energy_j": 12.5})
        running = asyncio.gather(runtime.session(near), device.run())
        while not (sessions := list(runtime.manager.sessions.values())) or (
            "energy_j" not in sessions[0].telemetry
        ):
            await asyncio.sleep(0)
        told = sessions[0].telemetry["energy_j"]
        await far.close()
        await running
        return told

    assert asyncio.run(scenario()) == 12.5
