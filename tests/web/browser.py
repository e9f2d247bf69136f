"""Chromium, and a small static server that sends the headers that the PS sends."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, expect, sync_playwright

WEB_CLIENT: Final = Path(__file__).parents[2] / "web_client"

CHROMIUM: Final = shutil.which("chromium") or ""

_CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; "
    "style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


TITLE, ABOUT = "Ada's lab", "We train a small model of Welsh, for the schools of our valley."
"""What a server says to owners of devices."""

OTHER_HOST: Final = "server.test"
"""Another name of this machine, over which plain http is no secure context, as from a phone."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser with WebGPU, in software where there is no GPU."""
    with sync_playwright() as playwright:
        expect.set_options(timeout=120_000)  # 5 s by default, which a busy machine can take
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--enable-unsafe-webgpu",
                f"--host-resolver-rules=MAP {OTHER_HOST} 127.0.0.1",
            ],
        )
        try:
            yield browser
        finally:
            browser.close()


class _Isolated(SimpleHTTPRequestHandler):
    """Sends files of a folder; pages are cross-origin isolated unless told otherwise."""

    def __init__(self, *arguments: Any, isolated: bool, **options: Any) -> None:
        self._isolated = isolated
        super().__init__(*arguments, **options)

    def end_headers(self) -> None:
        if self._isolated:
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Content-Security-Policy", _CONTENT_SECURITY)
        super().end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def serving(folder: Path, *, isolated: bool = True) -> Iterator[str]:
    """Serve a folder on this machine; the URL of its root."""
    handler = partial(_Isolated, directory=str(folder), isolated=isolated)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_lab(folder: Path) -> None:
    """Build the page `web_client/tests/lab`, which tries the kernels, into a new folder."""
    command = ["npm", "run", "--silent", "lab", "--", "--outDir", str(folder), "--emptyOutDir"]
    subprocess.run(command, cwd=WEB_CLIENT, check=True)
