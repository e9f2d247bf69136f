"""Compare emulated devices with real ones on this machine.

    python -m benchmarks.emulator_fidelity [--profile FILE] [--tiles N] [--steps N]

Profiles this machine (one thread), then runs `cleave join` processes and emulated devices of that
profile on the same GEMMs:

- tile times of one pinned process, on shapes that were not profiled: median error at most
  max(5 %, 1.5 x the error between two real runs), p95 at most max(15 %, 2 x that error);
- tile times of two and four concurrent processes, against the measured contention;
- training steps of opt-tiny on three processes behind real rate-limited links (network namespaces,
  tbf: 55/7.5, 100/20 and 20/5 Mbit/s down/up): emulated step time within 10 %. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

import cleave
from benchmarks.common import joined, make_trainer
from benchmarks.contention import measure_contention
from benchmarks.links import MBIT, LimitedNamespace, limited_namespace, namespaces_missing
from cleave.arrays import Buffer, DType, empty, narrow
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.fleet.runtime import Runtime
from cleave.gemm import Gemm, Span, Tile, cut_tile, even_cuts
from cleave.machine.backends import choose
from cleave.machine.sensors import hold_strips_well
from cleave.planner.plan import DeviceRates, ElementBytes, Plan, PlannedTile, Residency
from cleave.server.fleet_server import Server
from cleave.training.loop.job import JobSpec
from cleave.transport.join_url import parse_join_url
from cleave.transport.tls import Security
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.device_profile import DeviceProfile
from profiles.fleet_device import FleetDevice
from profiles.fleets import of_profile
from profiles.library import read_profile

LINKS = ((55 * MBIT, 7.5 * MBIT), (100 * MBIT, 20 * MBIT), (20 * MBIT, 5 * MBIT))
VARIANTS = ((DType.FP32, DType.FP32), (DType.BF16, DType.BF16), (DType.BF16, DType.FP32))
REPEATS = 7  # of a tile in one run; the median counts because other load disturbs the machine
LAYOUTS = ((False, False), (False, True), (True, False))


@dataclass(frozen=True)
class Task:
    """A GEMM, and the number of strips per side of its tiles."""

    gemm: Gemm
    strips: int
    dtype: DType
    out: DType
    transposes: tuple[bool, bool]


def tasks(count: int, devices: int, seed: int) -> list[Task]:
    """Return GEMMs of random odd shapes, each up to about 30 ms of computing per device."""
    rng = np.random.default_rng(seed)
    made: list[Task] = []
    while len(made) < count:
        m, n = (round(np.exp(rng.uniform(np.log(48), np.log(1500)))) for _ in range(2))
        k = round(np.exp(rng.uniform(np.log(64), np.log(3000))))
        if not 2e6 < m * n * k < 1.5e9:
            continue
        # GEMMs of one dtype follow one another, as in training.
        dtype, out = VARIANTS[len(made) * len(VARIANTS) // count]
        layout = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
        strips = int(rng.integers(1, 4))
        made.append(Task(Gemm(m * devices, n, k), strips, dtype, out, layout))
    return made


@dataclass
class Rows:
    """A planner that gives every device equally many rows, in `strips` strips per side."""

    strips: int = 1

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`."""
        order = sorted(devices, key=lambda d: d.device)
        tiles = []
        for device, rows in zip(order, even_cuts(Span(0, gemm.m), len(order)), strict=True):
            tile = Tile(rows, Span(0, gemm.n), Span(0, gemm.k))
            cut = cut_tile(tile, self.strips, self.strips)
            tiles.append(PlannedTile(device.device, cut, 0, 0, 0.0))
        return Plan(gemm, tuple(tiles), 0.0)


def tile_times(fleet: Fleet, todo: Sequence[Task]) -> list[float]:
    """Return the reported seconds of computing for each task and device."""
    planner = Rows()
    fleet.planner = planner
    assert isinstance(fleet.runtime, Runtime)
    manager = fleet.runtime.manager
    rng = np.random.default_rng(0)
    took = [{i: list[float]() for i in sorted(manager.sessions)} for _ in todo]
    for _ in range(1 + REPEATS):  # cycle through all shapes, as in training
        for task, of_task in zip(todo, took, strict=True):
            gemm, (turn_a, turn_b) = task.gemm, task.transposes
            planner.strips = task.strips
            sides = []
            for rows, columns, turned in ((gemm.m, gemm.k, turn_a), (gemm.k, gemm.n, turn_b)):
                shape = (columns, rows) if turned else (rows, columns)
                numbers = rng.standard_normal(shape, np.float32)
                buffer = Buffer(np.ascontiguousarray(narrow(numbers, task.dtype)), task.dtype)
                sides.append(Side(fleet.operand(buffer), turned))
            a, b = sides
            before = {i: s.counters.compute_s for i, s in manager.sessions.items()}
            fleet.submit(a, b, empty(gemm.m, gemm.n, task.out)).result()
            for i, session in manager.sessions.items():
                of_task[i].append(session.counters.compute_s - before[i])
    # The first run builds kernels for a shape.
    return [statistics.median(times[1:]) for each in took for times in each.values()]


def real_times(todo: Sequence[Task], devices: int) -> list[float]:
    """Return `tile_times` of `cleave join` processes with one thread; a single one is pinned."""
    pin = ("--cores", "1") if devices == 1 else ()
    with cleave.serve() as server, joined(server.url, devices, "--threads", "1", *pin):
        server.fleet.wait_for(devices)
        tile_times(server.fleet, todo[:6])  # warm
        return tile_times(server.fleet, todo)


def emulated_times(profile: DeviceProfile, todo: Sequence[Task], devices: int) -> list[float]:
    """Return `tile_times` of emulated devices of a profile, with this machine's contention."""
    device = device_of(profile, devices)
    fleet = Fleet(VirtualRuntime([device] * devices, None, Arithmetic.NONE))
    return tile_times(fleet, todo)


def device_of(profile: DeviceProfile, together: int, link: tuple[float, ...] = ()) -> FleetDevice:
    """Return an emulated device of a profile, one of `together` that compute at once."""
    values = of_profile(profile, "fp32")
    factor = contention(together)
    down, up, latency_s = link or (1e9, 1e9, 0.0)
    return FleetDevice(
        name=profile.name,
        downlink_bytes_per_s=down,
        uplink_bytes_per_s=up,
        latency_s=latency_s,
        **(values | {"compute": values["compute"].scaled(factor), "thermal": None}),
    )


@cache
def measured_contention() -> tuple[float, ...]:
    """Return the slowdown of a tile if 1, 2, ... processes multiply at once on this machine."""
    return measure_contention(choose("auto").backend.name, 2.0)


def contention(together: int) -> float:
    """Return the slowdown of a tile if `together` processes multiply at once."""
    known = measured_contention()
    if together <= len(known):
        return known[together - 1]
    return known[-1] * together / len(known)  # more processes than cores take turns


def show_errors(name: str, got: Sequence[float], wanted: Sequence[float]) -> tuple[float, float]:
    """Print and return the median and p95 of the relative errors."""
    errors = np.abs(np.array(got) / np.array(wanted) - 1)
    median, p95 = float(np.median(errors)), float(np.quantile(errors, 0.95))
    print(f"  {name}: median {median:.1%}, p95 {p95:.1%}", flush=True)
    return median, p95


def compare_tiles(given: Path | None, count: int, folder: Path) -> DeviceProfile:
    """Run part one; return the profile of this machine.

    The profile is measured between two real runs, whose difference shows how much the speed of a
    shared machine drifts.
    """
    todo = tasks(count, 1, seed=11)
    first = real_times(todo, 1)
    profile = read_profile(given) if given else measure(folder)
    second = real_times(todo, 1)
    print(f"tile times, one process, {count} shapes that were not measured")
    noise = show_errors("one real run against another", second, first)
    real = [(x + y) / 2 for x, y in zip(first, second, strict=True)]
    got = show_errors("emulated against real", emulated_times(profile, todo, 1), real)
    limits = max(0.05, 1.5 * noise[0]), max(0.15, 2 * noise[1])
    met = "met" if got[0] <= limits[0] and got[1] <= limits[1] else "NOT met"
    print(f"  at most {limits[0]:.1%} and {limits[1]:.1%}: {met}", flush=True)
    return profile


def compare_contention(profile: DeviceProfile, count: int) -> None:
    """Run part two."""
    for devices in (2, 4):
        todo = tasks(count // devices, devices, seed=12)
        print(
            f"tile times, {devices} processes at once on {os.cpu_count()} cores, contention "
            f"{contention(devices):.2f}"
        )
        real = real_times(todo, devices)
        show_errors("emulated against real", emulated_times(profile, todo, devices), real)


# --- rate-limited links ---


def measured_link(namespace: LimitedNamespace, url: str) -> tuple[float, float, float]:
    """Return downlink, uplink and one-way latency by `cleave profile link` in a namespace."""
    command = namespace.inside(sys.executable, "-m", "cleave_cli", "profile", "link")
    done = subprocess.run(
        [*command, "--server", url, "--json"], capture_output=True, text=True, check=True
    )
    link = json.loads(done.stdout)["link"]
    return (
        link["downlink_bytes_per_s"]["p50"],
        link["uplink_bytes_per_s"]["p50"],
        link["round_trip_s"]["p50"] / 2,
    )


@contextmanager
def limited_devices(server: Server) -> Iterator[list[tuple[float, float, float]]]:
    """Run three real devices behind limited links; yield their measured rates."""
    with ExitStack() as stack:
        links, processes = [], []
        for number, (down, up) in enumerate(LINKS):
            namespace = stack.enter_context(limited_namespace(number, down, up))
            url = parse_join_url(server.url).at(namespace.host).text
            links.append(measured_link(namespace, url))
            command = namespace.inside(sys.executable, "-m", "cleave_cli", "join", url)
            command += ["--json", "--threads", "1"]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            server.fleet.wait_for(len(LINKS))
            yield links
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def compare_steps(profile: DeviceProfile, steps: int) -> None:
    """Run part three."""
    missing = namespaces_missing()
    if missing:
        print(f"training steps behind limited links: skipped, {missing}")
        return
    job = JobSpec(model="opt-tiny", steps=steps + 1, batch=4, seq=128, method="tiles")
    with (
        cleave.serve(host="0.0.0.0", security=Security(insecure_lan=True)) as server,
        limited_devices(server) as links,
    ):
        print("training steps of opt-tiny behind limited links, as measured:")
        for down, up, latency_s in links:
            print(f"  {down / MBIT:.1f}/{up / MBIT:.1f} Mbit/s, {2e3 * latency_s:.1f} ms")
        real = step_times(job, server.fleet)
    devices = [
        replace(device_of(profile, len(LINKS), link), name=f"limited-{i}")
        for i, link in enumerate(links)
    ]
    emulated = step_times(job, cleave.emulated(devices))
    a, b = statistics.median(real), statistics.median(emulated)
    print(f"  real steps {_all(real)}, emulated {_all(emulated)}")
    met = "met" if abs(b / a - 1) <= 0.1 else "NOT met"
    print(f"  emulated over real {b / a:.3f}, at most 10 % off: {met}", flush=True)


def step_times(job: JobSpec, fleet: Fleet) -> list[float]:
    """Return the fleet seconds of each step except the first, which plans and sends more."""
    trainer = make_trainer(job, fleet)
    times = []
    for _ in range(job.steps):
        before = fleet.counters()
        trainer.train_step()
        times.append((fleet.counters() - before).fleet_s)
    return times[1:]


def _all(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) + " s"


def measure(folder: Path) -> DeviceProfile:
    """Profile this machine as a user does."""
    file = folder / "here.toml"
    command = [sys.executable, "-m", "cleave_cli", "profile", "device", "--threads", "1"]
    command += ["--quick", "--budget", "120", "--sustained", "0", "-o", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return read_profile(file)


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", help="instead of measuring this machine")
    parser.add_argument("--tiles", type=int, default=90)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    hold_strips_well()
    given = Path(options.profile) if options.profile else None
    with tempfile.TemporaryDirectory() as folder:
        profile = compare_tiles(given, options.tiles, Path(folder))
    compare_contention(profile, options.tiles)
    compare_steps(profile, options.steps)


if __name__ == "__main__":
    main()
