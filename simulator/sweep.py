"""Simulation of methods with several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cleave.errors import UsageError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.workload.registry import ModelSpec
from profiles.fleets import find_fleet
from simulator.cloud import Cloud
from simulator.method import PS_FLOPS_PER_S, Conditions, Method, Outcome


@dataclass(frozen=True, slots=True)
class Row:
    """An outcome, and how many devices were offered; None for methods that need none."""

    devices: int | None
    outcome: Outcome


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


def sweep(
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
) -> list[Row]:
    """Simulate every method with every number of devices; methods without devices once, last.

    With `coding`, all that devices send or get over links where it pays counts as coded, whatever
    the method: stages by what passes each link, all others by links that are so much faster.

    Raises:
        UsageError: when there is no such fleet.
    """
    rows: list[Row] = []
    for count in counts:
        devices = fleet_rates(fleet, count, dtype=dtype, stragglers=stragglers)
        in_fp32 = fleet_rates(fleet, count, dtype="fp32", stragglers=stragglers)
        by_link, by_link_in_fp32 = (
            [coding.decided(device, ps, count) for device in group] for group in (devices, in_fp32)
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
        for method in methods:
            if not isinstance(method, Cloud):
                rows += [Row(count, outcome) for outcome in method.outcomes(conditions)]
    nobody = Conditions(spec, batch, seq, (), element, ps, seed)
    for method in methods:
        if isinstance(method, Cloud):
            rows += [Row(None, outcome) for outcome in method.outcomes(nobody)]
    return rows
