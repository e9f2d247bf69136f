"""The owner's policy for lending a machine, and decisions that apply it to sensor values."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cleave.errors import UsageError
from cleave.files import write_atomically
from cleave.protocol import limits

if TYPE_CHECKING:
    from cleave.device.session import DeviceStatus


_LEAST_S: Final = 0.2
_FIRST_S: Final = 2.0
_MOST_S: Final = 5.0
_UNITS: Final = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


class Span(Enum):
    """The time span of a data cap. Hours, days and months follow the local clock."""

    HOUR = "hour"
    DAY = "day"
    MONTH = "month"
    COMMAND = ""  # the whole runtime of the command

    def named(self, now: datetime) -> str:
        """Return a name for the hour, day or month that contains `now`; empty for `COMMAND`."""
        pattern = {Span.HOUR: "%Y-%m-%d %H", Span.DAY: "%Y-%m-%d", Span.MONTH: "%Y-%m"}
        return now.strftime(pattern[self]) if self in pattern else ""


@dataclass(frozen=True, slots=True)
class DataCap:
    """A limit on the sum of downlink and uplink bytes in one span."""

    nbytes: int
    span: Span

    def __str__(self) -> str:
        unit = next((u for u in ("TB", "GB") if self.nbytes >= _UNITS[u]), "MB")
        per = f"/{self.span.value}" if self.span is not Span.COMMAND else ""
        return f"{self.nbytes / _UNITS[unit]:g}{unit}{per}"


def parse_data_cap(text: str) -> DataCap:
    """Parse a limit such as `500MB/hour` or `50GB/month`, or `5GB` for the whole command.

    Raises:
        UsageError: if `text` is not a valid limit, or the limit is below 1 MB.
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?)\s*(MB|GB|TB)(?:/(hour|day|month))?", text.strip(), re.IGNORECASE
    )
    nbytes = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if match is None or nbytes < 1e6:
        raise UsageError(
            f"--max-data {text!r} is not valid; use a limit such as 500MB/hour, 5GB/day or "
            "50GB/month, or 5GB for the whole run of this command"
        )
    return DataCap(math.floor(nbytes), Span((match[3] or "").lower()))


class CountingSession(Protocol):
    """A session that counts the bytes it transfers, such as `DeviceSession`."""

    @property
    def status(self) -> DeviceStatus: ...


class DataMeter:
    """Counts the bytes that this machine's `cleave join` processes transfer per hour, day or month.

    The file at `path` stores the counts. An unreadable file counts as empty. If the file is not
    writable, or the span is `Span.COMMAND`, only this process's bytes are counted.
    """

    def __init__(
        self,
        cap: DataCap,
        path: Path,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cap, self._path, self._now, self._clock = cap, path, now, clock
        self._span = cap.span.named(now())
        self._used = 0 if cap.span is Span.COMMAND else self._held().get(self._span, 0)
        self._session: CountingSession | None = None
        self._counted = 0
        self._rate = 0.0  # highest rate in this session, in bytes per second
        self._looked_s = clock()

    def follow(self, session: CountingSession) -> None:
        """Update the count for the previous session, then start to count the bytes of `session`."""
        self.used()
        self._session, self._counted, self._rate = session, 0, 0.0

    def used(self) -> int:
        """Update the count and return the bytes transferred in the current span."""
        now_s = self._clock()
        more = self._more()
        self._rate = max(self._rate, more / max(now_s - self._looked_s, _LEAST_S))
        self._looked_s = now_s
        span = self._cap.span.named(self._now())
        if span != self._span:
            self._span, self._used = span, 0
        self._used += more
        if more and self._cap.span is not Span.COMMAND:
            self._save(more)
        return self._used

    def until_s(self) -> float:
        """Return the `clock` time of the next check. Checks are more frequent close to the cap."""
        left = max(0, self._cap.nbytes - self._used)
        reached_s = left / self._rate if self._rate else _FIRST_S
        return self._clock() + min(_MOST_S, max(_LEAST_S, reached_s / 2))

    def _more(self) -> int:
        if self._session is None:
            return 0
        done = self._session.status.done
        before, self._counted = self._counted, done.downlink_bytes + done.uplink_bytes
        return self._counted - before

    def _held(self) -> dict[str, int]:
        """Return the stored byte counts, by name of the hour, day or month."""
        try:
            held = json.loads(self._path.read_text())
            return {str(span): int(count) for span, count in held.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _save(self, more: int) -> None:
        """Add `more` bytes to the counts of this hour, day and month in the shared file."""
        held, now = self._held(), self._now()
        spans = (span.named(now) for span in Span if span is not Span.COMMAND)
        counts = {span: held.get(span, 0) + more for span in spans}
        self._used = counts[self._span] = max(self._used, counts[self._span])
        try:
            write_atomically(self._path, json.dumps(counts).encode(), 0o600, sync=False)
        except OSError:
            return


COOL_BY_C: Final = 5.0  # degrees below the limit to which an overheated machine must cool

BACK_WITHIN_S: Final = 60.0
"""While the machine computes, user input within this many seconds means that the owner is back.
The limit is half of `idle_after_s` if that is shorter."""


DAY_MIN: Final = 1440  # minutes in a day, the maximum of `--idle-after`


class Condition(Enum):
    """A condition that `--when` can require."""

    IDLE = "idle"
    CHARGING = "charging"


class Cause(Enum):
    """A reason why a machine must not compute now."""

    HOURS = "hours"
    OWNER = "owner"
    BATTERY = "battery"
    HEAT = "heat"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Policy:
    """The conditions that the owner sets for computing on a machine.

    Attributes:
        when: conditions that must all be met.
        hours: start and end as local hours of the day; the span may cross midnight. None permits
            all hours.
        idle_after_s: seconds without user input after which the machine counts as idle.
    """

    when: frozenset[Condition] = frozenset()
    hours: tuple[float, float] | None = None
    max_temperature_c: float | None = None
    idle_after_s: float = 300.0
    data_cap: DataCap | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """Current sensor values of a machine; None for a value that is unknown or not needed.

    Attributes:
        hour: fractional local hour of the day.
        data_bytes: bytes sent and received in the current span of the data cap.
    """

    hour: float
    idle_s: float | None = None
    charging: bool | None = None
    temperature_c: float | None = None
    data_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Permission:
    """A policy decision. `cause` is None if work is allowed.

    `until_s` is the time of the next check on the monotonic clock; None for the default interval.
    """

    cause: Cause | None
    reason: str
    until_s: float | None = None

    @property
    def may_work(self) -> bool:
        return self.cause is None


ALLOWED: Final = Permission(None, "allowed")


def require_visible(policy: Policy, seen: Observation) -> None:
    """Raise UsageError if the policy depends on sensor values that this machine cannot provide."""
    problems = []
    if Condition.IDLE in policy.when and seen.idle_s is None:
        problems.append(
            "--when idle: this machine does not show when it was last used; "
            "install xprintidle, or use --hours instead"
        )
    if Condition.CHARGING in policy.when and seen.charging is None:
        problems.append(
            "--when charging: this machine does not show whether its battery is charging; omit "
            "charging"
        )
    if policy.max_temperature_c is not None and seen.temperature_c is None:
        problems.append(
            f"--max-temp {policy.max_temperature_c:g}: this machine shows no temperature; omit it, "
            "and lend fewer --cores"
        )
    if problems:
        raise UsageError("; ".join(problems))


@dataclass(slots=True)
class Gate:
    """Decides from sensor values whether the machine may compute, with hysteresis.

    An idle machine stays idle until the next input. An overheated machine must cool to `COOL_BY_C`
    below the limit.
    """

    policy: Policy
    _idle: bool = field(default=False, init=False)
    _hot: bool = field(default=False, init=False)
    _was_open: bool = field(default=False, init=False)

    def decide(self, seen: Observation) -> Permission:
        """Decide whether the machine may compute. An unknown required value forbids computation."""
        verdicts = [
            self._hours(seen),
            self._data(seen),
            self._owner(seen),
            self._battery(seen),
            self._heat(seen),
        ]
        verdict = next((v for v in verdicts if not v.may_work), ALLOWED)
        self._was_open = verdict.may_work
        return verdict

    def _hours(self, seen: Observation) -> Permission:
        if self.policy.hours is None or within(self.policy.hours, seen.hour):
            return ALLOWED
        span = "-".join(map(_hour_text, self.policy.hours))
        return Permission(Cause.HOURS, f"outside {span} h")

    def _data(self, seen: Observation) -> Permission:
        cap = self.policy.data_cap
        if cap is None or seen.data_bytes < cap.nbytes:
            return ALLOWED
        return Permission(Cause.DATA, f"--max-data {cap} is used up")

    def _owner(self, seen: Observation) -> Permission:
        if Condition.IDLE not in self.policy.when:
            return ALLOWED
        after_s = self.policy.idle_after_s
        if seen.idle_s is None:
            self._idle = False
            return Permission(Cause.OWNER, "the machine no longer shows whether it is in use")
        if self._idle:
            self._idle = seen.idle_s >= min(BACK_WITHIN_S, after_s / 2)
        else:
            self._idle = seen.idle_s >= after_s
        if self._idle:
            return ALLOWED
        if self._was_open:
            return Permission(Cause.OWNER, "the owner is back")
        return Permission(
            Cause.OWNER, f"in use: active {seen.idle_s:.0f} s ago, idle after {after_s:.0f} s"
        )

    def _battery(self, seen: Observation) -> Permission:
        if Condition.CHARGING not in self.policy.when or seen.charging:
            return ALLOWED
        if seen.charging is None:
            return Permission(Cause.BATTERY, "the machine no longer shows whether it is charging")
        return Permission(Cause.BATTERY, "on battery")

    def _heat(self, seen: Observation) -> Permission:
        limit = self.policy.max_temperature_c
        if limit is None:
            return ALLOWED
        now = seen.temperature_c
        if now is None:
            return Permission(Cause.HEAT, "the machine no longer shows its temperature")
        if now > limit:
            self._hot = True
            return Permission(Cause.HEAT, f"{now:.0f} C is above --max-temp {limit:g}")
        if self._hot and now > limit - COOL_BY_C:
            return Permission(Cause.HEAT, f"{now:.0f} C, cooling down to {limit - COOL_BY_C:g}")
        self._hot = False
        return ALLOWED


def within(hours: tuple[float, float], hour: float) -> bool:
    """Return whether `hour` is in [start, end). The span may cross midnight."""
    start, end = hours
    return start <= hour < end if start < end else hour >= start or hour < end


def _hour_text(hour: float) -> str:
    whole, minutes = divmod(round(hour * 60), 60)
    return f"{whole}:{minutes:02}" if minutes else str(whole)


# --- parsing of command-line options ---


def parse_when(text: str) -> frozenset[Condition]:
    """Parse `--when`: `idle`, `charging`, `idle,charging`, or `always` (no condition)."""
    words = [word.strip() for word in text.split(",")]
    if words == ["always"]:
        return frozenset()
    try:
        return frozenset(Condition(word) for word in words)
    except ValueError:
        raise UsageError(
            f"--when {text!r} is not valid; use idle, charging, idle,charging or always"
        ) from None


def parse_hours(text: str) -> tuple[float, float]:
    """Parse a span of the day such as `22-7` or `22:30-6:45`. Return its start and end in hours."""
    match = re.fullmatch(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?", text.strip())
    if match:
        whole = [int(part or 0) for part in match.groups()]
        start, end = whole[0] + whole[1] / 60, whole[2] + whole[3] / 60
        if max(whole[1], whole[3]) < 60 and start < 24 and end <= 24 and start != end:
            return start, end
    raise UsageError(
        f"--hours {text!r} is not valid; use a time span in local time, such as 22-7 or 8:30-17"
    )


def parse_memory(text: str, total_bytes: int | None) -> int:
    """Parse `1000` (MB), `800MB`, `4GB` or `50%` (of `total_bytes`). Return the size in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB|%|)", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(
            f"--memory {text!r} is not valid; use an amount such as 1000 (MB), 4GB or 50%"
        )
    amount, unit = float(match[1]), match[2].upper()
    if unit == "%":
        if total_bytes is None:
            raise UsageError(
                f"--memory is {text}, but this machine's total memory is unknown; use an amount in "
                "MB"
            )
        count = amount / 100 * total_bytes
    else:
        count = amount * (1e9 if unit == "GB" else 1e6)
    if count < limits.MIN_DEVICE_MEMORY_BYTES:
        raise UsageError(f"--memory {text} is too low; use 17 (MB) or more")
    if total_bytes is not None and count > total_bytes:
        raise UsageError(
            f"--memory {text} is more than the {total_bytes / 1e9:.1f} GB of this machine"
        )
    return math.floor(count)


def parse_policy(
    when: str, hours: str, max_temp: float, idle_after_min: float, max_data: str = ""
) -> Policy | None:
    """Return the policy for command-line options; None if the options set no condition.

    Args:
        when, hours, max_data: values of `--when`, `--hours` and `--max-data`; empty if not given.
        max_temp: value of `--max-temp` in degrees Celsius; 0 if not given.
        idle_after_min: value of `--idle-after` in minutes.
    """
    if not 0 <= max_temp < 150:
        raise UsageError(f"--max-temp {max_temp:g} is not valid; use degrees Celsius, such as 80")
    if not 0 < idle_after_min <= DAY_MIN:
        raise UsageError(
            f"--idle-after must be more than 0 and at most {DAY_MIN} minutes, not "
            f"{idle_after_min:g}"
        )
    if not (when or hours or max_temp or max_data):
        return None
    return Policy(
        when=parse_when(when) if when else frozenset(),
        hours=parse_hours(hours) if hours else None,
        max_temperature_c=max_temp or None,
        idle_after_s=idle_after_min * 60,
        data_cap=parse_data_cap(max_data) if max_data else None,
    )
