"""Take the screenshots in docs/: the dashboard of a server that trains on 200 emulated devices.

    python -m benchmarks.screenshots [--folder docs/screenshots]

Server, devices and training are started with a user's commands. Screenshots are taken in Chromium:
light and dark, on a desktop and on a phone.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect

from tests.integration.processes import PATIENCE_S, run, started, wait_for_event
from tests.web.browser import chromium
from tests.web.watched import watched

DEVICES = 200
STEPS = 400
WARM_STEPS = 25  # so that curves have a shape
SAMPLES = 20  # replies shown before the screenshot, so that charts have a shape
COLOURS = 64
PHONE_PX = {"x": 0, "y": 0, "width": 390, "height": 1500}


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the screenshots."""
    parser = argparse.ArgumentParser(description="Take the screenshots in docs/.")
    parser.add_argument("--folder", type=Path, default=Path("docs/screenshots"))
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cleave-pictures-")))
        url = _training(stack, place)
        browser = stack.enter_context(chromium())
        for scheme in ("light", "dark"):
            for phone in (False, True):
                name = f"dashboard-{scheme}-{'phone' if phone else 'desktop'}.png"
                _take(browser, url, folder / name, scheme=scheme, phone=phone)
                print(f"{folder / name}: {(folder / name).stat().st_size / 1000:.0f} kB")


def _training(stack: ExitStack, place: Path) -> str:
    """Start a server, its fleet and a job; return the dashboard's address."""
    data = place / "data"
    serve = ("--port", "0", "--data", str(data), "--ps-gbit", "1", "--grid", "DEU", "--json")
    _, lines = stack.enter_context(started("serve", *serve, cwd=place))
    url = str(wait_for_event(lines, "listening")["dashboard_url"])
    pair = run("pair", "--data", str(data), "--uses", str(DEVICES), "--json")
    emulate = ("--devices", str(DEVICES), "--fleet", "home-mix", "--speed", "20")
    join_url = json.loads(pair.stdout)["url"]
    stack.enter_context(started("emulate", *emulate, "--server", join_url))
    for note in lines:  # the server reports the number of devices at every join
        if str(note.get("text", "")).endswith(f"; {DEVICES} devices"):
            break
    train = (
        "train", "--model", "opt-tiny", "--steps", str(STEPS), "--batch", "2", "--seq", "64",
        "--eval-every", "10", "--method", "tiles",
        "--server", f"@{data / 'operator.url'}", "--json",
    )  # fmt: skip
    _, records = stack.enter_context(started(*train, cwd=place))
    for _ in range(WARM_STEPS):
        wait_for_event(records, "step")
    return url


def _take(browser: Browser, url: str, file: Path, *, scheme: str, phone: bool) -> None:
    with watched(browser, scheme=scheme, phone=phone) as seen:
        page = seen.page
        page.goto(url)
        expect(page.get_by_text(re.compile(rf"^{DEVICES} devices$"))).to_be_visible(
            timeout=PATIENCE_S * 1000
        )
        # Show the busiest devices, and the timeline of the first.
        page.get_by_role("columnheader", name="Blocks").get_by_role("button").click()
        page.locator(".devices tbody th button").first.click()
        expect(page.locator(".timeline canvas")).to_be_visible()
        age = page.locator(".top p.small")  # it changes with every reply
        for _ in range(SAMPLES):
            expect(age).not_to_have_text(age.inner_text())
        if phone:
            picture = page.screenshot(full_page=True, clip=PHONE_PX)  # type: ignore[arg-type]
        else:
            picture = page.screenshot(full_page=True)
        _write_small(picture, file)
        if seen.complaints:
            raise SystemExit(f"the page complained: {seen.complaints}")


def _write_small(picture: bytes, file: Path) -> None:
    """Write a PNG with a palette, a third of the size; a page has few colours."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    # The default method spends the palette on shades of grey, and a warning loses its colour.
    few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)


if __name__ == "__main__":
    main()
