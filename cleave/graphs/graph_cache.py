"""Cache exported graphs on disk, because exporting a graph takes seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cleave.files import Lock, cache_folder, make_folder, write_atomically

Kept = TypeVar("Kept")

_SUFFIX: Final = ".graphs"


class GraphCache:
    """A folder of exported graphs, keyed by a digest of everything that a graph depends on.

    A graph whose file is unreadable or damaged is exported again. If the folder is not writable,
    graphs are exported in every run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> GraphCache:
        """Return the graph cache of the current user (see `cache_folder`)."""
        return cls(cache_folder() / "graphs")

    def get(self, key: str, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
        """Return the object cached under `key`, or create it with `make` and cache it.

        `key` is a digest of everything that the object depends on, and `kind` is its class. If
        several processes request the same object, one process creates it and the others wait.
        """
        path = self._folder / f"{key}{_SUFFIX}"
        if (kept := _read(path, kind)) is not None:
            return kept
        with self._alone(path):
            if (kept := _read(path, kind)) is not None:
                return kept
            made = make()
            with suppress(OSError):  # the next run creates the object again
                write_atomically(path, msgspec.msgpack.encode(made), 0o600, sync=False)
            return made

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Hold an exclusive lock on a cache file within the context, if locking is possible."""
        try:
            make_folder(self._folder)
            lock = Lock(path.with_name(f"{path.name}.lock"), wait_s=math.inf)
        except OSError:
            yield
            return
        with lock:
            yield


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
