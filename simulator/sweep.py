"""Simulate a training step for several methods and device counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cleave.energy.predict import stated_rates as stated_rates
from cleave.errors import UsageError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.workload.registry import ModelSpec
from cleave.workload.step import check_step
from profiles.fleets import find_fleet
from simulator.cloud import Cloud
from simulator.method import PS_FLOPS_PER_S, Conditions, Method, Outcome
from simulator.workers import Processes, Workers


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
        seed: random seed with which links and stragglers are drawn.

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
