"""Take screenshots of the join page in each state, with axe and console findings.

    python -m benchmarks.join_states [--folder join-states]

A real server trains with the page as its only device. The states are: no link; before the start,
also with a refused amount of data and all that the server sees; working; paused at the limit of
data; stopped; forgetting the device; a used link; no connection, because the server was killed.
Each state is shown in light and dark, on screens of 1440, 390 and 360 pixels, and with letters of
twice the size on 390 pixels. Exit code 1 if axe finds something serious, the console has an error,
or the page is wider than the screen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import Page

from tests.integration.processes import PATIENCE_S, own_address, page_address, started
from tests.integration.processes import wait_for_event as wait
from tests.web.browser import ABOUT, TITLE, chromium
from tests.web.watched import DESKTOP, PHONE, Watched, serious_findings, watched

PATIENCE_MS = 1000 * PATIENCE_S
STEPS = 8
SCREENS = (DESKTOP, PHONE, {"width": 360, "height": 740}, PHONE)
LARGE = len(SCREENS) - 1  # the screen with large letters


def main() -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("join-states"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cleave-benchmark-")))
        seen = stack.enter_context(watched(stack.enter_context(chromium())))
        page = seen.page
        serve = ("serve", "--port", "0", "--data", str(place / "data"), "--json")
        told = ("--title", TITLE, "--about", ABOUT)
        server, lines = stack.enter_context(started(*serve, *told, cwd=place))
        address = wait(lines, "listening")

        def take(state: str) -> None:
            nonlocal good
            good &= _take(seen, folder, state)

        page.goto(address["page_url"].partition("#")[0])
        page.get_by_role("heading").wait_for()
        take("no-link")
        url = page_address(own_address(address))
        page.goto(url)
        page.get_by_text(ABOUT).wait_for()
        take("ready")
        page.get_by_label("data over").fill("abc")
        page.get_by_label("data over").press("Enter")
        page.get_by_text("What does").click()
        take("refused")
        page.get_by_label("data over").fill("100")  # more than this computer moves in a minute
        train = ("train", "--model", "opt-tiny", "--steps", "4000", "--batch", "1", "--seq", "16")
        operator = ("--server", str(address["operator_url"]), "--method", "tiles", "--json")
        _, records = stack.enter_context(started(*train, *operator, cwd=place))
        page.get_by_role("button", name="Start helping").click()
        _reach(page, "working")
        for _ in range(STEPS):
            wait(records, "step")
        page.locator("[data-figure=share]").wait_for(timeout=PATIENCE_MS)
        take("working")
        page.get_by_text("Technical details").click()
        take("details")
        page.get_by_text("Technical details").click()
        page.get_by_label("data over").fill("0.001")
        page.get_by_label("data over").press("Enter")
        _reach(page, "paused")
        take("paused")
        page.get_by_role("button", name="Stop").click()
        _reach(page, "ended")
        take("stopped")
        page.get_by_role("button", name="Settings").click()
        page.get_by_text("What does").click()
        page.get_by_role("button", name="Forget this").click()
        take("forget")
        page.get_by_role("button", name="Forget it").click()
        page.get_by_role("heading", name="is forgotten").wait_for()
        take("forgotten")
        page.evaluate("localStorage.clear()")
        page.goto("about:blank")
        page.goto(url)  # whose code was used
        page.get_by_text("was used already").wait_for()
        take("used-link")
        page.goto(page_address(own_address(address)))
        page.get_by_role("button", name="Start helping").click()
        _reach(page, "working")
        page.wait_for_load_state("networkidle")  # or the browser complains of the icon
        server.kill()
        _reach(page, "waiting")
        take("not-connected")
    sys.exit(not good)


def _reach(page: Page, state: str) -> None:
    page.wait_for_selector(f"[data-state={state}]", timeout=PATIENCE_MS)


def _take(seen: Watched, folder: Path, state: str) -> bool:
    """Take a state's screenshots; return whether no problem was found."""
    page, good = seen.page, True
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        for number, screen in enumerate(SCREENS):
            large = number == LARGE
            page.set_viewport_size(screen)  # type: ignore[arg-type]
            page.evaluate(f"document.documentElement.style.fontSize = '{'200%' * large}'")
            file = folder / f"{state}-{scheme}-{screen['width']}{'-large' * large}.png"
            page.screenshot(path=file, full_page=True)
            found = [*serious_findings(page), *seen.complaints]
            seen.complaints.clear()
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append("it is wider than the screen")
            good &= not found
            print(f"{file}: {'; '.join(found) or 'nothing amiss'}", flush=True)
    return good


if __name__ == "__main__":
    main()
