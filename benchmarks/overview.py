"""Measure the cost of one overview in the server's loop: 1000 known devices, a GEMM in flight.

python -m benchmarks.overview --devices 1000
"""

from __future__ import annotations

import argparse
import statistics
import time

from cleave.arrays import DType, empty
from cleave.energy.typical import load_typical
from cleave.gemm import Gemm
from cleave.planner.plan import ElementBytes
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import messages
from cleave.protocol.codec import encode
from cleave.protocol.messages import Op, Role
from cleave.scheduler.counters import FleetCounters, StepProgress
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.server.access import Clocks
from cleave.server.api.event_log import EventLog
from cleave.server.api.overview import Overview, Question, ServerFacts
from cleave.server.block_times import TimeSpan
from cleave.server.jobs.energy import EnergyMeter
from profiles.library import load_profiles, profile_names


class Fleet:
    """A fleet of devices without sockets."""

    def __init__(self, devices: int) -> None:
        self.manager = SessionManager()
        names = profile_names()
        for id in range(1, devices + 1):
            now_s = time.monotonic()
            self.manager.opened(id, now_s)
            hello = messages.Hello(
                Role.DEVICE,
                name=f"device-{id}",
                ops=(Op.MATMUL.value,),
                dtypes=("fp32",),
                memory_bytes=10**9,
                profile=names[id % len(names)],
                flops_per_s=1e10 + 1e7 * id,
                downlink_bytes_per_s=1e7,
                uplink_bytes_per_s=5e6,
            )
            self.manager.received(id, hello, now_s)

    def counters(self) -> FleetCounters:
        return FleetCounters()

    def progress(self) -> StepProgress | None:
        """Return None: no step is running."""
        return None

    def timeline(self, session: int) -> list[TimeSpan]:
        return []


def main() -> None:
    """Measure and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--looks", type=int, default=100)
    options = parser.parse_args()
    fleet, profiles = Fleet(options.devices), load_profiles()
    energy = EnergyMeter(profiles.values(), load_typical(), None)
    overview = Overview(ServerFacts(), EventLog(time.time), profiles, energy, Clocks())
    overview.live = fleet
    gemm = Gemm(4096, 4096, 4096)
    a, b = MatrixRef(1, False), MatrixRef(2, False)
    job = GemmJob(1, gemm, a, b, ElementBytes(4, 4, 4), "fp32", "fp32", TilePlanner())
    matrix = empty(4096, 4096, DType.FP32)
    fleet.manager.submit(job, matrix, matrix, time.monotonic())
    answers, encodings, size = [], [], 0
    for number in range(options.looks):
        began_s = time.perf_counter()
        data = overview.answer(Question())
        answered_s = time.perf_counter()
        size = sum(memoryview(p).nbytes for p in encode(messages.Reply(number, ok=True, data=data)))
        encodings.append(time.perf_counter() - answered_s)
        answers.append(answered_s - began_s)
    rows, tiles = len(data["devices"]["rows"]), len(data["plan"]["tiles"])
    print(f"{options.devices} devices ({rows} rows, {tiles} tiles), a reply of {size:,} bytes")
    for name, times in (("computed", answers), ("encoded", encodings)):
        median_s, most_s = statistics.median(times), max(times)
        print(f"{name}: median {1e3 * median_s:.1f} ms, most {1e3 * most_s:.1f} ms")


if __name__ == "__main__":
    main()
