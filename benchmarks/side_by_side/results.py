"""The file that rows are kept in: what was measured already is not measured again."""

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
"""What figures of Cleave are measured with. Other changes leave them valid."""

_OTHERS: Final = (
    *(f"{name}.py" for name in ("faults", "measure", "memory", "run", "shapes")),
    "contenders/options.py",
    *(f"workers/{name}.py" for name in ("parts", "replicas", "worker")),
    *(f"../{name}.py" for name in ("cores", "links", "delayed_link")),
)
"""What rows of all others are measured with, beside this file."""

_OWN: Final[dict[Way, tuple[str, ...]]] = {
    Way.PLAIN: ("contenders/plain.py", "contenders/served.py"),
    Way.DDP: ("contenders/group.py", "workers/ddp.py"),
    Way.FSDP: ("contenders/group.py", "workers/fsdp.py"),
    Way.PIPELINE: ("contenders/group.py", "workers/pipeline.py"),
    Way.HIVEMIND: ("contenders/hivemind.py", "workers/hivemind.py"),
}


def measured_with(way: Way) -> tuple[str, ...]:
    """Return the paths that a way's rows are measured with, from the project's root.

    Rows of others do not become others by a change of Cleave.
    """
    if way.of_cleave:
        return MEASURED_FOLDERS
    here = "benchmarks/side_by_side"
    return tuple(posixpath.normpath(f"{here}/{name}") for name in (*_OTHERS, *_OWN[way]))


_UNSAVED: Final = "-with-changes"


class Results:
    """Rows in a JSON file, in the order in which they were measured.

    Args:
        path: the file. It need not be there; None to keep rows in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = [from_json(told) for told in json.loads(path.read_text())["rows"]]

    def find(self, key: Key, commit: str | None) -> Row | None:
        """Return the row that was measured at a commit; None if there is none.

        One that was measured with changes that no commit has is not found: what they were is not
        known.

        Args:
            key: of the row.
            commit: None for any.
        """
        if commit is not None and not saved(commit):
            return None
        for row in self.rows:
            if row.key == key and saved(row.commit) and commit in (None, row.commit):
                return row
        return None

    def add(self, row: Row) -> None:
        """Keep a row in the place of an earlier one of the same key, and write the file."""
        self.rows = [kept for kept in self.rows if kept.key != row.key]
        self.rows.append(row)
        if self.path is None:
            return
        rows = [to_json(row) for row in self.rows]
        write_atomically(self.path, (json.dumps({"rows": rows}, indent=1) + "\n").encode())


def saved(commit: str) -> bool:
    """Say whether a commit of `measured_commit` is all of what is measured."""
    return not commit.endswith(_UNSAVED)


def measured_commit(root: Path, paths: Sequence[str] = MEASURED_FOLDERS) -> str:
    """Return the last commit that changed what is measured, and whether more is changed since.

    Args:
        root: of the repository.
        paths: what is measured with.
    """

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    commit = git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths)
    return commit + (_UNSAVED if changed else "")
