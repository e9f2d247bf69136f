"""The join page against a real server: a browser as a device."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    apart,
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
def visit(
    browser: Browser, user_agent: str | None = None, *, connected: bool = True
) -> Iterator[Page]:
    """A phone's page; afterwards: nothing on its console, no request to another place.

    Unless it stays `connected`, its console may tell of requests without an answer.
    """
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
        faults = [line for line in said if not line.startswith("warning")]
        assert [line for line in faults if connected or "net::ERR_" not in line] == [], lost
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
        page.get_by_text(f"{TITLE} asks this computer to help").wait_for()
        expect_accessible(page)
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
        page.get_by_text("Technical details").click()
        assert page.get_by_text("since you first helped").is_visible()
        expect_accessible(page)
        page.get_by_role("button", name="Stop").press("Space")
        page.wait_for_selector("[data-state=ended]", timeout=PATIENCE_MS)
        expect_accessible(page)
        page.reload()  # after a stop it asks again
        page.get_by_role("button", name="Start helping").click()
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        page.evaluate("(hash) => history.replaceState(null, '', hash)", "#c=ANOTHER")
        page.reload()  # with another code as well
        page.get_by_role("heading", name="Help again").wait_for()


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
    with visit(browser) as first, visit(browser) as early:
        early.clock.install()
        early.goto(url)
        early.get_by_role("button", name="Start helping").wait_for()
        join(first, url)
        early.clock.fast_forward(10_000)  # it asks every 10 seconds while its owner reads
        early.get_by_role("heading", name="This link was used already").wait_for()
    with visit(browser) as second:
        second.goto(url)  # it is checked before the start
        used = second.get_by_role("heading", name="This link was used already")
        used.wait_for(timeout=PATIENCE_MS)
        assert f"Ask {TITLE} for a new one" in second.locator("main").inner_text()
        expect_accessible(second)
        second.get_by_label("Link or code").fill(url)  # the same again
        second.get_by_role("button", name="Use this link").click()
        used.wait_for(timeout=PATIENCE_MS)
        second.goto(url.partition("#")[0] + "#c=ANOTHER")  # reloads nothing
        second.get_by_role("heading", name="This link does not work").wait_for()
        second.get_by_label("Link or code").fill(page_address(own_address(lasting)))
        second.get_by_role("button", name="Use this link").click()
        second.get_by_role("button", name="Start helping").wait_for()
    with visit(browser) as third:
        third.goto(url.partition("#")[0])
        third.get_by_role("heading", name="Open the link that you were sent").wait_for()
        third.goto(forced(url, "abacus"))
        assert "abacus" in third.get_by_role("alert").inner_text()
    with visit(browser) as plain:
        fresh = urlsplit(page_address(own_address(lasting)))
        plain.goto(fresh._replace(netloc=f"{OTHER_HOST}:{fresh.port}").geturl())
        plain.get_by_text("What does").click()
        said = " ".join(plain.locator("form").inner_text().split())
        assert "This connection is not encrypted" in said


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
        page.get_by_label("this page is not in front").check()
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
        limit = page.get_by_label("data over")
        limit.fill("0.001")  # the tests of a new device need more
        limit.press("Enter")
        page.wait_for_selector("[data-state=paused]", timeout=PATIENCE_MS)
        assert "limit of 1 MB a day is reached" in page.get_by_role("status").inner_text()
        assert figure(page, "cap").endswith("of 1 MB")
        assert "Helping continues at midnight" in page.get_by_role("status").inner_text()
        page.get_by_label("Limit the data").uncheck()
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


def test_a_limit_that_is_no_amount_is_refused_and_the_old_one_stays(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    with visit(browser) as page:
        page.goto(page_address(own_address(lasting)))
        limit = page.get_by_label("data over")
        limit.wait_for()
        assert limit.input_value() == "2"
        assert page.get_by_label("GB", exact=True).input_value() == "day"
        for typed, why in (
            ("-5", "“-5” is not an amount"),
            ("abc", "“abc” is not an amount"),
            ("", "No amount is entered"),
            ("99999", "99999 GB would be no limit"),
        ):
            limit.fill(typed)
            limit.press("Enter")
            said = page.get_by_role("alert").inner_text()
            assert why in said
            assert "stays 2 GB a day" in said
            expect_accessible(page)
        limit.fill("0,5")
        limit.press("Enter")
        page.get_by_role("alert").wait_for(state="detached")
        page.reload()
        limit.wait_for()
        assert limit.input_value() == "0.5"
        assert "stops after 500\u00a0MB a day" in page.locator("[data-figure=use]").inner_text()
        limit.fill("-7")
        assert "stays 500 MB a day" in page.get_by_role("alert").inner_text()
        limit.fill("3")
        start = page.get_by_role("button", name="Start helping")
        limit.press("Tab")
        for refused in ("-7", ""):
            limit.fill(refused)
            start.click()  # which starts with the limit of before
            page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
            assert figure(page, "cap").endswith("of 3 GB")
            page.get_by_role("button", name="Stop").press("Enter")
            page.wait_for_selector("[data-state=ended]", timeout=PATIENCE_MS)
            page.wait_for_function("() => document.activeElement.tagName === 'H1'")
            page.get_by_role("button", name="Settings").click()
        assert page.get_by_role("alert").count() == 0


def test_a_device_without_work_is_ready_and_does_not_help(
    browser: Browser, tmp_path: Path, corpus_file: Path
) -> None:
    """The server tests a new device, with megabytes: that is no help, and takes no minutes."""
    with server(tmp_path) as place, visit(browser) as page:
        page.goto(page_address(own_address(place)))
        page.get_by_text("They did not say who they are").wait_for()
        assert page.get_by_text("There is no training at the moment").is_visible()
        page.get_by_role("button", name="Start helping").click()
        page.get_by_role("heading", name="This computer is ready").wait_for(timeout=PATIENCE_MS)
        status = page.get_by_role("status").filter(has_text="trains nothing at the moment")
        status.wait_for(timeout=PATIENCE_MS)
        assert figure(page, "minutes").strip() == "0 min"
        assert figure(page, "blocks").strip() == "0"
        assert page.locator("[data-figure=use]").count() == 0
        command = training(corpus_file, STEPS, "opt-nano")
        with started(*command, "--server", place["operator_url"]) as (trainer, lines):
            wait_for_event(lines, "step")
            page.get_by_role("heading", name="This computer is helping").wait_for(
                timeout=PATIENCE_MS
            )
            assert trainer.wait(PATIENCE_S) == 0
        page.get_by_role("heading", name="Training finished").wait_for(timeout=PATIENCE_MS)
        assert figure(page, "share") == "You did nearly all of today's training."
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("heading", name="Stopped. Thank you!").wait_for(timeout=PATIENCE_MS)


def test_a_device_is_told_that_the_training_runs_without_it(
    browser: Browser, tmp_path: Path, corpus_file: Path
) -> None:
    with server(tmp_path) as place, visit(browser) as page:
        join(page, page_address(own_address(place)))
        command = (*training(corpus_file, 10**6, "opt-nano"), "--method", "local")
        with started(*command, "--server", place["operator_url"]) as (_, lines):
            wait_for_event(lines, "step")
            page.get_by_text("This training runs without helpers").wait_for(timeout=PATIENCE_MS)
            assert page.get_by_role("heading", name="No work for this computer").is_visible()


def test_a_strangers_phone_is_told_that_a_job_by_stages_has_no_work_for_it(
    browser: Browser, tmp_path: Path, corpus_file: Path
) -> None:
    """It waited for the whole run, with its screen on, and used 26 MB for a test."""
    with server(tmp_path) as place, visit(browser) as page:
        command = (*training(corpus_file, STEPS, "opt-nano"), "--method", "stages")
        with started(*command, "--server", place["operator_url"]) as (_, lines):
            wait_for_event(lines, "start")
            page.goto(place["page_url"])
            page.get_by_text("gives work only to devices that belong to the sender").wait_for()
            page.get_by_role("button", name="Start helping").press("Enter")
            page.get_by_role("heading", name="No work for this computer").wait_for()
            assert "You may close this page" in page.get_by_role("status").inner_text()
            expect_accessible(page)
            page.get_by_text("Technical details").click()
            assert figure(page, "down").strip() == "0 B"
            page.reload()
            page.get_by_role("heading", name="No work for this computer").wait_for()
            apart("jobs", "stop", "job-1", "--server", place["operator_url"])
            # It connects by itself, and is ready for the next job.
            page.get_by_role("heading", name="This computer is ready").wait_for(timeout=PATIENCE_MS)


def test_a_revoked_device_is_told_why_and_its_link_is_not_blamed(
    browser: Browser, tmp_path: Path
) -> None:
    with visit(browser) as page:
        data = ("--data", str(tmp_path / "data"))
        with started("serve", "--port", "0", *data, "--json", cwd=tmp_path) as (_, lines):
            place = wait_for_event(lines, "listening")
            headings = "window.headings = []; new MutationObserver(() => window.headings.push("
            headings += "document.querySelector('h1')?.textContent ?? '')).observe(document, "
            headings += "{ childList: true, subtree: true, characterData: true });"
            join(page, place["page_url"])
            page.evaluate(headings)
            revoked = apart("devices", "revoke", "1", "--reason", "sold", *data)
            assert revoked.returncode == 0, revoked.stderr
            page.get_by_text("The reason: Sold.").wait_for(timeout=PATIENCE_MS)
            assert page.get_by_role("heading", name="may not help any more").is_visible()
            assert not [said for said in page.evaluate("headings") if "link" in said]


def test_a_start_without_a_server_is_tried_again_until_it_is_back(
    browser: Browser, tmp_path: Path
) -> None:
    with visit(browser, connected=False) as page:
        data = ("--data", str(tmp_path / "data"), "--json")
        with started("serve", "--port", "0", *data, cwd=tmp_path) as (process, lines):
            place = wait_for_event(lines, "listening")
            page.goto(place["page_url"])
            page.get_by_role("button", name="Start helping").wait_for()
            process.kill()
            process.wait(PATIENCE_S)
        port = str(urlsplit(place["page_url"]).port)
        page.get_by_role("button", name="Start helping").click()
        page.get_by_role("heading", name=f"No answer from 127.0.0.1:{port}").wait_for()
        assert "Trying again in" in page.get_by_role("status").inner_text()
        expect_accessible(page)
        with started("serve", "--port", port, *data, cwd=tmp_path) as (_, lines):
            wait_for_event(lines, "listening")
            with suppress(Error):  # by then it may have tried by itself
                page.get_by_role("button", name="Try again now").click(timeout=3000)
            page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
            page.context.set_offline(True)
            page.get_by_role("heading", name="This computer is offline").wait_for()
            page.context.set_offline(False)
            page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)


def test_a_second_tab_takes_over_and_the_first_learns_when_it_is_closed(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    with visit(browser) as first:
        join(first, page_address(own_address(lasting)))
        first.wait_for_function("!location.hash.includes('c=')")
        second = first.context.new_page()
        second.goto(first.url)
        second.get_by_role("button", name="Start helping").click()
        second.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        first.get_by_role("heading", name="helps in another tab").wait_for(timeout=PATIENCE_MS)
        second.close()
        first.get_by_role("heading", name="The other tab has stopped").wait_for()


def test_a_browser_forgets_the_server_on_demand(browser: Browser, lasting: dict[str, Any]) -> None:
    with visit(browser) as page:
        join(page, page_address(own_address(lasting)))
        page.get_by_role("button", name="Stop").click()
        page.wait_for_selector("[data-state=ended]", timeout=PATIENCE_MS)
        page.get_by_role("button", name="Settings").press("Enter")
        page.wait_for_function("() => document.activeElement.tagName === 'H1'")
        page.get_by_text("What does").click()
        page.get_by_role("button", name="Forget this computer").click()
        page.get_by_role("button", name="Keep it").click()
        page.get_by_role("button", name="Forget this computer").click()
        expect_accessible(page)
        page.get_by_role("button", name="Forget it").click()
        page.get_by_role("heading", name="This computer is forgotten").wait_for()
        # The limit of today does not start anew.
        assert page.evaluate("Object.keys(localStorage)") == ["cleave.data"]


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
        page.get_by_label("Link or code").fill(url)
        page.get_by_role("button", name="Use this link").click()
        page.get_by_role("button", name="Start helping").wait_for()
        assert page.url.endswith(fragment)


def expect_accessible(page: Page) -> None:
    """Apply the rules of axe-core to the page as it is, in dark and in light colors."""
    page.evaluate((WEB_CLIENT / "node_modules/axe-core/axe.min.js").read_text())
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        found = page.evaluate("axe.run()")["violations"]
        assert [(rule["id"], rule["help"]) for rule in found] == [], scheme


ANDROID = "Mozilla/5.0 (Linux; Android 14; Pixel 8) AppleWebKit/537.36 Chrome/131 Mobile"


def test_on_android_a_link_of_whoever_has_the_app_leads_into_it(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    url = page_address(address(lasting))
    with visit(browser, ANDROID) as page:
        page.goto(f"{url}&app=1")
        link = page.get_by_role("link", name="Open in the app")
        link.wait_for()
        assert link.get_attribute("href") == app_link(f"{url}&app=1")
    for user_agent, opened in ((ANDROID, url), (None, f"{url}&app=1")):
        with visit(browser, user_agent) as page:
            page.goto(opened)
            page.get_by_role("button", name="Start helping").wait_for()
            assert page.get_by_role("link", name="Open in the app").count() == 0


def test_a_phone_at_the_bare_address_is_shown_how_to_help(
    browser: Browser, lasting: dict[str, Any]
) -> None:
    with visit(browser, ANDROID) as page:
        page.goto(page_address(address(lasting)).partition("/join")[0])
        page.wait_for_url("**/join")
        page.get_by_role("heading", name="Open the link that you were sent").wait_for()
        page.goto(page_address(address(lasting)))
        page.get_by_role("heading", name="Lend this tablet").wait_for()  # Chromium says: no phone
        assert page.get_by_label("this page is not in front").is_checked()
        assert page.title() == f"Lend this tablet to {TITLE}"
