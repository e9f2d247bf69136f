"""Meters for the usage of a run's emulated devices, and for this machine's energy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cleave.energy.account import DeviceUsage
from cleave.energy.run_energy import RunEnergy
from cleave.machine.sensors import PowerMeter
from cleave.protocol.device_counters import DeviceCounters
from emulator.activity import (
    Activity,
    Direction,
    GraphExecution,
    Multiplication,
    Presence,
    Transfer,
)
from emulator.virtual import VirtualRuntime
from profiles.fleet_device import FleetDevice

_Alike = tuple[str, float | None]  # profile name, and active power in watts from the fleet file


@dataclass(slots=True)
class _Sums:
    names: set[str] = field(default_factory=set)
    counters: DeviceCounters = field(default_factory=DeviceCounters)
    present_s: float = 0.0
    radio_s: float = 0.0


class FleetMeter:
    """Observer that totals the connected, compute and radio times and traffic of a fleet.

    Args:
        profiles: maps a device name to the name of the device's profile.
        here: maps the ID of each device that is connected at `now_s` to the device's name.
        now_s: start of the measurement in virtual seconds.
        active_power_w: maps a device name to the device's active power in watts, if known.
    """

    def __init__(
        self,
        profiles: Mapping[str, str],
        here: Mapping[int, str],
        now_s: float,
        active_power_w: Mapping[str, float | None] | None = None,
    ) -> None:
        self._profiles = profiles
        self._active_power_w = active_power_w or {}
        self.began_s = now_s
        self._sums: defaultdict[_Alike, _Sums] = defaultdict(_Sums)
        self._alike: dict[int, _Alike] = {}
        self._since_s: dict[int, float] = {}
        for device, name in here.items():
            self._come(device, name, now_s)

    def __call__(self, activity: Activity) -> None:
        """Add one activity to the sums."""
        match activity:
            case Presence(at_s, device, name, here):
                if here:
                    self._come(device, name, at_s)
                else:
                    since_s = self._since_s.pop(device)
                    self._sums[self._alike[device]].present_s += at_s - since_s
            case Multiplication() | GraphExecution():
                sums = self._sums[self._alike[activity.device]]
                sums.counters.compute_s += activity.end_s - activity.begin_s
            case Transfer():
                sums = self._sums[self._alike[activity.device]]
                sums.radio_s += activity.end_s - activity.begin_s
                if activity.direction is Direction.DOWN:
                    sums.counters.downlink_bytes += activity.nbytes
                else:
                    sums.counters.uplink_bytes += activity.nbytes

    def _come(self, device: int, name: str, at_s: float) -> None:
        alike = self._profiles.get(name, ""), self._active_power_w.get(name)
        self._alike[device] = alike
        self._since_s[device] = at_s
        self._sums[alike].names.add(name)

    def usages(self, now_s: float) -> tuple[DeviceUsage, ...]:
        """Return the usage so far, as one total per combination of profile and active power."""
        present: defaultdict[_Alike, float] = defaultdict(float)
        for device, since_s in self._since_s.items():
            present[self._alike[device]] += now_s - since_s
        return tuple(
            DeviceUsage(
                profile,
                len(sums.names),
                sums.present_s + present[profile, active_power_w],
                sums.counters.compute_s,
                sums.radio_s,
                sums.counters.downlink_bytes,
                sums.counters.uplink_bytes,
                active_power_w,
            )
            for (profile, active_power_w), sums in self._sums.items()
        )


class RunMeter:
    """Measures the energy that this machine uses.

    With a `runtime`, it also measures the usage of the runtime's emulated devices.
    """

    def __init__(
        self,
        power: PowerMeter,
        runtime: VirtualRuntime | None = None,
        members: Sequence[FleetDevice] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._power, self._runtime, self._clock = power, runtime, clock
        self._began_s = clock()
        self._fleet: FleetMeter | None = None
        if runtime is not None:
            here = {id: device.profile.name for id, device in runtime.devices.items()}
            names = {member.name: member.profile for member in members}
            active_power_w = {member.name: member.active_power_w for member in members}
            self._fleet = FleetMeter(names, here, runtime.now_s, active_power_w)
            runtime.observers.append(self._fleet)
        power.sample()

    def sample(self) -> None:
        """Read the energy counters. Between two calls, no counter may overflow more than once."""
        self._power.sample()

    def finish(self) -> RunEnergy:
        """Return the energy, the fleet's usage and the time since the creation of the meter."""
        self._power.sample()
        wall_s = self._clock() - self._began_s
        machine_j, source = self._power.joules, self._power.source
        if self._runtime is None or self._fleet is None:
            return RunEnergy(wall_s, wall_s, (), machine_j, source)
        now_s = self._runtime.now_s
        duration_s, usages = now_s - self._fleet.began_s, self._fleet.usages(now_s)
        return RunEnergy(duration_s, wall_s, usages, machine_j, source)
