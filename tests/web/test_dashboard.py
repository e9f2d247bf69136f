"""The dashboard of a real server with many emulated devices, opened while a job runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Page, expect

from tests.integration.processes import (
    PATIENCE_S,
    apart,
    started,
    wait_for_event,
)
from tests.integration.test_viewers import asked, viewed
from tests.web.watched import Watched, watched

pytestmark = [
    pytest.mark.usefixtures("pages"),
    pytest.mark.nightly,  # `test_dashboard_page.py` has the page on a made-up feed
]

DEVICES = 80  # more than its table shows at once
STEPS = 2
PATIENCE_MS = PATIENCE_S * 1000


@dataclass(frozen=True)
class Server:
    """A real one, with a fleet."""

    dashboard_url: str
    operator_file: Path

    def overview(self) -> dict[str, Any]:
        """What it says of itself."""
        # In another thread: Playwright has an event loop in this one.
        with ThreadPoolExecutor(1) as pool:
            url = viewed(self.dashboard_url)
            (answer,) = pool.submit(asked, url, ("overview", {})).result()
        return answer

    def devices(self) -> list[dict[str, Any]]:
        """Its devices by column."""
        table = self.overview()["devices"]
        return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


@contextmanager
def server_with_fleet(folder: Path) -> Iterator[Server]:
    data = folder / "data"
    with ExitStack() as stack:
        serve = ("serve", "--port", "0", "--data", str(data), "--ps-gbit", "1", "--json")
        _, lines = stack.enter_context(started(*serve, cwd=folder))
        url = wait_for_event(lines, "listening")["dashboard_url"]
        pair = apart("pair", "--data", str(data), "--uses", str(DEVICES), "--json")
        join_url = json.loads(pair.stdout)["url"]
        fleet = ("--devices", str(DEVICES), "--fleet", "home-mix", "--speed", "20")
        stack.enter_context(started("emulate", *fleet, "--server", join_url))
        server = Server(url, data / "operator.url")
        yield server


def figure(page: Page, name: str) -> str:
    """One of the page's first figures, as it stands there."""
    item = page.locator(".headline .figure").filter(has=page.get_by_text(name, exact=True))
    return item.locator(".value").inner_text()


def blocks_by_device(page: Page) -> dict[int, int]:
    """The column of blocks, of all devices: the table is read while it is scrolled to its end."""
    seen: dict[int, int] = {}
    page.locator(".devices tbody th button").first.focus()
    page.keyboard.press("Home")
    while len(seen) < DEVICES:
        before = len(seen)
        for row in page.locator(".devices tbody:not([aria-hidden]) tr").all():
            name, *others = row.locator("th, td").all_inner_texts()
            seen[int(name.rpartition("#")[2])] = int(others[3].replace("\u202f", ""))
        page.keyboard.press("PageDown")
        page.wait_for_timeout(0)
        assert len(seen) >= before
    return seen


@pytest.fixture(scope="module")
def opened(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, corpus_file: Path
) -> Iterator[tuple[Server, Watched, list[dict[str, Any]]]]:
    """A server, its dashboard opened during a run, and what the run printed; the run is over."""
    folder = tmp_path_factory.mktemp("dashboard")
    with ExitStack() as stack:
        server = stack.enter_context(server_with_fleet(folder))
        seen = stack.enter_context(watched(browser))
        page = seen.page
        page.goto(server.dashboard_url)
        expect(page.get_by_text(re.compile(rf"^{DEVICES} devices$"))).to_be_visible(
            timeout=PATIENCE_MS
        )
        train = (
            "train", "--method", "tiles",
            "--model", "opt-nano", "--data", str(corpus_file), "--steps", str(STEPS),
            "--batch", "2", "--seq", "32", "--server", f"@{server.operator_file}", "--json",
        )  # fmt: skip
        _, lines = stack.enter_context(started(*train, cwd=folder))
        records = [wait_for_event(lines, "step")]
        expect(page.locator(".title .chip").first).to_have_text("running", timeout=PATIENCE_MS)
        expect(page.locator(".tiling canvas").or_(page.locator("#plan"))).not_to_have_count(0)
        expect(page.locator(".stream canvas")).not_to_have_count(0, timeout=PATIENCE_MS)
        records.extend(lines)
        expect(page.locator(".title .chip").first).to_have_text("done", timeout=PATIENCE_MS)
        yield server, seen, records


def test_its_numbers_are_the_servers_own(
    opened: tuple[Server, Watched, list[dict[str, Any]]],
) -> None:
    server, seen, records = opened
    page = seen.page
    steps = [record for record in records if record["event"] == "step"]
    assert len(steps) == STEPS
    assert figure(page, "Loss") == f"{steps[-1]['loss']:.4f}"
    recent = steps[-10:]
    per_s = sum(step["tokens"] for step in recent) / sum(step["wall_s"] for step in recent)
    assert float(figure(page, "Tokens").split("/")[0].split()[0]) == pytest.approx(
        per_s if per_s < 1000 else per_s / 1000, rel=0.01
    )
    assert figure(page, "Devices") == str(DEVICES) == str(len(server.devices()))
    assert blocks_by_device(page) == {row["device"]: row["blocks"] for row in server.devices()}
    totals = server.overview()["totals"]
    fleet = page.get_by_text(re.compile(r"joined, .* left"))
    expect(fleet).to_contain_text(f"{totals['joined']} joined, {totals['left']} left")
    expect(fleet).to_contain_text(f"{totals['wrong']} wrong")
    newest = server.overview()["events"]["rows"][-1]
    expect(page.locator(".events li .what").first).to_have_text(newest[4])
    assert seen.complaints == []
    assert seen.foreign(server.dashboard_url) == []
