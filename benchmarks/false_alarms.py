"""Honest results of real training, judged: nobody is to be accused.

    python -m benchmarks.false_alarms [--steps 20] [--warm 200] [--batch 2] [--seq 128]
                                      [--model opt llama] [--dtype fp32 bf16 fp16] [--quick]

Trains OPT-125M and a Llama of the same size on real text with plain torch, and takes every product
of `--steps` steps at the start and after `--warm` steps, under fp32, bf16 and fp16 autocast. Each
is cut as the planner cuts it, for four equal processes beside the server and for eight unequal
phones (whose plans have partial sums); each block is multiplied by every executor (numpy, torch)
and by a device that adds one product after the other, in fp32 (as a simple kernel in a browser
does); each result is judged by every path of the check (numpy, compiled loops).

Printed for each: blocks, results called wrong (0), rows that were in doubt and computed again, the
largest residual over the tolerance of rows in no doubt, and, of 16-bit results, the elements
computed exactly and those that were not the right rounding.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.device.executors import NumpyExecutor, TorchExecutor
from cleave.errors import CleaveError
from cleave.fleet.fleet import Operand, Side
from cleave.gemm import Block, Gemm, gemm_of, wavefront
from cleave.models.build import build_model
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.planner.planner import TilePlanner
from cleave.training.data import BatchLoader, build_corpus
from cleave.training.job import default_learning_rate
from cleave.training.offload import offload, restore
from cleave.training.optimizer import Optimizer, Schedule
from cleave.training.tokenizer import default_tokenizer
from cleave.verify import GemmCheck
from cleave.verify.projection import Pass, compiled_pass, numpy_pass
from cleave.workload.registry import Family, ModelSpec, find_model

LLAMA = ModelSpec(
    name="llama-125m", family=Family.LLAMA, layers=12, width=768, heads=12, kv_heads=12,
    head_width=64, ffn_width=2048, vocabulary=32000, max_positions=2048, embedding_width=768,
    tied_head=True,
)  # fmt: skip
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
RATES = [DeviceRates(i, 1e9, 1e9, 5e10, 1e-4, 2 * 10**9) for i in range(4)]
PHONES = [
    DeviceRates(i, 2e7 * (1 + i), 2e6 * (1 + i % 3), 2e10 * (1 + i % 4), 5e-3, 10**9)
    for i in range(8)
]
FLEETS = {"processes": RATES, "phones": PHONES}

Multiply = Callable[[Buffer, Buffer, Buffer], None]


@numba.njit(fastmath=False, nogil=True)
def _add_in_turn(a: Any, b: Any, out: Any) -> None:
    rows = a.shape[0]
    for i in range(0, rows, 4):
        o0, o1, o2, o3 = out[i], out[i + 1], out[i + 2], out[i + 3]
        for k in range(a.shape[1]):
            x0, x1, x2, x3 = a[i, k], a[i + 1, k], a[i + 2, k], a[i + 3, k]
            for j in range(b.shape[1]):
                y = b[k, j]
                o0[j] += x0 * y
                o1[j] += x1 * y
                o2[j] += x2 * y
                o3[j] += x3 * y


def in_turn(a: Buffer, b: Buffer, out: Buffer) -> None:
    """Multiply as a device that adds one product after the other, in fp32."""
    rows = -(-a.shape[0] // 4) * 4  # four at a time
    left = np.zeros((rows, a.shape[1]), np.float32)
    left[: a.shape[0]] = a.float32()
    total = np.zeros((rows, b.shape[1]), np.float32)
    _add_in_turn(left, np.ascontiguousarray(b.float32()), total)
    out.array[...] = arrays.narrow(total[: a.shape[0]], out.dtype)


EXECUTORS: dict[str, Multiply] = {
    "numpy": NumpyExecutor().matmul,
    "torch": TorchExecutor().matmul,
    "in turn": in_turn,
}


@dataclass
class Tally:
    """What came of judging the results of one executor."""

    blocks: int = 0
    accused: int = 0
    recomputed: int = 0
    rows: int = 0
    largest: float = 0.0
    spots: int = 0
    misrounded: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass
class Judge:
    """Multiplies for a model in training, and judges every executor's results when told to."""

    paths: dict[str, Pass]
    executors: dict[str, Multiply]
    active: bool = False
    every: int = 1  # judge one product of so many

    def __post_init__(self) -> None:
        self.tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        self.products = 0
        self._ids = count(1)
        self._planner = TilePlanner()
        self._plans: dict[Any, list[tuple[Block, bool]]] = {}
        self._own = TorchExecutor()
        self._rng = np.random.default_rng(0)

    def operand(self, buffer: Buffer) -> Operand:
        """See `Fleet.operand`."""
        return Operand(next(self._ids), buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> _Ready:
        """See `Fleet.submit`: done at once."""
        left, right = (s.operand.buffer.T if s.transposed else s.operand.buffer for s in (a, b))
        self._own.matmul(left, right, out)
        self.products += self.active
        if self.active and self.products % self.every == 0:
            for number, fleet in enumerate(FLEETS):
                names = list(self.executors)
                if number:  # the second plan has one executor after the other
                    names = [names[self.products // self.every % len(names)]]
                self.judge(left, right, out.dtype, fleet, names)
        return _Ready(out)

    def judge(self, a: Buffer, b: Buffer, dtype: DType, fleet: str, names: Sequence[str]) -> None:
        """Let executors multiply it block by block and every path of the check judge them."""
        blocks = self.blocks(gemm_of(a.shape, b.shape), a.dtype, dtype, fleet)
        for name in names:
            checks = {
                path: GemmCheck(a, b, [x for x, _ in blocks], self._rng, project)
                for path, project in self.paths.items()
            }
            for block, partial in blocks:
                out = DType.FP32 if partial else dtype
                result = arrays.empty(block.m.size, block.n.size, out)
                with np.errstate(all="ignore"):
                    parts = a.region(block.m, block.k), b.region(block.k, block.n)
                    self.executors[name](*parts, result)
                for path, check in checks.items():
                    found = check.judge(block, result)
                    tally = self.tallies[f"{a.dtype.value}>{out.value}", name, path]
                    tally.blocks += 1
                    tally.rows += block.m.size
                    tally.recomputed += found.recomputed
                    tally.spots += found.spots
                    tally.misrounded += found.misrounded
                    tally.largest = max(tally.largest, check.largest)
                    if found.fault is not None:
                        tally.accused += 1
                        tally.reasons.append(f"{a.shape}@{b.shape}: {found.fault.reason}")

    def blocks(self, gemm: Gemm, dtype: DType, out: DType, fleet: str) -> list[tuple[Block, bool]]:
        """The blocks of a plan, and whether each is a partial sum."""
        key = gemm, dtype, fleet
        if key not in self._plans:
            element = ElementBytes(dtype.itemsize, out.itemsize)
            plan = self._planner.plan(gemm, element, FLEETS[fleet])
            self._plans[key] = [
                (block, tile.tile.is_partial(gemm))
                for tile in plan.tiles
                for block in wavefront(tile.cut)
            ]
        return self._plans[key]

    def report(self, title: str) -> int:
        """Print what was found since the last report; returns the number accused."""
        accused = 0
        print(
            f"{title}\n  {'product':11} {'executor':9} {'check':9} {'blocks':>8} {'accused':>8} "
            f"{'again':>9} {'largest':>8} {'misrounded':>16}"
        )
        for (kind, name, path), t in sorted(self.tallies.items()):
            accused += t.accused
            print(
                f"  {kind:11} {name:9} {path:9} {t.blocks:8,} {t.accused:8} "
                f"{t.recomputed / max(1, t.rows):9.1e} {t.largest:8.3f} "
                f"{f'{t.misrounded} of {t.spots:,}' if t.spots else '':>16}"
            )
            for reason in t.reasons[:3]:
                print(f"    {reason}")
        print(flush=True)
        self.tallies.clear()
        return accused


@dataclass
class _Ready:
    out: Buffer

    def result(self) -> Buffer:
        return self.out


@dataclass
class Training:
    """A model in training on real text, whose products a judge multiplies."""

    spec: ModelSpec
    judge: Judge
    batch: int
    seq: int

    def __post_init__(self) -> None:
        size = min(4096, self.spec.vocabulary)
        tokenizer = default_tokenizer(vocab_size=size, progress=lambda _: None)
        corpus = build_corpus(None, tokenizer, min_tokens=self.seq + 1, progress=lambda _: None)
        self._loader = BatchLoader(corpus.train, batch=self.batch, seq=self.seq, seed=0)
        self._model = build_model(self.spec, seed=0).train()
        self._optimizer = Optimizer(self._model, weight_decay=0.1, clip=1.0, in_backward=False)
        self._schedule = Schedule(default_learning_rate(self.spec), 20, 1000)
        self._step = 0

    def steps(self, number: int, dtype: str = "fp32", *, judged: bool = False) -> float:
        """Do some steps; returns the last loss."""
        self.judge.active = judged
        offload(self._model, self.judge)
        try:
            for _ in range(number):
                loss = self._optimizer.step(
                    self._schedule.rate(self._step), lambda: self._backward(dtype)
                )
                self._step += 1
        finally:
            restore(self._model)
        return loss

    def _backward(self, dtype: str) -> float:
        ids, labels = self._loader.next_batch()
        cast = AUTOCAST.get(dtype)
        with torch.autocast("cpu", dtype=cast) if cast else nullcontext():
            logits = self._model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="judge one product of so many")
    parser.add_argument("--model", nargs="+", choices=("opt", "llama"), default=["opt", "llama"])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--quick", action="store_true", help="2 steps, after 5 others")
    options = parser.parse_args()
    steps, warm = (2, 5) if options.quick else (options.steps, options.warm)
    judge = Judge(
        {"numpy": numpy_pass, "compiled": compiled_pass()}, EXECUTORS, every=options.every
    )
    accused = 0
    for name in options.model:
        training = Training(
            find_model("opt-125m") if name == "opt" else LLAMA, judge, options.batch, options.seq
        )
        for when in ("at the start", f"after {warm} steps"):
            for dtype in options.dtype:
                loss = training.steps(steps, dtype, judged=True)
                title = f"{training.spec.name}, {steps} steps in {dtype} {when}, loss {loss:.3f}"
                accused += judge.report(title)
            if when == "at the start":
                training.steps(warm)
    print(
        f"honest results called wrong: {accused} (at most 0): {'met' if not accused else 'NOT met'}"
    )
    if accused:
        raise CleaveError(f"{accused} honest results were called wrong")


if __name__ == "__main__":
    main()
