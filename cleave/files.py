"""All of Cleave's code that opens files for writing or locks folders.

Nothing is written through a link. A link is replaced by the new file, or refused if a file is
opened to continue it. A file is replaced as a whole, or continued only if it begins like Cleave's
files. `tests/test_files.py` finds code that writes in another way.

Errors are OSError, with a clause for a user in `strerror`.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from cleave.errors import CleaveError

_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BINARY: Final = getattr(os, "O_BINARY", 0)
_OPEN: Final = _NO_FOLLOW | _BINARY
_LINK: Final = "it is a link, and Cleave writes through none"
_FOREIGN: Final = "Cleave did not write what is there"

LOCK: Final = "lock"
"""The name of the file that locks a folder."""

_HELD: Final = re.compile(rb"(\d+) (\S+)\n?")
_LOOK_S: Final = 0.1
_LOCKED_BYTE: Final = 2**30  # far behind the text, because Windows makes a locked range unreadable


# --- folders ---


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder that a user named, and its parents, unless it exists."""
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def writable_folder(path: Path) -> None:
    """Make a folder that a user named, unless it exists, and check that it is writable.

    Raises:
        OSError: when it cannot be made or written to.
    """
    make_folder(path)
    with tempfile.TemporaryFile(dir=path):
        pass


def own_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder within one of Cleave's folders, unless it exists; refuse a link."""
    refuse_link(path)
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def new_folder(path: Path) -> None:
    """Make a new folder, and its parents.

    Raises:
        FileExistsError: when the path exists.
    """
    path.mkdir(parents=True)


def refuse_link(path: Path) -> None:
    """Raise OSError if a path is a link or a Windows junction."""
    if path.is_symlink() or (sys.version_info >= (3, 12) and path.is_junction()):
        raise OSError(errno.ELOOP, _LINK, str(path))


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power loss (if the system can)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- files ---


def new_file(path: Path, mode: int = 0o666) -> FileIO:
    """Create a file, and open it without a buffer.

    Args:
        mode: the permissions, less the user's umask.

    Raises:
        FileExistsError: when the path exists, even as a link.
    """
    return _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)


def write_atomically(path: Path, data: bytes, mode: int = 0o666, *, sync: bool = True) -> None:
    """Replace a file atomically: readers see either the old file or the new one.

    The folder is created if it is missing. A link is replaced, and its target does not change.

    Args:
        mode: the permissions of the new file, less the user's umask.
        sync: whether the file must survive a power loss.

    Raises:
        OSError: when it cannot be written; no temporary file remains.
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with new_file(temporary, mode) as file:
            write_all(file, data)
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


@contextmanager
def private_file(data: bytes, prefix: str) -> Iterator[Path]:
    """Return a context manager with a temporary file that only this user can read."""
    written, name = tempfile.mkstemp(prefix=prefix)  # its mode is 0600
    path = Path(name)
    try:
        with FileIO(written, "w") as file:
            write_all(file, data)
        yield path
    finally:
        path.unlink()


def check_output(path: Path) -> None:
    """Raise OSError if `write_output` could not write here; change nothing."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # a pipe or a device
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user named, such as a plot or a report.

    A file is replaced (see `write_atomically`). A pipe or device, like /dev/stdout, is written to.

    Raises:
        OSError: when it cannot be written, or its folder does not exist.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:
            file.write(data)
        return
    check_output(path)
    write_atomically(path, data, sync=False)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Save a matplotlib figure to a file that a user named, as `write_output` does.

    Raises:
        OSError: when it cannot be written.
        ValueError: when matplotlib does not know the file format.
    """
    path = path if path.suffix else path.with_suffix(".png")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi)
    write_output(path, drawn.getvalue())


def open_output(path: Path) -> FileIO:
    """Open a file that a user named and that grows while others read it, such as a log.

    An empty file replaces an existing one at once; see `write_output`.

    Raises:
        OSError: when it cannot be written, or its folder does not exist.
    """
    write_output(path, b"")
    if not path.is_file():
        return FileIO(path, "w")
    return _opened(path, os.O_WRONLY | os.O_APPEND)


def open_to_append(path: Path) -> FileIO:
    """Open one of Cleave's files to append to it; create it unless it exists.

    A file with a second name (a hard link) is copied first, so the other name does not change.

    Raises:
        OSError: when it cannot be opened, or is a link.
    """
    file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if os.fstat(file.fileno()).st_nlink <= 1:
        return file
    with file:
        write_atomically(path, file.readall())
    return _opened(path, os.O_RDWR | os.O_APPEND)


def open_to_change(path: Path, header: bytes, mode: int = 0o666) -> FileIO:
    """Open one of Cleave's files to read and write; create it unless it exists.

    A file with a second name (a hard link) is copied first, as by `open_to_append`.

    Args:
        header: the first bytes of such a file; a file that ends within them is also accepted.
        mode: the permissions of a new file, less the user's umask.

    Raises:
        OSError: when it cannot be opened, is a link, or has another header.
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
    """Copy a file to a new path.

    Raises:
        OSError: when it cannot be copied, or the new path exists.
    """
    with source.open("rb") as whole, new_file(path) as file:
        while part := whole.read(2**20):
            write_all(file, part)


def is_ours(path: Path, header: bytes) -> bool:
    """Return whether `open_to_change` would open an existing file."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            return _begins(file, header)
    except OSError:
        return False


def _begins(file: FileIO, header: bytes) -> bool:
    """Return whether a file begins with a header or is a prefix of it; rewind the file."""
    begin = file.read(len(header))
    file.seek(0)
    return begin == header or header.startswith(begin)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _opened(path: Path, flags: int, mode: int = 0o666) -> FileIO:
    """Open a regular file without following a link."""
    if not flags & os.O_EXCL:
        refuse_link(path)
    descriptor = os.open(path, flags | _OPEN | getattr(os, "O_NONBLOCK", 0), mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is no regular file", str(path))
    ways = {os.O_RDONLY: "r", os.O_WRONLY: "w", os.O_RDWR: "r+"}
    return FileIO(descriptor, ways[flags & (os.O_WRONLY | os.O_RDWR)])


# --- locks ---


class LockedError(CleaveError):
    """Another process, or another job of this process, has the lock.

    Attributes:
        holder: the holder of the lock, such as `process 4711`.
    """

    def __init__(self, text: str, holder: str) -> None:
        super().__init__(text)
        self.holder = holder


class Lock:
    """A lock on a file that one process at a time can hold.

    The system releases it when the process ends for any reason. The file remains, and names the
    process that holds the lock.

    Args:
        path: the file, created unless it exists. A read-only file can be locked as well.
        wait_s: maximum seconds to wait for another process.

    Raises:
        LockedError: when another process has the lock.
        OSError: when the file cannot be opened or locked, or is not one of Cleave's.
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
                raise LockedError(f"{holder} uses {str(path.parent)!r}", holder)
            time.sleep(_LOOK_S)
        text = self._text()
        if text and not _HELD.fullmatch(text):
            raise OSError(errno.EEXIST, _FOREIGN, str(path))
        self._write(f"{os.getpid()} {socket.gethostname() or '-'}\n".encode())

    def release(self) -> None:
        """Release the lock; do nothing if it is released already."""
        if self._file.closed:
            return
        self._write(b"")
        self._file.close()  # which unlocks it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        except OSError:  # a full disk does not affect the lock
            return


def _holder(text: bytes) -> str:
    held = _HELD.fullmatch(text)
    if held is None:  # the holder has not written yet, or may not write
        return "another process"
    host = held[2].decode("utf-8", "replace")
    return f"process {int(held[1])}" + ("" if host == socket.gethostname() else f" on {host}")


def _locks(file: FileIO) -> bool:
    """Lock a file; return False if another open file has the lock."""
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
