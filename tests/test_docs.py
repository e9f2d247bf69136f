"""What the documentation shows works: its programs run, its commands exist."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer

from cleave_cli.main import app
from profiles.fleets import _GROUP_KEYS, find_fleet
from tests.integration.processes import here

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMMANDS: Any = typer.main.get_command(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fenced(page: Path, language: str) -> list[str]:
    """The code blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def programs() -> list[Any]:
    """Return each program of the pages. Those by stages export graphs: that takes many seconds."""
    found = []
    for page in PAGES:
        for number, program in enumerate(fenced(page, "python"), 1):
            marks = [pytest.mark.nightly] if 'method="stages"' in program else []
            name = f"{page.name}-{number}"
            found.append(pytest.param(page, program, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("page", "program"), programs())
def test_programs_run(page: Path, program: str) -> None:
    exec(compile(program, str(page), "exec"), {"__name__": "documentation"})


def command_of(words: list[str]) -> Any:
    """Return the command that the words name, with the sub-command if it has some."""
    known: Any = COMMANDS
    named = []
    for word in words:
        if word not in getattr(known, "commands", {}):
            break
        known = known.commands[word]
        named.append(word)
    assert named, f"there is no command {words[0]!r}"
    return known


def test_sub_commands_are_told_from_arguments() -> None:
    assert command_of(["profile", "show", "list"]).name == "show"
    assert command_of(["plan", "--model", "opt-13b"]).name == "plan"


def options_of(command: Any) -> set[str]:
    """Return the names of the options, also those of the command that a group runs by default."""
    usual = [command.commands["run"]] if "run" in getattr(command, "commands", {}) else []
    return {
        name
        for each in [command, *usual]
        for parameter in each.get_params(click.Context(each))
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def shown_commands() -> Iterator[list[str]]:
    """Yield the words of each `cleave` command of the pages, without `cleave`."""
    for block in (block for page in PAGES for block in fenced(page, "sh")):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["cleave"]:
                yield words[1:]


def test_commands_and_their_options_exist() -> None:
    faults = []
    for words in shown_commands():
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        unknown = named - options_of(command_of(words))
        faults += [f"{option} of: {' '.join(words)}" for option in unknown]
    assert not faults, "\n".join(faults)


def lone_commands() -> list[list[str]]:
    """Return the shown commands that need no server, run, other computer or file of the reader."""
    needs = re.compile(r"HOST|runs/|--ray|--config|my-|/|\.toml|--into")
    alone = ("plan", "simulate", "footprint", "doctor", "profile list", "profile show")
    texts = dict.fromkeys(shlex.join(words) for words in shown_commands())
    return [
        shlex.split(text) for text in texts if text.startswith(alone) and not needs.search(text)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("words", lone_commands(), ids=shlex.join)
def test_commands_that_need_nothing_else_succeed(words: list[str], tmp_path: Path) -> None:
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


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


@pytest.mark.nightly
def test_commands_print_what_stands_below_them() -> None:
    for block in (block for page in PAGES for block in fenced(page, "text")):
        if not block.startswith("$ cleave "):
            continue
        command, _, printed = block.partition("\n")
        done = here(*shlex.split(command)[2:])
        assert done.stdout.startswith(printed), f"{command}\n{done.stdout}{done.stderr}"


def quantiles_of(fleet: str) -> list[list[float]]:
    """TFLOP/s, MB/s down and up, and ms of 400 devices: a tenth, half and nine tenths."""
    devices = find_fleet(f"{fleet}-400")
    stated = [
        [device.flops_per_s / 1e12 for device in devices],
        [device.stated_downlink_bytes_per_s / 1e6 for device in devices],
        [device.stated_uplink_bytes_per_s / 1e6 for device in devices],
        [device.latency_s * 1e3 for device in devices],
    ]
    return [np.percentile(values, [10, 50, 90]).tolist() for values in stated]


def rounded(told: str) -> Any:
    """What equals all that this may stand for: half of the last digit more or less, or 3 %."""
    digits = len(told.partition(".")[2])
    return pytest.approx(float(told), rel=0.03, abs=0.5001 * 10**-digits)


def test_fleets_are_as_the_documentation_says() -> None:
    page = (ROOT / "docs" / "emulation.md").read_text()
    (table,) = re.findall(r"^\| fleet .*?\n\n", page, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `([\w-]+)` ((?:\|[^|]*){4})", table, re.MULTILINE)
    assert len(rows) == 10
    for fleet, cells in rows:
        drawn = quantiles_of(fleet)
        for column, cell in enumerate(cells.split("|")[1:]):
            if other := re.search("as `(.+)`", cell):
                assert drawn[column] == quantiles_of(other[1])[column]
            elif cell.strip():
                told = cell.split(",") * (1 if "," in cell else 3)
                assert drawn[column] == [rounded(number.strip()) for number in told]


@pytest.mark.parametrize("name", ["emulator.virtual", "cleave.server.fleet_server"])
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_links_lead_somewhere() -> None:
    faults = [
        f"{page.name} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not faults, "\n".join(faults)
