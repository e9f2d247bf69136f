"""TLS for servers and clients: the server's certificate, and how clients verify it.

A join URL may contain the SHA-256 fingerprint of the server's certificate. A client then accepts
only this certificate and ignores its issuer and dates, because a device's clock may be wrong.
Only servers with a self-signed certificate require the package `cryptography`.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import ipaddress
import os
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from cleave.errors import UsageError, to_install
from cleave.files import make_folder, open_to_change, private_file, write_atomically
from cleave.transport import addresses

if TYPE_CHECKING:
    from cryptography import x509


CERTIFICATE_FILE: Final = "tls.pem"  # key and certificate in one file, so that they always match
VALID: Final = timedelta(days=825)  # longest validity that operating systems accept
RENEWED: Final = timedelta(days=90)  # a certificate that expires within this time is replaced

_CLOCKS_DIFFER: Final = timedelta(days=1)
_BEGIN: Final = b"-----BEGIN "
_NAME_LENGTH: Final = 64  # maximum length of a certificate's common name, in characters


def make_certificate(names: Sequence[str], now: datetime, valid: timedelta = VALID) -> bytes:
    """Return an ECDSA P-256 key and a self-signed certificate for `names` in PEM format."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"Cleave {names[0]}"[:_NAME_LENGTH])]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return secret + certificate.public_bytes(serialization.Encoding.PEM)


def kept_certificate(folder: Path, names: Sequence[str], needed: str, now: datetime) -> Path:
    """Return the path of the server's certificate in `folder`; create the file if necessary.

    A certificate that expires soon, or is not valid for `needed`, is replaced by a new certificate
    with a different fingerprint. Only the owner can read the file.

    Args:
        names: host names and IP addresses for which a new certificate is valid.
        needed: host name or IP address for which the certificate must be valid.

    Raises:
        UsageError: if the certificate cannot be stored in `folder`.
    """
    path = folder / CERTIFICATE_FILE
    try:
        make_folder(folder, 0o700)
        if os.path.lexists(path):
            with open_to_change(path, _BEGIN, 0o600) as file:
                path.chmod(0o600)
                if _serves(file.readall(), needed, now):
                    return path
        write_atomically(path, make_certificate(names, now), 0o600)
    except OSError as error:
        raise UsageError(
            f"the certificate cannot be stored in {folder} ({error.strerror}); use a writable "
            "folder"
        ) from None
    return path


def _serves(pem: bytes, needed: str, now: datetime) -> bool:
    """Return True if a stored certificate is valid for `needed` and does not expire soon."""
    try:
        certificate = _read(pem)
    except ValueError:  # the file is truncated or holds no certificate
        return False
    return needed.lower() in names_in(pem) and now + RENEWED < certificate.not_valid_after_utc


def names_in(pem: bytes) -> tuple[str, ...]:
    """Return the host names and IP addresses in a certificate; raise ValueError for invalid PEM."""
    from cryptography import x509

    try:
        stated = _read(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    names = [name.lower() for name in stated.get_values_for_type(x509.DNSName)]
    return (*names, *(str(ip) for ip in stated.get_values_for_type(x509.IPAddress)))


def _read(pem: bytes) -> x509.Certificate:
    from cryptography import x509

    begin = pem.find(b"-----BEGIN CERTIFICATE-----")
    return x509.load_pem_x509_certificate(pem[max(begin, 0) :])


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.encode("idna").decode())


_FINGERPRINT: Final = re.compile(r"sha256:[0-9a-f]{64}")


class TlsMode(Enum):
    """TLS mode of a server without a certificate from the user."""

    AUTO = "auto"  # TLS with a self-signed certificate that the server creates
    OFF = "off"  # no TLS: plain WebSockets and HTTP


@dataclass(frozen=True, slots=True)
class Security:
    """A server's settings for TLS and web origins.

    Attributes:
        tls: TLS mode of a server without `certificate`. None means `OFF` on loopback or with
            `insecure_lan`, and `AUTO` otherwise.
        certificate, key: PEM files with a user's certificate and its private key. Set both or
            neither.
        folder: folder for a self-signed certificate. If None, the server creates a new certificate
            at every start.
        insecure_lan: whether to allow plain WebSockets on addresses that other machines can reach.
        allow_origins: origins of other servers' web pages that may connect to this server.
        public_url: address of a relay through which clients reach this server, such as
            `wss://example.org:8765`; empty if clients connect directly. With `wss://`, TLS is on by
            default, so that it ends at this server. With `wss://` and `OFF`, the relay must
            terminate TLS, and clients verify its certificate.
    """

    tls: TlsMode | None = None
    certificate: Path | None = None
    key: Path | None = None
    folder: Path | None = None
    insecure_lan: bool = False
    allow_origins: tuple[str, ...] = ()
    public_url: str = ""


@dataclass(frozen=True, slots=True)
class Exposure:
    """The addresses at which clients reach a server, and the server's TLS context.

    Attributes:
        context: the server's TLS context; None for plain WebSockets.
        host: host name or IP address for the server's URLs.
        fingerprint: fingerprint of the only certificate that clients accept; empty without TLS, or
            if clients verify a user's certificate against the system's trusted CAs.
        public: URL of the relay through which clients reach the server, without a path; empty if
            clients connect directly.
    """

    context: ssl.SSLContext | None
    host: str
    names: tuple[str, ...]
    fingerprint: str = ""
    public: str = ""


def fingerprint_of(der: bytes) -> str:
    """Return the SHA-256 fingerprint of a DER-encoded certificate, in the format of join URLs."""
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def parse_fingerprint(text: str) -> str:
    """Return a fingerprint in lower case; raise UsageError if `text` is not a fingerprint."""
    found = text.lower()
    if not _FINGERPRINT.fullmatch(found):
        raise UsageError(
            f"{text!r} is not a certificate fingerprint; use sha256: and 64 hexadecimal digits"
        )
    return found


# --- a client's side ---


class WrongCertificateError(ssl.SSLCertVerificationError):
    """The server presented a certificate with an unexpected fingerprint, `shown`."""

    def __init__(self, shown: str) -> None:
        super().__init__(1, "another certificate")
        self.shown = shown


class _PinningObject(ssl.SSLObject):
    """A client's TLS object that checks the fingerprint before any data is sent."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        assert isinstance(context, PinningContext)
        shown = fingerprint_of(self.getpeercert(binary_form=True) or b"")
        if not hmac.compare_digest(shown, context.fingerprint):
            raise WrongCertificateError(shown)


class PinningContext(ssl.SSLContext):
    """A client's TLS context that accepts a single certificate. Create it with `pinning`."""

    fingerprint = ""
    sslobject_class = _PinningObject


def pinning(fingerprint: str) -> ssl.SSLContext:
    """Return a client's TLS context that accepts only the certificate with this fingerprint."""
    context = PinningContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.fingerprint = fingerprint
    return context


# --- a server's side ---


def expose(host: str, security: Security, now: datetime) -> Exposure:
    """Return a server's TLS context and addresses; load or create the certificate if TLS is on.

    Args:
        now: current time with a time zone, used to set a new certificate's dates.

    Raises:
        UsageError: if other machines could reach the server without TLS and `insecure_lan` is not
            set, a certificate or key is unusable, a package is missing, or settings conflict.
    """
    public = addresses.parse_public_url(security.public_url) if security.public_url else ""
    if public.startswith("ws:") and not security.insecure_lan:
        raise UsageError(
            f"--public-url is {public}, but without TLS, anyone on the network path can read and "
            "change all data; use wss://, or accept this with --insecure-lan"
        )
    made = _exposed(host, security, public, now)
    if public.startswith("ws:") and made.context is not None:
        raise UsageError(f"--public-url is {public}, but this server uses TLS; use wss://")
    return replace(made, public=public)


def _exposed(host: str, security: Security, public: str, now: datetime) -> Exposure:
    given = security.certificate is not None or security.key is not None
    if given:
        return _with_given(host, security)
    loopback = addresses.is_loopback(host)
    mode = security.tls
    if mode is None:
        direct = loopback and not public
        mode = TlsMode.OFF if direct or security.insecure_lan else TlsMode.AUTO
    if mode is TlsMode.AUTO:
        return _with_own(host, security, public, now)
    if not loopback and not security.insecure_lan:
        raise UsageError(
            f"other machines can reach {host or 'every address'}, but without TLS, anyone on the "
            "network path can read and change all data; use --tls auto, pass --tls-cert and "
            "--tls-key, or accept this with --insecure-lan"
        )
    return Exposure(None, addresses.reachable_host(host), _names(host))


def _names(host: str) -> tuple[str, ...]:
    known = importlib.util.find_spec("ifaddr") is not None
    return addresses.own_names(host, addresses.interface_addresses() if known else ())


def _with_given(host: str, security: Security) -> Exposure:
    if security.tls is not None:
        raise UsageError(
            f"--tls {security.tls.value} cannot be combined with your own certificate; omit either "
            "--tls, or --tls-cert and --tls-key"
        )
    if security.certificate is None or security.key is None:
        raise UsageError(
            "a certificate needs its key, and a key its certificate; pass both --tls-cert and "
            "--tls-key"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        pem = security.certificate.read_bytes()
        context.load_cert_chain(security.certificate, security.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"the certificate {security.certificate} with the key {security.key} cannot be used "
            f"({reason}); use PEM files that match, with a key that has no password"
        ) from None
    stated: tuple[str, ...] = ()
    if importlib.util.find_spec("cryptography") is not None:
        stated = names_in(pem)
    plain = [name for name in stated if not name.startswith("*")]
    reached = addresses.reachable_host(host)
    if plain and reached not in plain:
        reached = plain[0]
    return Exposure(context, reached, tuple(dict.fromkeys((*_names(host), *plain))))


def _no_password() -> bytes:
    raise ValueError("the key has a password")


def _with_own(host: str, security: Security, public: str, now: datetime) -> Exposure:
    missing = [n for n in ("cryptography", "ifaddr") if importlib.util.find_spec(n) is None]
    if missing:
        raise UsageError(
            f"creating a certificate needs {' and '.join(missing)}, which is not installed; "
            f"install with: {to_install('tls')}, or pass --tls-cert and --tls-key"
        )
    names, reached = _names(host), addresses.reachable_host(host)
    if public:  # only in a new certificate, because devices have pinned the current one
        names = tuple(dict.fromkeys((*names, urlsplit(public).hostname or "")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if security.folder is not None:
        path = kept_certificate(security.folder, names, reached, now)
        context.load_cert_chain(path)
        pem = path.read_bytes()
    else:
        pem = make_certificate(names, now)
        with private_file(pem, "cleave-tls-") as path:  # `ssl` only loads keys from files
            context.load_cert_chain(path)
    text = pem.decode("ascii")
    der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE-----") :])
    return Exposure(context, reached, names, fingerprint_of(der))
