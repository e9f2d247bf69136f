"""Simulate resident stages under churn: effective training time, and the best snapshot interval.

    python -m benchmarks.resident_churn [--model opt-1.3b] [--devices 9] [--stages 4]
                                        [--down-mbit 100] [--up-mbit 20] [--memory-gb 12.8]
                                        [--minutes 1,3,10,30,100] [--intervals 1,20,40,80]
                                        [--seeds 4] [--plot FILE] [--json] [--quick]
    python -m benchmarks.resident_churn --runtime [--minutes 10] [--departures 15] [--seeds 2]

Everything is simulated in virtual time (`churn.py`): usual stages, a pipeline with
checkpoints, and resident stages without and with hot spares. Equal devices leave without notice
and come back later. Links are compressed as with `--coding auto`, and data is sent in bf16. The
figures are means over several seeds. Every method meets the same departures.

With `--runtime`, the runtime itself trains a small model, on devices that are as slow as the model
is small (`runtime.py`). Ends with 1 if its losses are not those of plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.resident_churn import runtime
from benchmarks.resident_churn.churn import Policy, changes, run_resident, usual_stages
from benchmarks.resident_churn.costs import ResidentCosts, even_stages, resident_model
from cleave.errors import PlanError
from cleave.files import save_figure
from cleave.planner.coding import CodingPolicy, coded_ratio
from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.model import PsCompute
from cleave.planner.stages.snapshots import least_interval
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from profiles.availability import Availability, Durations
from profiles.fleets import of_profile
from profiles.library import load_availability, load_profile
from simulator.cleave_methods import recoveries

_MBIT: Final = 1e6 / 8
_LATENCY_S: Final = 0.01
_PS: Final = PsCompute(500e9, 0.0, PsRates(1e9 / 8, 1e9 / 8))
_DETECTION_S: Final = 5.0
_USUAL: Final = "usual stages"
_POLICIES: Final = {
    "pipeline with checkpoints": Policy(1, keeps=True, rollback=True),
    "resident": Policy(1),
    "resident, hot spares": Policy(1, hot=True),
    "resident, state kept": Policy(1, keeps=True),
    "resident, hot spares, state kept": Policy(1, hot=True, keeps=True),
}
_TRACES: Final = ("bittorrent-stable", "volunteer", "bittorrent-brief")


@dataclass(frozen=True)
class Fleet:
    """The costs of all methods on one fleet.

    Attributes:
        usual_s, lost_s: seconds of a step by usual stages, and delay of a lost device, both by
            number of devices.
        best_s: the shortest step of resident stages with any number of stages, without losses.
    """

    costs: ResidentCosts
    usual_s: Sequence[float]
    lost_s: Sequence[float]
    best_s: float


def fleet_of(options: argparse.Namespace) -> Fleet:
    """Return the costs of the model on the fleet that the options describe."""
    spec = find_model(options.model)
    speed = of_profile(load_profile(options.profile), "fp32")["flops_per_s"]
    links = options.down_mbit * _MBIT, options.up_mbit * _MBIT
    memory = round(options.memory_gb * 1e9)
    device = DeviceRates(0, *links, speed, _LATENCY_S, memory)
    device = CodingPolicy.AUTO.decided(device, _PS.rates, options.devices)
    devices = {number: replace(device, device=number) for number in range(options.devices)}
    model = resident_model(spec, options.batch, options.seq, options.batch)
    every = {
        count: ResidentCosts(model, even_stages(model, count), devices, _PS)
        for count in range(2, min(options.devices, spec.layers) + 1)
    }
    steps = {n: held.step_s for n, costs in every.items() if (held := costs.step(range(n)))}
    count = options.stages or min(steps, key=lambda n: steps[n])
    usual_s, lost_s = [math.inf], [0.0]
    forecaster = StageSizes(spec, options.seq).forecaster(options.batch, _PS)
    for number in range(1, options.devices + 1):
        progress(f"usual stages on {number} devices")
        try:
            found = forecaster.by_stages(list(devices.values())[:number])
        except PlanError:
            usual_s.append(math.inf)
            lost_s.append(0.0)
            continue
        assert found.stages is not None
        usual_s.append(found.step_s)
        lost = [sum(parts) for parts in recoveries(*found.stages, devices)]
        lost_s.append(_DETECTION_S + statistics.mean(lost))
    return Fleet(every[count], usual_s, lost_s, min(steps.values()))


def churn_of(minutes: float, options: argparse.Namespace) -> Availability:
    """Return sessions and gaps, in which one of the devices leaves every `minutes` on average."""
    cycle_s = 60 * minutes * options.devices
    return Availability(Durations(cycle_s * (1 - options.away)), Durations(cycle_s * options.away))


def row(
    fleet: Fleet, name: str, policy: Policy | None, churn: Availability, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the means of the runs of a policy (None: usual stages) over all seeds."""
    wall_s, costs = options.days * 86_400.0, fleet.costs
    runs = []
    for seed in range(options.seeds):
        events = changes(churn, list(costs.devices), random.Random(seed))
        if policy is None:
            runs.append(usual_stages(fleet.usual_s, fleet.lost_s, events, wall_s))
        else:
            runs.append(run_resident(costs, policy, events, wall_s, random.Random(seed)))
    step_s = fleet.best_s if policy else fleet.usual_s[-1]
    log_bytes = sum(map(costs.logged_bytes, range(len(costs.stages)))) * costs.model.coded_ratio
    tokens = options.batch * options.seq
    return {
        "method": name,
        "interval": policy.interval if policy else None,
        "effective": statistics.mean(run.effective(step_s) for run in runs),
        "least": min(run.effective(step_s) for run in runs),
        "tokens_per_s": statistics.mean(run.steps * tokens / wall_s for run in runs),
        "waited": statistics.mean(run.waited_s / wall_s for run in runs),
        "log_gb": max(run.longest_log for run in runs) * log_bytes / 1e9,
    }


def best(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the row with the largest effective training time."""
    return max(rows, key=lambda each: each["effective"])


def measure(fleet: Fleet, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all rows: departures every few minutes, real traces, and announced departures."""
    churns: list[tuple[str, float | None, Availability]] = [
        (f"{minutes} min", minutes, churn_of(minutes, options)) for minutes in options.minutes
    ]
    churns += [(name, None, load_availability(name).availability) for name in _TRACES]
    rows = []
    for losses, minutes, churn in churns:
        progress(f"losses: {losses}")
        rows.append(
            {"losses": losses, "minutes": minutes} | row(fleet, _USUAL, None, churn, options)
        )
        for name, policy in _POLICIES.items():
            for interval in options.intervals:
                found = row(fleet, name, replace(policy, interval=interval), churn, options)
                rows.append({"losses": losses, "minutes": minutes} | found)
    for share in (0.5, 1.0):
        for name in ("resident", "resident, hot spares"):
            policy = replace(_POLICIES[name], announced=share)
            found = row(fleet, name, policy, churn_of(10, options), options)
            rows.append({"losses": f"10 min, {share:.0%} announced", "minutes": None} | found)
    return rows


def rules(
    fleet: Fleet, rows: Sequence[dict[str, Any]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Compare the rule's interval with the best simulated one, for `resident` stages."""
    found = []
    for minutes in options.minutes:
        of_holders_s = 60 * minutes * options.devices / len(fleet.costs.stages)
        costs = fleet.costs.rule(_DETECTION_S, of_holders_s)
        policy = Policy(costs.best_interval())
        by_rule = row(fleet, "resident", policy, churn_of(minutes, options), options)
        mine = [r for r in rows if r["minutes"] == minutes and r["method"] == "resident"]
        most = best([*mine, by_rule])
        found.append(
            {
                "minutes": minutes,
                "rule_interval": policy.interval,
                "rule_effective": by_rule["effective"],
                "formula": fleet.best_s / costs.step_with_losses_s(policy.interval),
                "best_interval": most["interval"],
                "best_effective": most["effective"],
            }
        )
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Plot effective training time and tokens per second against the time between losses."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = (("effective", "effective training time"), ("tokens_per_s", "tokens per second"))
    for axes, (key, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in (_USUAL, *_POLICIES):
            mine = [r for r in rows if r["method"] == name and r["minutes"] is not None]
            x = sorted({r["minutes"] for r in mine})
            y = [best(r for r in mine if r["minutes"] == at)[key] for at in x]
            style = "--" if not name.startswith("resident") else "-"
            axes.plot(x, y, style, marker="o", markersize=3, linewidth=1.2, label=name)
        axes.set(xscale="log", xlabel="minutes between departures of the fleet", ylabel=label)
        axes.set_xticks(x, [f"{each:g}" for each in x])
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.3)
    figure.axes[0].axhline(0.9, color="grey", linewidth=0.8, linestyle=":")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, 200)


def progress(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _report(fleet: Fleet, rows: Sequence[dict[str, Any]], ruled: Sequence[dict[str, Any]]) -> None:
    costs = fleet.costs
    holders = range(len(costs.stages))
    held = costs.step(holders)
    assert held is not None
    snapshot_bytes = sum(map(costs.snapshot_bytes, holders)) * coded_ratio("fp32")
    least = least_interval(snapshot_bytes, held.traffic_bytes, share=0.1)
    print(
        f"usual stages: {fleet.usual_s[-1]:.1f} s a step\n"
        f"{len(holders)} resident stages: {held.step_s:.1f} s a step ({fleet.best_s:.1f} s with "
        f"the best number\nof stages), {held.traffic_bytes / 1e9:.1f} GB a step, snapshots of "
        f"{snapshot_bytes / 1e9:.1f} GB: a tenth more traffic every {least:.0f} steps\n"
    )
    print(f"{'losses':22} {'method':36} {'steps':>5} {'effective':>9} {'tokens/s':>8} "
          f"{'waits':>6} {'log GB':>6}")  # fmt: skip
    groups = dict.fromkeys((each["losses"], each["method"]) for each in rows)
    for losses, method in groups:
        r = best(e for e in rows if (e["losses"], e["method"]) == (losses, method))
        print(f"{losses:22} {method:36} {r['interval'] or '':>5} {r['effective']:9.3f} "
              f"{r['tokens_per_s']:8.0f} {r['waited']:6.2f} {r['log_gb']:6.0f}")  # fmt: skip
    print("\ninterval by the rule and the best one, without hot spares and kept state")
    for r in ruled:
        print(f"{r['minutes']} min: rule {r['rule_interval']} steps, {r['rule_effective']:.3f} "
              f"(formula {r['formula']:.3f}); best {r['best_interval']} steps, "
              f"{r['best_effective']:.3f}")  # fmt: skip


def numbers(text: str) -> list[int]:
    """Return the integers of a list with commas."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-1.3b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--devices", type=int, default=9)
    parser.add_argument("--stages", type=int, default=0, help="default: the fastest number")
    parser.add_argument("--profile", default="macbook-air-m1", help="device profile, for its speed")
    parser.add_argument("--down-mbit", type=float, default=100)
    parser.add_argument("--up-mbit", type=float, default=20)
    parser.add_argument("--memory-gb", type=float, default=12.8, help="80 %% of 16 GB")
    parser.add_argument("--minutes", type=numbers, default=None)
    parser.add_argument("--intervals", type=numbers, default=[1, 20, 40, 80])
    parser.add_argument("--away", type=float, default=0.1, help="share of time that devices miss")
    parser.add_argument("--days", type=float, default=5)
    parser.add_argument("--seeds", type=int, help="default: 4, or 2 with --runtime")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one seed, two days, two intervals")
    parser.add_argument("--runtime", action="store_true", help="measure the runtime")
    parser.add_argument("--departures", type=int, default=15, help="of a run of --runtime")
    options = parser.parse_args()
    options.minutes = options.minutes or ([10] if options.runtime else [1, 3, 10, 30, 100])
    if options.runtime:
        minutes, seeds = options.minutes[0], options.seeds or 2
        met = runtime.show(options.devices, minutes, options.away, options.departures, seeds)
        sys.exit(0 if met else 1)
    options.seeds = options.seeds or 4
    if options.quick:
        options.seeds, options.days, options.intervals = 1, 2.0, [1, 40]
    fleet = fleet_of(options)
    rows = measure(fleet, options)
    ruled = rules(fleet, rows, options)
    if options.plot:
        title = (
            f"{options.model}, {options.batch} x {options.seq} tokens, {options.devices} devices, "
            f"{options.down_mbit:g}/{options.up_mbit:g} Mbit/s (simulated)"
        )
        draw(rows, options.plot, title)
    if options.json:
        print(json.dumps({"rows": rows, "rule": ruled}, indent=1))
    else:
        _report(fleet, rows, ruled)


if __name__ == "__main__":
    main()
