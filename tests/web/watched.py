"""A page that is watched: what it says on its console, what it asks for, and what axe finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page

from tests.web.browser import WEB_CLIENT

DESKTOP: Final = {"width": 1440, "height": 900}
PHONE: Final = {"width": 390, "height": 844}

_SERIOUS: Final = ("serious", "critical")


@dataclass(slots=True)
class Watched:
    """A page and what it did.

    Attributes:
        complaints: errors and warnings on its console, and exceptions.
        asked: every URL that it asked for.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def foreign(self, url: str) -> list[str]:
        """What it asked for that is of another host than `url`."""
        host = urlsplit(url).netloc
        return [asked for asked in self.asked if urlsplit(asked).netloc not in ("", host)]


@contextmanager
def watched(
    browser: Browser, *, scheme: str = "light", phone: bool = False, **options: Any
) -> Iterator[Watched]:
    """A new page in a context of its own.

    Args:
        scheme: `light` or `dark`, as the system would say.
        phone: a phone's screen, to be touched.
        options: of `Browser.new_context`.
    """
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,  # type: ignore[arg-type]
        color_scheme=scheme,  # type: ignore[arg-type]
        has_touch=phone,
        is_mobile=phone,
        **options,
    )
    seen = Watched(context.new_page())
    page = seen.page

    def heard(said: ConsoleMessage) -> None:
        if said.type in ("error", "warning"):
            seen.complaints.append(f"{said.text} ({said.location['url']})")

    page.on("console", heard)
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: seen.asked.append(request.url))
    page.on("websocket", lambda socket: seen.asked.append(socket.url))
    try:
        yield seen
    finally:
        context.close()


def serious_findings(page: Page) -> list[str]:
    """What axe-core finds on the page as it is now, of the two gravest kinds."""
    page.evaluate((WEB_CLIENT / "node_modules/axe-core/axe.min.js").read_text())
    found = page.evaluate("axe.run()")
    return [
        f"{violation['id']}: {violation['help']} {[node['target'] for node in violation['nodes']]}"
        for violation in found["violations"]
        if violation["impact"] in _SERIOUS
    ]
