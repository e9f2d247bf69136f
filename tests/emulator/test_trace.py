"""Traces for the viewer, and event logs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import UsageError
from emulator.activity import Activity, TraceLog, TraceWriter
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet, with_churn
from tests.emulator.fleets import submit_zeros, virtual, watched

ROWS = {1: "receive", 2: "compute", 3: "send"}


def watch(devices: list[FleetDevice], *observers: Any) -> list[Activity]:
    """Emulate two GEMMs, watched; returns everything that happened."""
    fleet = emulated(devices, compute=False, seed=3, start_hour=23.0)
    virtual(fleet).observers.extend(observers)
    seen = watched(fleet)
    for _ in range(2):
        submit_zeros(fleet, 300, 300, 300).result()
    return seen


def written(trace: TraceWriter, folder: Path) -> list[dict[str, Any]]:
    trace.write(folder / "trace.json")
    document = json.loads((folder / "trace.json").read_text())
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "churn"), [("home-nights-20", ""), ("home-mix-12", ""), ("home-mix-12", "0.2:0.1")]
)
def test_a_trace_is_what_the_viewer_reads_and_slices_of_a_row_do_not_overlap(
    name: str, churn: str, tmp_path: Path
) -> None:
    trace, fleet = TraceWriter(), find_fleet(name)
    seen = watch(with_churn(fleet, churn) if churn else fleet, trace)
    events = written(trace, tmp_path)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(seen)
    assert {e["ph"] for e in events} == {"X", "M"}
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in slices:
        begin, took = event["ts"], event["dur"]
        assert min(begin, took) >= 0
        assert event["name"]
        assert ROWS[event["tid"]] == event["cat"]
        if took:
            rows.setdefault((event["pid"], event["tid"]), []).append((begin, begin + took))
    for row in rows.values():
        for (_, end), (begin, _) in pairwise(sorted(row)):
            assert begin >= end - 1e-3  # microseconds: what doubles leave of them
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    groups = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in slices} == groups
    assert all(named[e["pid"], e["tid"]] == ROWS[e["tid"]] for e in slices)


def test_what_is_over_the_limit_is_counted(tmp_path: Path) -> None:
    trace = TraceWriter(limit=10)
    seen = watch(find_fleet("paper-3"), trace)
    assert trace.left_out == len(seen) - 10
    assert len([e for e in written(trace, tmp_path) if e["ph"] == "X"]) == 10


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        TraceWriter().write(tmp_path / "no" / "such.json")


def test_a_log_has_one_line_of_json_for_each_activity() -> None:
    lines: list[str] = []
    seen = watch(find_fleet("home-mix-8"), TraceLog(lines.append))
    assert len(lines) == len(seen)
    kinds = {json.loads(line)[0] for line in lines}
    assert {"down", "up", "multiply"} <= kinds
