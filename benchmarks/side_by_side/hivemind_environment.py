"""Make the environment that has hivemind beside what Cleave trains with.

    python -m benchmarks.side_by_side.hivemind_environment [FOLDER]

It is `build/hivemind` without FOLDER, where `benchmarks.side_by_side` looks for it. hivemind is no
dependency of Cleave, and brings versions of its own.
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
    # Its 8-bit compression takes arrays of one element for numbers, which later ones refuse.
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
