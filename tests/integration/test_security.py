"""Knocking at a real server: TLS, origins, limits; who is inside goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

import cleave
from cleave.errors import CleaveError
from cleave.protocol import limits, messages
from cleave.protocol.codec import encode
from cleave.protocol.messages import ErrorCode, Role
from cleave.scheduler.sessions.admission import AccessLevel
from cleave.server.fleet_server import Server
from cleave.transport import tls
from cleave.transport.connection import WebSocketConnection, open_connection
from cleave.transport.connection_limits import ConnectionLimits
from cleave.transport.http import HttpAnswer, HttpRequest
from cleave.transport.join_url import JoinUrl, parse_join_url
from cleave.transport.tls import Security, TlsMode, expose, fingerprint_of
from profiles.measuring.link import measure_link
from tests.integration.emulation import DEVICE, emulation
from tests.integration.processes import (
    CLEAVE,
    JOIN,
    PATIENCE_S,
    here,
    started,
    until,
    wait_for_event,
)
from tests.integration.strangers import heard, hello, is_cut, multiplies, opened, raw, upgrade

SECURE = Security(tls=TlsMode.AUTO)
NEVER_S = 3600.0


# --- TLS ---


def attempt(url: JoinUrl) -> WebSocketConnection:
    async def scenario() -> WebSocketConnection:
        connection = await open_connection(url)
        await connection.close()
        return connection

    return asyncio.run(scenario())


def test_devices_and_operators_join_the_server_whose_certificate_they_know(
    tmp_path: Path,
) -> None:
    command = ("serve", "--host", "0.0.0.0", "--port", "0", "--data", "data", "--json")
    with ExitStack() as stack:
        _, lines = stack.enter_context(started(*command, cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        url = parse_join_url(listening["url"]).at("127.0.0.1")
        assert url.address.startswith("wss://")
        assert url.fingerprint == listening["fingerprint"] != ""
        device = stack.enter_context(started("join", url.text, *JOIN))
        (tmp_path / "operator.url").write_text(
            parse_join_url(listening["operator_url"]).at("127.0.0.1").text
        )
        answer = here("train", "--server", f"@{tmp_path}/operator.url", "--attach", "job-1")
        assert "job-1" in answer.stderr  # it was let in, and there is no such job
        wait_for_event(device[1], "ready")


def test_work_is_done_over_tls_and_another_certificate_is_a_sentence(tmp_path: Path) -> None:
    kept = Security(tls=TlsMode.AUTO, folder=tmp_path)
    with cleave.serve(security=kept) as server:
        url = parse_join_url(server.url)
        with started("join", server.url, *JOIN):
            until(lambda: server.fleet.device_count == 1)
            multiplies(server.fleet)
        (link,) = asyncio.run(measure_link(server.url, 1))
        assert link.downlink_bytes_per_s > 0
        wrong = JoinUrl(url.address, url.credential, fingerprint="sha256:" + "0" * 64)
        refused = here("join", wrong.text, "--backend", "numpy")
        assert refused.returncode == 1
        assert f"a different certificate ({url.fingerprint})" in refused.stderr
        assert "Traceback" not in refused.stderr
    with cleave.serve(security=kept) as server:  # what devices know stays true
        assert parse_join_url(server.url).fingerprint == url.fingerprint


def test_nothing_is_sent_to_a_server_with_another_certificate() -> None:
    """Not even the HTTP request: the other side of TLS reads nothing."""
    shown = expose("127.0.0.1", SECURE, datetime.now(UTC))
    assert shown.context is not None
    read: list[bytes] = []

    async def scenario() -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                read.append(await reader.read())
            writer.close()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0, ssl=shown.context)
        port = server.sockets[0].getsockname()[1]
        url = JoinUrl(f"wss://127.0.0.1:{port}/ws", "secret", fingerprint="sha256:" + "1" * 64)
        async with server:
            with pytest.raises(CleaveError, match="different certificate"):
                await open_connection(url)

    asyncio.run(scenario())
    assert b"".join(read) == b""


def test_a_certificate_of_an_authority_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)

    def served(valid: timedelta, name: str) -> tuple[Path, Path]:
        pem = tls.make_certificate(("127.0.0.1",), now, valid)
        begin = pem.index(b"-----BEGIN CERT")
        cert, key = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        cert.write_bytes(pem[begin:])
        key.write_bytes(pem[:begin])
        return cert, key

    good, old = served(timedelta(days=5), "good"), served(timedelta(minutes=-5), "old")
    for (cert, key), words in [(good, ""), (old, "expired")]:
        with cleave.serve(security=Security(certificate=cert, key=key)) as server:
            url = parse_join_url(server.url)
            assert url.fingerprint == ""
            monkeypatch.delenv("SSL_CERT_FILE", raising=False)
            with pytest.raises(CleaveError, match="not trusted"):
                attempt(url)
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))  # as if an authority had signed it
            if words:
                with pytest.raises(CleaveError, match=words):
                    attempt(url)
                pem = ssl.PEM_cert_to_DER_cert(cert.read_text())
                attempt(
                    JoinUrl(url.address, "", fingerprint=fingerprint_of(pem))
                )  # known, whatever its date
            else:
                attempt(url)


def test_plain_and_secure_are_told_apart() -> None:
    with cleave.serve() as plain, cleave.serve(security=SECURE) as secure:
        known = parse_join_url(secure.url)
        with pytest.raises(CleaveError, match="try ws://"):
            attempt(JoinUrl(parse_join_url(plain.url).address.replace("ws:", "wss:"), ""))
        with pytest.raises(CleaveError, match="wss:// URL"):
            attempt(JoinUrl(known.address.replace("wss:", "ws:"), ""))
        attempt(known)


def test_plain_is_refused_where_other_machines_listen(tmp_path: Path) -> None:
    answer = here(
        "serve", "--host", "0.0.0.0", "--port", "0", "--data", "none", "--tls", "off", cwd=tmp_path
    )
    assert answer.returncode == 2
    assert "--insecure-lan" in answer.stderr
    with cleave.serve(host="0.0.0.0", security=Security(insecure_lan=True)) as server:
        attempt(parse_join_url(server.url).at("127.0.0.1"))


# --- browsers and HTTP ---


def refusals(notes: list[str], *reasons: str) -> tuple[list[str], int]:
    """The lines of refusals with one of these reasons, and how many the summaries add to them.

    A line tells the first refusal with its reason; summaries leave out numbers.
    """
    lines = [note for note in notes if any(reason in note for reason in reasons)]
    kinds = [re.sub(r"\d+", "…", reason) for reason in reasons]
    more = sum(
        1 if times == "once" else int(times.removesuffix(" times").replace(",", ""))
        for note in notes
        if re.search(r" refused [\d,]+ more \(", note)
        for times, kind in re.findall(r"(once|[\d,]+ times): ([^;)]*)", note)
        if any(reason in kind for reason in kinds)
    )
    return [line for line in lines if " refused 127.0.0.1: " in line], more


def test_pages_of_other_origins_are_refused(notes: list[str]) -> None:
    allowed = Security(allow_origins=("https://pages.example/",))
    with cleave.serve(security=allowed) as server:
        own = f"127.0.0.1:{urlsplit(server.url).port}"
        for origin in (None, f"http://{own}", "https://pages.example", "HTTPS://Pages.Example"):
            with opened(server, origin=origin):
                pass
        for origin in (
            f"https://{own}", "http://127.0.0.1:1", "null", "https://pages.example.evil", "",
            "https://pages.example:444", "http://pages.example",
        ):  # fmt: skip
            with pytest.raises(InvalidStatus) as refused:
                opened(server, additional_headers={"Origin": origin})
            assert refused.value.response.status_code == 403
    told, more = refusals(notes, "another origin")
    assert (len(told), more) == (1, 6)


# --- limits ---


def test_who_is_not_admitted_may_send_little(notes: list[str]) -> None:
    with cleave.serve() as server:
        secret = parse_join_url(server.url).credential
        big = hello(secret, name="n" * 3900, profile="p" * 3900)
        with emulation(server.url, [DEVICE]):
            until(lambda: server.fleet.device_count == 1)
            for said in (b"x" * 2**20, hello("wrong") + b"x" * 10**6):
                with opened(server) as knocking, pytest.raises((ConnectionClosed, ConnectionError)):
                    exchange(knocking, said)
            with opened(server) as pieces, pytest.raises((ConnectionClosed, ConnectionError)):
                pieces.send(b"y" * 1000 for _ in range(10**6))  # a gigabyte, in fragments
            with closing(raw(server)) as endless:  # a request whose headers never end
                with suppress(ConnectionError):
                    endless.sendall(
                        b"GET /ws HTTP/1.1\r\n" + (b"A: " + b"b" * 1000 + b"\r\n") * 100
                    )
                assert is_cut(endless)
            with closing(raw(server)) as claims:  # a frame of 100 MB
                with suppress(ConnectionError):
                    claims.sendall(upgrade() + b"\x82\xff" + (10**8).to_bytes(8, "big"))
                    claims.sendall(b"z" * 200_000)
                assert is_cut(claims)
            with opened(server) as honest:
                honest.send(big)
                assert isinstance(heard(honest), messages.Welcome)
                honest.send(b"\x00" * 60_000)  # admitted: now it is judged as a message
                while not isinstance(last := heard(honest), messages.Error):
                    pass
                assert last.code is ErrorCode.PROTOCOL
            multiplies(server.fleet)
    first, all_of_them = limits.MAX_HELLO_BYTES, limits.MAX_UNADMITTED_BYTES
    reasons = (f"more than {all_of_them} bytes", f"the limit is {first} bytes")
    told, more = refusals(notes, *reasons)
    assert len(told) + more == 5
    assert all(sum(reason in line for line in told) <= 1 for reason in reasons)  # told once


def exchange(connection: ClientConnection, said: bytes) -> None:
    connection.send(said)
    connection.recv(PATIENCE_S)


@pytest.mark.parametrize("secure", [False, True])
def test_slow_handshakes_are_cut_at_every_stage(secure: bool, notes: list[str]) -> None:
    allowed = ConnectionLimits(handshake_s=0.3)
    security = SECURE if secure else Security()
    with (
        cleave.serve(security=security, allowed=allowed) as server,
        ExitStack() as stack,
    ):
        silent = stack.enter_context(closing(raw(server)))
        half = stack.enter_context(closing(raw(server)))
        half.sendall(b"\x16\x03\x01" if secure else b"GET /ws HT")
        assert is_cut(silent)
        assert is_cut(half)
        cut = 2
        if secure:
            secured, tries = in_time(lambda: encrypted(server))
            assert is_cut(stack.enter_context(closing(secured)))
            cut += tries
        options = {"ssl": trusting()} if secure else {}
        upgraded, tries = in_time(lambda: opened(server, **options))
        told = heard(stack.enter_context(upgraded))
        assert isinstance(told, messages.Error)
        assert told.code is ErrorCode.LIMIT
        cut += tries
    reasons = ("no accepted hello within 0.3 s", "no hello arrived in time")
    lines, more = refusals(notes, *reasons)
    assert len(lines) + more == cut
    assert all(sum(reason in line for line in lines) <= 1 for reason in reasons)  # told once


Opened = TypeVar("Opened")


def in_time(shake_hands: Callable[[], Opened]) -> tuple[Opened, int]:
    """What comes of a handshake that was not too slow, and how many it took: a machine is busy."""
    for tries in count(1):
        try:
            return shake_hands(), tries
        except (InvalidHandshake, OSError, EOFError):
            continue
    raise AssertionError("unreachable")


def encrypted(server: Server) -> ssl.SSLSocket:
    """A connection that has come as far as TLS."""
    plain = raw(server)
    try:
        return trusting().wrap_socket(plain)
    except OSError:
        plain.close()
        raise


def trusting() -> ssl.SSLContext:
    """For a client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_few_wait_and_who_is_inside_goes_on(notes: list[str]) -> None:
    allowed = ConnectionLimits(handshake_s=NEVER_S, waiting_per_address=5)
    with (
        cleave.serve(allowed=allowed) as server,
        emulation(server.url, [DEVICE]),
        ExitStack() as stack,
    ):
        until(lambda: server.fleet.device_count == 1)
        waiting = [stack.enter_context(closing(raw(server))) for _ in range(5)]
        waiting[-1].sendall(b"GET /healthz HTTP/1.1\r\n")  # taken, and not answered yet
        for _ in range(100):
            with closing(raw(server)) as refused:
                assert is_cut(refused)
        multiplies(server.fleet)
        waiting[-1].sendall(b"\r\n")
        assert waiting[-1].recv(1000).startswith(b"HTTP/1.1 200")
        assert is_cut(waiting[-1])
        until(lambda: knocks(server))  # there is room again
        multiplies(server.fleet)
    refusals = [note for note in notes if "refused" in note]
    assert len(refusals) < 40  # of more than 100
    assert any("5 connections from this address are already waiting" in note for note in refusals)


def knocks(server: Server) -> bool:
    """Whether a health check is answered."""
    with closing(raw(server)) as connection, suppress(ConnectionError):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(1000).startswith(b"HTTP/1.1 200")
    return False


def test_devices_and_operators_are_counted() -> None:
    allowed = ConnectionLimits(devices=2, operators=1, waiting_per_address=2)
    with cleave.serve(allowed=allowed, operator=_idle) as server, ExitStack() as stack:
        device = hello(parse_join_url(server.url).credential)
        operator = hello(parse_join_url(server.operator_url).credential, Role.OPERATOR)
        for said, most, full in ((device, 2, "2 devices"), (operator, 1, "1 operator")):
            inside = []
            for _ in range(most):
                connection = stack.enter_context(opened(server))
                connection.send(said)
                assert isinstance(heard(connection), messages.Welcome)
                inside.append(connection)
            with opened(server) as one_more:
                one_more.send(said)
                answer = heard(one_more)
            assert isinstance(answer, messages.Error)
            assert (answer.code, full in answer.message) == (ErrorCode.LIMIT, True)
            inside[0].close()
            until(partial(welcomed, server, said))


def welcomed(server: Server, said: bytes) -> bool:
    with opened(server) as connection:
        connection.send(said)
        return isinstance(heard(connection), messages.Welcome)


async def _idle(connection: Any, _: messages.Hello, __: AccessLevel) -> None:
    await connection.send(encode(messages.Welcome(device=0)))
    with suppress(Exception):
        await connection.receive()


# --- secrets ---

SECRET, OPERATOR_SECRET, GUESS = "s3cret-of-devices", "s3cret-of-operators", "gu3ss-of-a-stranger"


def test_no_secret_is_logged(tmp_path: Path) -> None:
    environment = {
        **os.environ, "CLEAVE_CREDENTIAL": SECRET, "CLEAVE_OPERATOR_CREDENTIAL": OPERATOR_SECRET,
        "PYTHONASYNCIODEBUG": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    server = subprocess.Popen(
        [*CLEAVE, "--debug", "serve", "--port", "0", "--data", "none", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        first = server.stdout.readline()  # the join URLs, which are for whoever started it
        assert SECRET in first
        address = first.split('"url": "')[1].split("#")[0]
        for said in (
            hello(GUESS), hello(SECRET), hello(GUESS, Role.OPERATOR), hello(SECRET, ops=()),
            hello(SECRET, memory_bytes=0), hello(SECRET, version=9), SECRET.encode(),
            hello(SECRET).replace(b"\xaacredential", b"\xaaCredential"), b"\x92" + hello(SECRET),
            b"\x92\xa5hello\x83\xa4role\xa6device\xa7version\x01\xaacredential\x91\xb1"
            + SECRET.encode(),
        ):  # fmt: skip
            with connect(address) as connection, suppress(ConnectionClosed):
                connection.send(said)
                connection.recv(PATIENCE_S)
        for path in (f"/ws?c={SECRET}", f"/{SECRET}", f"/ws/{SECRET}"):
            with pytest.raises(InvalidStatus):
                connect(address.replace("/ws", path), origin=Origin(f"http://{GUESS}")).__enter__()
        server.terminate()
        out, err = server.communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
    assert "wrong credential" in out
    for secret in (SECRET, OPERATOR_SECRET, GUESS):
        assert secret not in out + err


def test_no_secret_is_logged_at_the_lowest_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "cleave")
    with cleave.serve(credential=SECRET, verify=False) as server, opened(server) as device:
        device.send(
            hello(SECRET, flops_per_s=1e9, downlink_bytes_per_s=1e6, uplink_bytes_per_s=1e6)
        )
        assert isinstance(heard(device), messages.Welcome)
        until(lambda: server.fleet.device_count == 1)
    assert " joined (" in caplog.text
    assert SECRET not in caplog.text


def test_a_bug_of_the_server_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def pages(request: HttpRequest) -> HttpAnswer:
        raise RuntimeError(f"no page for {request.path}")

    with cleave.serve(pages=pages) as server, pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(server.address.replace("ws", "http", 1).replace("/ws", "/there"))
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    said = "unexpected RuntimeError in a session: no page for /there"
    assert [record.getMessage() for record in errors] == [said]


def test_a_bug_in_a_group_of_tasks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async def operator(*_: object) -> None:
        async with asyncio.TaskGroup():
            raise RuntimeError("it broke")

    with cleave.serve(operator=operator) as server, opened(server) as there:
        there.send(hello(parse_join_url(server.operator_url).credential, Role.OPERATOR))
        with pytest.raises(ConnectionClosed):
            there.recv(PATIENCE_S)
    # Servers of other tests live in this process, too, and warn of what they refused.
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["unexpected RuntimeError in a session: it broke"]


@pytest.mark.filterwarnings("error::ResourceWarning")  # of a pipe left open
def test_no_secret_is_on_a_command_line() -> None:
    from cleave_cli.own_server import own_device, own_server

    with own_device("numpy", 1):
        assert not any("#c=" in line for line in command_lines())
    with own_server() as server:
        lines = " ".join(command_lines())
        for url in (server.url, server.operator_url):
            assert parse_join_url(url).credential not in lines


def command_lines() -> list[str]:
    """Of the processes that this one started."""
    children = psutil.Process().children(recursive=True)
    found = [" ".join(process.cmdline()) for process in children]
    assert any("cleave_cli" in line for line in found)
    return found
