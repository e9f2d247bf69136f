"""What commands print fits a terminal of 80 columns, without a word or a figure that is cut."""

from __future__ import annotations

from typing import Any

import pytest

from cleave.planner.plan import DeviceRates
from cleave_cli.commands.demo import _summary
from cleave_cli.options import counted
from cleave_cli.render.plan import coding_text
from cleave_cli.render.text import WIDTH, filled
from cleave_cli.render.training import make_display

STEP: dict[str, Any] = {
    "event": "step", "step": 10, "loss": 6.3062, "wall_s": 271.0, "fleet_s": 1612.0,
    "clock": "virtual", "tokens": 512, "downlink_bytes": 333_300_000, "uplink_bytes": 290_500_000,
    "tiles": 27_840, "reissued": 12,
}  # fmt: skip


def test_lines_are_broken_between_words_and_keep_their_indent() -> None:
    assert (
        filled("one two three\n\n  four five six", 9) == "one two\nthree\n\n  four\n  five\n  six"
    )


def test_an_address_stays_whole() -> None:
    url = "ws://127.0.0.1:8765/ws#c=a-long-secret"
    assert filled(f"join {url}", 20) == f"join\n{url}"


def test_one_is_singular() -> None:
    assert [counted(n, "device") for n in (0, 1, 2000)] == [
        "0 devices",
        "1 device",
        "2,000 devices",
    ]
    device = DeviceRates(0, 1e6, 1e6, 1e12, codes_downlink=True, codes_uplink=True)
    assert "; coded on 1 downlink and 1 uplink, where" in coding_text([device], ["bf16"])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rich take what it writes to for a terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("LINES", "30")


@pytest.mark.parametrize("verbose", [False, True])
def test_a_steps_line_leaves_the_progress_bar_its_room(
    verbose: bool, terminal: None, capsys: pytest.CaptureFixture[str]
) -> None:
    display = make_display(as_json=False, verbose=verbose)
    display.start(10)
    with display:
        display.plain(STEP)
    shown = " ".join(capsys.readouterr().err.split())
    assert "…" not in shown
    for whole in ("10/10", "loss 6.3062", "1.61e+03 s simulated", "290.5 MB up", "12 reissued"):
        assert whole in shown
    assert ("27840 tiles" in shown) == verbose


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


def test_the_end_of_the_demo_fits() -> None:
    small = {
        "largest_difference": 1.2e-5, "losses": [6.0] * 10, "devices": 4, "seconds": 123.4,
        "downlink_bytes": 465_500_000, "uplink_bytes": 496_900_000,
        "run_folder": "/home/someone/cleave/runs/20261126-173332",
    }  # fmt: skip
    large = {"simulated_alone_s": 12250.0, "simulated_step_s": 79.0, "model": "opt-1.3b"}
    assert max(map(len, _summary(small, large, 123.0).splitlines())) <= WIDTH
