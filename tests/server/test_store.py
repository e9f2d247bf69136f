"""The server's store: what is kept is there again, whatever happens."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.sessions.admission import Behavior, Measurement
from cleave.server.store.store import (
    CODES_KEPT_S,
    FIRST_VERSION,
    HOURS_KEPT,
    MIGRATIONS,
    AccessStatus,
    Departure,
    DeviceRecord,
    Store,
    StoredJob,
    StoreError,
)

NOW_S = 1e9
LATEST = FIRST_VERSION + len(MIGRATIONS) - 1
JOB = StoredJob(3, "opt-nano", "running", "", NOW_S, NOW_S + 1, None, 5, 2.5, "runs/x")


def add_device(store: Store, name: str = "phone", credential: bytes = b"c") -> DeviceRecord:
    code = store.add_code(b"code of " + credential, 1, NOW_S + 600, NOW_S)
    device = store.redeem(code.id, name, credential, NOW_S)
    assert device is not None
    return device


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store(path)) as store:
        yield store


def test_everything_is_there_again(path: Path) -> None:
    store = Store(path)
    device = add_device(store)
    store.arrived(device.id, NOW_S + 1)
    store.credit({device.id: DeviceCounters(2, 1e9, 30, 40, 0.5, 6.0)}, NOW_S + 2)
    store.fault(device.id, "column 3", 1.0, NOW_S + 3)
    store.stand(device.id, AccessStatus.QUARANTINED, "lies", NOW_S + 4)
    store.departed(device.id, Departure.LOST, "gone", NOW_S + 5)
    behavior = Behavior(3, "no memory", 2.5, 5.0)
    store.record_behavior(device.id, behavior)
    measured = Measurement("192.0.2.1", 1e7, 2e6, 0.01, 3e9, 4e9)
    for at_s in (NOW_S, NOW_S + 4):
        store.record_measurement(device.id, measured, at_s)
    store.save_job(JOB)
    server = store.fact("server", "A")
    store.close()
    again = Store(path)
    assert again.fact("server", "B") == server == "A"
    assert again.jobs() == [JOB]
    assert again.measurement(device.id, NOW_S + 4) == measured
    assert again.measurement(device.id, NOW_S + 5) is None
    found = again.device_of(b"c")
    assert found == DeviceRecord(
        device.id, "phone", AccessStatus.QUARANTINED, "lies", NOW_S, NOW_S + 5, Departure.LOST,
        "gone", 1, 1, 1, device.code, DeviceCounters(2, 1e9, 30, 40, 0.5, 6.0),
        behavior,
    )  # fmt: skip
    assert again.devices() == [found]
    assert again.device_of(b"other") is None
    again.close()


def test_the_work_of_all_devices_is_kept_by_hour_for_a_day(store: Store) -> None:
    first, second = (add_device(store, "d", bytes([i])).id for i in range(2))
    hour = int(NOW_S // 3600)
    did = DeviceCounters(flops=10.0)
    store.credit({first: did, second: did}, NOW_S)
    store.credit({second: did}, NOW_S)
    store.credit({first: did}, NOW_S + 3600)
    assert store.flops_by_hour() == [(hour, 30.0), (hour + 1, 10.0)]
    store.credit({first: did}, NOW_S + HOURS_KEPT * 3600)
    assert store.flops_by_hour() == [(hour + 1, 10.0), (hour + HOURS_KEPT, 10.0)]


def test_only_its_owner_can_read_it(path: Path) -> None:
    store = Store(path)
    add_device(store)
    for file in path.parent.glob("store.db*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    store.close()


def test_names_are_unique_and_found(store: Store) -> None:
    devices = [add_device(store, n, bytes([i])) for i, n in enumerate(["a", "a", "7", "", "a"])]
    assert [d.name for d in devices] == ["a", "a-2", "device 7", "device", "a-3"]
    for device in devices:
        assert store.find_device(device.name) == store.find_device(str(device.id)) == device
    assert store.find_device("nobody") is None


def test_a_code_is_used_as_often_as_it_is_for(store: Store) -> None:
    code = store.add_code(b"x", 2, NOW_S + 600, NOW_S)
    names = [store.redeem(code.id, "d", bytes([i]), NOW_S + 1) for i in range(3)]
    assert [d is not None for d in names] == [True, True, False]
    found = store.code(b"x")
    assert found is not None
    assert (found.uses, found.used) == (2, 2)
    late = store.add_code(b"y", 1, NOW_S + 600, NOW_S)
    assert store.redeem(late.id, "d", b"z", NOW_S + 600) is None
    store.add_code(b"later", 1, NOW_S + CODES_KEPT_S + 1000, NOW_S + CODES_KEPT_S + 601)
    assert store.code(b"y") is None


def test_reading_does_not_wait_for_writing(path: Path) -> None:
    """Another process holds the file for writing: what is known can be asked all the same."""
    store = Store(path, busy_s=0.01)
    device = add_device(store)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked"):
        store.fault(device.id, "wrong", 1.0, NOW_S)
    assert store.device(device.id) == device
    other.execute("COMMIT")
    other.close()
    store.fault(device.id, "wrong", 1.0, NOW_S)
    store.close()


# --- versions ---


def test_a_store_is_brought_up_to_date(path: Path) -> None:
    old = Store(path)
    add_device(old)
    old.close()
    newer = (*MIGRATIONS, ("ALTER TABLE devices ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'",))
    store = Store(path, newer)
    assert store.devices()[0].name == "phone"
    store.close()
    Store(path, newer).close()  # nothing left to do
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT colour FROM devices").fetchall() == [("red",)]
        assert db.execute("PRAGMA user_version").fetchone() == (LATEST + 1,)


def test_a_step_that_fails_changes_nothing(path: Path) -> None:
    Store(path).close()
    broken = (*MIGRATIONS, ("ALTER TABLE devices ADD COLUMN x TEXT", "ALTER TABLE nowhere"))
    with pytest.raises(StoreError, match="cannot be used"):
        Store(path, broken)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (LATEST,)
        columns = [row[1] for row in db.execute("PRAGMA table_info(devices)")]
    assert "x" not in columns


@pytest.mark.parametrize("version", [1, LATEST + 1])
def test_a_store_of_another_version_is_left_alone(path: Path, version: int) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(
        StoreError, match=rf"version {version}, .*install the Cleave version that wrote"
    ):
        Store(path)


def test_what_is_no_database_is_said(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"store\.db cannot be used"):
        Store(path)
    with pytest.raises(StoreError, match="cannot be used"):
        Store(path.parent / "no such folder" / "x.db")


# --- several at once, and ends in the middle ---


def test_two_connections_and_many_threads(path: Path) -> None:
    first, second = Store(path), Store(path)
    device = add_device(first)

    def work(store: Store) -> None:
        for _ in range(25):
            store.credit({device.id: DeviceCounters(blocks=1)}, NOW_S)
            store.fault(device.id, "wrong", 1.0, NOW_S)

    threads = [threading.Thread(target=work, args=(s,)) for s in (first, second, first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = second.device(device.id)
    assert found is not None
    assert (found.done.blocks, found.faults) == (100, 100)
    first.close()
    second.close()


def test_a_code_goes_to_one_of_many_at_once(path: Path) -> None:
    stores = [Store(path) for _ in range(4)]
    code = stores[0].add_code(b"x", 1, NOW_S + 1, NOW_S)
    got: list[DeviceRecord | None] = []

    def take(number: int) -> None:
        got.append(stores[number].redeem(code.id, "d", bytes([number]), NOW_S))

    threads = [threading.Thread(target=take, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(device is not None for device in got) == 1
    assert len(stores[0].devices()) == 1
    for store in stores:
        store.close()


_WRITES_FOR_EVER = """
import sys
from pathlib import Path
from itertools import count
from cleave.server.store.store import Store
store = Store(Path(sys.argv[1]))
for number in count(1):
    store.fault(1, "wrong", 1.0, float(number))
    print(number, flush=True)
"""


def test_being_killed_loses_nothing_that_was_written(path: Path) -> None:
    store = Store(path)
    device = add_device(store)
    store.close()
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(50):
        written = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    written += sum(1 for _ in process.stdout)
    process.stdout.close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store = Store(path)
    found = store.device(device.id)
    assert found is not None
    assert found.faults in (written, written + 1)  # one may have been written and not yet said
    store.close()
