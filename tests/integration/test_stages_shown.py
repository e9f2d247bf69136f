"""A real server shows a job by stages while it runs: who holds what, whose devices, which bytes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from tests.integration.processes import JOIN, PATIENCE_S, here, server, started, wait_for_event
from tests.integration.test_overview import table
from tests.integration.test_viewers import asked, viewed

pytestmark = pytest.mark.slow

LAYERS = 2  # of opt-nano


def look(url: str, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask for overviews until one is as wanted; return that."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        (seen,) = asked(url, ("overview", {}))
        if until(seen):
            return seen
    raise AssertionError(f"it never came; the last stages were {seen['stages']}")


def in_flight(seen: dict[str, Any]) -> int:
    """Micro-batches that devices are asked for; 0 where no step goes by stages."""
    stages = (seen["stages"] or {"stages": []})["stages"]
    return sum(holder[1] + holder[2] for stage in stages for holder in stage["holders"])


def streams_of(viewer: str) -> list[Any]:
    """What devices did lately."""
    (seen,) = asked(viewer, ("overview", {"stream": True}))
    found: list[Any] = seen["stream"]["devices"]
    return found


@pytest.mark.nightly  # tests/server/test_overview.py and tests/cli/test_status.py test the parts
def test_a_job_by_stages_is_shown_and_waits_when_its_only_device_is_killed(
    tmp_path: Path, corpus_file: Path
) -> None:
    data = ("--data", str(tmp_path / "data"))
    with ExitStack() as stack:
        listening = stack.enter_context(server(tmp_path))
        processes: list[subprocess.Popen[str]] = []
        mine = json.loads(here("pair", "--own", *data, "--json").stdout)
        for name, url in (("mine", mine["url"]), ("theirs", listening["page_url"])):
            device, lines = stack.enter_context(
                started("join", url, "--name", name, *JOIN, cwd=tmp_path)
            )
            wait_for_event(lines, "ready")
            processes.append(device)
        viewer = viewed(listening["dashboard_url"])
        before = look(viewer, lambda seen: len(seen["devices"]["rows"]) == 2)
        assert before["stages"] is None
        assert before["traffic"]["down"]["weights"] == 0
        _, lines = stack.enter_context(
            started(
                "train", "--model", "opt-nano", "--data", str(corpus_file), "--steps", "100000",
                "--batch", "4", "--seq", "16", "--method", "stages", "--checkpoint-every", "0",
                "--server", f"@{tmp_path / 'data' / 'operator.url'}", "--json",
            )
        )  # fmt: skip
        step = wait_for_event(lines, "step")
        assert step["traffic"]["down"]["weights"] > 0
        assert step["traffic"]["up"]["gradients"] > 0
        assert sum(step["traffic"]["down"].values()) == step["downlink_bytes"]
        assert sum(step["traffic"]["up"].values()) == step["uplink_bytes"]

        seen = look(viewer, lambda seen: in_flight(seen) > 0)
        devices = {row["name"]: row for row in table(seen["devices"])}
        assert (devices["mine"]["own"], devices["theirs"]["own"]) == (True, False)
        stages = seen["stages"]
        assert not stages["ended"]
        assert (stages["stages"][0]["first"], stages["stages"][-1]["stop"]) == (0, LAYERS)
        holders = {holder[0] for stage in stages["stages"] for holder in stage["holders"]}
        assert holders == {devices["mine"]["device"]}
        assert all(stage["landed"] <= stages["batches"] for stage in stages["stages"])
        assert seen["job"]["state"] == "running"
        for way in ("down", "up"):
            assert sum(seen["traffic"][way].values()) == seen["totals"][f"{way}_bytes"]

        ((device, spans),) = streams_of(viewer)
        assert device == devices["mine"]["device"]
        assert {lane for lane, _, _ in spans} == {0, 1, 2}
        assert all(0 <= took_ms <= ago_ms for _, ago_ms, took_ms in spans)

        page = here("status", *data).stdout
        assert "micro-batch" in page
        assert "your own: mine" in page
        assert " activations" in page
        told = json.loads(here("status", *data, "--json").stdout)
        assert told["stages"]["batches"] == stages["batches"]
        known = json.loads(here("devices", *data, "--json").stdout)["devices"]
        assert {device["name"]: device["own"] for device in known} == {
            "mine": True, "theirs": False,
        }  # fmt: skip
        parts = urlsplit(listening["dashboard_url"])
        with urlopen(f"http://{parts.netloc}/metrics", timeout=PATIENCE_S) as reply:
            metrics = reply.read().decode()
        assert 'cleave_traffic_bytes_total{kind="gradients",way="up"}' in metrics

        # Its only device is killed: it says that it waits, and goes on with another.
        processes[0].kill()
        while wait_for_event(lines, "fleet")["state"] != "absent":
            pass
        another = json.loads(here("pair", "--own", *data, "--json").stdout)["url"]
        stack.enter_context(started("join", another, "--name", "another", *JOIN, cwd=tmp_path))
        assert wait_for_event(lines, "fleet")["state"] == "present"
        wait_for_event(lines, "step")

        job = seen["job"]["job"]
        operator = (tmp_path / "data" / "operator.url").read_text().strip()
        asked(operator, ("stop", {"job": job}))
        ended = look(viewer, lambda seen: seen["job"]["state"] == "stopped")
        assert ended["stages"] is None
