"""The energy of `cleave train --servers N`: the energy of all devices and of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cleave.energy.run_energy import RunEnergy, side_by_side

if TYPE_CHECKING:
    from contextlib import ExitStack

    from cleave.cluster.doors import Doors


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """Measures the energy of a run, from the creation of this object.

    Attributes:
        sample: reads this machine's counters; called before any can overflow twice.
        record: returns the run's energy record, given each server's emulated devices.
    """

    sample: Callable[[], object]
    record: Callable[[Sequence[RunEnergy]], dict[str, Any]]


def of_joined_devices(doors: Doors, open_here: ExitStack) -> RunMeasured:
    """Measure the work of joined devices, until `open_here` closes."""
    from cleave.cluster.door_logs import DoorLogs
    from cleave.machine.sensors import PowerMeter, Sensors
    from cleave.server.jobs.job_energy import JobMeter
    from cleave.server.jobs.own_power import OwnPower

    power, alone = OwnPower(PowerMeter(Sensors())), doors.on_one_machine
    meter = JobMeter([DoorLogs(doors.calls, alone)], power, alone=alone)
    open_here.callback(meter.close)
    return RunMeasured(power.used, lambda servers: meter.record())


def of_emulated_devices(*, on_one_machine: bool) -> RunMeasured:
    """Measure this machine; each server meters the devices that it emulates.

    Args:
        on_one_machine: whether all servers are on this machine; the power of others is unknown.
    """
    from cleave.machine.sensors import PowerMeter, Sensors
    from emulator.run_meter import RunMeter

    meter = RunMeter(PowerMeter(Sensors()))

    def record(servers: Sequence[RunEnergy]) -> dict[str, Any]:
        machine = meter.finish()
        if not on_one_machine:
            machine = replace(machine, machine_j=None, machine_source="")
        return side_by_side(machine, servers).to_record()

    return RunMeasured(meter.sample, record)
