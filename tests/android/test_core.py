"""The Android client's core on a JVM: its unit tests, and as a device of a real server."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from cleave.arrays import Buffer, DType, empty
from cleave.fleet.product import Side
from cleave.server.fleet_server import Server, serve
from cleave.training.loop.job import JobSpec
from cleave.transport.join_url import parse_join_url
from cleave.transport.tls import Security, TlsMode
from tests.android.jvm import CORE, Classes
from tests.examples import thorough
from tests.faults.plan import Direction, Fault, Seen
from tests.faults.proxy import Proxy
from tests.integration.processes import (
    PATIENCE_S,
    apart,
    losses,
    printing,
    records,
    server,
    started,
    training,
    training_job,
    until,
    wait_for_event,
)

STEPS = 7
CUT_AT, KILLED_AT = 120, 300  # runs of a connection; a step has some 95


def device(
    classes: Classes, link: str, state: Path
) -> AbstractContextManager[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """The core as a device that keeps its credential in a folder; see `printing`."""
    return printing(classes.command("--threads", "1", "--state", str(state), link))


@pytest.mark.nightly
def test_the_unit_tests_pass(classes: Classes) -> None:
    command = classes.unit_tests(without=[] if thorough() else ["ProfileRunTest"])  # 8 s
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


class CutThenKilled:
    """The first connection is cut, and the process killed in the second: both with work to do."""

    def __init__(self, connection: int) -> None:
        self._fault = Fault.CUT if connection == 1 else Fault.KILL
        self._left = CUT_AT if connection == 1 else KILLED_AT

    def decide(self, seen: Seen) -> Fault | None:
        if seen.direction is Direction.DOWN and seen.kind == "run":
            self._left -= 1
            return self._fault if self._left == 0 else None
        return None


@pytest.mark.nightly
def test_it_trains_to_the_losses_of_plain_pytorch_though_it_is_cut_off_and_killed(
    classes: Classes,
    corpus_file: Path,
    tmp_path: Path,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    """One device at a time does all there is; every loss falls on one or the other."""
    expected = plain_losses(training_job(corpus_file, STEPS))
    assert len(expected) == STEPS
    mortal: list[subprocess.Popen[str]] = []
    with (
        server(tmp_path) as place,
        Proxy(
            place["url"],
            lambda slot, connection: CutThenKilled(connection),
            on_process=lambda slot, fault: mortal[0].kill(),
        ) as proxy,
        device(classes, proxy.url(0), tmp_path / "first") as (process, said),
    ):
        mortal.append(process)
        first = wait_for_event(said, "welcomed")
        code = apart("pair", "--server", place["operator_url"], "--json")
        command = (*training(corpus_file, STEPS), "--server", place["operator_url"])
        with started(*command) as (trainer, lines):
            assert wait_for_event(said, "waiting")["retry_s"] <= 1.0
            again = wait_for_event(said, "welcomed")
            assert again["device"] != first["device"]
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
            second = records(code.stdout)[-1]["page_url"]
            with device(classes, second, tmp_path / "second") as (other, told):
                wait_for_event(told, "working")
                seen = losses(lines)
                assert trainer.wait(PATIENCE_S) == 0
                other.terminate()
                wait_for_event(told, "draining")
                assert wait_for_event(told, "left")["blocks"] > 100
        assert seen == pytest.approx(expected, rel=1e-4)
        assert set(proxy.counts()) == {Fault.CUT, Fault.KILL}


@pytest.mark.nightly
def test_it_pauses_as_its_owner_says_and_comes_back_with_its_credential(
    classes: Classes, tmp_path: Path
) -> None:
    with server(tmp_path) as place:
        with device(classes, place["url"], tmp_path / "mine") as (process, said):
            wait_for_event(said, "working")
            tell(process, "pause it is not charging")
            assert wait_for_event(said, "draining")["reason"] == "it is not charging"
            assert wait_for_event(said, "paused")["reason"] == "it is not charging"
            tell(process, "work")
            wait_for_event(said, "working")
            tell(process, "stop")
            assert wait_for_event(said, "ended")["reason"] == "stopped"
            assert process.wait(PATIENCE_S) == 0
        with device(classes, place["url"], tmp_path / "mine") as (_, said):
            wait_for_event(said, "working")
        with device(classes, place["url"], tmp_path / "other") as (process, said):
            assert wait_for_event(said, "ended")["code"] == "credential"  # the code was used
            assert process.wait(PATIENCE_S) == 1


def ready(*servers: Server) -> tuple[int, ...]:
    return tuple(server.fleet.device_count for server in servers)


def multiplies(server: Server) -> bool:
    ones = Buffer(np.ones((4, 4), np.float32), DType.FP32)
    side = Side(server.fleet.operand(ones))
    future = server.fleet.submit(side, side, empty(4, 4, DType.FP32))
    return bool((future.result().array == 4).all())


def without_credential(server: Server) -> str:
    return replace(parse_join_url(server.url), credential="").text


@pytest.mark.nightly
def test_it_goes_where_it_is_sent_and_back_where_nobody_is_there(
    classes: Classes, tmp_path: Path
) -> None:
    """Each server has a certificate of its own, which the address of a move names."""
    credential, tls = secrets.token_urlsafe(), Security(tls=TlsMode.AUTO)
    with (
        serve(credential=credential, security=tls) as home,
        serve(credential=credential, security=tls) as other,
        device(classes, home.url, tmp_path) as (_, said),
    ):
        until(lambda: ready(home, other) == (1, 0))
        home.live.move(1, without_credential(other))
        until(lambda: ready(home, other) == (0, 1))
        assert multiplies(other)
        other.close()
        until(lambda: ready(home) == (1,))
        assert multiplies(home)
        waits = (wait_for_event(said, "waiting")["reason"] for _ in count())
        for reason in ("another server needs it more", "the server is closing"):
            assert any(reason == said for said in waits)
        assert any(urlsplit(other.url).netloc in said for said in waits)


def tell(process: subprocess.Popen[str], command: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()


@pytest.mark.nightly
def test_it_talks_to_the_server_with_the_fingerprint_of_its_link_alone(
    classes: Classes, tmp_path: Path
) -> None:
    with server(tmp_path, "--tls", "auto") as place:
        link = place["page_url"]
        right = place["fingerprint"]
        assert right in link
        wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
        with device(classes, link.replace(right, wrong), tmp_path) as (process, said):
            ended = wait_for_event(said, "ended")
            assert right in ended["reason"]
            assert wrong in ended["reason"]
            assert process.wait(PATIENCE_S) == 1
        with device(classes, link.partition("&fp=")[0], tmp_path) as (process, said):
            assert "is not trusted" in wait_for_event(said, "ended")["reason"]
        with printing(classes.command("--measure", link)) as (_, said):
            rates = wait_for_event(said, "measured")
            assert rates["downlink_bytes_per_s"] > 1e6
        with device(classes, link, tmp_path) as (process, said):  # whose code is not used up
            wait_for_event(said, "working")


@pytest.mark.nightly
def test_what_it_cannot_do_is_explained(classes: Classes, tmp_path: Path) -> None:
    for arguments, words in (
        ((), "usage"),
        (("--threads", "none", "ws://h/ws"), "--threads"),
        (("--memory-mib", "1", "ws://h/ws"), "16777216"),
        (("--colour", "red", "ws://h/ws"), "--colour"),
        (("http://h/#c=secret",), "no join URL"),
        ((f"@{tmp_path / 'missing'}",), "cannot be read"),
    ):
        done = subprocess.run(
            classes.command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 2
        assert words in done.stderr
        assert "secret" not in done.stderr
        assert "Exception" not in done.stderr


def test_imports_go_down_the_floors_only() -> None:
    """The order of packages that `android_client/core/README.md` states."""
    floors = ["protocol", "kernels", "coding", "graphs", "device", "session", "transport"]
    for height, floor in enumerate(floors):
        above = [*floors[height + 1 :], "[A-Z]"]  # classes of `cleave.core` itself
        wrong = re.compile(rf"import cleave\.core\.({'|'.join(above)})")
        for path in (CORE / "main" / "java" / "cleave" / "core" / floor).glob("*.java"):
            assert not wrong.search(path.read_text()), path
