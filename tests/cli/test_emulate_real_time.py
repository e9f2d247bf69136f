"""Whether a machine keeps up with the devices that it emulates is said while they run."""

from __future__ import annotations

from cleave_cli.emulate_real_time import Pace
from emulator.realtime import Lateness


def test_a_machine_that_falls_behind_is_told_once() -> None:
    pace = Pace()
    assert pace.falls_behind(Lateness(), 0.0) == ""
    assert pace.falls_behind(Lateness(500, 200), 5.0) == ""  # not yet: the look at 0 s was the last
    assert "40% of the last 500 results" in pace.falls_behind(Lateness(500, 200), 10.0)
    assert pace.falls_behind(Lateness(900, 600), 20.0) == ""
