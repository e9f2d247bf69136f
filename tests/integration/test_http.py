"""Plain HTTP on a real server's port."""

from __future__ import annotations

import gzip
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from http.client import BadStatusLine, HTTPConnection, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

import pytest

import cleave
from cleave.server.fleet_server import Server
from cleave.server.http.pages import Pages
from cleave.transport.connection_limits import ConnectionLimits
from cleave.transport.tls import Security, TlsMode
from tests.integration.processes import PATIENCE_S
from tests.integration.strangers import raw

LARGE = b"0123456789abcdef" * 2**20  # 16 MiB: more than the system buffers
BUILT = {
    "index.html": b"<!doctype html><title>dashboard</title>",
    "join.html": b"<!doctype html><title>join</title>" + b" " * 1000,
    "assets/large.bin": LARGE,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with cleave.serve(pages=Pages(BUILT).answer) as server:
        yield server


def place(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[HTTPResponse, bytes]:
    with closing(HTTPConnection(*place(server), timeout=PATIENCE_S)) as connection:
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        response = connection.getresponse()
        return response, response.read()


def test_pages_over_a_socket(server: Server) -> None:
    response, body = ask(server, "/join?ignored=1", Accept_Encoding="gzip")
    assert (response.status, gzip.decompress(body)) == (200, BUILT["join.html"])
    assert response.getheader("Content-Length") == str(len(body))
    assert response.getheader("Cross-Origin-Embedder-Policy") == "require-corp"
    assert response.getheader("Cross-Origin-Opener-Policy") is None
    trusting, _ = ask(server, "/join", Sec_Fetch_Dest="document")
    assert trusting.getheader("Cross-Origin-Opener-Policy") == "same-origin"
    host, port = place(server)
    assert f"ws://{host}:{port};" in (response.getheader("Content-Security-Policy") or "")
    assert ask(server, "/")[1] == BUILT["index.html"]
    assert ask(server, "/healthz")[1] == b"ok\n"
    assert ask(server, "/assets/large.bin")[1] == LARGE
    response, body = ask(server, "/join", "HEAD")
    assert (response.status, body) == (200, b"")
    assert response.getheader("Content-Length") == str(len(BUILT["join.html"]))
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        response, _ = ask(server, "/join", method)
        assert response.status == 405
        assert response.getheader("Allow") == "GET, HEAD"


def test_no_path_names_another_file(server: Server) -> None:
    for path in (
        "/index.html", "/join.html", "/join/", "//", "/assets/", "/assets/../index.html",
        "/../pages.py", "/%2e%2e/pages.py", "/assets/%2e%2e/%2e%2e/pages.py", "/..\\pages.py",
        "/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd",
        "/ws/../../etc/passwd", "/ws/", "/static/../../pyproject.toml", "/..\\..\\pyproject.toml",
        "/pyproject.toml", "file:///etc/passwd", "/healthz/../../etc/passwd", "/ws%00.html",
    ):  # fmt: skip
        with closing(raw(server)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 404 "), path
        assert answer.endswith(b"\r\n\r\nnot found\n"), path
        assert b"Python" not in answer  # nor what it runs on


def test_readers_of_pages_do_not_stay_in_the_doorway() -> None:
    allowed = ConnectionLimits(waiting_per_address=2, waiting=2)
    with cleave.serve(pages=Pages(BUILT).answer, allowed=allowed) as server:
        for _ in range(10):
            assert ask(server, "/")[0].status == 200


def asked_for_much(server: Server) -> socket.socket:
    """A connection on which the large file is under way, more of it than buffers hold."""
    connection = socket.create_connection(place(server), PATIENCE_S)
    connection.sendall(b"GET /assets/large.bin HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(1) == b"H"
    return connection


def let_in(server: Server) -> bool:
    """Whether there is room in the doorway; waits a moment if not."""
    try:
        return ask(server, "/healthz")[0].status == 200
    except (ConnectionError, BadStatusLine):
        return False


def test_a_slow_reader_gets_all_of_its_page() -> None:
    allowed = ConnectionLimits(waiting_per_address=2)
    with (
        cleave.serve(pages=Pages(BUILT).answer, allowed=allowed) as server,
        asked_for_much(server) as slow,
        socket.create_connection(place(server), PATIENCE_S) as silent,
    ):
        silent.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        while not let_in(server):  # this one does not close: it is cut a moment after its answer
            pass
        received = 1
        while data := slow.recv(65536):
            received += len(data)
        assert received > len(LARGE)


def test_who_does_not_read_its_page_is_cut_in_time() -> None:
    allowed = ConnectionLimits(handshake_s=2.0, waiting_per_address=1)
    with cleave.serve(pages=Pages(BUILT).answer, allowed=allowed) as server, asked_for_much(server):
        attempts = 0
        while not let_in(server):
            attempts += 1
        assert attempts  # it was in the way, and is no more


def test_pages_over_tls() -> None:
    security = Security(tls=TlsMode.AUTO)
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    with cleave.serve(pages=Pages(BUILT).answer, security=security) as server:
        connection = HTTPSConnection(*place(server), timeout=PATIENCE_S, context=unchecked)
        with closing(connection):
            connection.request("GET", "/assets/large.bin")
            response = connection.getresponse()
            assert response.read() == LARGE
            assert "wss://" in (response.getheader("Content-Security-Policy") or "")


def test_without_pages_only_the_health_is_told() -> None:
    with cleave.serve() as server:
        assert ask(server, "/")[0].status == 404
        assert ask(server, "/healthz")[0].status == 200
