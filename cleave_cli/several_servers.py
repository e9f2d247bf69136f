"""`cleave train --servers N`: one training on several servers, which Ray starts."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleave.errors import UsageError
from cleave_cli.commands.emulate import choose_fleet
from cleave_cli.fleet_options import DEVICES, FleetOptions
from cleave_cli.options import need_train_extra
from cleave_cli.render.training import Display

if TYPE_CHECKING:
    from cleave.fleet.fleet import Fleet
    from cleave.training.ranks import Ranks
    from profiles.fleet_device import FleetDevice


@dataclass(frozen=True, slots=True)
class EmulatedFleets:
    """Opens each server's share of emulated devices.

    Attributes:
        members: all devices; server i of n has every n-th from the i-th.
        seed: of what is random about them.
        coding: on which links payloads count as coded.
    """

    members: Sequence[FleetDevice]
    seed: int
    coding: str

    def __call__(self, ranks: Ranks) -> Fleet | None:
        """Return the fleet of a server; None where all compute themselves."""
        from emulator.virtual import emulated

        if not self.members:
            return None
        members = list(self.members[ranks.rank :: ranks.count])
        return emulated(members, seed=self.seed + ranks.rank, coding=self.coding)


def train_on_several(
    request: dict[str, Any],
    options: FleetOptions,
    servers: int,
    address: str | None,
    listen: str,
    runs: Path,
    display: Display,
) -> None:
    """Train on several servers; see `cleave train`.

    Args:
        request: what to train, as an operator's `submit` says it.
        options: the emulated devices, which all servers share.
        servers: how many.
        address: of a Ray cluster; None for one of this machine.
        listen: where devices join, host:port; empty to emulate them.
        runs: the folder for run folders, which all servers see.
        display: shows what is reported.

    Raises:
        CleaveError: for every problem that the user can solve.
    """
    need_train_extra("cleave train")
    from cleave.cluster.ray_train import (
        Doors,
        FleetOf,
        SharedJob,
        cluster,
        need_ray,
        open_doors,
        train_together,
    )
    from cleave.training.run_folder import RunFolder
    from cleave.training.run_job import JobRequest
    from cleave.training.trainer import TrainContext, prepare

    need_ray()
    asked = JobRequest.from_dict(request)
    spec = asked.spec()  # refuse before anything is started
    members: list[FleetDevice] = []
    at = _listen_address(listen) if listen else None
    if options.devices != 0 and at is None:
        members = choose_fleet(
            options.fleet,
            options.devices,
            default=DEVICES,
            dtype=spec.dtype,
            churn=options.churn,
            seed=spec.seed,
        )
        if len(members) < servers:
            raise UsageError(
                f"--servers is {servers} and there are {len(members)} devices; give each server "
                "at least one"
            )
    stopping = False

    def interrupted(*_: object) -> None:
        nonlocal stopping
        if stopping:
            raise KeyboardInterrupt
        stopping = True
        display.note("stopping after this step, with a checkpoint; once more to stop now")

    display.start(spec.steps)
    prepare(spec, TrainContext(None, lambda record: None))  # refused jobs leave no folder
    with cluster(address, servers) as ray:
        fleets: FleetOf = EmulatedFleets(members, spec.seed, options.coding)
        if at is not None:
            fleets = open_doors(ray, servers, *at, secrets.token_urlsafe(24))
            for number, door in enumerate(fleets.actors):
                url, page = ray.get(door.urls.remote())
                display.plain({"event": "listening", "server": number + 1, "url": url})
                display.note(f"server {number + 1}: cleave join '{page}'")
            display.note("computers may join any of them: they are sent to where devices are few")
        if asked.resume:
            folder = RunFolder(Path(asked.resume).resolve())
        else:
            folder = RunFolder.create(runs.resolve(), asked.name or None)
        if at is None:
            options.keep(folder.path)
        shared = SharedJob(spec, folder.path, Path.cwd(), bool(asked.resume), asked.restart, fleets)
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, interrupted) for number in numbers]
        display.note(f"starting {servers} servers with Ray")
        try:
            with display:
                train_together(ray, shared, servers, display.record, lambda: stopping)
        finally:
            if isinstance(fleets, Doors):
                fleets.close(ray)
            for number, before in zip(numbers, previous, strict=True):
                signal.signal(number, before)


def _listen_address(text: str) -> tuple[str, int]:
    """Return host and port.

    Raises:
        UsageError: when the text is neither host:port nor a port.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise UsageError(f"--listen is {text!r}; give HOST:PORT, as 0.0.0.0:8765, or a port")
    return host.strip("[]") or "127.0.0.1", int(port)
