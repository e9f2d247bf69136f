"""Builds the wheel from a clean checkout, and tries it in empty environments.

    python -m tools.try_package

The wheel is made of what is committed. One fresh environment gets the wheel alone, without torch,
and is a device; another gets its extra `train`, serves its pages, and trains a model on the device.
What passes is put into `dist/`. Exit code 1 at the first thing that is not so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
_PAGES: Final = ("cleave/server/web/index.html", "cleave/server/web/join.html")


def main() -> None:
    """Build and try."""
    with tempfile.TemporaryDirectory(prefix="cleave-package-") as name:
        folder = Path(name)
        wheel = built(folder)
        print(
            f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, with the pages", flush=True
        )
        device = installed(folder / "device", str(wheel))
        print(f"{run(str(device), '--version').strip()} is installed", flush=True)
        has_torch = [str(device.parent / "python"), "-c", "import torch"]
        if subprocess.run(has_torch, capture_output=True, check=False).returncode == 0:
            raise SystemExit("the plain package brings torch")
        try_together(device, installed(folder / "server", f"{wheel}[train]"), folder)
        kept = ROOT / "dist"
        kept.mkdir(exist_ok=True)
        print(f"{shutil.copy(wheel, kept)} is it", flush=True)


def built(folder: Path) -> Path:
    """Return the wheel of what is committed."""
    source = folder / "source"
    run("git", "clone", "--quiet", str(ROOT), str(source))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir")
    run(*pip, str(folder / "dist"), str(source))
    (wheel,) = (folder / "dist").glob("cleave_train-*.whl")
    held = run(sys.executable, "-m", "zipfile", "--list", str(wheel))
    if missing := [page for page in _PAGES if page not in held]:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}; is npm installed?")
    if "tests/" in held:
        raise SystemExit(f"{wheel.name} has tests in it")
    return wheel


def installed(environment: Path, what: str) -> Path:
    """Return the command of a fresh environment that has this and what it needs alone."""
    venv.create(environment, with_pip=True)
    pip = (str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--constraint")
    run(*pip, str(ROOT / "constraints.txt"), what)
    return environment / "bin" / "cleave"


def try_together(device: Path, server: Path, folder: Path) -> None:
    """Ensure that a server has pages, and trains on a device that has the plain package.

    Args:
        device, server: the commands of the two environments.
        folder: for runs.
    """
    runs = ("--runs", str(folder / "runs"))
    with saying(server, "serve", "--port", "0", "--data", "none", *runs) as address:
        page = address["url"].replace("ws", "http", 1).split("/ws")[0]
        with urllib.request.urlopen(page + "/", timeout=30) as answer:
            text = answer.read().decode()
        if "<script" not in text:
            raise SystemExit(f"the server's page is none: {text[:200]!r}")
        with saying(device, "join", address["url"], "--once"):
            for_server = ("--server", address["operator_url"])
            steps = steps_of(server, "--model", "opt-nano", "--method", "tiles", *for_server)
    if not steps[-1]["tiles"]:
        raise SystemExit(f"two steps by tiles were asked for, and these came: {steps}")
    print("a server with the extra trained on a device without it", flush=True)


def steps_of(cleave: Path, *how: str) -> list[dict[str, Any]]:
    """Return what a command reports of each step of a training of two steps.

    Args:
        cleave: the command.
        how: more options of `cleave train`.
    """
    said = run(str(cleave), "train", "--steps", "2", "--json", *how)
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    steps = [record for record in records if record["event"] == "step"]
    if len(steps) != 2:
        raise SystemExit(f"two steps with {' '.join(how)} were asked for, and these came: {steps}")
    return steps


@contextmanager
def saying(cleave: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """Run a command until the block is left; yield the first line that it says."""
    process = subprocess.Popen(
        [str(cleave), *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CLEAVE_CREDENTIAL": "of the devices"},
    )
    try:
        assert process.stdout is not None
        if not (said := process.stdout.readline()):
            raise SystemExit(f"`cleave {arguments[0]}` did not start")
        yield json.loads(said)
    finally:
        process.terminate()
        process.wait()


def run(*command: str) -> str:
    """Return what a command prints; end with its error where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
