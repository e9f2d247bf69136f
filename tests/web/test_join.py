"""The join page against a real server: a browser as a device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Error, Page

from cleave.server.http.pages import PROJECT_PATH, Pages
from cleave.training.loop.job import JobSpec
from cleave.transport.addresses import app_link
from cleave.transport.http import HttpAnswer, HttpRequest
from tests.integration.processes import (
    PATIENCE_S,
    address,
    losses,
    own_address,
    page_address,
    server,
    stages_job,
    started,
    training,
    training_by_stages,
    training_job,
    wait_for_event,
)
from tests.web.browser import ABOUT, OTHER_HOST, TITLE, WEB_CLIENT

PATIENCE_MS = 1000 * PATIENCE_S
DEVICE = ("--backend", "numpy", "--threads", "1", "--json")
STEPS = 2
Plain = Callable[[JobSpec], list[float]]

pytestmark = pytest.mark.usefixtures("pages")


def pages_of_program(request: HttpRequest) -> HttpAnswer | None:
    """Answer for a server in this process: it has the pages, and says nothing of its project."""
    if request.path == PROJECT_PATH:
        return HttpAnswer(200, (("Content-Type", "application/json"),), b"{}")
    return Pages.of_package().answer(request)


@contextmanager
def visit(browser: Browser, user_agent: str | None = None) -> Iterator[Page]:
    """A phone's page; afterwards: nothing on its console, no request to another place."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, user_agent=user_agent)
    page = context.new_page()
    said: list[str] = []
    lost: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("requestfailed", lambda request: lost.append(f"{request.url}: {request.failure}"))
    page.on("response", lambda got: lost.append(f"{got.url}: {got.status}") if not got.ok else None)
    try:
        yield page
    except BaseException as error:
        error.add_note(f"console: {said}; requests without an answer: {lost}")
        raise
    else:
        assert [line for line in said if not line.startswith("warning")] == [], lost
        assert len(hosts - {""}) == 1  # a worker's blob has no host
    finally:
        context.close()


def join(page: Page, url: str) -> None:
    page.goto(url)
    page.get_by_role("button", name="Start helping").click()
    page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


def figure(page: Page, name: str) -> str:
    return page.locator(f"[data-figure={name}]").text_content() or ""


def await_count(page: Page, name: str, least: int) -> None:
    """Wait until a figure counts so many: it is drawn a few times a second."""
    shown = "document.querySelector(`[data-figure=${name}]`).textContent.replace(/\\D/g, '')"
    page.wait_for_function(
        f"([name, least]) => Number({shown}) >= least", arg=[name, least], timeout=PATIENCE_MS
    )


def another_block(page: Page) -> None:
    """Wait until the device has multiplied one more."""
    before = figure(page, "blocks")
    now = "document.querySelector('[data-figure=blocks]').textContent"
    page.wait_for_function(f"(before) => {now} !== before", arg=before, timeout=PATIENCE_MS)


def forced(url: str, kernel: str) -> str:
    """The page's address with a kernel of our choice."""
    return url.replace("/join#", f"/join?kernel={kernel}#")


def test_a_browser_trains_by_tiles_and_by_stages_and_comes_back_after_a_reload(
    browser: Browser, corpus_file: Path, lasting: dict[str, Any], plain_losses: Plain
) -> None:
    """One page, used by keyboard alone, through all its states. Each state is accessible."""
    nano, to = "opt-nano", ("--server", lasting["operator_url"])
    jobs = []
    # Three products of six linear layers in each of two layers; two graphs for each layer.
    for command, job, counted, least in (
        (training(corpus_file, STEPS, nano), training_job(corpus_file, STEPS, nano), "blocks", 18),
        (training_by_stages(corpus_file, STEPS), stages_job(corpus_file, STEPS), "graphs", 2),
    ):
        expected = plain_losses(job)
        assert len(expected) == STEPS
        jobs.append((command, expected, counted, 2 * least * STEPS))
    with visit(browser) as page:
        page.goto(forced(page_address(own_address(lasting)), "wasm"))
        expect_accessible(page)
        page.get_by_text(f"{TITLE} asks this device to help").wait_for()
        assert page.get_by_text(ABOUT).is_visible()
        page.get_by_role("button", name="Start helping").press("Enter")
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        assert page.locator("[data-kernel]").get_attribute("data-kernel") == "wasm"
        assert page.evaluate("crossOriginIsolated")
        for command, expected, counted, least in jobs:
            with started(*command, *to) as (trainer, lines):
                seen = losses(lines)
                assert trainer.wait(PATIENCE_S) == 0
            assert seen == pytest.approx(expected, rel=1e-4)
            await_count(page, counted, least)
        expect_accessible(page)
        page.wait_for_function("!location.hash.includes('c=')")
        page.reload()  # which goes on without asking
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        page.get_by_text("Details").click()
        assert page.get_by_text("Since you first helped").is_visible()
        expect_accessible(page)
        page.get_by_role("button", name="Stop").press("Space")
        page.wait_for_selector("[data-state=ended]", timeout=PATIENCE_MS)
        expect_accessible(page)
        page.reload()  # after a stop it asks again
        page.get_by_role("button", name="Start helping").click()
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        page.evaluate("(hash) => history.replaceState(null, '', hash)", "#c=ANOTHER")
        page.reload()  # with another code as well
        assert page.get_by_role("heading", name="Help again").is_visible()


@pytest.mark.nightly
def test_a_tab_that_is_closed_in_a_step_holds_nobody_up(
    browser: Browser, corpus_file: Path, tmp_path: Path, plain_losses: Plain
) -> None:
    expected = plain_losses(training_job(corpus_file, STEPS))
    with server(tmp_path) as place:
        second = address(place)
        command = (*training(corpus_file, STEPS), "--server", place["operator_url"])
        with visit(browser) as page, started(*command) as (trainer, steps):
            join(page, forced(place["page_url"], "webgpu"))  # emulated: slow, so caught at work
            another_block(page)
            with started("join", second, *DEVICE, cwd=tmp_path) as (_, lines):
                wait_for_event(lines, "ready")
                page.close()  # in a step that is not over, if this machine is not very fast
                seen = losses(steps)
                assert trainer.wait(PATIENCE_S) == 0
        assert seen == pytest.approx(expected, rel=1e-4)


def accept_the_certificate(page: Page, url: str) -> None:
    """Go to a server whose certificate the browser warns of, and past the warning."""
    with pytest.raises(Error, match="ERR_CERT_AUTHORITY_INVALID"):
        page.goto(url)
    page.locator("#details-button").wait_for(timeout=PATIENCE_MS)  # of the warning
    page.keyboard.type("thisisunsafe")  # Chromium's own way past it, without a mouse
    page.get_by_role("button", name="Start helping").wait_for(timeout=PATIENCE_MS)


def test_a_used_code_and_what_is_missing_are_explained(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    url = page_address(own_address(lasting))
    with visit(browser) as first:
        join(first, url)
    with visit(browser) as second:
        second.goto(url)
        second.get_by_role("button", name="Start helping").click()
        second.get_by_role("heading", name="does not let this device in").wait_for(
            timeout=PATIENCE_MS
        )
        assert "has been used already" in second.get_by_role("status").inner_text()
        expect_accessible(second)
        second.get_by_label("Join code or link").fill(url)  # the same again
        second.get_by_role("button", name="Use this code").click()
        second.get_by_role("button", name="Start helping").click()
        second.get_by_role("heading", name="does not let this device in").wait_for(
            timeout=PATIENCE_MS
        )
        second.goto(url.partition("#")[0] + "#c=ANOTHER")  # reloads nothing
        second.get_by_role("button", name="Start helping").wait_for()
    with visit(browser) as third:
        third.goto(url.partition("#")[0])
        assert third.get_by_role("heading", name="This page needs a join code").is_visible()
        third.goto(forced(url, "abacus"))
        assert "abacus" in third.get_by_role("alert").inner_text()
    with visit(browser) as plain:
        split = urlsplit(url)
        plain.goto(split._replace(netloc=f"{OTHER_HOST}:{split.port}").geturl())
        said = " ".join(plain.locator("form").inner_text().split())
        assert "neither the GPU (WebGPU) nor shared memory" in said


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_comes_back_finds_the_device_again(
    browser: Browser, tmp_path: Path, end: signal.Signals
) -> None:
    with visit(browser) as page:
        data = ("--data", str(tmp_path / "data"), "--json")
        with started("serve", "--port", "0", *data, cwd=tmp_path) as (process, lines):
            place = wait_for_event(lines, "listening")
            join(page, place["page_url"])
            process.send_signal(end)  # stopped as its owner does, or killed
            process.wait(PATIENCE_S)
        page.wait_for_selector("[data-state=waiting]", timeout=PATIENCE_MS)
        port = str(urlsplit(place["page_url"]).port)
        with started("serve", "--port", port, *data, cwd=tmp_path) as (_, lines):
            wait_for_event(lines, "listening")
            page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


@pytest.mark.nightly
def test_stopping_by_the_owners_choice_and_going_on(browser: Browser, tmp_path: Path) -> None:
    with server(tmp_path) as place, visit(browser) as page:
        join(page, place["page_url"])
        page.get_by_label("Stop when this page is not in front").check()
        hide = "(state) => { Object.defineProperty(document, 'visibilityState', "
        hide += "{ value: state, configurable: true }); "
        hide += "document.dispatchEvent(new Event('visibilitychange')); }"
        page.evaluate(hide, "hidden")
        page.wait_for_selector("[data-state=paused]", timeout=PATIENCE_MS)
        assert "not in front" in page.get_by_role("status").inner_text()
        page.evaluate(hide, "visible")
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


@pytest.mark.nightly
def test_a_limit_of_data_pauses_until_there_is_a_higher_one(
    browser: Browser, tmp_path: Path
) -> None:
    with server(tmp_path) as place, visit(browser) as page:
        join(page, place["page_url"])
        page.wait_for_function("document.querySelector('[data-figure=down]').textContent !== '0 B'")
        limit = page.get_by_label("Stop after")
        limit.fill("0.000000001")
        limit.press("Enter")
        page.wait_for_selector("[data-state=paused]", timeout=PATIENCE_MS)
        assert "limit of 1 B today is reached" in page.get_by_role("status").inner_text()
        assert figure(page, "cap").endswith("of 1 B")
        assert "Work continues at midnight" in page.get_by_role("status").inner_text()
        page.get_by_label("Limit the data").uncheck()
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


def test_a_limit_that_is_no_amount_is_refused_and_the_old_one_stays(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    with visit(browser) as page:
        page.goto(page_address(own_address(lasting)))
        limit = page.get_by_label("Stop after")
        assert limit.input_value() == "2"
        assert page.get_by_label("GB", exact=True).input_value() == "day"
        for typed in ("-5", "abc", ""):
            limit.fill(typed)
            limit.press("Enter")
            said = page.get_by_role("alert").inner_text()
            assert f"“{typed}” is not an amount" in said
            assert "stays 2 GB a day" in said
            assert limit.input_value() == "2"
            expect_accessible(page)
        limit.fill("0,5")
        limit.press("Enter")
        page.get_by_role("alert").wait_for(state="detached")
        page.reload()
        assert page.get_by_label("Stop after").input_value() == "0.5"
        assert "stops after 500 MB a day" in page.locator("[data-figure=use]").inner_text()
        page.get_by_label("Stop after").fill("-7")
        page.get_by_role("button", name="Start helping").click()  # it starts with the old limit
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        assert "stays 0.5 GB a day" in page.get_by_role("alert").inner_text()


def test_the_page_installs_as_an_app_and_takes_a_typed_code(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    url = page_address(own_address(lasting))
    bare, _, fragment = url.partition("#")
    with visit(browser) as page:
        page.goto(bare)
        manifest = page.context.new_cdp_session(page).send("Page.getAppManifest")
        assert manifest["errors"] == []
        parsed = manifest["manifest"]
        assert (parsed["startUrl"], parsed["display"]) == (bare, "kStandalone")
        for icon in parsed["icons"]:
            assert page.request.get(icon["url"]).ok
        page.get_by_label("Join code or link").fill(url)
        page.get_by_role("button", name="Use this code").click()
        page.get_by_role("button", name="Start helping").wait_for()
        assert page.url.endswith(fragment)


def expect_accessible(page: Page) -> None:
    """Apply the rules of axe-core to the page as it is, in dark and in light colors."""
    page.evaluate((WEB_CLIENT / "node_modules/axe-core/axe.min.js").read_text())
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found = page.evaluate("axe.run()")["violations"]
        assert [(rule["id"], rule["help"]) for rule in found] == [], scheme


def test_on_android_the_page_leads_into_the_app(browser: Browser, lasting: dict[str, Any]) -> None:
    android = "Mozilla/5.0 (Linux; Android 14; Pixel 8) AppleWebKit/537.36 Chrome/131 Mobile"
    url = page_address(address(lasting))
    with visit(browser, android) as page:
        page.goto(url)
        link = page.get_by_role("link", name="Open in the app")
        assert link.get_attribute("href") == app_link(url)
    with visit(browser) as page:
        page.goto(url)
        page.get_by_role("button", name="Start helping").wait_for()
        assert page.get_by_role("link", name="Open in the app").count() == 0
