"""The energy records of a run: the usage of its devices and the energy of its machine.

A record is appended to `metrics.jsonl` each time the run finishes or stops. Reports compute the
energy of the devices and the carbon from the records, because assumptions may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import msgspec

from cleave.energy.account import DeviceUsage, Ps
from cleave.energy.meter import Basis
from cleave.errors import UsageError
from profiles.device_profile import DeviceKind

EVENT = "energy"

_ADDED = ("present_s", "compute_s", "radio_s", "down_bytes", "up_bytes")
_USAGES = "spells"  # name of `usages` in records, for compatibility with earlier versions


@dataclass(frozen=True, slots=True)
class RunEnergy:
    """The energy record of a run, or of a part of a run.

    Attributes:
        duration_s: duration on the fleet's clock, which is virtual for emulated devices.
        wall_s: duration in real time.
        usages: usage of the run's devices, on the fleet's clock.
        machine_j: energy that the run's machine drew; None if the machine cannot measure energy.
        machine_source: source of `machine_j`, shown to the user.
        virtual: whether the run's machine emulated the devices on a virtual clock.
        devices_here: number of real devices that ran on the same machine as the server.
    """

    duration_s: float
    wall_s: float
    usages: tuple[DeviceUsage, ...] = ()
    machine_j: float | None = None
    machine_source: str = ""
    virtual: bool = True
    devices_here: int = 0
    machine_basis: Basis = Basis.MEASURED

    def to_record(self) -> dict[str, Any]:
        """Return the record as a JSON object for `metrics.jsonl`."""
        record = msgspec.to_builtins(self)
        return {"event": EVENT, _USAGES: record.pop("usages"), **record}

    @property
    def ps(self) -> Ps:
        """Return the energy of the PS, which is the energy of the run's machine.

        The PS's energy is unknown if the machine also ran or emulated devices, because the
        machine's energy then includes their computation.
        """
        if self.machine_j is None or self._shared:
            return Ps()
        return Ps(self.machine_j, self.machine_basis)

    @property
    def _shared(self) -> bool:
        return bool(self.usages) and (self.virtual or self.devices_here > 0)

    def notes(self) -> list[str]:
        """Return notes for the user on the sources of the energy figures."""
        notes = []
        if self.usages and self.virtual:
            notes.append(
                "devices are emulated on a virtual clock, on which the PS's own work takes no time"
            )
        elif self.usages:
            notes.append("devices joined the server; their profiles are the ones that they report")
        if self.machine_j is not None:
            apart = ""
            if self._shared:
                does = "emulates its devices" if self.virtual else "runs devices, too"
                apart = f", which {does}: not counted"
            notes.append(
                f"this machine drew {self.machine_j / 3600:.3g} Wh in {self.wall_s:.0f} s{apart} "
                f"({self.machine_source})"
            )
        return notes


def run_energy(records: Iterable[Mapping[str, Any]]) -> RunEnergy:
    """Return the sum of a run's energy records. A resumed run has several energy records.

    Args:
        records: all records in the run's `metrics.jsonl`.

    Raises:
        UsageError: if no energy record exists, or an energy record is damaged.
    """
    try:
        found = [
            msgspec.convert(
                {"usages" if k == _USAGES else k: v for k, v in record.items() if k != "event"},
                RunEnergy,
            )
            for record in records
            if record.get("event") == EVENT
        ]
    except msgspec.ValidationError as error:
        raise UsageError(
            f"the energy record of this run is damaged ({error}); remove that line of metrics.jsonl"
        ) from None
    if not found:
        raise UsageError(
            "this run has no energy record, because it is still running, was killed, or was "
            "trained by an older version"
        )
    return in_succession(found)


def in_succession(found: Sequence[RunEnergy]) -> RunEnergy:
    """Return the sum of one or more energy records for consecutive parts of a run."""
    measured = [run.machine_j for run in found if run.machine_j is not None]
    return RunEnergy(
        sum(run.duration_s for run in found),
        sum(run.wall_s for run in found),
        _merged((usage for run in found for usage in run.usages), max),
        sum(measured) if len(measured) == len(found) else None,
        found[-1].machine_source,
        any(run.virtual for run in found),
        max(run.devices_here for run in found),
        found[-1].machine_basis,
    )


def side_by_side(machine: RunEnergy, servers: Sequence[RunEnergy]) -> RunEnergy:
    """Return the energy record of a run on several servers, each with its own devices.

    The devices of each server are assumed to stay connected until the last server finishes.

    Args:
        machine: record with the energy and duration of the machine that runs the servers.
        servers: records with the usage of each server's devices; empty if the run has no devices.
    """
    duration_s = max((each.duration_s for each in servers), default=machine.duration_s)
    usages = [
        replace(usage, present_s=usage.present_s * duration_s / each.duration_s)
        for each in servers
        if each.duration_s
        for usage in each.usages
    ]
    return replace(machine, duration_s=duration_s, usages=_merged(usages, add))


def _merged(
    usages: Iterable[DeviceUsage], devices: Callable[[int, int], int]
) -> tuple[DeviceUsage, ...]:
    """Merge usages with equal profile, kind, stated power, and availability of measured energy.

    `devices` combines two counts: `max` for counts of the same devices, `add` for different ones.
    """
    merged: dict[tuple[str, DeviceKind | None, float | None, bool], DeviceUsage] = {}
    for usage in usages:
        alike = (usage.profile, usage.kind, usage.active_power_w, usage.measured_j is None)
        before = merged.get(alike)
        if before is not None:
            added = _ADDED if usage.measured_j is None else (*_ADDED, "measured_j")
            crossed = None
            if before.network_bytes is not None or usage.network_bytes is not None:
                crossed = before.crossing_bytes + usage.crossing_bytes
            usage = replace(
                usage,
                devices=devices(before.devices, usage.devices),
                network_bytes=crossed,
                flops_per_s=max(before.flops_per_s, usage.flops_per_s),
                **{name: getattr(before, name) + getattr(usage, name) for name in added},
            )
        merged[alike] = usage
    return tuple(merged.values())
