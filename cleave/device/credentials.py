"""Stored credentials of a device. A server issues a credential in exchange for a join code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cleave.errors import CleaveError
from cleave.files import own_folder, write_atomically
from cleave.transport.join_url import JoinUrl, plain_reason


@dataclass(frozen=True, slots=True)
class SavedCredential:
    """The credential of the device `name` for the server with the ID `server`.

    Attributes:
        fingerprint: fingerprint of the server's certificate, as in the join URL; may be empty.
    """

    server: str
    name: str
    address: str
    credential: str
    fingerprint: str = ""

    def is_for(self, target: JoinUrl) -> bool:
        """Return whether the credential may be sent to a server.

        The ID in the join URL identifies the server. Without an ID, the certificate's fingerprint
        identifies the server; without a fingerprint, the address does.
        """
        if target.server:
            return self.server == target.server
        if target.fingerprint:
            return self.fingerprint == target.fingerprint
        return self.address == target.address


class SavedCredentials:
    """A folder with one file per credential, readable only by the user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, target: JoinUrl, name: str) -> str:
        """Return the saved credential for a server and a device name; empty if none is saved."""
        for path in sorted(self.folder.glob("*.json")):
            saved = _read(path)
            if saved is not None and saved.name == name and saved.is_for(target):
                return saved.credential
        return ""

    def keys(self, target: JoinUrl, name: str) -> tuple[str, str]:
        """Return the values of `credential` and `join_code` for `hello`.

        With a saved credential, the join URL's credential is sent as `join_code`. Without a saved
        credential, the join URL's credential is sent as `credential`.
        """
        saved = self.find(target, name)
        return (saved, target.credential) if saved else (target.credential, "")

    def save(self, credential: SavedCredential) -> None:
        """Save a credential. Replace any older credential for the same server and device name."""
        # A server chooses its ID freely, so the file name is a hash of the ID and the device name.
        key = f"{credential.server}\0{credential.name}".encode()
        path = self.folder / f"{hashlib.sha256(key).hexdigest()[:24]}.json"
        try:
            own_folder(self.folder, 0o700)
            write_atomically(path, json.dumps(asdict(credential)).encode(), 0o600)
        except OSError as error:
            raise CleaveError(
                f"this device's credential cannot be saved in {self.folder} "
                f"({plain_reason(error)}); the device will need a new join code after this session"
            ) from None


def _read(path: Path) -> SavedCredential | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return SavedCredential(**{key: str(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the credentials folder: in $CLEAVE_STATE if set, else in the user's state folder."""
    if chosen := environment.get("CLEAVE_STATE"):
        return Path(chosen) / "credentials"
    from platformdirs import user_state_path

    return user_state_path("cleave", appauthor=False) / "credentials"
