"""Stored data of the server in SQLite: devices, credentials, join codes, faults, jobs.

Writes are short transactions that survive a kill of the process (WAL). A power failure may lose the
last ones, but the file stays consistent.
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
"""Seconds that a write waits for another process to finish writing."""

CODES_KEPT_S: Final = 30 * 86400.0
"""Seconds that an expired join code is kept, so that a late attempt gets the reason."""

_SQLITE: Final = b"SQLite format 3\0"


class AccessStatus(Enum):
    """Permission of a device; users read the values."""

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
    """A device known to the server, across all its sessions.

    Attributes:
        id: identity of the device.
        name: unique name, for people.
        standing, reason: permission of the device, and the reason for a restriction.
        paired_s, seen_s: Unix time of its pairing, and of its last sign of life.
        absence, absence_reason: how and why its last session ended.
        sessions, losses: number of sessions it began, and of those that were lost.
        faults: number of wrong results in all its sessions.
        code: id of the join code that it used; None if unknown.
        done: its work so far.
        conduct: how it worked in its last session.
        own: whether it belongs to the operator, and may train whole layers.
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
        expires_s: expiry, as Unix time in seconds.
        uses: number of devices that may use it.
        used: number of devices that have used it.
        made_s: creation, as Unix time in seconds; 0 if unknown.
        void: reason why it was voided; empty if it was not.
        own: whether devices that join with it belong to the operator.
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
    """A stored training job.

    Attributes:
        state: a value of `cleave.server.jobs.jobs.JobState`, or `interrupted`.
        reason: why the job failed or was interrupted, or what it waits for; empty if none applies.
        submitted_s, started_s, ended_s: Unix time, in seconds.
        steps: optimizer steps done; for a resumed job, including the earlier ones.
        loss: loss of the last step; None if unknown or not finite.
        run_folder: folder of its results; empty if unknown.
        request: submitted request, as JSON; empty if unknown.
        steps_in_all: total steps; 0 if unknown, or if the job trains nothing.
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
    """The server's database. Any thread may call its methods; writes wait for one another.

    Args:
        path: path of the database; None to keep everything in memory.
        migrations: migrations that lead to the current tables.
        busy_s: see `BUSY_S`.

    Raises:
        StoreError: when the file cannot be used (any method), or a newer Cleave wrote it.
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
            if path is not None:  # created here, so that only its owner can read it
                open_to_change(path, _SQLITE, 0o600).close()
            self._db = self._connect(busy_s)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A kill loses nothing; a power failure may lose the last moments. A device that loses
            # its credential this way asks for another code.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(migrations)
            # Reads use a second connection, so that they never wait for a slow write.
            alone = path is None
            self._reader = self._db if alone else self._connect(busy_s)
            self._reading = self._lock if alone else threading.Lock()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from None

    def _connect(self, busy_s: float) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path or ":memory:",
            timeout=busy_s,
            isolation_level=None,  # transactions begin explicitly below
            check_same_thread=False,  # the locks allow only one thread at a time
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
        """Run the block as one transaction."""
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
        """Return the value stored under a name; if missing, store and return `otherwise`."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            (value,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    # --- devices ---

    def devices(self) -> list[DeviceRecord]:
        """Return all devices, in the order of joining."""
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
        """Change a device's permission. Its faults before an admission no longer count."""
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
        """Record whether a device belongs to the operator."""
        with self._writing() as db:
            db.execute("UPDATE devices SET own = ? WHERE id = ?", (own, device))

    def credit(self, done: Mapping[int, DeviceCounters], now_s: float) -> None:
        """Add the devices' work, by device id, in one transaction."""
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
        """Record a device's wrong result and its penalty points."""
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
        """Store a new join code, and delete codes that expired long ago."""
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
        """Return all stored join codes, oldest first."""
        return [_code(row) for row in self._rows(f"SELECT {_CODE} FROM codes ORDER BY id")]

    def void(self, code: int, reason: str) -> None:
        """Void a join code: no device can use it any more."""
        with self._writing() as db:
            db.execute("UPDATE codes SET void = ? WHERE id = ?", (reason, code))

    def redeem(
        self, code: int, name: str, credential_hash: bytes, now_s: float
    ) -> DeviceRecord | None:
        """Use a join code: add a device with this credential. Return None if the code is not open.

        The device belongs to the operator if the code is for own devices.
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
        """Return all jobs, oldest first."""
        found = self._rows(f"SELECT {_JOB} FROM jobs ORDER BY number")
        return [StoredJob(*row) for row in found]

    def save_job(self, job: StoredJob) -> None:
        """Store a job's current state."""
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
    """Return this name, with a number appended if another device has it."""
    # A name of only digits would be read as an id.
    base = wanted if wanted and not wanted.isdigit() else f"device {wanted}".strip()
    # Numbered names sort between `base` and `base.`; counting them avoids trying each one.
    (number,) = db.execute(
        "SELECT COUNT(*) FROM devices WHERE name >= ?1 AND name < ?1 || '.'", (base,)
    ).fetchone()
    name = base
    while db.execute("SELECT 1 FROM devices WHERE name = ?", (name,)).fetchone():
        number += 1
        name = f"{base}-{number}"
    return name
