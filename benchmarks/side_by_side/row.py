"""A row of the comparison: the results of a method in a setting, with conversion to JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from benchmarks.side_by_side.method import Method
from benchmarks.side_by_side.setting import Fault, Link, Setting


class Key(NamedTuple):
    """The key of a row."""

    method: Method
    setting: Setting


class Ending(Enum):
    """How a run ended."""

    WHOLE = "whole"
    """The run finished all steps."""

    FAILED = "failed"
    """The run or one of its parts ended too early."""

    LATE = "late"
    """The run exceeded its time limit."""

    ABSENT = "absent"
    """The method is not installed here, or does not support the setting."""


@dataclass
class Row:
    """The results of a method in a setting.

    Attributes:
        method, setting: the method and the setting.
        best: description of the method's settings.
        limit_s: time limit of the run in seconds.
        took_s: duration of the run in seconds, including its start.
        first_s: seconds of the first step; 0 if not recorded.
        seconds: seconds of each counted step.
        losses: loss of each step, including the first.
        down_bytes, up_bytes: mean bytes through each device's link per step, including headers.
        links_s: transfer time of the busiest link's bytes of a step, down and then up.
        floor_ratio: uncompressed bytes of the last step over the lower bound by stages; 0 if
            unknown.
        server_peak_bytes: peak memory after the first step of the server, or of the only process;
            0 for none.
        device_peak_bytes: peak memory of the largest device; 0 for none.
        plan: description of the stages.
        lost: number of devices that Cleave's server lost.
        fault_step: number of the step with the fault, from 1; 0 for none.
        ending: how the run ended.
        reason: why the run did not finish all steps.
        output: last lines of output of the processes, if the run did not finish.
        machine, commit, date: machine, commit and date of the measurement.
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
        """Return the row's key."""
        return Key(self.method, self.setting)

    @property
    def counts_first(self) -> bool:
        """Return whether the first step is the only counted one."""
        return self.seconds == [self.first_s]

    @property
    def whole(self) -> bool:
        """Return whether the run finished all steps."""
        return self.ending is Ending.WHOLE

    @property
    def step_s(self) -> float:
        """Return the median seconds of undisturbed steps."""
        calm = self.seconds[: self.fault_step - 2] if self.fault_step else self.seconds
        return statistics.median(calm)

    @property
    def measured(self) -> bool:
        """Return whether the row has an undisturbed counted step."""
        return bool(self.seconds[: self.fault_step - 2] if self.fault_step else self.seconds)


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON, without its output, which names folders of the machine."""
    setting = asdict(row.setting)
    setting |= {"link": row.setting.link.name, "fault": row.setting.fault.value}
    told = asdict(row)
    told |= {"method": row.method.name, "setting": setting, "ending": row.ending.value}
    del told["output"]
    return told


def from_json(told: dict[str, Any]) -> Row:
    """Return the row from its JSON."""
    setting = dict(told["setting"])
    setting |= {"link": Link.of(setting["link"]), "fault": Fault(setting["fault"])}
    found = dict(told)
    found |= {
        "method": Method.of(told["method"]),
        "setting": Setting(**setting),
        "ending": Ending(told["ending"]),
    }
    return Row(**found)
