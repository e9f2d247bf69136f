"""The effective training time of the runtime itself, in virtual time and on a small scale.

A small model trains with state on emulated devices that come and go, by the same state machine as
on real devices, and its losses are compared with plain PyTorch's. Its devices are as slow as it is
small: a step, a snapshot and the time between departures have the ratios of OPT-1.3B with 64 x 512
tokens behind 100/20 Mbit/s, and all times are a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.stage_exact import rows_of
from cleave.arrays import DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from cleave.planner.stages import resident
from cleave.planner.stages.model import UPDATE_FLOPS, PsCompute
from cleave.planner.stages.resident import plan_resident
from cleave.scheduler.counters import Traffic
from cleave.scheduler.stages import device, hot_spares
from cleave.scheduler.stages.holders import RETURN_S
from cleave.training.loop.job import OptimizerKind
from cleave.training.loop.optimizer import Optimizer, UpdateRule
from cleave.training.stages import resident as trained_state
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from emulator.activity import Presence
from emulator.virtual import VirtualRuntime, emulated
from profiles.availability import Availability, Durations
from profiles.fleets import paper_fleet
from tests.graphs.models import plain_gradients

SPEEDUP: Final = 6.0  # all times are divided by it
_WIDTH: Final = 64
_LAYERS: Final = 4
_VOCABULARY: Final = 64
_ROWS: Final = 16
_TOKENS: Final = 6
_RATE: Final = 1e-3
_RULE: Final = UpdateRule(OptimizerKind.ADAMW, weight_decay=0.1)
_PS: Final = PsCompute(1e12, 0.0)
_UP_BYTES_PER_S: Final = 4100.0
_FLOPS_PER_S: Final = 4.3e6
_LATENCY_S: Final = 0.001
_FIRST: Final = 2  # steps that do not count
# A piece of a snapshot, which must not delay activations: 0.1 s of a link.
_PIECE_BYTES: Final = 500
_MOST_OFF: Final = 1e-4
# Bytes are counted over this many snapshots, each about this many steps after the one before.
_SNAPSHOTS: Final = 3
_SNAPSHOT_STEPS: Final = 69
# FLOPs that an update takes per parameter, in proportion to the tokens of a step.
_UPDATE_FLOPS: Final = UPDATE_FLOPS * _ROWS * _TOKENS // (64 * 512)


@dataclass(frozen=True)
class ServedRun:
    """A run on the runtime.

    Attributes:
        wall_s: virtual time in seconds.
        departures: number of devices that left.
        restored: number of stages that were rebuilt from the snapshot.
        error: largest relative difference of losses from plain PyTorch.
        traffic: bytes of activations, gradients, snapshots and hot spares, as a multiple of the
            activations and their gradients at the boundaries of stages.
    """

    steps: int
    wall_s: float
    departures: int
    restored: int
    error: float
    traffic: float


def small_model() -> tuple[nn.Module, ModelGraphs]:
    """Return a model of four small layers, and its graphs."""
    import transformers

    torch.manual_seed(1)
    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            hidden_size=_WIDTH, ffn_dim=4 * _WIDTH, num_hidden_layers=_LAYERS,
            num_attention_heads=2, vocab_size=_VOCABULARY, max_position_embeddings=2 * _TOKENS,
            word_embed_proj_dim=_WIDTH, dropout=0.0,
        )
    )  # fmt: skip
    return model, model_graphs(model, _TOKENS, GraphCache.of_user())


def batches() -> Iterator[Tensor]:
    """Yield batches of random tokens, the same in every run."""
    for number in count():
        generator = torch.Generator().manual_seed(number)
        yield torch.randint(3, _VOCABULARY, (_ROWS, _TOKENS), generator=generator)


def plain_losses(model: nn.Module, steps: int) -> list[float]:
    """Train a model with plain PyTorch and return the losses."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, _RATE, _RULE.betas), []
    for _, ids in zip(range(steps), batches(), strict=False):
        optimizer.zero_grad()
        losses.append(plain_gradients(model, ids))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def served_run(
    devices: int, availability: Availability | None, *, wall_s: float, hot: bool, seed: int = 0
) -> ServedRun:
    """Train on emulated devices for a virtual time.

    Args:
        availability: when devices are there, in virtual time; None: always.
        wall_s: virtual time in seconds.
        hot: whether devices without a stage are hot spares.
    """
    model, graphs = small_model()
    profile = replace(
        paper_fleet(1)[0], flops_per_s=_FLOPS_PER_S, graph_flops_per_s=_FLOPS_PER_S, compute=None,
        downlink_bytes_per_s=5 * _UP_BYTES_PER_S, uplink_bytes_per_s=_UP_BYTES_PER_S,
        latency_s=_LATENCY_S, memory_bytes=10**9, availability=availability,
    )  # fmt: skip
    profiles = [replace(profile, name=f"device {number}") for number in range(devices)]
    losses: list[float] = []
    with (
        mock.patch.object(device, "_SNAPSHOT_BYTES", _PIECE_BYTES),
        mock.patch.object(device, "UPDATE_FLOPS", _UPDATE_FLOPS),
        mock.patch.object(trained_state, "_STAYS_S", trained_state._STAYS_S / SPEEDUP),
        mock.patch.object(resident, "UPDATE_FLOPS", _UPDATE_FLOPS),
        mock.patch.object(hot_spares, "_MOST_BUSY", hot_spares._MOST_BUSY if hot else 0.0),
        emulated(profiles, seed=seed, verify=False, coding="off") as fleet,
    ):
        runtime = fleet.runtime
        assert isinstance(runtime, VirtualRuntime)
        runtime.manager.stages.holders.return_s = RETURN_S / SPEEDUP
        optimizer = Optimizer(model, _RULE, clip=1.0, in_backward=False)
        staged = StagedModel(ModelWork(model, graphs, DType.FP32), runtime, plan_resident, _PS)
        staged.keep_on_devices(optimizer)
        left: list[float] = []
        runtime.observers.append(
            lambda seen: (
                left.append(seen.at_s) if isinstance(seen, Presence) and not seen.here else None
            )
        )
        began_s, before = 0.0, Traffic()
        for ids in batches():
            loss = optimizer.step_whole(_RATE, partial(staged.gradients, rows_of(ids)))
            assert isinstance(loss, float)
            losses.append(loss)
            if len(losses) == _FIRST:  # devices have received the model
                began_s, before = runtime.now_s, fleet.counters().traffic.snapshot()
            if len(losses) > _FIRST and runtime.now_s - began_s >= wall_s:
                break
        took_s = runtime.now_s - began_s
        assert staged.resident is not None
        assert staged.plan is not None
        stages = len(staged.plan.stages)
        sent = fleet.counters().traffic - before
        restored = staged.resident.losses
        staged.close()
    plain = plain_losses(small_model()[0], len(losses))
    error = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
    departures = sum(at_s > began_s for at_s in left)
    steps = len(losses) - _FIRST
    of_arrays = sum(each.weights + each.activations for each in (sent.down, sent.up))
    # each stage's input, output, and their gradients
    boundaries = steps * 4 * stages * _ROWS * _TOKENS * _WIDTH * 4
    return ServedRun(steps, took_s, departures, restored, error, of_arrays / boundaries)


def show(devices: int, minutes: float, away: float, departures: int, seeds: int) -> bool:
    """Print what the runtime reaches if a device leaves every few minutes.

    Args:
        away: share of time that a device is absent.
        departures: number of departures of a run, on average.

    Returns:
        Whether all losses are those of plain PyTorch, up to 1e-4.
    """
    every_s = 60 * minutes / SPEEDUP
    cycle_s = every_s * devices
    churn = Availability(Durations(cycle_s * (1 - away)), Durations(cycle_s * away))
    alone = served_run(devices, None, wall_s=10 * every_s, hot=False)
    step_s = alone.wall_s / alone.steps
    long_s = _SNAPSHOTS * _SNAPSHOT_STEPS * step_s
    calm = [served_run(devices, None, wall_s=long_s, hot=hot).traffic for hot in (False, True)]
    print(
        f"the runtime in virtual time, all times divided by {SPEEDUP:g}: {step_s:.1f} s a step, "
        f"a departure\nevery {every_s:.0f} s\n"
        f"bytes without departures: {calm[0]:.3f} times those of the boundaries, snapshots "
        f"included; {calm[1]:.3f}\nif hot spares may follow\n\n"
        f"{'hot spares':10} {'seed':>4} {'steps':>5} {'departures':>10} {'rebuilt':>7} "
        f"{'effective':>9} {'losses off by':>13}"
    )
    exact = True
    for hot in (True, False):
        for seed in range(seeds):
            run = served_run(devices, churn, wall_s=departures * every_s, hot=hot, seed=seed)
            exact &= run.error <= _MOST_OFF
            print(
                f"{'yes' if hot else 'no':10} {seed:4} {run.steps:5} {run.departures:10} "
                f"{run.restored:7} {run.steps * step_s / run.wall_s:9.3f} {run.error:13.1e}",
                flush=True,
            )
    print(f"losses at most 1e-4 off plain PyTorch: {'met' if exact else 'NOT met'}")
    return exact
