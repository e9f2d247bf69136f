"""Audits of stages: how soon a device that lies is caught, and whether an honest one is accused.

    python -m benchmarks.stage_audits [--quick] [--audit 0.5] [--seeds 20] [--units 10000] [--json]

1. A small OPT with real graphs on two emulated devices, one layer each, in fp32. The first lies: in
   what it returns of forward and backward passes, or in its sums of gradients only; in every, every
   tenth or every hundredth of these, drawn by lot; grossly (half of the elements a hundredfold), or
   in the largest element alone, by three times what audits tolerate. The fleet does a step once;
   its first stage is then audited again and again with new lies, for what devices return does not
   depend on what is audited: so there are many steps in little time. That a liar is quarantined and
   the step done again is tested elsewhere (tests/training/test_audits.py). Prints the mean of the
   steps until it was caught, and the chance to be caught in a step with its 95 % interval, against
   what docs/verification.md states. A lie of a third of the tolerance is never to be seen. Ends
   with 1 where the stated chance is outside the 99.9 % interval: there are many lines.
2. Honest devices in real training: small models of four families, in fp32 and bf16, devices with
   one and two threads, audited with the other number. All work is audited, until `--units`
   micro-batches were computed again. No device may be accused. Also prints the largest error, as a
   share of what is tolerated.

3. Honest devices that round otherwise: two layers of OPT-125M's size, whose ReLU has a kink, in
   training. What goes into a layer at the audit differs by up to 1e-6 from what went into it on the
   device, which stands for other kernels. No device may be accused. Prints how many audits found
   more than rounding alone explains, and how often work was computed again for these.

`--quick`: fewer seeds and units.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import OPTConfig, OPTForCausalLM

from benchmarks.common import machine
from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
from cleave.machine.graph_provider import CPU_SETUP
from cleave.machine.graph_session import GraphSession
from cleave.scheduler.stage_outcomes import StageRecord, StepResult, SumsRecord
from cleave.scheduler.stage_work import StepWork
from cleave.training import audits
from cleave.training.audits import Auditor, Fault
from cleave.training.honest_error import MOST_OFF, Difference
from cleave.training.stage_work import ModelWork
from cleave.training.staged import StagedModel
from emulator.virtual import emulated
from tests.graphs.models import TOKENS, small_model
from tests.training.test_staged import PS, ROWS, EvenStages, rows

FAMILIES: Final = ("opt", "llama", "gpt2", "qwen3")
SHARES: Final = (1.0, 0.1, 0.01)
THREADS: Final = (1, 2)
MOST_STEPS: Final = 100_000
UNSEEN_STEPS: Final = 200
USUAL_Z, OUTSIDE_Z = 1.96, 3.29  # of 95 % and of 99.9 %
GROSS: Final = 100.0
VOCABULARY: Final = 96
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 2, "num_attention_heads": 12,
    "vocab_size": 1000, "max_position_embeddings": 256, "dropout": 0.0, "attention_dropout": 0.0,
    "word_embed_proj_dim": 768,
}  # fmt: skip
WIDE_TOKENS: Final = 128
WIDE_STEPS: Final = 50
ROUNDINGS: Final = (2.0**-23, 2.0**-21, 2.0**-20)
"""By how much inputs differ that stand for other kernels, relative to each."""


class What(Enum):
    """What a device lies in."""

    OUTPUTS = "outputs"
    SUMS = "sums"


class Size(Enum):
    """How large a lie is; a number is relative to what audits tolerate."""

    GROSS = "gross"
    SMALL = 3.0
    BELOW = 1 / 3

    @property
    def words(self) -> str:
        """Return it as the table shows it."""
        return "gross" if self is Size.GROSS else f"{self.value:.2g}x limit"


class Kept(Auditor):
    """Keeps a step instead of auditing it."""

    def faults(
        self, work: StepWork, result: StepResult, surely: Collection[int] = ()
    ) -> list[Fault]:
        """Keep the step; return nothing."""
        self.step = work, result
        return []


@dataclass(frozen=True, slots=True)
class Caught:
    """How a liar fared.

    Attributes:
        what, size, share: of its lies.
        stated: the chance to be caught in a step.
        steps: until it was caught, by seed.
        missed: seeds in which it was not caught at all.
    """

    what: str
    size: str
    share: float
    stated: float
    steps: list[int]
    missed: int

    @property
    def chance(self) -> float:
        """Return the measured chance to be caught in a step."""
        return len(self.steps) / sum(self.steps)

    def interval(self, z: float) -> tuple[float, float]:
        """Return the interval of the chance, of geometric waiting times."""
        off = z * math.sqrt(max(0.0, 1 - self.chance) / len(self.steps))
        return self.chance * math.exp(-off), min(1.0, self.chance * math.exp(off))

    @property
    def met(self) -> bool:
        """Say whether the stated chance explains what was measured."""
        low, high = self.interval(OUTSIDE_Z)
        return not self.missed and low <= self.stated + 1e-9 and self.stated <= high + 1e-9


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have sessions of graphs that are made within the block compute with so many threads."""
    with patch.dict(os.environ, {"OMP_NUM_THREADS": str(count)}):
        yield


# --- liars ---


def lied(payload: Any, size: Size, largest: float) -> memoryview:
    """Return fp32 numbers that are false.

    Args:
        payload: the numbers.
        size: of the lie.
        largest: the element that audits compare errors with.
    """
    values = np.frombuffer(bytes(payload), np.float32).copy()
    if size is Size.GROSS:
        values[: len(values) // 2] *= GROSS
    else:
        values[np.abs(values).argmax()] += size.value * MOST_OFF[DType.FP32] * largest
    return memoryview(values.tobytes())


def largest_of(payload: Any) -> float:
    """Return the largest size of fp32 numbers."""
    return float(np.abs(np.frombuffer(bytes(payload), np.float32)).max())


def false_outputs(record: StageRecord, size: Size, share: float, rng: random.Random) -> StageRecord:
    """Return a stage's record in which each output and gradient is false by lot."""

    def some(given: Mapping[int, Any]) -> dict[int, Any]:
        return {
            batch: lied(payload, size, largest_of(payload)) if rng.random() < share else payload
            for batch, payload in given.items()
        }

    return replace(record, y=some(record.y), dx=some(record.dx))


def false_sums(record: StageRecord, size: Size, share: float, rng: random.Random) -> StageRecord:
    """Return a stage's record in which the sums are false by lot."""

    def falsified(sums: SumsRecord) -> SumsRecord:
        if rng.random() >= share:
            return sums
        key = max(sums.found, key=lambda one: largest_of(sums.found[one]))
        payload = sums.found[key]
        return replace(sums, found={**sums.found, key: lied(payload, size, largest_of(payload))})

    return replace(record, sums=[falsified(sums) for sums in record.sums])


def first_stage(graphs: ModelGraphs, model: torch.nn.Module) -> tuple[StepWork, StepResult]:
    """Return a step as a fleet did it, of which only the first stage is left to be audited."""
    kept = Kept(1.0)
    with emulated(2, seed=1) as fleet:
        work = ModelWork(model, graphs, DType.FP32)
        staged = StagedModel(work, fleet.runtime, EvenStages(loss=False), PS, auditor=kept)
        staged.gradients(rows(torch.randint(3, VOCABULARY, (ROWS, TOKENS))))
    done, result = kept.step
    return done, replace(result, records=result.records[:1])


def stated_chance(record: StageRecord, what: What, share: float, audit: float) -> float:
    """Return the chance to be caught in a step, as docs/verification.md has it."""
    if what is What.OUTPUTS:  # the output or the gradient of the drawn micro-batch
        return audit * (1 - (1 - share) ** 2)
    (sums,) = record.sums
    return audit / len(sums.batches) * share


def steps_until_caught(
    step: tuple[StepWork, StepResult],
    auditor: Auditor,
    lie: tuple[What, Size, float],
    rng: random.Random,
    most: int,
) -> int | None:
    """Return in which step a liar is caught; None if in none of `most`."""
    work, result = step
    what, size, share = lie
    falsified = false_outputs if what is What.OUTPUTS else false_sums
    for number in range(1, most + 1):
        record = falsified(result.records[0], size, share, rng)
        if auditor.faults(work, replace(result, records=[record])):
            return number
    return None


def liars(audit: float, seeds: int) -> tuple[list[Caught], int]:
    """Run part one; return what was caught, and how many lies below the limit were."""
    torch.manual_seed(1)
    model = small_model("opt")
    step = first_stage(model_graphs(model, TOKENS, GraphCache.of_user()), model)
    record = step[1].records[0]
    rng = random.Random(7)
    auditor = Auditor(audit, rng)
    found = []
    for what, size, share in itertools.product(What, (Size.GROSS, Size.SMALL), SHARES):
        waits = [
            steps_until_caught(step, auditor, (what, size, share), rng, MOST_STEPS)
            for _ in range(seeds)
        ]
        found.append(
            Caught(
                what.value,
                size.words,
                share,
                stated_chance(record, what, share, audit),
                [wait for wait in waits if wait is not None],
                waits.count(None),
            )
        )
        show_caught(found[-1])
    seen = [
        steps_until_caught(step, auditor, (what, Size.BELOW, 1.0), rng, UNSEEN_STEPS)
        for what in What
    ]
    return found, len(seen) - seen.count(None)


def show_caught(found: Caught) -> None:
    """Print the line of a liar, to the log: tables go to standard output with the rest."""
    low, high = found.interval(USUAL_Z)
    print(
        f"{found.what:8} {found.size:9} {found.share:>6.0%} {statistics.mean(found.steps):8.1f} "
        f"{found.chance:8.4f} {low:7.4f} to {high:6.4f} {found.stated:8.4f} "
        f"{'met' if found.met else 'NOT met'}",
        file=sys.stderr,
        flush=True,
    )


# --- honest devices ---


@dataclass
class Honest:
    """What came of auditing honest devices.

    Attributes:
        outputs, sums: micro-batches that were computed again.
        accused: faults that were found.
        worst: by dtype, the largest error as a share of what is tolerated.
    """

    outputs: int
    sums: int
    accused: int
    worst: dict[str, float]


def honest(units: int) -> Honest:
    """Run part two."""
    found = Honest(0, 0, 0, {})
    cases = list(itertools.product(FAMILIES, (DType.FP32, DType.BF16), THREADS))
    for number, (family, dtype, count) in enumerate(cases, 1):
        until = units * number // len(cases)
        show_progress(f"{family} {dtype.value}, {count} threads: {found.outputs + found.sums}")
        torch.manual_seed(number)
        model = small_model(family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        kept = Kept(1.0)
        # A rate above 1 makes sure that sums are audited in each step as well.
        auditor = Watching(float(ROWS), random.Random(number))
        auditor.worst = found.worst
        work = ModelWork(model, model_graphs(model, TOKENS, GraphCache.of_user()), dtype)
        with emulated(2, seed=1) as fleet:
            staged = StagedModel(work, fleet.runtime, EvenStages(loss=False), PS, auditor=kept)
            before = found.outputs + found.sums
            while before + auditor.counters.outputs + auditor.counters.sums < until:
                optimizer.zero_grad()
                with threads(count):
                    staged.gradients(rows(torch.randint(3, VOCABULARY, (ROWS, TOKENS))))
                with threads(sum(THREADS) - count):
                    auditor.faults(*kept.step)
                optimizer.step()
        found.outputs += auditor.counters.outputs
        found.sums += auditor.counters.sums
        found.accused += auditor.counters.faults
    return found


class Watching(Auditor):
    """Notes the largest error that it meets, by dtype, as a share of what rounding explains."""

    worst: dict[str, float]

    def _faults_of(
        self,
        record: StageRecord,
        returned: Mapping[Any, Any],
        wanted: Mapping[Any, Array],
        repeat: Callable[[np.random.Generator | None], Mapping[Any, Array]],
    ) -> Iterator[Fault]:
        for key, one in returned.items():
            limit = MOST_OFF[one.dtype] * one.scale
            if limit:
                off = Difference.between(one.found, wanted[key].reshape(one.found.shape))
                share = off.largest / limit
                self.worst[one.dtype.value] = max(self.worst.get(one.dtype.value, 0.0), share)
        yield from super()._faults_of(record, returned, wanted, repeat)


# --- other kernels ---


class OtherKernel(GraphSession):
    """A graph whose results are rounded otherwise: what goes into a layer differs by rounding.

    Attributes:
        by: how much, relative to each element.
        runs: how many there were.
    """

    by = 0.0
    runs = 0
    _random = np.random.default_rng(0)

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run it."""
        OtherKernel.runs += 1
        moved = dict(given)
        for name in {names.X, names.DY} & moved.keys():
            signs = self._random.choice(np.array([-1, 1], np.float32), moved[name].shape)
            moved[name] = moved[name] * (1 + np.float32(self.by) * signs)
        return super().run(moved, wanted)


@dataclass(frozen=True, slots=True)
class Rounded:
    """How honest devices fared that round otherwise.

    Attributes:
        dtype: in which numbers travel.
        by: how much what goes into layers differs.
        audits: of outputs and of sums.
        beyond: those of them in which rounding alone did not explain what was found.
        repeated: how often work was computed again for these, on average.
        largest: the largest error, as a share of what rounding explains.
        accused: honest devices that were.
    """

    dtype: str
    by: float
    audits: int
    beyond: int
    repeated: float
    largest: float
    accused: int


def rounded(dtype: DType, by: float, steps: int) -> Rounded:
    """Run part three for one dtype and one size of differences."""
    torch.manual_seed(1)
    model: Any = OPTForCausalLM(OPTConfig(**WIDE)).train()
    graphs = model_graphs(model, WIDE_TOKENS, GraphCache.of_user())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept, auditor = Kept(1.0), Watching(100.0, random.Random(1))  # everything
    auditor.worst = {}
    OtherKernel.by, OtherKernel.runs = by, 0
    with emulated(1, seed=1) as fleet, patch.object(audits, "GraphSession", OtherKernel):
        work = ModelWork(model, graphs, dtype)
        staged = StagedModel(work, fleet.runtime, EvenStages(loss=False), PS, auditor=kept)
        for step in range(steps):
            show_progress(f"{dtype.value}, rounded otherwise: step {step + 1} of {steps}")
            optimizer.zero_grad()
            staged.gradients(rows(torch.randint(3, WIDE["vocab_size"], (1, WIDE_TOKENS))))
            auditor.faults(*kept.step)
            optimizer.step()
    counted = auditor.counters
    done = counted.outputs + counted.sums
    repeated = OtherKernel.runs / (2 * WIDE["num_hidden_layers"]) - done
    return Rounded(
        dtype.value,
        by,
        done,
        counted.again,
        repeated / max(1, counted.again),
        max(auditor.worst.values()),
        counted.faults,
    )


def show_progress(text: str) -> None:
    """Say on standard error what is being done."""
    print(text, file=sys.stderr, flush=True)


# --- the command ---


def show(
    audit: float, found: Sequence[Caught], seen: int, fair: Honest, other: Sequence[Rounded]
) -> None:
    """Print what was measured as tables."""
    print(
        f"{machine()}; {CPU_SETUP.runtime_name}; --audit {audit:g}, {len(found[0].steps)} seeds\n"
    )
    print(f"{'':25} {'steps until':>11} {'chance to be caught in a step':>33}")
    head = ("lies in", "by", "of them", "caught", "measured", "95 %", "stated")
    print("{:8} {:9} {:>6} {:>8} {:>8} {:>17} {:>8}".format(*head))
    for one in found:
        low, high = one.interval(USUAL_Z)
        print(
            f"{one.what:8} {one.size:9} {one.share:>7.0%} {statistics.mean(one.steps):8.1f} "
            f"{one.chance:8.4f} {f'{low:.4f} to {high:.4f}':>17} {one.stated:8.4f} "
            f"{'' if one.met else '!'}"
        )
    met = all(one.met for one in found)
    print(f"as stated (99.9 % interval): {'met' if met else 'NOT met'}")
    print(
        f"lies of a third of the limit, in all of {UNSEEN_STEPS} steps, seen: {seen} of "
        f"{len(What)} (none expected)\n"
    )
    worst = ", ".join(f"{share:.2g} in {dtype}" for dtype, share in fair.worst.items())
    print(
        f"honest: {fair.outputs + fair.sums:,} units audited ({fair.outputs:,} for outputs, "
        f"{fair.sums:,} for sums)\naccused: {fair.accused} (none allowed): "
        f"{'met' if not fair.accused else 'NOT met'}\n"
        f"largest error, as a share of what rounding explains: {worst}\n"
    )
    print("rounded otherwise, two layers of OPT-125M's size in training:")
    print(f"{'inputs differ by':>21} {'audits':>7} {'beyond':>7} {'repeated':>9} {'largest':>8}")
    for each in other:
        print(
            f"{each.dtype:8} {each.by:12.2g} {each.audits:7,} {each.beyond:7,} "
            f"{each.repeated:9.1f} {each.largest:8.2g}   accused: {each.accused} "
            f"{'met' if not each.accused else 'NOT met'}"
        )


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--audit", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--units", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seeds, units = (5, 500) if options.quick else (options.seeds, options.units)
    found, seen = liars(options.audit, seeds)
    fair = honest(units)
    dtypes = (DType.FP32, DType.BF16)
    steps = 10 if options.quick else WIDE_STEPS
    other = [rounded(dtype, by, steps) for dtype in dtypes for by in ROUNDINGS]
    if options.json:
        told = [asdict(one) | {"chance": one.chance, "met": one.met} for one in found]
        whole = {"machine": machine(), "audit": options.audit, "liars": told}
        whole |= {"seen_below_limit": seen, "honest": asdict(fair)}
        print(json.dumps(whole | {"rounded": [asdict(one) for one in other]}, indent=2))
    else:
        show(options.audit, found, seen, fair, other)
    accused = fair.accused + sum(one.accused for one in other)
    sys.exit(0 if all(one.met for one in found) and not seen and not accused else 1)


if __name__ == "__main__":
    main()
