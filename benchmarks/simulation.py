"""Time simulations: the largest step, and the whole report on the paper's claims.

    python -m benchmarks.simulation [--quick] [--out FOLDER]

- one step of OPT-175B by tiles on 100,000 devices of the paper's fleet (at most 60 s);
- `cleave simulate paper`, every claim and figure (at most 10 minutes on 2 cores); `--quick` for the
  small report, which only shows that it works.

Both run in separate processes, as users run them; start-up counts. The exit code is 1 if a limit is
not met.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time

COMMAND = (sys.executable, "-m", "cleave_cli", "simulate")
LARGEST = ("--model", "opt-175b", "--devices", "100000", "--methods", "cleave")


def timed(what: str, limit_s: float, *arguments: str) -> bool:
    """Run a command and print its seconds and the limit; return whether the limit is met."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began_s = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
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
    parser.add_argument("--quick", action="store_true", help="the small report")
    parser.add_argument("--out", help="keep the report in this folder")
    options = parser.parse_args()
    met = timed("OPT-175B on 100,000 devices by tiles", 60, *LARGEST, "--json")
    with tempfile.TemporaryDirectory() as folder:
        more = ("--quick",) if options.quick else ()
        met &= timed("simulate paper", 600, "paper", "--out", options.out or folder, *more)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
