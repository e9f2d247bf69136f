"""`cleave status`: what it makes of overviews."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from cleave.errors import UsageError
from cleave_cli.commands.status import status
from cleave_cli.render.status import EVENTS_SHOWN, Seen, shown

STEP = {"event": "step", "tokens": 1000, "wall_s": 4.0, "fleet_s": 3.0, "ps_s": 1.0}


def overview(first: int = 0, count: int = 0, job: str = "job-1", **changes: Any) -> dict[str, Any]:
    steps = [{**STEP, "step": i + 1, "loss": 5.0 - i / 10} for i in range(first, first + count)]
    return {
        "server": {
            "name": "box", "version": "1", "verify": "auto", "started_s": 0.0, "now_s": 60.0,
        },
        "card": {"egress_bytes_per_s": 1e8, "ingress_bytes_per_s": None},
        "totals": {"down_bytes": 5e9, "up_bytes": 1e9, "reissued": 2, "wrong": 1},
        "rates": {
            "window_s": 10.0, "blocks_per_s": 50.0, "flops_per_s": 2e9,
            "egress_bytes_per_s": 5e7, "ingress_bytes_per_s": 1e6,
        },
        "job": {
            "job": job, "state": "running", "model": "opt-tiny", "steps": 100,
            "first_record": first, "records": steps, "next_record": first + count,
        },
        "devices": {"total": 3, "by": [["phone", "busy", 2], [None, "ready", 1]]},
        "events": {
            "columns": ["id", "time_s", "kind", "device", "text"],
            "rows": [[1, 1e9, "join", 1, "anna"]], "last": 1,
        },
        "energy": {"devices_j": 7200.0, "gco2e": 0.5, "devices_known": 2},
        **changes,
    }  # fmt: skip


def text(seen: Seen, width: int = 120) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(shown(seen))
    return console.export_text()


def test_the_essentials_are_there() -> None:
    seen = Seen()
    came = overview(0, 20)
    came["job"]["records"][3]["loss"] = math.nan
    came["job"]["records"][4]["loss"] = math.inf
    seen.take(came)
    page = text(seen)
    for words in (
        "step 20 of 100", "3.1000", "█", "3.00 s waiting for devices", "250 tokens/s",
        "about 5 min left", "3 devices", "phone", "kind not stated", "busy",
        "50% of the card's 100.0 MB/s",
        "2.0 GFLOP/s", "2 reissued, 1 wrong", "2.00 Wh, 0.5 g CO2e", "anna", "up 60 s",
    ):  # fmt: skip
        assert words in page, words


def test_it_fits_80_columns() -> None:
    seen = Seen()
    came = overview(0, 20)
    came["job"] |= {"tasks": [18, 54], "last_step": came["job"]["records"][-1]}
    came["job"]["records"][-1] |= {"wall_s": 1234.56, "fleet_s": 1234.56, "ps_s": 1234.56}
    seen.take(came)
    lines = [line.rstrip() for line in text(seen, 80).splitlines()]
    assert "next   task 18 of 54 of the step under way" in lines
    assert lines == [line.rstrip() for line in text(seen, 200).splitlines()]
    first = lines.index("3 devices, by kind:")
    counts = [line.split() for line in lines[first + 1 : first + 3]]
    assert counts == [["phone", "2", "busy"], ["kind", "not", "stated", "1", "ready"]]


@pytest.mark.parametrize(("step", "words"), [(70, "step 70 of 100"), (0, "no step yet of 100")])
def test_a_resumed_job_that_has_done_no_step_shows_where_it_continues(
    step: int, words: str
) -> None:
    seen = Seen()
    came = overview()
    came["job"]["step"] = step
    seen.take(came)
    assert f"running, {words}" in text(seen)


def test_a_job_that_waits_has_no_time_left() -> None:
    seen = Seen()
    came = overview(0, 10)
    came["job"]["records"][-1] |= {"wall_s": 900.0, "fleet_s": 898.0}  # nobody was there
    seen.take(came)
    assert "250 tokens/s, about 6 min left" in text(seen)
    came["job"] |= {"waits": "no device is connected; training waits for one", "first_record": 10,
                    "records": []}  # fmt: skip
    seen.take(came)
    page = text(seen)
    assert "waits  no device is connected" in page
    assert "left" not in page


def test_without_job_devices_and_figures() -> None:
    seen = Seen()
    nothing = {"window_s": None}
    energy = {"devices_j": None, "gco2e": None, "devices_known": 0}
    devices = {"total": 0, "by": []}
    seen.take(overview(job="", rates=nothing, energy=energy, devices=devices) | {"job": None})
    page = text(seen)
    assert "no job" in page
    assert "no devices" in page
    assert seen.complete


def test_a_step_by_stages_names_who_holds_them() -> None:
    stage = {
        "first": 0, "stop": 4, "loss": True, "forward": 7, "backward": 3, "landed": 0,
        "devices": 2, "holders": [[1, 1, 1, 3, 0], [9, 0, 2, 0, 3]],
    }  # fmt: skip
    devices = {
        "total": 2, "by": [["laptop", "busy", 2]],
        "columns": ["device", "name", "state", "reason", "own"],
        "rows": [[1, "laptop-1", "busy", "", True], [2, "laptop-2", "busy", "", False]],
    }  # fmt: skip
    stages = {"batches": 8, "ended": False, "repeated": 1, "logged": 3, "stages": [stage]}
    seen = Seen()
    seen.take(overview(stages=stages, devices=devices))
    page = text(seen, 80)
    assert "stages 8 micro-batches; 1 pass repeated" in page
    assert "devices keep the weights, 3 steps since the snapshot" in " ".join(page.split())
    found = [line.split() for line in page.splitlines()]
    assert ["1", "to", "4,", "loss", "laptop-1", "2", "3", "7", "3", "0"] in found
    assert ["device", "9", "2", "3", "coming"] in found  # it left
    assert "your own: laptop-1" in page


@pytest.mark.parametrize("every", [math.nan, math.inf, 0.1, -1.0])
def test_pauses_between_looks_that_make_no_sense(every: float) -> None:
    with pytest.raises(UsageError, match=r"--every must be at least 0.2 seconds, not"):
        status(watch=True, every=every)


def test_records_are_asked_for_until_there_are_no_more() -> None:
    seen = Seen()
    seen.take(overview(0, 30))
    assert not seen.complete
    seen.take(overview(30, 5))
    seen.take(overview(35, 0))
    assert seen.complete
    assert [record["step"] for record in seen.steps] == list(range(1, 36))
    seen.take(overview(35, 0, job="job-2"))  # asked for what is new of the old job
    assert (seen.complete, seen.next_record, seen.steps) == (False, 0, [])
    seen.take(overview(0, 3, job="job-2"))
    assert len(seen.steps) == 3
    assert len(seen.events) <= EVENTS_SHOWN
