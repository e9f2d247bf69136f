"""`cleave serve`: options that make no sense, refused before anything listens."""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from cleave.errors import UsageError
from cleave_cli.commands.serve import printed_log, serve
from cleave_cli.options import browsers_warn, only_here
from cleave_cli.stopping import ending_signals


def test_which_addresses_are_of_this_machine_alone() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert "--host 0.0.0.0" in only_here(f"http://{host}:8765/join#c=x")
    assert only_here("https://192.0.2.7:8765/join#c=x") == ""


def test_a_link_with_an_unknown_certificate_comes_with_what_to_tell_its_reader() -> None:
    url = "https://192.0.2.7:8765/join#c=x&s=y"
    assert browsers_warn(url) == ""
    warning = browsers_warn(f"{url}&fp=sha256:{'0' * 64}")
    assert "Proceed" in warning
    assert "visit this" in warning


LOGGER = logging.getLogger("cleave.server.anything")


def test_lines_are_text_on_stderr_or_notes_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with printed_log(as_json=False):
        LOGGER.debug("a detail")
        LOGGER.info("%s joined", "phone\x1b[2J")
        LOGGER.warning("100 % refused")
    LOGGER.warning("after the block")
    assert capsys.readouterr() == ("", "phone[2J joined\n100 % refused\n")
    with printed_log(as_json=True):
        LOGGER.info("%s joined", "phone")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"event": "note", "text": "phone joined"}
    assert err == ""


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": -1}, "--port must be between 1 and 65535, or 0 for any free port, not -1"),
        ({"port": 65536}, "not 65536"),
        ({"ps_gbit": -1.0}, "--ps-gbit must be 0 (unlimited) or more, not -1"),
        ({"ps_gbit": math.nan}, "--ps-gbit must be 0 (unlimited) or more, not nan"),
        (
            {"ps_watts": math.inf},
            "--ps-watts must be a number of watts, or 0 to read the sensors, not inf",
        ),
        ({"stages_on": "all"}, "--stages-on is 'all'; use own or any"),
        ({"title": 81 * "x"}, "--title has 81 characters; use at most 80"),
        ({"about": 501 * "x"}, "--about has 501 characters; use at most 500"),
        ({"servers": 0}, "--servers must be 1 or more, not 0"),
        ({"ray": "10.0.0.1:6379"}, "--ray needs --servers with at least 2 servers"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
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
