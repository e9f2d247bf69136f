"""One browser for all tests of a file, and the pages that the server ships."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from playwright.sync_api import Browser

from tests.integration.processes import server
from tests.web.browser import ABOUT, CHROMIUM, TITLE, WEB_CLIENT, build_lab, chromium


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These first: at the end one worker would wait for the other's longest."""
    items.sort(key=lambda item: Path(__file__).parent not in item.path.parents)


def _needs_node_and_browser() -> None:
    if not CHROMIUM:
        pytest.skip("Chromium is not installed")
    if not shutil.which("npm") or not (WEB_CLIENT / "node_modules").is_dir():
        pytest.skip("the web client's packages are not installed (npm ci in web_client)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; closed before other files' tests, which may run event loops of their own.

    Playwright's synchronous interface leaves an event loop running in the test's thread.
    """
    _needs_node_and_browser()
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server for all tests that need none of their own: its first job takes seconds to begin."""
    options = ("--title", TITLE, "--about", ABOUT)
    with server(tmp_path_factory.mktemp("lasting"), *options) as place:
        yield place


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The pages, built where servers look for them, unless they are there and new.

    One worker at a time: a build would take away the pages that another worker's server shows.
    """
    _needs_node_and_browser()
    where = "import cleave.server, pathlib; print(pathlib.Path(cleave.server.__file__).parents[2])"
    imported = subprocess.run(
        [sys.executable, "-c", where],
        cwd=tmp_path_factory.getbasetemp(), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if Path(imported).resolve() != WEB_CLIENT.parent.resolve():
        pytest.fail(
            f"servers run the code and the pages in {imported}, but these tests are in "
            f"{WEB_CLIENT.parent}: set PYTHONPATH to that folder, or unset it"
        )
    with FileLock(tmp_path_factory.getbasetemp().parent / "pages.lock"):
        subprocess.run(["make", "--silent", "web"], cwd=WEB_CLIENT.parent, check=True)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The built page that tries kernels and graphs; the first worker builds it for all."""
    _needs_node_and_browser()
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent  # which outlives a run of one process
    with FileLock(shared / "lab.lock"):
        if not (shared / "lab").is_dir():
            build_lab(shared / "lab")
    return shared / "lab"
