"""Simulation of methods over device counts; each method and count form a cell of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cleave.errors import UsageError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.workload.registry import ModelSpec
from profiles.fleets import find_fleet
from simulator.cloud import Cloud
from simulator.method import PS_FLOPS_PER_S, Conditions, Method, Outcome
from simulator.workers import ThisProcess, Workers


@dataclass(frozen=True, slots=True)
class Row:
    """An outcome and the number of devices offered; None for methods that need no devices."""

    devices: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Cell:
    """A method under given conditions.

    Attributes:
        devices: number of devices offered; None for methods that need no devices.
    """

    devices: int | None
    method: Method
    conditions: Conditions

    @property
    def name(self) -> str:
        """Return the display name: model, method and number of devices."""
        devices = "" if self.devices is None else f" on {self.devices}"
        return f"{self.conditions.spec.name}, {self.method.name}{devices}"

    def rows(self) -> list[Row]:
        """Simulate the cell and return its rows."""
        return [Row(self.devices, outcome) for outcome in self.method.outcomes(self.conditions)]


def fleet_rates(
    fleet: str, devices: int | None, *, dtype: str, stragglers: float = 0.0, seed: int = 42
) -> list[DeviceRates]:
    """Return the planner's rates of a fleet's devices; see `profiles.fleets.find_fleet`.

    Raises:
        UsageError: when the fleet is unknown or invalid.
    """
    try:
        found = find_fleet(fleet, stragglers, devices=devices, dtype=dtype, seed=seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return [
        DeviceRates(
            number,
            device.stated_downlink_bytes_per_s,
            device.stated_uplink_bytes_per_s,
            device.stated_flops_per_s,
            device.latency_s,
            device.memory_bytes,
            graph_flops_per_s=device.stated_graph_flops_per_s,
        )
        for number, device in enumerate(found)
    ]


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
    """Return a cell for every method and device count; methods without devices once, last.

    With `coding`, all payloads count as compressed on links where compression pays, whatever the
    method. Stages count the compressed bytes of each link; other methods get faster links.

    Args:
        memory_bytes: memory of each device; None for the fleet's own.

    Raises:
        UsageError: when the fleet is unknown or invalid.
    """
    found: list[Cell] = []
    for count in counts:
        by_link, by_link_in_fp32 = (
            [
                coding.decided(_with_memory(device, memory_bytes), ps, count)
                for device in fleet_rates(fleet, count, dtype=computed, stragglers=stragglers)
            ]
            for computed in (dtype, "fp32")
        )
        coded = payload_rates(by_link, dtype, dtype)
        conditions = Conditions(
            spec,
            batch,
            seq,
            coded,
            element,
            ps,
            seed,
            by_link_in_fp32,
            ps_flops_per_s,
        )
        found += [
            Cell(count, method, conditions) for method in methods if not isinstance(method, Cloud)
        ]
    nobody = Conditions(spec, batch, seq, (), element, ps, seed)
    return found + [Cell(None, method, nobody) for method in methods if isinstance(method, Cloud)]


def _with_memory(device: DeviceRates, memory_bytes: int | None) -> DeviceRates:
    return device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)


def simulate(
    every: Sequence[Cell],
    workers: Workers | None = None,
    done: Callable[[Cell], object] = lambda cell: None,
) -> list[list[Row]]:
    """Return the rows of each cell, in the order of the cells.

    Args:
        workers: workers that compute the cells; this process if None.
        done: function called with each computed cell.
    """
    workers = workers or ThisProcess()
    longest_first = sorted(range(len(every)), key=lambda i: -_size(every[i]))
    found: list[list[Row]] = [[] for _ in every]
    for index, rows in workers.run(Cell.rows, [every[i] for i in longest_first]):
        found[longest_first[index]] = rows
        done(every[longest_first[index]])
    return found


def _size(cell: Cell) -> int:
    """Return a number that grows with a cell's simulation time."""
    return (cell.devices or 0) * cell.conditions.spec.layers
