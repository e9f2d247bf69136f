"""Audit stages: how soon a lying device is caught, and whether an honest device is accused.

    python -m benchmarks.stage_audits [--seeds 20] [--sums 2000] [--wide 10] [--quick] [--json]

1. Lying devices: small models with real graphs after some steps of training, in fp32 and bf16. A
   device falsifies its sums of gradients, outputs of the forward pass, or gradients that it passes
   on. *Small* elements of a sum are below the tolerance of earlier audits, which did not judge
   each parameter by its own size: 2 % of the layer's largest element in bf16, 1e-4 in fp32. Small
   elements of other arrays are below 2 % of the largest. Prints the number of seeds in which a
   device is caught, and the largest number of audits. Audits of honest work count as well.
2. Honest devices: `--sums` audited sums from devices with different numbers of threads, levels of
   ONNX Runtime's graph optimization, and roundings up to a quarter of the self-test's limit. Models
   of four families, one with huge activations, one with adapters, and losses on devices, whole and
   in slices. No device may be accused.
3. The same for `--wide` steps of two layers of OPT-125M's size, whose ReLUs have kinks.

Ends with 1 if a lie is not caught within 20 audits (where it should be), or a device is accused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.common import machine
from cleave import arrays
from cleave.arrays import Array, DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.graphs.noise import noisy
from cleave.machine.graph_session import CPU_PROVIDER
from cleave.scheduler.stages.outcomes import StageRecord, StepResult, SumsRecord
from cleave.scheduler.stages.passes import sums_of
from cleave.scheduler.stages.work import StageGraph, StepWork, SumName
from cleave.training.stages.audits import Auditor, Fault, Rounding, Watch
from cleave.training.stages.honest_error import ROUNDING
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from emulator.virtual import emulated
from tests.graphs.models import TOKENS, small_model, with_lora
from tests.training.test_staged import KEPT, PS, ROWS, EvenStages, SlicedLoss, rows

DTYPES: Final = (DType.FP32, DType.BF16)
TOLERATED: Final = {DType.FP32: 1e-4, DType.BF16: 2e-2}
"""Tolerance of earlier audits, relative to the largest element of a layer."""

MOST_AUDITS: Final = 20
EVERYTHING: Final = 1000.0  # rate at which all outputs and all sums are audited
VOCABULARY: Final = 96
ROUNDINGS: Final = (0.0, 2.0**-22, 2.0**-20, ROUNDING / 4)
LEVELS: Final = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")
THREADS: Final = (1, 1, 2, 1, 1, 3)
OUTPUTS_EVERY: Final = 5  # outputs are audited once per this many audits of sums
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 2, "num_attention_heads": 12,
    "vocab_size": 1000, "max_position_embeddings": 256, "dropout": 0.0, "attention_dropout": 0.0,
    "word_embed_proj_dim": 768,
}  # fmt: skip
WIDE_TOKENS: Final = 128

Step: TypeAlias = tuple[StepWork, StepResult]


# --- other devices ---


class OtherSession:
    """A graph session on the CPU with a given number of threads and optimization level."""

    def __init__(self, model: bytes, threads: int, level: str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = getattr(levels, f"ORT_{level}")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = [CPU_PROVIDER]
        self._session = onnxruntime.InferenceSession(model, options, providers)
        self.inputs = {each.name: tuple(each.shape) for each in self._session.get_inputs()}
        self._outputs = [each.name for each in self._session.get_outputs()]

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs."""
        feed = {
            name: given[name].reshape([n if isinstance(n, int) else -1 for n in shape])
            for name, shape in self.inputs.items()
        }
        return dict(zip(self._outputs, self._session.run(None, feed), strict=True))


class Device(Auditor):
    """Computes stages like a different device: repeats work like an auditor with other sessions.

    Args:
        threads, level: ONNX Runtime's number of threads and optimization level.
        rounding: additional error of each operation, relative to its result.
    """

    def __init__(self, threads: int, level: str, rounding: float) -> None:
        super().__init__(1.0)
        self._how = threads, level
        self._rounding = rounding
        self._others: dict[StageGraph, OtherSession] = {}

    def returned(self, work: StepWork, record: StageRecord, device: int) -> StageRecord:
        """Return a record in which this device, under a number, computed the stage."""
        travels = DType(work.dtype)
        of_y = travels if record.plan.slice is None else DType.FP32
        y, dx, done = {}, {}, []
        for sums in record.sums:
            totals: dict[SumName, Array] = {}
            for batch in sorted(sums.batches, reverse=True):
                y[batch], dx[batch], _ = self.repeat(work, record, batch, totals, Rounding())
            gradients = {key: total.reshape(-1) for key, total in totals.items()}
            done.append(with_sums(work, sums, gradients))
        returned = replace(
            record,
            y={batch: packed(y[batch], of_y) for batch in record.y},
            dx={batch: packed(dx[batch], travels) for batch in record.dx},
            sums=done,
        )
        return by_device(returned, device)

    def gradients(self, work: StepWork, record: StageRecord, batch: int) -> dict[SumName, Array]:
        """Return the gradients of one micro-batch."""
        totals: dict[SumName, Array] = {}
        self.repeat(work, record, batch, totals, Rounding())
        return {key: total.reshape(-1) for key, total in totals.items()}

    def run(
        self, graph: StageGraph, feed: Mapping[str, Array], rounding: Rounding
    ) -> dict[str, Array]:
        """Run a graph as another device does."""
        if graph not in self._others:
            model = noisy(graph.model, self._rounding) if self._rounding else graph.model
            self._others[graph] = OtherSession(model, *self._how)
        return self._others[graph].run(feed)


def by_device(record: StageRecord, number: int) -> StageRecord:
    """Return a record in which device `number` did all the work."""
    return replace(
        record,
        forward_by=dict.fromkeys(record.forward_by, number),
        backward_by=dict.fromkeys(record.backward_by, number),
        sums=[replace(sums, device=number) for sums in record.sums],
    )


def packed(values: Array, dtype: DType) -> memoryview:
    """Return numbers in the format in which they are sent."""
    flat = np.ascontiguousarray(values, np.float32).reshape(1, -1)
    return arrays.Buffer(arrays.narrow(flat, dtype), dtype).pack()


def unpacked(payload: Any, dtype: DType) -> Array:
    """Return received numbers, flat and in fp32."""
    return arrays.unpack(payload, 1, len(payload) // dtype.itemsize, dtype).float32().reshape(-1)


def sums_in(work: StepWork, sums: SumsRecord) -> dict[SumName, Array]:
    """Return the sums that a device returned, each as one flat array."""
    found: dict[SumName, list[Array]] = {}
    for (layer, name, _), payload in sorted(sums.found.items(), key=lambda each: each[0]):
        found.setdefault((layer, name), []).append(unpacked(payload, DType(work.gradients)))
    return {key: np.concatenate(parts) for key, parts in found.items()}


def with_sums(work: StepWork, sums: SumsRecord, given: Mapping[SumName, Array]) -> SumsRecord:
    """Return a record with other sums, split in the same way."""
    dtype, found = DType(work.gradients), {}
    for (layer, name, row), payload in sums.found.items():
        first = row * sums_of(work, layer)[name].columns
        part = given[layer, name][first : first + len(payload) // dtype.itemsize]
        found[layer, name, row] = packed(part, dtype)
    return replace(sums, found=found)


# --- lies ---

Arrays: TypeAlias = dict[SumName, Array]
Change: TypeAlias = Callable[[Arrays, float, np.random.Generator], Arrays]
"""A function that falsifies arrays, given the size below which elements are small."""


class Where(Enum):
    """The kind of data that a device falsifies."""

    SUMS = "sums"
    ONE_BATCH = "one micro-batch of sums"
    OUTPUT = "outputs"
    GRADIENT = "gradients passed on"


@dataclass(frozen=True, slots=True)
class Lie:
    """A way to lie.

    Attributes:
        name: description of the lie.
        change: function that falsifies the arrays.
        where: kind of data that is falsified.
        every: the device lies in one of this many steps.
        caught: whether audits should catch the lie.
    """

    name: str
    change: Change
    where: Where = Where.SUMS
    every: int = 1
    caught: bool = True


def small(change: Callable[[Array, np.random.Generator], Array]) -> Change:
    """Return a lie in small elements."""

    def changed(found: Arrays, limit: float, rng: np.random.Generator) -> Arrays:
        lied = {}
        for key, values in found.items():
            hit = np.abs(values) < limit
            lied[key] = values.copy()
            lied[key][hit] = change(values[hit], rng)
        return lied

    return changed


def named(end: str, factor: float) -> Change:
    """Return a lie that scales the gradients of parameters whose names end with `end`."""
    return lambda found, limit, rng: {
        key: values * np.float32(factor) if key[1].endswith(end) else values
        for key, values in found.items()
    }


def vectors(found: Arrays, limit: float, rng: np.random.Generator) -> Arrays:
    """Flip the signs of biases and norms."""
    return {
        key: -values if key[1].endswith("bias") or "norm" in key[1] else values
        for key, values in found.items()
    }


def swapped(found: Arrays, limit: float, rng: np.random.Generator) -> Arrays:
    """Exchange the gradients of queries and keys, up to the smaller size."""
    (query,) = (key for key in found if key[1].endswith("q_proj.weight"))
    (other,) = (key for key in found if key[1].endswith("k_proj.weight"))
    size = min(found[query].size, found[other].size)
    lied = {**found, query: found[query].copy(), other: found[other].copy()}
    lied[query][:size], lied[other][:size] = found[other][:size], found[query][:size]
    return lied


def flipped(values: Array, rng: np.random.Generator) -> Array:
    """Flip signs."""
    return -values


def noise(values: Array, rng: np.random.Generator) -> Array:
    """Add noise as large as the elements."""
    size = float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
    added: Array = np.float32(size) * rng.standard_normal(values.size, np.float32)
    return values + added


def some_flipped(values: Array, rng: np.random.Generator) -> Array:
    """Flip the signs of a tenth of the elements."""
    return np.where(rng.random(values.size) < 0.1, -values, values)


LIES: Final = (
    Lie("small ones flipped", small(flipped)),
    Lie("small ones halved", small(lambda values, rng: values / 2)),
    Lie("small ones zeroed", small(lambda values, rng: 0 * values)),
    Lie("noise of the size of small ones", small(noise)),
    Lie("a tenth of small ones flipped", small(some_flipped)),
    Lie("small ones flipped, 1 step in 5", small(flipped), every=5),
    Lie("small ones flipped, 1 micro-batch", small(flipped), Where.ONE_BATCH),
    Lie("q_proj.weight times 0.9", named("q_proj.weight", 0.9)),
    Lie("q_proj and k_proj exchanged", swapped),
    Lie("biases and norms flipped", vectors),
    Lie("outputs, small ones halved", small(lambda values, rng: values / 2), Where.OUTPUT),
    Lie("dx, small ones flipped", small(flipped), Where.GRADIENT),
    Lie("everything times 1.0005", named("", 1.0005), caught=False),
)


class Liar:
    """Computes a step's first stage as a lying device.

    Args:
        step: the step.
        device: device that computes the honest results.
        seed: seed of the lies.
    """

    def __init__(self, step: Step, device: Device, seed: int) -> None:
        self.work, result = step
        self._device = device
        self._rng = np.random.default_rng(seed)
        self.honest = device.returned(self.work, result.records[0], 1)

    def record(self, lie: Lie) -> StageRecord:
        """Return the falsified record."""
        if lie.where is Where.OUTPUT:
            return replace(self.honest, y=self._activations(lie, self.honest.y), dx={}, sums=[])
        if lie.where is Where.GRADIENT:
            return replace(self.honest, dx=self._activations(lie, self.honest.dx), y={}, sums=[])
        return replace(self.of_sums, sums=[self._sums(lie, sums) for sums in self.honest.sums])

    @property
    def of_sums(self) -> StageRecord:
        """Return the honest record, limited to sums for the audit."""
        return replace(self.honest, forward_by={}, backward_by={})

    def _sums(self, lie: Lie, sums: SumsRecord) -> SumsRecord:
        found = sums_in(self.work, sums)
        if lie.where is Where.SUMS:
            return with_sums(self.work, sums, self._changed(lie, found, self._tolerated))
        one = self._device.gradients(self.work, self.honest, min(sums.batches))
        lied = self._changed(lie, one, self._tolerated)
        return with_sums(self.work, sums, {k: found[k] - one[k] + lied[k] for k in found})

    def _activations(self, lie: Lie, payloads: Mapping[int, Any]) -> dict[int, Any]:
        dtype = DType(self.work.dtype)
        key, tolerated = (0, ""), TOLERATED[DType.BF16]
        return {
            batch: packed(
                self._changed(lie, {key: unpacked(payload, dtype)}, tolerated)[key], dtype
            )
            for batch, payload in payloads.items()
        }

    def _changed(self, lie: Lie, found: Arrays, tolerated: float) -> Arrays:
        largest = max(float(np.abs(values).max(initial=0.0)) for values in found.values())
        return lie.change(found, tolerated * largest, self._rng)

    @property
    def _tolerated(self) -> float:
        return TOLERATED[DType(self.work.gradients)]


@dataclass
class Caught:
    """The results of devices with one kind of lie.

    Attributes:
        lie, dtype: the lie and the dtype.
        expected: whether audits should catch the lie.
        seeds: number of seeds.
        audits: for each device caught, the number of audits until then.
    """

    lie: str
    dtype: str
    expected: bool
    seeds: int
    audits: list[int]

    @property
    def met(self) -> bool:
        """Return whether all devices were caught, or none if none should be."""
        return len(self.audits) == (self.seeds if self.expected else 0)


def audits_until_caught(liars: Sequence[Liar], auditor: Auditor, lie: Lie, device: int) -> int:
    """Audit a lying device until it is caught; return the number of audits, 0 if never caught.

    Args:
        liars: the device in several steps, which are audited in turn.
        auditor: auditor that audits everything.
        lie: the lie.
        device: number of the device.
    """
    for number in range(1, MOST_AUDITS + 1):
        liar = liars[number % len(liars)]
        record = liar.of_sums if number % lie.every else liar.record(lie)
        given = StepResult({}, {}, {}, [by_device(record, device)])
        if auditor.faults(liar.work, given):
            return number
    return 0


def lies(
    seeds: int,
    dtypes: Sequence[DType] = DTYPES,
    families: Sequence[str] = ("opt", "llama", "qwen3"),
) -> list[Caught]:
    """Run part one."""
    found = [
        Caught(lie.name, dtype.value, lie.caught, seeds, []) for dtype in dtypes for lie in LIES
    ]
    for seed, dtype in itertools.product(range(seeds), dtypes):
        show_progress(f"lies in {dtype.value}, seed {seed + 1} of {seeds}")
        model = small_model(families[seed % len(families)])
        steps = trained_steps(model, dtype, 2, EvenStages(loss=False), seed)
        auditor = Auditor(EVERYTHING, random.Random(seed))
        device = Device(2, LEVELS[seed % len(LEVELS)], ROUNDINGS[1])
        liars = [Liar(step, device, seed) for step in steps]
        for number, lie in enumerate(LIES):
            audits = audits_until_caught(liars, auditor, lie, number)
            if audits:
                found[dtypes.index(dtype) * len(LIES) + number].audits.append(audits)
    return found


# --- steps ---


class Kept(Auditor):
    """Keeps a step instead of auditing it."""

    def faults_of(
        self,
        work: StepWork,
        record: StageRecord,
        losses: Mapping[int, Any],
        watches: Mapping[int, Watch] = MappingProxyType({}),
    ) -> list[Fault]:
        """Return no faults."""
        return []

    def faults(
        self,
        work: StepWork,
        result: StepResult,
        surely: Collection[int] = (),
        audited: Collection[int] = (),
        watches: Sequence[Mapping[int, Watch]] = (),
    ) -> list[Fault]:
        """Keep the step and return no faults."""
        self.step = work, result
        return []


def trained_steps(
    model: nn.Module,
    dtype: DType,
    count: int,
    planner: Any,
    seed: int,
    *,
    devices: int = 2,
    samples: int = ROWS,
    tokens: int = TOKENS,
) -> list[Step]:
    """Train a model with perturbed weights on an emulated fleet; return the steps."""
    kept, found = Kept(0.0), []
    parameters = [each for each in model.parameters() if each.requires_grad]
    torch.manual_seed(seed)
    with torch.no_grad():
        for each in parameters:
            each.add_(0.02 * torch.randn_like(each))
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    graphs = model_graphs(model, tokens, GraphCache.of_user())
    with emulated(devices, seed=1) as fleet:
        staged = StagedModel(
            ModelWork(model, graphs, dtype), fleet.runtime, planner, PS, auditor=kept
        )
        for _ in range(count):
            optimizer.zero_grad()
            staged.gradients(rows(torch.randint(3, vocabulary, (samples, tokens))))
            optimizer.step()
            found.append(kept.step)
    return found


# --- honest devices ---


@dataclass
class Honest:
    """The results of auditing honest devices.

    Attributes:
        sums: number of audited sums of gradients, each of all parameters of a stage.
        parameters: number of single parameters in these sums.
        outputs: number of audited outputs.
        repeated: number of audits repeated with coarser rounding.
        accused: number of faults found.
    """

    sums: int = 0
    parameters: int = 0
    outputs: int = 0
    repeated: int = 0
    accused: int = 0

    def audit(self, steps: Sequence[Step], kinds: Sequence[Device], sums: int) -> None:
        """Audit `sums` more sums, with devices of several kinds in turn."""
        auditor = Auditor(EVERYTHING, random.Random(self.sums))
        count = len(kinds) * len(steps)
        until = self.sums + sums
        for number in itertools.count():
            if self.sums >= until:
                break
            work, result = steps[number // len(kinds) % len(steps)]
            kind = number % len(kinds)
            stage = result.records[number // count % len(result.records)]
            record = kinds[kind].returned(work, stage, kind)
            if number // len(kinds) % OUTPUTS_EVERY:
                record = replace(record, forward_by={}, backward_by={})
            self.accused += len(auditor.faults(work, StepResult({}, {}, {}, [record])))
            self.sums += len(record.sums)
            self.parameters += sum(len(each.found) for each in record.sums)
        self.outputs += auditor.counters.outputs
        self.repeated += auditor.counters.again


def huge(model: nn.Module) -> nn.Module:
    """Scale weights so that activations differ by several orders of magnitude."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter[:2] *= 50
                parameter[:, :2] *= 50
    return model


def honest(sums: int, seed: int = 0) -> Honest:
    """Run part two."""
    found = Honest()
    even, loss, cut = EvenStages(loss=False), EvenStages(loss=True), SlicedLoss(2, KEPT)
    cases: list[tuple[str, Callable[[], nn.Module], Any]] = [
        *((name, lambda name=name: small_model(name), even) for name in ("opt", "gpt2", "qwen2")),
        ("llama, loss on a device", lambda: small_model("llama"), loss),
        ("llama, loss in slices", lambda: small_model("llama"), cut),
        ("opt, huge activations", lambda: huge(small_model("opt")), even),
        ("llama with adapters", lambda: with_lora(small_model("llama")), even),
    ]
    kinds = [
        (threads, LEVELS[n % len(LEVELS)], ROUNDINGS[n // len(LEVELS) % len(ROUNDINGS)])
        for n, threads in zip(range(len(LEVELS) * len(ROUNDINGS)), itertools.cycle(THREADS))
    ]
    for (name, make, planner), dtype in itertools.product(cases, DTYPES):
        show_progress(f"{name}, {dtype.value}: {found.sums} sums, {found.accused} accused")
        devices = 4 if planner is cut else 2
        steps = trained_steps(make(), dtype, 10, planner, seed, devices=devices)
        found.audit(steps, [Device(*kind) for kind in kinds], -(-sums // len(cases) // len(DTYPES)))
    return found


def wide(steps: int) -> Honest:
    """Run part three."""
    found = Honest()
    kinds = [Device(2, LEVELS[0], 0.0), *(Device(1, LEVELS[-1], by) for by in ROUNDINGS[1:3])]
    for dtype in DTYPES:
        model: Any = OPTForCausalLM(OPTConfig(**WIDE)).train()
        done = trained_steps(
            model, dtype, steps, EvenStages(loss=False), 1, samples=2, tokens=WIDE_TOKENS
        )
        for step in done:
            show_progress(f"wide {dtype.value}: {found.sums} sums, {found.accused} accused")
            found.audit([step], kinds, len(kinds))
    return found


def show_progress(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


# --- the command ---


def show(found: Sequence[Caught], fair: Mapping[str, Honest]) -> None:
    """Print the results as tables."""
    print(f"{machine()}; {CPU_PROVIDER}\n")
    print(f"{'a device lies so':34} {'in':5} {'caught':>9} {'audits, at most':>16}")
    for one in found:
        caught = f"{len(one.audits)} of {one.seeds}"
        most = max(one.audits, default="-")
        wanted = "all" if one.expected else "none"
        met = "met" if one.met else f"NOT met: {wanted} are to be caught"
        print(f"{one.lie:34} {one.dtype:5} {caught:>9} {most:>16}   {met}")
    for name, each in fair.items():
        print(
            f"\n{name}: {each.sums:,} audited sums of {each.parameters:,} parameters, "
            f"{each.outputs:,} audited outputs, of all these repeated {each.repeated:,}\n"
            f"accused: {each.accused} (none allowed): {'NOT met' if each.accused else 'met'}"
        )


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sums", type=int, default=2000)
    parser.add_argument("--wide", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the models of honest devices")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 500 sums and 1 wide step")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.sums, options.wide = 2, 500, 1
    found = lies(options.seeds)
    fair = {"honest devices": honest(options.sums, options.seed), "wide layers": wide(options.wide)}
    if options.json:
        told = {name: asdict(each) for name, each in fair.items()}
        lied = [asdict(one) | {"met": one.met} for one in found]
        print(json.dumps({"machine": machine(), "lies": lied, "honest": told}, indent=2))
    else:
        show(found, fair)
    accused = sum(each.accused for each in fair.values())
    sys.exit(0 if all(one.met for one in found) and not accused else 1)


if __name__ == "__main__":
    main()
