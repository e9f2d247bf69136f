"""Time the way from an empty folder to the first exact loss, and to the end of `make demo`.

    python -m benchmarks.first_minute [--installers pip,uv]

For each installer: clones the committed state into an empty folder, installs the demo's
requirements, and runs `make demo`, reading its output line by line. pip uses the existing cache; uv
is installed for this and starts with an empty cache. Exit code 1 if the demo takes more than 60 s
after the installation.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
MOST_S: Final = 60.0
_LOSS: Final = re.compile(r"^ +1 +[0-9.]+ +[0-9.]+ +[0-9.e+-]+ +[0-9.]+ s$")
"""Matches the output line of the first step: local loss, loss by devices, and difference."""


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--installers", default="pip,uv")
    options = parser.parse_args()
    good = True
    for installer in options.installers.split(","):
        with tempfile.TemporaryDirectory(prefix="cleave-benchmark-") as name:
            good &= first_minute(Path(name), installer)
    sys.exit(not good)


def first_minute(folder: Path, installer: str) -> bool:
    """Install and run the demo; return whether it took at most a minute."""
    environment = dict(os.environ)
    if installer == "uv":
        venv.create(folder / "uv", with_pip=True)
        subprocess.run([folder / "uv/bin/pip", "install", "--quiet", "uv"], check=True)
        environment["PATH"] = f"{folder / 'uv/bin'}:{environment['PATH']}"
        environment["UV_CACHE_DIR"] = str(folder / "cache")
    project = folder / "cleave"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(project)], check=True)
    began_s = time.perf_counter()
    subprocess.run(["make", "--silent", ".venv/train"], cwd=project, env=environment, check=True)
    installed_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    demo = subprocess.Popen(
        ["make", "--silent", "demo"],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    first_s = 0.0
    for line in demo.stdout:
        if not first_s and _LOSS.match(line.rstrip()):
            first_s = time.perf_counter() - began_s
    if demo.wait() or not first_s:
        raise SystemExit("the demo failed, or showed no loss of a first step")
    took_s = time.perf_counter() - began_s
    print(
        f"{installer}: installed in {installed_s:.0f} s; first exact loss {first_s:.1f} s after "
        f"that, all of the demo {took_s:.1f} s (at most {MOST_S:g})",
        flush=True,
    )
    return took_s <= MOST_S


if __name__ == "__main__":
    main()
