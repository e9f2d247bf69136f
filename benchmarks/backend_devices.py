"""Check and time every backend and torch device on this machine.

    python -m benchmarks.backend_devices

For each it prints the result of the numeric self-check, GFLOP/s with operands and result in host
memory (where tiles arrive and leave), GFLOP/s with everything on the device, and both relative to
torch on the CPU. For each runner of graphs it prints the error of the self-test, the speed in a
layer, how long both took, and the growth of the process's memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from benchmarks.common import resident_bytes
from cleave.arrays import DType, empty
from cleave.machine.backends import MatmulBackend, candidates, self_check
from cleave.machine.graph_choice import Runner, examined, runners

TORCH_DTYPES = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


def best_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds of the fastest of several runs, after a warm-up."""
    work()
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


def from_host(backend: MatmulBackend, side: int, dtype: DType) -> float:
    """Return FLOP/s of square products whose operands and result are in host memory."""
    a, b, out = (empty(side, side, dtype) for _ in range(3))
    for buffer in (a, b):
        buffer.array[...] = 0
    return 2 * side**3 / best_s(lambda: backend.matmul(a, b, out))


def on_device(device: str, side: int, dtype: DType) -> float:
    """Return FLOP/s of square products that stay on the device."""
    a, b = (torch.zeros(side, side, dtype=TORCH_DTYPES[dtype], device=device) for _ in range(2))
    many = 1 if device == "cpu" else 10  # launches are asynchronous: wait once for all of them

    def work() -> None:
        for _ in range(many):
            out = torch.mm(a, b)
        out[0, 0].item()

    return 2 * side**3 * many / best_s(work)


def graph_self_test(runner: Runner) -> str:
    """Return the result, speed, duration and memory of a runner's self-test as text."""
    before, began_s = resident_bytes(os.getpid()), time.perf_counter()
    text = examined(runner).text
    took_s, grown = time.perf_counter() - began_s, resident_bytes(os.getpid()) - before
    return f"{text}; took {took_s:.2f} s and {grown / 1e6:.0f} MB"


def main() -> None:
    """Check and time everything; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    options = parser.parse_args()
    for runner in runners():  # first, before other backends fill memory
        print(graph_self_test(runner))
    backends = {c.name: c.make() for c in candidates()}
    for name, backend in backends.items():
        print(f"{name}: self-check: {self_check(backend) or 'passed'}")
    for dtype in map(DType, options.dtypes):
        for side in options.sides:
            print(f"{side} x {side} x {side}, {dtype.value}: GFLOP/s (times torch:cpu)")
            cpu_host = from_host(backends["torch:cpu"], side, dtype)
            cpu_alone = on_device("cpu", side, dtype)
            for name, backend in backends.items():
                host = from_host(backend, side, dtype)
                line = f"  {name:12} with transfers {host / 1e9:9.1f} ({host / cpu_host:.2f})"
                if name.startswith("torch:"):
                    alone = on_device(name.partition(":")[2], side, dtype)
                    line += f"   on the device {alone / 1e9:9.1f} ({alone / cpu_alone:.2f})"
                print(line)


if __name__ == "__main__":
    main()
