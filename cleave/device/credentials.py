"""Credentials that a device keeps between sessions; a server issues them for join codes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cleave.errors import CleaveError
from cleave.files import own_folder, write_atomically
from cleave.transport.connect import plain_reason
from cleave.transport.join_url import JoinUrl


@dataclass(frozen=True, slots=True)
class SavedCredential:
    """One device's credential for one server.

    Attributes:
        server: the server's id, from its `welcome`.
        name: the device's name; a machine with several devices at one server has several names.
        address: the server's address.
        credential: the credential for the next `hello`.
    """

    server: str
    name: str
    address: str
    credential: str


class SavedCredentials:
    """The credentials in a folder, one per file, readable only by its owner.

    Args:
        folder: folder of the files; created when the first credential is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, target: JoinUrl, name: str) -> str:
        """Return the credential for a server, by its id if the URL has one, else by its address.

        The text is empty if there is no credential. Unreadable files are ignored: the server will
        report the missing credential, and a new join code replaces it.
        """
        for path in sorted(self.folder.glob("*.json")):
            saved = _read(path)
            if saved is None or saved.name != name:
                continue
            if (
                (saved.server == target.server)
                if target.server
                else saved.address == target.address
            ):
                return saved.credential
        return ""

    def keys(self, target: JoinUrl, name: str) -> tuple[str, str]:
        """Return `credential` and `join_code` for `hello`: a saved credential and the URL's.

        Without a saved credential, return the URL's as the credential and an empty join code.
        """
        saved = self.find(target, name)
        return (saved, target.credential) if saved else (target.credential, "")

    def save(self, credential: SavedCredential) -> None:
        """Save a credential and replace an earlier one for the same server and name.

        Raises:
            CleaveError: when it cannot be written.
        """
        # Servers choose their ids, so the id and the name are hashed to get a safe file name.
        key = f"{credential.server}\0{credential.name}".encode()
        path = self.folder / f"{hashlib.sha256(key).hexdigest()[:24]}.json"
        try:
            own_folder(self.folder, 0o700)
            write_atomically(path, json.dumps(asdict(credential)).encode(), 0o600)
        except OSError as error:
            raise CleaveError(
                f"the credential of this device cannot be kept in {self.folder} "
                f"({plain_reason(error)}): it will need a new join code after this session"
            ) from None


def _read(path: Path) -> SavedCredential | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return SavedCredential(**{key: str(value) for key, value in values.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's credentials, in $CLEAVE_STATE or the system's place."""
    if chosen := environment.get("CLEAVE_STATE"):
        return Path(chosen) / "credentials"
    from platformdirs import user_state_path

    return user_state_path("cleave", appauthor=False) / "credentials"
