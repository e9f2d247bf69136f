"""Self-signed certificates, stored in a file that only its owner can read.

A server replaces its certificate before the certificate expires. Creating a certificate requires
the package `cryptography`, which clients do not need.
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
"""Name of the file with the private key and the certificate. One file keeps the two consistent."""

VALID: Final = timedelta(days=825)
"""Longest validity that operating systems accept for a manually trusted certificate."""

RENEWED: Final = timedelta(days=90)
"""At startup, a server replaces a certificate that expires within this time."""

_CLOCKS_DIFFER: Final = timedelta(days=1)
_BEGIN: Final = b"-----BEGIN "
_NAME_LENGTH: Final = 64  # maximum length of a certificate's common name, in characters


def make(names: Sequence[str], now: datetime, valid: timedelta = VALID) -> bytes:
    """Create an ECDSA P-256 key and a self-signed certificate. Return the two as one PEM text.

    Args:
        names: host names and IP addresses for which the certificate is valid; at least one.
        now: current time, with its time zone.
        valid: time from `now` until the certificate expires.
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
    """Return the path of the certificate that is stored in a folder.

    If the stored certificate is missing, is about to expire or is not valid for `needed`, a new
    certificate with a new fingerprint replaces it.

    Args:
        folder: folder that holds the certificate; created if missing.
        names: host names and IP addresses for which a new certificate is valid.
        needed: host name or IP address for which the certificate must be valid.
        now: current time, with its time zone.

    Raises:
        UsageError: when the folder is not writable.
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
    """Return whether a stored certificate is valid for `needed` and is not about to expire."""
    try:
        certificate = _read(pem)
    except ValueError:  # the file is truncated or holds no certificate
        return False
    return needed.lower() in names_in(pem) and now + RENEWED < certificate.not_valid_after_utc


def names_in(pem: bytes) -> tuple[str, ...]:
    """Return the host names and IP addresses for which a certificate is valid.

    Raises:
        ValueError: when `pem` is not a certificate.
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
