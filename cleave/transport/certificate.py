"""Self-signed certificates, stored in an owner-only file and renewed in time.

Creating one needs the package `cryptography`; clients do not need it.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cleave.errors import UsageError
from cleave.files import make_folder, open_to_change, write_atomically

if TYPE_CHECKING:
    from cryptography import x509

FILE_NAME: Final = "tls.pem"
"""One file for key and certificate, so that they always match."""

VALID: Final = timedelta(days=825)
"""Longest validity that systems accept for a certificate trusted by hand."""

RENEWED: Final = timedelta(days=90)
"""A server renews the certificate at startup if it expires within this time."""

_CLOCKS_DIFFER: Final = timedelta(days=1)
_BEGIN: Final = b"-----BEGIN "
_NAME_LENGTH: Final = 64  # maximum length of a common name


def make(names: Sequence[str], now: datetime, valid: timedelta = VALID) -> bytes:
    """Create an ECDSA P-256 key and a self-signed certificate; return both as PEM.

    Args:
        names: host names and IP addresses that it is valid for; at least one.
        now: current time, with its time zone.
        valid: period of validity.
    """
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


def kept(folder: Path, names: Sequence[str], needed: str, now: datetime) -> Path:
    """Return the path of a folder's certificate; create a new one if necessary.

    It and its fingerprint stay the same until it nears expiry or does not name the needed host.

    Args:
        folder: folder of the certificate; created if missing.
        names: names and addresses for a new certificate.
        needed: host name or address that the certificate must be valid for.
        now: current time, with its time zone.

    Raises:
        UsageError: when the folder cannot be written.
    """
    path = folder / FILE_NAME
    try:
        make_folder(folder, 0o700)
        if os.path.lexists(path):
            with open_to_change(path, _BEGIN, 0o600) as file:
                path.chmod(0o600)
                if _serves(file.readall(), needed, now):
                    return path
        write_atomically(path, make(names, now), 0o600)
    except OSError as error:
        raise UsageError(
            f"the certificate cannot be kept in {folder} ({error.strerror}); give a folder that "
            f"can be written"
        ) from None
    return path


def _serves(pem: bytes, needed: str, now: datetime) -> bool:
    """Return whether a stored certificate is still usable."""
    try:
        certificate = _read(pem)
    except ValueError:  # truncated or foreign file: create a new certificate
        return False
    return needed.lower() in names_in(pem) and now + RENEWED < certificate.not_valid_after_utc


def names_in(pem: bytes) -> tuple[str, ...]:
    """Return the host names and addresses that a certificate is valid for.

    Raises:
        ValueError: when it is not a certificate.
    """
    from cryptography import x509

    try:
        stated = _read(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = [str(ip) for ip in stated.get_values_for_type(x509.IPAddress)]
    return (*(name.lower() for name in stated.get_values_for_type(x509.DNSName)), *addresses)


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
