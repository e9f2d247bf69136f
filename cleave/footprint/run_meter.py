"""Measures a run while it goes: its emulated devices, and what this machine draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cleave.device.machine import PowerMeter
from cleave.footprint.run_energy import FleetMeter, RunEnergy
from emulator.virtual import VirtualShell
from profiles.fleet_device import FleetDevice


class RunMeter:
    """From its making to `finish`.

    Args:
        power: of this machine.
        shell: of the emulated fleet, which is observed; None without one.
        members: its devices.
        clock: in seconds.
    """

    def __init__(
        self,
        power: PowerMeter,
        shell: VirtualShell | None = None,
        members: Sequence[FleetDevice] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._power, self._shell, self._clock = power, shell, clock
        self._began_s = clock()
        self._fleet: FleetMeter | None = None
        if shell is not None:
            here = {id: device.profile.name for id, device in shell.devices.items()}
            names = {member.name: member.profile for member in members}
            active_power_w = {member.name: member.active_power_w for member in members}
            self._fleet = FleetMeter(names, here, shell.now_s, active_power_w)
            shell.observers.append(self._fleet)
        power.sample()

    def sample(self) -> None:
        """Look at the machine's counters; often enough that none is full twice in between."""
        self._power.sample()

    def finish(self) -> RunEnergy:
        """What is known so far."""
        self._power.sample()
        wall_s = self._clock() - self._began_s
        machine_j, source = self._power.joules, self._power.source
        if self._shell is None or self._fleet is None:
            return RunEnergy(wall_s, wall_s, (), machine_j, source)
        now_s = self._shell.now_s
        spells = self._fleet.spells(now_s)
        return RunEnergy(self._fleet.duration_s(now_s), wall_s, spells, machine_j, source)
