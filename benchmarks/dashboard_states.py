"""Take screenshots of the dashboard in each state of a server, with axe and console findings.

    python -m benchmarks.dashboard_states [--folder dashboard-states]

The states of a real server are: no token; a wrong token; no devices and no job; a job that waits
for devices; a job that trains by tiles, compared with the losses of plain PyTorch; the same job
after its only device was killed; a job by stages; an operator's page with a running, a queued and a
stopped job and a log; no connection, because the server was killed. Each state is shown in light
and dark, on a desktop and on a phone. Exit code 1 if axe finds something serious, the console has
an error, or the page is wider than the screen. `benchmarks.screenshots` covers many devices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import expect

from tests.integration.processes import PATIENCE_S, apart, own_address, started, wait_for_event
from tests.web.browser import chromium
from tests.web.watched import Watched, serious_findings, watched

STEPS = 20
PATIENCE_MS = 1000 * PATIENCE_S
SCREENS = [(scheme, phone) for scheme in ("light", "dark") for phone in (False, True)]


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("dashboard-states"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    with ExitStack() as stack:
        browser = stack.enter_context(chromium())
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cleave-benchmark-")))
        serve = ("serve", "--port", "0", "--data", str(place / "data"), "--json")
        server, lines = stack.enter_context(started(*serve, cwd=place))
        address = wait_for_event(lines, "listening")
        url, operator_url = str(address["dashboard_url"]), str(address["operator_url"])
        bare = url.partition("#")[0]

        def take(state: str, text: str, url: str = url, log_of: str = "") -> None:
            nonlocal good
            for scheme, phone in SCREENS:
                with watched(browser, scheme=scheme, phone=phone) as seen:
                    seen.page.goto(url)
                    if log_of:
                        seen.page.get_by_text("(later)").wait_for(timeout=PATIENCE_MS)
                        row = seen.page.locator("table.jobs tbody tr").filter(has_text=log_of)
                        row.get_by_role("button", name="log").click(timeout=PATIENCE_MS)
                        log = seen.page.get_by_role("heading", name="Log of")
                        log.wait_for(timeout=PATIENCE_MS)  # the button has these words, too
                    good &= _take(seen, text, folder / f"{state}-{_screen(scheme, phone)}.png")

        take("no-token", "This page needs its token", bare)
        take("wrong-token", "The server refused the token", bare + "#c=wrong")
        take("empty", "Nothing is being trained.")
        train = ("train", "--model", "opt-tiny", "--steps", "4000", "--batch", "1", "--seq", "16")
        alone = ("--devices", "0", "--name", "plain", "--json")
        with started(*train, *alone, cwd=place) as (_, plain):
            for _ in range(STEPS):
                wait_for_event(plain, "step")
        operator = ("--server", operator_url, "--json")
        by_tiles = (*train, "--method", "tiles", "--against", "runs/plain", "--name", "tiles")
        _, records = stack.enter_context(started(*by_tiles, *operator, cwd=place))
        wait_for_event(records, "fleet")
        take("waiting", "Waiting.")
        device, _ = stack.enter_context(started("join", str(address["url"]), "--json"))
        for _ in range(STEPS):
            wait_for_event(records, "step")
        take("training", "compared run")
        device.kill()
        wait_for_event(records, "fleet")
        take("lost", "Waiting.")
        apart("jobs", "stop", "job-1", "--server", operator_url)
        stack.enter_context(started("join", own_address(address), "--name", "own", "--json"))
        by_stages = (*train, "--method", "stages", "--name", "stages")
        _, records = stack.enter_context(started(*by_stages, *operator, cwd=place))
        for _ in range(STEPS):
            wait_for_event(records, "step")
        take("stages", "micro-batch")
        stack.enter_context(started(*train, "--name", "later", *operator, cwd=place))
        asked = apart("dashboard", "--operator", "--no-qr", "--server", operator_url)
        take("operator", "Log of job-2", asked.stdout.strip(), log_of="stages")
        with ExitStack() as pages:
            open_pages = [
                (name, pages.enter_context(watched(browser, scheme=name[0], phone=name[1])))
                for name in SCREENS
            ]
            for _, seen in open_pages:
                seen.page.goto(url)
                expect(seen.page.get_by_text("live")).to_be_visible(timeout=PATIENCE_MS)
            server.kill()
            for (scheme, phone), seen in open_pages:
                file = folder / f"not-connected-{_screen(scheme, phone)}.png"
                expect(seen.page.locator(".banner")).to_be_visible(timeout=PATIENCE_MS)
                good &= _take(seen, "No connection to the server", file)
    sys.exit(not good)


def _screen(scheme: str, phone: bool) -> str:
    return f"{scheme}-{'phone' if phone else 'desktop'}"


def _take(seen: Watched, text: str, file: Path) -> bool:
    """Take a screenshot once a text is visible; return whether no problem was found."""
    page = seen.page
    expect(page.get_by_text(text).first).to_be_visible(timeout=PATIENCE_MS)
    page.screenshot(path=file, full_page=True)
    # The browser reports a killed server's connections, whatever the page does.
    complaints = [each for each in seen.complaints if "net::ERR_CONNECTION" not in each]
    found = [*serious_findings(page), *complaints]
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        found.append("it is wider than the screen")
    print(f"{file}: {'; '.join(map(str, found)) or 'nothing amiss'}", flush=True)
    return not found


if __name__ == "__main__":
    main()
