"""Check that training with state on devices follows plain PyTorch, whenever a device is killed.

    python -m benchmarks.resident_exact [--head] [--quick] [--families opt,llama,qwen3,gpt2]
                                        [--stop-s 60]
    python -m benchmarks.resident_exact --drift [--steps 200]
    python -m benchmarks.resident_exact --liars [--runs 40]

Without options: ten steps of small models on four device processes of a server. Each device has
one layer, with its weights and optimizer state. In steps 3, 6 and 9, a device gets SIGKILL: in a
forward or a backward pass, before, during or after its update, while it returns its state, or while
it repeats logged steps after another loss; or two devices get it at once. In one more case, a
device gets SIGSTOP in step 3 and continues after `--stop-s` seconds. In another one, connections
are cut for 5 seconds, and no step may be repeated. After step 5, the server fetches the state. The
relative difference of losses from plain PyTorch in fp32 may be 1e-4 (fp32) or 2e-2 (bf16).

With `--head`, the device of the last layer also has the LM head. With OPT and GPT-2, it also
computes the embedding.

With `--drift`, in virtual time: `--steps` steps of the OPT on four emulated devices, one of which
is lost in every fifth step. The difference may be 1e-3.

With `--liars`, in virtual time: one of two devices with a layer each falsifies something, for 12
steps. All stages are audited at each snapshot. Only the liar may be quarantined, and in the end the
losses must be those of plain PyTorch. Then, in `--runs` runs, a device lies in all steps, and each
stage is audited with probability 0.25. The benchmark prints after how many snapshots the device is
found. At last, it measures audits of all stages, relative to the steps with plain PyTorch.

Ends with 1 if a limit is broken.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import copy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

import cleave
from benchmarks.stage_exact import (
    BATCH,
    DEVICES,
    LOSS_LIMITS,
    PS,
    SEQUENCE,
    STEPS,
    Disturbance,
    Disturber,
    batches_of,
    everyone_is_there,
    families_parser,
    family_model,
    options_of,
    rows_of,
)
from cleave.arrays import DType
from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from cleave.protocol import messages
from cleave.scheduler.stages.holders import RETURN_S
from cleave.scheduler.stages.work import RequestKind, StageOrder
from cleave.server.fleet_server import Server
from cleave.training.loop.job import OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.stages.replay_audits import RolledBackError
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleets import paper_fleet
from tests.faults.plan import Fault
from tests.faults.processes import Processes
from tests.faults.proxy import Proxy
from tests.graphs.models import plain_gradients, small_model
from tests.training import test_replay_audits as liars
from tests.training.test_resident import plain_losses as small_losses
from tests.training.test_staged import EvenStages
from tests.training.test_staged import batches as small_batches
from tests.training.test_suspicion import Lie

FAMILIES: Final = ("opt", "llama", "qwen3", "gpt2")
RATE: Final = 1e-3
DECAY: Final = 0.1
SYNC_AFTER: Final = 5
EVERY: Final = 3  # steps between losses
DRIFT_EVERY: Final = 5
DRIFT_LIMIT: Final = 1e-3
CUT_S: Final = 5.0
WAIT_S: Final = 1.0  # a stage waits so long for a killed device


class Moment(Enum):
    """When devices are killed."""

    NEVER = "never"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    SQUARES = "before the update"
    UPDATE = "in the update"
    AFTER = "after the update"
    STATE = "returning its state"
    REPLAY = "in a replay"
    TWO = "two at once"
    STOP = "stopped"
    CUT = "cut off"


KINDS: Final = {
    Moment.FORWARD: RequestKind.FORWARD,
    Moment.BACKWARD: RequestKind.BACKWARD,
    Moment.SQUARES: RequestKind.SQUARES,
    Moment.UPDATE: RequestKind.UPDATE,
    Moment.AFTER: RequestKind.UPDATE,
    Moment.STATE: RequestKind.STATE,
    Moment.REPLAY: RequestKind.RESTORE,
    Moment.TWO: RequestKind.BACKWARD,
    Moment.STOP: RequestKind.BACKWARD,
    Moment.CUT: RequestKind.BACKWARD,
}


@dataclass(frozen=True)
class Case:
    """One run of ten steps. `clip` is 0 without clipping. `head`: a device has the LM head."""

    dtype: DType
    optimizer: OptimizerKind
    clip: float
    head: bool = False

    @property
    def rule(self) -> UpdateRule:
        """Return the settings of the optimizer."""
        return UpdateRule(self.optimizer, weight_decay=DECAY)


CASES: Final = (
    Case(DType.FP32, OptimizerKind.ADAMW, 1.0),
    Case(DType.BF16, OptimizerKind.ADAMW, 0.0),
    Case(DType.FP32, OptimizerKind.SGD, 0.0),
    Case(DType.BF16, OptimizerKind.SGD, 1.0),
)


class Killer(Disturber):
    """Kills devices at a moment of the armed step; see `Disturber`."""

    def __init__(
        self,
        server: Server,
        processes: Processes,
        proxy: Proxy,
        stop_s: float,
        moment: Moment,
    ) -> None:
        super().__init__(server, processes, stop_s)
        self.restored = 0  # answers of devices that restore a lost device's state
        self._proxy = proxy
        self._moment = moment
        self._first = False  # whether a device must be lost before the moment

    def prepare(self) -> None:
        """Kill in the step that starts now."""
        self._first = self._moment is Moment.REPLAY
        stops = self._moment is Moment.STOP
        self.arm(Disturbance.STOP if stops else Disturbance.BACKWARD)

    def _is_time(self, order: StageOrder, answer: messages.Computed | messages.Result) -> bool:
        request = order.request
        step = self._stages._step
        if request.kind is RequestKind.RESTORE and step is not None:  # not of a hot spare
            self.restored += request in step._requests
        left = len(request.rest) + len(request.answers.keys() - {answer.id})
        if self._armed is Disturbance.NONE:
            return False
        if self._first and request.kind is RequestKind.BACKWARD and left:
            self._first = False
            self.struck += 1
            self._strike(Disturbance.BACKWARD, order)
            return False
        after = self._moment is Moment.AFTER
        return not self._first and request.kind is KINDS[self._moment] and bool(left) != after

    def _strike(self, disturbance: Disturbance, order: StageOrder) -> None:
        sessions = self._server.live.manager.sessions
        pid = int(sessions[order.request.device].name.removeprefix("process "))
        others = dict(self._processes.running)
        (slot,) = [slot for slot, p in others.items() if p == pid]
        if self._moment is Moment.CUT:
            self._proxy.cut(slot, CUT_S)
            return
        super()._strike(disturbance, order)
        if self._moment is Moment.TWO:
            self._processes.strike((slot + 1) % len(others), Fault.KILL)


def plain_losses(model: nn.Module, batches: Sequence[Tensor], case: Case) -> list[float]:
    """Train a copy of a model with plain PyTorch in fp32 and return the losses."""
    model = copy.deepcopy(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if case.optimizer is OptimizerKind.ADAMW:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, RATE, case.rule.betas)
    else:
        optimizer = torch.optim.SGD(groups, RATE, momentum=case.rule.momentum)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        losses.append(plain_gradients(model, ids))
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return losses


def loss_error(found: Sequence[float], plain: Sequence[float]) -> float:
    """Return the largest relative difference of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, plain, strict=True))


def resident_losses(
    model: nn.Module,
    graphs: ModelGraphs,
    fleet: Fleet,
    case: Case,
    batches: Sequence[Tensor],
    before: Callable[[int], None],
) -> list[float]:
    """Train a model with state on devices. `before` is called with each step's number, from 1."""
    model.zero_grad()
    optimizer = Optimizer(model, case.rule, clip=case.clip, in_backward=False)
    work = ModelWork(model, graphs, case.dtype)
    staged = StagedModel(work, fleet.runtime, EvenStages(loss=False), PS)
    staged.keep_on_devices(optimizer, planner=EvenStages(loss=case.head), head=case.head)
    losses = []
    try:
        for step, ids in enumerate(batches, 1):
            before(step)
            loss = optimizer.step_whole(RATE, partial(staged.gradients, rows_of(ids)))
            assert isinstance(loss, float)
            losses.append(loss)
            if step == SYNC_AFTER:
                staged.sync()
        staged.sync()
    finally:
        staged.close()
    return losses


def show_case(
    family: str, case: Case, moment: Moment, error: float, struck: int, said: str
) -> bool:
    """Print a case's line; return whether its limit is met."""
    met = error <= LOSS_LIMITS[case.dtype] and not said
    clip = "on" if case.clip else "off"
    print(
        f"{family:7} {case.dtype.value:5} {case.optimizer.value:6} {clip:4}  {moment.value:19} "
        f"{struck:6} {error:8.1e}{'' if met else f' ! {said}'}",
        flush=True,
    )
    return met


def show_exact(families: Sequence[str], stop_s: float, *, head: bool) -> bool:
    """Run all cases of the families; return whether every limit is met."""
    titles = ("family", "dtype", "by", "clip", "killed", "losses", "off by")
    print("{:7} {:5} {:6} {:4}  {:19} {:>6} {:>8}".format(*titles))
    batches, met = batches_of(STEPS, BATCH, SEQUENCE), True
    with (
        cleave.serve(stages_on="any") as server,
        Proxy(server.url) as proxy,
        Processes(proxy.url, DEVICES) as processes,
    ):
        holders = server.live.manager.stages.holders
        for family in families:
            model = family_model(family)
            graphs = model_graphs(model, SEQUENCE, GraphCache.of_user())
            weights = copy.deepcopy(model.state_dict())
            for case in (replace(case, head=head) for case in CASES):
                plain = plain_losses(model, batches, case)
                for moment in Moment:
                    killer = Killer(server, processes, proxy, stop_s, moment)
                    holders.return_s = RETURN_S if moment is Moment.CUT else WAIT_S

                    def before(step: int, killer: Killer = killer, moment: Moment = moment) -> None:
                        if moment is not Moment.STOP or step in (1, STEPS):
                            everyone_is_there(server, stop_s)
                        stops = moment is Moment.STOP and step != EVERY
                        if moment is not Moment.NEVER and step % EVERY == 0 and not stops:
                            killer.prepare()

                    said, error = "", float("inf")
                    try:
                        found = resident_losses(model, graphs, server.fleet, case, batches, before)
                        error = loss_error(found, plain)
                    except (CleaveError, TimeoutError) as failure:
                        said = str(failure)
                    finally:
                        killer.close()
                        model.load_state_dict(weights)
                    if moment is Moment.CUT and killer.restored:
                        said = said or "state was restored"
                    met &= show_case(family, case, moment, error, killer.struck, said)
    print(f"losses at most 1e-4 off in fp32, 2e-2 in bf16: {'met' if met else 'NOT met'}")
    return met


def show_drift(steps: int) -> bool:
    """Train with many losses in virtual time; return whether the limit is met."""
    case, model = CASES[0], family_model("opt")
    graphs = model_graphs(model, SEQUENCE, GraphCache.of_user())
    batches = batches_of(steps, BATCH, SEQUENCE)
    plain, lost = plain_losses(model, batches, case), 0
    with emulated(DEVICES, seed=1) as fleet:
        runtime = fleet.runtime
        assert isinstance(runtime, VirtualRuntime)

        def before(step: int) -> None:
            nonlocal lost
            if step % DRIFT_EVERY == 0:
                lost += 1
                devices = sorted(runtime.stage_devices())
                runtime.join(paper_fleet(1)[0])
                runtime.lose(devices[lost % len(devices)], in_s=0.05)

        error = loss_error(resident_losses(model, graphs, fleet, case, batches, before), plain)
    met = error <= DRIFT_LIMIT
    print(f"{steps} steps, {lost} losses of devices: losses off by {error:.1e}, at most 1e-3: "
          f"{'met' if met else 'NOT met'}")  # fmt: skip
    return met


def show_liars(runs: int) -> bool:
    """Train with a device that lies. Return whether every limit is met."""
    print(f"{'falsified':23} {'lies':>5} {'undone':>6} {'blamed':>6} {'off by':>8}")
    batches, met = small_batches(liars.STEPS), True
    cases: list[tuple[str, Lie | None, float, tuple[int, int]]] = [
        *((what, copy.copy(lie), 1.0, (0, 0)) for what, lie in liars.FALSIFIED.items()),
        ("gradients x 1.05", None, 1.05, (0, 10**9)),
        ("gradients of a tensor", None, 0.0, (70, 1)),
    ]
    for what, lie, scale, updates in cases:
        model = small_model("opt")
        plain = small_losses(copy.deepcopy(model), batches)
        with liars.fleet_of(*[lie] if lie is not None else []) as fleet:
            runtime = fleet.runtime
            assert isinstance(runtime, liars.LyingInUpdates)
            runtime.scale, runtime.updates = scale, updates
            run = liars.Repeating(model, fleet)
            error = loss_error(run.all_losses(batches), plain)
            blamed = liars.LIAR not in runtime.stage_devices() and len(run.quarantined) == 1
        told = lie.told if lie is not None else min(updates[1], runtime.told - updates[0])
        good = blamed and error <= LOSS_LIMITS[DType.FP32]
        met &= good
        line = f"{what:23} {told:5} {sum(run.undone):6} {blamed!s:>6} {error:8.1e}"
        print(line if good else f"{line} !", flush=True)
    found = [_snapshots_until_found(seed) for seed in range(runs)]
    mean = sum(found) / max(1, len(found))
    print(f"audits of a stage with probability 0.25: a device that always lies is found after "
          f"{mean:.1f} snapshots on average of {runs} runs; expected are 4.0")  # fmt: skip
    for family in ("opt", "llama"):
        model, given = family_model(family), batches_of(24, BATCH, SEQUENCE)
        began_s = time.perf_counter()
        plain_losses(model, given, CASES[0])
        plain_s = time.perf_counter() - began_s
        with emulated(2, seed=1) as fleet:
            graphs = model_graphs(model, SEQUENCE, GraphCache.of_user())
            run = liars.Repeating(model, fleet, graphs=graphs)
            run.all_losses(given)
        audit_s = run.replays.counters.spent_s
        print(f"{family}: audits of all stages take {audit_s / plain_s:.1f} times as long as the "
              f"steps with plain PyTorch ({1e3 * plain_s / len(given):.0f} ms each)")  # fmt: skip
    return met


def _snapshots_until_found(seed: int) -> int:
    """Return after how many snapshots a device that lies in all steps is found."""
    model, given = small_model("opt"), small_batches(1)[0]
    with liars.fleet_of() as fleet:
        assert isinstance(fleet.runtime, liars.LyingInUpdates)
        fleet.runtime.scale, fleet.runtime.updates = 1.5, (0, 10**9)
        run = liars.Repeating(model, fleet, rate=0.25, seed=seed)
        snapshots = 0
        while True:
            try:
                run.step(given)
                snapshots += 1
                run.staged.settle()
            except RolledBackError:
                return snapshots


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = families_parser(__doc__, FAMILIES)
    parser.add_argument("--head", action="store_true", help="a device also has the LM head")
    parser.add_argument("--drift", action="store_true", help="many losses, in virtual time")
    parser.add_argument("--steps", type=int, default=200, help="of --drift")
    parser.add_argument("--liars", action="store_true", help="devices that lie, in virtual time")
    parser.add_argument("--runs", type=int, default=40, help="of --liars")
    options, families = options_of(parser, FAMILIES)
    if options.liars:
        met = show_liars(options.runs)
    elif options.drift:
        met = show_drift(options.steps)
    else:
        met = show_exact(families, options.stop_s, head=options.head)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
