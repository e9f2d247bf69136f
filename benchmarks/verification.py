"""Measure the checks of results: their cost, false accusations, and missed errors.

    python -m benchmarks.verification [--quick] [--batch 4] [--seq 128]

1. Cost in training: OPT-125M, fp32, a server and one device process over loopback. CPU time of the
   checks (of the thread that runs them; they start no other threads) against the whole server
   process in the same steps (at most 10 %). As a control, median process time per step with checks
   on and off in turn.
2. Cost in counts: operations against the GEMM's (at most 3 %) and bytes read against A, B and C
   once (at most 3), counted by the code itself, blocks of 512 x 512 at several depths, and plans of
   fleets that cut tiles differently.
3. Honest blocks, 250,000 in each of fp32, bf16, bf16 returned as fp32 partial sums, and fp16:
   realistic numbers, including outlier columns, and difficult ones, summed by numpy, by torch, and
   in order. None may be called wrong, no device may be quarantined. Blocks are 16 x 16 to save
   time; `benchmarks.false_alarms` judges products of real training.
4. Liars: a fifth of an emulated fleet lies in one of nine ways, through the real session manager
   and scheduler. Every placed block is compared with the exact product. GEMMs of 320 x 320, depth
   128, are cut evenly, because the planner would search a new plan for every joining liar. A
   quarantined liar returns under a new name before the next GEMM. A block is wrong by more than the
   stated tolerance if an element is off by more than `cleave.verify.LONE` deviations of its row. No
   such block may reach the model; the table also counts wrong blocks within the tolerance.
5. Lone errors in an ordinary column, by dtype, width of the block, and size of one outlier column:
   the size that passes half of the time, in units of the root mean square of ordinary elements (at
   most 0.6 in bf16 and 1e-3 in fp32 at 512 columns). An error passes if it reaches the model.
6. Steering: errors of at most half the tolerance along a fixed direction in all weight gradients of
   a bf16 layer, twelve blocks per step. Steps until the device is detected, in 20 seeds (at most
   50), and the number of misrounded elements.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

import cleave
from benchmarks.common import joined, make_trainer
from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.device.core import Order
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import Side
from cleave.gemm import Block, Gemm, Span, Tile, cut_tile, even_cuts, wavefront
from cleave.machine.backends import Compute, NumpyBackend, TorchBackend, execute
from cleave.planner.plan import DeviceRates, ElementBytes, EvenCut, Plan, PlannedTile, Residency
from cleave.planner.tiles.planner import TilePlanner
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.scheduler.sessions.reputation import EVIDENCE, Reputation, Rounding, Wrong
from cleave.scheduler.tiles.tasks import Task
from cleave.training.loop.job import JobSpec
from cleave.verify import LONE, GemmCheck
from cleave.verify.projection import Pass, compiled_pass, numpy_pass
from cleave.verify.rounding import variance
from emulator.virtual import Arithmetic, VirtualRuntime, _VirtualDevice
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet

MODES = (
    (DType.FP32, DType.FP32),
    (DType.BF16, DType.BF16),
    (DType.BF16, DType.FP32),
    (DType.FP16, DType.FP16),
)
SIDE = 16


def said(what: str, value: float, limit: float, shown: str) -> None:
    """Print a figure, its limit, and whether the limit is met."""
    met = "met" if value <= limit else "NOT met"
    print(f"{what}: {shown} (at most {limit:g}): {met}", flush=True)


def name(dtype: DType, out: DType) -> str:
    """Return `bf16`, or `bf16>fp32` for partial sums."""
    return dtype.value if dtype is out else f"{dtype.value}>{out.value}"


@cache
def projector() -> Pass:
    """Return the check's pass as in a longer run: compiled loops if numba is installed."""
    return compiled_pass() if find_spec("numba") else numpy_pass


# --- 1 ---


def training_cost(batch: int, seq: int, rounds: int, steps: int) -> None:
    """Run part one."""
    job = JobSpec(
        model="opt-125m", batch=batch, seq=seq, steps=10_000, checkpoint_every=0, method="tiles"
    )
    shares: list[float] = []
    per_step: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        trainers = {}
        for checking in (True, False):
            server = stack.enter_context(cleave.serve(verify=checking))
            options = ("--backend", "numpy", "--threads", "1")
            stack.enter_context(joined(server.url, 1, *options))
            server.fleet.wait_for(1)
            trainers[checking] = server, make_trainer(job, server.fleet)
            trainers[checking][1].train_step()
        for _ in range(rounds):
            for checking, (server, trainer) in trainers.items():
                before, began_s = server.fleet.counters(), time.process_time()
                for _ in range(steps):
                    trainer.train_step()
                spent_s = time.process_time() - began_s
                per_step[checking].append(spent_s / steps)
                if checking:
                    shares.append((server.fleet.counters() - before).verify_s / spent_s)
    on, off = (statistics.median(per_step[checking]) for checking in (True, False))
    share = statistics.median(shares)
    what = f"checks, share of the server's processor time, batch {batch} x {seq}"
    said(what, share, 0.10, f"{share:.1%} ({min(shares):.1%} to {max(shares):.1%})")
    print(f"  control: {on:.2f} s a step with checks, {off:.2f} without: {1 - off / on:.1%} of it")


# --- 2 ---


def counted(gemm: Gemm, blocks: list[Block], dtype: DType) -> tuple[float, float]:
    """Return the share of the GEMM's operations, and the passes over A, B and C."""
    rng = np.random.default_rng(0)
    a, b = (
        Buffer(arrays.narrow(rng.standard_normal(shape, np.float32), dtype), dtype)
        for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n))
    )
    check = GemmCheck(a, b, blocks, rng, projector())
    partial = 0
    for block in blocks:
        part = arrays.empty(block.m.size, block.n.size, dtype)
        NumpyBackend().matmul(a.region(block.m, block.k), b.region(block.k, block.n), part)
        partial += part.nbytes
        assert check.judge(block, part).fault is None
    return check.flops / gemm.flops, check.read_bytes / (a.nbytes + b.nbytes + partial)


def counts(quick: bool) -> None:
    """Run part two."""
    for dtype in (DType.FP32, DType.BF16):
        flops, passes = 0.0, 0.0
        for depth in (512, 2048) if quick else (512, 1024, 4096, 16384):
            sides = Gemm(1024, 1024, depth)
            whole = Tile(Span(0, sides.m), Span(0, sides.n), Span(0, depth))
            found = counted(sides, list(wavefront(cut_tile(whole, 2, 2))), dtype)
            flops, passes = max(flops, found[0]), max(passes, found[1])
        what = f"blocks of 512 x 512, depth 512 and more, {dtype.value}"
        said(f"operations, {what}", flops, 0.03, f"{flops:.2%}")
        said(f"bytes read against A, B and C once, {what}", passes, 3, f"{passes:.2f}")
    worst = 0.0
    for devices in (2, 8) if quick else (2, 8, 64):
        rates = [
            DeviceRates(
                i, d.downlink_bytes_per_s, d.uplink_bytes_per_s, d.flops_per_s, 0.0, d.memory_bytes
            )
            for i, d in enumerate(paper_fleet(devices))
        ]
        for gemm in (Gemm(512, 768, 768), Gemm(768, 768, 4096), Gemm(4096, 768, 768)):
            plan = TilePlanner().plan(gemm, ElementBytes(4, 4), rates)
            blocks = [block for tile in plan.tiles for block in wavefront(tile.cut)]
            worst = max(worst, counted(gemm, blocks, DType.FP32)[1])
    said("bytes read, plans of 2 to 64 devices", worst, 3, f"{worst:.2f}")


# --- 3 ---


def activations(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return numbers with a few far larger columns, as in transformers."""
    values = rng.standard_normal(shape)
    values[:, rng.integers(0, shape[1], 1 + shape[1] // 100)] *= 60
    return values


def gradients(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return tiny numbers whose scale differs from row to row; some rows are zero."""
    values = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((shape[0], 1))) * 1e-4
    values[rng.random(shape[0]) < 0.2] = 0
    return values


def positive(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return positive numbers, so that sums grow with the depth."""
    return np.abs(rng.standard_normal(shape)) + 1


def cancelling(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return large numbers whose sums along rows and columns nearly vanish."""
    values = rng.standard_normal(shape)
    values[:, 1::2] = -values[:, : 2 * (shape[1] // 2) : 2]
    values[1::2] = -values[: 2 * (shape[0] // 2) : 2]
    return values * 100 + rng.standard_normal(shape) * 1e-3


def heavy(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return numbers with log-normal magnitudes."""
    return rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))


def sparse(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Return numbers as after a ReLU."""
    return np.maximum(rng.standard_normal(shape) - 1, 0)


KINDS = (activations, gradients, positive, cancelling, heavy, sparse)


def one_after_another(a: Buffer, b: Buffer, out: Buffer) -> None:
    """Multiply like a device without blocking: sum products in order, in fp32."""
    left, right = a.float32(), b.float32()
    total = np.zeros(out.shape, np.float32)
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k]
    out.array[...] = arrays.narrow(total, out.dtype)


def honest(blocks_wanted: int) -> None:
    """Run part three."""
    devices: list[Callable[[Buffer, Buffer, Buffer], None]] = [
        NumpyBackend().matmul,
        TorchBackend().matmul,
        one_after_another,
    ]
    for dtype, out in MODES:
        rng = np.random.default_rng(1)
        blocks, alarms, quarantined, gemms = 0, 0, 0, 0
        again, most = 0, 0.0
        reputations = [Reputation() for _ in devices]
        roundings = [Rounding() for _ in devices]
        while blocks < blocks_wanted:
            depth = int(rng.choice((5, 64, 200, 512, 768)))
            m, n = int(rng.integers(4, 12)) * SIDE, int(rng.integers(4, 12)) * SIDE
            kinds = rng.choice(len(KINDS), 2)
            shapes = (m, depth), (depth, n)
            a, b = (
                Buffer(arrays.narrow(KINDS[k](rng, s).astype(np.float32), dtype), dtype)
                for k, s in zip(kinds, shapes, strict=True)
            )
            whole = Tile(Span(0, m), Span(0, n), Span(0, depth))
            cut = list(wavefront(cut_tile(whole, m // SIDE, n // SIDE)))
            check = GemmCheck(a, b, cut, rng, projector())
            number = gemms % len(devices)
            for block in cut:
                result = arrays.empty(block.m.size, block.n.size, out)
                parts = a.region(block.m, block.k), b.region(block.k, block.n)
                with np.errstate(all="ignore"):
                    devices[number](*parts, result)
                judgement = check.judge(block, result)
                again += judgement.recomputed
                roundings[number].saw(judgement.spots, judgement.misrounded)
                most = max(most, roundings[number].evidence)
                fault = judgement.fault
                if fault is None:
                    reputations[number].was_right()
                    continue
                alarms += 1
                reputations[number].was_wrong(Wrong.GROSS if fault.gross else Wrong.SMALL)
                if reputations[number].quarantined:
                    quarantined += 1
                    reputations[number] = Reputation()
            gemms += 1
            blocks += len(cut)
        what = f"{blocks:,} honest blocks of {gemms} GEMMs, {name(dtype, out)}"
        said(f"called wrong of {what}", alarms, 0, str(alarms))
        said("  devices quarantined", quarantined, 0, str(quarantined))
        spots = sum(rounding.spots for rounding in roundings)
        print(
            f"  rows computed again {again / (SIDE * blocks):.1e}; not the right rounding "
            f"{sum(r.misrounded for r in roundings)} of {spots:,} elements; most evidence "
            f"{most:.1f} nats of {EVIDENCE:.1f}",
            flush=True,
        )


# --- 4 ---


Lie = Callable[["Liar", Array, Compute], None]


class Liar:
    """The state of a lying device."""

    def __init__(self, lie: Lie, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.answers = 0
        self.before: Array | None = None
        self._lie = lie

    def change(self, block: Array, order: Compute) -> None:
        """Falsify a right block, or leave it unchanged."""
        self.answers += 1
        self._lie(self, block, order)


def zeros(_: Liar, block: Array, order: Compute) -> None:
    block[...] = 0


def stale(liar: Liar, block: Array, order: Compute) -> None:
    """Replace the block by the previous one if shapes match; the first block stays right."""
    before, liar.before = liar.before, block.copy()
    if before is not None and before.shape == block.shape:
        block[...] = before


def one_element(liar: Liar, block: Array, order: Compute) -> None:
    block[liar.rng.integers(block.shape[0]), liar.rng.integers(block.shape[1])] += 3 * block.std()


def scaled(_: Liar, block: Array, order: Compute) -> None:
    block *= 1.05


def exponent_bit(liar: Liar, block: Array, order: Compute) -> None:
    """Flip an exponent bit of a random element; rounding may hide the change of a small one."""
    bits = block.view(np.uint32)
    place = liar.rng.integers(block.shape[0]), liar.rng.integers(block.shape[1])
    bits[place] ^= np.uint32(1) << np.uint32(23 + liar.rng.integers(8))


def spread_noise(liar: Liar, block: Array, order: Compute) -> None:
    """Add ten times an honest device's rounding error to all elements."""
    noise = liar.rng.standard_normal(block.shape).astype(np.float32)
    sigma = deviations(*operands(order), block, order.out)[:, None]
    block += noise * (10 * sigma / np.sqrt(block.shape[1])).astype(np.float32)


def half_depth(_: Liar, block: Array, order: Compute) -> None:
    """Sum only over the first half of the depth."""
    a, b = operands(order)
    middle = a.shape[1] // 2
    block[...] = a[:, :middle] @ b[:middle]


def right_until_trusted(liar: Liar, block: Array, order: Compute) -> None:
    """Leave a hundred blocks right, then change one element."""
    if liar.answers > 100:
        one_element(liar, block, order)


def cancelling_pairs(liar: Liar, block: Array, order: Compute) -> None:
    """Change two rows and two columns without changing the sums along either."""
    rows = liar.rng.choice(block.shape[0], 2, replace=False)
    columns = liar.rng.choice(block.shape[1], 2, replace=False)
    error = 5 * block.std()
    block[np.ix_(rows, columns)] += np.array([[error, -error], [-error, error]])


LIES: tuple[Lie, ...] = (
    zeros,
    stale,
    one_element,
    scaled,
    exponent_bit,
    spread_noise,
    half_depth,
    right_until_trusted,
    cancelling_pairs,
)


def operands(order: Compute) -> tuple[Array, Array]:
    """Return A and B of a block, in fp32."""
    sides = [(a.payload.float32(), b.payload.float32()) for a, b in order.pairs]
    left = np.concatenate([a.T if order.transpose_a else a for a, _ in sides], axis=1)
    right = np.concatenate([b.T if order.transpose_b else b for _, b in sides], axis=0)
    return left, right


def deviations(a: Array, b: Array, exact: Array, dtype: DType) -> Array:
    """Return the rounding's standard deviation in each row of a block, (rows,)."""
    a_square, length = np.square(a).sum(1), np.square(exact).sum(1)
    b_square = np.asarray(np.square(b).sum())
    return np.asarray(np.sqrt(variance(a_square, b_square, length, b.shape[1], a.shape[1], dtype)))


class LyingShell(VirtualRuntime):
    """A runtime with an emulated fleet that includes liars, which return after quarantine.

    Attributes:
        placed: number of blocks that reached the output.
        lied: number of falsified answers.
        above, below: number of wrong placed blocks, above and below the stated tolerance.
    """

    def __init__(self, members: list[FleetDevice], lie: Lie, seed: int) -> None:
        self.liars: dict[int, Liar] = {}
        self.lie = lie
        self.placed = self.lied = self.above = self.below = 0
        self.quarantined: Counter[bool] = Counter()
        self.exact: tuple[Array, Array] | None = None
        self.gone: list[FleetDevice] = []
        super().__init__(members, NumpyBackend(), Arithmetic.BLOCKS, seed=seed, verify="all")

    def _product(self, device: _VirtualDevice, order: Order) -> Buffer:
        assert isinstance(order, Compute)
        block = execute(NumpyBackend(), order)
        if not device.profile.name.startswith("liar") or order.run >= FIRST_ID:
            return block
        liar = self.liars.setdefault(device.id, Liar(self.lie, device.id))
        values = block.float32().copy()
        with np.errstate(all="ignore"):
            liar.change(values, order)
        changed = Buffer(arrays.narrow(values, order.out), order.out)
        self.lied += not np.array_equal(changed.array, block.array)
        return changed

    def place(self, task: Task, payload: Any) -> None:
        assert self.exact is not None
        block, dtype = task.gemm.block, DType(task.gemm.out)
        a = self.exact[0][block.m.start : block.m.stop, block.k.start : block.k.stop]
        b = self.exact[1][block.k.start : block.k.stop, block.n.start : block.n.stop]
        exact = a @ b
        sigma = deviations(a, b, exact, dtype)
        off = np.abs(payload.float32() - exact)
        self.placed += 1
        if not (off <= LONE * sigma[:, None]).all():
            self.above += 1
        elif (off > 4 * sigma[:, None]).any():
            self.below += 1
        super().place(task, payload)

    def end(self, session: int) -> None:
        device = self.devices.get(session)
        super().end(session)
        if device is not None:
            lying = device.profile.name.startswith("liar")
            self.quarantined[lying] += 1
            if lying:
                self.gone.append(device.profile)

    def come_again(self) -> None:
        """Make liars whose sessions ended join again under new names."""
        while self.gone:
            self.join(self.gone.pop())
        while any(self._joining(device) for device in self.devices.values()):
            self._step()


class Evenly:
    """A planner that gives every device equally many rows and all columns, in 16 blocks."""

    def plan(
        self,
        gemm: Gemm,
        element: ElementBytes,
        devices: Sequence[DeviceRates],
        residencies: Sequence[Residency] = (),
    ) -> Plan:
        """See `Planner.plan`."""
        rows = even_cuts(Span(0, gemm.m), len(devices))
        tiles = [
            PlannedTile(d.device, EvenCut(Tile(m, Span(0, gemm.n), Span(0, gemm.k)), 2, 8), 0, 0, 0)
            for d, m in zip(devices, rows, strict=True)
        ]
        return Plan(gemm, tuple(tiles), 0.0)


def liars(blocks_wanted: int) -> None:
    """Run part four."""
    table = []
    for dtype, out in ((DType.FP32, DType.FP32), (DType.BF16, DType.BF16)):
        placed = above = blamed = 0
        for number, lie in enumerate(LIES):
            members = [
                FleetDevice("honest" if i % 5 else "liar", 1e9, 1e8, 1e8, 0.0, 10**8)
                for i in range(20)
            ]
            runtime = LyingShell(members, lie, number)
            fleet = Fleet(runtime, Evenly())
            rng = np.random.default_rng(number)
            while runtime.placed < blocks_wanted / len(LIES):
                a, b = (
                    Buffer(arrays.narrow(rng.standard_normal(shape, np.float32), dtype), dtype)
                    for shape in ((320, 128), (128, 320))
                )
                runtime.come_again()
                runtime.exact = a.float32().astype(np.float64), b.float32().astype(np.float64)
                left, right = (Side(fleet.operand(x)) for x in (a, b))
                fleet.submit(left, right, arrays.empty(320, 320, out)).result()
            placed += runtime.placed
            above += runtime.above
            blamed += runtime.quarantined[False]
            table.append(
                f"  {name(dtype, out):5} {lie.__name__:20} {runtime.placed:7,} {runtime.lied:6,} "
                f"{runtime.quarantined[True]:6,} {runtime.above:6} {runtime.below:6}"
            )
        what = f"wrong blocks above the tolerance that reached the model, of {placed:,}, "
        said(what + name(dtype, out), above, 0, str(above))
        said(f"honest devices among them quarantined, {name(dtype, out)}", blamed, 0, str(blamed))
    print(f"  {'':5} {'lie':20} {'placed':>7} {'lies':>6} {'quar.':>6} {'above':>6} {'below':>6}")
    print("\n".join(table), flush=True)


# --- 5 ---


DEPTH = 512


def passes_half(
    dtype: DType, out: DType, columns: int, outlier: float, trials: int, rng: np.random.Generator
) -> float:
    """Return the lone error that passes half of the time, over the rms of ordinary elements."""
    left = rng.standard_normal((64, DEPTH), np.float32)
    right = rng.standard_normal((DEPTH, columns), np.float32)
    right[:, columns // 2] *= outlier
    a, b = (Buffer(arrays.narrow(x, dtype), dtype) for x in (left, right))
    exact = a.float32() @ b.float32()
    honest = Buffer(arrays.narrow(exact, out), out).float32()
    rms = float(np.sqrt(np.square(np.delete(exact, columns // 2, 1)).mean()))
    block = Block(Span(0, 64), Span(0, columns), (Span(0, DEPTH),))

    def passed(share: float) -> bool:
        """Return whether an error of this size passes."""
        wrong = honest.copy()
        column = int(rng.integers(columns - 1))
        column += column >= columns // 2
        wrong[rng.integers(64), column] += share * rms * rng.choice([-1, 1])
        changed = Buffer(arrays.narrow(wrong, out), out)
        judgement = GemmCheck(a, b, [block], rng, projector()).judge(block, changed)
        return judgement.fault is None and judgement.mended is None

    low, high = 1e-7, 10.0
    while high / low > 1.1:
        middle = math.sqrt(low * high)
        if sum(passed(middle) for _ in range(trials)) > trials / 2:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def smallest(trials: int, widths: Sequence[int]) -> None:
    """Run part five."""
    print(f"lone error that passes half of the time, of ordinary rms; 64 rows, depth {DEPTH}")
    limits = {(DType.FP32, DType.FP32): 1e-3, (DType.BF16, DType.BF16): 0.6}
    for dtype, out in MODES:
        rng = np.random.default_rng(2)
        for columns in widths:
            # An outlier of 1000 times the rest overflows fp16, as it would in training.
            sizes = (1, 30) if dtype is DType.FP16 else (1, 30, 1000)
            found = [passes_half(dtype, out, columns, size, trials, rng) for size in sizes]
            shown = ", ".join(f"{x:.2g} (x{size})" for x, size in zip(found, sizes, strict=True))
            what = f"  {name(dtype, out):9} {columns:5} columns, one larger"
            if columns == 512 and (dtype, out) in limits:
                said(what, max(found), limits[dtype, out], shown)
            else:
                print(f"{what}: {shown}", flush=True)


def steered(share: float, seed: int, blocks: int) -> tuple[int, Rounding]:
    """Steer by a share of the tolerance for `blocks` blocks or until the device is detected.

    Returns:
        The number of the block at which the device was detected, or `blocks` + 1; and the counts of
        rounding.
    """
    rng, rounding = np.random.default_rng(seed), Rounding()
    block = Block(Span(0, 192), Span(0, DEPTH), (Span(0, DEPTH),))
    direction = rng.choice([-1.0, 1.0], DEPTH)
    for number in range(1, blocks + 1):
        a, b = (
            Buffer(arrays.narrow(rng.standard_normal(s, np.float32), DType.BF16), DType.BF16)
            for s in ((192, DEPTH), (DEPTH, DEPTH))
        )
        exact = a.float32().astype(np.float64) @ b.float32()
        tolerance = LONE / 2 * deviations(a.float32(), b.float32(), exact, DType.BF16)
        error = tolerance[:, None] * share / np.sqrt(DEPTH) * direction
        values = arrays.narrow((exact + error).astype(np.float32), DType.BF16)
        judgement = GemmCheck(a, b, [block], rng, projector()).judge(
            block, Buffer(values, DType.BF16)
        )
        rounding.saw(judgement.spots, judgement.misrounded)
        if judgement.fault is not None or rounding.biased:
            return number, rounding
    return blocks + 1, rounding


def steering(seeds: int) -> None:
    """Run part six."""
    for share in (0.5, 0.1, 0.05, 0.02):
        runs = [steered(share, seed, 12 * 50) for seed in range(seeds)]
        last = max(number for number, _ in runs)
        wrong, spots = (sum(getattr(r, x) for _, r in runs) for x in ("misrounded", "spots"))
        what = f"steps until one who steers by {share:g} of the tolerance is found out, of {seeds}"
        shown = f"{-(-last // 12)} (block {last} at the latest; {wrong} of {spots} misrounded)"
        said(what, -(-last // 12), 50, shown)


def parts(options: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """Yield the parts to run."""
    quick = options.quick
    wanted = 3000 if quick else 100_000
    widths = (64, 512) if quick else (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    yield lambda: training_cost(options.batch, options.seq, 1 if quick else 5, 1 if quick else 3)
    yield lambda: counts(quick)
    yield lambda: honest(wanted if quick else 250_000)
    yield lambda: liars(wanted)
    yield lambda: smallest(20 if quick else 100, widths)
    yield lambda: steering(3 if quick else 20)


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks and steps")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--part", type=int, choices=range(1, 7), help="only this one")
    options = parser.parse_args()
    for number, part in enumerate(parts(options), 1):
        if options.part == number:
            part()
        elif options.part is None:
            # Each part runs in a separate process. Small products of many emulated devices use one
            # thread; training keeps numpy's default.
            alone = {} if number == 1 else {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.verification", "--part", str(number)]
            subprocess.run(command + sys.argv[1:], env=os.environ | alone, check=True)


if __name__ == "__main__":
    main()
