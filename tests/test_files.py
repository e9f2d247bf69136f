"""What Cleave did not write stays as it is, and only `cleave.files` opens files for writing."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cleave.files import (
    LOCK,
    Lock,
    LockedError,
    cache_folder,
    check_output,
    copy_file,
    is_ours,
    mapped_copy,
    new_file,
    open_output,
    open_to_append,
    open_to_change,
    own_folder,
    private_file,
    write_atomically,
    write_output,
)

ROOT = Path(__file__).parent.parent
PRODUCT = ("cleave", "cleave_cli", "emulator", "profiles", "simulator")
THESIS = b"years of work"
HEADER = b"CLEAVE!!"

MAY = {  # who else may call what, and why
    # Renames of whole folders, which were made under a name that nothing else has.
    "cleave/training/loop/checkpoint.py": {"rename"},
    "cleave/training/results/export.py": {"rename", "save_pretrained", "chmod"},
    "cleave/training/loop/run_folder.py": {"savefig"},  # into memory
    "cleave/training/loop/journal.py": {"rename"},  # of what is no journal, to a name that is free
    # A map needs a file; it is made under a name that nothing has, and deleted.
    "cleave/training/loop/state_files.py": {"NamedTemporaryFile", "TemporaryFile", "truncate"},
    # SQLite opens its files itself, after `open_to_change` looked at the database.
    "cleave/server/store/store.py": {"connect"},
    # Their writers have names of their own for each file, within a folder that is no link.
    "cleave/training/loop/trackers.py": {"SummaryWriter"},
    "cleave/transport/tls.py": {"chmod"},  # of the file that it has just opened
    "cleave/device/service.py": {"chmod", "chown"},  # of a file that it made
    "cleave/fleet/own_device.py": {"open"},  # a setting of the kernel, in /proc
    "cleave/training/data/batches.py": {"save"},  # into memory
}
WRITES = {
    "write_text", "write_bytes", "touch", "mkdir", "makedirs", "savefig", "save_pretrained",
    "save_file", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "fdopen", "FileIO",
    "rename", "renames", "symlink_to", "hardlink_to", "symlink", "link", "copyfile", "copy",
    "copy2", "copytree", "move", "chmod", "chown", "truncate", "memmap", "tofile", "to_csv",
    "write_table", "FileLock", "SummaryWriter", "FileHandler", "RotatingFileHandler",
}  # fmt: skip
OF_MODULES = {  # names that others have as well
    ("torch", "save"), ("np", "save"), ("np", "savez"), ("np", "savetxt"), ("sqlite3", "connect"),
    ("os", "open"), ("os", "replace"), ("os", "rename"), ("os", "mkdir"),
}  # fmt: skip
NOT_FILES = {"copy", "move", "link"}  # names of methods, unless they are functions of these
HAVE_FILES = {"shutil", "os"}


def _written(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the calls in a module that write files, by name and line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            name, owner = called.id, ""
        elif isinstance(called, ast.Attribute):
            name = called.attr
            owner = called.value.id if isinstance(called.value, ast.Name) else "?"
        else:
            continue
        if name in NOT_FILES and owner not in HAVE_FILES:
            continue
        if name == "open" and owner != "os" and not _writes(node, method=bool(owner)):
            continue
        if name == "truncate" and owner != "os":  # of an open file
            continue
        one_path = len(node.args) == 1 and not node.keywords  # texts take two
        if (
            name in WRITES
            or (owner, name) in OF_MODULES
            or (name == "open" and owner != "os")
            or (name == "replace" and owner in _PATHS and one_path)
        ):
            yield name, node.lineno


_PATHS = {"fresh", "draft", "temporary", "path", "final", "file"}


def _writes(call: ast.Call, *, method: bool) -> bool:
    """Return whether `open` has a mode that writes."""
    place = 0 if method else 1
    given = [each.value for each in call.keywords if each.arg == "mode"]
    mode = given[0] if given else call.args[place] if len(call.args) > place else None
    if isinstance(mode, ast.Constant):
        return bool(set(str(mode.value)) & set("wax+"))
    named = isinstance(mode, ast.Name) and mode.id == "mode"
    return mode is not None and (named or not method)  # methods of others have other arguments


def _modules() -> list[str]:
    files = (path for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in files]


def test_only_one_module_opens_files_for_writing() -> None:
    found = [
        f"{module}, line {line}: {name}"
        for module in _modules()
        if module != "cleave/files.py"
        for name, line in _written(ast.parse((ROOT / module).read_text()))
        if name not in MAY.get(module, ())
    ]
    assert not found, f"write by cleave/files.py, which follows no link: {found}"


# --- what is there already -----------------------------------------------------------------------


def _linked(place: Path, thesis: Path) -> None:
    place.symlink_to(thesis)


def _second_name(place: Path, thesis: Path) -> None:
    place.hardlink_to(thesis)


def _append(path: Path) -> None:
    with open_to_append(path) as file:
        file.write(b"more")


def _change(path: Path) -> None:
    with open_to_change(path, HEADER) as file:
        file.truncate()
        file.write(HEADER)


def _log(path: Path) -> None:
    with open_output(path) as file:
        file.write(b"a line")


WAYS: dict[str, Callable[[Path], None]] = {
    "atomically": lambda path: write_atomically(path, b"ours"),
    "output": lambda path: write_output(path, b"ours"),
    "log": _log,
    "append": _append,
    "change": _change,
    "new": lambda path: new_file(path).close(),
    "copy": lambda path: copy_file(Path(__file__), path),
    "lock": lambda path: Lock(path).release(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("foreign", [_linked, _second_name])
def test_a_foreign_file_behind_a_link_is_never_changed(
    tmp_path: Path, way: str, foreign: Callable[[Path, Path], None]
) -> None:
    thesis, place = tmp_path / "thesis.tex", tmp_path / "place"
    thesis.write_bytes(THESIS)
    foreign(place, thesis)
    try:
        WAYS[way](place)
    except OSError as error:
        assert error.strerror  # noqa: PT017 - both are right: a new file, or a refusal
        assert way in {"append", "change", "new", "copy", "lock"}
    assert thesis.read_bytes() == THESIS


@pytest.mark.parametrize("way", WAYS)
def test_no_file_appears_where_a_dangling_link_leads(tmp_path: Path, way: str) -> None:
    place, nowhere = tmp_path / "place", tmp_path / "nowhere"
    place.symlink_to(nowhere)
    try:
        WAYS[way](place)
    except OSError:
        assert place.is_symlink()
    assert not nowhere.exists()


def test_a_file_that_begins_otherwise_is_not_changed(tmp_path: Path) -> None:
    for content in (THESIS, HEADER[:3] + b"x"):
        (tmp_path / "place").write_bytes(content)
        with pytest.raises(OSError, match="did not write"):
            open_to_change(tmp_path / "place", HEADER)
        assert (tmp_path / "place").read_bytes() == content
        assert not is_ours(tmp_path / "place", HEADER)
    for content in (b"", HEADER[:3], HEADER, HEADER + b"more"):
        (tmp_path / "place").write_bytes(content)
        assert open_to_change(tmp_path / "place", HEADER).readall() == content


def test_a_copy_with_hard_links_keeps_what_it_had(tmp_path: Path) -> None:
    """As `cp -al` makes one."""
    mine, copy = tmp_path / "mine", tmp_path / "copy"
    mine.write_bytes(HEADER)
    copy.hardlink_to(mine)
    with open_to_append(mine) as file:
        file.write(b"more")
    assert (mine.read_bytes(), copy.read_bytes()) == (HEADER + b"more", HEADER)


def test_folders_of_ours_are_no_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link"):
        own_folder(tmp_path / "mine")


@pytest.mark.skipif(sys.platform == "win32", reason="it has no pipes with names")
def test_pipes_and_devices_that_a_user_names_are_written_to(tmp_path: Path) -> None:
    write_output(Path("/dev/null"), b"x")
    check_output(Path("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(tmp_path / "pipe")


def test_files_are_as_readable_as_the_user_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "shown", b"")
        write_atomically(tmp_path / "secret", b"", 0o600)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / n).stat().st_mode) for n in ("shown", "secret")] == [
        0o640,
        0o600,
    ]
    with private_file(b"secret", "cleave-test-") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes() == b"secret"
    assert not path.exists()


# --- locks -------------------------------------------------------------------------------------

HOLDS = """
import sys
from pathlib import Path
from cleave.files import Lock
with Lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def _holder(path: Path) -> subprocess.Popen[str]:
    """Start a process that has a lock until its standard input ends."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout is not None
    assert held.stdout.readline() == "held\n"
    return held


@pytest.mark.parametrize("killed", [False, True])
def test_a_lock_is_of_one_process_and_ends_with_it(tmp_path: Path, *, killed: bool) -> None:
    path = tmp_path / LOCK
    with _holder(path) as held:
        with pytest.raises(LockedError, match=f"in use by process {held.pid}"):
            Lock(path)
        held.kill() if killed else held.communicate("")
        held.wait()
    for _ in range(2):
        with Lock(path), pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
            Lock(path)  # another job of the same process
    assert path.read_bytes() == b""


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    with _holder(path) as held:
        with pytest.raises(LockedError):
            Lock(path, wait_s=0.2)
        held.kill()
        Lock(path, wait_s=60).release()


def test_what_is_no_lock_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    path.write_bytes(THESIS)
    with pytest.raises(OSError, match="did not write"):
        Lock(path)
    assert path.read_bytes() == THESIS


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEAVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/cleave")
    monkeypatch.setenv("CLEAVE_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


@pytest.mark.parametrize("parts", [[], [b""], [b"one", b"", b"two"]])
def test_a_mapped_copy_leaves_no_name(tmp_path: Path, parts: list[bytes]) -> None:
    held = mapped_copy(tmp_path / "new", [memoryview(part) for part in parts])
    assert bytes(held) == b"".join(parts)
    assert not [*(tmp_path / "new").iterdir()]
