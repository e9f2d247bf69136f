"""Train Llama-2-7B with frozen 4-bit weights (QLoRA), emulated on four 3 GB devices and for real.

    python -m benchmarks.qlora [--rows 8] [--seq 512] [--skip-real]

- virtual time: `DEVICES` phones on Wi-Fi that offer 3 GB each train by stages, with weights in 16,
  8 and 4 bits. Prints their peak memory (limits: 3 GB each, 5 GB of weights in all), and the
  plan's time against the virtual time;
- real: one step on this machine with random weights and layers as graphs on emulated devices that
  compute. Prints the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.stage_fleets import DIFFERENCE, Settings, card_of, emulated, planned
from cleave.arrays import DType
from cleave.errors import PlanError
from cleave.planner.coding import CodingPolicy
from cleave.workload.registry import find_model
from cleave.workload.stages import Adapters, Bits
from emulator.sized_stages import SizedModel
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet

MODEL: Final = "llama2-7b"
DEVICES: Final = 4
PROFILE: Final = "snapdragon-8-gen-2"
OFFERED_BYTES: Final = 3 * 10**9
WEIGHTS_BYTES: Final = 5 * 10**9
RANK: Final = 8
LORA: Final = f"r={RANK},targets=q_proj+v_proj,bits=4"
SETTINGS: Final = Settings(
    [2, 4, 8], 500e9, 1e9, 42, 2, tiles=False, thermal=True, memory=1.0, coding=CodingPolicy.AUTO
)


def phones(*, heat: bool = True) -> list[FleetDevice]:
    """Return the devices, with thermal slowdown unless `heat` is False."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "phones.toml"
        path.write_text(
            f'[[group]]\nprofile = "{PROFILE}"\ncount = {DEVICES}\nnetwork = "wifi-lan"\n'
        )
        devices = find_fleet(str(path), seed=SETTINGS.seed)
    offering = [replace(device, memory_bytes=OFFERED_BYTES) for device in devices]
    return offering if heat else [replace(device, thermal=None) for device in offering]


def in_virtual_time(bits: Bits | None, rows: int, sequence: int) -> bool:
    """Plan and emulate steps; return whether a plan exists and meets the limits."""
    card = card_of(1)
    cool, hot = (
        VirtualRuntime(
            phones(heat=heat), None, Arithmetic.NONE, card, verify=False, coding=SETTINGS.coding
        )
        for heat in (False, True)
    )
    rates = list(cool.stage_devices().values())
    width = "bf16" if bits is None else f"{int(bits)} bits"

    def made(count: int) -> SizedModel:
        adapters = Adapters(RANK, ("q_proj", "v_proj"), bits)
        return SizedModel(find_model(MODEL), rows, sequence, count, DType.BF16, None, adapters)

    costs = made(1).costs()
    frozen = sum(cost.frozen_bytes for cost in (*costs.layers, costs.loss))
    makes = [partial(made, count) for count in SETTINGS.micro_batches if count <= rows]
    try:
        found = planned(makes, rates, card, SETTINGS)
    except PlanError as error:
        print(f"{MODEL}, weights in {width} ({frozen / 1e9:.2f} GB): {error}", flush=True)
        return False
    steps, hot_steps = (emulated(runtime, found, SETTINGS.steps) for runtime in (cool, hot))
    took_s, hot_s = (s.steps[-1].seconds + found.ps.optimizer_s for s in (steps, hot_steps))
    most = max(found.plan.memory_bytes.values())
    arrays = max(steps.memory_bytes.values())
    down_gb = [step.downlink_bytes / 1e9 for step in steps.steps]
    print(
        f"{MODEL}, weights in {width} ({frozen / 1e9:.2f} GB): {rows} x {sequence} tokens take "
        f"{took_s:.1f} s in virtual time, {found.plan.step_s / took_s:.3f} of that planned, and "
        f"{hot_s:.1f} s on phones that get hot; a device holds {most / 1e9:.2f} GB at most as "
        f"planned, {arrays / 1e9:.2f} GB of it arrays; first step {down_gb[0]:.2f} GB down, later "
        f"ones {down_gb[-1]:.2f}",
        flush=True,
    )
    right = abs(found.plan.step_s / took_s - 1) <= DIFFERENCE
    return right and max(most, arrays) <= OFFERED_BYTES and frozen <= WEIGHTS_BYTES


def for_real(sequence: int) -> bool:
    """Train one step on this machine."""
    import cleave
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.job import JobSpec
    from cleave.training.loop.records import Record, StepRecord
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.loop.start import train

    losses: list[float] = []
    seconds: list[float] = []

    def report(record: Record) -> None:
        if isinstance(record, StepRecord):
            losses.append(record.loss)
            seconds.append(record.wall_s)

    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, cleave.emulated(phones()) as fleet:
        text = Path(folder) / "text.txt"
        text.write_text("def step(a, b):\n    return a + b\n" * 2000)
        job = JobSpec(
            MODEL, str(text), steps=1, batch=1, seq=sequence, dtype="bf16", method="stages",
            lora=LORA, checkpoint_every=1,
        )  # fmt: skip
        run = RunFolder.create(Path(folder) / "runs", "qlora")
        train(job, run, TrainContext(fleet, report))
    took_s = time.perf_counter() - began_s
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    print(
        f"a real step of {MODEL}, {LORA}, 1 x {sequence} tokens: loss {losses[0]:.3f} in "
        f"{seconds[0]:.0f} s, {took_s:.0f} s with making weights and graphs; at most "
        f"{_peak_bytes() / 1e9:.1f} GB of this machine's {memory / 1e9:.1f} GB",
        flush=True,
    )
    return bool(losses) and _peak_bytes() < memory


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences of a batch, virtual time")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--skip-real", action="store_true")
    options = parser.parse_args()
    for bits in (None, Bits.EIGHT):
        in_virtual_time(bits, options.rows, options.seq)
    good = in_virtual_time(Bits.FOUR, options.rows, options.seq)
    if not options.skip_real:
        good &= for_real(options.seq)
    print(json.dumps({"good": good}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
