"""What docs/architecture.md and docs/walks.md name exists, and what they say of imports is so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_rooms import MAY_IMPORT

ROOT = Path(__file__).parent.parent
TEXT = "".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "walks.md"))
WALKS = (
    "A multiplication",
    "A returned block",
    "From the command to the layer",
    "A wrong block",
    "A device's hello",
    "A step by stages",
)

_FILE = r"`([\w.-]+(?:/[\w.-]*)+)`"
_NAMES = r"((?:(?:,|\s+and|,\s+and)?\s+`[A-Za-z_][\w.]*`)*)"
_CONSTANT = ast.Assign | ast.AnnAssign


def section(title: str) -> str:
    """The text under a heading, down to the next one."""
    return re.split(r"^## ", TEXT.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.M)[0]


def items(title: str) -> list[str]:
    """The numbered items of a section."""
    return re.findall(r"^\d+\. .*(?:\n +.*)*", section(title), re.M)


def references(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every file that is named, with the names that stand directly behind it."""
    return [
        (match[1], tuple(re.findall(r"`([\w.]+)`", match[2])))
        for match in re.finditer(_FILE + _NAMES, text)
    ]


@cache
def names_in(path: str) -> frozenset[str]:
    """Functions, classes, methods and constants of a file; methods behind their class."""
    found: set[str] = set()

    def look(body: list[ast.stmt], before: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(before + node.name)
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{before}{node.name}.")
            if isinstance(node, _CONSTANT):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(before + t.id for t in targets if isinstance(t, ast.Name))

    look(ast.parse((ROOT / path).read_text()).body, "")
    return frozenset(found)


def diagram() -> set[tuple[str, str]]:
    """The arrows of the picture."""
    return set(re.findall(r"^ +(\S+) --> (\S+)$", section("Rooms"), re.M))


def test_what_is_named_exists() -> None:
    faults = []
    for path, names in sorted(set(references(TEXT))):
        if not (ROOT / path).exists():
            faults.append(f"there is no {path}")
        elif missing := set(names) - names_in(path) if names else set():
            faults.append(f"{path} has no {', '.join(sorted(missing))}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("title", WALKS)
def test_every_step_of_a_walk_names_where_it_happens(title: str) -> None:
    steps = items(title)
    assert [int(step.partition(".")[0]) for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) > 5
    for step in steps:
        path, names = references(step)[0]
        assert path.endswith(".py")
        assert names, f"no function is named: {step}"


def test_the_picture_leaves_out_only_what_follows_from_it() -> None:
    arrows = diagram()
    assert not [pair for pair in arrows if pair[1] not in MAY_IMPORT[pair[0]]]
    reached = {room: {to for frm, to in arrows if frm == room} for room in MAY_IMPORT}
    for _ in reached:  # paths get longer by at least one each time
        for room, direct in reached.items():
            reached[room] = direct.union(*(reached[other] for other in direct))
    for room, may in MAY_IMPORT.items():
        assert may <= reached[room], f"no path from {room} to {may - reached[room]}"


def test_a_multiplication_passes_through_as_many_files_as_are_said() -> None:
    files = {path for step in items(WALKS[0]) for path, _ in references(step)}
    (said,) = re.findall(r"^These are (\d+) files", section(WALKS[0]), re.M)
    assert len(files) == int(said)
    # The aim is 14. Above it are the three wrappers of a training job, and GemmFuture's file and
    # Output's, which the way back passes through.
    assert len(files) <= 18
