"""The dashboard of an operator: jobs side by side, and changed from the page."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, expect

from tests.integration.processes import PATIENCE_S, apart, server, started, wait_for_event
from tests.web.watched import serious_findings, watched

pytestmark = [
    pytest.mark.usefixtures("pages"),
    pytest.mark.nightly,  # `web_client/tests/dashboard/session.test.ts` has what the page asks for
]

PATIENCE_MS = PATIENCE_S * 1000


def test_an_operator_compares_pauses_resumes_and_stops_jobs_from_the_page(
    browser: Browser, corpus_file: Path, tmp_path: Path
) -> None:
    with server(tmp_path) as place, watched(browser, phone=True) as seen:
        page = seen.page
        page.on("dialog", lambda dialog: dialog.accept())
        operator = ("--server", place["operator_url"])
        url = apart("dashboard", "--operator", "--no-qr", *operator).stdout.strip()
        sizes = ("--batch", "1", "--seq", "16", "--method", "local", "--json")
        train = ("train", "--model", "opt-nano", "--data", str(corpus_file), *operator, *sizes)
        with started(*train, "--steps", "5", "--name", "short") as (short, _):
            assert short.wait(PATIENCE_S) == 0
        with ExitStack() as running:
            long_job = (*train, "--steps", "100000", "--name", "long")
            _, steps = running.enter_context(started(*long_job))
            wait_for_event(steps, "step")
            running.enter_context(started(*train, "--steps", "5", "--name", "next"))
            page.goto(url)
            rows = page.locator("table.jobs tbody tr")
            expect(rows).to_have_count(3, timeout=PATIENCE_MS)
            rows.filter(has_text="short").get_by_role("button", name="compare").click()
            legend = page.locator(".chart").filter(has_text="Loss").locator(".legend")
            expect(legend).to_contain_text("job-1", timeout=PATIENCE_MS)
            rows.filter(has_text="short").get_by_role("button", name="log").click()
            expect(page.get_by_text("step 5: loss")).to_be_visible(timeout=PATIENCE_MS)
            assert serious_findings(page) == []
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width == page.viewport_size["width"]  # type: ignore[index]
            long, queued = rows.filter(has_text="long"), rows.filter(has_text="next")
            queued.get_by_role("button", name="stop").click()
            expect(queued).to_contain_text("stopped", timeout=PATIENCE_MS)
            for change, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
                long.get_by_role("button", name=change).click()
                expect(long).to_contain_text(state, timeout=PATIENCE_MS)
        with watched(browser) as viewer:
            viewer.page.goto(place["dashboard_url"])
            row = viewer.page.locator("table.jobs tbody tr").filter(has_text="long")
            expect(row).to_contain_text("stopped", timeout=PATIENCE_MS)
            assert row.get_by_role("button", name="resume").count() == 0
            assert viewer.complaints == []
        assert seen.complaints == []
