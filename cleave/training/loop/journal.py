"""The block journal: finished products on disk, so that a killed run resumes within a step.

Training is deterministic: a run resumed from a checkpoint computes the same products of the same
matrices in the same order. With a journal, products finished since that checkpoint come from disk
instead of the fleet. The journal has its own folder in the run folder:

    folder/step-000120.blocks    products finished since the checkpoint of step 120

A product is identified by its step, its place within the step, and a checksum of its inputs:
shapes, dtypes and the bytes of both operands. If the checksum differs, the product is computed
again, so a stale journal never yields a wrong product. A record that a crash cut short ends the
file; a damaged product is not used.

The next checkpoint makes the journal's products unnecessary. As a step adds far more bytes than a
checkpoint has, `outgrown` asks for an early checkpoint once the journal is larger than one. This
bounds disk space and the time to resume, and checkpoints cost no more than the journal.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from cleave.arrays import Array, Buffer, unpack
from cleave.errors import CleaveError
from cleave.files import is_ours, open_to_change, own_folder, sync_folder, write_all
from cleave.fleet.product import Finished, Multiplier, Operand, Pending, Side
from cleave.training.loop.disk import DiskFullError, Patience, cannot_write, is_full, remedy

_MAGIC: Final = b"CLEAVEJ1"
_HEADER: Final = struct.Struct("<II20sdQI")  # step, place, key, seconds, payload bytes and crc32
_CRC: Final = struct.Struct("<I")  # of the preceding header
_RECORD_BYTES: Final = _HEADER.size + _CRC.size
_NAME: Final = re.compile(r"step-\d{6,}\.blocks")

QUEUE_BYTES: Final = 256 * 2**20
"""Maximum size of the write queue; beyond it the training thread waits."""

LEAST_BYTES: Final = 64 * 2**20
"""A journal below this size is not worth an early checkpoint."""

_RETRY_S: Final = 1.0  # after a write that found the disk full

_JUDGED_STEPS: Final = 4


@dataclass(slots=True)
class JournalCounters:
    """Counters of a journal.

    Attributes:
        written, written_bytes: products appended, and their bytes.
        spent_s: seconds of the training thread for checksums, copies, reads and disk waits.
        write_s: seconds of the writing thread.
        taken, taken_bytes: products that came from the journal, and their bytes.
        saved_s: seconds that the fleet had taken for the products in `taken`.
    """

    written: int = 0
    written_bytes: int = 0
    spent_s: float = 0.0
    write_s: float = 0.0
    taken: int = 0
    taken_bytes: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """Position of a product in the file, with the checksums of its bytes and its inputs."""

    offset: int
    nbytes: int
    crc: int
    key: bytes
    took_s: float


@dataclass(frozen=True, slots=True)
class _Product:
    """A product to be written."""

    step: int
    place: int
    key: bytes
    took_s: float
    elements: Array


class Journal:
    """Keeps the finished products of one run. Only the training thread calls it.

    Args:
        folder: the folder of its file; made when needed.
        base: step of the checkpoint that the run starts or resumes from. Products journaled since
            that checkpoint are used; other journal files are removed.
        say: called with one sentence when the journal switches itself off.
        clock: returns seconds, as `time.perf_counter` does.
        patience: repeats writes while the disk is full.
        queue_bytes: see `QUEUE_BYTES`.

    Raises:
        CleaveError: when the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        base: int,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float],
        patience: Patience,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.folder = folder
        self.counters = JournalCounters()
        self.on = True
        self._say = say
        self._clock = clock
        self._patience = patience
        self._waited_s = 0.0
        self._step = base
        self._place = 0
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._digests: WeakKeyDictionary[Operand, bytes] = WeakKeyDictionary()
        self._last_end_s = -float("inf")
        self._began_s = 0.0
        self._at_begin = (0.0, 0)
        self._judged: deque[tuple[float, float]] = deque(maxlen=_JUDGED_STEPS)
        self._size_bytes = 0
        self._path, self._file = self._patience.insist(lambda: self._open(base))
        self._writer = _Writer(self._path, self._file, queue_bytes, clock)

    # --- the file ---

    def _open(self, base: int) -> tuple[Path, FileIO]:
        """Open a checkpoint's file and read its intact records; remove other files."""
        path = _file_of(self.folder, base)
        try:
            own_folder(self.folder)
            self._set_aside(path)
            file = open_to_change(path, _MAGIC)
            end = self._read(file)
            file.truncate(end)
            file.seek(end)
            if not end:
                write_all(file, _MAGIC)
            sync_folder(self.folder)
            for other in self.folder.iterdir():
                if other != path and _is_journal(other):
                    other.unlink()
        except OSError as error:
            kind = DiskFullError if is_full(error) else CleaveError
            raise kind(
                f"the journal {str(path)!r} cannot be opened ({error.strerror}): "
                f"{remedy(error)}, or go on with --no-journal"
            ) from error
        self._size_bytes = max(end, len(_MAGIC))
        return path, file

    def _set_aside(self, path: Path) -> None:
        """Rename a file without a journal's magic bytes, so that it is not overwritten."""
        if path.is_symlink() or not path.is_file() or is_ours(path, _MAGIC):
            return
        aside, number = path.with_name(f"{path.name}.other"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.other-{number}")
        path.rename(aside)
        self._say(f"{path} is damaged or no journal; it is kept as {aside.name}")

    def _read(self, file: FileIO) -> int:
        """Index a file's records; return the number of bytes up to the last intact one."""
        self._entries.clear()
        if file.read(len(_MAGIC)) != _MAGIC:
            return 0
        end = len(_MAGIC)
        size = file.seek(0, os.SEEK_END)
        while end + _RECORD_BYTES <= size:
            file.seek(end)
            header = file.read(_HEADER.size)
            (crc,) = _CRC.unpack(file.read(_CRC.size))
            if zlib.crc32(header) != crc:
                break
            step, place, key, took_s, nbytes, payload_crc = _HEADER.unpack(header)
            offset = end + _RECORD_BYTES
            if offset + nbytes > size:
                break
            # A later record replaces an earlier one, whose inputs did not match.
            self._entries[step, place] = _Entry(offset, nbytes, payload_crc, key, took_s)
            end = offset + nbytes
        return end

    @property
    def held(self) -> int:
        """Return the number of products of an earlier run that can still be used."""
        return len(self._entries)

    def outgrown(self, checkpoint_bytes: int) -> bool:
        """Return whether the journal is larger than a checkpoint, so that one is due."""
        if self._entries:  # a checkpoint would discard products not yet used
            return False
        return self.on and self._size_bytes > max(LEAST_BYTES, checkpoint_bytes)

    def charge(self, spent_s: float) -> None:
        """Add seconds to the journal's cost, such as those of an early checkpoint."""
        self.counters.spent_s += spent_s

    def covered(self, base: int) -> None:
        """Begin a new file at a checkpoint; keep finished products of an abandoned next step."""
        if not self.on:
            discard(self.folder)
            return
        given_up = self._step == base and self._place > 0
        if given_up:
            self._writer.drain()
        else:
            self._writer.forget()
        before, before_path = self._file, self._path
        self._path, self._file = self._patience.insist(lambda: self._open(base))
        self._writer.path, self._writer.file = self._path, self._file
        if given_up and before_path != self._path:
            self._carry_over(before, base)
        before.close()

    def _carry_over(self, before: FileIO, base: int) -> None:
        """Copy the products of later steps from another file, as far as the disk has space."""
        self._read(before)
        kept = [entry for (step, _), entry in self._entries.items() if step >= base]
        self._entries.clear()
        with suppress(OSError):  # a record cut short is ignored
            for entry in kept:
                before.seek(entry.offset - _RECORD_BYTES)
                record = before.read(_RECORD_BYTES + entry.nbytes)
                write_all(self._file, record)
                self._size_bytes += len(record)

    def close(self) -> None:
        """Write what is queued and close the file. A journal without products is removed."""
        self._writer.close()
        self._file.close()
        if self.on and self._writer.failure:
            self._switch_off(f"it cannot be written ({self._writer.failure})")
        if self._size_bytes <= len(_MAGIC):
            discard(self.folder)

    # --- steps ---

    def begin(self, step: int) -> None:
        """Start the step after `step`."""
        self._step, self._place = step, 0
        for place in [place for place in self._entries if place[0] < step]:
            del self._entries[place]  # not requested this time
        counters = self.counters
        self._at_begin = (counters.spent_s, counters.taken)
        self._waited_s = self._patience.waited_s
        self._began_s = self._clock()

    def end(self) -> None:
        """End the step; switch off if the journal costs more than it could save."""
        if not self.on:
            return
        wall_s = self._clock() - self._began_s
        spent_s, taken = self._at_begin
        counters = self.counters
        try:
            self._patience.insist(self._writer.check)
        except DiskFullError as error:  # the run is stopping
            self._switch_off(str(error))
            return
        # Writes after a step's end count for the next step.
        write_s, counters.write_s = counters.write_s, self._writer.write_s
        if self._writer.failure:
            self._switch_off(f"it cannot be written ({self._writer.failure})")
        elif counters.taken == taken and self._patience.waited_s == self._waited_s:
            # A step that read products from disk, or waited for disk space, is not representative.
            spent_s = counters.spent_s - spent_s
            self._judged.append((wall_s - spent_s, spent_s + counters.write_s - write_s))
            self._writer.sync()
            self._judge()

    def _judge(self) -> None:
        """Switch off if the last steps' journaling cost more than the steps themselves."""
        step_s = sum(step for step, _ in self._judged) / len(self._judged)
        cost_s = sum(cost for _, cost in self._judged) / len(self._judged)
        if len(self._judged) == _JUDGED_STEPS and cost_s > step_s:
            self._switch_off(f"it costs {cost_s:.3g} s a step and a step takes {step_s:.3g} s")

    def _switch_off(self, reason: str) -> None:
        """Stop writing products, and report why."""
        self.on = False
        self._say(f"the journal is off: {reason}; a killed run goes on from its last checkpoint")

    # --- products ---

    def multiply(self, fleet: Multiplier, a: Side, b: Side, out: Buffer) -> Pending:
        """Start ``out = a @ b`` as `Fleet.submit` does, or read the product from disk."""
        place = (self._step, self._place)
        self._place += 1
        entry = self._entries.pop(place, None)
        if entry is None and not self.on:
            return fleet.submit(a, b, out)
        began_s = self._clock()
        if entry is not None:
            key = self._key(a, b, out)
            taken = entry.key == key and self._take(entry, out)
            self.counters.spent_s += self._clock() - began_s
            if taken:
                return Finished(out)
            began_s = self._clock()
        future = fleet.submit(a, b, out)
        if future.done or not self.on:  # computed on the PS: not worth writing
            return future
        submitted_s = self._clock()
        key = self._key(a, b, out)  # while the fleet multiplies
        self.counters.spent_s += self._clock() - submitted_s
        return _Journaled(self, future, place, key, began_s)

    def finished(self, place: tuple[int, int], key: bytes, began_s: float, out: Buffer) -> None:
        """Queue a finished product for writing."""
        now_s = self._clock()
        # A product in flight with others counts the time since the previous one ended.
        took_s = now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        if not self.on or self._writer.failure:
            return
        # A copy: the caller adds a bias in place.
        product = _Product(*place, key, took_s, np.array(out.array, order="C"))
        try:
            self._patience.insist(lambda: self._writer.put(product))
        except DiskFullError as error:  # the run is stopping
            self._switch_off(str(error))
            return
        self._size_bytes += _RECORD_BYTES + product.elements.nbytes
        self.counters.written += 1
        self.counters.written_bytes += product.elements.nbytes
        self.counters.spent_s += self._clock() - now_s

    def _take(self, entry: _Entry, out: Buffer) -> bool:
        """Read a product into `out`; return False if it is damaged."""
        data = _read_at(self._path, entry.offset, entry.nbytes)
        if len(data) != out.nbytes or zlib.crc32(data) != entry.crc:
            return False
        out.array[...] = unpack(data, *out.shape, out.dtype).array
        self.counters.taken += 1
        self.counters.taken_bytes += entry.nbytes
        self.counters.saved_s += entry.took_s
        return True

    def _key(self, a: Side, b: Side, out: Buffer) -> bytes:
        """Return the 20-byte checksum of a product's inputs."""
        said = f"{a.transposed} {b.transposed} {out.dtype.value}".encode()
        return hashlib.sha1(
            self._digest(a.operand) + self._digest(b.operand) + said, usedforsecurity=False
        ).digest()

    def _digest(self, operand: Operand) -> bytes:
        """Return the checksum of a matrix, computed once per operand."""
        digest = self._digests.get(operand)
        if digest is None:
            buffer = operand.buffer
            said = f"{buffer.shape} {buffer.dtype.value}".encode()
            sha1 = hashlib.sha1(said, usedforsecurity=False)
            sha1.update(buffer.pack())
            digest = self._digests[operand] = sha1.digest()
        return digest


@dataclass(frozen=True, slots=True)
class _Journaled:
    """A product in flight; the journal writes it once its result is read."""

    journal: Journal
    future: Pending
    place: tuple[int, int]
    key: bytes
    began_s: float

    @property
    def done(self) -> bool:
        """Return whether the product is finished."""
        return self.future.done

    def result(self) -> Buffer:
        """Wait for the product, queue it for the journal's file, and return it."""
        out = self.future.result()
        self.journal.finished(self.place, self.key, self.began_s, out)
        return out


@dataclass(frozen=True, slots=True)
class JournaledFleet:
    """A fleet whose products are journaled, for `cleave.training.tiles.offload`."""

    fleet: Multiplier
    journal: Journal

    def operand(self, buffer: Buffer) -> Operand:
        """Return a buffer's operand, as `Fleet.operand` does."""
        return self.fleet.operand(buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """Start ``out = a @ b``, or read the product from disk."""
        return self.journal.multiply(self.fleet, a, b, out)


class _Writer:
    """Appends products to a file in its own thread, with bounded memory.

    While the disk is full, it retries the current write, and `put` and `check` raise an error.

    Attributes:
        path, file: the file to append to; the file object is positioned at the end.
        write_s: seconds spent on writing.
        failure: why writing failed for good; empty before that.
    """

    def __init__(
        self, path: Path, file: FileIO, queue_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.path = path
        self.file = file
        self._full: OSError | None = None
        self._dropped = 0  # number of `forget` calls
        self.write_s = 0.0
        self.failure = ""
        self._limit_bytes = queue_bytes
        self._clock = clock
        self._queue: deque[_Product | None] = deque()  # None: fsync
        self._queued_bytes = 0
        self._busy = False
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cleave-journal", daemon=True)
        self._thread.start()

    def put(self, product: _Product) -> None:
        """Queue a product for writing; wait while the queue is full.

        Raises:
            DiskFullError: when the queue is full because the disk is; the product is not queued.
        """
        nbytes = product.elements.nbytes

        def fits() -> bool:
            return not self._queued_bytes or self._queued_bytes + nbytes <= self._limit_bytes

        with self._change:
            self._change.wait_for(lambda: fits() or self.failure or self._full)
            if self._full and not fits():
                raise cannot_write(self.path, self._full)
            self._queue.append(product)
            self._queued_bytes += nbytes
            self._change.notify_all()

    def check(self) -> None:
        """Check that the disk is not full.

        Raises:
            DiskFullError: when it is full.
        """
        with self._change:
            if self._full and not self.failure:
                raise cannot_write(self.path, self._full)

    def sync(self) -> None:
        """Queue an fsync, so that earlier writes survive a power loss."""
        with self._change:
            self._queue.append(None)
            self._change.notify_all()

    def forget(self) -> None:
        """Drop queued writes, and wait until the writer no longer uses the file."""
        with self._change:
            self._queue.clear()
            self._queued_bytes = 0
            self._dropped += 1
            self._change.notify_all()
            self._change.wait_for(lambda: not self._busy)

    def drain(self) -> None:
        """Wait until queued products are written, or drop them if they cannot be."""
        with self._change:
            self._change.wait_for(
                lambda: self.failure or self._full or not (self._queue or self._busy)
            )
        self.forget()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        """Write queued products, in the writer's thread."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                product = self._queue.popleft()
                self._busy, dropped = True, self._dropped
            try:
                while not self.failure and not self._written(product):
                    with self._change:
                        self._change.wait(_RETRY_S)
                        if self._closing:  # losing it is safe: it is computed again
                            self.failure = "the disk is full"
                        elif self._dropped > dropped:
                            break
            except OSError as error:  # reported at the end of the step
                self.failure = error.strerror or str(error)
            finally:
                with self._change:
                    self._busy = False
                    self._full = None
                    if product is not None and self._queued_bytes:
                        self._queued_bytes -= product.elements.nbytes
                    self._change.notify_all()

    def _written(self, product: _Product | None) -> bool:
        """Write a product; return False, with nothing written, if the disk is full."""
        end, began_s = self.file.tell(), self._clock()
        try:
            self._write(product)
        except OSError as error:
            if not is_full(error):
                raise
            with suppress(OSError):  # reading the file cuts off the rest anyway
                self.file.truncate(end)
            self.file.seek(end)
            with self._change:
                self._full = error
                self._change.notify_all()
            return False
        finally:
            self.write_s += self._clock() - began_s
        return True

    def _write(self, product: _Product | None) -> None:
        """Write a product, or sync the file for None."""
        if product is None:
            os.fsync(self.file.fileno())
            return
        payload = product.elements.reshape(-1).view(np.uint8).data
        header = _HEADER.pack(
            product.step,
            product.place,
            product.key,
            product.took_s,
            payload.nbytes,
            zlib.crc32(payload),
        )
        write_all(self.file, header + _CRC.pack(zlib.crc32(header)))
        write_all(self.file, payload)


def _read_at(path: Path, offset: int, nbytes: int) -> bytes:
    """Read bytes of a file.

    Raises:
        CleaveError: when the file cannot be read.
    """
    try:
        with path.open("rb") as file:  # the writer's file object must stay at the end
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise CleaveError(
            f"the journal {str(path)!r} cannot be read ({error.strerror}): "
            f"check the disk, or go on with --no-journal"
        ) from error


def holds_beginning(folder: Path) -> bool:
    """Return whether a journal has products from before a run's first checkpoint."""
    try:
        return _file_of(folder, 0).stat().st_size > len(_MAGIC)
    except FileNotFoundError:
        return False


def _is_journal(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and is_ours(path, _MAGIC)


def _file_of(folder: Path, base: int) -> Path:
    """Return the path of the file with the products since the checkpoint of step `base`."""
    return folder / f"step-{base:06d}.blocks"


def discard(folder: Path) -> None:
    """Remove a journal, if it exists."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if _is_journal(path):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
