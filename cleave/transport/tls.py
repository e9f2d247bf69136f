"""TLS on both sides: what a server shows, and how a client knows that it is that server.

A join URL may name the SHA-256 fingerprint of the server's certificate. A client then accepts that
certificate and no other, whoever signed it and whatever its dates say (a device's clock may be
wrong, and the fingerprint says more than a date could). Without one, ordinary verification holds.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import os
import re
import ssl
import tempfile
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cleave.errors import UsageError
from cleave.transport import addresses, certificate

_FINGERPRINT: Final = re.compile(r"sha256:[0-9a-f]{64}")


class TlsMode(Enum):
    """Where a server's certificate comes from."""

    AUTO = "auto"
    """It makes one itself."""
    OFF = "off"
    """There is none: plain WebSockets."""


@dataclass(frozen=True, slots=True)
class Security:
    """How a server may be reached.

    Attributes:
        tls: by default `OFF` on loopback and `AUTO` elsewhere.
        certificate, key: PEM files of a certificate given by somebody else; both or none.
        folder: where a certificate made here is kept; without one it is new at every start.
        insecure_lan: allow plain WebSockets on other addresses than loopback.
        allow_origins: pages of which browsers may connect, besides the server's own.
    """

    tls: TlsMode | None = None
    certificate: Path | None = None
    key: Path | None = None
    folder: Path | None = None
    insecure_lan: bool = False
    allow_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exposure:
    """What a server shows of itself.

    Attributes:
        context: for TLS; None for plain WebSockets.
        host: to put into URLs.
        names: under which it is reached.
        fingerprint: that clients are to pin; empty where they verify, or where there is no TLS.
    """

    context: ssl.SSLContext | None
    host: str
    names: tuple[str, ...]
    fingerprint: str = ""


def fingerprint_of(der: bytes) -> str:
    """The fingerprint of a certificate, as join URLs name it."""
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def parse_fingerprint(text: str) -> str:
    """Read a fingerprint.

    Raises:
        UsageError: when it is none.
    """
    found = text.lower()
    if not _FINGERPRINT.fullmatch(found):
        raise UsageError(
            f"{text!r} is no fingerprint of a certificate; it is sha256: and 64 hexadecimal digits"
        )
    return found


# --- a client's side ---


class WrongCertificateError(ssl.SSLCertVerificationError):
    """The server showed another certificate than the one that was asked for.

    Attributes:
        shown: its fingerprint.
    """

    def __init__(self, shown: str) -> None:
        super().__init__(1, "another certificate")
        self.shown = shown


class _PinningObject(ssl.SSLObject):
    """Fails the handshake, before a byte of data is sent, on any certificate but one."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        assert isinstance(context, PinningContext)
        shown = fingerprint_of(self.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(shown, context.fingerprint):
            raise WrongCertificateError(shown)


class PinningContext(ssl.SSLContext):
    """A client's context that accepts one certificate. Made by `pinning`."""

    fingerprint = ""
    sslobject_class = _PinningObject


def pinning(fingerprint: str) -> ssl.SSLContext:
    """A client's context that accepts the certificate with this fingerprint, and no other."""
    context = PinningContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.fingerprint = fingerprint
    return context


# --- a server's side ---


def expose(host: str, security: Security, now: datetime) -> Exposure:
    """Decide how a server on a host is reached, and get its certificate.

    Args:
        host: what it listens on.
        security: what was asked for.
        now: the time, with its zone: certificates have dates.

    Raises:
        UsageError: when it would be reached from other machines without TLS, or when what is
            needed for TLS is missing.
    """
    given = security.certificate is not None or security.key is not None
    if given:
        return _with_given(host, security)
    loopback = addresses.is_loopback(host)
    mode = security.tls
    if mode is None:
        mode = TlsMode.OFF if loopback or security.insecure_lan else TlsMode.AUTO
    if mode is TlsMode.AUTO:
        return _with_own(host, security, now)
    if not loopback and not security.insecure_lan:
        raise UsageError(
            f"other machines can reach {host or 'every address'}, and without TLS whoever is on "
            f"the way reads and changes everything; use --tls auto, give --tls-cert and --tls-key, "
            f"or accept that with --insecure-lan"
        )
    return Exposure(None, addresses.reachable_host(host), _names(host))


def _names(host: str) -> tuple[str, ...]:
    known = importlib.util.find_spec("ifaddr") is not None
    return addresses.own_names(host, addresses.interface_addresses() if known else ())


def _with_given(host: str, security: Security) -> Exposure:
    if security.tls is not None:
        raise UsageError(
            f"--tls {security.tls.value} and a given certificate exclude each other; "
            f"leave out --tls, or --tls-cert and --tls-key"
        )
    if security.certificate is None or security.key is None:
        raise UsageError("a certificate and its key belong together; give --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        pem = security.certificate.read_bytes()
        context.load_cert_chain(security.certificate, security.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the certificate {security.certificate} with the key {security.key} cannot be used "
            f"({reason}); give PEM files that belong together, the key without a password"
        ) from None
    stated: tuple[str, ...] = ()
    if importlib.util.find_spec("cryptography") is not None:
        stated = certificate.names_in(pem)
    plain = [name for name in stated if not name.startswith("*")]
    reached = addresses.reachable_host(host)
    if plain and reached not in plain:
        reached = plain[0]
    return Exposure(context, reached, tuple(dict.fromkeys((*_names(host), *plain))))


def _no_password() -> bytes:
    raise ValueError("the key needs a password")


def _with_own(host: str, security: Security, now: datetime) -> Exposure:
    missing = [n for n in ("cryptography", "ifaddr") if importlib.util.find_spec(n) is None]
    if missing:
        raise UsageError(
            f"making a certificate needs {' and '.join(missing)}, which is not installed here; "
            f"install it with: pip install 'cleave[tls]', or give --tls-cert and --tls-key"
        )
    names, reached = _names(host), addresses.reachable_host(host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if security.folder is not None:
        path = certificate.kept(security.folder, names, reached, now)
        context.load_cert_chain(path)
        pem = path.read_bytes()
    else:
        pem = certificate.make(names, now)
        _load(context, pem)
    return Exposure(context, reached, names, fingerprint_of(_der(pem)))


def _load(context: Any, pem: bytes) -> None:
    """Load a key that is kept nowhere: OpenSSL reads files, so there is one for a moment."""
    written, path = tempfile.mkstemp(prefix="cleave-tls-")  # its mode is 0600
    try:
        with os.fdopen(written, "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


def _der(pem: bytes) -> bytes:
    text = pem.decode("ascii")
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE-----") :])
