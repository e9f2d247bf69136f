"""Simulate a training step for several methods and device counts, in several processes or on Ray.

The workers do not affect the results, because tasks are independent and deterministic.
"""

from __future__ import annotations

import difflib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import TypeVar

from cleave.energy.predict import stated_rates as stated_rates
from cleave.errors import CleaveError, UsageError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.planner import PlanMethod as TileShape
from cleave.ray_cluster import need_ray, ray_cluster
from cleave.workload.registry import ModelSpec
from cleave.workload.step import check_step
from profiles.fleets import find_fleet
from simulator.alpa import Alpa, Confidant
from simulator.asteroid import Asteroid
from simulator.cleave_methods import Stages, Tiles
from simulator.cloud import A100, H100, Cloud
from simulator.data_parallel import DataParallel, LocalUpdates
from simulator.dtfm import Dtfm
from simulator.method import PS_FLOPS_PER_S, Conditions, Method, Outcome

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Processes:
    """Workers that run tasks in `count` processes on this machine; 1 means this process only."""

    count: int = 1

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Call `work` with each task and yield the task's index and result when it completes.

        Tasks start in list order, so put the longest first. With several processes, `work` and the
        tasks are pickled, so `work` must be a module-level function.

        Raises:
            CleaveError: if a process is killed, for example because memory ran out.
        """
        if self.count == 1:
            yield from enumerate(map(work, tasks))
            return
        # Do not fork: a progress bar's thread may hold a lock, which would stay locked in a fork.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.count, mp_context=context) as pool:
            futures = {pool.submit(work, task): index for index, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BrokenProcessPool:
                raise CleaveError(
                    f"one of {self.count} simulation processes was killed, probably because memory "
                    "ran out; try again with fewer --jobs"
                ) from None
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Workers that run tasks on the nodes of a Ray cluster. Cleave must be installed on all nodes.

    `address` is the head node's host:port, or "auto" on a node of the cluster.
    """

    address: str

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Call `work` with each task and yield the task's index and result when it completes.

        Raises:
            UsageError: if no cluster is running at the address.
        """
        with ray_cluster(self.address) as ray:
            remote = ray.remote(work)
            waiting = {remote.remote(task): index for index, task in enumerate(tasks)}
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield waiting.pop(done), result


Workers = Processes | RayCluster


def workers(jobs: int, ray_address: str | None) -> Workers:
    """Return the workers that the options `--jobs` and `--ray` select.

    Args:
        jobs: number of processes on this machine; 1 means this process.
        ray_address: address of a Ray cluster; None means this machine.

    Raises:
        UsageError: if `jobs` is above 1 and `ray_address` is not None, or Ray is not installed.
    """
    if ray_address is None:
        return Processes(jobs)
    if jobs > 1:
        raise UsageError("--jobs (this machine) cannot be combined with --ray (a cluster)")
    need_ray("--ray")
    return RayCluster(ray_address)


@dataclass(frozen=True, slots=True)
class Row:
    """An outcome. `devices` counts the devices offered to the method; None for cloud methods."""

    devices: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Cell:
    """A simulation to run. `devices` is the number of devices; None for cloud methods."""

    devices: int | None
    method: Method
    conditions: Conditions

    @property
    def name(self) -> str:
        """Return a name for progress messages: model, method and number of devices."""
        devices = "" if self.devices is None else f" on {self.devices}"
        return f"{self.conditions.spec.name}, {self.method.name}{devices}"

    def rows(self) -> list[Row]:
        """Simulate a step and return one row for each variant of the method."""
        return [Row(self.devices, outcome) for outcome in self.method.outcomes(self.conditions)]


def fleet_rates(
    fleet: str, devices: int | None, *, dtype: str, stragglers: float = 0.0, seed: int = 42
) -> list[DeviceRates]:
    """Look up a fleet and return the rates of its devices for the planner.

    Args:
        fleet: name of a built-in fleet, or path of a fleet file.
        devices: number of devices; None to use the number in the fleet's name or file.
        dtype: dtype for which the devices' throughput is returned.
        stragglers: share of devices whose compute and link rates are divided by ten.
        seed: random seed for drawing links and stragglers.

    Raises:
        UsageError: if the fleet is unknown or invalid.
    """
    try:
        found = find_fleet(fleet, stragglers, devices=devices, dtype=dtype, seed=seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return stated_rates(found)


def cells(
    spec: ModelSpec,
    batch: int,
    seq: int,
    fleet: str,
    counts: Sequence[int],
    methods: Sequence[Method],
    *,
    element: ElementBytes,
    ps: PsRates,
    dtype: str = "bf16",
    stragglers: float = 0.0,
    seed: int = 0,
    ps_flops_per_s: float = PS_FLOPS_PER_S,
    coding: CodingPolicy = CodingPolicy.OFF,
    memory_bytes: int | None = None,
) -> list[Cell]:
    """Return one cell per method and device count, then a single cell per cloud method.

    Args:
        spec, batch, seq: model, sequences per step, and tokens per sequence.
        fleet: name of a built-in fleet, or path of a fleet file.
        element: bytes per element in each direction: sent to devices, and returned by devices.
        ps: rates of the parameter server's network card.
        dtype: dtype in which devices multiply matrices; layers of `cleave-stages` run in fp32.
        stragglers: share of devices whose compute and link rates are divided by ten.
        ps_flops_per_s: throughput of the parameter server, used if no device computes the loss.
        coding: links on which payloads are compressed, for all methods. In `cleave-stages`, a
            compressed link carries fewer bytes. In other methods, its rate is higher.
        memory_bytes: memory of each device; None to use the memory that the fleet specifies.

    Raises:
        UsageError: if the fleet is unknown or invalid.
    """
    check_step(spec, batch, seq)
    nobody = Conditions(spec, batch, seq, (), element, ps, seed, ps_flops_per_s=ps_flops_per_s)
    found: list[Cell] = []
    for count in counts:
        by_dtype = []
        for computed in (dtype, "fp32"):
            devices = fleet_rates(fleet, count, dtype=computed, stragglers=stragglers)
            if memory_bytes is not None:
                devices = [replace(device, memory_bytes=memory_bytes) for device in devices]
            by_dtype.append([coding.decided(device, ps, count) for device in devices])
        conditions = replace(
            nobody, devices=payload_rates(by_dtype[0], dtype, dtype), fp32_devices=by_dtype[1]
        )
        found += [Cell(count, m, conditions) for m in methods if not isinstance(m, Cloud)]
    return found + [Cell(None, m, nobody) for m in methods if isinstance(m, Cloud)]


def simulate(
    every: Sequence[Cell],
    workers: Workers | None = None,
    done: Callable[[Cell], object] = lambda cell: None,
) -> list[list[Row]]:
    """Simulate all cells, and return a list of rows for each cell, in the order of `every`.

    Args:
        workers: workers that simulate the cells; None means this process.
        done: called with each cell after its simulation.
    """
    workers = workers or Processes()
    # The simulation time of a cell roughly grows with devices times layers.
    sizes = [(cell.devices or 0) * cell.conditions.spec.layers for cell in every]
    longest_first = sorted(range(len(every)), key=lambda i: -sizes[i])
    found: list[list[Row]] = [[] for _ in every]
    for index, rows in workers.run(Cell.rows, [every[i] for i in longest_first]):
        found[longest_first[index]] = rows
        done(every[longest_first[index]])
    return found


def methods(utilisation: float = 0.5, *, thorough: bool = False) -> Mapping[str, Method]:
    """Return all training methods by name.

    Args:
        utilisation: share of a cloud GPU's peak FLOP/s that training reaches.
        thorough: True to run all trials of DT-FM's searches, however long they take.
    """
    clouds = [Cloud(gpu, gpus, utilisation) for gpu in (A100, H100) for gpus in (1, 8)]
    return {
        "cleave": Tiles("cleave", TileShape.THREE_D, fused=True),
        "cleave-2d": Tiles("cleave-2d", TileShape.TWO_D, fused=False),
        "cleave-stages": Stages(),
        "diloco": LocalUpdates(),
        "dtfm": Dtfm(thorough=thorough),
        "dtfm-all": Dtfm("dtfm-all", every_device=True, thorough=thorough),
        "alpa": Alpa(),
        "asteroid": Asteroid(),
        "confidant": Confidant(),
        "data-parallel": DataParallel(),
        **{cloud.name: cloud for cloud in clouds},
    }


def chosen(names: str, known: Mapping[str, Method]) -> list[Method]:
    """Return the methods in a comma-separated list. `cloud` stands for all cloud methods.

    Raises:
        UsageError: if a name is not in `known`.
    """
    found: dict[str, Method] = {}
    for name in (part.strip() for part in names.split(",")):
        if name == "cloud":
            found |= {key: known[key] for key in known if key.startswith("cloud-")}
        elif name in known:
            found[name] = known[name]
        else:
            near = difflib.get_close_matches(name, known, n=2) or [*known, "cloud"]
            raise UsageError(f"there is no method {name!r}; use {', '.join(near)}")
    return list(found.values())
