"""Measure the bytes that compression saves in training, and its speed.

    python -m benchmarks.coding [--models opt-tiny,llama-tiny] [--after 200] [--steps 20]
                                [--batch 4] [--seq 128] [--clients] [--json]

Trains models on the default corpus with plain PyTorch in fp32, and compresses what a step by stages
would send, rounded to each dtype: weights of all layers and the head once, their gradients once,
each layer's output and its gradient twice (to the server, and to the next stage). It measures the
first `--steps` steps, and as many after `--after` steps. Arrays below 16 KiB stay uncompressed.
Everything compressed is decompressed again and compared.

`entropy` is the lower bound for compressors of single exponents, such as rANS, if both sides know
each array's frequencies. It is hardly lower, and neither browsers nor Java can read rANS. With
`zstandard` installed (no dependency of Cleave), zstd is measured on whole payloads and on exponents
alone, without the time to split them off. It is faster, but Java and some browsers cannot read it,
so clients would need a library.

`--clients` adds the compressors of the browser, in Chromium, and of the Android client, on a JVM
(wall-clock time, not core time); Python decompresses their output.

Speeds are for one core and 4 million trained weights. They give the link rate up to which
compression saves time even without overlap. Ends with 1 if `LINK_BYTES_PER_S` is above that rate or
a ratio is above its limit (bf16 0.70, fp32 0.86).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.client_coding import Client, chromium_coder, jvm_coder
from benchmarks.common import make_trainer
from cleave.arrays import DType, narrow
from cleave.coding import decode, encode, encode_if_shorter
from cleave.planner.coding import LINK_BYTES_PER_S
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.training.loop.job import JobSpec
from cleave.training.loop.trainer import Trainer

LIMITS: Final = {DType.BF16: 0.70, DType.FP32: 0.86}
KINDS: Final = ("weights", "gradients", "activations")
_TWICE: Final = "activations"
_SPEED_ELEMENTS: Final = 4 * 2**20
_TRIES: Final = 5


@dataclass
class Size:
    """Bytes of arrays: plain, compressed, and with exponents at their entropy."""

    plain: float = 0.0
    coded: float = 0.0
    ideal: float = 0.0

    def add(self, more: Size, times: int = 1) -> None:
        """Add the bytes of other arrays."""
        self.plain += times * more.plain
        self.coded += times * more.coded
        self.ideal += times * more.ideal


@dataclass(frozen=True)
class Ratio:
    """Compressed over plain bytes of some arrays."""

    model: str
    steps: str
    kind: str
    dtype: str
    coded: float
    entropy: float


@dataclass(frozen=True)
class Speed:
    """One core's speed with a compressor."""

    coder: str
    dtype: str
    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    pays_up_to_mbit: float


Sizes = dict[tuple[str, DType], Size]


def exponents(payload: bytes, dtype: DType) -> np.ndarray[Any, Any]:
    """Return the exponent byte of each element, which is deflated."""
    words = dtype.itemsize // 2
    upper = np.frombuffer(payload, "<u2")[words - 1 :: words]
    return (upper >> 7).astype(np.uint8)


def measured(payload: bytes, dtype: DType) -> Size:
    """Compress an array, and check that decompression restores it."""
    if len(payload) < CODED_LEAST_BYTES:
        return Size(len(payload), len(payload), len(payload))
    coded = encode_if_shorter(payload, dtype)
    if coded is not None and decode(coded, dtype, len(payload)) != payload:
        raise AssertionError("coding is not exact")
    counts = np.bincount(exponents(payload, dtype))
    counts = counts[counts > 0]
    total = counts.sum()
    bits = float(-(counts * np.log2(counts / total)).sum())
    ideal = (dtype.itemsize - 1) * int(total) + bits / 8
    return Size(len(payload), len(payload) if coded is None else len(coded), ideal)


class Watch:
    """Measures what steps by stages would send, while switched on.

    Args:
        model: a model of Transformers, in training.
    """

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        self.sizes: Sizes = defaultdict(Size)
        inner: Any = model.model
        layers = inner.decoder.layers if hasattr(inner, "decoder") else inner.layers
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._parameters = [p for part in (*layers, head) for p in part.parameters()]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda p: self._measure("gradients", p.grad)
            )
        for layer in layers:
            layer.register_forward_hook(lambda _layer, _x, y: self._returned(y))

    def _returned(self, y: Any) -> None:
        y = y[0] if isinstance(y, tuple) else y
        self._measure("activations", y)
        if y.requires_grad:
            y.register_hook(lambda dy: self._measure("activations", dy))

    def weights(self) -> None:
        """Measure the current weights."""
        for parameter in self._parameters:
            self._measure("weights", parameter)

    def _measure(self, kind: str, tensor: Tensor | None) -> None:
        if not self.on or tensor is None:
            return
        values = tensor.detach().float().numpy()
        for dtype in DType:
            self.sizes[kind, dtype].add(measured(narrow(values, dtype).tobytes(), dtype))


def ratios(model: str, steps: str, sizes: Sizes) -> list[Ratio]:
    """Return the ratios of each kind of array, and of all together."""
    found = []
    for dtype in DType:
        whole = Size()
        for kind in KINDS:
            size = sizes[kind, dtype]
            whole.add(size, 2 if kind == _TWICE else 1)
            found.append(_ratio(model, steps, kind, dtype, size))
        found.append(_ratio(model, steps, "all", dtype, whole))
    return found


def _ratio(model: str, steps: str, kind: str, dtype: DType, size: Size) -> Ratio:
    coded, entropy = size.coded / size.plain, size.ideal / size.plain
    return Ratio(model, steps, kind, dtype.value, coded, entropy)


def train(options: argparse.Namespace, model: str) -> tuple[list[Ratio], Trainer]:
    """Train a model and measure its first and later steps."""
    steps = options.after + options.steps
    job = JobSpec(
        model, steps=max(steps, options.steps), batch=options.batch, seq=options.seq, memory="plain"
    )
    trainer = make_trainer(job, None)
    watch = Watch(trainer.model)
    found = []
    for first in dict.fromkeys((0, options.after)):
        watch.on = False
        while trainer.step < first:
            trainer.train_step()
        watch.on, watch.sizes = True, defaultdict(Size)
        for _ in range(options.steps):
            watch.weights()
            trainer.train_step()
        found += ratios(model, f"{first + 1} to {trainer.step}", watch.sizes)
    watch.on = False
    return found, trainer


def seconds(what: Callable[[], object]) -> float:
    """Return the shortest duration of several calls, in seconds of one core."""
    best = float("inf")
    for _ in range(_TRIES):
        began_s = time.process_time()
        what()
        best = min(best, time.process_time() - began_s)
    return best


def speeds(values: np.ndarray[Any, Any]) -> list[Speed]:
    """Return the speed of each available compressor, for weights of each dtype."""
    try:
        zstd = importlib.import_module("zstandard")
    except ModuleNotFoundError:
        zstd = None
    found = []
    for dtype in DType:
        payload = narrow(values, dtype).tobytes()
        nbytes = len(payload)
        coded = encode(payload, dtype)
        times = (
            seconds(partial(encode, payload, dtype)),
            seconds(partial(decode, coded, dtype, nbytes)),
        )
        found.append(_speed("Huffman", dtype, nbytes, len(coded), times))
        if zstd is None:
            continue
        packer, unpacker = zstd.ZstdCompressor(level=1), zstd.ZstdDecompressor()
        rest = nbytes - nbytes // dtype.itemsize
        upper = exponents(payload, dtype).tobytes()
        for name, data, beside in (("exponents", upper, rest), ("all of it", payload, 0)):
            small = packer.compress(data)
            times = (
                seconds(partial(packer.compress, data)),
                seconds(partial(unpacker.decompress, small)),
            )
            found.append(_speed(f"zstd, {name}", dtype, nbytes, len(small) + beside, times))
    return found


def client_speeds(values: np.ndarray[Any, Any]) -> list[Speed]:
    """Return the speed of the clients' compressors, for weights of each dtype."""
    found = []
    openers = {"Huffman, Chromium": chromium_coder, "Huffman, JVM": jvm_coder}
    for name, opened in openers.items():
        with opened() as code:
            found += [_client_speed(name, code, values, dtype) for dtype in DType]
    return found


def _client_speed(name: str, code: Client, values: np.ndarray[Any, Any], dtype: DType) -> Speed:
    payload = narrow(values, dtype).tobytes()
    done = code(payload, dtype)
    times = (done.encode_s, done.decode_s)
    return _speed(name, dtype, len(payload), done.nbytes, times)


def _speed(coder: str, dtype: DType, nbytes: int, coded: int, times: tuple[float, float]) -> Speed:
    ratio = coded / nbytes
    pays = (1 - ratio) * nbytes / sum(times)  # time saved on the link equals time spent at the ends
    return Speed(
        coder, dtype.value, ratio, nbytes / times[0] / 1e6, nbytes / times[1] / 1e6, pays * 8 / 1e6
    )


def show(ratios: Sequence[Ratio], speeds: Sequence[Speed]) -> None:
    """Print the tables."""
    print(f"{'model':<11} {'steps':<11} {'dtype':<5}", *(f"{k:>12}" for k in (*KINDS, "all")))
    rows: dict[tuple[str, str, str], list[Ratio]] = defaultdict(list)
    for one in ratios:
        rows[one.model, one.steps, one.dtype].append(one)
    for (model, steps, dtype), row in rows.items():
        cells = [f"{one.coded:.3f} {one.entropy:.3f}" for one in row]
        print(f"{model:<11} {steps:<11} {dtype:<5}", *(f"{cell:>12}" for cell in cells))
    print("of each: coded, and at its entropy, over plain bytes\n")
    print(f"{'one core':<17} {'dtype':<6} ratio  coding  decoding   pays up to")
    for speed in speeds:
        print(
            f"{speed.coder:<17} {speed.dtype:<6} {speed.ratio:.3f} {speed.encode_mb_s:>5.0f} MB/s "
            f"{speed.decode_mb_s:>4.0f} MB/s {speed.pays_up_to_mbit:>6.0f} Mbit/s"
        )


def main() -> int:
    """Parse the command line, run, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="opt-tiny,llama-tiny")
    parser.add_argument("--after", type=int, default=200)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--clients", action="store_true", help="Chromium's and the JVM's as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    found: list[Ratio] = []
    timed: list[Speed] = []
    for model in options.models.split(","):
        more, trainer = train(options, model)
        found += more
        if not timed:
            weights = [p.detach().flatten() for p in trainer.model.parameters() if p.dim() > 1]
            values = torch.cat(weights)[:_SPEED_ELEMENTS].numpy()
            timed = speeds(values) + (client_speeds(values) if options.clients else [])
    if options.json:
        print(json.dumps({"ratios": [*map(asdict, found)], "speeds": [*map(asdict, timed)]}))
    else:
        show(found, timed)
    wholes = [one for one in found if one.kind == "all"]
    over = [one for one in wholes if one.coded > LIMITS.get(DType(one.dtype), 1.0)]
    pays = [one for one in timed if one.coder == "Huffman" and DType(one.dtype) in LIMITS]
    slow = [one for one in pays if one.pays_up_to_mbit * 1e6 / 8 < LINK_BYTES_PER_S]
    for fault in (*over, *slow):
        print(f"beyond its limit: {fault}", file=sys.stderr)
    return 1 if over or slow else 0


if __name__ == "__main__":
    sys.exit(main())
