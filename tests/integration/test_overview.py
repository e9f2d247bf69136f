"""Overviews of a real server: its figures are the server's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from cleave.training.loop.job import JobSpec
from tests.integration.processes import (
    JOIN,
    PATIENCE_S,
    here,
    losses,
    records,
    started,
    training,
    training_job,
    wait_for_event,
)
from tests.integration.test_viewers import asked, viewed

PHONE = ("--profile", "snapdragon-888")


def table(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(part["columns"], row, strict=True)) for row in part["rows"]]


def test_a_job_as_viewers_see_it_and_those_who_follow_it(
    tmp_path: Path,
    corpus_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    plain_losses: Callable[[JobSpec], list[float]],
) -> None:
    data = tmp_path / "data"
    serve = ("serve", "--port", "0", "--data", str(data), "--ps-gbit", "1", "--grid", "DEU")
    with ExitStack() as stack:
        _, lines = stack.enter_context(started(*serve, "--json", cwd=tmp_path))
        listening = wait_for_event(lines, "listening")
        _, device = stack.enter_context(started("join", listening["page_url"], *JOIN, *PHONE))
        wait_for_event(device, "ready")
        monkeypatch.setenv("CLEAVE_DATA", str(data))
        trained = here(*training(corpus_file, 3, "opt-nano"))
        assert trained.returncode == 0, trained.stderr
        assert "training on this machine's server" in trained.stderr
        assert losses(records(trained.stdout)) == pytest.approx(
            plain_losses(training_job(corpus_file, 3, "opt-nano")), rel=1e-4
        )
        again = here(
            "train", "--server", f"@{data / 'operator.url'}", "--attach", "job-1", "--json"
        )
        assert again.stdout == trained.stdout
        energy, last = records(trained.stdout)[-2:]
        assert (energy["event"], last["event"]) == ("energy", "done")
        (usage,) = energy["spells"]
        assert (usage["profile"], usage["devices"]) == (PHONE[1], 1)
        assert (energy["virtual"], energy["devices_here"]) == (False, 1)
        assert usage["compute_s"] > 0
        assert energy["energy_j"] > 0
        shown = here("footprint", last["run_folder"], "--json", "--grid", "DEU", cwd=tmp_path)
        footprint = json.loads(shown.stdout)["fleet"]
        assert footprint["energy_j"] == pytest.approx(energy["energy_j"])
        assert footprint["operational_gco2e"] > 0
        url = viewed(listening["dashboard_url"])
        seen, status = asked(url, ("overview", {}), ("status", {}))
        assert seen["server"]["verify"] == "auto"
        assert seen["card"]["egress_bytes_per_s"] == 1e9 / 8
        job = seen["job"]
        assert (job["job"], job["state"], job["model"], job["steps"]) == (
            "job-1", "done", "opt-nano", 3,
        )  # fmt: skip
        steps = [record for record in job["records"] if record["event"] == "step"]
        assert [record["step"] for record in steps] == [1, 2, 3]
        assert seen["totals"]["blocks"] == sum(record["blocks"] for record in steps) > 0
        (mine,) = table(seen["devices"])
        (known,) = status["devices"]
        assert {name: mine[name] for name in ("device", "name", "blocks", "compute_s")} == {
            name: known[name] for name in ("device", "name", "blocks", "compute_s")
        }
        assert mine["reputation"] in ("new", "good")
        # What was probed before it joined crossed the network as well; nobody else is there.
        # It first asked for admission, in a short session of its own.
        for way in ("down_bytes", "up_bytes"):
            assert 0 <= seen["totals"][way] - mine[way] < 4096
        assert seen["totals"]["flops"] > 0
        kinds = [event["kind"] for event in table(seen["events"])]
        # It is ready, to itself, when it is let in: the job may come before its probe is over.
        assert (kinds.count("join"), kinds.count("job")) == (1, 3)
        more = {"after_record": job["next_record"], "after_event": seen["events"]["last"]}
        (later,) = asked(url, ("overview", {**more, "device": mine["device"]}))
        assert later["job"]["records"] == later["events"]["rows"] == []
        spans = later["timeline"]["spans"]
        began_s, now_s = seen["server"]["started_s"], later["server"]["now_s"]
        assert spans
        assert all(began_s <= start <= end <= now_s for _, start, end in spans)
        assert seen["gemms"]
        told = here("status", "--data", str(data), "--json")
        assert json.loads(told.stdout)["totals"]["blocks"] == seen["totals"]["blocks"]
        drawn = here("status", "--data", str(data))
        assert "job-1 (opt-nano) done, step 3 of 3" in drawn.stdout
        watch = ("status", "--watch", "--every", "0.2", "--data", str(data), "--json")
        _, looks = stack.enter_context(started(*watch))
        first, second = next(looks), next(looks)
        assert first["job"]["next_record"] == second["job"]["first_record"] == job["next_record"]
        again = here("dashboard", "--data", str(data))
        assert again.stdout.strip() == listening["dashboard_url"]
        assert "▀" not in again.stderr  # no phone could open it: the server is on loopback
        parts = urlsplit(listening["dashboard_url"])
        with urlopen(f"http://{parts.netloc}/metrics", timeout=PATIENCE_S) as reply:
            shown = reply.read().decode()
        assert f"cleave_blocks_total {float(seen['totals']['blocks'])}\n" in shown
        assert 'cleave_job_step{job="job-1",model="opt-nano"} 3.0' in shown


@pytest.mark.parametrize("command", ["status", "dashboard"])
def test_where_no_server_runs(command: str, tmp_path: Path) -> None:
    told = here(command, "--data", str(tmp_path))
    assert (told.returncode, "cleave serve" in told.stderr) == (1, True)
