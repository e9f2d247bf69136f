"""Graphs kept on disk between runs, because making one takes seconds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack
import msgspec

Kept = TypeVar("Kept")

_SUFFIX: Final = ".graphs"


class GraphCache:
    """A folder of graphs by the digest of what they were made from.

    A file that cannot be read or is damaged is made anew. Where the folder cannot be written,
    graphs are made each time.

    Args:
        folder: where they are kept; it is made when the first is.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> GraphCache:
        """Return the cache in the user's folder for such files."""
        import platformdirs

        return cls(Path(platformdirs.user_cache_dir("cleave")) / "graphs")

    def get(self, key: str, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return what is kept under a key, or make it and keep it.

        Args:
            key: a digest, as hexadecimal digits.
            kind: the dataclass that is kept.
            make: makes one.
        """
        path = self._folder / f"{key}{_SUFFIX}"
        try:
            return msgspec.convert(msgpack.unpackb(path.read_bytes()), kind)
        except (OSError, ValueError, msgpack.UnpackException):
            made = make()
            self._keep(path, made)
            return made

    def _keep(self, path: Path, made: Any) -> None:
        """Write a file at once: a reader sees all of it or none."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(msgpack.packb(asdict(made)))
            os.replace(name, path)
        except OSError:
            return  # the next run makes it again
