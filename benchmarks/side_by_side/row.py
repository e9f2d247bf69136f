"""A row of the comparison: what was measured of a method in a setting, to JSON and back."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from benchmarks.side_by_side.method import Method
from benchmarks.side_by_side.setting import Fault, Link, Setting


class Key(NamedTuple):
    """What tells rows apart."""

    method: Method
    setting: Setting


class Ending(Enum):
    """How a run ended."""

    WHOLE = "whole"
    """It did all steps."""

    FAILED = "failed"
    """It, or a part of it, ended too soon."""

    LATE = "late"
    """Its time was over."""

    ABSENT = "absent"
    """It is not installed here, or cannot do this."""


@dataclass
class Row:
    """What was measured.

    Attributes:
        method, setting: of what.
        best: the settings that the method was given, in words.
        limit_s: how long the run might take.
        took_s: how long it took, with its start.
        first_s: seconds of the first step; 0 where that was not noted.
        seconds: of each counted step.
        losses: of each step, the first one included.
        down_bytes, up_bytes: through each device's link in a step, on average, headers included.
        links_s: how long the busiest link would take for its bytes of a step, down and then up.
        floor_ratio: all bytes of the last step, as if nothing were coded, over the least that it
            needs by stages; 0 where that is not known.
        server_peak_bytes: the most memory of the server after the first step, or of the only
            process; 0 for none.
        device_peak_bytes: of the largest device; 0 for none.
        plan: the stages, in a sentence.
        lost: how often Cleave's server lost a device.
        fault_step: the step in which the fault came, the first one is 1; 0 for none.
        ending: how the run ended.
        reason: why, where it did not do all steps.
        output: the last lines that its processes wrote, where it did not.
        machine, commit, date: where, of what and when it was measured.
    """

    method: Method
    setting: Setting
    best: str = ""
    limit_s: float = 0.0
    took_s: float = 0.0
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    down_bytes: list[float] = field(default_factory=list)
    up_bytes: list[float] = field(default_factory=list)
    links_s: float = 0.0
    floor_ratio: float = 0.0
    server_peak_bytes: int = 0
    device_peak_bytes: int = 0
    plan: str = ""
    lost: int = 0
    fault_step: int = 0
    ending: Ending = Ending.WHOLE
    reason: str = ""
    output: str = ""
    machine: str = ""
    commit: str = ""
    date: str = ""

    @property
    def key(self) -> Key:
        """Return what tells it apart."""
        return Key(self.method, self.setting)

    @property
    def counts_first(self) -> bool:
        """Say whether the first step is the one that is counted."""
        return self.seconds == [self.first_s]

    @property
    def whole(self) -> bool:
        """Say whether all steps were done."""
        return self.ending is Ending.WHOLE

    @property
    def step_s(self) -> float:
        """Return the median seconds of the steps that nothing disturbed."""
        calm = self.seconds[: self.fault_step - 2] if self.fault_step else self.seconds
        return statistics.median(calm)

    @property
    def measured(self) -> bool:
        """Say whether a step was counted that nothing disturbed."""
        return bool(self.seconds[: self.fault_step - 2] if self.fault_step else self.seconds)


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON, without its output: that names folders of the machine."""
    setting = asdict(row.setting)
    setting |= {"link": row.setting.link.name, "fault": row.setting.fault.value}
    told = asdict(row)
    told |= {"method": row.method.name, "setting": setting, "ending": row.ending.value}
    del told["output"]
    return told


def from_json(told: dict[str, Any]) -> Row:
    """Return the row that JSON tells of."""
    setting = dict(told["setting"])
    setting |= {"link": Link.of(setting["link"]), "fault": Fault(setting["fault"])}
    found = dict(told)
    found |= {
        "method": Method.of(told["method"]),
        "setting": Setting(**setting),
        "ending": Ending(told["ending"]),
    }
    return Row(**found)
