"""A server's data folder. Only one server at a time may use a data folder."""

from __future__ import annotations

import secrets
import stat
import sys
from pathlib import Path
from typing import Final, Literal

from cleave.errors import CleaveError
from cleave.files import LOCK, Lock, LockedError, make_folder, refuse_link, write_atomically
from cleave.server.access import CREDENTIAL_BYTES

_STORE: Final = "cleave.db"
_URL: Final = "operator.url"


class FolderInUseError(CleaveError):
    """Raised when another process, most likely a server, uses the data folder."""


class DataFolder:
    """A server's data folder, which stays locked until the `with` block ends.

    A missing folder is created. Only its owner can access it.

    Raises:
        FolderInUseError: if another server uses the folder.
        CleaveError: if the folder cannot be created or locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = path.absolute()
        try:
            make_folder(path, 0o700)
            self._lock = Lock(path / LOCK)
        except LockedError as error:
            raise FolderInUseError(
                f"another server uses the folder {path} ({error.holder}); stop it, or pass another "
                "folder with --data"
            ) from None
        except OSError as error:
            raise _unusable(path, error) from None

    def __enter__(self) -> DataFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @property
    def store_path(self) -> Path:
        return self.path / _STORE

    @property
    def url_path(self) -> Path:
        """Return the path of the file that contains the operator URL while the server runs."""
        return self.path / _URL

    def token(self, role: Literal["operator", "viewer"]) -> str:
        """Return the role's token. If no token is stored, create and store a token.

        Raises:
            CleaveError: if the token is unusable, too short, or readable by other users.
        """
        path = self.path / f"{role}.token"
        try:
            refuse_link(path)
            if not path.exists():
                write_atomically(
                    path, f"{secrets.token_urlsafe(CREDENTIAL_BYTES)}\n".encode(), 0o600
                )
            mode = stat.S_IMODE(path.stat().st_mode)
            if sys.platform != "win32" and mode & 0o077:
                raise CleaveError(
                    f"others can read the {role}'s token {path} (its mode is {mode:04o}); "
                    f"delete it to get a new one, or run `chmod 600` if nobody has read it"
                )
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(path, error) from None
        if len(token) < CREDENTIAL_BYTES:
            raise CleaveError(f"the {role}'s token {path} is truncated; delete it to get a new one")
        return token

    def write_url(self, url: str) -> None:
        """Write the operator URL to a file, for commands on this machine."""
        try:
            write_atomically(self.url_path, f"{url}\n".encode(), 0o600)
        except OSError as error:
            raise _unusable(self.url_path, error) from None

    def remove_url(self) -> None:
        """Remove the file that contains the operator URL."""
        self.url_path.unlink(missing_ok=True)


def read_operator_url(folder: Path) -> str:
    """Return the operator URL that a running server wrote to a data folder; empty if missing."""
    path = folder / _URL
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unusable(path, error) from None


def default_folder() -> Path:
    """Return the default data folder: `cleave/server` in the platform's user data directory."""
    from platformdirs import user_data_path

    return user_data_path("cleave", appauthor=False) / "server"


def _unusable(path: Path, error: Exception) -> CleaveError:
    reason = getattr(error, "strerror", None) or error  # an OSError's text names the path again
    return CleaveError(
        f"{path} cannot be used ({reason}); repair it, or pass another folder with --data"
    )
