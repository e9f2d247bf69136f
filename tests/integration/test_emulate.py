"""Real-time emulated devices on real servers, and `cleave emulate` as a process."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import resource
import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from typer.main import get_command

import cleave
from cleave.errors import CleaveError, UsageError
from cleave.server.fleet_server import Server
from cleave_cli.emulate_real_time import watched
from cleave_cli.main import app
from emulator.realtime import RealTimeCounters
from profiles.availability import Availability, Durations
from profiles.fleets import find_fleet
from tests.integration.emulation import DEVICE, Emulation, check, emulation, submit
from tests.integration.processes import (
    CLEAVE,
    PATIENCE_S,
    here,
    printing,
    records,
    started,
    training,
    until,
    wait_for_event,
)

COMMAND = get_command(app)  # made once, which takes longer than to run it


# --- in this process ---


def test_emulated_devices_serve_a_real_server_and_end_when_it_says_bye() -> None:
    with cleave.serve() as server:
        running = Emulation(server.url, [DEVICE] * 8)
        until(lambda: server.fleet.device_count == 8)
        for size in (100, 200):
            check(submit(server.fleet, size))
        counted = running.fleet.counters()
        assert counted.connected == counted.joined == 8
        # Of all blocks, the answers to probes are none of the work.
        assert counted.done.blocks > counted.lateness.answers >= server.fleet.counters().blocks > 0
    running.wait()
    assert running.error is None
    assert running.fleet.counters().left == 8
    assert not running.left


def test_believable_fleets_too(served: Server) -> None:
    """Shared lines, thermal models, drift and jitter, faster than life."""
    devices = [
        replace(d, jitter_s=0.001, drift_sigma=0.3, drift_interval_s=0.1)
        for d in find_fleet("home-mix-12")
    ]
    with emulation(served.url, devices, speed=50.0):
        until(lambda: served.fleet.device_count == 12)
        check(submit(served.fleet))


def test_a_refused_fleet_says_why(served: Server) -> None:
    url = served.url.split("#")[0] + "#c=wrong"
    running = Emulation(url, [DEVICE] * 3)
    running.wait()
    assert "credential" in str(running.error)
    assert running.fleet.counters().joined == 0


@pytest.mark.parametrize("drains", [False, True])
def test_devices_come_and_go_while_gemms_finish(served: Server, drains: bool) -> None:
    stay = Availability(Durations(1.0), Durations(0.3), drains=drains)
    with emulation(served.url, [replace(DEVICE, availability=stay)] * 6, speed=4.0) as running:
        until(lambda: served.fleet.device_count > 0)
        while running.fleet.counters().joined < 14:  # more than once each
            check(submit(served.fleet, 100))
    assert not running.left


# --- the command ---


@pytest.mark.nightly
def test_the_command_emulates_until_it_is_interrupted(served: Server, tmp_path: Path) -> None:
    """More devices than files may be open, where that limit may be raised."""
    trace, log = tmp_path / "trace.json", tmp_path / "log.jsonl"
    command = shlex.join([
        *CLEAVE, "emulate", "--devices", "70", "--server", served.url, "--json",
        "--trace", str(trace), "--log", str(log),
    ])  # fmt: skip
    with printing(["sh", "-c", f"ulimit -Sn 64 && exec {command}"]) as (process, lines):
        until(lambda: served.fleet.device_count == 70)
        check(submit(served.fleet))
        rates = wait_for_event(lines, "rates")
        assert rates["devices"] == 70
        process.send_signal(signal.SIGINT)
        summary = wait_for_event(lines, "summary")
        assert process.wait(PATIENCE_S) == 0
    assert summary["joined"] == 70
    assert summary["blocks"] > 0
    assert 0 < summary["answers"] < summary["blocks"]  # without those of the tests at joining
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"receive", "compute", "send"} <= {e.get("cat") for e in events}
    kinds = {json.loads(line)[0] for line in log.read_text().splitlines()}
    assert {"join", "down", "multiply", "up", "leave"} <= kinds
    until(lambda: served.fleet.device_count == 0)


@pytest.mark.nightly
def test_its_own_server_can_be_trained_on_and_ends_with_it(
    corpus_file: Path, tmp_path: Path
) -> None:
    with started("emulate", "--devices", "3", "--json", cwd=tmp_path) as (process, lines):
        serving = wait_for_event(lines, "serving")
        page, _, secret = wait_for_event(lines, "dashboard")["url"].partition("#c=")
        shown, refused = (
            Request(f"{page}metrics", headers={"Authorization": f"Bearer {token}"})
            for token in (secret, "another")
        )
        urlopen(shown).close()
        with pytest.raises(HTTPError, match="401"):
            urlopen(refused)
        command = training(corpus_file, 2, "opt-nano")
        trained = here(*command, "--server", serving["operator_url"])
        assert trained.returncode == 0, trained.stderr
        assert len([r for r in records(trained.stdout) if r["event"] == "step"]) == 2
        process.send_signal(signal.SIGTERM)
        assert wait_for_event(lines, "summary")["blocks"] > 0
        assert process.wait(PATIENCE_S) == 0
    late = Emulation(serving["url"], [DEVICE])
    late.wait()
    assert "no server answers" in str(late.error)


class NobodyThere:
    """A fleet that waits for ever."""

    notes: ClassVar[dict[str, int]] = {}

    async def run(self) -> None:
        await asyncio.Event().wait()

    def counters(self) -> RealTimeCounters:
        return RealTimeCounters()


def test_it_ends_with_its_own_server() -> None:
    with pytest.raises(CleaveError, match="server that this emulation started has exited"):
        asyncio.run(watched(NobodyThere(), 1, 0.0, lambda: True, as_json=True))


def test_a_step_counts_what_its_plan_counts() -> None:
    common = (
        "--model", "opt-nano", "--fleet", "paper-4", "--batch", "4", "--seq", "64", "--dtype",
        "bf16", "--coding", "off", "--method", "tiles", "--ps-gflops", "0.1", "--json",
    )  # fmt: skip
    (step,) = records(here("emulate", *common).stdout)
    planned = json.loads(here("plan", *common).stdout)
    (tiles,) = (each for each in planned["methods"] if each["method"] == "tiles")
    assert step["fleet_s"] == pytest.approx(planned["tiles"]["predicted_s"], rel=0.03)
    assert step["fleet_s"] + step["server_s"] == pytest.approx(tiles["step_s"], rel=0.03)
    assert step["gemms"] == sum(each["count"] for each in planned["tiles"]["gemms"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "0"), "--devices must be 1 or more, not 0"),
        (("--devices", "1000000"), "too many"),
        (("--devices", "50000"), "too many for one machine"),
        (("--model", "opt-nano", "--method", "magic"), "use tiles or stages"),
        (
            ("--model", "opt-nano", "--method", "stages", "--dtype", "fp16"),
            "support only bf16 and fp32",
        ),
        (("--method", "stages"), "needs --model"),
        (("--fleet", "hame-mix"), "similar: home-mix"),
        (("--fleet", "no-such.toml"), "no-such.toml"),
        (("--churn", "volonteer"), "volonteer"),
        (("--churn", "0:1"), "churn"),
        (("--stragglers", "2"), "stragglers"),
        (("--speed", "0"), "--speed"),
        (("--duration", "-1"), "--duration"),
        (("--duration", "nan"), "--duration"),
        (("--start-hour", "24"), "--start-hour"),
        (("--server", "http://x"), "is not a join URL"),
        (("--server", "ws://x/ws", "--model", "opt-nano"), "--server"),
        (("--model", "opt-none"), "opt-none"),
        (("--model", "opt-nano", "--dtype", "int8"), "int8"),
        (("--model", "opt-nano", "--steps", "0"), "--steps must be 1 or more, not 0"),
        (
            ("--model", "opt-nano", "--batch", "-2", "--seq", "-3"),
            "--batch must be 1 or more, not -2",
        ),
        (("--model", "opt-nano", "--duration", "5"), "--duration is for real time"),
        (("--steps", "3"), "needs --model"),
        (("--seed", "-99"), "--seed must be 0 or more, not -99"),
        (("--model", "opt-nano", "--ps-gbit", "-1"), "--ps-gbit"),
        (("--trace", "/no/such/folder/trace.json"), "does not exist"),
        (("--log", "/"), "cannot be written"),
        (("--trace", "/"), "cannot be written"),
        (
            ("--trace", "/dev/null", "--log", "/dev/null"),
            "are both /dev/null; use two different files",
        ),
        (("--devices", "2", "--csv"), "--csv is for virtual time, and needs --model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_clear_sentence(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        COMMAND(["emulate", *arguments], standalone_mode=False)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full disk at hand")
@pytest.mark.parametrize("option", ["--log", pytest.param("--trace", marks=pytest.mark.nightly)])
def test_a_full_disk_is_told_in_the_end(option: str) -> None:
    small = ("--model", "opt-nano", "--fleet", "paper-2", "--batch", "1", "--seq", "8")
    with pytest.raises(CleaveError, match=r"/dev/full.*: No space left on device"):
        COMMAND(["emulate", *small, option, "/dev/full"], standalone_mode=False)


def test_too_few_file_descriptors_say_how_to_raise_the_limit() -> None:
    answer = subprocess.run(
        [*CLEAVE, "emulate", "--devices", "500"],
        capture_output=True, text=True, timeout=PATIENCE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
    )  # fmt: skip
    assert answer.returncode == 2
    assert "ulimit -n 564" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_step_is_told_in_words_and_says_what_it_leaves_out() -> None:
    command = ("emulate", "--model", "opt-nano", "--fleet", "paper-1", "--batch", "1", "--seq", "8")
    shown = here(*command).stdout, here(*command, "--ps-gflops", "1").stdout
    without, counted = (" ".join(each.split()) for each in shown)
    assert "s, simulated, on 1 device" in without
    assert "the server's attention" in without
    assert "the server's attention" not in counted


@pytest.mark.parametrize("method", ["tiles", "stages"])
def test_steps_are_rows_of_csv(method: str) -> None:
    command = (
        "emulate", "--model", "opt-nano", "--fleet", "paper-4", "--batch", "4", "--seq", "16",
        "--method", method, "--steps", "2",
    )  # fmt: skip
    done = here(*command, "--csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    as_json = [json.loads(line) for line in here(*command, "--json").stdout.splitlines()]
    assert [row["step"] for row in rows] == ["1", "2"]
    assert list(rows[0]) == list(as_json[0])
    assert [(step["event"], step["devices"]) for step in as_json] == [("step", 4)] * 2
    assert float(rows[1]["fleet_s"]) == pytest.approx(as_json[1]["fleet_s"])
