"""Strangers and members that flood a real server: they are sent away, and work goes on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection

import cleave
from cleave.protocol import limits, messages
from cleave.protocol.codec import encode
from cleave.protocol.messages import ErrorCode, Message
from cleave.server.access import Access, Clocks
from cleave.server.fleet_server import Server
from cleave.server.store.store import Store
from cleave.transport.connection_limits import BURST, ConnectionLimits
from cleave.transport.join_url import parse_join_url
from tests.integration.emulation import DEVICE, emulation
from tests.integration.processes import PATIENCE_S, until
from tests.integration.strangers import heard, hello, is_cut, multiplies, opened, raw, upgrade

NEVER_S = 3600.0
STATED: dict[str, Any] = {
    "downlink_bytes_per_s": 1e6,
    "uplink_bytes_per_s": 1e6,
    "flops_per_s": 1e9,
}
CREDENTIAL = "shared"


def frame(data: bytes, kind: Opcode = Opcode.BINARY, *, fin: bool = True) -> bytes:
    return Frame(kind, data, fin).serialize(mask=True)


def packed(message: Message) -> bytes:
    return b"".join(encode(message))


def inside(server: Server, address: tuple[str, int] | None = None) -> socket.socket:
    """A device that has joined, of which every byte is ours."""
    parts = urlsplit(server.url)
    assert parts.port is not None
    device = socket.create_connection(("127.0.0.1", parts.port), PATIENCE_S, address)
    credential = parse_join_url(server.url).credential
    before = server.fleet.device_count
    device.sendall(upgrade() + frame(hello(credential, **STATED)))
    until(lambda: server.fleet.device_count == before + 1)
    return device


def refused(device: ClientConnection) -> messages.Error:
    while not isinstance(message := heard(device), messages.Error):
        pass
    return message


@pytest.fixture(scope="module")
def working() -> Iterator[Server]:
    """A server with an honest device."""
    with cleave.serve(verify=False) as server, emulation(server.url, [DEVICE]):
        until(lambda: server.fleet.device_count == 1)
        yield server


NESTED = {
    "in the fields": b"\x92\xa5hello\x81\xa1a" + b"\xdd\x00\x10\x00\x00" * 1000,
    "as the type": b"\x92" + b"\xdd\x00\x10\x00\x00" * 1000,
    "as the message": b"\xdd\x00\x10\x00\x00" * 1600,
}


def test_nested_lists_of_strangers_are_failed_attempts(notes: list[str]) -> None:
    still = Clocks(steady=lambda: 0.0)  # no attempt comes back
    access = Access(Store(None), "token", fleet_credential=CREDENTIAL, clocks=still)
    with (
        closing(access),
        cleave.serve(verify=False, auth=access, credential=CREDENTIAL) as server,
        emulation(server.url, [DEVICE]),
    ):
        until(lambda: server.fleet.device_count == 1)
        for number, said in enumerate([*NESTED.values()] * 5):
            with opened(server) as stranger:
                stranger.send(said)
                if number < BURST:
                    assert refused(stranger).code is ErrorCode.PROTOCOL
                else:
                    with pytest.raises(ConnectionClosed):
                        heard(stranger)
        multiplies(server.fleet)
        with opened(server) as guessing:
            guessing.send(hello("GUESS"))
            assert "too many failed attempts" in refused(guessing).message
        with opened(server) as member:  # who has a credential is let in all the same
            member.send(hello(CREDENTIAL, **STATED))
            assert isinstance(heard(member), messages.Welcome)
    assert any("valid hello" in note for note in notes)


FLOODS = {
    "heartbeats": frame(packed(messages.Heartbeat())) * 10_000,
    "telemetry": frame(packed(messages.Telemetry({"power_w": 4.0}))) * 10_000,
    "late answers": frame(packed(messages.Result(7, 1, 1, "fp32", 0.0, bytes(4)))) * 10_000,
    "failures": frame(packed(messages.TaskError(7, "no"))) * 10_000,
    "pings": frame(b"", Opcode.PING) * 10_000,
    "pongs": frame(b"", Opcode.PONG) * 10_000,
}


@pytest.mark.parametrize("said", FLOODS.values(), ids=FLOODS)
def test_an_admitted_device_that_floods_is_sent_away(
    said: bytes, working: Server, notes: list[str]
) -> None:
    with opened(working) as flooding:
        flooding.send(hello(parse_join_url(working.url).credential, name="flood", **STATED))
        until(lambda: working.fleet.device_count == 2)
        with suppress(OSError):
            for _ in range(20):
                flooding.socket.sendall(said)
        with suppress(ConnectionClosed):  # who shouts may not hear why
            assert refused(flooding).code is ErrorCode.LIMIT
        until(lambda: working.fleet.device_count == 1)
        multiplies(working.fleet)
    reasons = (
        "flood left (it sent more than 1000 unrequested messages",
        "pings and tiny fragments",
    )
    assert any(reason in note for note in notes for reason in reasons)


def test_what_is_said_last_is_heard(notes: list[str]) -> None:
    """A device that says more than is taken in at once, and is gone."""
    with cleave.serve(verify=False) as server:
        with closing(inside(server)) as device:
            bye = packed(messages.Bye("enough"))
            device.sendall(frame(packed(messages.Heartbeat())) * 200 + frame(bye))
            device.shutdown(socket.SHUT_WR)
            assert is_cut(device)
        until(lambda: server.fleet.device_count == 0)
    assert any("left; 0 devices" in note for note in notes)  # on purpose, and not lost


def test_who_was_drained_is_said_to_be(notes: list[str]) -> None:
    """Also how fast it is, be it ever so slow."""
    with cleave.serve(verify=False) as server, opened(server) as device:
        slow = STATED | {"flops_per_s": 2e6, "uplink_bytes_per_s": 1500.0}
        device.send(hello(parse_join_url(server.url).credential, name="slow", **slow))
        assert isinstance(heard(device), messages.Welcome)
        assert isinstance(heard(device), messages.CodeResults)  # its link is slow
        device.send(packed(messages.Drain()))
        assert isinstance(heard(device), messages.Bye)
        until(lambda: server.fleet.device_count == 0)
    assert any("slow joined (2.0 MFLOP/s, 1.0 MB/s down, 1.5 kB/s up)" in note for note in notes)
    assert any("slow left (drained); 0 devices" in note for note in notes)


def test_a_session_that_ends_before_there_was_work_is_named(notes: list[str]) -> None:
    with cleave.serve(verify=True) as server, opened(server) as device:
        device.send(hello(parse_join_url(server.url).credential, name="hasty"))
        assert isinstance(heard(device), messages.Welcome)
        device.send(packed(messages.Cancel((1,))))
        until(lambda: any("session of hasty ended" in note for note in notes))
    (line,) = [note for note in notes if "session of hasty ended" in note]
    assert "(protocol)" in line
    assert "cancel" in line


def test_unfinished_messages_have_a_budget(notes: list[str]) -> None:
    allowed = ConnectionLimits(unfinished_bytes=150_000)
    piece = frame(bytes(60_000), fin=False)
    with (
        cleave.serve(verify=False, allowed=allowed) as server,
        ExitStack() as stack,
    ):
        devices = [stack.enter_context(closing(inside(server))) for _ in range(4)]
        for device in devices[:3]:
            device.sendall(piece)
        until(lambda: server.fleet.device_count == 3)
        devices[3].sendall(frame(packed(messages.Telemetry({"power_w": 1.0}))))
        sessions = server.live.manager.sessions
        until(lambda: any(session.telemetry for session in sessions.values()))
        assert server.fleet.device_count == 3
    cut = [note for note in notes if "left a message incomplete, while 150000 bytes" in note]
    assert sum("refused 127.0.0.1" in note for note in cut) == 1


def test_slow_handshakes_from_some_addresses_keep_nobody_else_out(notes: list[str]) -> None:
    allowed = ConnectionLimits(handshake_s=NEVER_S, waiting_per_address=3, waiting=12)
    with (
        cleave.serve(verify=False, allowed=allowed) as server,
        ExitStack() as stack,
    ):
        port = urlsplit(server.url).port
        assert port is not None
        for number in range(2, 6):
            for _ in range(4):  # one more than may
                slow = socket.create_connection(
                    ("127.0.0.1", port), PATIENCE_S, (f"127.0.0.{number}", 0)
                )
                stack.enter_context(closing(slow)).sendall(b"GET /ws HTTP/1.1\r\nX-Slow: ")
        until(
            lambda: (
                sum("3 connections from this address are already waiting" in note for note in notes)
                == 4
            )
        )
        for number in range(1, 15):  # more than there are places
            stack.enter_context(closing(inside(server, ("127.0.0.77", 0))))
            assert server.fleet.device_count == number
    assert any("another network got its place" in note for note in notes)


def test_connections_that_come_to_nothing_cost_their_address_the_next_ones(
    notes: list[str],
) -> None:
    allowed = ConnectionLimits(failed=3, failed_per_s=1 / NEVER_S)
    with cleave.serve(verify=False, allowed=allowed) as server:
        port = urlsplit(server.url).port
        assert port is not None
        for _ in range(5):  # those that come to something do not count
            with closing(inside(server)):
                assert server.fleet.device_count == 1
            until(lambda: server.fleet.device_count == 0)
            with closing(raw(server)) as page:
                page.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert is_cut(page)
        for _ in range(3):
            with opened(server) as stranger:
                stranger.send(NESTED["in the fields"])
                assert refused(stranger).code is ErrorCode.PROTOCOL
                with pytest.raises(ConnectionClosed):  # by now the failure counts
                    heard(stranger)
        with closing(raw(server)) as another:
            assert is_cut(another)
        with closing(inside(server, ("127.0.0.77", 0))):
            assert server.fleet.device_count == 1
    refusals = [note.partition(" refused ")[2] for note in notes if " refused " in note]
    assert refusals == [  # each reason once, and the others are summarized at the end
        "127.0.0.1: its first message was not a valid hello",
        "127.0.0.1: too many connections from this address failed",
        "2 more (2 times: its first message was not a valid hello)",
    ]


def left(notes: list[str], reason: str) -> bool:
    return any("test left" in note and reason in note for note in notes)


def test_a_session_may_say_no_more_than_its_role_needs(notes: list[str]) -> None:
    """A message that is too long ends the session at its first bytes."""
    with cleave.serve(verify=False) as server:
        for nbytes in (2**20, 10**9):
            with closing(inside(server)) as device:
                device.sendall(b"\x82\xff" + nbytes.to_bytes(8, "big") + bytes(4))
                assert is_cut(device)
            until(lambda: server.fleet.device_count == 0)
            until(partial(left, notes, f"announced a message of at least {nbytes} bytes"))
        most = limits.MAX_DEVICE_HEADER_BYTES
        with closing(inside(server)) as device:
            device.sendall(b"\x82\xff" + most.to_bytes(8, "big") + bytes(4) + bytes(most - 1))
            assert server.fleet.device_count == 1
    announced = [note for note in notes if " refused " in note and "announced a message" in note]
    assert len(announced) == 2  # the first, and the summary
    assert " refused 127.0.0.1: it announced a message of at least 1048576 bytes" in announced[0]
    assert "once: it announced a message" in announced[1]
