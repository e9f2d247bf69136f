"""The server's stored data: devices, credentials, join codes, faults, jobs; in SQLite.

Writes are short transactions that survive a kill of the process (WAL). After a power failure the
last ones may be missing, but the file is consistent.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from cleave.errors import CleaveError
from cleave.files import open_to_change
from cleave.protocol.device_counters import COUNTER_FIELDS, DeviceCounters
from cleave.scheduler.sessions.conduct import Conduct
from cleave.server.store.schema import MIGRATIONS, Migration

BUSY_S: Final = 5.0
"""How long a write waits for another process's."""

CODES_KEPT_S: Final = 30 * 86400.0
"""How long an old join code is known, so that whoever tries it is told what became of it."""

_SQLITE: Final = b"SQLite format 3\0"


class AccessStatus(Enum):
    """What a device may do; users read the values."""

    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    REVOKED = "revoked"


class Departure(Enum):
    """Why a device is not connected; users read the values."""

    AWAY = "away"
    LOST = "lost"


class StoreError(CleaveError):
    """The store's file cannot be read or written."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device that the server knows, across all its sessions.

    Attributes:
        id: its identity.
        name: its unique name, for people.
        standing, reason: what it may do, and why it may not do more.
        paired_s, seen_s: when it used its join code, and when it was last heard of (Unix time).
        absence, absence_reason: how its last session ended.
        sessions, losses: how many sessions it began, and how many of them were lost.
        faults: wrong results in all its sessions.
        code: the id of the join code that it joined with; None if unknown.
        done: what it did so far.
        conduct: how it worked in its last session.
        own: whether it is the operator's own, and may train whole layers.
    """

    id: int
    name: str
    standing: AccessStatus
    reason: str
    paired_s: float
    seen_s: float
    absence: Departure
    absence_reason: str
    sessions: int
    losses: int
    faults: int
    code: int | None
    done: DeviceCounters
    conduct: Conduct = field(default_factory=Conduct)
    own: bool = False


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """A join code's record, without the code itself.

    Attributes:
        expires_s: when it expires, Unix time in seconds.
        uses: how many devices may use it.
        used: how many have used it.
        made_s: when it was made, Unix time in seconds; 0 if unknown.
        void: why it was made void; empty if it was not.
        own: whether devices that join with it are the operator's own.
    """

    id: int
    expires_s: float
    uses: int
    used: int
    made_s: float = 0.0
    void: str = ""
    own: bool = False

    def is_open(self, now_s: float) -> bool:
        """Return whether a device may use the code at this Unix time."""
        return not self.void and self.used < self.uses and self.expires_s > now_s


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A training job as it is stored.

    Attributes:
        state: as in `cleave.server.jobs.jobs.JobState`.
        reason: why it failed.
        submitted_s, started_s, ended_s: Unix time, in seconds.
        steps: optimizer steps done so far; for a resumed job, including the earlier ones.
        loss: loss of the last step.
        run_folder: the folder of its results; empty if unknown.
        request: what was submitted, as JSON; empty if unknown.
        steps_in_all: steps that it is to do; 0 if unknown, or where it trains nothing.
    """

    number: int
    model: str
    state: str
    reason: str
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    steps: int
    loss: float | None
    run_folder: str
    request: str = ""
    steps_in_all: int = 0


class Store:
    """The server's database. Any thread may call its methods; calls wait for one another.

    Args:
        path: path of the database; None to keep everything in memory.
        migrations: the migrations to the present tables.
        busy_s: see `BUSY_S`.

    Raises:
        StoreError: by every method, when the file cannot be used; by the constructor also when a
            newer version of Cleave wrote it.
    """

    def __init__(
        self,
        path: Path | None,
        migrations: Sequence[Migration] = MIGRATIONS,
        busy_s: float = BUSY_S,
    ) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            if path is not None:  # made here, so that it is readable to its owner alone
                open_to_change(path, _SQLITE, 0o600).close()
            self._db = self._connect(busy_s)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A kill loses nothing, a power failure perhaps the last moments: a device whose
            # credential is among them asks for another code.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(migrations)
            # Reading never waits for a write that waits for the disk or for another process.
            alone = path is None
            self._reader = self._db if alone else self._connect(busy_s)
            self._reading = self._lock if alone else threading.Lock()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from None

    def _connect(self, busy_s: float) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path or ":memory:",
            timeout=busy_s,
            isolation_level=None,  # transactions are begun below, in the open
            check_same_thread=False,  # the locks see to that
        )

    def _failed(self, error: Exception) -> StoreError:
        return StoreError(
            f"the server's store {self._path or 'in memory'} cannot be used ({error}); "
            f"mend it, or choose another folder with --data"
        )

    def close(self) -> None:
        """Write everything to the file and close it."""
        with self._reading:
            self._reader.close()
        with self._lock:
            self._db.close()

    def _migrate(self, migrations: Sequence[Migration]) -> None:
        with self._writing() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > len(migrations):
                raise StoreError(
                    f"the server's store {self._path} has version {version}, and this Cleave knows "
                    f"versions up to {len(migrations)}; install the newer Cleave that wrote it, or "
                    f"choose another folder with --data"
                )
            for migration in migrations[version:]:
                for statement in migration:
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {len(migrations)}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction: all of it is written, or nothing."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._failed(error) from None

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading:
            try:
                return self._reader.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise self._failed(error) from None

    # --- facts ---

    def fact(self, name: str, otherwise: str) -> str:
        """Return the value kept under a name; if there is none yet, keep and return `otherwise`."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            (value,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    # --- devices ---

    def devices(self) -> list[DeviceRecord]:
        """Return every device, in the order of joining."""
        return [_device(row) for row in self._rows(f"{_DEVICE} ORDER BY id")]

    def device(self, id: int) -> DeviceRecord | None:
        """Return the device with this id; None if there is none."""
        found = self._rows(f"{_DEVICE} WHERE id = ?", id)
        return _device(found[0]) if found else None

    def find_device(self, name: str) -> DeviceRecord | None:
        """Return the device with this name, or with this id as text; None if there is none."""
        found = self._rows(f"{_DEVICE} WHERE name = ?1 OR id = ?1 ORDER BY name != ?1", name)
        return _device(found[0]) if found else None

    def device_of(self, credential_hash: bytes) -> DeviceRecord | None:
        """Return the device whose credential has this hash; None if there is none."""
        found = self._rows(
            f"{_DEVICE} WHERE id = (SELECT device FROM credentials WHERE hash = ?)", credential_hash
        )
        return _device(found[0]) if found else None

    def arrived(self, device: int, now_s: float) -> None:
        """Record that a device began a session."""
        with self._writing() as db:
            db.execute(
                "UPDATE devices SET sessions = sessions + 1, seen_s = ? WHERE id = ?",
                (now_s, device),
            )

    def departed(self, device: int, absence: Departure, reason: str, now_s: float) -> None:
        """Record that a device's session ended."""
        with self._writing() as db:
            db.execute(
                "UPDATE devices SET absence = ?, absence_reason = ?, seen_s = ?, "
                "losses = losses + ? WHERE id = ?",
                (absence.value, reason, now_s, absence is Departure.LOST, device),
            )

    def stand(self, device: int, standing: AccessStatus, reason: str, now_s: float) -> None:
        """Change what a device may do. Its faults before an admission no longer count."""
        with self._writing() as db:
            db.execute(
                "UPDATE devices SET standing = ?, reason = ?, released_s = ? WHERE id = ?",
                (
                    standing.value,
                    reason,
                    now_s if standing is AccessStatus.ADMITTED else 0.0,
                    device,
                ),
            )

    def mark_own(self, device: int, own: bool) -> None:
        """Record whether a device is the operator's own."""
        with self._writing() as db:
            db.execute("UPDATE devices SET own = ? WHERE id = ?", (own, device))

    def credit(self, done: Mapping[int, DeviceCounters], now_s: float) -> None:
        """Add what devices did, by their ids, in one transaction."""
        sets = ", ".join(f"{name} = {name} + ?" for name in COUNTER_FIELDS)
        with self._writing() as db:
            db.executemany(
                f"UPDATE devices SET {sets}, seen_s = MAX(seen_s, ?) WHERE id = ?",
                [
                    (*(getattr(part, name) for name in COUNTER_FIELDS), now_s, device)
                    for device, part in done.items()
                ],
            )

    def conducted(self, device: int, conduct: Conduct) -> None:
        """Record how a device works."""
        with self._writing() as db:
            db.execute(
                "UPDATE devices SET setbacks = ?, failure = ?, slowness = ?, late_s = ? "
                "WHERE id = ?",
                (conduct.setbacks, conduct.failure, conduct.slowness, conduct.late_s, device),
            )

    def fault(self, device: int, fault: str, penalty: float, now_s: float) -> None:
        """Record a wrong result of a device, and the points that it costs."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO faults (device, at_s, fault, penalty) VALUES (?, ?, ?, ?)",
                (device, now_s, fault, penalty),
            )

    def faults_since(self, device: int, since_s: float) -> list[tuple[float, float]]:
        """Return (Unix time, points) of a device's wrong results since then and its release."""
        found = self._rows(
            "SELECT at_s, penalty FROM faults JOIN devices ON devices.id = device "
            "WHERE device = ? AND at_s >= ? AND at_s > released_s",
            device, since_s,
        )  # fmt: skip
        return [(float(at_s), float(penalty)) for at_s, penalty in found]

    # --- join codes ---

    def add_code(
        self, hash: bytes, uses: int, expires_s: float, now_s: float, *, own: bool = False
    ) -> CodeRecord:
        """Keep a new join code, and delete those that expired long ago."""
        with self._writing() as db:
            db.execute("DELETE FROM codes WHERE expires_s < ?", (now_s - CODES_KEPT_S,))
            added = db.execute(
                "INSERT INTO codes (hash, expires_s, uses, made_s, own) VALUES (?, ?, ?, ?, ?)",
                (hash, expires_s, uses, now_s, own),
            )
            return CodeRecord(int(added.lastrowid or 0), expires_s, uses, 0, now_s, own=own)

    def code(self, hash: bytes) -> CodeRecord | None:
        """Return the join code with this hash; None if there is none."""
        found = self._rows(f"SELECT {_CODE} FROM codes WHERE hash = ?", hash)
        return _code(found[0]) if found else None

    def codes(self) -> list[CodeRecord]:
        """Return every join code that is still stored, oldest first."""
        return [_code(row) for row in self._rows(f"SELECT {_CODE} FROM codes ORDER BY id")]

    def void(self, code: int, reason: str) -> None:
        """Make a join code void: no device may use it any more."""
        with self._writing() as db:
            db.execute("UPDATE codes SET void = ? WHERE id = ?", (reason, code))

    def redeem(
        self, code: int, name: str, credential_hash: bytes, now_s: float
    ) -> DeviceRecord | None:
        """Use a join code: add a device with this credential. Return None if it is not open.

        The device is the operator's own if the code is for those.
        """
        with self._writing() as db:
            taken = db.execute(
                "UPDATE codes SET used = used + 1 "
                "WHERE id = ? AND used < uses AND expires_s > ? AND void = ''",
                (code, now_s),
            )
            if taken.rowcount == 0:
                return None
            added = db.execute(
                "INSERT INTO devices (name, standing, paired_s, seen_s, code, own) "
                "SELECT ?, ?, ?, ?, id, own FROM codes WHERE id = ?",
                (_free_name(db, name), AccessStatus.ADMITTED.value, now_s, now_s, code),
            )
            device = int(added.lastrowid or 0)
            db.execute("INSERT INTO credentials VALUES (?, ?)", (credential_hash, device))
        return self.device(device)

    # --- jobs ---

    def jobs(self) -> list[StoredJob]:
        """Return every job, oldest first."""
        found = self._rows(f"SELECT {_JOB} FROM jobs ORDER BY number")
        return [StoredJob(*row) for row in found]

    def save_job(self, job: StoredJob) -> None:
        """Keep a job's present state."""
        marks = ", ".join("?" * len(StoredJob.__slots__))
        values = [getattr(job, name) for name in StoredJob.__slots__]
        with self._writing() as db:
            db.execute(f"INSERT OR REPLACE INTO jobs ({_JOB}) VALUES ({marks})", values)


_DEVICE: Final = (
    "SELECT id, name, standing, reason, paired_s, seen_s, absence, absence_reason, sessions, "
    "losses, (SELECT COUNT(*) FROM faults WHERE device = devices.id), code, "
    f"{', '.join(COUNTER_FIELDS)}, setbacks, failure, slowness, late_s, own FROM devices"
)
_BEFORE_DONE: Final = DeviceRecord.__slots__.index("done")
_BEFORE_CONDUCT: Final = _BEFORE_DONE + len(COUNTER_FIELDS)
_CODE: Final = ", ".join(CodeRecord.__slots__)
_JOB: Final = ", ".join(StoredJob.__slots__)


def _device(row: Sequence[Any]) -> DeviceRecord:
    values = dict(zip(DeviceRecord.__slots__, row[:_BEFORE_DONE], strict=False))
    values["standing"] = AccessStatus(values["standing"])
    values["absence"] = Departure(values["absence"])
    done = DeviceCounters(*row[_BEFORE_DONE:_BEFORE_CONDUCT])
    *conduct, own = row[_BEFORE_CONDUCT:]
    return DeviceRecord(**values, done=done, conduct=Conduct(*conduct), own=bool(own))


def _code(row: Sequence[Any]) -> CodeRecord:
    values = dict(zip(CodeRecord.__slots__, row, strict=True))
    return CodeRecord(**{**values, "own": bool(values["own"])})


def _free_name(db: sqlite3.Connection, wanted: str) -> str:
    """Return this name, or, if another device has it, this name with a number."""
    # A name of digits alone would be taken for an id.
    base = wanted if wanted and not wanted.isdigit() else f"device {wanted}".strip()
    # Those with numbers are between `base` and `base.`; counting them saves trying each.
    (number,) = db.execute(
        "SELECT COUNT(*) FROM devices WHERE name >= ?1 AND name < ?1 || '.'", (base,)
    ).fetchone()
    name = base
    while db.execute("SELECT 1 FROM devices WHERE name = ?", (name,)).fetchone():
        number += 1
        name = f"{base}-{number}"
    return name
