"""Measure how long the dashboard takes to show a reply, with a thousand devices.

    python -m benchmarks.dashboard [--devices 1000] [--updates 30]

A made-up feed (`benchmarks/dashboard_feed.py`) answers over a real WebSocket to the built page in
Chromium. An update lasts from the reply's arrival to the task after the frame that shows it, so it
includes decoding, sorting, layout and painting. It is measured while the page is idle, while its
table is scrolled, and with a device selected.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
from collections.abc import Iterator, Sequence
from importlib.resources import files

from playwright.sync_api import Page, sync_playwright

from benchmarks.dashboard_feed import made_up, serving

CHROMIUM = "/usr/bin/chromium"
LIMIT_MS = 100.0

# A socket's first listener runs before the page's own, so it sees the moment of arrival.
WATCH = """
window.updates = [];
const Plain = WebSocket;
window.WebSocket = class extends Plain {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", (event) => {
      const arrived = performance.now();
      const bytes = event.data.byteLength;
      requestAnimationFrame(() => {
        const channel = new MessageChannel();
        channel.port1.onmessage = () => updates.push([performance.now() - arrived, bytes]);
        channel.port2.postMessage(0);
      });
    });
  }
};
"""
SCROLL = """
() => {
  const table = document.querySelector(".devices");
  const move = () => { table.scrollTop = (table.scrollTop + 300) % 30000; requestAnimationFrame(move); };
  requestAnimationFrame(move);
}
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; return exit code 1 if an update's median takes longer than 100 ms."""
    parser = argparse.ArgumentParser(description="How long the dashboard takes to show a reply.")
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--updates", type=int, default=30, help="measured in each state")
    options = parser.parse_args(arguments)

    feed = made_up(options.devices)
    with serving(feed) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.add_init_script(WATCH)
        page.goto(url)
        page.wait_for_selector(".devices tbody th button")
        _measure(page, 5)  # warm-up: compiles the page and reads the job's history
        resting = _measure(page, options.updates)
        page.click(".devices tbody th button >> nth=3")
        page.wait_for_selector(".timeline canvas")
        chosen = _measure(page, options.updates)
        page.evaluate(SCROLL)
        scrolling = _measure(page, options.updates)
        browser.close()

    print(f"{options.devices} devices, replies of {resting[0][1] / 1e3:.0f} kB")
    medians = [_print(*each) for each in _named(resting, chosen, scrolling)]
    for line in _sizes():
        print(line)
    if max(medians) > LIMIT_MS:
        raise SystemExit(1)


def _named(
    resting: list[list[float]], chosen: list[list[float]], scrolling: list[list[float]]
) -> list[tuple[str, list[float]]]:
    named = {"resting": resting, "a device chosen": chosen, "and scrolling": scrolling}
    return [(name, [update[0] for update in updates]) for name, updates in named.items()]


def _print(name: str, updates_ms: list[float]) -> float:
    median = statistics.median(updates_ms)
    print(
        f"{name:>16}: median {median:5.1f} ms, longest {max(updates_ms):5.1f} ms "
        f"of {len(updates_ms)} updates (limit {LIMIT_MS:.0f} ms)"
    )
    return median


def _measure(page: Page, updates: int) -> list[list[float]]:
    page.evaluate("updates.length = 0")
    # `wait_for_function` would evaluate a string in the page, which the page's policy forbids.
    measured: list[list[float]] = page.evaluate(
        """async (wanted) => {
          while (updates.length < wanted) await new Promise(requestAnimationFrame);
          return updates.slice(0, wanted);
        }""",
        updates,
    )
    return measured


def _sizes() -> Iterator[str]:
    """Yield the sizes of the files that the server sends a browser.

    ONNX Runtime's files, loaded only by devices that run whole layers, also exist compressed.
    """
    assets = files("cleave.server").joinpath("web").joinpath("assets")
    by_name = {entry.name: entry.read_bytes() for entry in assets.iterdir()}
    large = [name for name in by_name if f"{name}.gz" in by_name]
    pages = by_name.keys() - {*large, *(f"{name}.gz" for name in large)}
    packed = sum(len(gzip.compress(by_name[name])) for name in pages)
    yield f"pages, compressed: {packed / 1e3:.1f} kB of 200 kB"
    for name in large:
        whole, packed = len(by_name[name]), len(by_name[f"{name}.gz"])
        yield f"{name}: {whole / 1e6:.1f} MB, compressed {packed / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
