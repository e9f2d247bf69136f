"""When a machine may work, and how people write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.device import policy as p
from cleave.device.policy import (
    Cause,
    Condition,
    DataCap,
    DataMeter,
    Gate,
    Observation,
    Policy,
    Span,
    parse_data_cap,
)
from cleave.device.session import DeviceStatus
from cleave.errors import UsageError
from cleave.protocol.device_counters import DeviceCounters

BOTH = frozenset(Condition)
IDLE = frozenset({Condition.IDLE})


def _memory(text: str) -> int:
    return p.parse_memory(text, 8 * 10**9)


observations = st.builds(
    Observation,
    hour=st.floats(0, 24, exclude_max=True),
    idle_s=st.none() | st.floats(0, 1e5),
    charging=st.none() | st.booleans(),
    temperature_c=st.none() | st.floats(20, 110),
)
policies = st.builds(
    Policy,
    when=st.frozensets(st.sampled_from(Condition)),
    hours=st.none() | st.tuples(st.floats(0, 23), st.floats(0, 24)).filter(lambda h: h[0] != h[1]),
    max_temperature_c=st.none() | st.floats(50, 100),
    idle_after_s=st.floats(1, 3600),
)


@given(policy=policies, seen=st.lists(observations, min_size=1, max_size=8))
def test_an_open_gate_means_that_every_condition_holds(
    policy: Policy, seen: list[Observation]
) -> None:
    gate = Gate(policy)
    for one in seen:
        verdict = gate.decide(one)
        assert verdict.reason
        if not verdict.may_work:
            continue
        if Condition.IDLE in policy.when:
            assert one.idle_s is not None
            assert one.idle_s >= min(60, policy.idle_after_s / 2)
        assert one.charging or Condition.CHARGING not in policy.when
        assert policy.hours is None or p.within(policy.hours, one.hour)
        if policy.max_temperature_c is not None:
            assert one.temperature_c is not None
            assert one.temperature_c <= policy.max_temperature_c


@given(policy=policies, seen=observations)
def test_a_new_gate_opens_exactly_when_the_policy_holds(policy: Policy, seen: Observation) -> None:
    wanted = [
        policy.hours is None or p.within(policy.hours, seen.hour),
        Condition.IDLE not in policy.when or (seen.idle_s or 0) >= policy.idle_after_s,
        Condition.CHARGING not in policy.when or bool(seen.charging),
        policy.max_temperature_c is None
        or (seen.temperature_c or math.inf) <= policy.max_temperature_c,
    ]
    assert Gate(policy).decide(seen).may_work is all(wanted)


@given(start=st.integers(0, 23), end=st.integers(0, 24), hour=st.floats(0, 23.99))
def test_hours_and_their_opposite_split_the_day(start: int, end: int, hour: float) -> None:
    if start != end and (start, end) not in ((0, 24), (24, 0)):
        assert p.within((start, end), hour) is not p.within((end % 24, start or 24), hour)


def test_the_owner_comes_and_goes() -> None:
    gate = Gate(Policy(when=IDLE, idle_after_s=300))
    heard = []
    for idle_s in (10, 299, 300, 700, 61, 59, 200, 299, 301):
        verdict = gate.decide(Observation(hour=0, idle_s=idle_s))
        heard.append(verdict.may_work)
        if idle_s == 59:
            assert verdict == p.Permission(Cause.OWNER, "the owner is back")
        if idle_s == 10:
            assert verdict.reason == "in use: active 10 s ago, idle after 300 s"
    assert heard == [False, False, True, True, True, False, False, False, True]


def test_heat_has_hysteresis() -> None:
    gate = Gate(Policy(max_temperature_c=80))
    heard = [
        gate.decide(Observation(hour=0, temperature_c=t)).reason for t in (79, 82, 78, 75.4, 75, 79)
    ]
    assert heard == [
        "allowed",
        "82 C is above --max-temp 80",
        "78 C, cooling down to 75",
        "75 C, cooling down to 75",
        "allowed",
        "allowed",
    ]


def test_what_cannot_be_seen_is_refused_at_once_and_all_of_it() -> None:
    policy = Policy(when=BOTH, max_temperature_c=80)
    with pytest.raises(UsageError, match=r"--when idle.*--when charging.*--max-temp 80.*omit"):
        p.require_visible(policy, Observation(hour=0))
    p.require_visible(policy, Observation(0, idle_s=0, charging=False, temperature_c=90))
    p.require_visible(Policy(hours=(1, 2)), Observation(hour=0))


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (p.parse_when, "idle", IDLE),
        (p.parse_when, "charging, idle", BOTH),
        (p.parse_when, "always", frozenset()),
        (p.parse_hours, "22-7", (22, 7)),
        (p.parse_hours, "8:30-17", (8.5, 17)),
        (p.parse_hours, "0-24", (0, 24)),
        (_memory, "1000", 10**9),
        (_memory, "1.5gb", 15 * 10**8),
        (_memory, "300 MB", 3 * 10**8),
        (_memory, "50%", 4 * 10**9),
    ],
)
def test_options_are_read(parse: Callable[[str], Any], text: str, expected: Any) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("parse", "texts", "words"),
    [
        (p.parse_hours, ["", "7", "7-7", "24-7", "3-25", "1:60-2", "22-7h", "-1-2"], "22-7"),
        (p.parse_when, ["idel", "idle,", "always,idle", ","], "charging"),
        (_memory, ["lots", "-1"], "is not valid; use an amount"),
        (_memory, ["0", "16"], "is too low; use 17"),
        (_memory, ["9GB"], "more than the 8.0 GB"),
        (lambda text: p.parse_memory(text, None), ["50%"], "unknown"),
    ],
)
def test_wrong_options_are_refused(
    parse: Callable[[str], Any], texts: list[str], words: str
) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=words):
            parse(text)


def test_options_make_a_policy() -> None:
    assert p.parse_policy("", "", 0, 5) is None
    assert p.parse_policy("always", "", 0, 5) == Policy()
    assert p.parse_policy("idle", "22-7", 80, 10) == Policy(IDLE, (22, 7), 80, 600)
    for max_temp, idle_after in (
        (-1, 5),
        (200, 5),
        (math.nan, 5),
        (80, 0),
        (80, math.nan),
        (80, math.inf),
    ):
        with pytest.raises(UsageError):
            p.parse_policy("", "", max_temp, idle_after)


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
    with pytest.raises(UsageError, match="is not valid; use a limit such as 500MB/hour"):
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
