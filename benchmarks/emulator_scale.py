"""Measure the emulator's scale and speed, and the accuracy of the planner's predictions.

    python -m benchmarks.emulator_scale [--quick] [--real-time]

- closed form: on equal devices, emulated makespan against the planner's prediction (at most 2 %);
- events: one OPT-13B layer on paper-1024, forward and backward, event by event, without planning
  (60,000 events/s or more on one core), with the planner's own number of strips and with 16;
- whole steps of OPT-13B on paper-1024 and OPT-1.3B on paper-8192 (at most 120 s each);
- 1000 real-time devices join a `cleave serve` (at most 15 s) and train opt-tiny on it; memory of
  both processes (below 1.5 GB each);
- 200 home-mix devices that join and leave share a step of opt-tiny: devices used, and duration.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np

from benchmarks.common import resident_bytes
from cleave.arrays import Buffer, DType
from cleave.fleet.product import Side
from cleave.planner.plan import ElementBytes, PsRates
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.streaming import predicted_s
from cleave.workload.registry import find_model
from cleave_cli.own_server import own_server
from emulator.sized_step import SizedStepper
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet

TOKENS = 128 * 1024


def matrix(rows: int, columns: int) -> Buffer:
    """Return a bf16 matrix with a shape but no memory of its own."""
    return Buffer(np.broadcast_to(np.uint16(0), (rows, columns)), DType.BF16)


def closed_form() -> None:
    """Run the closed-form part."""
    worst = 0.0
    for devices in (1, 8, 64, 256):
        for m, n, k in ((16384, 4096, 4096), (4096, 4096, 131072), (8192, 16384, 4096)):
            for latency_s in (0.0, 0.02):
                members = [
                    FleetDevice(f"d{i}", 6e12, 50e6, 8e6, latency_s, 2 * 10**9)
                    for i in range(devices)
                ]
                # These predictions are for uncompressed payloads.
                fleet = emulated(members, compute=False, coding="off")
                runtime = fleet.runtime
                assert isinstance(runtime, VirtualRuntime)
                begin_s = runtime.now_s
                a, b = fleet.operand(matrix(m, k)), fleet.operand(matrix(k, n))
                future = fleet.submit(Side(a), Side(b), matrix(m, n))
                future.result()
                plan = future.job.plan
                assert plan is not None
                rates = {d.device: d for d in runtime.fleet_rates()[1]}
                said = predicted_s(plan, ElementBytes(2, 2), rates)
                worst = max(worst, abs((runtime.now_s - begin_s) / said - 1))
    print(f"closed form: emulated makespan at most {worst:.2%} off the prediction (at most 2 %)")


def events(strips: str, ps: PsRates | None) -> None:
    """Run the events part."""
    planner = TilePlanner(ps) if ps else TilePlanner()
    fleet = emulated(
        paper_fleet(1024), compute=False, coding="off"
    )  # uncompressed, so that it uses the plans made in advance
    fleet.planner = planner
    stepper = SizedStepper(fleet, find_model("opt-13b"), TOKENS, DType.BF16, reuse=False)
    planning_s = _planning_s(fleet, planner)
    began_s = time.process_time()
    layer = stepper.layer(1)
    took_s = time.process_time() - began_s
    print(
        f"one OPT-13B layer on paper-1024, {strips}: {layer.events:,} events, "
        f"{layer.events / took_s:,.0f} a second (at least 60,000), {took_s:.1f} s; planning apart, "
        f"{planning_s:.1f} s; the layer takes {layer.fleet_s:.2f} s",
        flush=True,
    )


def _planning_s(fleet: object, planner: TilePlanner) -> float:
    """Plan a layer's GEMMs in advance for the emulation; return the seconds."""
    rates = fleet.runtime.fleet_rates()[1]  # type: ignore[attr-defined]
    from cleave.gemm import Gemm

    began_s = time.process_time()
    wide, width = 20480, 5120
    for inputs, outputs in ((width, width), (width, wide), (wide, width)):
        for gemm in (
            Gemm(TOKENS, outputs, inputs),
            Gemm(TOKENS, inputs, outputs),
            Gemm(outputs, inputs, TOKENS),
        ):
            planner.plan(gemm, ElementBytes(2, 2), rates)
    return time.process_time() - began_s


def whole_step(model: str, devices: int) -> None:
    """Run the part with whole steps."""
    began_s = time.perf_counter()
    fleet = emulated(paper_fleet(devices), compute=False)
    step = SizedStepper(fleet, find_model(model), TOKENS, DType.BF16).step()
    took_s = time.perf_counter() - began_s
    print(
        f"a step of {model} on paper-{devices}: emulated in {took_s:.1f} s (at most 120), planning "
        f"included; {step.events:,} events, {step.reused_events:,} of recorded timelines; "
        f"{step.fleet_s:.0f} s virtual",
        flush=True,
    )


def real_time(devices: int, steps: int) -> None:
    """Run the real-time part."""
    with own_server() as server:
        command = [sys.executable, "-m", "cleave_cli", "emulate", "--devices", str(devices)]
        command += ["--server", server.url, "--json"]
        emulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert emulator.stdout is not None
        began_s = time.perf_counter()
        connected = 0
        while connected < devices:
            connected = json.loads(emulator.stdout.readline()).get("connected", 0)
        joined_s = time.perf_counter() - began_s
        print(
            f"{devices} real-time devices joined within {joined_s:.1f} s (at most 15)", flush=True
        )
        train = [sys.executable, "-m", "cleave_cli", "train", "--model", "opt-tiny", "--json"]
        train += ["--steps", str(steps), "--server", server.operator_url, "--method", "tiles"]
        done = subprocess.run(train, capture_output=True, text=True, check=True)
        losses = [
            r["loss"] for r in map(json.loads, done.stdout.splitlines()) if r["event"] == "step"
        ]
        peaks = [resident_bytes(p, "VmHWM") / 1e9 for p in (server.process.pid, emulator.pid)]
        now = [resident_bytes(p) / 1e9 for p in (server.process.pid, emulator.pid)]
        emulator.terminate()
        last = emulator.stdout.read().splitlines()[-1]
        emulator.wait()
        summary = json.loads(last)
        print(
            f"opt-tiny trained {steps} steps, losses {losses[0]:.3f} to {losses[-1]:.3f}; memory "
            f"at most {peaks[0]:.2f} GB server, {peaks[1]:.2f} GB emulator (below 1.5 each), in "
            f"the end {now[0]:.2f} and {now[1]:.2f}; {summary['late']} of {summary['answers']} "
            f"answers late, the worst by {summary['worst_s']:.2f} s",
            flush=True,
        )


def home_mix(devices: int, steps: int) -> None:
    """Run the part with devices that join and leave."""
    with own_server() as server:
        cleave = [sys.executable, "-m", "cleave_cli"]
        fleet = ["--fleet", "home-mix", "--devices", str(devices), "--churn", "600:120"]
        command = [*cleave, "emulate", *fleet, "--server", server.url, "--json"]
        emulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert emulator.stdout is not None
        for _ in range(10):  # one record per second; some devices are away
            present = json.loads(emulator.stdout.readline()).get("connected", 0)
        operator = ["--server", server.operator_url, "--json"]
        train = [*cleave, "train", "--model", "opt-tiny", "--steps", str(steps), *operator]
        done = subprocess.run(
            [*train, "--method", "tiles"], capture_output=True, text=True, check=True
        )
        seen = subprocess.run([*cleave, "status", *operator], capture_output=True, check=True)
        table = json.loads(seen.stdout)["devices"]
        emulator.terminate()
        summary = json.loads(emulator.stdout.read().splitlines()[-1])
        emulator.wait()
    blocks = [row[table["columns"].index("blocks")] for row in table["rows"]]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    took = [f"{r['wall_s']:.1f}" for r in records if r["event"] == "step"]
    given_again = sum(r["reissued"] for r in records if r["event"] == "step")
    print(
        f"{devices} home-mix devices, {present} of them there at first: "
        f"{sum(map(bool, blocks))} of the {len(blocks)} in the end did work, the busiest "
        f"{max(blocks) / sum(blocks):.1%} of it; steps took {', '.join(took)} s, {given_again} "
        f"tasks given again; {summary['late'] / summary['answers']:.0%} of the answers late, the "
        f"worst by {summary['worst_s']:.2f} s",
        flush=True,
    )


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the layer at 16 strips")
    parser.add_argument("--real-time", action="store_true", help="real-time devices alone")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not options.real_time:
        _virtual(options.quick)
    real_time(1000, 5)
    home_mix(200, 3)


def _virtual(quick: bool) -> None:
    closed_form()
    events("the planner's own strips", None)
    if not quick:
        events("16 strips a side", PsRates())
    whole_step("opt-13b", 1024)
    whole_step("opt-1.3b", 8192)


if __name__ == "__main__":
    main()
