"""Cleave's stages on emulated devices, in virtual time.

A step takes the devices' virtual time plus this machine's time for the server's part. A device
computes at the speed that `cleave profile device` finds for a layer's graph with one thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from benchmarks.side_by_side.contenders.served import coding, training
from benchmarks.side_by_side.run import Run
from cleave.device.policy import parse_memory

_SPEED: Final = """
from cleave.machine.graph_choice import GraphChoice
print(GraphChoice().flops_per_s())
"""


def run(run: Run) -> None:
    """Train in one process on emulated devices."""
    setting = run.setting
    measured = subprocess.run(
        [sys.executable, "-c", _SPEED],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    fleet = run.logs / "fleet.toml"
    fleet.write_text(
        f'[[group]]\nname = "device"\ncount = {setting.devices}\n'
        f"flops_per_s = {float(measured.stdout)}\n"
        f"memory_bytes = {parse_memory(setting.memory, None)}\n"
        f"downlink_bytes_per_s = {setting.link.down}\n"
        f"uplink_bytes_per_s = {setting.link.up}\n"
        f"latency_s = {setting.round_trip_ms / 2000}\n"
    )
    emulated = ("--fleet", str(fleet), "--devices", str(setting.devices), "--method", "stages")
    runs = ("--runs", str(run.logs / "runs"), "--coding", coding(run))
    job = run.processes.start("train", training(run, *emulated, *runs))
    run.follow(run.processes.records(job))
