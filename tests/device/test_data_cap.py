"""How much a machine may send and receive: what is counted over which span, and across runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.device.host.policy import DataCap, DataMeter, Span, parse_data_cap
from cleave.device.session import DeviceStatus
from cleave.errors import UsageError
from cleave.protocol.device_counters import DeviceCounters

NOON = datetime(2026, 3, 31, 12, 30)


@dataclass
class Session:
    status: DeviceStatus = field(default_factory=DeviceStatus)

    def move(self, down: int, up: int) -> None:
        more = DeviceCounters(downlink_bytes=down, uplink_bytes=up)
        self.status = DeviceStatus(1, self.status.done + more)


@dataclass
class Time:
    now: datetime = NOON
    seconds: float = 0.0

    def meter(self, cap: DataCap, path: Path) -> DataMeter:
        return DataMeter(cap, path, lambda: self.now, lambda: self.seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500MB/hour", DataCap(500_000_000, Span.HOUR)),
        ("5GB/day", DataCap(5_000_000_000, Span.DAY)),
        ("1.5 tb/Month", DataCap(1_500_000_000_000, Span.MONTH)),
        ("5GB", DataCap(5_000_000_000, Span.COMMAND)),
    ],
)
def test_caps(text: str, expected: DataCap) -> None:
    found = parse_data_cap(text)
    assert found == expected
    assert parse_data_cap(str(found)) == expected


@pytest.mark.parametrize("text", ["", "5", "5GB/week", "GB", "0GB", "0.1MB/day", "-1GB", "5GB/"])
def test_no_cap(text: str) -> None:
    with pytest.raises(UsageError, match="is no limit; write it like 500MB/hour"):
        parse_data_cap(text)


def test_both_directions_of_all_sessions_count(tmp_path: Path) -> None:
    time = Time()
    meter = time.meter(DataCap(10**9, Span.COMMAND), tmp_path / "data.json")
    first, second = Session(), Session()
    meter.follow(first)
    first.move(100, 20)
    assert meter.used() == 120
    first.move(1, 0)
    meter.follow(second)  # what the first one still did counts
    second.move(5, 5)
    assert meter.used() == 131
    assert not list(tmp_path.iterdir())  # nothing is kept for the next command


@pytest.mark.parametrize(
    ("span", "later"),
    [
        (Span.HOUR, timedelta(minutes=30)),
        (Span.DAY, timedelta(hours=12)),
        (Span.MONTH, timedelta(1)),
    ],
)
def test_a_new_span_begins_at_nothing(span: Span, later: timedelta, tmp_path: Path) -> None:
    time = Time()
    meter, session = time.meter(DataCap(10**9, span), tmp_path / "data.json"), Session()
    meter.follow(session)
    session.move(70, 0)
    assert meter.used() == 70
    time.now += later
    assert meter.used() == 0
    session.move(3, 4)
    assert meter.used() == 7


def test_the_next_command_goes_on_counting(tmp_path: Path) -> None:
    time, cap, path = Time(), DataCap(10**9, Span.DAY), tmp_path / "folder" / "data.json"
    meter, session = time.meter(cap, path), Session()
    meter.follow(session)
    session.move(70, 7)
    meter.used()
    assert time.meter(cap, path).used() == 77
    assert time.meter(DataCap(10**9, Span.HOUR), path).used() == 77
    time.now += timedelta(hours=1)
    assert time.meter(DataCap(10**9, Span.HOUR), path).used() == 0
    time.now += timedelta(days=1)
    assert time.meter(cap, path).used() == 0
    path.write_text("{not json")
    assert time.meter(cap, path).used() == 0


def test_devices_of_a_machine_count_together(tmp_path: Path) -> None:
    time, path = Time(), tmp_path / "data.json"
    pairs = [(time.meter(DataCap(10**9, span), path), Session()) for span in (Span.DAY, Span.HOUR)]
    for meter, session in pairs:
        meter.follow(session)
    for amount in (10, 20):
        for meter, session in pairs:
            session.move(amount, 0)
            meter.used()
    assert [meter.used() for meter, _ in pairs] == [40, 60]  # what came before its own last bytes
    assert time.meter(DataCap(10**9, Span.MONTH), path).used() == 60


@given(moves=st.lists(st.tuples(st.integers(0, 10**8), st.floats(0.2, 5.0)), min_size=1))
def test_it_is_looked_at_before_a_steady_rate_passes_the_cap(
    moves: list[tuple[int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At the highest rate so far half of what is left is not passed between two looks."""
    time, cap = Time(), DataCap(10**9, Span.COMMAND)
    meter, session = time.meter(cap, tmp_path_factory.getbasetemp() / "none"), Session()
    meter.follow(session)
    fastest = 0.0
    for nbytes, took_s in moves:
        time.seconds += took_s
        session.move(nbytes, 0)
        fastest = max(fastest, nbytes / took_s)
        left = max(0, cap.nbytes - meter.used())
        wait_s = meter.until_s() - time.seconds
        assert 0.19 <= wait_s <= 5.01
        if wait_s > 0.21 and fastest:
            assert wait_s * fastest <= left / 2 * 1.001
