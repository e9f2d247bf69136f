"""What `cleave` says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave_cli.main import app
from cleave_cli.options import GROUPS

NAMES = [name for commands in GROUPS.values() for name in commands]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_its_commands_are_listed_in_groups(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert all(f"{title}:" in done.output for title in GROUPS)
    assert max(map(len, done.output.splitlines())) <= 80


def test_each_command_is_in_one_group() -> None:
    command = get_command(app)
    assert sorted(command.commands) == sorted(NAMES)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_takes_a_short_option_for_help(name: str) -> None:
    done = CliRunner().invoke(app, [name, "-h"])
    assert done.exit_code == 0
    assert done.output.startswith("Usage: ")


@pytest.mark.parametrize(
    "arguments",
    [["train", "--batch", "abc"], ["plan", "--every", "0"], ["jobs", "logs", "x", "--last", "-4"]],
)
def test_an_invalid_value_is_named(arguments: list[str]) -> None:
    *_, option, value = arguments
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert re.search(f"{option}'.*: '?{value}'? (should be|is not)", done.output)


def test_the_help_of_a_setting_names_all_its_choices() -> None:
    for name, setting in JobSpec.settings().items():
        for choice in setting.choices or ():
            assert re.search(rf"\b{choice.value}\b", setting.help), (name, choice)


def test_the_operator_api_names_all_choices_of_a_setting() -> None:
    document = (Path(__file__).parents[2] / "docs" / "operator-api.md").read_text()
    settings = document.partition("\n## Job settings\n")[2].partition("\n## ")[0]
    for name, setting in JobSpec.settings().items():
        (row,) = re.findall(rf"^\| `{name}` \|.*$", settings, re.MULTILINE)
        for choice in setting.choices or ():
            assert f"`{choice.value}`" in row or f'"{choice.value}"' in row, (name, choice)


def test_train_lists_twenty_options_and_every_setting_of_a_job_on_request() -> None:
    few, every = (CliRunner().invoke(app, ["train", f"--help{all}"]) for all in ("", "-all"))
    assert few.exit_code == every.exit_code == 0
    options = [option_names(done.output) for done in (few, every)]
    assert len(options[0] - {"--help", "--help-all"}) == 20
    assert options[0] < options[1]
    for name, setting in JobSpec.settings().items():
        option = setting.names[0].partition("/")[0] if setting.names else f"--{name}"
        assert option.replace("_", "-") in options[1]


def option_names(text: str) -> set[str]:
    """The first long name of each option in a help text."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--model", "opt-nano"],
        ["generate", "somewhere"],
        ["emulate"],
        ["jobs"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("empty", ["", " "])
def test_a_server_that_is_given_and_empty_is_refused(command: list[str], empty: str) -> None:
    """As in `--server "$URL"` where that is not set."""
    done = CliRunner().invoke(app, [*command, "--server", empty])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "--server is empty; set a value, or omit it"


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--model", "opt-nano"],
        ["train", "--attach", "job-1"],
        ["generate", "somewhere", "--prompt", "x"],
        ["eval", "somewhere", "--data", "somewhere"],
        ["status"],
        ["dashboard"],
        ["dashboard", "--operator"],
        ["devices"],
        ["devices", "revoke", "x"],
        ["devices", "release", "x"],
        ["devices", "own", "x"],
        ["jobs"],
        ["jobs", "stop", "job-1"],
        ["jobs", "logs", "job-1"],
        ["pair"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://127.0.0.1:1", "is not an operator URL"),
        ("127.0.0.1:1", "is not an operator URL"),
        ("https://127.0.0.1:1/join#c=secret", "is a join URL"),
        ("ws://127.0.0.1:1/ws#c=8K2M-PQ4T-9VXZ", "is a join URL"),
        ("ws://127.0.0.1:1/ws", "lacks the operator's token"),
    ],
)
def test_operator_commands_ask_for_the_operator_url(
    command: list[str], url: str, fault: str
) -> None:
    done = CliRunner().invoke(app, [*command, "--server", url])
    assert isinstance(done.exception, UsageError)
    said = str(done.exception)
    assert f"{url.partition('#')[0]!r} {fault}" in said
    assert "operator.url" in said
    assert "secret" not in said
