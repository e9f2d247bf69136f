"""`cleave train --servers N`: train one model on several servers, started with Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleave.energy.run_energy import RunEnergy, side_by_side
from cleave.errors import UsageError
from cleave.ray_cluster import need_ray
from cleave_cli.fleet_options import ClusterOptions, FleetOptions, ray_of
from cleave_cli.options import need_train_extra
from cleave_cli.render.training import Display
from cleave_cli.stopping import stops_in_order

if TYPE_CHECKING:
    from cleave.cluster.endpoints import Endpoints
    from cleave.fleet.fleet import Fleet
    from cleave.training.servers.ranks import Ranks
    from profiles.fleet_device import FleetDevice


@dataclass(frozen=True, slots=True)
class RunMeasured:
    """A pair of functions that measure the energy of a run.

    `sample` reads this machine's energy counters and must be called before they overflow. `record`
    takes the energy of each server's emulated devices and returns the energy record of the run.
    With joined devices, `record` ignores its argument.
    """

    sample: Callable[[], object]
    record: Callable[[Sequence[RunEnergy]], dict[str, Any]]


def of_joined_devices(endpoints: Endpoints, open_here: ExitStack) -> RunMeasured:
    """Start metering this machine and joined devices; stop when `open_here` is closed."""
    from cleave.cluster.endpoints import EndpointLogs
    from cleave.machine.sensors import PowerMeter, Sensors
    from cleave.server.jobs.energy import JobMeter, OwnPower

    power = OwnPower(PowerMeter(Sensors()))
    meter = JobMeter([EndpointLogs(endpoints.calls)], power, alone=endpoints.on_one_machine)
    open_here.callback(meter.close)
    return RunMeasured(power.used, lambda servers: meter.record())


def of_emulated_devices(*, on_one_machine: bool) -> RunMeasured:
    """Start metering a run with emulated devices.

    The energy of the servers is known only if `on_one_machine`.
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


@dataclass(frozen=True, slots=True)
class EmulatedFleets:
    """Creates each server's emulated fleet. Server i of n gets devices i, i + n, i + 2n, ..."""

    members: Sequence[FleetDevice]
    seed: int
    coding: str

    def __call__(self, ranks: Ranks) -> Fleet | None:
        """Return the emulated fleet of one server; None if there are no devices to emulate."""
        from emulator.virtual import emulated

        if not self.members:
            return None
        members = list(self.members[ranks.rank :: ranks.count])
        return emulated(members, seed=self.seed + ranks.rank, coding=self.coding)

    def meter(self, fleet: Fleet) -> Callable[[], RunEnergy]:
        """Start metering a fleet; return a function that returns the energy used since then."""
        from cleave.machine.sensors import PowerMeter, Sensors
        from emulator.run_meter import RunMeter

        runtime: Any = fleet.runtime
        return RunMeter(PowerMeter(Sensors()), runtime, self.members).finish


def train_on_several(
    request: dict[str, Any],
    options: FleetOptions,
    cluster: ClusterOptions,
    grid: str,
    display: Display,
) -> None:
    """Train a model on several servers, for `cleave train --servers`."""
    need_train_extra("cleave train")
    need_ray("--servers")
    from cleave.cluster.endpoints import machines_of
    from cleave.cluster.ray_train import FleetOf, SharedJob, train_together
    from cleave.cluster.room import check_cores, cores_of_nodes
    from cleave.energy.run_energy import run_energy
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.inputs import prepare
    from cleave.training.loop.ps_memory import check_memory
    from cleave.training.loop.records import DoneRecord, Record, StartRecord
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.loop.start import JobRequest
    from cleave_cli.render.footprint import summary

    asked = JobRequest.from_dict(request)
    spec = asked.spec()  # raises for an invalid job, before anything is started
    asked.check_resumed(spec)
    servers = cluster.servers
    members = [] if cluster.listen else options.members(spec.dtype, spec.seed)
    if members and len(members) < servers:
        raise UsageError(
            f"--servers is {servers}, but there are only {len(members)} devices; each server needs "
            "at least one"
        )
    at = _listen_address(cluster.listen) if cluster.listen else None
    check_memory(spec, servers)
    display.start(spec.steps)
    # Raise for an invalid job before a run folder is created.
    prepare(spec, TrainContext(None, lambda record: None))
    with ray_of(cluster) as ray, ExitStack() as open_here:
        check_cores(cores_of_nodes(ray), servers)
        fleets = EmulatedFleets(members, spec.seed, options.coding)
        fleet_of: FleetOf = fleets
        if at is not None:
            fleet_of = endpoints = _opened(ray, servers, at, display, open_here)
            measured = of_joined_devices(endpoints, open_here)
        else:
            measured = of_emulated_devices(on_one_machine=len(machines_of(ray)) == 1)
        if asked.resume:
            folder = RunFolder(Path(asked.resume).resolve())
        else:
            folder = RunFolder.create(Path(cluster.runs).resolve(), asked.name or None)
        shared = SharedJob(
            spec,
            folder.path,
            Path.cwd(),
            bool(asked.resume),
            asked.restart,
            fleet_of,
            fleets.meter if at is None else None,
            asked.accept_changes,
        )
        # Raise now if another process has locked the run folder. Server 1 locks the folder later.
        with folder.lock():
            pass
        began = False
        last: list[DoneRecord] = []

        def record(record: Record) -> None:
            nonlocal began
            if isinstance(record, StartRecord) and at is None:
                context.patience(lambda: record.step).insist(lambda: options.keep(folder.path))
            began = began or isinstance(record, StartRecord)
            if isinstance(record, DoneRecord):
                last.append(record)  # display it after the energy record, which is created last
            else:
                display.record(record)

        display.note(f"starting {servers} servers with Ray")
        with stops_in_order(display.note) as stop, display:
            context = TrainContext(None, record, stop)
            try:
                used = train_together(ray, shared, servers, record, stop, measured.sample)
            finally:
                folder.remove_if_empty()
            if began:
                energy = measured.record(used)
                patience = context.patience(lambda: last[-1].steps if last else 0)
                patience.insist(lambda: folder.append(energy))
                display.plain(energy | summary(run_energy([energy]), grid))
            for done in last:
                display.record(done)


def _opened(
    ray: Any, servers: int, at: tuple[str, int], display: Display, open_here: ExitStack
) -> Endpoints:
    """Open one endpoint per server and show the join URLs. `at` is the host and first port."""
    from cleave.cluster.endpoint import EndpointSetup
    from cleave.cluster.endpoints import open_endpoints
    from cleave.cluster.spreading import Spreading, everybody
    from cleave.server.fleet_server import ServerConfig
    from cleave.server.runtime import Numbering

    host, port = at
    config = ServerConfig(host=host, port=port)  # all servers share one credential
    numbered = [replace(config, numbering=Numbering(n + 1, servers)) for n in range(servers)]
    endpoints = open_endpoints(ray, [EndpointSetup(each) for each in numbered], display.note)
    open_here.callback(endpoints.close)
    open_here.callback(Spreading(endpoints.calls, everybody(servers)).close)
    for number, endpoint in enumerate(endpoints.calls):
        url, page = endpoint.call("urls")
        display.plain({"event": "listening", "server": number + 1, "url": url})
        display.note(f"server {number + 1}: cleave join '{page}'")
    display.note("devices may join any server, and are redirected to one with few devices")
    return endpoints


def _listen_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 2**16:
        raise UsageError(f"--listen is {text!r}; use HOST:PORT, such as 0.0.0.0:8765, or a port")
    return host.strip("[]") or "127.0.0.1", int(port)
