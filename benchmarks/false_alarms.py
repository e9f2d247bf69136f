"""Run the verification checks on honest results of real training: none may be called wrong.

    python -m benchmarks.false_alarms [--steps 20] [--warm 200] [--batch 2] [--seq 128]
                                      [--model opt llama] [--dtype fp32 bf16 fp16]
                                      [--when start warm] [--quick]
                                      [--backend numpy torch "in turn" js wasm ...]

Trains OPT-125M and a Llama of the same size on real text with plain torch. It takes every product
of `--steps` steps at the start and after `--warm` steps, in fp32, bf16 and fp16 autocast. The
planner tiles each product for four equal processes next to the server and for eight unequal phones
(whose plans have partial sums). Each block is multiplied by every backend (numpy, torch) and by a
device that sums products in order, in fp32. Each result is judged by every path of the check
(numpy, compiled loops).

Installed kernels of the other clients are judged, too: the browser's in Chromium (plain JavaScript,
WASM, and WebGPU, which the CPU emulates without a GPU) and both inner loops of the Android client
on a JVM. These are slow, so they compute only the first product of each shape and dtype in every
table, and a random one in `--slow-every` of the others. Of each they compute one random block per
plan (of a large block, rows worth 0.1 GFLOP).

It prints for each: blocks; results called wrong (must be 0); rows in doubt that were computed
again; the largest residual over tolerance of the other rows; and, for 16-bit results, the elements
computed exactly and the misrounded elements.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numba
import numpy as np
import torch
from torch import nn

from benchmarks.client_kernels import CLIENT_KERNELS, Multiply, client_kernels
from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import CleaveError, UsageError
from cleave.fleet.product import Finished, Operand, Side
from cleave.gemm import Block, Gemm, Span, gemm_of, wavefront
from cleave.machine.backends import NumpyBackend, TorchBackend
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.planner.tiles.planner import TilePlanner
from cleave.training.data.batches import BatchLoader, build_corpus
from cleave.training.data.tokenizer import default_tokenizer
from cleave.training.loop.job import default_learning_rate
from cleave.training.loop.optimizer import Optimizer, Schedule, UpdateRule
from cleave.training.tiles.offload import offload, restore
from cleave.verify import GemmCheck
from cleave.verify.projection import Pass, compiled_pass, numpy_pass
from cleave.workload.build import build_model
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
SLOW_FLOPS = 1e8
AT_ONCE = 512


@numba.njit(fastmath=False, nogil=True)
def _add_in_turn(a: Any, b: Any, out: Any) -> None:
    for start in range(0, b.shape[1], AT_ONCE):  # so that four rows stay in the L1 cache
        stop = min(b.shape[1], start + AT_ONCE)
        for i in range(0, a.shape[0], 4):
            o0, o1 = out[i, start:stop], out[i + 1, start:stop]
            o2, o3 = out[i + 2, start:stop], out[i + 3, start:stop]
            for k in range(a.shape[1]):
                x0, x1, x2, x3 = a[i, k], a[i + 1, k], a[i + 2, k], a[i + 3, k]
                row = b[k, start:stop]
                for j in range(stop - start):
                    y = row[j]
                    o0[j] += x0 * y
                    o1[j] += x1 * y
                    o2[j] += x2 * y
                    o3[j] += x3 * y


def in_turn(a: Buffer, b: Buffer, out: Buffer) -> None:
    """Multiply like a device that sums products in order, in fp32."""
    rows = -(-a.shape[0] // 4) * 4  # four at a time
    left = np.zeros((rows, a.shape[1]), np.float32)
    left[: a.shape[0]] = a.float32()
    total = np.zeros((rows, b.shape[1]), np.float32)
    _add_in_turn(left, np.ascontiguousarray(b.float32()), total)
    out.array[...] = arrays.narrow(total[: a.shape[0]], out.dtype)


BACKENDS: dict[str, Multiply] = {
    "numpy": NumpyBackend().matmul,
    "torch": TorchBackend().matmul,
    "in turn": in_turn,
}


@dataclass
class Tally:
    """Counts from judging the results of one backend."""

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
    """Multiplies for a model in training and, while active, judges the results of every backend.

    Attributes:
        paths: paths of the check, by name.
        backends: backends that multiply all blocks of judged products.
        active: whether to judge.
        every: judge one in this many products.
        slow: slow backends, which multiply part of one block per plan.
        slow_every: slow backends do one in this many products, and the first of each shape.
    """

    paths: dict[str, Pass]
    backends: Mapping[str, Multiply]
    active: bool = False
    every: int = 1
    slow: Mapping[str, Multiply] = field(default_factory=dict)
    slow_every: int = 250

    def __post_init__(self) -> None:
        self.tallies: dict[tuple[str, str, str], Tally] = defaultdict(Tally)
        self.products = 0
        self._ids = count(1)
        self._planner = TilePlanner()
        self._plans: dict[Any, list[tuple[Block, bool]]] = {}
        self._own = TorchBackend()
        self._rng = np.random.default_rng(0)
        self._draw = np.random.default_rng(1)
        self._seen: set[Any] = set()  # kinds of products that slow backends did since the report

    def operand(self, buffer: Buffer) -> Operand:
        """See `Fleet.operand`."""
        return Operand(next(self._ids), buffer)

    def submit(self, a: Side, b: Side, out: Buffer) -> Finished:
        """See `Fleet.submit`. The product is computed at once."""
        left, right = a.matrix, b.matrix
        self._own.matmul(left, right, out)
        if self.active:
            self.products += 1
            self._judge_fast(left, right, out.dtype)
            if self._is_turn_of_slow(left, right, out.dtype):
                self._judge_slow(left, right, out.dtype)
        return Finished(out)

    def _judge_fast(self, a: Buffer, b: Buffer, dtype: DType) -> None:
        """Judge all blocks of one in `every` products."""
        if not self.backends or self.products % self.every:
            return
        for number, fleet in enumerate(FLEETS):
            names = list(self.backends)
            if number:  # backends take turns on the second plan
                names = [names[self.products // self.every % len(names)]]
            blocks = self.blocks(gemm_of(a.shape, b.shape), a.dtype, dtype, fleet)
            self.judge(a, b, dtype, blocks, {name: self.backends[name] for name in names})

    def _is_turn_of_slow(self, a: Buffer, b: Buffer, dtype: DType) -> bool:
        """Return whether slow backends do this product, at random so that all layers take turns."""
        turned = [x.array.strides[0] < x.array.strides[1] for x in (a, b)]
        kind = (a.shape, b.shape, *turned, a.dtype, dtype)
        new = kind not in self._seen
        self._seen.add(kind)
        return bool(self.slow) and (new or self._draw.random() < 1 / self.slow_every)

    def _judge_slow(self, a: Buffer, b: Buffer, dtype: DType) -> None:
        """Judge one block of each plan, or some rows of a large block."""
        for fleet in FLEETS:
            blocks = self.blocks(gemm_of(a.shape, b.shape), a.dtype, dtype, fleet)
            block, partial = blocks[int(self._draw.integers(len(blocks)))]
            rows = min(block.m.size, math.ceil(SLOW_FLOPS / (2 * block.n.size * block.k.size)))
            start = block.m.start + int(self._draw.integers(block.m.size - rows + 1))
            part = replace(block, m=Span(start, start + rows))
            self.judge(a, b, dtype, [(part, partial)], self.slow)

    def judge(
        self,
        a: Buffer,
        b: Buffer,
        dtype: DType,
        blocks: Sequence[tuple[Block, bool]],
        backends: Mapping[str, Multiply],
    ) -> None:
        """Multiply blocks with backends, and judge the results by every path of the check."""
        for name, multiply in backends.items():
            checks = {
                path: GemmCheck(a, b, [x for x, _ in blocks], self._rng, project)
                for path, project in self.paths.items()
            }
            for block, partial in blocks:
                out = DType.FP32 if partial else dtype
                result = arrays.empty(block.m.size, block.n.size, out)
                with np.errstate(all="ignore"):
                    parts = a.region(block.m, block.k), b.region(block.k, block.n)
                    multiply(*parts, result)
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
        """Return the blocks of a plan, and whether each is a partial sum."""
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
        """Print results since the last report; return the number of results called wrong."""
        accused = 0
        print(
            f"{title}\n  {'product':11} {'backend':9} {'check':9} {'blocks':>8} {'accused':>8} "
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
        self._seen.clear()
        return accused


@dataclass
class Training:
    """Trains a model on real text while a judge multiplies its products."""

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
        self._optimizer = Optimizer(
            self._model, UpdateRule(weight_decay=0.1), clip=1.0, in_backward=False
        )
        self._schedule = Schedule(default_learning_rate(self.spec), 20, 1000)
        self._step = 0

    def steps(self, number: int, dtype: str = "fp32", *, judged: bool = False) -> float:
        """Train `number` steps; return the last loss."""
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
        ids, labels, _ = self._loader.next_batch()
        cast = AUTOCAST.get(dtype)
        with torch.autocast("cpu", dtype=cast) if cast else nullcontext():
            logits = self._model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())


def judge_training(judge: Judge, options: argparse.Namespace) -> int:
    """Train every model and judge its products; return the number of results called wrong."""
    steps, warm = (2, 5) if options.quick else (options.steps, options.warm)
    accused = 0
    for name in options.model:
        training = Training(
            find_model("opt-125m") if name == "opt" else LLAMA, judge, options.batch, options.seq
        )
        for when in options.when:
            if when == "warm":
                training.steps(warm)
            title = f"after {warm} steps" if when == "warm" else "at the start"
            for dtype in options.dtype:
                loss = training.steps(steps, dtype, judged=True)
                accused += judge.report(
                    f"{training.spec.name}, {steps} steps in {dtype} {title}, loss {loss:.3f}"
                )
    return accused


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=200)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--every", type=int, default=1, help="judge one product of so many")
    parser.add_argument("--model", nargs="+", choices=("opt", "llama"), default=["opt", "llama"])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--when", nargs="+", choices=("start", "warm"), default=["start", "warm"],
        help="judge steps at the start, after the warm steps, or both",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="2 steps, after 5 others")
    parser.add_argument(
        "--backend",
        nargs="+",
        choices=(*BACKENDS, *CLIENT_KERNELS),
        help="default: all that are installed here",
    )
    parser.add_argument(
        "--slow-every", type=int, default=250, help="the same for the kernels of other clients"
    )
    options = parser.parse_args()
    wanted = options.backend or (*BACKENDS, *CLIENT_KERNELS)
    with client_kernels([name for name in CLIENT_KERNELS if name in wanted]) as others:
        for name, reason in others.missing.items():
            if options.backend:
                raise UsageError(f"{name} cannot be judged here: {reason}")
            print(f"not judged: {name}, {reason}")
        judge = Judge(
            {"numpy": numpy_pass, "compiled": compiled_pass()},
            {name: multiply for name, multiply in BACKENDS.items() if name in wanted},
            every=options.every,
            slow=others.kernels,
            slow_every=options.slow_every,
        )
        accused = judge_training(judge, options)
    print(
        f"honest results called wrong: {accused} (at most 0): {'met' if not accused else 'NOT met'}"
    )
    if accused:
        raise CleaveError(f"{accused} honest results were called wrong")


if __name__ == "__main__":
    main()
