"""The table of pages: what is served under which path, with which headers. No sockets."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.server.http.pages import Pages, takes_gzip
from cleave.transport.http import HttpAnswer, HttpRequest

SCRIPT = b"export const answer = 42;\n" * 100
BUILT = {
    "index.html": b"<!doctype html><title>dashboard</title>",
    "join.html": b"<!doctype html><title>join</title>",
    "assets/join-Ck3s.js": SCRIPT,
    "assets/matmul-B1.wasm": b"\0asm" + bytes(2000),
    "icon.png": bytes(3000),
}
PATHS = {"/", "/join", "/assets/join-Ck3s.js", "/assets/matmul-B1.wasm", "/icon.png"}


def get(path: str, pages: Pages | None = None, **request: str) -> HttpAnswer:
    found = (pages or Pages(BUILT)).answer(HttpRequest(path, **request))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("path", "body", "kind", "cache"),
    [
        ("/", BUILT["index.html"], "text/html; charset=utf-8", "no-cache"),
        ("/join", BUILT["join.html"], "text/html; charset=utf-8", "no-cache"),
        ("/assets/join-Ck3s.js", SCRIPT, "text/javascript; charset=utf-8", "immutable"),
        ("/assets/matmul-B1.wasm", BUILT["assets/matmul-B1.wasm"], "application/wasm", "immutable"),
        ("/icon.png", BUILT["icon.png"], "image/png", "no-cache"),
    ],
)
def test_every_file_has_its_path_and_its_type(
    path: str, body: bytes, kind: str, cache: str
) -> None:
    answer = get(path)
    headers = dict(answer.headers)
    assert (answer.status, answer.body) == (200, body)
    assert headers["Content-Type"] == kind
    assert cache in headers["Cache-Control"]


def test_a_phone_shows_the_page_under_the_name_of_who_asks() -> None:
    manifest = {"name": "Lend this device", "short_name": "Lend", "start_url": "join"}
    built = {**BUILT, "join.webmanifest": json.dumps(manifest).encode()}
    for title, named in (("", manifest), ("Jonas", {"name": "Jonas", "short_name": "Jonas"})):
        body = get("/join.webmanifest", Pages(built, title)).body
        assert json.loads(body) == {**manifest, **named}


@given(st.text(max_size=40) | st.from_regex(r"/(assets/)?(\.\./|%2e%2e/|\./)*[a-z./%]{0,20}"))
def test_no_other_path_leads_to_a_file(path: str) -> None:
    found = Pages(BUILT).answer(HttpRequest(path))
    assert (found is not None) == (path in PATHS)


@pytest.mark.parametrize("path", sorted(PATHS))
def test_pages_are_isolated_and_load_nothing_from_elsewhere(path: str) -> None:
    headers = dict(get(path, host="192.0.2.7:8765").headers)
    assert headers["Cross-Origin-Embedder-Policy"] == "require-corp"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = [rule.strip() for rule in headers["Content-Security-Policy"].split(";")]
    assert "default-src 'none'" in policy
    assert "connect-src 'self' ws://192.0.2.7:8765" in policy
    assert not any("*" in rule or "unsafe-inline" in rule for rule in policy)


def test_the_header_that_browsers_take_only_where_they_trust_goes_only_there() -> None:
    """Chromium writes an error on the console where it ignores it."""

    def isolated(**request: bool) -> bool:
        answer = Pages(BUILT).answer(HttpRequest("/join", **request))  # type: ignore[arg-type]
        assert answer is not None
        return ("Cross-Origin-Opener-Policy", "same-origin") in answer.headers

    assert isolated(secure=True)
    assert isolated(trusted=True)  # loopback, or behind somebody else's TLS
    assert not isolated()


@pytest.mark.parametrize("host", ["", "evil; script-src *", "a b", "x'y", "host:port", "[::1"])
def test_a_strange_host_is_not_put_into_the_policy(host: str) -> None:
    policy = dict(get("/", host=host).headers)["Content-Security-Policy"]
    assert "connect-src 'self';" in policy


def test_what_shrinks_is_compressed_for_those_who_read_it() -> None:
    zipped = get("/assets/join-Ck3s.js", accept_encoding="br, gzip;q=0.8")
    assert dict(zipped.headers)["Content-Encoding"] == "gzip"
    assert gzip.decompress(zipped.body) == SCRIPT
    plain = get("/assets/join-Ck3s.js", accept_encoding="br")
    assert plain.body == SCRIPT
    assert "Content-Encoding" not in dict(plain.headers)
    assert dict(plain.headers)["Vary"] == dict(zipped.headers)["Vary"] == "Accept-Encoding"
    assert "Content-Encoding" not in dict(get("/icon.png", accept_encoding="gzip").headers)


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        ("gzip", True),
        ("br;q=1.0, gzip;q=0.5", True),
        ("GZIP", True),
        ("deflate, x-gzip", True),
        ("gzip;q=0", False),
        ("gzip; q=0.00, br", False),
        ("identity", False),
        ("", False),
    ],
)
def test_who_reads_gzip(header: str, takes: bool) -> None:
    assert takes_gzip(header) is takes


@pytest.mark.parametrize("built", [{}, {"index.html": b"half a build"}])
def test_without_built_pages_both_say_how_to_get_them(built: dict[str, bytes]) -> None:
    pages = Pages(built)
    assert not pages.complete
    for path in ("/", "/join"):
        page = get(path, pages).body.decode()
        assert all(words in page for words in ("make web", "Node.js", "wheel", "cleave join"))
    assert pages.answer(HttpRequest("/assets/join-Ck3s.js")) is None
