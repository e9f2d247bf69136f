"""The file of measured rows, which are not measured again."""

from __future__ import annotations

import json
import posixpath
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.method import Way
from benchmarks.side_by_side.row import Key, Row, from_json, to_json
from cleave.files import write_atomically

MEASURED_FOLDERS: Final = ("cleave", "cleave_cli", "emulator", "profiles", "benchmarks")
"""Folders that affect figures of Cleave. Changes elsewhere leave the figures valid."""

_OTHERS: Final = (
    *(f"{name}.py" for name in ("faults", "measure", "memory", "run", "shapes")),
    "contenders/options.py",
    *(f"workers/{name}.py" for name in ("parts", "replicas", "worker")),
    *(f"../{name}.py" for name in ("cores", "links", "delayed_link")),
)
"""Files, relative to this folder, that affect rows of all other methods."""

_OWN: Final[dict[Way, tuple[str, ...]]] = {
    Way.PLAIN: ("contenders/plain.py", "contenders/served.py"),
    Way.DDP: ("contenders/group.py", "workers/ddp.py"),
    Way.FSDP: ("contenders/group.py", "workers/fsdp.py"),
    Way.PIPELINE: ("contenders/group.py", "workers/pipeline.py"),
    Way.HIVEMIND: ("contenders/hivemind.py", "workers/hivemind.py"),
}


def measured_with(way: Way) -> tuple[str, ...]:
    """Return the paths that affect a way's rows, relative to the project's root.

    Changes of Cleave do not affect rows of other methods.
    """
    if way.of_cleave:
        return MEASURED_FOLDERS
    here = "benchmarks/side_by_side"
    return tuple(posixpath.normpath(f"{here}/{name}") for name in (*_OTHERS, *_OWN[way]))


_UNSAVED: Final = "-with-changes"


class Results:
    """Rows in a JSON file, in the order in which they were measured.

    Args:
        path: the file, which need not exist; None to keep rows only in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = [from_json(told) for told in json.loads(path.read_text())["rows"]]

    def find(self, key: Key, commit: str | None) -> Row | None:
        """Return the row measured at a commit; None if there is none.

        Rows measured with uncommitted changes are not found, because the changes are unknown.

        Args:
            key: key of the row.
            commit: the commit; None for any.
        """
        if commit is not None and not saved(commit):
            return None
        for row in self.rows:
            if row.key == key and saved(row.commit) and commit in (None, row.commit):
                return row
        return None

    def add(self, row: Row) -> None:
        """Add a row, replacing an earlier one with the same key, and write the file."""
        self.rows = [kept for kept in self.rows if kept.key != row.key]
        self.rows.append(row)
        if self.path is None:
            return
        rows = [to_json(row) for row in self.rows]
        write_atomically(self.path, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


def saved(commit: str) -> bool:
    """Return whether a result of `measured_commit` has no uncommitted changes."""
    return not commit.endswith(_UNSAVED)


def measured_commit(root: Path, paths: Sequence[str] = MEASURED_FOLDERS) -> str:
    """Return the last commit that changed `paths`, marked if there are uncommitted changes.

    Args:
        root: root of the repository.
        paths: paths that affect the figures.
    """

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths)
    return commit + (_UNSAVED if changed else "")
