"""A cluster's servers come from a file, the command line, or both."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave_cli.fleet_options import ClusterOptions
from tests.integration.processes import here


def test_the_command_line_counts_more_than_the_file() -> None:
    table = {"servers": 4, "ray": "10.0.0.1:6379", "listen": "0.0.0.0:8765", "runs": "/shared"}
    assert ClusterOptions.of(table, {}) == ClusterOptions(
        4, "10.0.0.1:6379", "0.0.0.0:8765", "/shared"
    )
    found = ClusterOptions.of(table, {"servers": 2, "runs": "here", "seed": 1})
    assert found == ClusterOptions(2, "10.0.0.1:6379", "0.0.0.0:8765", "here")
    assert ClusterOptions.of({}, {}) == ClusterOptions()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"server": 4}, "has 'server'; use servers, ray, listen, runs"),
        (4, "has 4; use"),
        ({"servers": "4"}, "servers in [cluster] of --config must be a whole number, not '4'"),
        ({"servers": True}, "must be a whole number, not True"),
        (
            {"servers": 2, "listen": 8765},
            "listen in [cluster] of --config must be a string, not 8765",
        ),
        ({"servers": 0}, "--servers must be 1 or more, not 0"),
        ({"ray": "auto"}, "--ray needs --servers"),
    ],
)
def test_a_wrong_file_is_refused(table: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        ClusterOptions.of(table, {})
    assert said in str(refused.value)


def test_the_example_is_a_cluster_and_a_job() -> None:
    told = tomllib.loads((Path(__file__).parents[2] / "deploy" / "cleave.toml").read_text())
    assert ClusterOptions.of(told.pop("cluster"), {}).servers == 4
    assert JobSpec.from_dict(told).model == "opt-1.3b"


@pytest.mark.nightly
def test_one_file_has_settings_and_cluster_and_a_run_goes_on_with_a_cluster_alone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cleave.toml"
    file.write_text('model = "opt-nano"\nsteps = 1\n\n[cluster]\nruns = "elsewhere"\n')
    small = ("--devices", "0", "--seq", "16", "--batch", "2", "--name", "one")
    begun = here("train", "--config", str(file), *small, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert (tmp_path / "elsewhere" / "one" / "config.toml").is_file()
    goes_on = ("train", "--resume", "elsewhere/one", "--steps", "2", "--config", str(file))
    file.write_text("[cluster]\nservers = 1\n")
    done = here(*goes_on, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file.write_text("seed = 3\n\n[cluster]\nservers = 1\n")
    refused = here(*goes_on, cwd=tmp_path)
    assert refused.returncode == 2
    assert "no more than [cluster]" in " ".join(refused.stderr.split())
