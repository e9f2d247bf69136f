"""Measure the browser's kernels in Chromium: WASM SIMD against JavaScript, and all errors.

    python -m benchmarks.web_kernels

Needs Chromium, Node.js and `npm ci` in web_client. Speed: products of 512 x 512 fp32 matrices on
one thread, plain JavaScript and WASM in turn, medians of several rounds. Errors: the largest
element error against double precision, relative to the sum of the magnitudes of its products
(fp32), and as a share of the rounding bound (all dtypes, transposed operands, odd sizes; above 1 is
wrong). Without a GPU, WebGPU is emulated on the CPU, and its speed is meaningless.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Page

from tests.web.browser import build_lab, chromium, serving

KERNELS = ("js", "wasm", "webgpu")
SIDE = 512
EPSILON = 2.0**-24  # the relative error of one rounding to fp32


def flops_per_s(page: Page, kernel: str, threads: int, time_s: float) -> float:
    """Return a kernel's FLOP/s on 512 x 512 matrices."""
    call = "([kernel, threads, side, time_s]) => lab.flops_per_s(kernel, threads, side, time_s)"
    return float(page.evaluate(call, [kernel, threads, SIDE, time_s]))


def report_speed(page: Page, rounds: int) -> None:
    """Print WASM's speed against plain JavaScript's."""
    plain, simd = [], []
    for _ in range(rounds):
        plain.append(flops_per_s(page, "js", 1, 2.0))
        simd.append(flops_per_s(page, "wasm", 1, 1.0))
    ratios = [b / a for a, b in zip(plain, simd, strict=True)]
    print(f"{SIDE}-sided fp32 squares, one thread, median of {rounds} rounds:")
    print(f"  plain JavaScript {statistics.median(plain) / 1e9:8.2f} GFLOP/s")
    print(f"  WASM SIMD        {statistics.median(simd) / 1e9:8.2f} GFLOP/s")
    print(
        f"  WASM / JS        {statistics.median(ratios):8.1f}  "
        f"(from {min(ratios):.1f} to {max(ratios):.1f})"
    )
    two = flops_per_s(page, "wasm", 2, 1.0)
    print(f"  WASM, 2 threads over one memory {two / 1e9:8.2f} GFLOP/s")
    gpu = page.evaluate("lab.gpu()")
    if gpu:
        speed = flops_per_s(page, "webgpu", 1, 1.0)
        print(f"  WebGPU           {speed / 1e9:8.2f} GFLOP/s  ({gpu})")


def report_errors(page: Page) -> None:
    """Print the errors of every kernel."""
    print(f"errors, in roundings of fp32 (2^-24 = {EPSILON:.2e}), two threads:")
    for kernel in KERNELS:
        try:
            errors = page.evaluate("(kernel) => lab.errors(kernel, 2)", kernel)
        except Exception as error:  # noqa: BLE001 - whatever the browser says
            print(f"  {kernel:7} not here: {str(error).splitlines()[0]}")
            continue
        sizes = ", ".join(f"{k}: {v / EPSILON:.2f}" for k, v in errors["fp32"].items())
        print(f"  {kernel:7} {sizes}; of what is allowed, all dtypes: {errors['share']:.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with ExitStack() as stack:
        lab = Path(stack.enter_context(TemporaryDirectory())) / "lab"
        build_lab(lab)
        url, browser = stack.enter_context(serving(lab)), stack.enter_context(chromium())
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function("'lab' in globalThis")
        print(f"Chromium {browser.version}, cross-origin isolated: {page.evaluate('lab.isolated')}")
        report_speed(page, rounds)
        report_errors(page)


if __name__ == "__main__":
    main()
