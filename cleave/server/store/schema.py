"""The schema of the store's database, as a sequence of migrations."""

from __future__ import annotations

from typing import Final, TypeAlias

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
)
"""The first migration creates a database of version `FIRST_VERSION`, and each other one converts a
database of the version before.

Never change a migration once it is released. Append a new migration instead.
"""

FIRST_VERSION: Final = 6  # no release had versions 1 to 5
