"""The journal: GEMM results on disk, so that a killed run can resume within a step.

Training is deterministic: a run resumed from a checkpoint needs the same GEMMs in the same order.
The run reads earlier GEMM results (products) from a file in a subfolder of the run folder:

    folder/step-000120.blocks    products finished since the checkpoint of step 120

A product is identified by its step, its index within the step, and a checksum of its inputs (the
shapes, dtypes and bytes of both operands). If the checksum differs, or the stored product is
damaged, the product is computed again, so a stale journal never yields a wrong product. Reading
stops at the first incomplete record, which a crash may leave.

A checkpoint makes all earlier products obsolete. `outgrown` requests an early checkpoint once
the journal is larger than a checkpoint, which limits the disk space and the time to resume. Early
checkpoints write no more bytes than the journal itself.
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
_HEADER: Final = struct.Struct("<II20sdQI")  # step, place, key, took_s, payload size and CRC-32
_CRC: Final = struct.Struct("<I")  # CRC-32 of the preceding header
_RECORD_BYTES: Final = _HEADER.size + _CRC.size
_NAME: Final = re.compile(r"step-\d{6,}\.blocks")

QUEUE_BYTES: Final = 256 * 2**20  # default size limit of the write queue
LEAST_BYTES: Final = 64 * 2**20  # a journal up to this size requests no early checkpoint
_RETRY_S: Final = 1.0  # delay between retries of a write while the disk is full
_JUDGED_STEPS: Final = 4


@dataclass(slots=True)
class JournalCounters:
    """Counters of a journal.

    Attributes:
        written_bytes: total size of the products queued for writing, in bytes.
        spent_s: time that the training thread spent on the journal and early checkpoints, in
            seconds.
        write_s: time that the writer thread spent writing, in seconds.
        saved_s: time that the products read from the journal originally took, in seconds.
    """

    written_bytes: int = 0
    spent_s: float = 0.0
    write_s: float = 0.0
    taken: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Entry:
    """Index entry of a product in the journal's file. `key` is the checksum of the inputs."""

    offset: int
    nbytes: int
    crc: int
    key: bytes
    took_s: float


@dataclass(frozen=True, slots=True)
class _Product:
    """A product in the write queue.

    `step` is the 0-based step that computes the product; `place` is its index within that step.
    """

    step: int
    place: int
    key: bytes
    took_s: float
    elements: Array


class Journal:
    """The journal of one run. Only the training thread may call its methods.

    Args:
        base: step of the latest checkpoint. Journal files of other checkpoints are removed.
        queue_bytes: maximum size of the write queue in bytes.

    Attributes:
        on: False once the journal has switched itself off and writes no more products.

    Raises:
        CleaveError: if the journal cannot be opened.
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

    def _open(self, base: int) -> tuple[Path, FileIO]:
        """Open the journal file for the checkpoint of step `base` and index its records.

        Truncate the file at the first damaged record, and remove the other journal files.
        """
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
                f"{remedy(error)}, or continue with --no-journal"
            ) from error
        self._size_bytes = max(end, len(_MAGIC))
        return path, file

    def _set_aside(self, path: Path) -> None:
        """If the file at `path` is not a journal, rename it so that it is not overwritten."""
        if path.is_symlink() or not path.is_file() or is_ours(path, _MAGIC):
            return
        aside, number = path.with_name(f"{path.name}.other"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.other-{number}")
        path.rename(aside)
        self._say(f"{path} is damaged or not a journal; it is kept as {aside.name}")

    def _read(self, file: FileIO) -> int:
        """Index a journal file up to the first damaged record and return that record's offset.

        Return the end of an undamaged file, or 0 if the file is not a journal.
        """
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
            # A step may be repeated with other inputs, so the last record of a product counts.
            self._entries[step, place] = _Entry(offset, nbytes, payload_crc, key, took_s)
            end = offset + nbytes
        return end

    @property
    def held(self) -> int:
        """Return the number of indexed products that training has not requested yet."""
        return len(self._entries)

    def outgrown(self, checkpoint_bytes: int) -> bool:
        """Return True if a checkpoint is due because the journal is larger than a checkpoint.

        Return False while `held` is not 0, because a checkpoint would discard those products.
        """
        if self._entries:
            return False
        return self.on and self._size_bytes > max(LEAST_BYTES, checkpoint_bytes)

    def covered(self, base: int) -> None:
        """Start a new journal file after the checkpoint of step `base` has been written.

        If the next step was begun but abandoned, copy its finished products to the new file.
        """
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
        """Copy products of step `base` and later from the old file. Stop at a disk error."""
        self._read(before)
        kept = [entry for (step, _), entry in self._entries.items() if step >= base]
        self._entries.clear()
        with suppress(OSError):  # reading the file ignores an incomplete record
            for entry in kept:
                before.seek(entry.offset - _RECORD_BYTES)
                record = before.read(_RECORD_BYTES + entry.nbytes)
                write_all(self._file, record)
                self._size_bytes += len(record)

    def close(self) -> None:
        """Write all queued products and close the file. Remove a journal without products."""
        self._writer.close()
        self._file.close()
        if self.on and self._writer.failure:
            self._switch_off(f"it cannot be written ({self._writer.failure})")
        if self._size_bytes <= len(_MAGIC):
            discard(self.folder)

    def begin(self, step: int) -> None:
        """Begin the step that follows `step` completed steps."""
        self._step, self._place = step, 0
        for place in [place for place in self._entries if place[0] < step]:
            del self._entries[place]
        self._at_begin = (self.counters.spent_s, self.counters.taken)
        self._waited_s = self._patience.waited_s
        self._began_s = self._clock()

    def end(self) -> None:
        """End the current step.

        Switch the journal off if it takes more time than the steps, or cannot be written.
        """
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
        # Count writes after the end of a step as a cost of the next step.
        write_s, counters.write_s = counters.write_s, self._writer.write_s
        if self._writer.failure:
            self._switch_off(f"it cannot be written ({self._writer.failure})")
        elif counters.taken == taken and self._patience.waited_s == self._waited_s:
            # Judge only steps that neither read from the journal nor waited for disk space.
            spent_s = counters.spent_s - spent_s
            self._judged.append((wall_s - spent_s, spent_s + counters.write_s - write_s))
            self._writer.sync()
            step_s, cost_s = (
                sum(each) / len(self._judged) for each in zip(*self._judged, strict=True)
            )
            if len(self._judged) == _JUDGED_STEPS and cost_s > step_s:
                self._switch_off(f"it adds {cost_s:.3g} s to each step of {step_s:.3g} s")

    def _switch_off(self, reason: str) -> None:
        self.on = False
        self._say(f"the journal is off: {reason}; a killed run continues from its last checkpoint")

    def multiply(self, fleet: Multiplier, a: Side, b: Side, out: Buffer) -> Pending:
        """Read the product ``out = a @ b`` from the journal, or start its GEMM on the fleet."""
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
        if future.done or not self.on:  # do not store products that the PS computed
            return future
        submitted_s = self._clock()
        key = self._key(a, b, out)  # overlaps with the fleet's computation
        self.counters.spent_s += self._clock() - submitted_s
        return _Journaled(self, future, place, key, began_s)

    def finished(self, place: tuple[int, int], key: bytes, began_s: float, out: Buffer) -> None:
        """Queue a GEMM's product for writing. The GEMM was submitted at the time `began_s`.

        `place` is the step and the index within the step. `key` is the checksum of the inputs.
        """
        now_s = self._clock()
        # If several GEMMs are in flight, count the time since the previous product finished.
        took_s = now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        if not self.on or self._writer.failure:
            return
        # Copy the product, because the caller may add a bias to `out` in place.
        product = _Product(*place, key, took_s, np.array(out.array, order="C"))
        try:
            self._patience.insist(lambda: self._writer.put(product))
        except DiskFullError as error:  # the run is stopping
            self._switch_off(str(error))
            return
        self._size_bytes += _RECORD_BYTES + product.elements.nbytes
        self.counters.written_bytes += product.elements.nbytes
        self.counters.spent_s += self._clock() - now_s

    def _take(self, entry: _Entry, out: Buffer) -> bool:
        """Read a product from the file into `out`. Return False if the product is damaged."""
        try:
            with self._path.open("rb") as file:  # the writer's file must keep its position
                file.seek(entry.offset)
                data = file.read(entry.nbytes)
        except OSError as error:
            raise CleaveError(
                f"the journal {str(self._path)!r} cannot be read ({error.strerror}); check the "
                "disk, or continue with --no-journal"
            ) from error
        if len(data) != out.nbytes or zlib.crc32(data) != entry.crc:
            return False
        out.array[...] = unpack(data, *out.shape, out.dtype).array
        self.counters.taken += 1
        self.counters.saved_s += entry.took_s
        return True

    def _key(self, a: Side, b: Side, out: Buffer) -> bytes:
        """Hash both operands' digests and transpositions and the result's dtype with SHA-1."""
        said = f"{a.transposed} {b.transposed} {out.dtype.value}".encode()
        return hashlib.sha1(
            self._digest(a.operand) + self._digest(b.operand) + said, usedforsecurity=False
        ).digest()

    def _digest(self, operand: Operand) -> bytes:
        """Return the SHA-1 of an operand's shape, dtype and bytes; hash each operand once."""
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
    """A GEMM in flight, whose product is stored in the journal when the result is requested."""

    journal: Journal
    future: Pending
    place: tuple[int, int]
    key: bytes
    began_s: float

    @property
    def done(self) -> bool:
        return self.future.done

    def result(self) -> Buffer:
        out = self.future.result()
        self.journal.finished(self.place, self.key, self.began_s, out)
        return out


@dataclass(frozen=True, slots=True)
class JournaledFleet:
    """A fleet wrapper that reads products from a journal, and stores new products in it."""

    fleet: Multiplier
    journal: Journal

    def operand(self, buffer: Buffer) -> Operand:
        return self.fleet.operand(buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        return self.journal.multiply(self.fleet, a, b, out)


class _Writer:
    """A thread with a bounded queue that appends products to the journal's file.

    While the disk is full, the thread retries the current write, and `check` raises DiskFullError.
    `failure` is the reason why the thread can no longer write; empty while it can.
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
        self._queue: deque[_Product | None] = deque()  # None stands for an fsync
        self._queued_bytes = 0
        self._busy = False
        self._closing = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cleave-journal", daemon=True)
        self._thread.start()

    def put(self, product: _Product) -> None:
        """Queue a product for writing. Wait while the queue is full.

        Raises:
            DiskFullError: if the queue and the disk are both full. The product is not queued.
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
        """Raise DiskFullError if the current write is waiting for disk space."""
        with self._change:
            if self._full and not self.failure:
                raise cannot_write(self.path, self._full)

    def sync(self) -> None:
        """Queue an fsync, so that all products already queued survive a power loss."""
        with self._change:
            self._queue.append(None)
            self._change.notify_all()

    def forget(self) -> None:
        """Discard all queued products and wait until the current write has ended."""
        with self._change:
            self._queue.clear()
            self._queued_bytes = 0
            self._dropped += 1
            self._change.notify_all()
            self._change.wait_for(lambda: not self._busy)

    def drain(self) -> None:
        """Wait until all queued products are written. Discard products that cannot be written."""
        with self._change:
            self._change.wait_for(
                lambda: self.failure or self._full or not (self._queue or self._busy)
            )
        self.forget()

    def close(self) -> None:
        """Write all queued products and stop the thread."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
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
                        # A product may be discarded: a resumed run computes it again.
                        if self._closing:
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
        """Write `product`; if it is None, fsync the file. Return False if the disk is full."""
        end, began_s = self.file.tell(), self._clock()
        try:
            if product is None:
                os.fsync(self.file.fileno())
            else:
                payload = product.elements.reshape(-1).view(np.uint8).data
                place, crc = (product.step, product.place), zlib.crc32(payload)
                header = _HEADER.pack(*place, product.key, product.took_s, payload.nbytes, crc)
                write_all(self.file, header + _CRC.pack(zlib.crc32(header)))
                write_all(self.file, payload)
        except OSError as error:
            if not is_full(error):
                raise
            with suppress(OSError):  # reading the file ignores an incomplete record anyway
                self.file.truncate(end)
            self.file.seek(end)
            with self._change:
                self._full = error
                self._change.notify_all()
            return False
        finally:
            self.write_s += self._clock() - began_s
        return True


def holds_beginning(folder: Path) -> bool:
    """Return True if a journal contains products from before the run's first checkpoint."""
    try:
        return _file_of(folder, 0).stat().st_size > len(_MAGIC)
    except FileNotFoundError:
        return False


def _is_journal(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and is_ours(path, _MAGIC)


def _file_of(folder: Path, base: int) -> Path:
    return folder / f"step-{base:06d}.blocks"


def discard(folder: Path) -> None:
    """Remove the journal files in a folder, and the folder if it is then empty."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if _is_journal(path):
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
