"""The coders of the clients: the browser's in Chromium, the Android client's on a JVM.

`benchmarks.coding` measures them beside Python's. What they code is decoded by Python, and must be
what it was.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from playwright.sync_api import Page

from cleave.arrays import DType
from cleave.coding.exponents import decode
from tests.android.jvm import Classes, compile_core
from tests.web.browser import build_lab, chromium, serving

_TRIES = 8  # the first ones are slower: both compile what runs often


@dataclass(frozen=True)
class Coded:
    """An array that a client coded: its bytes then, and seconds of one core."""

    nbytes: int
    encode_s: float
    decode_s: float


class Client(Protocol):
    """Codes a file of elements."""

    def __call__(self, payload: bytes, dtype: DType) -> Coded:
        """Code and decode elements, and return how that went."""
        ...


@contextmanager
def chromium_coder() -> Iterator[Client]:
    """Open the browser's coder; needs Chromium, and `npm ci` in web_client."""
    with ExitStack() as stack:
        lab = Path(stack.enter_context(TemporaryDirectory())) / "lab"
        build_lab(lab)
        url, browser = stack.enter_context(serving(lab)), stack.enter_context(chromium())
        page: Page = browser.new_page()
        page.goto(url)
        page.wait_for_function("'lab' in globalThis")

        def code(payload: bytes, dtype: DType) -> Coded:
            (lab / "elements").write_bytes(payload)
            call = "([dtype, tries]) => lab.coding('elements', dtype, tries)"
            found = page.evaluate(call, [dtype.value, _TRIES])
            coded = base64.b64decode(found["coded"])
            return _checked(payload, dtype, coded, found["encode_s"], found["decode_s"])

        yield code


@contextmanager
def jvm_coder() -> Iterator[Client]:
    """Compile the Android client's coder; needs what `tests.android.jvm.missing` names."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        classes: Classes = compile_core(folder / "java")
        plain, target = folder / "elements", folder / "coded"

        def code(payload: bytes, dtype: DType) -> Coded:
            plain.write_bytes(payload)
            command = classes.run(
                "cleave.core.coding.CodingBenchmark",
                dtype.value, str(plain), str(target), str(_TRIES),
            )  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            coded = target.read_bytes()
            return _checked(payload, dtype, coded, found["encode_s"], found["decode_s"])

        yield code


def _checked(payload: bytes, dtype: DType, coded: bytes, encode_s: float, decode_s: float) -> Coded:
    """Return the figures of what a client coded, once Python has read it."""
    if decode(coded, dtype, len(payload)) != payload:
        raise AssertionError("what a client codes does not come back in Python")
    return Coded(len(coded), encode_s, decode_s)
