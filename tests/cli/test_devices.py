"""`cleave devices` and `cleave pair`: what they ask a server for, and tables that can be read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave_cli import main
from cleave_cli.commands import devices

DEVICE: dict[str, Any] = {
    "id": 12, "name": "bens-workstation", "own": False, "state": "ready", "reason": "",
    "seen_s": 1e9, "sessions": 3, "losses": 1, "wrong_results": 4, "blocks": 12345, "flops": 1e15,
    "downlink_bytes": 10**9, "uplink_bytes": 10**8, "compute_s": 1234.0, "energy_j": 7200.0,
    "failures": 0, "failure": "",
    "rates": {"flops_per_s": 36e9, "downlink_bytes_per_s": 102e6, "uplink_bytes_per_s": 6300},
}  # fmt: skip
MINE: dict[str, Any] = {**DEVICE, "id": 7, "name": "annas-laptop", "own": True}
STRANGER: dict[str, Any] = {**DEVICE, "id": None, "name": "stranger"}


class Server:
    """Answers every request with the same, and writes down what it is asked for."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(
        self, action: str, arguments: dict[str, Any], server: str, data: Path | None
    ) -> dict[str, Any]:
        self.asked.append((action, arguments))
        return dict(self.answer)


def invoke(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], *words: str
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """What a command prints, and what it asked for."""
    server = Server(answer)
    monkeypatch.setattr(devices, "ask", server.ask)
    done = CliRunner().invoke(main.app, [*words])
    assert done.exit_code == 0, done.output
    return done.output, server.asked


def test_rows_for_a_spreadsheet_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = {**DEVICE, "name": "=1+1"}
    output, _ = invoke(monkeypatch, {"devices": [MINE, formula, STRANGER]}, "devices", "--csv")
    mine, other, stranger = csv.DictReader(io.StringIO(output))
    assert (mine["name"], mine["own"], mine["blocks"]) == ("annas-laptop", "True", "12345")
    assert other["name"] == "'=1+1"
    assert stranger["id"] == ""
    assert invoke(monkeypatch, {"devices": []}, "devices", "--csv")[0].startswith("id,name,own,")


def test_the_rates_of_a_device_without_work_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {key: value for key, value in MINE.items() if key != "rates"}
    printed, _ = invoke(monkeypatch, {"devices": [DEVICE, older]}, "devices")
    _, measured, unknown = printed.splitlines()
    assert measured.rstrip().endswith("36 GFLOP/s, 102.0 MB/s down, 6.3 kB/s up")
    assert "GFLOP" not in unknown


def test_json_is_what_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, asked = invoke(monkeypatch, {"devices": [MINE, DEVICE]}, "devices", "--json")
    assert [device["own"] for device in json.loads(printed)["devices"]] == [True, False]
    assert asked == [("devices", {})]
