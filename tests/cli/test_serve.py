"""`cleave serve`: options that make no sense, refused before anything listens."""

from __future__ import annotations

import math
import re
import signal
from typing import Any

import pytest

from cleave.errors import UsageError
from cleave.server.jobs.jobs import TrainingJob
from cleave_cli.commands.serve import serve, stopping
from cleave_cli.stopping import ending_signals


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("option", ["ps_gbit", "ps_watts"])
def test_rates_and_powers_that_are_none(option: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} is {value:g}; give"):
        serve(**{option: value})  # type: ignore[arg-type]


def test_stages_go_to_ones_own_devices_or_to_any() -> None:
    with pytest.raises(UsageError, match="--stages-on is 'all'; use own or any"):
        serve(stages_on="all")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": 0}, "--servers is 0; give 1 or more"),
        ({"ray": "10.0.0.1:6379"}, "--ray starts several servers; give --servers as well"),
    ],
)
def test_several_servers_that_are_none(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        serve(**options)


def test_a_closed_terminal_ends_a_server_unless_it_is_to_outlive_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert set(ending_signals()) == {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_checkpoint_is_promised_only_where_a_job_runs() -> None:
    assert stopping(None) == "stopping"
    assert "job-3 writes a checkpoint" in stopping(TrainingJob("job-3", 3, {}, 10, "opt-tiny"))
