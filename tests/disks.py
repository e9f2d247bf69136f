"""Disks that are really full: small file systems in memory, where the system mounts some."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BLOCK_BYTES = 4096


class Disk:
    """A disk that can be filled, up to some bytes, and freed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, left_bytes: int) -> None:
        """Leave so many bytes."""
        size = 0
        with (self.path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    size += file.write(bytes(BLOCK_BYTES))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
            file.truncate(size - left_bytes // BLOCK_BYTES * BLOCK_BYTES)

    def free(self) -> None:
        """Leave plenty."""
        (self.path / "filler").unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A file system of 16 MB; the test is skipped where none can be mounted."""
    path = folder / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
