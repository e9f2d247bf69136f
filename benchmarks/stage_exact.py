"""Check that training by stages reproduces plain PyTorch's losses despite device failures.

    python -m benchmarks.stage_exact [--quick] [--families opt,llama,...] [--stop-s 60]
    python -m benchmarks.stage_exact --churn [--steps 100]

Without `--churn`: ten steps of small models (OPT, Llama, Qwen 3, GPT-2, and a Llama with LoRA by
peft) on four device processes of a server, in fp32 and bf16, with clipping and without:

- undisturbed;
- with a process that gets SIGKILL in every step, in the middle of a backward pass;
- with a process that gets SIGKILL while it sends its sums of gradients;
- with a device that joins in the middle of every third step, which waits for it;
- with a process that gets SIGSTOP in the first backward pass, and continues after `--stop-s`
  seconds.

With clipping `plan_stages` chooses the stages. Without it every device has its own stage and the
last computes the loss. The relative difference of losses from plain PyTorch in fp32 may be 1e-4
(fp32) or 2e-2 (bf16). Plain PyTorch with one sequence at a time is also shown, for the effect of
rounding alone. c is the largest gradient error of the first step, relative to the largest gradient
of its layer, in requests of the dtype's rounding (2^-23 and 2^-7).

With `--churn`, in virtual time: steps of the OPT on 20 emulated devices, five per layer. Each step
loses two of them in its middle, which return before the next step; losses must be within 1e-3 of
the undisturbed steps. Also measures the cost of losing one of eight devices in a step of OPT-125M
(sizes only) against the device's share: the time in which the others do its part of the step. In
virtual time a loss is noticed at once; live, the end of a process is noticed at once, and silence
after 12 s.

Ends with 1 if a limit is broken.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import copy
import logging
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cleave
from cleave import graph_names as names
from cleave.arrays import DType
from cleave.errors import CleaveError
from cleave.fleet.fleet import Fleet
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from cleave.machine.graph_session import CPU_PROVIDER
from cleave.planner.coding import coded_ratio
from cleave.planner.stages.model import PsCompute, StagePlan, StagePlanner
from cleave.planner.stages.search import plan_stages
from cleave.protocol import limits, messages
from cleave.scheduler.instructions import ForSteps
from cleave.scheduler.stages.work import RequestKind, StageOrder
from cleave.server.fleet_server import Server
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import Rows, StagedModel
from cleave.workload.registry import find_model
from emulator.activity import Activity, Presence
from emulator.sized_stages import SizedModel, run_steps
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from tests.faults.plan import Fault
from tests.faults.processes import Processes
from tests.graphs.models import plain_gradients, with_lora
from tests.training.test_staged import EvenStages

FAMILIES: Final = ("opt", "llama", "qwen3", "gpt2", "llama-lora")
STEPS: Final = 10
DEVICES: Final = 4
LOSS_LIMITS: Final = {DType.FP32: 1e-4, DType.BF16: 2e-2}
ROUNDING: Final = {DType.FP32: 2.0**-23, DType.BF16: 2.0**-7}
CLIPS: Final = (1.0, None)

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 2048
FIRST_TOKEN: Final = 3  # after the special tokens
SEQUENCE, BATCH = 48, 8
RATE: Final = 1e-3

PS: Final = PsCompute(1e11, 0.0)

JOIN_EVERY: Final = 3  # steps
AWAKE_BEFORE: Final = 6  # wait for a stopped process before this step
WAIT_S: Final = 120.0

CHURN_DEVICES: Final = 20
CHURN_LOST: Final = 2
CHURN_LIMIT: Final = 1e-3
CHURN_SEQUENCE, CHURN_BATCH = 16, 20

MBIT: Final = 125_000.0
LOST_OF: Final = 8
MOMENTS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the step


class Disturbance(Enum):
    """The kind of disturbance of devices in a run."""

    NONE = "none"
    BACKWARD = "SIGKILL in backward"
    UPLOAD = "SIGKILL in upload"
    JOIN = "joins in mid-step"
    STOP = "SIGSTOP"


def family_model(family: str) -> nn.Module:
    """Return a new model of a family of `FAMILIES`, with some million parameters."""
    import transformers

    torch.manual_seed(1)
    alike: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2 * SEQUENCE,
    }
    of_llama = alike | {
        "intermediate_size": 3 * WIDTH,
        "num_key_value_heads": HEADS // 2,
        "head_dim": WIDTH // HEADS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config: Any
    match family:
        case "opt":
            config = transformers.OPTConfig(
                **alike, ffn_dim=4 * WIDTH, word_embed_proj_dim=WIDTH, dropout=0.0
            )
        case "llama" | "llama-lora":
            config = transformers.LlamaConfig(**of_llama)
        case "qwen3":
            config = transformers.Qwen3Config(**of_llama)
        case "gpt2":
            config = transformers.GPT2Config(
                n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY,
                n_positions=2 * SEQUENCE, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
                bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
        case _:
            raise ValueError(f"no family {family}")
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return with_lora(model) if family == "llama-lora" else model.train()


def batches_of(steps: int, rows: int, sequence: int) -> list[Tensor]:
    """Return a batch for each step, with learnable, word-like token frequencies.

    A few repeated batches would be memorized, which amplifies rounding to differences of 1e-4.
    """
    generator = torch.Generator().manual_seed(1)
    frequencies = 1 / torch.arange(1, VOCABULARY - FIRST_TOKEN + 1)
    drawn = [
        torch.multinomial(frequencies, rows * sequence, replacement=True, generator=generator)
        for _ in range(steps)
    ]
    return [FIRST_TOKEN + ids.reshape(rows, sequence) for ids in drawn]


def rows_of(ids: Tensor) -> Rows:
    """Return a batch whose targets are the next tokens."""
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return Rows(ids, targets)


@dataclass
class Trained:
    """The result of training.

    Attributes:
        losses: loss of each step.
        first: gradients of the first step, before clipping, by parameter.
    """

    losses: list[float] = field(default_factory=list)
    first: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    gradients: Callable[[Tensor], float],
    batches: Sequence[Tensor],
    clip: float | None,
) -> Trained:
    """Run one AdamW step per batch."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=RATE)
    done = Trained()
    for ids in batches:
        optimizer.zero_grad()
        done.losses.append(gradients(ids))
        if not done.first:
            done.first = {n: p.grad.clone() for n, p in trainable.items() if p.grad is not None}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable.values(), clip)
        optimizer.step()
    return done


def loss_error(found: Trained, plain: Trained) -> float:
    """Return the largest relative difference of losses; infinite if their numbers differ."""
    if len(found.losses) != len(plain.losses):
        return float("inf")
    pairs = zip(found.losses, plain.losses, strict=True)
    return max(abs(mine - expected) / abs(expected) for mine, expected in pairs)


def gradient_error(found: Trained, plain: Trained, layers: Mapping[str, int]) -> float:
    """Return the largest error of a gradient, relative to the largest of its layer.

    Args:
        found, plain: results to compare; infinite error if their parameters differ.
        layers: layer number of each parameter; parameters outside layers count as one layer.
    """
    if found.first.keys() != plain.first.keys():
        return float("inf")
    largest: dict[int, float] = {}
    errors: dict[int, float] = {}
    for name, expected in plain.first.items():
        layer = layers.get(name, -1)
        off = float((found.first[name] - expected).abs().max())
        largest[layer] = max(largest.get(layer, 0.0), float(expected.abs().max()))
        errors[layer] = max(errors.get(layer, 0.0), off)
    return max(errors[layer] / largest[layer] for layer in errors)


# --- disturbances of device processes ---


class Disturber:
    """Disturbs a device process at a certain moment of a step, once per call of `arm`.

    It intercepts the devices' answers to the step by stages, in the server's thread.

    Args:
        server: server whose step is disturbed.
        processes: the device processes.
        stop_s: seconds for which a process stays stopped.

    Attributes:
        struck: number of disturbances so far.
    """

    def __init__(self, server: Server, processes: Processes, stop_s: float) -> None:
        self.struck = 0
        self._armed = Disturbance.NONE
        self._server = server
        self._processes = processes
        self._stop_s = stop_s
        self._timers: list[threading.Timer] = []
        self._stopped: list[int] = []
        self._stages = server.live.manager.stages
        self._answered, self._changed = self._stages.answered, self._stages.changed
        self._joining = 0  # the stopped process that will join
        self._held: (
            list[tuple[StageOrder, messages.Computed | messages.Result, int, float]] | None
        ) = None
        self._stages.answered = self.answered  # type: ignore[method-assign]
        self._stages.changed = self.changed  # type: ignore[method-assign]

    def arm(self, disturbance: Disturbance) -> None:
        """Disturb the step that starts now."""
        if disturbance is Disturbance.JOIN:
            self._leave()
        self._armed = disturbance

    def close(self) -> None:
        """Continue stopped processes, and disturb no more."""
        self._armed = Disturbance.NONE
        self._stages.answered = self._answered  # type: ignore[method-assign]
        self._stages.changed = self._changed  # type: ignore[method-assign]
        for timer in self._timers:
            timer.cancel()
        for pid in self._stopped:
            _go_on(pid)

    def answered(
        self,
        order: StageOrder,
        answer: messages.Computed | messages.Result,
        flops: int,
        now_s: float,
    ) -> list[ForSteps]:
        """Replace `StageRuns.answered`."""
        if self._held is not None:
            self._held.append((order, answer, flops, now_s))
            return []
        if self._is_time(order, answer):
            self.struck += 1
            armed, self._armed = self._armed, Disturbance.NONE
            self._strike(armed, order)
        return self._answered(order, answer, flops, now_s)

    def changed(self) -> list[ForSteps]:
        """Replace `StageRuns.changed`, which is called when a device has joined."""
        out = self._changed()
        if self._held is not None and self._server.live.manager.ready_devices >= DEVICES:
            held, self._held = self._held, None
            for each in held:
                out += self._answered(*each)
        return out

    def _is_time(self, order: StageOrder, answer: messages.Computed | messages.Result) -> bool:
        """Return whether a device is at the moment that the armed disturbance needs."""
        request = order.request
        left = len(request.rest) + len(request.answers.keys() - {answer.id})
        if not left or self._armed is Disturbance.NONE:
            return False
        if self._armed is Disturbance.UPLOAD:
            return request.kind is RequestKind.SUMS and left <= len(request.found) + 1
        if request.kind is RequestKind.LAST:  # its backward pass follows the loss
            return names.LOSS in request.found
        return request.kind is RequestKind.BACKWARD

    def _strike(self, disturbance: Disturbance, order: StageOrder) -> None:
        name = self._server.live.manager.sessions[order.request.device].name
        pid = int(name.removeprefix("process "))
        match disturbance:
            case Disturbance.BACKWARD | Disturbance.UPLOAD:
                (slot,) = [s for s, p in self._processes.running.items() if p == pid]
                self._processes.strike(slot, Fault.KILL)
            case Disturbance.STOP:
                self._stop(pid)
                timer = threading.Timer(self._stop_s, _go_on, (pid,))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            case Disturbance.JOIN:
                self._held = []
                _go_on(self._joining)

    def _leave(self) -> None:
        """Make a device leave; its replacement does not start before `_strike`."""
        slot = self.struck % DEVICES
        self._processes.strike(slot, Fault.KILL)
        self._joining = self._processes.running[slot]
        self._stop(self._joining)
        wait_until(lambda: self._server.fleet.device_count < DEVICES, "no device leaves")

    def _stop(self, pid: int) -> None:
        self._stopped.append(pid)
        os.kill(pid, signal.SIGSTOP)


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # killed in the meantime


def wait_until(condition: Callable[[], bool], otherwise: str, wait_s: float = WAIT_S) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: with the text `otherwise`, after `wait_s` seconds.
    """
    until_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(otherwise)
        time.sleep(0.02)


# --- exact on processes ---


@dataclass(frozen=True)
class Case:
    """One run of ten steps."""

    dtype: DType
    clip: float | None
    disturbance: Disturbance


def cut_gradients(model: Any, ids: Tensor) -> float:
    """Accumulate gradients in plain PyTorch, one sequence at a time; return the loss."""
    total = 0.0
    for one in ids.tensor_split(len(ids)):
        logits = model(input_ids=one, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), one[:, 1:].flatten()) / len(ids)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


@dataclass
class Subject:
    """A model and everything that its runs share.

    Attributes:
        family: name of the family.
        model: the model.
        graphs: graphs of the model.
        plain: result of plain PyTorch in fp32, by clipping.
        cut: the same with clipping, one sequence at a time.
        works: the model as work for devices, by dtype.
        weights: initial weights of each run.
    """

    family: str
    model: nn.Module
    graphs: ModelGraphs
    plain: dict[float | None, Trained]
    cut: Trained
    works: dict[DType, ModelWork]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, family: str) -> Subject:
        """Make the subject of a family."""
        model = family_model(family)
        batches = batches_of(STEPS, BATCH, SEQUENCE)
        plain = {}
        for clip in CLIPS:
            alone = copy.deepcopy(model)
            plain[clip] = train(alone, partial(plain_gradients, alone), batches, clip)
        alone = copy.deepcopy(model)
        cut = train(alone, partial(cut_gradients, alone), batches, CLIPS[0])
        graphs = model_graphs(model, SEQUENCE, GraphCache.of_user())
        works = {dtype: ModelWork(model, graphs, dtype) for dtype in LOSS_LIMITS}
        return cls(family, model, graphs, plain, cut, works, copy.deepcopy(model.state_dict()))

    @property
    def layers(self) -> dict[str, int]:
        """Return the layer number of each parameter that belongs to a layer."""
        numbers = {
            id(parameter): number
            for number, part in enumerate(self.graphs.parts)
            for parameter in part.held.values()
        }
        return {n: numbers[id(p)] for n, p in self.model.named_parameters() if id(p) in numbers}


@dataclass
class Run:
    """The result of a case.

    Attributes:
        struck: number of disturbances.
        loss_error: largest relative error of a loss.
        gradient_error: largest error of a gradient, relative to the largest of its layer.
        stages: number of devices of each stage in the last step, and where the loss was computed.
        error: why the run ended early; empty if it did not.
    """

    struck: int = 0
    loss_error: float = float("inf")
    gradient_error: float = float("inf")
    stages: str = ""
    error: str = ""


def run_case(
    subject: Subject, case: Case, server: Server, processes: Processes, stop_s: float
) -> Run:
    """Train by stages with disturbances, and compare with plain PyTorch."""
    run = Run()
    subject.model.load_state_dict(subject.weights)
    planner: StagePlanner = plan_stages if case.clip is not None else EvenStages(loss=True)
    staged = StagedModel(subject.works[case.dtype], server.fleet.runtime, planner, PS)
    disturber = Disturber(server, processes, stop_s)
    step = 0

    def disturbed(ids: Tensor) -> float:
        nonlocal step
        step += 1
        if case.disturbance is not Disturbance.STOP or step in (1, AWAKE_BEFORE):
            everyone_is_there(server, stop_s)
        if due(case.disturbance, step):
            disturber.arm(case.disturbance)
        loss = staged.gradients(rows_of(ids))
        assert isinstance(loss, float)
        return loss

    try:
        found = train(subject.model, disturbed, batches_of(STEPS, BATCH, SEQUENCE), case.clip)
        plain = subject.plain[case.clip]
        run.loss_error = loss_error(found, plain)
        run.gradient_error = gradient_error(found, plain, subject.layers)
    except (CleaveError, TimeoutError) as error:
        run.error = f"step {step} did not end well: {error}"
    finally:
        disturber.close()
        staged.close()
    run.struck = disturber.struck
    expected = sum(due(case.disturbance, step) for step in range(1, STEPS + 1))
    if not run.error and run.struck != expected:
        run.error = f"devices were disturbed {run.struck} times instead of {expected}"
    if staged.plan is not None:
        counts = "+".join(str(len(stage.devices)) for stage in staged.plan.stages)
        run.stages = f"{counts}{' loss' if staged.plan.stages[-1].loss else ''}"
    return run


def due(disturbance: Disturbance, step: int) -> bool:
    """Return whether a step, counted from 1, is disturbed."""
    match disturbance:
        case Disturbance.NONE:
            return False
        case Disturbance.JOIN:
            return step % JOIN_EVERY == 1
        case Disturbance.STOP:
            return step == 1
    return True


def everyone_is_there(server: Server, stop_s: float) -> None:
    """Wait for all devices, including a stopped one."""
    wait_until(
        lambda: server.fleet.device_count == DEVICES, "devices do not come back", WAIT_S + stop_s
    )


def show_exact(families: Sequence[str], stop_s: float) -> bool:
    """Run all cases of the families; return whether every limit is met."""
    print(
        f"{DEVICES} device processes, one thread each, ONNX Runtime's "
        f"{CPU_PROVIDER}; {STEPS} steps of {BATCH} x {SEQUENCE} tokens\n"
    )
    print(f"{'':51} {'devices':12} losses")
    head = ("family", "dtype", "clip", "disturbance", "strikes", "of stages", "off by", "c")
    print("{:10} {:5} {:4}  {:19} {:>7} {:12} {:>7} {:>5}".format(*head))
    met = True
    with (
        cleave.serve(stages_on="any") as server,
        Processes(lambda slot: server.url, DEVICES) as processes,
    ):
        for family in families:
            subject = Subject.of(family)
            cases = [
                Case(dtype, clip, disturbance)
                for dtype in LOSS_LIMITS
                for clip in CLIPS
                for disturbance in Disturbance
            ]
            show_cut(subject)
            for case in cases:
                run = run_case(subject, case, server, processes, stop_s)
                met &= show_run(family, case, run)
    print(f"losses at most 1e-4 off in fp32, 2e-2 in bf16: {'met' if met else 'NOT met'}")
    return met


def show_cut(subject: Subject) -> None:
    """Print the error of plain PyTorch itself with one sequence at a time."""
    plain = subject.plain[CLIPS[0]]
    off = loss_error(subject.cut, plain)
    c = gradient_error(subject.cut, plain, subject.layers) / ROUNDING[DType.FP32]
    print(
        f"{subject.family:10} {'fp32':5} {'on':4}  {'PyTorch, row by row':19} {'-':>7} {'-':12} "
        f"{off:7.1e} {c:5.1f}",
        flush=True,
    )


def show_run(family: str, case: Case, run: Run) -> bool:
    """Print a case's line; return whether its limit is met."""
    met = run.loss_error <= LOSS_LIMITS[case.dtype] and not run.error
    c = run.gradient_error / ROUNDING[case.dtype]
    clip = "on" if case.clip is not None else "off"
    print(
        f"{family:10} {case.dtype.value:5} {clip:4}  {case.disturbance.value:19} {run.struck:7} "
        f"{run.stages:12} {run.loss_error:7.1e} {c:5.1f}{'' if met else ' !'}",
        flush=True,
    )
    if run.error:
        print(f"  {run.error}", flush=True)
    return met


# --- losses of devices at scale, in virtual time ---


class Presences:
    """Counts devices that vanish.

    Attributes:
        gone: number of vanished devices.
    """

    def __init__(self) -> None:
        self.gone = 0

    def __call__(self, activity: Activity) -> None:
        self.gone += isinstance(activity, Presence) and not activity.here


@dataclass
class Churned:
    """The result of training with lost devices.

    Attributes:
        losses: loss of each step.
        lost: number of devices that vanished in the middle of steps.
        step_s: virtual seconds of each step.
    """

    losses: list[float] = field(default_factory=list)
    lost: int = 0
    step_s: list[float] = field(default_factory=list)


def virtual_runtime(fleet: Fleet) -> VirtualRuntime:
    """Return the runtime of an emulated fleet."""
    runtime = fleet.runtime
    assert isinstance(runtime, VirtualRuntime)
    return runtime


def train_virtually(steps: int, usual_s: float) -> Churned:
    """Train the OPT on emulated devices.

    Args:
        steps: number of steps.
        usual_s: seconds of an undisturbed step, within which devices are lost; 0 for no losses.
    """
    done = Churned()
    model = family_model("opt")
    graphs = model_graphs(model, CHURN_SEQUENCE, GraphCache.of_user())
    fleet = emulated(CHURN_DEVICES, seed=1)
    runtime, presences, rng = virtual_runtime(fleet), Presences(), random.Random(7)
    runtime.observers.append(presences)
    work = ModelWork(model, graphs, DType.FP32)
    staged = StagedModel(work, runtime, EvenStages(loss=True), PS)  # all devices take part

    def gradients(ids: Tensor) -> float:
        while runtime.device_count() < CHURN_DEVICES:  # wait for returning devices to join
            runtime.settle()
        began_s, before = runtime.now_s, presences.gone
        lost = []
        if usual_s:
            for device in rng.sample(sorted(runtime.devices), CHURN_LOST):
                lost.append(runtime.devices[device].profile)
                runtime.lose(device, in_s=usual_s * rng.uniform(0.05, 0.95))
        loss = staged.gradients(rows_of(ids))
        assert isinstance(loss, float)
        done.lost += presences.gone - before
        done.step_s.append(runtime.now_s - began_s)
        done.losses.append(loss)
        for profile in lost:
            runtime.join(profile)
        return loss

    try:
        train(model, gradients, batches_of(steps, CHURN_BATCH, CHURN_SEQUENCE), clip=1.0)
    except CleaveError as error:
        print(f"  step {len(done.losses) + 1} did not end: {error}")
    fleet.close()
    return done


def show_churn(steps: int) -> bool:
    """Train with a tenth of the devices lost in each step; return whether limits are met."""
    began_s = time.perf_counter()
    usual = train_virtually(steps, 0.0)
    usual_s = statistics.median(usual.step_s)
    found = train_virtually(steps, usual_s)
    print(
        f"{steps} steps of {CHURN_BATCH} x {CHURN_SEQUENCE} tokens, {CHURN_DEVICES} emulated "
        f"devices, {CHURN_LOST} lost in each step: {time.perf_counter() - began_s:.0f} s"
    )
    print(f"  {found.lost} devices lost in the middle of a step")
    off = loss_error(Trained(found.losses), Trained(usual.losses))
    ended = len(found.losses) == steps
    print(f"  {len(found.losses)} of {steps} steps ended: {'met' if ended else 'NOT met'}")
    met = off <= CHURN_LIMIT
    print(
        f"  losses {off:.1e} off the undisturbed ones (at most {CHURN_LIMIT:g}): "
        f"{'met' if met else 'NOT met'}",
        flush=True,
    )
    return ended and met


def home_devices(count: int) -> list[FleetDevice]:
    """Return equal devices behind 100/20 Mbit/s."""
    return [
        FleetDevice(f"home-{number}", 50e9, 100 * MBIT, 20 * MBIT, 0.01, 4 * 10**9)
        for number in range(count)
    ]


def lost_step_s(model: SizedModel, plan: StagePlan, lost: int | None, in_s: float) -> float:
    """Return virtual seconds of a step in which a device vanishes after `in_s` seconds."""
    with emulated(home_devices(LOST_OF), compute=False, seed=1) as fleet:
        runtime = virtual_runtime(fleet)
        if lost is not None:
            runtime.lose(lost, in_s=in_s)
        loss_s = [tokens * model.sizes.loss_flops / PS.flops_per_s for tokens in model.tokens]
        steps = run_steps(runtime, lambda: model.work(plan), loss_s, steps=1)
        return steps.steps[0].seconds


def least_redone_s(model: SizedModel, layers: int) -> float:
    """Return a lower bound on the cost of losing a device that had summed all gradients.

    A replacement needs a layer's weights, does at least its share of the backward passes, and sends
    the layer's whole gradients, whose size does not depend on the number of samples.

    Args:
        model: the model and its batch.
        layers: number of layers that the device had.
    """
    device = home_devices(1)[0]
    layer = model.costs().layers[0]
    flops = layers * sum(model.tokens) * (layer.flops - layer.forward_flops)
    compute_s = flops / (LOST_OF - 1) / device.flops_per_s
    coded = coded_ratio(DType.FP32.value)  # payloads are compressed on such links
    down_s = coded * layer.weight_bytes / device.downlink_bytes_per_s
    return down_s + compute_s + coded * layer.gradient_bytes / device.uplink_bytes_per_s


def show_cost() -> bool:
    """Lose each of eight devices at several moments of a step; return whether the limit is met."""
    model = SizedModel(find_model("opt-125m"), 16, 512, 16, DType.FP32)
    with emulated(home_devices(LOST_OF), compute=False, seed=1) as fleet:
        devices = list(fleet.runtime.stage_devices().values())
    plan = plan_stages(model.costs(), devices, PS)
    usual_s = lost_step_s(model, plan, None, 0.0)
    print(
        f"a step of OPT-125M, 16 x 512 tokens in fp32, {LOST_OF} equal devices behind 100/20 "
        f"Mbit/s: {usual_s:.1f} s\n  {plan.described(model.costs())}"
    )
    costs: list[float] = []
    for moment in MOMENTS:
        some = [
            lost_step_s(model, plan, device, moment * usual_s) - usual_s
            for device in sorted(d for stage in plan.stages for d in stage.devices)
        ]
        print(
            f"  one lost at {moment:.0%} of the step costs {statistics.median(some):.1f} s in the "
            f"median, {max(some):.1f} s at worst"
        )
        costs += some
    share_s = usual_s / (LOST_OF - 1)
    met = max(costs) <= share_s
    least_s = least_redone_s(model, max(s.stop - s.first for s in plan.stages))
    print(
        f"  its share, which {LOST_OF - 1} others do in {share_s:.1f} s: median "
        f"{statistics.median(costs) / share_s:.2f} times that, worst {max(costs) / share_s:.2f} "
        f"(at most 1): {'met' if met else 'NOT met'}\n"
        f"  the least it can cost once a device has summed all its gradients: {least_s:.1f} s, "
        f"{least_s / share_s:.2f} times the share\n"
        f"  beside detection, which takes no time here and up to {limits.SILENCE_S:.0f} s live",
        flush=True,
    )
    return met


def families_parser(description: str | None, families: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of options that benchmarks of model families share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(families))
    parser.add_argument("--quick", action="store_true", help="one family")
    parser.add_argument("--stop-s", type=float, default=60.0)
    return parser


def options_of(
    parser: argparse.ArgumentParser, known: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of `families_parser`, and return them and the families."""
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends children, too
    families: list[str] = options.families.split(",")[: 1 if options.quick else None]
    if unknown := set(families) - set(known):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    logging.getLogger("cleave").setLevel(logging.ERROR)  # joins and losses are expected
    return options, families


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = families_parser(__doc__, FAMILIES)
    parser.add_argument("--churn", action="store_true", help="losses at scale, in virtual time")
    parser.add_argument("--steps", type=int, default=100, help="of --churn")
    options, families = options_of(parser, FAMILIES)
    if options.churn:
        met = show_churn(options.steps)
        met &= show_cost()
    else:
        met = show_exact(families, options.stop_s)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
