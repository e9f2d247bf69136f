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
            energy_j REAL NOT NULL DEFAULT 0
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
            used INTEGER NOT NULL DEFAULT 0
        ) STRICT""",
        """CREATE TABLE faults (
            id INTEGER PRIMARY KEY,
            device INTEGER NOT NULL REFERENCES devices (id) ON DELETE CASCADE,
            at_s REAL NOT NULL,
            fault TEXT NOT NULL
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
            run_folder TEXT NOT NULL DEFAULT ''
        ) STRICT""",
    ),
    (  # Older rows lack the join code of a device and the creation time of a code.
        "ALTER TABLE devices ADD COLUMN code INTEGER",
        "ALTER TABLE codes ADD COLUMN made_s REAL NOT NULL DEFAULT 0",
        "ALTER TABLE codes ADD COLUMN void TEXT NOT NULL DEFAULT ''",
    ),
    (
        "ALTER TABLE faults ADD COLUMN penalty REAL NOT NULL DEFAULT 1",
        # `failures`: number of runs in which the device failed. `failure`: reason for the last
        # failure. `setbacks`: how often the device was set aside since its last successful run.
        # `slowness`: factor by which its tasks take longer than expected. `late_s`: delay of its
        # responses, in seconds.
        "ALTER TABLE devices ADD COLUMN failures INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE devices ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE devices ADD COLUMN setbacks INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE devices ADD COLUMN slowness REAL NOT NULL DEFAULT 1",
        "ALTER TABLE devices ADD COLUMN late_s REAL NOT NULL DEFAULT 0",
    ),
    (  # `own`: whether the operator owns a device, or the devices that join with a code.
        "ALTER TABLE codes ADD COLUMN own INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE devices ADD COLUMN own INTEGER NOT NULL DEFAULT 0",
    ),
    (  # `request`: submitted request in JSON. `steps_in_all`: total steps. Unknown in older rows.
        "ALTER TABLE jobs ADD COLUMN request TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE jobs ADD COLUMN steps_in_all INTEGER NOT NULL DEFAULT 0",
    ),
    (  # `flops`: contribution of all stored devices in an hour. `hour`: Unix time divided by 3600.
        "CREATE TABLE hours (hour INTEGER PRIMARY KEY, flops REAL NOT NULL) STRICT",
    ),
)
"""Migration N converts a database of version N - 1 to version N.

Never change a migration. Append a new migration instead.
"""
