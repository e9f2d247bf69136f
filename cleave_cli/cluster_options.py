"""Options for several servers, from the command line or the `[cluster]` table of `--config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any, Final

from cleave.errors import UsageError
from cleave.ray_cluster import ray_cluster, ray_here
from cleave.transport.addresses import outside_address

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
            raise UsageError(f"[{TABLE}] of --config has {wrong!r}; it takes {', '.join(names)}")
        for name, value in table.items():
            if type(value) is not type(getattr(cls(), name)):
                kind = "a whole number" if name == "servers" else "a text"
                raise UsageError(f"{name} in [{TABLE}] of --config is {value!r}; give {kind}")
        found = cls(**{**table, **{name: given[name] for name in names if name in given}})
        return found.checked()

    def checked(self) -> ClusterOptions:
        """Return these options, or raise UsageError if they are invalid."""
        if self.servers < 1:
            raise UsageError(f"--servers is {self.servers}; give 1 or more")
        if self.ray and self.servers == 1:
            raise UsageError("--ray starts several servers; give --servers as well")
        if self.listen and self.servers == 1:
            raise UsageError(
                "--listen is where devices join several servers; give --servers as well (for one "
                "server: cleave serve)"
            )
        return self


def ray_of(cluster: ClusterOptions) -> AbstractContextManager[Any]:
    """Return a context manager that connects to Ray at `cluster.ray`, or starts Ray locally."""
    if cluster.ray:
        return ray_cluster(cluster.ray)
    own = outside_address()
    if not own:
        raise UsageError(
            "--servers needs an address of this machine in a network, as Ray hangs on loopback, "
            "and it has none; connect it, or give --ray HOST:PORT"
        )
    return ray_here(own, max(cluster.servers, os.cpu_count() or 1))
