"""The page "What limits a fleet" in a browser: what it shows, and how it is used by keyboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.web.browser import serving

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The calculator alone, as the page includes it; nothing may go wrong unseen."""
    for folder in ("javascripts", "stylesheets"):
        shutil.copytree(DOCS / folder, tmp_path / folder)
    (tmp_path / "page").mkdir()
    markup = re.findall(r"^<.*>$", (DOCS / "what-limits-a-fleet.md").read_text(), re.MULTILINE)
    (tmp_path / "page" / "index.html").write_text(
        '<!doctype html><html lang="en"><head><link rel="icon" href="data:,"></head>'
        f'<body class="md-typeset">{"".join(markup)}</body></html>'
    )
    with serving(tmp_path, isolated=False) as url:
        opened = browser.new_page()
        wrong: list[str] = []
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.append(message.text))
        opened.goto(f"{url}page/")
        yield opened
        opened.close()
        assert wrong == []


def test_a_change_is_computed_at_once(page: Page) -> None:
    verdict = page.get_by_role("status")
    expect(verdict).to_contain_text("Stages are fastest")
    expect(page.get_by_role("article")).to_have_count(3)
    page.get_by_label("Uplink, Mbit/s", exact=True).fill("1")
    expect(verdict).to_contain_text("The server alone is fastest")
    page.get_by_label("Memory, GB", exact=True).fill("0.25")
    expect(page.get_by_role("article").last).to_contain_text("Does not fit")


def test_what_cannot_be_is_said(page: Page) -> None:
    devices = page.get_by_label("Devices", exact=True)
    devices.fill("0")
    expect(page.get_by_role("alert")).to_have_text("Devices: give a whole number from 1 to 1,024.")
    expect(devices).to_have_attribute("aria-invalid", "true")
    devices.fill("9")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_sliders_and_choices_work_by_keyboard(page: Page) -> None:
    page.get_by_label("Devices, slider").press("End")
    expect(page.get_by_label("Devices", exact=True)).to_have_value("1024")
    page.get_by_label("LoRA rank (0: none)", exact=True).fill("8")
    tiles = page.get_by_role("article").nth(1)
    expect(tiles).to_contain_text("not adapters")
    page.get_by_text("Ask cleave plan the same").press("Enter")
    expect(page.get_by_label("Commands")).to_contain_text("--lora 8 --fleet fleet.toml")
