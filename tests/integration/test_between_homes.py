"""A server behind a tunnel or a reverse proxy: `--public-url`, through a real relay."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

import cleave
from cleave.errors import CleaveError, UsageError
from cleave.server.fleet_server import Server
from cleave.server.http.pages import Pages
from cleave.transport import tls
from cleave.transport.addresses import parse_public_url
from cleave.transport.join_url import parse_join_url
from cleave.transport.tls import Security, TlsMode, expose
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    run,
    started,
    until,
    wait_for_event,
)
from tests.integration.relays import Relay, relay
from tests.integration.strangers import multiplies
from tests.integration.test_http import BUILT
from tests.integration.test_security import attempt

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@contextmanager
def behind(relayed: Relay, security: Security) -> Iterator[Server]:
    """A server to which the relay leads."""
    with cleave.serve(security=security, pages=Pages(BUILT).answer) as server:
        relayed.leads_to = port_of(server.operator_url)
        yield server


# --- TLS ends at the server ---


def test_a_device_joins_through_a_relay_that_reads_nothing() -> None:
    with relay() as relayed:
        url = f"wss://127.0.0.1:{relayed.port}"
        with behind(relayed, Security(public_url=url)) as server:
            joins = parse_join_url(server.url)
            assert joins.address == f"{url}/ws"
            assert joins.fingerprint == server.fingerprint != ""
            assert parse_join_url(server.page_url) == joins
            with started("join", server.page_url, *JOIN):
                until(lambda: server.fleet.device_count == 1)
                multiplies(server.fleet)
            assert relayed.passed
            assert not any(b"GET /ws" in each for each in relayed.passed)  # not even the request


def test_operators_and_devices_of_the_servers_machine_need_no_relay() -> None:
    with relay() as relayed:
        url = f"wss://127.0.0.1:{relayed.port}"
        with behind(relayed, Security(public_url=url)) as server:
            relayed.leads_to = 0
            attempt(parse_join_url(server.operator_url))
            attempt(parse_join_url(server.direct_join_url("code")))
            with pytest.raises(CleaveError, match=f"127.0.0.1:{relayed.port}"):
                attempt(parse_join_url(server.url))


def test_a_relay_that_ends_tls_is_refused_where_the_join_url_names_a_certificate() -> None:
    own = expose("127.0.0.1", Security(tls=TlsMode.AUTO), datetime.now(UTC))
    with relay(own.context) as relayed:
        url = f"wss://127.0.0.1:{relayed.port}"
        with behind(relayed, Security(public_url=url)) as server:
            with pytest.raises(CleaveError, match="different certificate"):
                attempt(parse_join_url(server.url))
            assert relayed.passed in ([], [b""])


def test_a_certificate_stays_when_a_server_gets_a_public_address(tmp_path: Path) -> None:
    kept = expose("0.0.0.0", Security(folder=tmp_path), NOW)
    later = expose("0.0.0.0", Security(folder=tmp_path, public_url="wss://relay.example:8765"), NOW)
    assert later.fingerprint == kept.fingerprint  # devices go on trusting it
    new = expose("127.0.0.1", Security(folder=tmp_path / "new", public_url="wss://r.example"), NOW)
    assert "r.example" in tls.names_in((tmp_path / "new" / tls.CERTIFICATE_FILE).read_bytes())
    assert (new.public, new.host) == ("wss://r.example", "127.0.0.1")


# --- TLS ends at a reverse proxy ---


def test_a_proxy_that_ends_tls_needs_a_certificate_that_devices_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = tls.make_certificate(("127.0.0.1",), datetime.now(UTC))
    file = tmp_path / "proxy.pem"
    file.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with relay(context) as relayed:
        url = f"wss://127.0.0.1:{relayed.port}"
        with behind(relayed, Security(TlsMode.OFF, public_url=url)) as server:
            joins = parse_join_url(server.url)
            assert (joins.address, joins.fingerprint) == (f"{url}/ws", "")
            with pytest.raises(CleaveError, match="not trusted"):
                attempt(joins)
            assert not any(relayed.passed)
            certificate = tmp_path / "ca.pem"
            certificate.write_bytes(pem[pem.index(b"-----BEGIN CERT") :])
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # as if an authority signed it
            with started("join", server.url, *JOIN):
                until(lambda: server.fleet.device_count == 1)
            assert any(b"GET /ws" in each for each in relayed.passed)  # such a proxy reads all
            trusting = ssl.create_default_context(cafile=str(certificate))
            place = ("127.0.0.1", relayed.port)
            with closing(HTTPSConnection(*place, timeout=PATIENCE_S, context=trusting)) as page:
                page.request("GET", "/join")
                policy = page.getresponse().getheader("Content-Security-Policy")
            assert policy is not None
            assert f"wss://127.0.0.1:{relayed.port}" in policy


# --- browsers and programs ---


def test_pages_of_the_public_address_may_connect_and_no_others() -> None:
    with relay() as relayed:
        url = f"ws://127.0.0.1:{relayed.port}"
        with behind(relayed, Security(insecure_lan=True, public_url=url)) as server:
            address = parse_join_url(server.url).address
            with connect(address, origin=Origin(f"http://127.0.0.1:{relayed.port}")):
                pass
            with pytest.raises(InvalidStatus):
                connect(address, origin=Origin("http://127.0.0.1:1"))


def test_strangers_behind_a_relay_are_not_programs_of_this_machine(tmp_path: Path) -> None:
    """Metrics need no token on this machine, and a tunnel's connections come from loopback."""
    with ExitStack() as stack:
        relayed = stack.enter_context(relay())
        for options, status in [
            ((), 200),
            (("--insecure-lan", "--public-url", f"ws://localhost:{relayed.port}"), 401),
        ]:
            command = ("serve", "--port", "0", "--data", "none", "--json", *options)
            with started(*command, cwd=tmp_path) as (_, lines):
                listening = wait_for_event(lines, "listening")
                relayed.leads_to = port_of(listening["operator_url"])
                place = ("localhost", relayed.port)
                with closing(HTTPConnection(*place, timeout=PATIENCE_S)) as metrics:
                    metrics.request("GET", "/metrics")
                    assert metrics.getresponse().status == status


def test_commands_print_the_public_address(tmp_path: Path) -> None:
    url = "wss://relay.example:8765"
    data = ("--data", str(tmp_path / "data"))
    with started("serve", "--port", "0", *data, "--json", "--public-url", url, cwd=tmp_path) as (
        _,
        lines,
    ):
        listening = wait_for_event(lines, "listening")
        page = "https://relay.example:8765"
        assert listening["url"].startswith(f"{url}/ws#c=")
        assert listening["page_url"].startswith(f"{page}/join#c=")
        assert listening["fingerprint"] in listening["url"]
        assert listening["dashboard_url"].startswith(f"{page}/#c=")
        assert urlsplit(listening["operator_url"]).hostname == "127.0.0.1"
        pair = here("pair", *data)
        assert f"cleave join '{page}/join#c=" in pair.stdout
        assert "machine alone" not in pair.stderr
        assert "▀" in pair.stderr
        picture = tmp_path / "code.png"
        assert here("pair", *data, "--png", str(picture)).returncode == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        nowhere = here("pair", *data, "--png", str(tmp_path / "no" / "x.png"))
        assert (nowhere.returncode, "x.png cannot be written" in nowhere.stderr) == (2, True)
        assert "▀" in here("dashboard", *data).stderr
        for options in ((), ("--operator",)):
            told = json.loads(here("dashboard", *data, "--json", *options).stdout)
            assert told["url"].startswith(f"{page}/#c=")
        assert here("devices", *data, "--json").returncode == 0  # without the relay


def test_a_relay_whose_server_is_away_is_named_in_the_error() -> None:
    with (
        relay() as relayed,
        behind(relayed, Security(public_url=f"wss://127.0.0.1:{relayed.port}")) as server,
    ):
        relayed.leads_to = 0
        answer = run("join", server.url, *JOIN, "--once")
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert "relay" in answer.stderr


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "is_read_as"),
    [
        ("wss://Relay.example:8765/", "wss://relay.example:8765"),
        ("https://relay.example", "wss://relay.example"),
        ("wss://relay.example:443", "wss://relay.example"),
        ("http://192.0.2.1:80", "ws://192.0.2.1"),
        ("wss://[2001:db8::1]:9", "wss://[2001:db8::1]:9"),
    ],
)
def test_public_addresses_are_read(text: str, is_read_as: str) -> None:
    assert parse_public_url(text) == is_read_as


@pytest.mark.parametrize(
    "text",
    [
        "relay.example", "relay.example:8765", "ftp://relay.example", "wss://relay.example/cleave",
        "wss://u@relay.example", "wss://relay.example:port", "wss://relay.example:0", "wss://[::1",
        "wss://relay.example/#c=x", "wss://",
    ],
)  # fmt: skip
def test_what_is_no_public_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--public-url is .*such as wss://"):
        parse_public_url(text)


def test_a_public_address_without_tls_is_refused_or_wanted(tmp_path: Path) -> None:
    for security in (
        Security(public_url="ws://relay.example"),
        Security(TlsMode.OFF, public_url="ws://relay.example"),
    ):
        with pytest.raises(UsageError, match="--insecure-lan"):
            expose("127.0.0.1", security, NOW)
    tls_too = Security(TlsMode.AUTO, insecure_lan=True, public_url="ws://relay.example")
    with pytest.raises(UsageError, match="use wss://"):
        expose("127.0.0.1", tls_too, NOW)
    several = here("serve", "--public-url", "wss://relay.example", "--servers", "2", cwd=tmp_path)
    assert several.returncode == 2
    assert "--servers 1" in several.stderr
