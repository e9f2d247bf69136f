"""The server's web pages: the dashboard at `/`, the join page at `/join`, and their assets.

The build compiles `web_client/` into `cleave/server/web/`. At startup, the server reads all built
files into memory. Requests can reach only the built files, and `/project.json`, which describes the
project to device owners on the join page.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from cleave.server.access import KeyState
from cleave.server.api.overview import ServerFacts, Training
from cleave.server.store.store import StoreError
from cleave.transport.http import NO_SNIFFING, HttpAnswer, HttpRequest

_PAGES: Final = {"index.html": "/", "join.html": "/join"}
"""URL path of each page, by file name. The URL path of any other file is its path under `web/`."""

_MANIFEST: Final = "join.webmanifest"

_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "wasm": "application/wasm",
    "webmanifest": "application/manifest+json",
}
_PACKED: Final = ("ico", "png")  # file types that are already compressed
_GZIP_LEAST_BYTES: Final = 512
_ZIPPED: Final = ".gz"
"""Suffix of files that the build compresses, because compression at startup would take long."""

_FOR_EVER: Final = "public, max-age=31536000, immutable"  # a changed asset gets a new file name
_ASK_AGAIN: Final = "no-cache"
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

# The opener and embedder policies isolate a page cross-origin, so its workers can share memory.
# Over plain HTTP from another machine, browsers ignore the opener policy, and Chromium warns of it.
_ISOLATED: Final = ("Cross-Origin-Opener-Policy", "same-origin")
_SAME_SITE: Final = (
    ("Cross-Origin-Embedder-Policy", "require-corp"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    NO_SNIFFING,
    ("Referrer-Policy", "no-referrer"),
)

_NOT_BUILT: Final = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Cleave: pages not built</title>
</head>
<body>
<h1>This server has no web pages</h1>
<p>It runs from a copy of Cleave whose pages were not built. Its operator can get the pages in
one of two ways, and then restart the server:</p>
<ul>
<li>with Node.js: <code>make web</code> in the folder of that copy;</li>
<li>install the wheel that <code>make package</code> puts into <code>dist</code>.</li>
</ul>
<p>Without pages, a machine with Python joins: <code>pip install ./cleave_train-*.whl</code>, or
<code>pip install .</code> in a copy of Cleave, then
<code>cleave join 'THE ADDRESS OF THIS PAGE'</code>, including everything after its <code>#</code>.
(The package <code>cleave</code> on PyPI is another project.)
<code>cleave status</code> shows what the fleet is doing.</p>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class _File:
    content_type: str
    cache: str
    body: bytes
    zipped: bytes | None


class Pages:
    """The web pages and their assets, served from memory.

    `built` maps the path of each built file under `web/` to its content. If a page is missing,
    `complete` is False, and `/` and `/join` explain how to build the pages. Unless empty, `title`
    names the person or project that asks for devices, and the join page on a phone's home screen.
    """

    def __init__(self, built: Mapping[str, bytes], title: str = "") -> None:
        self.complete = all(page in built for page in _PAGES)
        if not self.complete:
            built = dict.fromkeys(_PAGES, _NOT_BUILT)
        if title and _MANIFEST in built:
            manifest = json.loads(built[_MANIFEST]) | {"name": title, "short_name": title}
            built = {**built, _MANIFEST: json.dumps(manifest).encode()}
        self._files = {
            _PAGES.get(name, f"/{name}"): _entry(name, body, built.get(name + _ZIPPED))
            for name, body in built.items()
            if not name.endswith(_ZIPPED)
        }

    @classmethod
    def of_package(cls, title: str = "") -> Pages:
        """Return the pages that were built into the installed package, for a project's title."""
        folder = files("cleave.server").joinpath("web")
        return cls(dict(_read(folder, "")) if folder.is_dir() else {}, title)

    def answer(self, request: HttpRequest) -> HttpAnswer | None:
        """Return the file at a request's path as a response; None if the path is unknown."""
        file = self._files.get(request.path)
        if file is None:
            return None
        headers = [
            ("Content-Type", file.content_type),
            ("Cache-Control", file.cache),
            ("Content-Security-Policy", _policy(request)),
            *_SAME_SITE,
        ]
        if request.secure or request.trusted:
            headers.append(_ISOLATED)
        body = file.body
        if file.zipped is not None:
            headers.append(("Vary", "Accept-Encoding"))
            if takes_gzip(request.accept_encoding):
                headers.append(("Content-Encoding", "gzip"))
                body = file.zipped
        return HttpAnswer(200, tuple(headers), body)


def takes_gzip(accept_encoding: str) -> bool:
    """Return whether a client that sends this `Accept-Encoding` header accepts gzip."""
    for part in accept_encoding.lower().split(","):
        coding, _, parameters = part.partition(";")
        if coding.strip() in ("gzip", "x-gzip"):
            return re.fullmatch(r"\s*q\s*=\s*0(?:\.0*)?\s*", parameters) is None
    return False


def _policy(request: HttpRequest) -> str:
    """Return a Content-Security-Policy that restricts a page to this server.

    The policy names the WebSocket URL, because some browsers do not apply `'self'` to WebSockets.
    It allows `blob:` URLs for workers; see web_client/src/kernels/browser.ts.
    """
    scheme = "wss" if request.secure else "ws"
    named = f" {scheme}://{request.host}" if _HOST.fullmatch(request.host) else ""
    return (
        "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; "
        f"style-src 'self'; img-src 'self' data:; connect-src 'self'{named}; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _entry(name: str, body: bytes, zipped: bytes | None = None) -> _File:
    suffix = name.rpartition(".")[2].lower()
    if zipped is None and suffix not in _PACKED and len(body) >= _GZIP_LEAST_BYTES:
        zipped = gzip.compress(body, mtime=0)
    return _File(
        _TYPES.get(suffix, "application/octet-stream"),
        _FOR_EVER if name.startswith("assets/") else _ASK_AGAIN,
        body,
        zipped if zipped is not None and len(zipped) < len(body) else None,
    )


def _read(folder: Traversable, under: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{under}{entry.name}/")
        else:
            yield f"{under}{entry.name}", entry.read_bytes()


PROJECT_PATH: Final = "/project.json"

PROJECT_FRESH_S: Final = 1.0
"""Time for which the counted work is reused, because anybody may ask, and counting takes time."""


class Project:
    """Handles requests for `/project.json`, which anybody may read.

    A browser may send its join code or credential: `Authorization: Bearer KEY`. Then the response
    also contains what the key is worth: `key`, `own` and `reason`. A key is never part of a URL,
    because URLs are logged.

    Args:
        facts: facts about the server. The response contains `title` and `about`.
        flops_by_hour: returns the work of all devices in the last hours, as
            `Store.flops_by_hour` does. A page computes its device's share of a day from it.
        training: returns the state of the training, which the response contains as `training`.
        key_state: returns what a key from an IP address is worth, as `Access.key_state` does.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        facts: ServerFacts,
        flops_by_hour: Callable[[], list[tuple[int, float]]],
        training: Callable[[], Training],
        key_state: Callable[[str, str], KeyState],
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._flops_by_hour = flops_by_hour
        self._training = training
        self._key_state = key_state
        self._clock = clock
        self._made_s = -math.inf
        self._hours: list[tuple[int, float]] = []

    def answer(self, request: HttpRequest) -> HttpAnswer:
        """Return the project as a JSON object."""
        if self._clock() - self._made_s >= PROJECT_FRESH_S:
            self._made_s = self._clock()
            try:
                self._hours = self._flops_by_hour()
            except StoreError:  # the rest is still worth showing, and operators see the error
                self._hours = []
        project: dict[str, object] = {
            "title": self._facts.title,
            "about": self._facts.about,
            "training": asdict(self._training()),
            "flops_by_hour": self._hours,
        }
        scheme, _, key = request.authorization.partition(" ")
        if scheme == "Bearer" and key:
            worth = self._key_state(key, request.address)
            project |= {"key": worth.state, "own": worth.own, "reason": worth.reason}
        headers = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
        return HttpAnswer(200, (*headers, NO_SNIFFING), json.dumps(project).encode())
