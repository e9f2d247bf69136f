"""Compare plans with their bound and the published scheme, limit the PS card, time the planner.

    python -m benchmarks.planner_gap            # everything, some minutes
    python -m benchmarks.planner_gap --quick    # OPT-13B alone

Fleets are `paper-N`, batch 128, 1024 tokens, bf16. Planning times are for one thread.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from cleave.gemm import Gemm
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PsRates
from cleave.planner.tiles.bound import isolated_bound_s
from cleave.planner.tiles.planner import PlanMethod, TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.planner.tiles.shape import RateArrays, best_tile
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from profiles.fleets import paper_fleet

MODELS = ("opt-1.3b", "opt-13b", "opt-66b", "llama2-7b", "llama2-70b")
FLEETS = (32, 64, 256, 1024, 4096, 8192)
BF16 = ElementBytes(2, 2)
UNLIMITED = PsRates()
BATCH, SEQ = 128, 1024

DEEP_MARKS = {64: 0.15, 256: 0.10, 1024: 0.06, 4096: 0.06, 8192: 0.06}
AGAINST_2D = {256: 1.5, 1024: 1.75, 8192: 2.3}


def fleet(devices: int) -> list[DeviceRates]:
    """Return `paper-N` as the planner sees it."""
    return [
        DeviceRates(
            number,
            p.downlink_bytes_per_s,
            p.uplink_bytes_per_s,
            p.flops_per_s,
            p.latency_s,
            p.memory_bytes,
        )
        for number, p in enumerate(paper_fleet(devices))
    ]


def covers(plan: Plan) -> bool:
    """Return whether the tiles' volumes add up and no two tiles overlap."""
    boxes = np.array([[*t.tile.m, *t.tile.n, *t.tile.k] for t in plan.tiles])
    if sum(t.tile.volume for t in plan.tiles) != plan.gemm.volume:
        return False
    starts, stops = boxes[:, ::2], boxes[:, 1::2]
    for i in range(len(boxes)):
        meets = ((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i])).all(1)
        if meets.any():
            return False
    return True


def _mark(kind: str, devices: int) -> float:
    marks = {"full, side >= 256": 0.03, "full": 0.06}
    return marks.get(kind) or DEEP_MARKS.get(devices, float("inf"))


def _reason(plan: Plan) -> str:
    """Return text on why a plan is far from its bound."""
    cut = len(plan.tiles) - plan.devices_used
    if cut:
        return f"memory: shares that fit no device whole were cut into {cut} tiles more"
    columns = len({t.tile.n if plan.columns_cut_n else t.tile.m for t in plan.tiles})
    slabs = sorted({r.slabs for r in plan.regions})
    return (
        f"whole numbers: {columns} columns with {', '.join(map(str, slabs))} slabs stand for "
        f"{plan.devices_used} devices that each want a depth of their own"
    )


def gaps(models: Sequence[str]) -> None:
    """Print the gap to the isolated bound, with the pipeline fill of strips listed separately."""
    print("gap of the makespan to the isolated bound, every device at its own best depth")
    for devices in FLEETS:
        rates = fleet(devices)
        arrays = RateArrays.of(rates)
        worst: dict[str, tuple[float, str]] = {}
        count: dict[str, int] = defaultdict(int)
        fills = []
        missed = []
        for model in models:
            planner = TilePlanner(UNLIMITED)
            seen: set[Gemm] = set()
            for step in step_gemms(find_model(model), BATCH, SEQ, fused_siblings=True):
                if step.gemm in seen or step.name == "lm_head":
                    continue
                seen.add(step.gemm)
                plan = planner.plan(step.gemm, BF16, rates)
                assert covers(plan), f"{model} {step.name} on {devices} devices does not cover"
                best = best_tile(step.gemm, BF16, arrays, plan.bound_s)
                side = float(np.mean(np.sqrt(best.volume / best.depth)))
                full = bool(best.full_depth.all())
                kind = "full, side >= 256" if full and side >= 256 else "full" if full else "deep"
                mark = _mark(kind, devices)
                gap = plan.makespan_s / plan.bound_s - 1
                label = f"{model} {step.name} {step.kind.value}"
                worst[kind] = max(worst.get(kind, (-1.0, "")), (gap, label))
                count[kind] += 1
                fills.append(plan.fill_s / plan.makespan_s)
                if gap > min(mark, 0.15):
                    missed.append(f"{label} ({kind}, side {side:.0f}): {gap:.1%}, {_reason(plan)}")
        for kind in sorted(worst):
            gap, label = worst[kind]
            limit = _mark(kind, devices)
            at_most = f"at most {limit:.0%}" if np.isfinite(limit) else "reported"
            print(
                f"  {devices:5} {kind:18} {count[kind]:3} GEMMs, worst {gap:6.2%} ({at_most}): "
                f"{label}"
            )
        print(f"  {devices:5} fill {max(fills):.1%} of the makespan (at most 5%)")
        for line in missed:
            print(f"        large: {line}")


def against_published() -> None:
    """Compare all Linear GEMMs of an OPT-13B step: 2-D against 3-D with fused siblings."""
    print("OPT-13B step against method 2d (siblings apart as published / fused as ours)")
    spec = find_model("opt-13b")
    for devices, mark in AGAINST_2D.items():
        rates = fleet(devices)
        arrays = RateArrays.of(rates)
        apart, fused = (step_gemms(spec, BATCH, SEQ, f) for f in (False, True))
        flat = TilePlanner(UNLIMITED, PlanMethod.TWO_D)
        deep = TilePlanner(UNLIMITED)
        ours = plan_step(deep, fused, BF16, rates, UNLIMITED).makespan_s
        theirs = plan_step(flat, apart, BF16, rates, UNLIMITED).makespan_s
        fused_2d = plan_step(flat, fused, BF16, rates, UNLIMITED).makespan_s

        def fluid(gemms: Sequence[object], *, two: bool, arrays: RateArrays = arrays) -> float:
            known: dict[Gemm, float] = {}
            total = 0.0
            for each in gemms:
                gemm: Gemm = each.gemm  # type: ignore[attr-defined]
                if gemm not in known:
                    known[gemm] = isolated_bound_s(
                        gemm, BF16, arrays, UNLIMITED, two_dimensional=two
                    )
                total += known[gemm] * each.count  # type: ignore[attr-defined]
            return total

        ceiling = fluid(apart, two=True) / fluid(fused, two=False)
        fused_ceiling = fluid(fused, two=True) / fluid(fused, two=False)
        print(
            f"  {devices:5} devices: {theirs / ours:.2f}x (at least {mark}), fluid ceiling "
            f"{ceiling:.2f}; with siblings fused in both {fused_2d / ours:.2f}x, ceiling "
            f"{fused_ceiling:.2f}; {theirs:.0f} s, {fused_2d:.0f} s and {ours:.0f} s"
        )


def behind_a_card() -> None:
    """Print whether a larger fleet ever takes longer with a limited PS card."""
    print("OPT-13B step behind a PS card, devices added to one fleet")
    everyone = fleet(8192)
    gemms = step_gemms(find_model("opt-13b"), BATCH, SEQ, fused_siblings=True)
    for gbit in (10, 100, 400):
        ps = PsRates(gbit * 1e9 / 8, gbit * 1e9 / 8)
        line, before, worse = [], np.inf, 0.0
        for devices in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
            took = plan_step(TilePlanner(ps), gemms, BF16, everyone[:devices], ps).makespan_s
            worse = max(worse, took / before - 1)
            before = took
            line.append(f"{devices}: {took:.0f}")
        print(f"  {gbit:3} Gbit/s: {', '.join(line)} s; worst increase {worse:.2%} (none)")


def planning_time() -> None:
    """Print the seconds of planning."""
    gemms = step_gemms(find_model("opt-13b"), BATCH, SEQ, fused_siblings=True)
    rates = fleet(8192)
    took = []
    for each in {g.gemm for g in gemms}:
        began_s = time.perf_counter()
        TilePlanner(UNLIMITED).plan(each, BF16, rates)
        took.append(time.perf_counter() - began_s)
    print(f"planning at 8192 devices: one GEMM {max(took):.3f} s at most (at most 0.3)", end="; ")
    planner = TilePlanner(UNLIMITED)
    began_s = time.perf_counter()
    for each in {g.gemm for g in gemms}:
        planner.plan(each, BF16, rates)
    print(f"an OPT-13B step {time.perf_counter() - began_s:.2f} s (at most 3)")
    rates = fleet(1024)
    took = []
    for each in {g.gemm for g in gemms}:
        for gone in (0, 300, 1023):
            planner = TilePlanner(UNLIMITED)
            planner.plan(each, BF16, rates)
            left = rates[:gone] + rates[gone + 1 :]
            began_s = time.perf_counter()
            planner.plan(each, BF16, left)
            took.append(time.perf_counter() - began_s)
    print(f"replanning after one of 1024 left: {max(took) * 1e3:.1f} ms at most (at most 20)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="OPT-13B alone")
    options = parser.parse_args()
    planning_time()
    against_published()
    gaps(("opt-13b",) if options.quick else MODELS)
    behind_a_card()


if __name__ == "__main__":
    main()
