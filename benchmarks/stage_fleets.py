"""Compare steps by stages on fleets in virtual time with plans, tiles and the server alone.

    python -m benchmarks.stage_fleets [--only opt-125m,opt-1.3b,...] [--seed 42] [--steps 2]
                                      [--micro-batches 8,16,32,64,128] [--ps-gflops 500]
                                      [--optimizer-mparams 1000] [--no-tiles] [--no-thermal]
                                      [--memory 1] [--coding auto|on|off] [--json]
    python -m benchmarks.stage_fleets --crossing [--plot crossing.svg] [--computers 8]
                                      [--computer-gflops 500] [--computer-gb 16] [--card-gbit 1]
                                      [--coding auto|on|off]

Nine home devices on Wi-Fi (a server with a card of 1 Gbit/s) train OPT-125M and OPT-1.3B; 256 and
1024 devices of the published fleet train OPT-13B. Every message of a step is emulated by its size
alone. Data is sent and summed in bf16, computed in fp32. The best plan over numbers of
micro-batches is used. Layers that fit no device are cut in two parts. Frozen parameters are sent in
the first step, which does not count. The PS's optimizer counts. With `--coding off` the bytes of a
step are compared with the lower bound `StepWork.floor_bytes`. Exit code 1 if a goal is missed, if a
step sends more than 1.1 times that bound, or if plan and virtual time differ by more than 5 %.

`--crossing` compares predicted steps by stages with the server alone, for equal computers with
their own links. It emulates both sides of the point where stages begin to win. Exit code 1 if
virtual time contradicts the prediction by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.forecast import micro_batch_counts
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.stages.model import PsCompute, StagePlan
from cleave.planner.stages.prediction import local_step_s, run_bytes
from cleave.planner.stages.search import plan_stages
from cleave.planner.tiles.planner import TilePlanner
from cleave.planner.tiles.report import plan_step
from cleave.workload.registry import find_model
from cleave.workload.stages import Adapters
from cleave.workload.step import step_gemms
from emulator.sized_stages import EmulatedSteps, SizedModel, run_steps
from emulator.virtual import Arithmetic, VirtualRuntime
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet

RANK: Final = 8
DIFFERENCE: Final = 0.05
FLOOR_LIMIT: Final = 1.1

_GBIT: Final = 1e9 / 8
_MBIT: Final = 1e6 / 8
_WIDTH: Final = 80
_LISTED: Final = 12  # maximum number of stages listed one by one
_CROSSING_MODELS: Final = ("opt-125m", "opt-1.3b", "llama2-7b")
_CROSSING_TOKENS: Final = tuple(1024 * 2**n for n in range(9))
_CROSSING_UPLINKS: Final = (5, 20, 100, 1000)
_CROSSING_DOWNLINK: Final = 5  # times the uplink
_CROSSING_LATENCY_S: Final = 0.01
_CROSSING_SEQUENCE: Final = 512


@dataclass(frozen=True)
class Line:
    """A model, batch and fleet.

    Attributes:
        name: name of the line.
        model: name of the model.
        rows, sequence: sequences per batch, and tokens per sequence.
        fleet: a name for `find_fleet`, or `home`.
        card_gbit: the server's network card, each way; 0 for no limit.
        goal_s: maximum seconds of a step.
        adapters: adapters to train instead of the whole model.
    """

    name: str
    model: str
    rows: int
    sequence: int
    fleet: str
    card_gbit: float
    goal_s: float
    adapters: Adapters | None = None


LINES: Final = (
    Line("opt-125m", "opt-125m", 64, 512, "home", 1, 12),
    Line("opt-1.3b", "opt-1.3b", 64, 512, "home", 1, 80),
    Line("opt-1.3b-lora", "opt-1.3b", 64, 512, "home", 1, 30, Adapters(RANK, ("q_proj", "v_proj"))),
    Line("opt-13b-256", "opt-13b", 128, 1024, "paper-256", 10, 500),
    Line("opt-13b-1024", "opt-13b", 128, 1024, "paper-1024", 0, 290),
)


@dataclass(frozen=True)
class Settings:
    """The common settings of all lines.

    Attributes:
        micro_batches: numbers of micro-batches to try.
        ps_flops_per_s: the server's throughput, for the loss or for a whole step alone.
        optimizer_per_s: parameters per second of the server's optimizer.
        seed: seed of the links.
        steps: number of emulated steps.
        tiles: whether to plan tiles, too.
        thermal: whether devices slow down as they get hot.
        memory: factor on the memory that devices offer.
        coding: on which links payloads count as compressed.
    """

    micro_batches: Sequence[int]
    ps_flops_per_s: float
    optimizer_per_s: float
    seed: int
    steps: int
    tiles: bool
    thermal: bool
    memory: float
    coding: CodingPolicy


@dataclass(frozen=True)
class Planned:
    """The best plan for a line.

    Attributes:
        model: model with the best number of micro-batches.
        plan: plan of the stages.
        ps: the PS's rates used for planning.
        took_s: wall seconds of all planning.
    """

    model: SizedModel
    plan: StagePlan
    ps: PsCompute
    took_s: float


def planned(
    makes: Sequence[Callable[[], SizedModel]],
    devices: Sequence[DeviceRates],
    card: PsRates,
    settings: Settings,
) -> Planned:
    """Return the best plan of models that differ in their number of micro-batches.

    Raises:
        DeviceMemoryError: when devices have too little memory.
        PlanError: when there is no plan.
    """
    began_s, best, reason = time.perf_counter(), None, PlanError("no micro-batches")
    for make in makes:
        model = make()
        optimizer_s = model.sizes.trained_parameters / settings.optimizer_per_s
        ps = PsCompute(settings.ps_flops_per_s, optimizer_s, card)
        try:
            plan = plan_stages(model.costs(), devices, ps)
        except PlanError as error:
            reason = error
            continue
        if best is None or plan.step_s < best.plan.step_s:
            best = Planned(model, plan, ps, 0.0)
    if best is None:
        raise reason
    return replace(best, took_s=time.perf_counter() - began_s)


def emulated(runtime: VirtualRuntime, found: Planned, steps: int) -> EmulatedSteps:
    """Run steps of a plan in virtual time."""
    token_s = found.model.sizes.loss_flops / found.ps.flops_per_s
    loss_s = [token_s * tokens for tokens in found.model.tokens]
    return run_steps(runtime, lambda: found.model.work(found.plan), loss_s, steps)


def fleet_of(line: Line, settings: Settings) -> list[FleetDevice]:
    """Return the devices of a line, with throughput in fp32, in which graphs run."""
    home = line.fleet == "home"
    devices = find_fleet("household", seed=settings.seed) if home else find_fleet(line.fleet)
    more = [replace(d, memory_bytes=round(d.memory_bytes * settings.memory)) for d in devices]
    return more if settings.thermal else [replace(device, thermal=None) for device in more]


def card_of(gbit: float) -> PsRates:
    """Return a network card; 0 for no limit."""
    rate = gbit * _GBIT or float("inf")
    return PsRates(rate, rate)


# --- the lines ---


@dataclass(frozen=True)
class Row:
    """The result of a line.

    Attributes:
        line: the line.
        problem: why there is no plan by stages; empty if there is one.
        alone_s: seconds of a step on the server alone.
        tiles_s: predicted seconds of a step by tiles; 0 if not planned.
        found, steps: the plan and its emulated steps; None without a plan.
        names: names of the devices.
        coding: on which links payloads counted as compressed.
        took_s: wall seconds of the emulation.
    """

    line: Line
    problem: str
    alone_s: float
    tiles_s: float
    names: dict[int, str]
    coding: CodingPolicy
    found: Planned | None = None
    steps: EmulatedSteps | None = None
    took_s: float = 0.0

    @property
    def virtual_s(self) -> float:
        """Return the virtual time of a step with the optimizer; infinite without a plan."""
        if self.found is None or self.steps is None:
            return float("inf")
        return self.steps.steps[-1].seconds + self.found.ps.optimizer_s

    @property
    def ratio(self) -> float:
        """Return the planned time as a share of the virtual time."""
        return self.found.plan.step_s / self.virtual_s if self.found is not None else 0.0

    @property
    def good(self) -> bool:
        """Return whether goal, accuracy of the plan and bytes are within their limits."""
        lean = self.floor_ratio is None or self.floor_ratio <= FLOOR_LIMIT
        return lean and self.virtual_s <= self.line.goal_s and abs(1 - self.ratio) <= DIFFERENCE

    @property
    def floor_ratio(self) -> float | None:
        """Return the last step's bytes over the lower bound; None unless coding is off."""
        if self.found is None or self.steps is None or self.coding is not CodingPolicy.OFF:
            return None
        last = self.steps.steps[-1]
        least = sum(self.found.model.work(self.found.plan).floor_bytes(DType.BF16.itemsize))
        return (last.downlink_bytes + last.uplink_bytes) / least

    def memory(self) -> dict[int, tuple[int, int]]:
        """Return planned and found memory by device.

        Sizes alone run no graphs, so the graphs' working memory is the plan's own figure.
        """
        if self.found is None or self.steps is None:
            return {}
        costs = self.found.model.costs()
        most: dict[int, int] = {}
        for stage in self.found.plan.planned:
            working = run_bytes(costs, stage)
            for device in stage.devices:
                most[device] = max(most.get(device, 0), working)
        return {
            device: (round(planned), self.steps.memory_bytes.get(device, 0) + most[device])
            for device, planned in self.found.plan.memory_bytes.items()
        }


def measured(line: Line, settings: Settings) -> Row:
    """Plan and emulate a line."""
    spec, card = find_model(line.model), card_of(line.card_gbit)
    profiles = fleet_of(line, settings)
    runtime = VirtualRuntime(
        profiles, None, Arithmetic.NONE, card, verify=False, coding=settings.coding
    )
    rates = list(runtime.stage_devices().values())
    names = {d.id: d.profile.name for d in runtime.devices.values()}
    counts = [count for count in settings.micro_batches if count <= line.rows]

    def made(count: int, in_parts: bool) -> SizedModel:
        return SizedModel(
            spec, line.rows, line.sequence, count, DType.BF16, None, line.adapters, in_parts
        )

    one = made(counts[0], in_parts=False)
    optimizer_s = one.sizes.trained_parameters / settings.optimizer_per_s
    alone_s = local_step_s(one.costs(), PsCompute(settings.ps_flops_per_s, optimizer_s, card))
    tiles_s = 0.0
    if settings.tiles and line.adapters is None:
        gemms = step_gemms(spec, line.rows, line.sequence, fused_siblings=True)
        of_payloads = payload_rates(rates, DType.BF16.value)
        tiles = plan_step(TilePlanner(card), gemms, ElementBytes(2, 2), of_payloads, card)
        tiles_s = tiles.predicted_s
    try:
        found = planned([partial(made, n, in_parts=False) for n in counts], rates, card, settings)
    except DeviceMemoryError:  # whole layers do not fit
        found = None
    try:
        if found is None:
            makes = [partial(made, count, in_parts=True) for count in counts]
            found = planned(makes, rates, card, settings)
    except PlanError as error:
        return Row(line, str(error), alone_s, tiles_s, names, settings.coding)
    began_s = time.perf_counter()
    steps = emulated(runtime, found, settings.steps)
    took_s = time.perf_counter() - began_s
    return Row(line, "", alone_s, tiles_s, names, settings.coding, found, steps, took_s)


def stages_text(plan: StagePlan, names: dict[int, str]) -> str:
    """Return text on which layers are on which devices."""
    stages = plan.stages
    if len(stages) <= _LISTED and not plan.slices:
        return "; ".join(
            f"{stage.first + 1} to {stage.stop}{' and the loss' if stage.loss else ''} on "
            + ", ".join(names[device] for device in stage.devices)
            for stage in stages
        )
    layers = sorted(stage.stop - stage.first for stage in stages)
    devices = sorted(len(stage.devices) for stage in stages)
    return (
        f"{len(stages)} stages of {layers[0]} to {layers[-1]} layers, each on {devices[0]} to "
        f"{devices[-1]} devices; the loss {plan.where_loss}"
    )


def show(row: Row) -> Iterator[str]:
    """Yield lines of text, starting with the table row."""
    line = row.line
    tiles = f"{row.tiles_s:7.0f}" if row.tiles_s else f"{'-':>7}"
    if row.found is None or row.steps is None:
        yield (
            f"{line.name:<14}{line.goal_s:5.0f}{'-':>8}{'-':>9}{'-':>9}{tiles}{row.alone_s:7.0f}"
            f"{'-':>7}{'-':>7}{'no':>6}"
        )
        yield from textwrap.wrap(f"no stages: {row.problem}", _WIDTH - 2)
        return
    found, last = row.found, row.steps.steps[-1]
    plan = found.plan
    yield (
        f"{line.name:<14}{line.goal_s:5.0f}{plan.step_s:8.2f}{row.virtual_s:9.2f}{row.ratio:9.3f}"
        f"{tiles}{row.alone_s:7.0f}{last.downlink_bytes / 1e9:7.2f}{last.uplink_bytes / 1e9:7.2f}"
        f"{'yes' if row.virtual_s <= line.goal_s else 'no':>6}"
    )
    memory = row.memory()
    most = max(memory.values())
    shares = [got / wanted for wanted, got in memory.values()]
    batches = len(found.model.tokens)
    parts: tuple[str, ...] = (
        f"{batches} micro-batches; layers {stages_text(plan, row.names)}",
        plan.reason,
        f"first step {row.steps.steps[0].seconds + found.ps.optimizer_s:.2f} s, optimizer "
        f"{found.ps.optimizer_s:.2f} s; the PS keeps {last.kept_bytes / 1e9:.2f} GB; memory of "
        f"the device that needs most {most[0] / 1e6:.0f} MB planned, {most[1] / 1e6:.0f} MB found; "
        f"of all, {min(shares):.2f} to {max(shares):.2f} of the plan; planned in "
        f"{found.took_s:.1f} s, emulated in {row.took_s:.1f} s",
    )
    if row.floor_ratio is not None:
        met = "met" if row.floor_ratio <= FLOOR_LIMIT else "NOT met"
        text = (
            f"{row.floor_ratio:.3f} times the least bytes of a step, at most {FLOOR_LIMIT}: {met}"
        )
        parts = (*parts, text)
    for part in parts:
        yield from textwrap.wrap(part, _WIDTH - 2)


HEAD: Final = (
    f"{'':<14}{'goal':>5}{'plan':>8}{'virtual':>9}{'plan/':>9}{'tiles':>7}{'alone':>7}"
    f"{'GB':>7}{'GB':>7}{'goal':>6}\n"
    f"{'':<14}{'s':>5}{'s':>8}{'s':>9}{'virtual':>9}{'s':>7}{'s':>7}{'down':>7}{'up':>7}{'met':>6}"
)


def as_json(row: Row) -> dict[str, Any]:
    """Return a machine-readable row."""
    line = row.line
    found: dict[str, Any] = {
        "line": line.name,
        "model": line.model,
        "rows": line.rows,
        "sequence": line.sequence,
        "fleet": line.fleet,
        "card_gbit": line.card_gbit,
        "goal_s": line.goal_s,
        "alone_s": row.alone_s,
        "tiles_s": row.tiles_s or None,
        "problem": row.problem,
    }
    if row.found is None or row.steps is None:
        return found
    plan = row.found.plan
    return found | {
        "micro_batches": len(row.found.model.tokens),
        "kept_batches": {row.names[d]: asdict(kept) for d, kept in plan.kept_batches.items()},
        "stages": [
            {
                "first": s.first,
                "stop": s.stop,
                "devices": list(s.devices),
                "loss": s.loss,
                "slice": None if s.slice is None else asdict(s.slice),
            }
            for s in plan.planned
        ],
        "reason": plan.reason,
        "optimizer_s": row.found.ps.optimizer_s,
        "plan_s": plan.step_s,
        "virtual_s": [step.seconds + row.found.ps.optimizer_s for step in row.steps.steps],
        "ratio": row.ratio,
        "downlink_bytes": [step.downlink_bytes for step in row.steps.steps],
        "uplink_bytes": [step.uplink_bytes for step in row.steps.steps],
        "floor_ratio": row.floor_ratio,
        "ps_kept_bytes": row.steps.steps[-1].kept_bytes,
        "memory_bytes": {
            row.names[device]: {"planned": wanted, "found": got}
            for device, (wanted, got) in row.memory().items()
        },
    }


# --- the crossing ---


@dataclass(frozen=True)
class Computers:
    """Equal computers, each behind its own link.

    Attributes:
        count: number of computers.
        flops_per_s: throughput of each in fp32.
        memory_bytes: memory that each offers.
        card: the server's network card.
    """

    count: int
    flops_per_s: float
    memory_bytes: int
    card: PsRates

    def runtime(self, uplink_mbit: float, coding: CodingPolicy) -> VirtualRuntime:
        """Return a virtual-time runtime of the computers with these uplinks."""
        devices = [
            FleetDevice(
                name=f"computer-{number}",
                flops_per_s=self.flops_per_s,
                downlink_bytes_per_s=_CROSSING_DOWNLINK * uplink_mbit * _MBIT,
                uplink_bytes_per_s=uplink_mbit * _MBIT,
                latency_s=_CROSSING_LATENCY_S,
                memory_bytes=self.memory_bytes,
            )
            for number in range(self.count)
        ]
        return VirtualRuntime(
            devices, None, Arithmetic.NONE, self.card, verify=False, coding=coding
        )


@dataclass(frozen=True)
class Point:
    """A batch size and its step times.

    Attributes:
        tokens: tokens of the batch.
        alone_s: seconds on the server alone.
        stages_s: predicted seconds by stages; infinite without a plan.
        virtual_s: seconds by stages in virtual time; 0 if not emulated.
    """

    tokens: int
    alone_s: float
    stages_s: float
    virtual_s: float = 0.0

    @property
    def wins(self) -> bool:
        """Return whether stages are predicted to be faster than the server alone."""
        return self.stages_s < self.alone_s


@dataclass(frozen=True)
class Curve:
    """One model behind one uplink.

    Attributes:
        model: name of the model.
        adapters: whether only adapters are trained.
        uplink_mbit: uplink of each computer in Mbit/s.
        points: points by rising tokens.
        problem: reason of the last failed plan.
    """

    model: str
    adapters: bool
    uplink_mbit: float
    points: Sequence[Point]
    problem: str = ""

    @property
    def first(self) -> int | None:
        """Return the index of the first point from which stages always win; None if never."""
        found = None
        for number in reversed(range(len(self.points))):
            if not self.points[number].wins:
                break
            found = number
        return found

    @property
    def from_tokens(self) -> float | None:
        """Return the number of tokens from which stages win, interpolated in logarithms."""
        number = self.first
        if number is None or number == 0:
            return None if number is None else float(self.points[0].tokens)
        below, above = self.points[number - 1 : number + 1]
        if below.stages_s == float("inf"):
            return float(above.tokens)
        low = math.log(below.stages_s / below.alone_s)
        high = math.log(above.stages_s / above.alone_s)
        share = low / (low - high)
        return float(below.tokens * (above.tokens / below.tokens) ** share)


def curve(
    model: str, uplink_mbit: float, computers: Computers, settings: Settings, *, lora: bool
) -> Curve:
    """Predict steps at all batch sizes, and emulate them where stages begin to win."""
    spec, adapters = find_model(model), Adapters(RANK, ("q_proj", "v_proj")) if lora else None
    rates = list(computers.runtime(uplink_mbit, settings.coding).stage_devices().values())
    points: list[Point] = []
    plans: list[Planned | None] = []
    problem = ""
    for tokens in _CROSSING_TOKENS:
        rows = tokens // _CROSSING_SEQUENCE
        makes = [
            lambda count=count, rows=rows: SizedModel(
                spec, rows, _CROSSING_SEQUENCE, count, DType.BF16, None, adapters
            )
            for count in micro_batch_counts(rows, computers.count)
        ]
        one = makes[0]()
        optimizer_s = one.sizes.trained_parameters / settings.optimizer_per_s
        alone = PsCompute(settings.ps_flops_per_s, optimizer_s, computers.card)
        alone_s = local_step_s(one.costs(), alone)
        try:
            found = planned(makes, rates, computers.card, settings)
        except PlanError as error:
            problem = str(error)
            points.append(Point(tokens, alone_s, float("inf")))
            plans.append(None)
            continue
        points.append(Point(tokens, alone_s, found.plan.step_s))
        plans.append(found)
    made = Curve(model, lora, uplink_mbit, points, problem)
    first = len(points) if made.first is None else made.first
    for number in (first - 1, first):
        if 0 <= number < len(points) and (found_there := plans[number]) is not None:
            steps = emulated(
                computers.runtime(uplink_mbit, settings.coding), found_there, settings.steps
            )
            virtual_s = steps.steps[-1].seconds + found_there.ps.optimizer_s
            points[number] = replace(points[number], virtual_s=virtual_s)
    return replace(made, points=points)


def show_curve(made: Curve) -> str:
    """Return a line of the table."""
    tokens, number = made.from_tokens, made.first
    what = f"{made.model}{' LoRA' if made.adapters else ''}"
    if tokens is None or number is None:
        text, at = "never", made.points[-1]
    else:
        sign = "<=" if number == 0 else ""
        text, at = f"{sign}{tokens:,.0f}", made.points[number]
    before = made.points[number - 1] if number else None

    def times(point: Point | None) -> str:
        if point is None:
            return f"{'-':>9}{'-':>8}{'-':>8}"
        return f"{point.alone_s:9.1f}{point.stages_s:8.1f}{point.virtual_s:8.1f}"

    return f"{what:<15}{made.uplink_mbit:5.0f}{text:>10}{times(before)}{times(at)}"


CROSSING_HEAD: Final = (
    f"{'':<15}{'uplink':>6}{'from':>9}{'just below it, s':>25}{'just above it, s':>25}\n"
    f"{'':<15}{'Mbit/s':>6}{'tokens':>9}{'alone':>9}{'stages':>8}{'virtual':>8}"
    f"{'alone':>9}{'stages':>8}{'virtual':>8}"
)


def draw(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Draw the speed-up of stages over the server alone, with a panel per model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = sorted({(c.model, c.adapters) for c in curves}, key=lambda p: (p[1], p[0]))
    rows = len({adapters for _, adapters in panels})
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, len(panels) // rows, sharex=True, sharey=True, squeeze=False)
    for panel, (model, adapters) in zip(axes.flat, panels, strict=True):
        for made in (c for c in curves if (c.model, c.adapters) == (model, adapters)):
            points = [p for p in made.points if p.stages_s < float("inf")]
            panel.plot(
                [p.tokens for p in points],
                [p.alone_s / p.stages_s for p in points],
                marker=".",
                label=f"{made.uplink_mbit:g} Mbit/s up",
            )
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=f"{model}{', LoRA' if adapters else ''}")
        panel.set_xticks(_CROSSING_TOKENS, [f"{t // 1024}k" for t in _CROSSING_TOKENS])
        panel.set_xticks([], minor=True)
        panel.set_yticks([0.1, 0.2, 0.5, 1, 2, 5], ["0.1", "0.2", "0.5", "1", "2", "5"])
        panel.set_yticks([], minor=True)
        panel.grid(linewidth=0.3)
    for panel in axes[-1]:
        panel.set_xlabel("tokens a step")
    for panel in axes[:, 0]:
        panel.set_ylabel("the server alone / stages")
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    # Keep text as text in the SVG, and make the file reproducible.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "crossing"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


# --- the program ---


def fleets(options: argparse.Namespace, settings: Settings) -> bool:
    """Print the table of lines; return whether all goals are met."""
    wanted = [line for line in LINES if not options.only or line.name in options.only.split(",")]
    rows = []
    if not options.json:
        said = (
            f"Nine home devices on wifi-lan, links drawn with seed {settings.seed}, and the "
            f"published fleet; compute in fp32{'' if settings.thermal else ', never hot'}"
            f"{'' if settings.memory == 1 else f', {settings.memory:g} times their memory'}, "
            f"everything sent in bf16 (coding: {settings.coding.value}). The server computes "
            f"{settings.ps_flops_per_s / 1e9:g} GFLOP/s "
            f"(the loss where it is there, and all of a step alone) and its optimizer "
            f"steps {settings.optimizer_per_s / 1e6:g} million parameters a second. Step "
            f"{settings.steps} of each line."
        )
        print(textwrap.fill(said, _WIDTH), HEAD, sep="\n", flush=True)
    for line in wanted:
        row = measured(line, settings)
        rows.append(row)
        if not options.json:
            first, *more = show(row)
            print(first, *(f"  {text}" for text in more), sep="\n", flush=True)
    if options.json:
        print(json.dumps([as_json(row) for row in rows], indent=1))
    return all(row.good for row in rows)


def crossing(options: argparse.Namespace, settings: Settings) -> bool:
    """Print and draw the crossings; return whether virtual time agrees."""
    computers = Computers(
        options.computers,
        options.computer_gflops * 1e9,
        round(options.computer_gb * 1e9),
        card_of(options.card_gbit),
    )
    title = (
        f"{computers.count} computers of {options.computer_gflops:g} GFLOP/s and "
        f"{options.computer_gb:g} GB, uplinks of their own, downlinks {_CROSSING_DOWNLINK} times "
        f"as fast, {_CROSSING_LATENCY_S * 1000:g} ms; the server: {options.ps_gflops:g} GFLOP/s, "
        f"a card of {options.card_gbit:g} Gbit/s"
    )
    if not options.json:
        said = (
            f"{title}; sequences of {_CROSSING_SEQUENCE} tokens in bf16, computed in fp32; LoRA of "
            f"rank {RANK}. From so many tokens a step on, stages are predicted to be faster than "
            f"the server alone."
        )
        print(textwrap.fill(said, _WIDTH), CROSSING_HEAD, sep="\n", flush=True)
    curves = []
    for model in _CROSSING_MODELS:
        for lora in (False, True):
            for uplink in _CROSSING_UPLINKS:
                made = curve(model, uplink, computers, settings, lora=lora)
                curves.append(made)
                if not options.json:
                    print(show_curve(made), flush=True)
    if options.json:
        print(json.dumps([crossing_json(made) for made in curves], indent=1))
    if options.plot:
        draw(curves, options.plot, "\n".join(textwrap.wrap(title, 110)))
    clear = (
        point
        for made in curves
        for point in made.points
        if point.virtual_s and abs(1 - point.virtual_s / point.alone_s) > DIFFERENCE
    )
    return all((point.virtual_s < point.alone_s) == point.wins for point in clear)


def crossing_json(made: Curve) -> dict[str, Any]:
    """Return a machine-readable curve."""
    return {
        "model": made.model,
        "lora_rank": RANK if made.adapters else None,
        "uplink_mbit": made.uplink_mbit,
        "from_tokens": made.from_tokens,
        "problem": made.problem,
        "points": [
            {
                "tokens": p.tokens,
                "alone_s": p.alone_s,
                "stages_s": p.stages_s if p.stages_s < float("inf") else None,
                "virtual_s": p.virtual_s or None,
            }
            for p in made.points
        ],
    }


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of lines, separated by commas")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batches", default="8,16,32,64,128")
    parser.add_argument("--ps-gflops", type=float, default=500.0)
    parser.add_argument("--optimizer-mparams", type=float, default=1000.0, help="a second")
    parser.add_argument("--no-tiles", action="store_true")
    parser.add_argument("--no-thermal", action="store_true")
    parser.add_argument("--memory", type=float, default=1.0, help="times what devices have")
    parser.add_argument("--coding", default="auto", help="auto, on or off")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--crossing", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--computers", type=int, default=8)
    parser.add_argument("--computer-gflops", type=float, default=500.0)
    parser.add_argument("--computer-gb", type=float, default=16.0)
    parser.add_argument("--card-gbit", type=float, default=1.0)
    options = parser.parse_args()
    settings = Settings(
        [int(count) for count in options.micro_batches.split(",")],
        options.ps_gflops * 1e9,
        options.optimizer_mparams * 1e6,
        options.seed,
        options.steps,
        tiles=not options.no_tiles,
        thermal=not options.no_thermal,
        memory=options.memory,
        coding=CodingPolicy.of(options.coding),
    )
    good = crossing(options, settings) if options.crossing else fleets(options, settings)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
