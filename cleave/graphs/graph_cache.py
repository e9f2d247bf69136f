"""Graphs kept on disk between runs, because making one takes seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cleave.files import Lock, make_folder, write_atomically
from cleave.machine.cache_folder import cache_folder

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
        return cls(cache_folder() / "graphs")

    def get(self, key: str, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return what is kept under a key, or make it and keep it.

        Of several processes that want the same one makes it, and the others wait.

        Args:
            key: a digest, as hexadecimal digits.
            kind: the dataclass that is kept.
            make: makes one.
        """
        path = self._folder / f"{key}{_SUFFIX}"
        if (kept := _read(path, kind)) is not None:
            return kept
        with self._alone(path):
            if (kept := _read(path, kind)) is not None:
                return kept
            made = make()
            self._keep(path, made)
            return made

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Keep other processes from making the same; without a lock where none can be had."""
        try:
            make_folder(self._folder)
            lock = Lock(path.with_name(f"{path.name}.lock"), wait_s=math.inf)
        except OSError:
            yield
            return
        with lock:
            yield

    def _keep(self, path: Path, made: Any) -> None:
        """Write a file at once: a reader sees all of it or none."""
        try:
            write_atomically(path, msgspec.msgpack.encode(made), 0o600, sync=False)
        except OSError:
            return  # the next run makes it again


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):  # of which msgspec's errors are a kind
        return None
