"""Time simulations: the largest step, and all of the paper's claims.

    python -m benchmarks.simulation [--quick]

- one step of OPT-175B by tiles on 100,000 devices of the paper's fleet (at most 60 s);
- `benchmarks.published_claims`, every claim (at most 10 minutes on 2 cores); `--quick` for the toy
  models, which only show that it works.

Both run in separate processes, as users run them; start-up counts. The exit code is 1 if a limit is
not met.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

LARGEST = (
    "cleave_cli",
    "simulate",
    "--model",
    "opt-175b",
    "--devices",
    "100000",
    "--methods",
    "cleave",
)


def timed(what: str, limit_s: float, *arguments: str) -> bool:
    """Run a command and print its seconds and the limit; return whether the limit is met."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", *arguments], check=True, stdout=subprocess.DEVNULL)
    took_s = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    met = "met" if took_s <= limit_s else "NOT met"
    print(
        f"{what}: {took_s:.1f} s, {took_s / limit_s:.2f} of the {limit_s:g} s allowed ({met}); "
        f"{busy_s:.1f} s of processor time",
        flush=True,
    )
    return took_s <= limit_s


def main() -> None:
    """Run the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy models")
    options = parser.parse_args()
    met = timed("OPT-175B on 100,000 devices by tiles", 60, "cleave_cli", "simulate", *LARGEST)
    more = ("--quick",) if options.quick else ()
    met &= timed("published claims", 600, "benchmarks.published_claims", *more)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
