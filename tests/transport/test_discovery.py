"""Servers on the local network: announced and found by real multicast DNS, on loopback."""

from __future__ import annotations

import io
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

LOOK_S = 1.5  # on loopback, only the second question is answered, after 1 second

# `cleave` in a process that looks for servers on loopback only, until one of this test answers.
CLEAVE = f"""
from cleave.transport import discovery
look = discovery.find_servers
def find_servers():
    while not (found := [x for x in look({LOOK_S}, {LOOPBACK}) if x.name.startswith({NAME!r})]):
        pass
    return found
discovery.find_servers = find_servers
from cleave_cli.main import main
main()
"""

pytestmark = pytest.mark.slow


def found(*names: str) -> list[Announcement]:
    """Look until the servers of these names answer. Return all that this test announces."""
    seen: list[Announcement] = []

    def answered() -> bool:
        seen[:] = [x for x in find_servers(LOOK_S, LOOPBACK) if x.name.startswith(NAME)]
        return set(names) <= {each.name for each in seen}

    until(answered)
    return seen


def announcement(server: Server, name: str, **changes: str) -> Announcement:
    port = urlsplit(server.operator_url).port
    assert port is not None
    fingerprint = changes.get("fingerprint", server.fingerprint)
    return Announcement(name, "Ada's lab", LOOPBACK, port, fingerprint, server.fingerprint != "")


def test_what_is_announced_is_found_until_it_ends_and_what_is_invalid_is_left_out() -> None:
    """Long names and titles are cut. One responder announces the invalid services and a valid one,
    so a look that finds the valid one has seen all."""
    valid = {"v": "1", "tls": "1", "fp": PIN}
    none: dict[str, str] = {}
    invalid = none, {"v": "2", "tls": "1"}, {**valid, "fp": "sha256:12"}, {**valid, "tls": "0"}
    what = Announcement(
        f"{NAME}-long-" + "ä" * 60, "ß" * 300, ("192.0.2.7", "2001:db8::1"), 8765, PIN, True
    )
    cut = replace(what, name=what.name.encode()[:50].decode(errors="ignore"), title="ß" * 100)
    other = Announcement(f"{NAME}-valid", "", ("192.0.2.7",), 1, PIN, True)
    with closing(Zeroconf(list(LOOPBACK))) as network:
        for label, properties in (("valid", valid), *enumerate(invalid)):
            network.register_service(
                ServiceInfo(
                    SERVICE, f"{NAME}-{label}.{SERVICE}", port=1, properties=properties,
                    parsed_addresses=["192.0.2.7"],
                ),
                cooperating_responders=True,  # does not wait for others with the same name
            )  # fmt: skip
        with announced(what, LOOPBACK):
            assert found(other.name, cut.name) == [cut, other]
        until(lambda: found(other.name) == [other])
    url = parse_join_url("wss://192.0.2.7:8765/ws#c=CODE&fp=" + PIN)
    assert cut.url("192.0.2.7", "CODE") == url
    assert cut.url("2001:db8::1").address == "wss://[2001:db8::1]:8765/ws"


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


def choosing(
    looked: list[Announcement], state: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> subprocess.CompletedProcess[str]:
    """`cleave join` without a URL in this process, to its end; what it reads on stdin is `said`.

    Its look at the network returns `looked`.
    """
    monkeypatch.setattr("cleave.transport.discovery.find_servers", lambda: looked)
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    monkeypatch.setenv("CLEAVE_STATE", str(state))
    return here("join", "--backend", "numpy", "--threads", "1", "--name", "laptop")


def test_a_device_finds_a_server_asks_and_joins_with_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later, its credential goes only to the certificate that it knows; others need a code."""
    with ExitStack() as stack:
        app = stack.enter_context(open_app(str(tmp_path / "data"), "", ""))
        server = stack.enter_context(cleave.serve(auth=app.access, security=Security(TlsMode.AUTO)))
        app.open(server)
        code = app.access.pair().text
        with announced(announcement(server, NAME), LOOPBACK):
            with joining(tmp_path / "state") as device:
                said = read_to(device, "0 for none [0]:")
                assert re.search(rf"^1: {NAME} \(Ada's lab\), port", said, re.MULTILINE)
                assert f"certificate {server.fingerprint}" in said
                assert code not in said
                answer(device, "1")
                read_to(device, "prints on the server:")
                answer(device, code.lower().replace("-", ""))
                read_to(device, "joined as laptop")
            with joining(tmp_path / "state") as again:  # the certificate is known: no code needed
                read_to(again, "0 for none [0]:")
                answer(again, "1")
                assert "code" not in read_to(again, "joined as laptop")
        with announced(announcement(server, f"{NAME}-false", fingerprint=PIN), LOOPBACK):
            false = found(f"{NAME}-false")
            assert [each.fingerprint for each in false] == [PIN]
            asked = choosing(false, tmp_path / "state", "1\n\n", monkeypatch).stderr
            assert "prints on the server:" in asked


def test_nobody_joins_who_does_not_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(cleave.serve())
        what = replace(announcement(server, NAME), title="Ada\n9: the real server (x")
        stack.enter_context(announced(what, LOOPBACK))
        looked = found(NAME)
        device = choosing(looked, tmp_path / "state", "\n", monkeypatch)
        assert device.returncode == 0
        assert "\n9:" not in device.stderr  # a title cannot look like another server
        assert "no TLS: anyone on this network can read" in device.stderr
        nobody = choosing(looked, tmp_path / "state", "", monkeypatch)  # such as a service
        assert nobody.returncode == 2
        assert nobody.stderr.endswith(
            "nobody answers here; pass the join URL that `cleave pair` prints\n"
        )
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
