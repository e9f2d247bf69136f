"""Make the environment with hivemind and Cleave's training dependencies.

    python -m benchmarks.side_by_side.hivemind_environment [FOLDER]

FOLDER defaults to `build/hivemind`, where `benchmarks.side_by_side` looks for it. hivemind is no
dependency of Cleave, and needs its own versions of packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Make the environment and install."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/hivemind"))
    folder: Path = parser.parse_args().folder
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run(
        [
            str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet",
            "--constraint", str(root / "constraints.txt"),
            "--requirement", str(Path(__file__).with_name("hivemind.txt")),
            "--editable", f"{root}[train,lora]",
        ],
        check=True,
    )  # fmt: skip
    # hivemind's 8-bit compression uses one-element arrays as numbers, which later versions refuse.
    subprocess.run(
        [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "numpy<2.4",
        ],
        check=True,
    )


if __name__ == "__main__":
    main()
