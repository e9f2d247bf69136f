"""Take screenshots of the dashboard in each state of a server, with axe and console findings.

    python -m benchmarks.dashboard_states [--folder dashboard-states]

The states of a real server are: no devices and no job; a job that waits for devices; a job that
trains, compared with the losses of plain PyTorch; the same job after its only device was killed.
Each state is shown in light and dark, on a desktop and on a phone. Exit code 1 if axe finds
something serious or the console has an error. `benchmarks.screenshots` covers many devices.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.integration.processes import PATIENCE_S, started, wait_for_event
from tests.web.browser import chromium
from tests.web.watched import serious_findings, watched

STEPS = 20


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
        _, lines = stack.enter_context(started(*serve, cwd=place))
        address = wait_for_event(lines, "listening")
        url = str(address["dashboard_url"])

        def take(state: str, text: str) -> None:
            nonlocal good
            for scheme in ("light", "dark"):
                for phone in (False, True):
                    name = f"{state}-{scheme}-{'phone' if phone else 'desktop'}.png"
                    good &= _take(browser, url, text, folder / name, scheme=scheme, phone=phone)

        take("empty", "Nothing is being trained.")
        train = ("train", "--model", "opt-tiny", "--steps", "4000", "--batch", "1", "--seq", "16")
        alone = ("--devices", "0", "--name", "plain", "--json")
        with started(*train, *alone, cwd=place) as (_, plain):
            for _ in range(STEPS):
                wait_for_event(plain, "step")
        operator = ("--server", str(address["operator_url"]), "--against", "runs/plain", "--json")
        _, records = stack.enter_context(started(*train, "--method", "tiles", *operator, cwd=place))
        wait_for_event(records, "fleet")
        take("waiting", "Waiting.")
        join = ("join", str(address["url"]), "--json")
        device, _ = stack.enter_context(started(*join))
        for _ in range(STEPS):
            wait_for_event(records, "step")
        take("training", "compared run")
        device.kill()
        wait_for_event(records, "fleet")
        take("lost", "Waiting.")
    sys.exit(not good)


def _take(browser: Browser, url: str, text: str, file: Path, *, scheme: str, phone: bool) -> bool:
    """Take a screenshot once a text is visible; return whether no problem was found."""
    with watched(browser, scheme=scheme, phone=phone) as seen:
        seen.page.goto(url)
        expect(seen.page.get_by_text(text).first).to_be_visible(timeout=PATIENCE_S * 1000)
        seen.page.screenshot(path=file, full_page=True)
        found = [*serious_findings(seen.page), *seen.complaints]
    print(f"{file}: {'; '.join(map(str, found)) or 'nothing amiss'}", flush=True)
    return not found


if __name__ == "__main__":
    main()
