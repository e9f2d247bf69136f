"""The dashboard page in Chromium, on a made-up feed: what it shows and how it behaves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

playwright = pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, Page, expect  # noqa: E402

from benchmarks.dashboard_feed import made_up, serving  # noqa: E402
from tests.web.watched import Watched, serious_findings, watched  # noqa: E402

pytestmark = pytest.mark.usefixtures("pages")

DEVICES = 1000


@pytest.fixture(scope="module")
def url(pages: None) -> Iterator[str]:
    with serving(made_up(DEVICES)) as url:
        yield url


@pytest.fixture
def seen(browser: Browser) -> Iterator[Watched]:
    with watched(browser) as seen:
        yield seen


def open_dashboard(page: Page, url: str) -> None:
    page.goto(url)
    expect(rows(page).first).to_be_visible()


def rows(page: Page):  # type: ignore[no-untyped-def]
    return page.locator(".devices tbody th button")


@pytest.mark.parametrize(
    ("phone", "scheme"),
    [
        pytest.param(False, "light", id="desktop-light", marks=pytest.mark.nightly),
        pytest.param(False, "dark", id="desktop-dark", marks=pytest.mark.nightly),
        pytest.param(True, "light", id="phone-light", marks=pytest.mark.nightly),
        pytest.param(True, "dark", id="phone-dark"),
    ],
)
def test_everyone_can_use_it(browser: Browser, url: str, phone: bool, scheme: str) -> None:
    with watched(browser, scheme=scheme, phone=phone) as seen:
        page = seen.page
        open_dashboard(page, url)
        rows(page).nth(2).click()
        expect(page.locator(".timeline canvas")).to_be_visible()
        assert serious_findings(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == page.viewport_size["width"]  # type: ignore[index]
        assert seen.complaints == []
        assert seen.foreign(url) == []


def test_it_needs_its_token_which_leaves_the_address_and_outlives_a_reload(
    seen: Watched, url: str
) -> None:
    page, bare = seen.page, url.partition("#")[0]
    page.goto(bare)
    expect(page.get_by_role("heading")).to_have_text("This page needs its token")
    expect(page.get_by_text("cleave dashboard")).to_be_visible()
    assert serious_findings(page) == []
    assert not any(asked.startswith("ws") for asked in seen.asked)
    page.evaluate("address => location.assign(address)", bare + "#c=wrong")
    expect(page.get_by_role("heading")).to_have_text("The server refused the token")
    assert serious_findings(page) == []
    page.evaluate("address => location.assign(address)", url)
    expect(rows(page).first).to_be_visible()
    assert "#" not in page.url
    page.reload()
    expect(rows(page).first).to_be_visible()


def test_keys_walk_through_all_devices_and_a_chosen_one_is_shown(seen: Watched, url: str) -> None:
    page = seen.page
    open_dashboard(page, url)
    assert page.locator(".devices table").get_attribute("aria-rowcount") == str(DEVICES + 1)
    assert rows(page).count() < 60  # only rows in sight are in the document
    rows(page).first.focus()
    for key, row in (("ArrowDown", 2), ("End", DEVICES), ("ArrowUp", DEVICES - 1), ("Home", 1)):
        page.keyboard.press(key)
        expect(page.locator(f"tr[aria-rowindex='{row + 1}'] button")).to_be_focused()
        expect(page.locator(f"tr[aria-rowindex='{row + 1}'] button")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(rows(page).first).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("complementary")).to_contain_text("Its last blocks")
    canvas = page.locator(".timeline canvas")
    expect(canvas).to_have_attribute("aria-label", re.compile(r"receiving \d+"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")  # past all the other devices at once, and back to where it was
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("tr[aria-rowindex='3'] button")).to_be_focused()
    page.get_by_role("button", name="Close").click()
    expect(canvas).to_have_count(0)


@pytest.mark.nightly
def test_sorting_and_filtering_and_what_is_told_in_words(seen: Watched, url: str) -> None:
    page = seen.page
    open_dashboard(page, url)
    for words in (
        r"^Loss\. From \d+\.\d+ at step 1 to \d+\.\d+ at step \d+\.$",
        r"^Step time\. In the last steps .* for the server and .* for the devices\.$",
        r"^Rates\. To devices .*, from devices .*\.$",
        r"^What devices do\. In the last \d.* a device received \d.* computed \d.* sent \d",
        r"960 tiles on 960 devices, 4 slabs in depth, \d+ of 15360 blocks back\.$",
    ):
        expect(page.get_by_role("img", name=re.compile(words))).to_be_visible()
    heading = page.get_by_role("columnheader", name="Blocks")
    heading.get_by_role("button").click()
    expect(heading).to_have_attribute("aria-sort", "descending")
    expect(rows(page).first).to_contain_text(f"#{DEVICES}")
    page.get_by_role("searchbox").fill("tablet-7")
    expect(page.get_by_text(re.compile(r"^\d+ of 1.000 devices$"))).to_be_visible()
    for name in rows(page).all_inner_texts():
        assert name.startswith("tablet-7")
    page.get_by_role("button", name="show all").click()
    page.get_by_label("Kind", exact=True).select_option("laptop")
    expect(page.get_by_text(re.compile(r"^250 of"))).to_be_visible()
    assert all(name.startswith("laptop") for name in rows(page).all_inner_texts())


@pytest.mark.nightly
def test_what_devices_did_can_be_pointed_at(seen: Watched, url: str) -> None:
    page = seen.page
    open_dashboard(page, url)
    expect(page.get_by_text("976 more devices are not shown")).to_be_visible()
    canvas = page.locator(".stream canvas")
    width = canvas.bounding_box()["width"]  # type: ignore[index]
    canvas.hover(position={"x": width - 20, "y": 9})  # the second lane of the first row
    expect(canvas).to_have_attribute("title", re.compile(r" computes for .*, from .* ago$"))


@pytest.mark.nightly
def test_losses_are_shown_beside_those_of_the_compared_run(browser: Browser) -> None:
    with serving(made_up(4, compared=True)) as url, watched(browser, scheme="dark") as seen:
        open_dashboard(seen.page, url)
        told = r"^Loss\. From .*The compared run had \d.* largest difference 1\.0e-6\.$"
        expect(seen.page.get_by_role("img", name=re.compile(told))).to_be_visible()
        expect(seen.page.get_by_text("compared run").first).to_be_visible()
        assert serious_findings(seen.page) == []
        assert seen.complaints == []


@pytest.mark.parametrize(
    "phone",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["desktop", "phone"],
)
def test_stages_take_the_place_of_the_plan(browser: Browser, phone: bool) -> None:
    with serving(made_up(40, by_stages=True)) as url, watched(browser, phone=phone) as seen:
        page = seen.page
        open_dashboard(page, url)
        stages = page.get_by_role("region", name="Stages", exact=True)
        expect(stages.get_by_role("rowheader")).to_have_count(24)
        expect(stages.get_by_role("rowheader").last).to_have_text("layer 24 and the loss")
        header = page.get_by_role("rowheader", name="layer 2", exact=True)
        second = stages.get_by_role("row").filter(has=header)  # a phone shows no row of headings
        expect(second).to_contain_text(
            re.compile(r"laptop-2 own, .*(forward|backward); \d+ summed")
        )
        expect(second).to_contain_text(re.compile(r"\d+ of 16\d+ of 16\d+ of 16$"))
        expect(page.get_by_role("heading", name="Plan")).to_have_count(0)
        expect(page.get_by_role("region", name="Network")).to_contain_text("weights250 MB–")
        second.get_by_role("button").first.click()
        expect(page.get_by_role("complementary")).to_contain_text("your own: it may train whole")
        assert not phone or serious_findings(page) == []
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == page.viewport_size["width"]  # type: ignore[index]
        assert seen.complaints == []


DRAWN_AS_STYLED = """async () => {
  const canvas = document.querySelector(".tiling canvas");
  const corner = () =>
    "#" + [...canvas.getContext("2d").getImageData(3, canvas.height - 3, 1, 1).data.slice(0, 3)]
      .map((part) => part.toString(16).padStart(2, "0")).join("");
  const style = getComputedStyle(document.documentElement);
  const wanted = () => ["--accent", "--accent-soft"].map((name) => style.getPropertyValue(name));
  while (!wanted().includes(corner())) await new Promise(requestAnimationFrame);
  return wanted();
}"""


@pytest.mark.nightly
def test_it_follows_the_system_into_the_dark(seen: Watched, url: str) -> None:
    """What is drawn on a canvas too, which no stylesheet reaches."""
    page = seen.page
    open_dashboard(page, url)
    light = page.evaluate(DRAWN_AS_STYLED)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(DRAWN_AS_STYLED) != light


@pytest.mark.nightly
def test_an_empty_server_says_what_to_do(seen: Watched) -> None:
    with serving(made_up(0)) as url:
        seen.page.goto(url)
        expect(seen.page.get_by_role("heading", name="No job")).to_be_visible()
        expect(seen.page.get_by_text("No device is connected.")).to_be_visible()
        expect(seen.page.get_by_text("Nothing has happened yet.")).to_be_visible()
        assert serious_findings(seen.page) == []
        assert seen.complaints == []


@pytest.mark.nightly
def test_when_the_server_goes_the_figures_stay_and_it_comes_back(seen: Watched) -> None:
    page = seen.page
    feed = made_up(5)
    with serving(feed) as url:
        open_dashboard(page, url)
        port = int(url.rpartition(":")[2].partition("/")[0])
    expect(page.locator(".banner")).to_contain_text("No connection to the server. These figures")
    expect(rows(page)).to_have_count(5)
    assert serious_findings(page) == []
    with serving(feed, port=port):
        expect(page.locator(".banner")).to_have_count(0, timeout=30_000)
        expect(page.locator(".top .chip")).to_have_text("live")
