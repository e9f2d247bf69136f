"""Pin everything that development installs: `python -m tools.update_constraints`.

It installs the newest versions that pyproject.toml allows, except of torch, into a fresh
environment in a temporary folder, and writes them into constraints.txt. Your own environment does
not change. Run it with the oldest Python that Cleave supports, so that each pinned version exists
for all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
CONSTRAINTS: Final = ROOT / "constraints.txt"
NOT_PINNED: Final = frozenset({"pip"})
"""What the environment brings by itself."""

HEADER: Final = """\
# What development and CI use, written by `python -m tools.update_constraints`.
# `torch` has no CPU-only build under its plain name on every index, so its version is pinned here,
# without the name of a build, and not in pyproject.toml: users get the build that fits them.
# Pinned on {system} with Python {python}; what only other systems or versions need is not in it.
"""


class UpdateError(Exception):
    """The reason why nothing was written, and what to do, in one sentence."""


def oldest_python(pyproject: str) -> tuple[int, int]:
    """Return the oldest Python that a pyproject.toml supports.

    Args:
        pyproject: the file's text.
    """
    required = tomllib.loads(pyproject)["project"]["requires-python"]
    major, _, minor = str(required).removeprefix(">=").partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise UpdateError(
            f"requires-python in pyproject.toml is {required!r}: write it as '>=3.11', "
            "or teach tools/update_constraints.py to read it"
        )
    return int(major), int(minor)


def pins(frozen: str) -> list[str]:
    """Return one `name==version` for each package, sorted by name.

    Args:
        frozen: what `pip freeze` printed.
    """
    found = {}
    for line in filter(None, map(str.strip, frozen.splitlines())):
        name, exact, version = line.partition("==")
        if not exact or not version:
            raise UpdateError(
                f"pip lists {line!r}, which has no version: take out of pip's configuration "
                "and pyproject.toml what installs it from a path or a URL"
            )
        if name.lower() not in NOT_PINNED:
            public, _, _ = version.partition("+")  # 2.13.0+cpu: the build is the user's choice
            found[name.lower()] = f"{name}=={public}"
    if "torch" not in found:
        raise UpdateError("torch is not among what was installed: is it still in '.[dev]'?")
    return [found[name] for name in sorted(found)]


def run(*command: str | Path) -> str:
    """Run a command in the project's folder, and return what it printed on its standard output."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UpdateError(f"`{' '.join(words)}` cannot be started: {error}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        said = lines[-1] if lines else f"it ended with {done.returncode}"
        raise UpdateError(f"`{' '.join(words)}` failed, run it by hand to see why: {said}")
    return done.stdout


def fresh_pins() -> list[str]:
    """Install '.[dev]' into a fresh environment, and return what is in it.

    torch stays as it is pinned: its newest build under that name may bring gigabytes for cards that
    nobody here has. To change it, edit its line by hand and run this again.
    """
    kept = [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")]
    with tempfile.TemporaryDirectory(prefix="cleave-constraints-") as folder:
        environment = Path(folder) / "venv"
        venv.create(environment, with_pip=True)
        binaries = environment / ("Scripts" if os.name == "nt" else "bin")
        python = binaries / ("python.exe" if os.name == "nt" else "python")
        torch = Path(folder) / "torch.txt"
        torch.write_text("\n".join(kept), encoding="utf-8")
        run(python, "-m", "pip", "install", "--quiet", "-c", torch, "--editable", ".[dev]")
        # --all: setuptools is among what development needs, and is left out without it.
        return pins(run(python, "-m", "pip", "freeze", "--all", "--exclude-editable"))


def update() -> int:
    """Write constraints.txt, and return how many packages it pins."""
    oldest = oldest_python((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if sys.version_info[:2] != oldest:
        raise UpdateError(
            f"this is Python {sys.version_info[0]}.{sys.version_info[1]}: run it with "
            f"{oldest[0]}.{oldest[1]}, the oldest that Cleave supports, so that all can install "
            "what is pinned"
        )
    found = fresh_pins()
    header = HEADER.format(system=sys.platform, python=f"{oldest[0]}.{oldest[1]}")
    written = CONSTRAINTS.with_suffix(".new")
    written.write_text(header + "\n".join(found) + "\n", encoding="utf-8")
    written.replace(CONSTRAINTS)
    return len(found)


def main() -> None:
    """Update constraints.txt, or end with a sentence that says why not."""
    try:
        count = update()
    except (UpdateError, OSError) as error:
        sys.exit(f"constraints.txt stays as it is: {error}")
    sys.stdout.write(f"constraints.txt pins {count} packages; run `make setup` to install them\n")


if __name__ == "__main__":
    main()
