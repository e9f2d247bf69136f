"""The only module that writes files or locks folders. `tests/test_files.py` checks this.

No function writes to a regular file through a symbolic link. Functions that replace a file replace
a link at its path, but not the link's target. Functions that change a file in place raise OSError
for a link. The `strerror` of every OSError explains the problem.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any, Final, Self

from cleave.errors import CleaveError

_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY: Final = getattr(os, "O_BINARY", 0)
_OPEN: Final = _NO_FOLLOW | _BINARY
_LINK: Final = "it is a link, and Cleave does not write through links"
_FOREIGN: Final = "Cleave did not write the existing file"

LOCK: Final = "lock"  # the name of the file that locks a folder

_HELD: Final = re.compile(rb"(\d+) (\S+)\n?")
_LOOK_S: Final = 0.1
_LOCKED_BYTE: Final = 2**30  # beyond the end of the text: Windows makes a locked range unreadable


# --- folders ---


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents at a user-supplied path, unless the folder exists."""
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def writable_folder(path: Path) -> None:
    """Create a user-supplied folder unless it exists. Raise OSError if it is not writable."""
    make_folder(path)
    with tempfile.TemporaryFile(dir=path):
        pass


def own_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder in one of Cleave's folders, unless it exists. Raise OSError for a link."""
    refuse_link(path)
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def new_folder(path: Path) -> None:
    """Create a folder and its missing parents. Raise FileExistsError if the path exists."""
    path.mkdir(parents=True)


def refuse_link(path: Path) -> None:
    """Raise OSError if a path is a symbolic link or a Windows junction."""
    if path.is_symlink() or (sys.version_info >= (3, 12) and path.is_junction()):
        raise OSError(errno.ELOOP, _LINK, str(path))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, to protect them from power loss. Do nothing on Windows."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- files ---


def new_file(path: Path, mode: int = 0o666) -> FileIO:
    """Create a file for unbuffered writing. Raise FileExistsError for an existing file or link."""
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def write_atomically(
    path: Path, data: bytes | Iterable[memoryview], mode: int = 0o666, *, sync: bool = True
) -> None:
    """Create or replace a file atomically. Readers see either the old or the new content.

    Missing parent folders are created. A link is replaced, and its target does not change.

    Args:
        data: the content, possibly in parts.
        mode: permissions of the new file, before the umask is applied.
        sync: whether to flush the new file to disk, so that it survives a power loss.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with new_file(temporary, mode) as file:
            for part in [data] if isinstance(data, bytes) else data:
                write_all(file, part)
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def mapped(file: IO[bytes]) -> memoryview:
    """Map all of an open file into memory, for reading. The file may be closed afterwards."""
    if not file.seek(0, os.SEEK_END):
        return memoryview(b"")  # an empty file cannot be mapped
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def mapped_copy(folder: Path, parts: Iterable[memoryview]) -> memoryview:
    """Write bytes to a file without a name in a user-supplied folder, and map the file.

    The operating system deletes the file when the memory is no longer used, even if the process is
    killed.
    """
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            write_all(file, part)
        file.flush()
        return mapped(file)


@contextmanager
def private_file(data: bytes, prefix: str) -> Iterator[Path]:
    """Yield the path of a temporary file with `data`, readable only by the user. Then delete it."""
    written, name = tempfile.mkstemp(prefix=prefix)  # `mkstemp` creates files with mode 0600
    path = Path(name)
    try:
        with FileIO(written, "w") as file:
            write_all(file, data)
        yield path
    finally:
        path.unlink()


def check_output(path: Path) -> None:
    """Raise OSError if `write_output` cannot write to a path. The file is not changed."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe or a device
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {path.parent} does not exist", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_output(path: Path, data: bytes) -> None:
    """Write an output file, such as a plot or a report, to a user-supplied path.

    An existing regular file is replaced (see `write_atomically`). A pipe or a device, such as
    /dev/stdout, receives the data. The folder must exist.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.write(data)
        return
    check_output(path)
    write_atomically(path, data, sync=False)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Save a matplotlib figure to a user-supplied path (see `write_output`).

    The path's suffix sets the format. Without a suffix, ".png" is appended.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if matplotlib does not support the file format.
    """
    path = figure_file(path)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi)
    write_output(path, drawn.getvalue())


def figure_file(path: Path) -> Path:
    """Return the path to which `save_figure` writes. Raise OSError if it cannot be written."""
    if not path.suffix and not path.is_dir():
        path = path.with_suffix(".png")
    check_output(path)
    return path


def open_output(path: Path) -> FileIO:
    """Create or empty an output file, such as a log, and open the file for appending."""
    write_output(path, b"")
    if not path.is_file():
        return FileIO(path, "w")
    return _opened(path, os.O_WRONLY | os.O_APPEND)


def open_to_append(path: Path) -> FileIO:
    """Open one of Cleave's own files for appending. The file is created if it does not exist.

    If the file has several hard links, it is first replaced by a copy, so that the content under
    its other names does not change. Raises OSError for a symbolic link.
    """
    file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if os.fstat(file.fileno()).st_nlink <= 1:
        return file
    with file:
        write_atomically(path, file.readall())
    return _opened(path, os.O_RDWR | os.O_APPEND)


def open_to_change(path: Path, header: bytes, mode: int = 0o666) -> FileIO:
    """Open one of Cleave's own files for reading and writing, at the start of the file.

    The file is created if it does not exist. A file with several hard links is first replaced by a
    copy, as in `open_to_append`. Raises OSError for a symbolic link, or if the file does not start
    with `header`. A file that contains only the beginning of the header is accepted.
    """
    file = _opened(path, os.O_RDWR | os.O_CREAT, mode)
    if not _begins(file, header):
        file.close()
        raise OSError(errno.EEXIST, _FOREIGN, str(path))
    if os.fstat(file.fileno()).st_nlink > 1:
        with file:
            write_atomically(path, file.readall())
        file = _opened(path, os.O_RDWR)
    file.seek(0)
    return file


def copy_file(source: Path, path: Path) -> None:
    """Copy the content of `source` to a new file at `path`, which must not exist."""
    with source.open("rb") as whole, new_file(path) as file:
        while part := whole.read(2**20):
            write_all(file, part)


def is_ours(path: Path, header: bytes) -> bool:
    """Return True if `open_to_change` would accept an existing file."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            return _begins(file, header)
    except OSError:
        return False


def _begins(file: FileIO, header: bytes) -> bool:
    """Return True if a file starts with `header` or is a prefix of `header`. Rewind the file."""
    begin = file.read(len(header))
    file.seek(0)
    return begin == header or header.startswith(begin)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _opened(path: Path, flags: int, mode: int = 0o666) -> FileIO:
    """Open a regular file without following a symbolic link."""
    if not flags & os.O_EXCL:
        refuse_link(path)
    descriptor = os.open(path, flags | _OPEN | getattr(os, "O_NONBLOCK", 0), mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is not a regular file", str(path))
    ways = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "r+"}
    return FileIO(descriptor, ways[flags & (os.O_WRONLY | os.O_RDWR)])


# --- locks ---


class LockedError(CleaveError):
    """Raised when a lock is already held. `holder` names its holder, such as "process 4711"."""

    def __init__(self, text: str, holder: str) -> None:
        super().__init__(text)
        self.holder = holder


class Lock:
    """An exclusive lock on a file, from construction until `release` or the end of `with`.

    The operating system releases the lock when the process exits. If writable, the locked file
    contains the process ID and host name of the holder. The file is never deleted.

    Args:
        wait_s: maximum time in seconds to wait until another process releases the lock.

    Raises:
        LockedError: if the lock is still held after `wait_s` seconds.
        OSError: if the file cannot be opened or locked, or was not written by Cleave.
    """

    def __init__(self, path: Path, wait_s: float = 0.0) -> None:
        try:
            self._file = _opened(path, os.O_RDWR | os.O_CREAT, 0o644)
        except PermissionError:
            self._file = _opened(path, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._file = _opened(path, os.O_RDONLY)
        try:
            self._acquire(path, wait_s)
        except BaseException:
            self._file.close()
            raise

    def _acquire(self, path: Path, wait_s: float) -> None:
        ends_s = time.monotonic() + wait_s
        while not _locks(self._file):
            if time.monotonic() >= ends_s:
                holder = _holder(self._text())
                raise LockedError(f"{str(path.parent)!r} is in use by {holder}", holder)
            time.sleep(_LOOK_S)
        text = self._text()
        if text and not _HELD.fullmatch(text):
            raise OSError(errno.EEXIST, _FOREIGN, str(path))
        self._write(f"{os.getpid()} {socket.gethostname() or '-'}\n".encode())

    def release(self) -> None:
        """Release the lock. Do nothing if the lock is already released."""
        if self._file.closed:
            return
        self._write(b"")
        self._file.close()  # closing the file releases the lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _text(self) -> bytes:
        self._file.seek(0)
        return self._file.read(512)

    def _write(self, text: bytes) -> None:
        if not self._file.writable():
            return
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(text)
        except OSError:  # the lock works even if the disk is full
            return


def _holder(text: bytes) -> str:
    held = _HELD.fullmatch(text)
    if held is None:  # the holder has not written its ID yet, or has no write permission
        return "another process"
    host = held[2].decode("utf-8", "replace")
    return f"process {int(held[1])}" + ("" if host == socket.gethostname() else f" on {host}")


def _locks(file: FileIO) -> bool:
    """Try to lock an open file. Return False if the file is locked through another descriptor."""
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(_LOCKED_BYTE)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True


def cache_folder() -> Path:
    """Return $CLEAVE_CACHE if set, otherwise the folder `cleave` in the user's cache folder."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("CLEAVE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("cleave")
