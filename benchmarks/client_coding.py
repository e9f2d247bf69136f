"""The clients' compressors: the browser's in Chromium, the Android client's on a JVM.

`benchmarks.coding` compares them with Python's. Python must decode their output to the original.
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
from cleave.coding import decode
from tests.android.jvm import Classes, compile_core
from tests.web.browser import build_lab, chromium, serving

_TRIES = 8  # the first are slower because both compile hot code


@dataclass(frozen=True)
class Coded:
    """An array compressed by a client: its compressed bytes and the seconds of one core."""

    nbytes: int
    encode_s: float
    decode_s: float


class Client(Protocol):
    """Compresses and decompresses elements."""

    def __call__(self, payload: bytes, dtype: DType) -> Coded:
        """Compress and decompress elements, and return the figures."""
        ...


@contextmanager
def chromium_coder() -> Iterator[Client]:
    """Yield the browser's compressor; needs Chromium, and `npm ci` in web_client."""
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
    """Yield the Android client's compressor; needs what `tests.android.jvm.missing` names."""
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
    """Return the figures of a client's output after checking it with Python's decoder."""
    if decode(coded, dtype, len(payload)) != payload:
        raise AssertionError("what a client codes does not come back in Python")
    return Coded(len(coded), encode_s, decode_s)
