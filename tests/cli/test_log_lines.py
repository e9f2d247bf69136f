"""What `cleave serve` prints of what is logged, and what a program of one's own sees of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from cleave_cli.commands.serve import printed_log

LOGGER = logging.getLogger("cleave.server.anything")


def test_lines_are_text_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_log(as_json=False):
        LOGGER.debug("a detail")
        LOGGER.info("%s joined", "phone\x1b[2J")
        LOGGER.warning("100 % refused")
    LOGGER.warning("after the block")
    assert capsys.readouterr() == ("", "phone[2J joined\n100 % refused\n")


def test_lines_are_notes_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_log(as_json=True):
        LOGGER.info("%s joined", "phone")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"event": "note", "text": "phone joined"}
    assert err == ""


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_log(as_json=False):
        try:
            raise KeyError("x")
        except KeyError as error:
            LOGGER.exception("unexpected %s in a session: %s", type(error).__name__, error)
    assert capsys.readouterr().err == "unexpected KeyError in a session: 'x'\n"


def test_no_line_comes_twice_where_the_root_has_a_handler(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(other)
    try:
        with printed_log(as_json=False):
            LOGGER.warning("once")
    finally:
        logging.getLogger().removeHandler(other)
    assert capsys.readouterr().err == "once\n"


def test_a_program_that_asks_for_nothing_sees_nothing() -> None:
    program = "import cleave, logging; logging.getLogger('cleave.server').error('wrong')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
