"""Certificates, fingerprints, and when a server may do without."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from cleave.errors import UsageError
from cleave.transport import addresses, tls
from cleave.transport.join_url import (
    SERVER_ID_LENGTH,
    JoinUrl,
    parse_join_url,
    read_url,
    url_file,
)
from cleave.transport.tls import Security, TlsMode, expose, fingerprint_of, parse_fingerprint

NOW = datetime(2026, 5, 1, tzinfo=UTC)
PIN = "sha256:" + "0f" * 32


@given(
    st.sampled_from(["ws", "wss"]),
    st.sampled_from(["192.0.2.1:80", "[2001:db8::1]:9", "host.example:8765", "host"]),
    st.text(max_size=50),
    st.just("") | st.text(min_size=SERVER_ID_LENGTH, max_size=SERVER_ID_LENGTH),
    st.booleans(),
)
def test_join_urls_are_read_as_they_are_written(
    scheme: str, place: str, credential: str, server: str, pinned: bool
) -> None:
    pin = PIN if pinned and scheme == "wss" else ""
    url = JoinUrl(f"{scheme}://{place}/ws", credential, server, pin)
    assert parse_join_url(url.text) == url
    for path in ("", "/"):
        assert parse_join_url(url.text.replace("/ws#", f"{path}#")) == url
    page = url.page("/join")
    assert page.startswith(scheme.replace("ws", "http") + f"://{place}/join#c=")
    assert parse_join_url(page) == url


def test_a_join_url_moves_to_another_address() -> None:
    url = JoinUrl("wss://0.0.0.0:8765/ws", "c", fingerprint=PIN)
    assert url.at("10.0.0.7") == JoinUrl("wss://10.0.0.7:8765/ws", "c", fingerprint=PIN)
    assert url.at("2001:db8::1").address == "wss://[2001:db8::1]:8765/ws"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("wss://host/ws#c=s3cret&fp=sha256:12", "64 hexadecimal"),
        ("wss://host/ws#c=s3cret&fp=md5:12", "64 hexadecimal"),
        (f"ws://host/ws#c=s3cret&fp={PIN}", "wss://"),
        ("ws://host:port/ws#c=s3cret", "is not a join URL"),
        ("ws://[::1/ws#c=s3cret", "is not a join URL"),
        ("http://host#c=s3cret", "is not a join URL"),
        ("https://host/#c=s3cret", "is not a join URL"),
        ("ftp://host/join#c=s3cret", "is not a join URL"),
        ("http:///join#c=s3cret", "is not a join URL"),
        (f"http://host/join#c=s3cret&fp={PIN}", "https://"),
    ],
)
def test_wrong_join_urls_are_said_without_their_secret(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_join_url(url)
    assert "s3cret" not in str(refused.value)


def test_a_certificate_is_for_all_names_of_the_machine(tmp_path: Path) -> None:
    names = ("localhost", "127.0.0.1", "::1", "box.local", "192.0.2.3")
    pem = tls.make_certificate(names, NOW)
    assert set(tls.names_in(pem)) == set(names)
    made = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERT") :])
    assert made.not_valid_before_utc < NOW < made.not_valid_after_utc
    assert made.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]
    own = addresses.own_names("0.0.0.0", addresses.interface_addresses())
    assert {"localhost", "127.0.0.1", "::1"} < set(own)
    assert addresses.reachable_host("0.0.0.0") in own


def test_a_kept_certificate_stays_until_it_has_to_go(tmp_path: Path) -> None:
    folder = tmp_path / "data"

    def kept(now: datetime, needed: str = "localhost") -> bytes:
        path = tls.kept_certificate(folder, ("localhost", "192.0.2.9"), needed, now)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        return path.read_bytes()

    first = kept(NOW)
    assert kept(NOW + timedelta(days=700)) == first
    assert kept(NOW, "192.0.2.9") == first
    renewed = kept(NOW + timedelta(days=740))  # it would end in three months
    assert renewed != first
    path = folder / tls.CERTIFICATE_FILE
    path.write_bytes(renewed[:100])
    path.chmod(0o644)
    mended = kept(NOW)
    assert mended not in (first, renewed)
    assert kept(NOW, "192.0.2.77") != mended  # the machine has moved
    assert [entry.name for entry in folder.iterdir()] == [tls.CERTIFICATE_FILE]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be stored in .*file"):
        tls.kept_certificate(tmp_path / "file", ("localhost",), "localhost", NOW)


def test_other_machines_are_reached_with_tls_or_on_purpose(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert expose(host, Security(), NOW).context is None
    everywhere = expose("0.0.0.0", Security(), NOW)
    assert everywhere.context is not None
    assert parse_fingerprint(everywhere.fingerprint.upper().replace("SHA", "sha"))
    assert expose("0.0.0.0", Security(insecure_lan=True), NOW).context is None
    assert expose("127.0.0.1", Security(tls=TlsMode.AUTO), NOW).context is not None
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        with pytest.raises(UsageError, match="--insecure-lan"):
            expose(host, Security(tls=TlsMode.OFF), NOW)
    kept = [expose("127.0.0.1", Security(TlsMode.AUTO, folder=tmp_path), NOW) for _ in range(2)]
    assert kept[0].fingerprint == kept[1].fingerprint


def test_a_given_certificate_is_used_as_it_is(tmp_path: Path) -> None:
    pem = tls.make_certificate(("ps.example", "*.example"), NOW)
    begin = pem.index(b"-----BEGIN CERT")
    cert, key, other = (tmp_path / name for name in ("cert", "key", "other"))
    cert.write_bytes(pem[begin:])
    key.write_bytes(pem[:begin])
    other.write_bytes(tls.make_certificate(("x",), NOW))
    given = expose("0.0.0.0", Security(certificate=cert, key=key), NOW)
    assert (given.host, given.fingerprint) == ("ps.example", "")
    assert given.context is not None
    assert "ps.example" in given.names
    for wrong, words in [
        (Security(certificate=cert), "--tls-key"),
        (Security(key=key), "--tls-cert"),
        (Security(certificate=cert, key=other), "files that match"),
        (Security(certificate=tmp_path / "none", key=key), "none"),
        (Security(certificate=key, key=key), "PEM"),
        (Security(TlsMode.AUTO, certificate=cert, key=key), "cannot be combined"),
    ]:
        with pytest.raises(UsageError, match=words):
            expose("127.0.0.1", wrong, NOW)


def test_a_fingerprint_is_of_the_der_form() -> None:
    pem = tls.make_certificate(("localhost",), NOW).decode()
    made = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    from cryptography.hazmat.primitives.hashes import SHA256

    der = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERT") :])
    assert fingerprint_of(der) == f"sha256:{made.fingerprint(SHA256()).hex()}"


def test_origins_are_written_as_browsers_write_them() -> None:
    found = addresses.origins(("box.local", "::1"), 8765, secure=False)
    assert found == {"http://box.local:8765", "http://[::1]:8765"}
    assert "https://box.local" in addresses.origins(("box.local",), 443, secure=True)
    for text, origin in [
        ("https://Example.org/", "https://example.org"),
        ("https://example.org:443", "https://example.org"),
        ("http://192.0.2.1:8000", "http://192.0.2.1:8000"),
    ]:
        assert addresses.parse_origin(text) == origin
    for text in (
        "*", "example.org", "https://*.example.org", "https://a/b", "null", "https://u@h",
        "https://[::1", "http://a:port",
    ):  # fmt: skip
        with pytest.raises(UsageError, match="not an origin"):
            addresses.parse_origin(text)


URL = "https://192.0.2.1:8765/join#c=abcd&fp=ef"


@pytest.mark.parametrize(
    "text", [URL, f"{URL}\n", f"  cleave join '{URL}'\n\nvalid for 10 minutes"]
)
def test_a_file_holds_the_url_or_what_pair_printed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.url"
    path.write_text(text)
    assert read_url(f"@{path}") == URL
    assert read_url(URL) == URL


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read from .*join\.url"):
        read_url(f"@{tmp_path / 'join.url'}")


def test_what_is_in_a_file_without_a_url_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "viewer.token"
    path.write_text("RJBc-secret\n")
    with pytest.raises(UsageError, match="contains no URL") as refused:
        read_url(f"@{path}")
    assert "secret" not in str(refused.value)


def test_a_file_is_ones_own_and_gone_afterwards() -> None:
    with url_file(URL) as named:
        path = Path(named[1:])
        assert path.stat().st_mode & 0o077 == 0
        assert read_url(named) == URL
    assert not path.exists()
