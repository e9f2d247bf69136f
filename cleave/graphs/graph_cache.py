"""Graphs cached on disk between runs, because exporting one takes seconds."""

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
    """A folder of graphs, keyed by the digest of everything that they depend on.

    Unreadable or damaged files are rebuilt. If the folder cannot be written, graphs are exported
    each time.

    Args:
        folder: folder of the cache; created with the first graph.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> GraphCache:
        """Return the cache in the user's cache folder."""
        return cls(cache_folder() / "graphs")

    def get(self, key: str, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return the object cached under a key, or make and cache it.

        If several processes want the same object, one makes it and the others wait.

        Args:
            key: a digest, as hexadecimal digits.
            kind: the dataclass of the object.
            make: makes the object.
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
        """Lock a file against other processes; run without a lock if locking fails."""
        try:
            make_folder(self._folder)
            lock = Lock(path.with_name(f"{path.name}.lock"), wait_s=math.inf)
        except OSError:
            yield
            return
        with lock:
            yield

    def _keep(self, path: Path, made: Any) -> None:
        try:
            write_atomically(path, msgspec.msgpack.encode(made), 0o600, sync=False)
        except OSError:
            return  # the next run makes it again


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
