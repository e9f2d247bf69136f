"""Servers on the local network: announced and found by real multicast DNS, on loopback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from zeroconf import ServiceInfo, Zeroconf

import cleave
from cleave.server.app import open_app
from cleave.server.fleet_server import Server
from cleave.transport.discovery import SERVICE, Announcement, announced, answering, find_servers
from cleave.transport.join_url import parse_join_url
from cleave.transport.tls import Security, TlsMode
from tests.integration.processes import PATIENCE_S, here, until

LOOPBACK = ("127.0.0.1",)
PIN = "sha256:" + "0f" * 32
NAME = f"box-{os.getpid()}"  # other tests of this machine may announce servers, too

# `cleave` in a process that looks for servers on loopback only.
CLEAVE = """
from functools import partial
from cleave.transport import discovery
discovery.find_servers = partial(discovery.find_servers, interfaces=("127.0.0.1",))
from cleave_cli.main import main
main()
"""

pytestmark = pytest.mark.slow


def found(name: str) -> list[Announcement]:
    return [each for each in find_servers(2.0, LOOPBACK) if each.name == name]


def announcement(server: Server, name: str, **changes: str) -> Announcement:
    port = urlsplit(server.operator_url).port
    assert port is not None
    fingerprint = changes.get("fingerprint", server.fingerprint)
    return Announcement(name, "Ada's lab", LOOPBACK, port, fingerprint, server.fingerprint != "")


def test_what_is_announced_is_found_until_it_ends() -> None:
    what = Announcement(NAME, "Ada's lab", ("192.0.2.7", "2001:db8::1"), 8765, PIN, True)
    with announced(what, LOOPBACK):
        until(lambda: found(NAME))
        (seen,) = found(NAME)
        assert seen == what
        url = parse_join_url("wss://192.0.2.7:8765/ws#c=CODE&fp=" + PIN)
        assert seen.url("192.0.2.7", "CODE") == url
        assert seen.url("2001:db8::1").address == "wss://[2001:db8::1]:8765/ws"
    until(lambda: not found(NAME))


def test_long_names_and_titles_are_cut() -> None:
    long = Announcement(f"{NAME}-" + "ä" * 60, "ß" * 300, ("192.0.2.7",), 1, "", False)
    with announced(long, LOOPBACK):
        until(lambda: [each for each in find_servers(2.0, LOOPBACK) if each.title[:1] == "ß"])


def test_what_others_announce_under_this_name_is_left_out() -> None:
    wrong: dict[str, dict[str, str]] = {
        f"{NAME}-bare": {},
        f"{NAME}-later": {"v": "2", "tls": "1"},
        f"{NAME}-short": {"v": "1", "tls": "1", "fp": "sha256:12"},
        f"{NAME}-open": {"v": "1", "tls": "0", "fp": PIN},
    }
    with closing(Zeroconf(list(LOOPBACK))) as network:
        for name, properties in wrong.items():
            network.register_service(
                ServiceInfo(
                    SERVICE, f"{name}.{SERVICE}", port=1, properties=properties,
                    parsed_addresses=["192.0.2.7"],
                ),
                cooperating_responders=True,  # does not wait for others with the same name
            )  # fmt: skip
        right = Announcement(NAME, "", ("192.0.2.7",), 8765, "", False)
        with announced(right, LOOPBACK):
            until(lambda: found(NAME))
            assert {each.name for each in find_servers(2.0, LOOPBACK)}.isdisjoint(wrong)


def test_of_several_addresses_one_that_accepts_connections_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert answering(Announcement("", "", ("127.0.0.9", *LOOPBACK), port, "", False)) != ""
    assert answering(Announcement("", "", LOOPBACK, port, "", False)) == ""


# --- `cleave join` without a URL ---


@contextmanager
def joining(state: Path) -> Iterator[subprocess.Popen[str]]:
    """`cleave join` without a URL, which asks on stderr."""
    command = [sys.executable, "-c", CLEAVE, "join", "--backend", "numpy", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--name", "laptop"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
        env={**os.environ, "CLEAVE_STATE": str(state), "COLUMNS": "200"},
    )  # fmt: skip
    late = threading.Timer(PATIENCE_S, process.kill)  # another question would not be answered
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        process.kill()
        process.communicate()


def read_to(process: subprocess.Popen[str], end: str) -> str:
    """What the process says on stderr, to the end of a question or of a sentence."""
    assert process.stderr is not None
    said = ""
    while end not in said:
        read = process.stderr.read(1)
        assert read, said
        said += read
    return said


def answer(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()


def test_a_device_finds_a_server_asks_and_joins_with_a_code(tmp_path: Path) -> None:
    with ExitStack() as stack:
        app = stack.enter_context(open_app(str(tmp_path / "data"), "", ""))
        server = stack.enter_context(cleave.serve(auth=app.access, security=Security(TlsMode.AUTO)))
        app.open(server)
        stack.enter_context(announced(announcement(server, NAME), LOOPBACK))
        until(lambda: found(NAME))
        code = app.access.pair().text
        with joining(tmp_path / "state") as device:
            said = read_to(device, "0 for none [0]:")
            number = re.search(rf"^(\d+): {NAME} \(Ada's lab\), port", said, re.MULTILINE)
            assert number
            assert f"certificate {server.fingerprint}" in said
            assert code not in said
            answer(device, number[1])
            read_to(device, "prints on the server:")
            answer(device, code.lower().replace("-", ""))
            read_to(device, "joined as laptop")
        with joining(tmp_path / "state") as again:  # the certificate is known: no code is needed
            said = read_to(again, "0 for none [0]:")
            number = re.search(rf"^(\d+): {NAME} \(", said, re.MULTILINE)
            assert number
            answer(again, number[1])
            assert "code" not in read_to(again, "joined as laptop")


def test_whoever_announces_a_known_address_gets_no_credential(tmp_path: Path) -> None:
    """A credential goes to the certificate that the device knows, or a code is asked for."""
    with ExitStack() as stack:
        app = stack.enter_context(open_app(str(tmp_path / "data"), "", ""))
        server = stack.enter_context(cleave.serve(auth=app.access, security=Security(TlsMode.AUTO)))
        app.open(server)
        url = announcement(server, NAME).url("127.0.0.1", app.access.pair().text)
        with joining_by(url.text, tmp_path / "state") as device:
            read_to(device, "joined as laptop")
        stack.enter_context(announced(announcement(server, NAME, fingerprint=PIN), LOOPBACK))
        until(lambda: found(NAME))
        with joining(tmp_path / "state") as device:
            number = re.search(rf"^(\d+): {NAME} \(", read_to(device, "[0]:"), re.MULTILINE)
            assert number
            answer(device, number[1])
            read_to(device, "prints on the server:")
            answer(device, "")


@contextmanager
def joining_by(url: str, state: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "cleave_cli", "join", url, "--backend", "numpy"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--name", "laptop"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "CLEAVE_STATE": str(state)},
    )  # fmt: skip
    late = threading.Timer(PATIENCE_S, process.kill)  # another question would not be answered
    late.start()
    try:
        yield process
    finally:
        late.cancel()
        process.kill()
        process.communicate()


def test_nobody_joins_who_does_not_say_so(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(cleave.serve())
        what = replace(announcement(server, NAME), title="Ada\n9: the real server (x")
        stack.enter_context(announced(what, LOOPBACK))
        until(lambda: found(NAME))
        with joining(tmp_path / "state") as device:
            said = read_to(device, "[0]:")
            assert "\n9:" not in said  # a title cannot look like another server
            assert "no TLS: anyone on this network can read" in said
            answer(device, "")
            assert device.wait(PATIENCE_S) == 0
        with joining(tmp_path / "state") as nobody:  # such as a service
            assert nobody.stdin is not None
            nobody.stdin.close()
            read_to(nobody, "nobody answers here; pass the join URL that `cleave pair` prints\n")
            assert nobody.wait(PATIENCE_S) == 2
            nobody.stdin = None  # `communicate` would flush it
        assert server.fleet.device_count == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "has no effect with --host 127.0.0.1"),
        (("--host", "0.0.0.0", "--tls-cert", "c.pem", "--tls-key", "k.pem"), "c.pem"),
    ],
)
def test_what_cannot_be_announced_is_refused(
    options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    refused = here("serve", "--announce", *options, "--data", "none", cwd=tmp_path)
    assert refused.returncode == 2
    assert words in refused.stderr
