"""Traces for the viewer, and event logs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import UsageError
from cleave.fleet.product import Side
from emulator.activity import Activity
from emulator.trace import TraceLog, TraceWriter
from emulator.virtual import VirtualRuntime, emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import find_fleet, with_churn

ROWS = {1: "receive", 2: "compute", 3: "send"}


def watch(devices: list[FleetDevice], *observers: Any, seed: int = 3) -> list[Activity]:
    """Emulate two GEMMs, watched; returns everything that happened."""
    seen: list[Activity] = []
    fleet = emulated(devices, compute=False, seed=seed, start_hour=23.0)
    assert isinstance(fleet.runtime, VirtualRuntime)
    fleet.runtime.observers.extend([*observers, seen.append])
    for _ in range(2):
        a, b = (
            fleet.operand(Buffer(np.zeros((300, 300), np.float32), DType.FP32)) for _ in range(2)
        )
        fleet.submit(Side(a), Side(b), arrays.empty(300, 300, DType.FP32)).result()
    return seen


def written(trace: TraceWriter, folder: Path) -> list[dict[str, Any]]:
    trace.write(folder / "trace.json")
    document = json.loads((folder / "trace.json").read_text())
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_a_trace_is_what_the_viewer_reads(tmp_path: Path) -> None:
    trace = TraceWriter()
    seen = watch(find_fleet("home-nights-20"), trace)
    events = written(trace, tmp_path)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(seen)
    assert {e["ph"] for e in events} == {"X", "M"}
    for event in slices:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["name"]
        assert ROWS[event["tid"]] == event["cat"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    groups = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in slices} == groups
    assert all(named[e["pid"], e["tid"]] == ROWS[e["tid"]] for e in slices)


@pytest.mark.parametrize("churn", ["", "0.2:0.1"])
def test_slices_of_a_row_do_not_overlap(churn: str, tmp_path: Path) -> None:
    fleet = find_fleet("home-mix-12")
    trace = TraceWriter()
    watch(with_churn(fleet, churn) if churn else fleet, trace)
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in written(trace, tmp_path):
        if event["ph"] == "X" and event["dur"]:
            ends = event["ts"], event["ts"] + event["dur"]
            rows.setdefault((event["pid"], event["tid"]), []).append(ends)
    for slices in rows.values():
        for (_, end), (begin, _) in pairwise(sorted(slices)):
            assert begin >= end - 1e-3  # microseconds: what doubles leave of them


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
