"""A run goes on with the devices that it had, unless others are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave.errors import UsageError
from cleave_cli.fleet_options import FLEET_FILE, FleetOptions
from cleave_cli.main import app
from emulator import virtual


@pytest.mark.parametrize(
    "options",
    [FleetOptions(), FleetOptions(0), FleetOptions(12, "home-mix", "nightly-laptop", "off")],
)
def test_what_a_run_keeps_is_read_again(tmp_path: Path, options: FleetOptions) -> None:
    options.keep(tmp_path)
    assert FleetOptions.of_run(tmp_path) == options


def test_a_file_of_devices_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    FleetOptions(fleet="mine.toml").keep(tmp_path)
    assert FleetOptions.of_run(tmp_path).fleet == str(tmp_path / "mine.toml")


def test_an_older_run_has_the_usual_devices(tmp_path: Path) -> None:
    assert FleetOptions.of_run(tmp_path) == FleetOptions()


@pytest.mark.parametrize("text", ["devices = 'two'", "devices = true", "devise = 2", "devices ="])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FLEET_FILE).write_text(text)
    with pytest.raises(UsageError, match="or remove it and pass --devices and --fleet"):
        FleetOptions.of_run(tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_that_is_resumed_has_its_devices_again(
    tmp_path: Path, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets: list[tuple[list[Any], str]] = []
    emulated = virtual.emulated

    def watched(members: Any, *, seed: int, coding: str) -> Any:
        rates = [(one.name, one.flops_per_s, one.downlink_bytes_per_s) for one in members]
        fleets.append((rates, coding))
        return emulated(members, seed=seed, coding=coding)

    monkeypatch.setattr(virtual, "emulated", watched)

    def run(*options: str) -> None:
        done = CliRunner().invoke(app, ["train", *options, "--json"])
        assert done.exit_code == 0, done.output

    job = ["--model", "opt-nano", "--batch", "2", "--seq", "16", "--data", str(corpus_file)]
    job += ["--dtype", "bf16", "--seed", "3", "--checkpoint-every", "1", "--method", "tiles"]
    job += ["--runs", str(tmp_path), "--name", "mine", "--steps", "1"]
    run(*job, "--devices", "3", "--fleet", "home-mix", "--coding", "off")
    mine = str(tmp_path / "mine")
    run("--resume", mine, "--steps", "2")
    assert fleets[1] == fleets[0]
    assert len(fleets[0][0]) == 3
    run("--resume", mine, "--steps", "3", "--devices", "2")
    run("--resume", mine, "--steps", "4")
    assert [len(members) for members, _ in fleets[2:]] == [2, 2]
    assert len(fleets) == 4
