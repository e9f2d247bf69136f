"""Simulation of methods with several numbers of devices, each pair of them a cell of a table."""

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
    """An outcome, and how many devices were offered; None for methods that need none."""

    devices: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Cell:
    """A method under given conditions.

    Attributes:
        devices: how many are offered; None for methods that need none.
    """

    devices: int | None
    method: Method
    conditions: Conditions

    @property
    def name(self) -> str:
        """Return model, method and number of devices, for people."""
        devices = "" if self.devices is None else f" on {self.devices}"
        return f"{self.conditions.spec.name}, {self.method.name}{devices}"

    def rows(self) -> list[Row]:
        """Simulate it."""
        return [Row(self.devices, outcome) for outcome in self.method.outcomes(self.conditions)]


def fleet_rates(
    fleet: str, devices: int | None, *, dtype: str, stragglers: float = 0.0, seed: int = 42
) -> list[DeviceRates]:
    """Return the planner's rates of a fleet's devices; see `profiles.fleets.find_fleet`.

    Raises:
        UsageError: when there is no such fleet.
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
    """Return a cell for every method and number of devices; methods without devices once, last.

    With `coding`, all that devices send or get over links where it pays counts as coded, whatever
    the method: stages by what passes each link, all others by links that are so much faster.

    Args:
        memory_bytes: of each device; None for the fleet's own.

    Raises:
        UsageError: when there is no such fleet.
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
        workers: what computes them; this process if None.
        done: function that is called with each cell that was computed.
    """
    workers = workers or ThisProcess()
    longest_first = sorted(range(len(every)), key=lambda i: -_size(every[i]))
    found: list[list[Row]] = [[] for _ in every]
    for index, rows in workers.run(Cell.rows, [every[i] for i in longest_first]):
        found[longest_first[index]] = rows
        done(every[longest_first[index]])
    return found


def _size(cell: Cell) -> int:
    """Return a number that grows with the time that a cell takes."""
    return (cell.devices or 0) * cell.conditions.spec.layers
