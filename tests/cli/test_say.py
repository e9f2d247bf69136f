"""Nothing that others said reaches a terminal as more than text, whatever let it in."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cleave.errors import CleaveError
from cleave_cli import main
from cleave_cli.commands import devices, jobs, status
from cleave_cli.render import training
from cleave_cli.render.status import Seen, shown
from cleave_cli.render.text import WIDTH, filled, printable
from cleave_cli.render.training import make_display
from tests.cli.test_status import overview

DIRTY = "a\x1b]0;owned\x07b\x1b[2Jc\u202ed\x9b31me\r[/red]f"
TIDY = "a]0;ownedb[2Jcd31me [/red]f"
DEVICE = {
    "id": 1, "name": DIRTY, "state": DIRTY, "reason": DIRTY, "seen_s": None, "sessions": 1,
    "losses": 0, "wrong_results": 0, "blocks": 1, "flops": 1.0, "downlink_bytes": 1,
    "uplink_bytes": 1, "compute_s": 1.0, "energy_j": 0.0, "failures": 2, "failure": DIRTY,
    "own": True,
}  # fmt: skip
JOB = {
    "job": DIRTY, "model": DIRTY, "state": DIRTY, "reason": DIRTY, "submitted_s": 1e9,
    "started_s": None, "ended_s": None, "name": DIRTY, "steps": 1, "loss": 1.0, "run_folder": DIRTY,
}  # fmt: skip
KNOWN_CODE = {
    "id": 1, "used": 1, "uses": 2, "state": "void", "reason": DIRTY, "made_s": 0.0,
    "expires_s": 0.0, "devices": [DIRTY], "own": True,
}  # fmt: skip
CODE = {"code": DIRTY, "page_url": DIRTY, "url": DIRTY, "uses": 1, "expires_s": 0.0}


def harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_lines_stay_and_what_a_terminal_obeys_goes() -> None:
    assert printable(f"one\n{DIRTY}") == f"one\n{TIDY}"


ANSWERS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "devices": (["devices"], {"devices": [DEVICE, {**DEVICE, "id": None}]}),
    "revoke": (
        ["devices", "revoke", "x"],
        {"device": DEVICE, "codes": [{"id": 1, "uses": 2, "used": 1}], "unwritten": DIRTY},
    ),
    "release": (["devices", "release", "x"], {"device": DEVICE, "unwritten": ""}),
    "own": (["devices", "own", "x"], {"device": DEVICE, "unwritten": ""}),
    "not own": (["devices", "own", "x", "--no"], {"device": DEVICE, "unwritten": DIRTY}),
    "jobs": (["jobs"], {"jobs": [JOB]}),
    "pause": (["jobs", "pause", "x"], {"job": DIRTY, "state": "running"}),
    "logs": (
        ["jobs", "logs", "x"],
        {"job": "x", "records": [{"event": "note", "text": DIRTY}, {"event": "energy"}]},
    ),
    "pair": (["pair"], CODE),
    "codes": (["pair", "--list"], {"codes": [KNOWN_CODE]}),
    "void": (["pair", "--void", "1"], {"code": KNOWN_CODE, "unwritten": DIRTY}),
    "dashboard": (["dashboard"], {"url": DIRTY}),
}


@pytest.mark.parametrize(("command", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_what_a_server_answers(
    command: list[str], answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (devices, jobs, status):
        monkeypatch.setattr(module, "ask", lambda *_: dict(answer))
    monkeypatch.setattr(jobs, "running_server", lambda *_: "url")
    done = CliRunner().invoke(main.app, command)
    assert done.exit_code == 0, done.output
    assert harmless(done.output)
    assert TIDY in done.output


def test_the_log_of_a_job_has_no_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of energy has no text: `cleave footprint` shows its figures."""
    records = [{"event": "energy", "duration_s": 1.0}, {"event": "end", "state": "done"}]
    monkeypatch.setattr(jobs, "ask", lambda *_: {"job": "x", "records": records})
    monkeypatch.setattr(jobs, "running_server", lambda *_: "url")
    assert CliRunner().invoke(main.app, ["jobs", "logs", "x"]).output == "end  done\n"


def test_status() -> None:
    seen = Seen()
    dirty = overview(0, 2)
    dirty["server"]["name"] = dirty["job"]["model"] = dirty["job"]["state"] = DIRTY
    dirty["devices"]["by"] = [[DIRTY, DIRTY, 1]]
    dirty["events"]["rows"] = [[1, 1e9, DIRTY, 1, DIRTY]]
    seen.take(dirty)
    file = io.StringIO()
    Console(width=200, file=file, highlight=False).print(shown(seen))
    assert harmless(file.getvalue())


@pytest.mark.parametrize("as_json", [True, False])
def test_a_jobs_records(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    display = make_display(as_json=as_json)
    for event in ("note", "fleet"):
        display.plain({"event": event, "text": DIRTY, "step": 1, "state": DIRTY})
    printed = capsys.readouterr()
    assert harmless(printed.out + printed.err)
    assert TIDY in printed.err


def test_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: Exception) -> Callable[..., None]:
        def app(**_: Any) -> None:
            raise error

        return app

    for error in (CleaveError(DIRTY), ValueError(DIRTY)):
        monkeypatch.setattr(main, "app", fails(error))
        with pytest.raises(SystemExit):
            main.main()
        printed = capsys.readouterr()
        assert harmless(printed.err)
        assert TIDY in printed.err


STEP: dict[str, Any] = {
    "event": "step", "step": 10, "loss": 6.3062, "wall_s": 271.0, "fleet_s": 1612.0,
    "clock": "virtual", "tokens": 512, "downlink_bytes": 333_300_000, "uplink_bytes": 290_500_000,
    "tiles": 27_840, "reissued": 12,
}  # fmt: skip


def test_an_address_stays_whole() -> None:
    url = "ws://127.0.0.1:8765/ws#c=a-long-secret"
    assert filled(f"join {url}", 20) == f"join\n{url}"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rich take what it writes to for a terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("LINES", "30")


@pytest.mark.parametrize(
    ("on_terminal", "log_every", "lines"),
    [(False, None, 20), (True, None, 0), (False, 10, 2), (True, 10, 2), (False, 0, 0)],
)
def test_a_line_is_printed_every_few_steps(
    on_terminal: bool,
    log_every: int | None,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    display = make_display(as_json=False, log_every=log_every)
    for step in range(1, 21):
        display.plain(STEP | {"step": step})
    said = capsys.readouterr().err
    assert said.count("loss 6.3062") == lines
    assert ("step 10  loss" in said) == (lines > 0)


def test_progress_that_goes_back_says_what_is_repeated(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training._TasksColumn, "max_refresh", None)

    def told(*records: dict[str, Any]) -> str:
        with make_display(as_json=False) as display:
            for record in records:
                display.plain(record)
        return capsys.readouterr().err

    ahead, back = ({"event": "tasks", "done": done, "of": 9} for done in (7, 3))
    assert "task 3 of 9, 4 again" in told(ahead, back)
    assert "again" not in told(ahead, STEP, back)
    assert "again" not in told(back, ahead)


def test_a_note_is_broken_between_words_on_a_terminal_only(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "stages: " + ", ".join(f"layer {number} on 1 device" for number in range(1, 9))
    make_display(as_json=False).note(note)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(lines) == note
    monkeypatch.delenv("FORCE_COLOR")
    make_display(as_json=False).note(note)
    assert capsys.readouterr().err == f"{note}\n"
