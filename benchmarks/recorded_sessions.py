"""Record terminal sessions at 80 columns, draw them, and report faults.

    python -m benchmarks.recorded_sessions [demo plan ...] [--out recorded-sessions] [--columns 80]

Runs commands of the README and the tutorial in a pseudo-terminal with colours and 30 rows. Writes
`NAME.cast` for asciinema, `NAME.svg` with all lines at the end of the session, and
`NAME-midway.svg` with all lines at half time, including progress bars. Exit code 1 if a line is
wrapped or cut, a program shows a traceback or exits with a nonzero code, or a recording contains
the name of this machine, its user or a folder.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.terminal import TERMINAL, Recording, faults, record, renamed, to_cast, to_svg

ROOT: Final = Path(__file__).parent.parent
ROWS: Final = 30
LIMIT_S: Final = 300.0
HOME: Final = "/home/someone"
"""The home folder in recordings; as long as a path from `tempfile` in /tmp."""

_CLEAVE: Final = "import sys; sys.argv[0] = 'cleave'; from cleave_cli.main import main; main()"
"""Runs the `cleave` command with the code of this folder."""

SESSIONS: Final = {
    "help": "cleave --help",
    "demo": "cleave demo",
    "doctor": "cleave doctor --model opt-1.3b --fleet home-mix-9 --batch 8 --seq 512",
    "plan": "cleave plan --model opt-1.3b --batch 64 --seq 512 --fleet household-9",
    "plan-tiles": "cleave plan --model opt-1.3b --batch 64 --seq 512 --fleet paper-16 "
    "--method tiles",
    "plan-crossing": "cleave plan --model opt-125m --seq 512 --fleet paper-9 --crossing",
    "plan-gemm": "cleave plan --gemm 4096,4096,4096 --fleet home-mix-9",
    "emulate": "cleave emulate --model opt-1.3b --fleet paper-64 --dtype bf16",
    "emulate-stages": "cleave emulate --model opt-1.3b --batch 64 --seq 512 --fleet household-9 "
    "--method stages --dtype bf16",
    "emulate-devices": "cleave emulate --devices 20 --fleet home-mix --duration 10",
    "train": "cleave train --model opt-tiny --devices 4 --method stages --steps 10 --eval-every 5",
    "train-tiles": "cleave train --model opt-tiny --devices 4 --method tiles --steps 5 --batch 2 "
    "--seq 64 --grid DEU --verbose",
    "train-auto": "cleave train --model opt-tiny --steps 10",
}


def main() -> None:
    """Record the sessions and print their faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SESSIONS))
    parser.add_argument("--out", type=Path, default=Path("recorded-sessions"), metavar="FOLDER")
    parser.add_argument("--columns", type=int, default=80)
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SESSIONS]:
        parser.error(f"there is no session {unknown[0]}; use {', '.join(SESSIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    for name in options.names or SESSIONS:
        good &= _recorded(name, options.out, options.columns)
    sys.exit(not good)


def _recorded(name: str, folder: Path, columns: int) -> bool:
    """Record a session and write its files; return whether it has no faults."""
    session, private = _run(SESSIONS[name], columns)
    last_s = session.output[-1].at_s
    (folder / f"{name}.cast").write_text(to_cast(session), encoding="utf-8")
    (folder / f"{name}.svg").write_text(to_svg(session, name), encoding="utf-8")
    midway = to_svg(session, f"{name}-midway", until_s=last_s / 2)
    (folder / f"{name}-midway.svg").write_text(midway, encoding="utf-8")
    found = faults(session, private)
    print(f"{name}: {last_s:.1f} s{'' if found else ', nothing amiss'}", flush=True)
    for fault in found:
        print(f"  {fault}", flush=True)
    return not found


def _run(command: str, columns: int) -> tuple[Recording, list[str]]:
    """Run a command in a new home folder; return its recording and the texts forbidden in it."""
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as home:
        folder = Path(home) / "cleave"
        folder.mkdir()
        session = record(
            [sys.executable, "-c", _CLEAVE, *shlex.split(command)[1:]],
            command=command,
            columns=columns,
            rows=ROWS,
            folder=folder,
            environment=_environment(home),
            limit_s=LIMIT_S,
        )
    private = [home, str(ROOT), str(Path.home()), socket.gethostname(), getpass.getuser()]
    return renamed(session, home, HOME), private


def _environment(home: str) -> Mapping[str, str]:
    """Return the environment of a user's terminal, without this process's other variables."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": home,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "TERM": TERMINAL,
        "XDG_CACHE_HOME": f"{home}/.cache",
        "XDG_DATA_HOME": f"{home}/.local/share",
        "XDG_STATE_HOME": f"{home}/.local/state",
    }


if __name__ == "__main__":
    main()
