"""Options that select emulated devices and servers. Runs save device options for `--resume`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from cleave.errors import UsageError
from cleave.ray_cluster import ray_cluster, ray_here
from cleave.transport.addresses import outside_address
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
        advice = "repair it, or remove it and pass --devices and --fleet"
        try:
            saved = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{str(path)!r} cannot be read ({error}); {advice}") from error
        names = {field.name: int if field.name == "devices" else str for field in fields(cls)}
        for name, value in saved.items():
            if name not in names or type(value) is not names[name]:
                raise UsageError(f"{str(path)!r} has an invalid {name} = {value!r}; {advice}")
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
        raise UsageError(f"--seed must be 0 or more, not {seed}")
    size = default if devices is None and fleet in fleet_names() else devices
    check_number(size or size_in(fleet) or 0)  # check before the devices are created
    with usage_errors():
        found = find_fleet(fleet, stragglers, devices=size, dtype=dtype, seed=seed + 42)
        found = with_churn(found, churn) if churn else found
    check_number(len(found))
    return found


def check_number(devices: int) -> None:
    """Raise UsageError if a fleet of this size is too large to emulate."""
    if devices > MAX_VIRTUAL:
        raise UsageError(
            f"{devices:,} devices are too many to emulate individually; use at most "
            f"{MAX_VIRTUAL:,}, or forecast a larger fleet with: cleave plan"
        )


TABLE: Final = "cluster"


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options for training on several servers.

    Attributes:
        ray: host:port of the Ray cluster that starts the servers; `auto` for this node's cluster;
            empty to start a Ray cluster on this machine.
        listen: host:port, or only a port, at which devices join; empty to emulate the devices.
        runs: parent folder of run folders. All servers need access to this folder.
    """

    servers: int = 1
    ray: str = ""
    listen: str = ""
    runs: str = "runs"

    @classmethod
    def of(cls, table: object, given: Mapping[str, Any]) -> ClusterOptions:
        """Return the options of a `[cluster]` table, overridden by command-line options `given`."""
        names = [field.name for field in fields(cls)]
        if not isinstance(table, dict) or table.keys() - names:
            wrong = sorted(table.keys() - names)[0] if isinstance(table, dict) else table
            raise UsageError(f"[{TABLE}] in --config has {wrong!r}; use {', '.join(names)}")
        for name, value in table.items():
            if type(value) is not type(getattr(cls(), name)):
                kind = "a whole number" if name == "servers" else "a string"
                raise UsageError(f"{name} in [{TABLE}] of --config must be {kind}, not {value!r}")
        found = cls(**{**table, **{name: given[name] for name in names if name in given}})
        return found.checked()

    def checked(self) -> ClusterOptions:
        """Return these options, or raise UsageError if they are invalid."""
        if self.servers < 1:
            raise UsageError(f"--servers must be 1 or more, not {self.servers}")
        if self.ray and self.servers == 1:
            raise UsageError("--ray needs --servers with at least 2 servers")
        if self.listen and self.servers == 1:
            raise UsageError(
                "--listen needs --servers with at least 2 servers (for a single server, use: "
                "cleave serve)"
            )
        return self


def ray_of(cluster: ClusterOptions) -> AbstractContextManager[Any]:
    """Return a context manager that connects to Ray at `cluster.ray`, or starts Ray locally."""
    if cluster.ray:
        return ray_cluster(cluster.ray)
    own = outside_address()
    if not own:
        raise UsageError(
            "--servers needs a network address, because Ray hangs on loopback, but this machine "
            "has none; connect it to a network, or pass --ray HOST:PORT"
        )
    return ray_here(own, max(cluster.servers, os.cpu_count() or 1))
