"""What the documentation shows works: its programs run, its commands exist."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import typer

from cleave_cli.main import app
from profiles.fleet_file import _GROUP_KEYS
from profiles.fleets import find_fleet
from tests.integration.processes import here

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(page: Path, language: str) -> list[str]:
    """The code blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_run(page: Path) -> None:
    for program in fenced(page, "python"):
        exec(compile(program, str(page), "exec"), {"__name__": "documentation"})


def command_of(words: list[str]) -> list[str]:
    """The words that name the command: one, or two of those that have sub-commands."""
    known: Any = typer.main.get_command(app)
    named = []
    for word in words:
        if word not in getattr(known, "commands", {}):
            break
        known = known.commands[word]
        named.append(word)
    assert named, f"there is no command {words[0]!r}"
    return named


@cache
def help_of(*command: str) -> CompletedProcess[str]:
    return here(*command, "--help")


def test_sub_commands_are_told_from_arguments() -> None:
    assert command_of(["profile", "show", "list"]) == ["profile", "show"]
    assert command_of(["plan", "--model", "opt-13b"]) == ["plan"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    for block in fenced(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["cleave"]:
                continue
            shown = help_of(*command_of(words[1:]))
            assert shown.returncode == 0, line
            for option in (word for word in words if word.startswith("--")):
                assert option in shown.stdout, f"{option} of: {line}"


def test_the_fleet_file_of_the_documentation_is_one(tmp_path: Path) -> None:
    (example,) = fenced(ROOT / "docs" / "emulation.md", "toml")
    (tmp_path / "fleet.toml").write_text(example)
    devices = find_fleet(str(tmp_path / "fleet.toml"))
    assert len(devices) == 22
    phone, workstation = devices[0], devices[-1]
    assert phone.bottleneck is not None
    assert phone.bottleneck == devices[3].bottleneck != devices[4].bottleneck
    assert (workstation.jitter_s, workstation.load) == (0.002, 0.25)
    assert workstation.availability is not None
    assert workstation.availability.drains
    known = _GROUP_KEYS  # every key is shown
    assert known == set().union(*(group.keys() for group in tomllib.loads(example)["group"]))


@pytest.mark.parametrize("name", ["emulator.virtual", "cleave.server.fleet_server"])
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
