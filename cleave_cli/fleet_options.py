"""Options that select the emulated devices. A run saves these options for `--resume`."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from cleave.errors import UsageError
from cleave_cli.options import usage_errors

if TYPE_CHECKING:
    from profiles.fleet_device import FleetDevice

MAX_VIRTUAL: Final = 100_000  # maximum number of devices in virtual time
DEVICES: Final = 8  # default number of devices for a fleet name without a size
FLEET_FILE: Final = "fleet.toml"  # file in a run folder that stores the fleet options


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options that select the emulated devices.

    Attributes:
        devices: number of devices; 0 for plain PyTorch, None for the fleet's default size.
        fleet: name of a fleet, or path of a TOML file.
        churn: mean lengths of sessions and gaps in seconds, such as `600:120`, or the name of an
            availability model; empty to use each device's own availability model.
        coding: links whose payloads count as compressed: `auto` (slow links), `on` (all links) or
            `off` (none).
    """

    devices: int | None = None
    fleet: str = "paper"
    churn: str = ""
    coding: str = "auto"

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """Return the options saved in a run folder; the defaults if the folder has none."""
        path = run / FLEET_FILE
        if not path.is_file():
            return cls()
        advice = "repair it, or remove it and give --devices and --fleet"
        try:
            saved = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{str(path)!r} cannot be read ({error}); {advice}") from error
        names = {field.name: int if field.name == "devices" else str for field in fields(cls)}
        for name, value in saved.items():
            if name not in names or type(value) is not names[name]:
                raise UsageError(f"{str(path)!r} has {name} = {value!r}; {advice}")
        return cls(**saved)

    def members(self, dtype: str, seed: int) -> list[FleetDevice]:
        """Return the devices to emulate, with throughputs for `dtype`; empty for plain PyTorch."""
        if self.devices == 0:
            return []
        return choose_fleet(
            self.fleet, self.devices, default=DEVICES, dtype=dtype, churn=self.churn, seed=seed
        )

    def keep(self, run: Path) -> None:
        """Save the options in a run folder."""
        import tomli_w

        from cleave.files import write_atomically
        from cleave.training.loop.disk import cannot_write

        given = {name: value for name, value in asdict(self).items() if value is not None}
        if Path(self.fleet).is_file():
            given["fleet"] = str(Path(self.fleet).resolve())
        path = run / FLEET_FILE
        try:
            write_atomically(path, tomli_w.dumps(given).encode())
        except OSError as error:
            raise cannot_write(path, error) from error


def choose_fleet(
    fleet: str,
    devices: int | None,
    *,
    default: int,
    dtype: str,
    churn: str = "",
    stragglers: float = 0.0,
    seed: int = 0,
) -> list[FleetDevice]:
    """Return the devices of a fleet, with their throughput for `dtype`.

    If `devices` is None, the fleet has the size in its name or file. A built-in fleet whose name
    has no size gets `default` devices.
    """
    from profiles.fleets import find_fleet, fleet_names, size_in, with_churn

    if seed < 0:
        raise UsageError(f"--seed is {seed}; give 0 or more")
    size = default if devices is None and fleet in fleet_names() else devices
    _need_few(size or size_in(fleet) or 0)  # check before the devices are created
    with usage_errors():
        found = find_fleet(fleet, stragglers, devices=size, dtype=dtype, seed=seed + 42)
        found = with_churn(found, churn) if churn else found
    _need_few(len(found))
    return found


def _need_few(devices: int) -> None:
    if devices > MAX_VIRTUAL:
        raise UsageError(
            f"{devices:,} devices are too many to emulate one by one; ask for {MAX_VIRTUAL:,} "
            f"at most, or plan for them with: cleave plan"
        )
