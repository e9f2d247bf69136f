"""Energy meters for `cleave train --servers N`, which cover all devices and this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cleave.energy.run_energy import RunEnergy, side_by_side

if TYPE_CHECKING:
    from contextlib import ExitStack

    from cleave.cluster.endpoints import Endpoints


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """Measures the energy of a run, from the creation of this object.

    Attributes:
        sample: reads this machine's energy counters. Must be called often enough that no counter
            overflows twice.
        record: returns the run's energy record. Its argument has, for each server, the energy of
            the emulated devices.
    """

    sample: Callable[[], object]
    record: Callable[[Sequence[RunEnergy]], dict[str, Any]]


def of_joined_devices(endpoints: Endpoints, open_here: ExitStack) -> RunMeasured:
    """Measure the energy of this machine and of joined devices, until `open_here` closes."""
    from cleave.cluster.endpoints import EndpointLogs
    from cleave.machine.sensors import PowerMeter, Sensors
    from cleave.server.jobs.job_energy import JobMeter, OwnPower

    power, alone = OwnPower(PowerMeter(Sensors())), endpoints.on_one_machine
    meter = JobMeter([EndpointLogs(endpoints.calls, alone)], power, alone=alone)
    open_here.callback(meter.close)
    return RunMeasured(power.used, lambda servers: meter.record())


def of_emulated_devices(*, on_one_machine: bool) -> RunMeasured:
    """Measure the energy of this machine. Each server meters its own emulated devices.

    Args:
        on_one_machine: whether all servers run on this machine. If not, the energy of the servers
            is unknown, because the power of other machines is not measured.
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
