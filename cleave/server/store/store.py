"""The server's SQLite database of devices, credentials, join codes, wrong results and jobs.

Writes are short transactions that survive if the process is killed (WAL mode). A power failure may
lose the latest transactions, but the database stays consistent.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeAlias

from cleave.errors import CleaveError
from cleave.files import open_to_change
from cleave.protocol.device_counters import COUNTER_FIELDS, DeviceCounters
from cleave.scheduler.sessions.admission import Behavior, Measurement

Migration: TypeAlias = tuple[str, ...]
"""The SQL statements of one migration, which run in one transaction."""

MIGRATIONS: Final[tuple[Migration, ...]] = (
    (
        """CREATE TABLE facts (
            name TEXT PRIMARY KEY,
            value TEXT NOT NULL
        ) STRICT""",
        """CREATE TABLE devices (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL UNIQUE,
            standing TEXT NOT NULL,
            reason TEXT NOT NULL DEFAULT '',
            paired_s REAL NOT NULL,
            seen_s REAL NOT NULL,
            released_s REAL NOT NULL DEFAULT 0,
            absence TEXT NOT NULL DEFAULT 'away',
            absence_reason TEXT NOT NULL DEFAULT '',
            sessions INTEGER NOT NULL DEFAULT 0,
            losses INTEGER NOT NULL DEFAULT 0,
            blocks INTEGER NOT NULL DEFAULT 0,
            flops REAL NOT NULL DEFAULT 0,
            downlink_bytes INTEGER NOT NULL DEFAULT 0,
            uplink_bytes INTEGER NOT NULL DEFAULT 0,
            compute_s REAL NOT NULL DEFAULT 0,
            energy_j REAL NOT NULL DEFAULT 0,
            code INTEGER, -- the join code of the device
            failures INTEGER NOT NULL DEFAULT 0, -- number of runs in which the device failed
            failure TEXT NOT NULL DEFAULT '', -- reason for the last failure
            setbacks INTEGER NOT NULL DEFAULT 0, -- times set aside since the last successful run
            slowness REAL NOT NULL DEFAULT 1, -- factor by which tasks take longer than expected
            late_s REAL NOT NULL DEFAULT 0, -- delay of responses
            own INTEGER NOT NULL DEFAULT 0 -- whether the operator owns the device
        ) STRICT""",
        """CREATE TABLE credentials (
            hash BLOB PRIMARY KEY,
            device INTEGER NOT NULL REFERENCES devices (id) ON DELETE CASCADE
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE codes (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            hash BLOB NOT NULL UNIQUE,
            expires_s REAL NOT NULL,
            uses INTEGER NOT NULL,
            used INTEGER NOT NULL DEFAULT 0,
            made_s REAL NOT NULL DEFAULT 0,
            void TEXT NOT NULL DEFAULT '',
            own INTEGER NOT NULL DEFAULT 0 -- whether the operator owns devices that join with it
        ) STRICT""",
        """CREATE TABLE faults (
            id INTEGER PRIMARY KEY,
            device INTEGER NOT NULL REFERENCES devices (id) ON DELETE CASCADE,
            at_s REAL NOT NULL,
            fault TEXT NOT NULL,
            penalty REAL NOT NULL DEFAULT 1
        ) STRICT""",
        "CREATE INDEX faults_of_a_device ON faults (device, at_s)",
        """CREATE TABLE jobs (
            number INTEGER PRIMARY KEY,
            model TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT NOT NULL DEFAULT '',
            submitted_s REAL NOT NULL,
            started_s REAL,
            ended_s REAL,
            steps INTEGER NOT NULL DEFAULT 0,
            loss REAL,
            run_folder TEXT NOT NULL DEFAULT '',
            request TEXT NOT NULL DEFAULT '', -- in JSON
            steps_in_all INTEGER NOT NULL DEFAULT 0 -- 0 if unknown
        ) STRICT""",
        # Work of all stored devices in an hour. `hour` is Unix time divided by 3600.
        "CREATE TABLE hours (hour INTEGER PRIMARY KEY, flops REAL NOT NULL) STRICT",
    ),
    (
        # The latest measurement of each device's link and speed; see `Measurement`.
        """CREATE TABLE measurements (
            device INTEGER PRIMARY KEY REFERENCES devices (id) ON DELETE CASCADE,
            at_s REAL NOT NULL,
            address TEXT NOT NULL,
            downlink_bytes_per_s REAL NOT NULL,
            uplink_bytes_per_s REAL NOT NULL,
            latency_s REAL NOT NULL,
            flops_per_s REAL NOT NULL,
            claimed_flops_per_s REAL NOT NULL
        ) STRICT""",
    ),
)
"""The first migration creates a database of version `FIRST_VERSION`. Each later migration converts
a database of the previous version.

Never change a migration once it is released. Append a new migration instead.
"""

FIRST_VERSION: Final = 6  # no release had versions 1 to 5

BUSY_S: Final = 5.0  # maximum time in seconds that a write waits for another process's write

CODES_KEPT_S: Final = 30 * 86400.0
"""Minimum time that expired join codes remain stored, so that late devices get the right error."""

HOURS_KEPT: Final = 25
"""Number of hours for which contributions remain stored: the length of the longest local day."""

_SQLITE: Final = b"SQLite format 3\0"


class AccessStatus(Enum):
    """Permission of a device to join. Users see the enum values."""

    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    REVOKED = "revoked"


class Departure(Enum):
    """How a device's last session ended. Users see the enum values."""

    AWAY = "away"
    LOST = "lost"


class StoreError(CleaveError):
    """Raised when the store's database cannot be read or written."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """The stored data of a device, over all its sessions. Times are Unix times."""

    id: int
    name: str  # unique
    standing: AccessStatus
    reason: str  # why the device is quarantined or revoked; empty if not stated
    paired_s: float  # time when the device first joined
    seen_s: float  # time when the server last received from the device
    absence: Departure
    absence_reason: str
    sessions: int
    losses: int  # sessions in which the connection was lost
    faults: int  # wrong results
    code: int | None  # ID of the device's join code; None if unknown
    done: DeviceCounters
    behavior: Behavior = field(default_factory=Behavior)  # in its last session
    own: bool = False  # whether the operator owns the device, so that it may train whole layers


@dataclass(frozen=True, slots=True)
class CodeRecord:
    """The stored data of a join code, without the code itself. Times are Unix times."""

    id: int
    expires_s: float
    uses: int  # number of devices that may join
    used: int  # number of devices that have joined
    made_s: float = 0.0  # 0 if unknown
    void: str = ""  # why the code was voided; empty if it is not void
    own: bool = False  # whether the operator owns the devices that join

    def is_open(self, now_s: float) -> bool:
        """Return whether a device may join with the code at Unix time `now_s`."""
        return self.state(now_s) == "open"

    def state(self, now_s: float) -> str:
        """Return the code's state for users: open, void, used up or expired."""
        if self.void:
            return "void"
        if self.used >= self.uses:
            return "used up"
        return "open" if self.expires_s > now_s else "expired"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """The stored data of a training job. Times are Unix times."""

    number: int
    model: str
    state: str  # a value of `cleave.server.jobs.jobs.JobState`, or `interrupted`
    reason: str  # why the job failed or was interrupted, or what it waits for; may be empty
    submitted_s: float
    started_s: float | None = None  # last start
    ended_s: float | None = None  # end or pause
    steps: int = 0  # completed optimizer steps, including those before a resumption
    loss: float | None = None  # of the last completed step; None if unknown or not finite
    run_folder: str = ""  # empty if unknown
    request: str = ""  # as JSON; empty if unknown
    steps_in_all: int = 0  # 0 if unknown, or if the job does not train


class Store:
    """The server's database. Thread-safe: only one thread writes at a time.

    Every method raises StoreError if the database cannot be read or written.

    Args:
        path: path of the database; None for a database in memory.
        migrations: migrations that create the current schema.
        busy_s: maximum time in seconds that a write waits for another process's write.

    Raises:
        StoreError: if the database cannot be used, or if another version of Cleave created it.
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
            if path is not None:  # create the file so that only its owner can read it
                open_to_change(path, _SQLITE, 0o600).close()
            self._db = self._connect(busy_s)
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.execute("PRAGMA journal_mode = WAL")
            # Killing the process loses nothing. A power failure may lose the latest transactions. A
            # device whose credential is lost this way needs another join code.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate(migrations)
            # Reads use a second connection, so that no read waits for a slow write.
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
            f"repair it, or choose another folder with --data"
        )

    def close(self) -> None:
        """Close the database connections."""
        with self._reading:
            self._reader.close()
        with self._lock:
            self._db.close()

    def _migrate(self, migrations: Sequence[Migration]) -> None:
        with self._writing() as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            latest = FIRST_VERSION + len(migrations) - 1
            if version and not FIRST_VERSION <= version <= latest:
                raise StoreError(
                    f"the server's store {self._path} has version {version}, but this Cleave "
                    f"supports {FIRST_VERSION} to {latest}; install the Cleave version that wrote "
                    "it, or choose another folder with --data"
                )
            for migration in migrations[version and version - FIRST_VERSION + 1 :]:
                for statement in migration:
                    db.execute(statement)
            db.execute(f"PRAGMA user_version = {latest}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run the `with` block as one write transaction; roll it back on an exception."""
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

    def _write(self, sql: str, values: Sequence[Any]) -> None:
        with self._writing() as db:
            db.execute(sql, values)

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading:
            try:
                return self._reader.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise self._failed(error) from None

    # --- facts ---

    def fact(self, name: str, otherwise: str) -> str:
        """Return the value stored under `name`. If it is missing, store and return `otherwise`."""
        with self._writing() as db:
            db.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, otherwise))
            (value,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return str(value)

    # --- devices ---

    def devices(self) -> list[DeviceRecord]:
        """Return all stored devices, in the order in which they first joined."""
        return [_device(row) for row in self._rows(f"{_DEVICE} ORDER BY id")]

    def device(self, id: int) -> DeviceRecord | None:
        """Return the device with identity `id`; None if unknown."""
        return self._device_where("id = ?", id)

    def find_device(self, name: str) -> DeviceRecord | None:
        """Return the device whose name, or identity as a string, is `name`; None if unknown."""
        return self._device_where("name = ?1 OR id = ?1 ORDER BY name != ?1", name)

    def device_of(self, credential_hash: bytes) -> DeviceRecord | None:
        """Return the device with this credential hash; None if unknown."""
        with_credential = "id = (SELECT device FROM credentials WHERE hash = ?)"
        return self._device_where(with_credential, credential_hash)

    def _device_where(self, condition: str, value: object) -> DeviceRecord | None:
        found = self._rows(f"{_DEVICE} WHERE {condition}", value)
        return _device(found[0]) if found else None

    def arrived(self, device: int, now_s: float) -> None:
        """Record that a device began a session."""
        self._write(
            "UPDATE devices SET sessions = sessions + 1, seen_s = ? WHERE id = ?", (now_s, device)
        )

    def departed(self, device: int, absence: Departure, reason: str, now_s: float) -> None:
        """Record that a device's session ended, how it ended, and why."""
        self._write(
            "UPDATE devices SET absence = ?, absence_reason = ?, seen_s = ?, "
            "losses = losses + ? WHERE id = ?",
            (absence.value, reason, now_s, absence is Departure.LOST, device),
        )

    def stand(self, device: int, standing: AccessStatus, reason: str, now_s: float) -> None:
        """Set a device's permission. On admission, ignore its wrong results up to `now_s`."""
        self._write(
            "UPDATE devices SET standing = ?, reason = ?, released_s = ? WHERE id = ?",
            (standing.value, reason, now_s if standing is AccessStatus.ADMITTED else 0.0, device),
        )

    def mark_own(self, device: int, own: bool) -> None:
        """Record whether the operator owns a device."""
        self._write("UPDATE devices SET own = ? WHERE id = ?", (own, device))

    def credit(self, done: Mapping[int, DeviceCounters], now_s: float) -> None:
        """Add each device's contribution to the totals of the device and of the current hour."""
        hour, flops = int(now_s // 3600), sum(part.flops for part in done.values())
        sets = ", ".join(f"{name} = {name} + ?" for name in COUNTER_FIELDS)
        with self._writing() as db:
            db.executemany(
                f"UPDATE devices SET {sets}, seen_s = MAX(seen_s, ?) WHERE id = ?",
                [
                    (*(getattr(part, name) for name in COUNTER_FIELDS), now_s, device)
                    for device, part in done.items()
                ],
            )
            db.execute("DELETE FROM hours WHERE hour <= ?", (hour - HOURS_KEPT,))
            db.execute(
                "INSERT INTO hours VALUES (?, ?) "
                "ON CONFLICT DO UPDATE SET flops = flops + excluded.flops",
                (hour, flops),
            )

    def flops_by_hour(self) -> list[tuple[int, float]]:
        """Return the stored devices' contribution in each of the last hours.

        Returns:
            (Unix time divided by 3600, FLOPs) pairs, oldest first.
        """
        found = self._rows("SELECT hour, flops FROM hours ORDER BY hour")
        return [(int(hour), float(flops)) for hour, flops in found]

    def record_behavior(self, device: int, behavior: Behavior) -> None:
        """Record a device's behavior in its last session."""
        self._write(
            "UPDATE devices SET setbacks = ?, failure = ?, slowness = ?, late_s = ? WHERE id = ?",
            (behavior.setbacks, behavior.failure, behavior.slowness, behavior.late_s, device),
        )

    def record_measurement(self, device: int, measured: Measurement, now_s: float) -> None:
        """Record a device's measured link and speed, which replace its previous measurement."""
        self._write(
            "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (device, now_s, *astuple(measured)),
        )

    def measurement(self, device: int, since_s: float) -> Measurement | None:
        """Return a device's link and speed as measured since `since_s`; None if not measured."""
        columns = ", ".join(Measurement.__slots__)
        found = self._rows(
            f"SELECT {columns} FROM measurements WHERE device = ? AND at_s >= ?", device, since_s
        )
        return Measurement(*found[0]) if found else None

    def fault(self, device: int, fault: str, penalty: float, now_s: float) -> None:
        """Record a device's wrong result, and the penalty points for the result."""
        self._write(
            "INSERT INTO faults (device, at_s, fault, penalty) VALUES (?, ?, ?, ?)",
            (device, now_s, fault, penalty),
        )

    def faults_since(self, device: int, since_s: float) -> list[tuple[float, float]]:
        """Return a (Unix time, penalty points) pair for each wrong result since `since_s`.

        Wrong results before the device's last release from quarantine do not count.
        """
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
        """Store a new join code and delete codes that expired more than `CODES_KEPT_S` ago."""
        with self._writing() as db:
            db.execute("DELETE FROM codes WHERE expires_s < ?", (now_s - CODES_KEPT_S,))
            added = db.execute(
                "INSERT INTO codes (hash, expires_s, uses, made_s, own) VALUES (?, ?, ?, ?, ?)",
                (hash, expires_s, uses, now_s, own),
            )
            return CodeRecord(int(added.lastrowid or 0), expires_s, uses, 0, now_s, own=own)

    def code(self, hash: bytes) -> CodeRecord | None:
        """Return the record of the join code with this hash; None if unknown."""
        found = self._rows(f"SELECT {_CODE} FROM codes WHERE hash = ?", hash)
        return _code(found[0]) if found else None

    def codes(self) -> list[CodeRecord]:
        """Return the records of all stored join codes, oldest first."""
        return [_code(row) for row in self._rows(f"SELECT {_CODE} FROM codes ORDER BY id")]

    def void(self, code: int, reason: str) -> None:
        """Void a join code, so that no further device can join with it."""
        self._write("UPDATE codes SET void = ? WHERE id = ?", (reason, code))

    def redeem(
        self, code: int, name: str, credential_hash: bytes, now_s: float
    ) -> DeviceRecord | None:
        """Use a join code for a new device, and store and return the device.

        Return None if the code cannot be used.
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
        """Return all stored jobs, oldest first."""
        found = self._rows(f"SELECT {_JOB} FROM jobs ORDER BY number")
        return [StoredJob(*row) for row in found]

    def save_job(self, job: StoredJob) -> None:
        """Store a job, or replace the stored job with the same number."""
        marks = ", ".join("?" * len(StoredJob.__slots__))
        values = [getattr(job, name) for name in StoredJob.__slots__]
        self._write(f"INSERT OR REPLACE INTO jobs ({_JOB}) VALUES ({marks})", values)


_DEVICE: Final = (
    "SELECT id, name, standing, reason, paired_s, seen_s, absence, absence_reason, sessions, "
    "losses, (SELECT COUNT(*) FROM faults WHERE device = devices.id), code, "
    f"{', '.join(COUNTER_FIELDS)}, setbacks, failure, slowness, late_s, own FROM devices"
)
_BEFORE_DONE: Final = DeviceRecord.__slots__.index("done")
_BEFORE_BEHAVIOR: Final = _BEFORE_DONE + len(COUNTER_FIELDS)
_CODE: Final = ", ".join(CodeRecord.__slots__)
_JOB: Final = ", ".join(StoredJob.__slots__)


def _device(row: Sequence[Any]) -> DeviceRecord:
    values = dict(zip(DeviceRecord.__slots__, row[:_BEFORE_DONE], strict=False))
    values["standing"] = AccessStatus(values["standing"])
    values["absence"] = Departure(values["absence"])
    done = DeviceCounters(*row[_BEFORE_DONE:_BEFORE_BEHAVIOR])
    *behavior, own = row[_BEFORE_BEHAVIOR:]
    return DeviceRecord(**values, done=done, behavior=Behavior(*behavior), own=bool(own))


def _code(row: Sequence[Any]) -> CodeRecord:
    values = dict(zip(CodeRecord.__slots__, row, strict=True))
    return CodeRecord(**{**values, "own": bool(values["own"])})


def _free_name(db: sqlite3.Connection, wanted: str) -> str:
    """Return a unique device name: `wanted`, with a number appended if another device has it."""
    # A name of only digits could be mistaken for an identity.
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
