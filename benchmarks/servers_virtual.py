"""Emulate several servers in virtual time: OPT-13B on the published fleet, by tiles and stages.

    python -m benchmarks.servers_virtual [--lines paper-1024:tiles:10:1,4;...] [--micro-batches 32]

Servers share devices and sequences evenly. Each server's fleet is emulated separately, every
message by its size alone. The slowest fleet sets the time, so only the fleets with the least link
rates and the least throughput are emulated. Exchange between servers is as in
`cleave.planner.servers`, on otherwise idle cards, so plan and virtual time differ only in the
fleets' part. Exit code 1 if they differ by more than 5 %, or if four servers behind 10 Gbit/s are
less than 3.2 times as fast by tiles as one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.stage_fleets import Settings, card_of, planned
from benchmarks.stage_fleets import emulated as emulated_stages
from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import PS_BLOCK_S, PS_BYTE_S, ElementBytes, PsRates
from cleave.planner.servers import exchange_s, exchanged_bytes, weakest
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from emulator.sized_stages import SizedModel
from emulator.sized_step import SizedStepper
from emulator.virtual import Arithmetic, VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet

DIFFERENCE = 0.05
FASTER = 3.2
ROWS, SEQUENCE = 128, 1024
MODEL = "opt-13b"
LINES = (
    "paper-1024:tiles:10:1,4,16,64;paper-1024:tiles:100:1,4,16,64;"
    "paper-1024:stages:10:1,4,16;paper-1024:stages:100:1,4,16;"
    "paper-8192:stages:10:1,4,16,64;paper-8192:stages:100:1,4,16,64;"
    "paper-8192:tiles:10:1,4,16,64;paper-8192:tiles:100:1,4,16,64"
)


@dataclass(frozen=True, slots=True)
class Found:
    """The time and traffic of one server's fleet.

    Attributes:
        plan_s, virtual_s: planned seconds, and seconds in virtual time.
        down_bytes, up_bytes: bytes per step.
    """

    plan_s: float
    virtual_s: float
    down_bytes: int
    up_bytes: int


def by_tiles(members: Sequence[FleetDevice], rows: int, gbit: float) -> Found:
    """Emulate a step by tiles."""
    card = card_of(gbit)
    rate = card.egress_bytes_per_s
    planner = TilePlanner(PsRates(rate, rate, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S))
    spec = find_model(MODEL)
    with emulated(list(members), compute=False, ps=card, coding="off") as fleet:
        fleet.planner = planner
        runtime = fleet.runtime
        assert isinstance(runtime, VirtualRuntime)
        rates = payload_rates(list(runtime.fleet_rates()[1]), DType.BF16.value)
        gemms = step_gemms(spec, rows, SEQUENCE, fused_siblings=False)
        plan = plan_step(planner, gemms, ElementBytes(2, 2), rates, card)
        step = SizedStepper(fleet, spec, rows * SEQUENCE, DType.BF16).step()
        counted = step.counters
    return Found(plan.predicted_s, step.fleet_s, counted.downlink_bytes, counted.uplink_bytes)


def by_stages(members: Sequence[FleetDevice], rows: int, gbit: float, settings: Settings) -> Found:
    """Emulate a step by stages."""
    card, spec = card_of(gbit), find_model(MODEL)
    runtime = VirtualRuntime(
        list(members), None, Arithmetic.NONE, card, verify=False, coding=settings.coding
    )
    rates = list(runtime.stage_devices().values())
    counts = [count for count in settings.micro_batches if count <= rows] or [rows]

    def made(count: int, in_parts: bool) -> SizedModel:
        return SizedModel(spec, rows, SEQUENCE, count, DType.BF16, None, None, in_parts)

    try:
        found = planned([partial(made, n, in_parts=False) for n in counts], rates, card, settings)
    except DeviceMemoryError:
        found = planned([partial(made, n, in_parts=True) for n in counts], rates, card, settings)
    last = emulated_stages(runtime, found, 1).steps[-1]
    own_s = found.ps.optimizer_s
    return Found(found.plan.step_s - own_s, last.seconds, last.downlink_bytes, last.uplink_bytes)


def main() -> None:
    """Print a row for each number of servers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", default=LINES, help="fleet:method:card in Gbit/s:servers;...")
    parser.add_argument("--micro-batches", default="32,128")
    given = parser.parse_args()
    micro_batches = [int(each) for each in given.micro_batches.split(",")]
    settings = Settings(micro_batches, 500e9, 1e9, 42, 1, False, True, 1.0, CodingPolicy.AUTO)
    trained = find_model(MODEL).parameters
    good = True
    print(f"{MODEL}, {ROWS}x{SEQUENCE} tokens in bf16; seconds of a step; GB of each server")
    print(
        f"{'fleet':11}{'method':7}{'Gbit/s':>7}{'servers':>8}{'plan':>8}{'virtual':>9}{'ratio':>7}"
        f"{'exchange':>10}{'down':>7}{'up':>6}{'others':>7}{'faster':>8}"
    )
    for line in given.lines.split(";"):
        fleet, method, gbit, numbers = line.split(":")
        alone_s: float | None = None
        for servers in map(int, numbers.split(",")):
            began_s = time.perf_counter()
            members = find_fleet(fleet)
            parts = [members[n::servers] for n in range(servers)]
            rows = -(-ROWS // servers)
            card = card_of(float(gbit))
            try:
                found = [
                    by_tiles(parts[n], rows, float(gbit))
                    if method == "tiles"
                    else by_stages(parts[n], rows, float(gbit), settings)
                    for n in weakest_of(parts)
                ]
            except PlanError as error:
                print(f"{fleet:11}{method:7}{gbit:>7}{servers:8}  refused: {error}", flush=True)
                continue
            slowest = max(found, key=lambda each: each.virtual_s)
            other_s = exchange_s(trained, servers, card)
            ratio = slowest.plan_s / slowest.virtual_s
            step_s = slowest.virtual_s + other_s
            alone_s = step_s if servers == 1 else alone_s
            faster = f"{alone_s / step_s:8.2f}" if alone_s is not None else f"{'-':>8}"
            print(
                f"{fleet:11}{method:7}{gbit:>7}{servers:8}{slowest.plan_s + other_s:8.0f}"
                f"{step_s:9.1f}{ratio:7.3f}{other_s:10.1f}{slowest.down_bytes / 1e9:7.0f}"
                f"{slowest.up_bytes / 1e9:6.0f}{exchanged_bytes(trained, servers) / 1e9:7.0f}"
                f"{faster}   {time.perf_counter() - began_s:.0f} s",
                flush=True,
            )
            good &= abs(ratio - 1) <= DIFFERENCE
            if (method, gbit, servers) == ("tiles", "10", 4) and alone_s is not None:
                good &= alone_s / step_s >= FASTER
    sys.exit(not good)


def weakest_of(parts: Sequence[Sequence[FleetDevice]]) -> list[int]:
    """Return the indices of the parts of a fleet that could be the slowest."""
    rates = [
        VirtualRuntime(list(part), None, Arithmetic.NONE, card_of(0), verify=False).fleet_rates()[1]
        for part in parts
    ]
    return weakest(rates)


if __name__ == "__main__":
    main()
