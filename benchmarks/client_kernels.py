"""The kernels of the browser and Android clients, for other benchmarks.

Each kernel runs in a helper that stays open between products: the page `web_client/tests/lab` in
Chromium, or a JVM. Column-major matrices are sent transposed, as to devices.
"""

from __future__ import annotations

import base64
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, Final

from cleave import arrays
from cleave.arrays import Buffer, DType
from tests.android import jvm

if TYPE_CHECKING:
    from playwright.sync_api import Page

Multiply = Callable[[Buffer, Buffer, Buffer], None]

BROWSER: Final = ("js", "wasm", "webgpu")
JAVA: Final = ("java 4x4", "java 1x8")
"""The kernel's inner loops, in the order of their enum. A phone uses the faster one."""

CLIENT_KERNELS: Final = (*BROWSER, *JAVA)
THREADS: Final = 2

_DTYPES: Final = (DType.FP32, DType.BF16, DType.FP16)  # in the order of Java's enum


@dataclass(frozen=True, slots=True)
class Opened:
    """The opened kernels.

    Attributes:
        kernels: the kernels by name.
        missing: why each missing kernel is missing, by name.
    """

    kernels: Mapping[str, Multiply]
    missing: Mapping[str, str]


@contextmanager
def client_kernels(names: Iterable[str] = CLIENT_KERNELS) -> Iterator[Opened]:
    """Open the named kernels; yield them with the reasons why others are missing."""
    kernels: dict[str, Multiply] = {}
    missing: dict[str, str] = {}
    wanted = list(names)
    with ExitStack() as stack:
        if web := [name for name in wanted if name in BROWSER]:
            _open_browser(stack, web, kernels, missing)
        if java := [name for name in wanted if name in JAVA]:
            _open_java(stack, java, kernels, missing)
        yield Opened(kernels, missing)


def _open_browser(
    stack: ExitStack, names: list[str], kernels: dict[str, Multiply], missing: dict[str, str]
) -> None:
    try:
        from tests.web.browser import CHROMIUM, WEB_CLIENT, build_lab, chromium, serving
    except ImportError as error:
        missing.update(dict.fromkeys(names, f"{error}; install the extra named dev"))
        return
    if not CHROMIUM:
        missing.update(dict.fromkeys(names, "Chromium is not installed; apt-get install chromium"))
        return
    if not shutil.which("npm") or not (WEB_CLIENT / "node_modules").is_dir():
        reason = "the web client's packages are not installed; run npm ci in web_client"
        missing.update(dict.fromkeys(names, reason))
        return
    lab = Path(stack.enter_context(TemporaryDirectory())) / "lab"
    build_lab(lab)
    url, browser = stack.enter_context(serving(lab)), stack.enter_context(chromium())
    page = browser.new_page()
    page.goto(url)
    page.wait_for_function("'lab' in globalThis")
    if "webgpu" in names and not page.evaluate("lab.gpu()"):
        missing["webgpu"] = "Chromium finds no GPU adapter"
    present = [name for name in names if name not in missing]
    kernels.update(stack.enter_context(page_kernels(page, lab, present)))


@contextmanager
def page_kernels(page: Page, lab: Path, names: Iterable[str]) -> Iterator[dict[str, Multiply]]:
    """Yield kernels of an open page.

    Args:
        page: the built page `web_client/tests/lab`.
        lab: folder that the page was loaded from; operands are written to a new folder in it.
        names: kernel names from `BROWSER`.
    """
    with TemporaryDirectory(dir=lab) as folder:
        yield {name: _InPage(page, Path(folder), name) for name in names}


def _open_java(
    stack: ExitStack, names: list[str], kernels: dict[str, Multiply], missing: dict[str, str]
) -> None:
    if reason := jvm.missing():
        missing.update(dict.fromkeys(names, reason))
        return
    folder = Path(stack.enter_context(TemporaryDirectory())) / "java"
    kernels.update(stack.enter_context(java_kernels(jvm.compile_core(folder), names)))


@contextmanager
def java_kernels(
    classes: jvm.Classes, names: Iterable[str] = JAVA
) -> Iterator[dict[str, Multiply]]:
    """Yield kernels of a new JVM, by the names of their inner loops."""
    command = classes.run("cleave.core.kernels.KernelServer", str(THREADS))
    # Leaving the block closes standard input, which ends the program, and waits for it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        streams = process.stdin, process.stdout
        yield {name: _InJava(*streams, JAVA.index(name)) for name in names}


@dataclass(frozen=True, slots=True)
class _InPage:
    """A kernel of the page, which reads operands from files and answers in base64."""

    page: Page
    folder: Path
    name: str

    def __call__(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        sides = [self._stored(x, file) for x, file in ((a, "a.bin"), (b, "b.bin"))]
        call = "(a) => lab.multiply(...a)"
        answer = self.page.evaluate(call, [self.name, THREADS, *sides, out.dtype.value])
        _place(base64.b64decode(answer), out)

    def _stored(self, operand: Buffer, file: str) -> dict[str, Any]:
        stored, transposed = _as_stored(operand)
        (self.folder / file).write_bytes(stored.pack())
        rows, columns = stored.shape
        dtype = stored.dtype.value
        shape = {"rows": rows, "columns": columns, "dtype": dtype, "transposed": transposed}
        return {"file": f"{self.folder.name}/{file}", **shape}


@dataclass(frozen=True, slots=True)
class _InJava:
    """A kernel of a JVM, with the input and output format of `KernelServer`."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    loop: int

    def __call__(self, a: Buffer, b: Buffer, out: Buffer) -> None:
        (left, left_turned), (right, right_turned) = _as_stored(a), _as_stored(b)
        dtypes = _DTYPES.index(a.dtype), _DTYPES.index(out.dtype)
        self.stdin.write(struct.pack(">5i", self.loop, *dtypes, left_turned, right_turned))
        for matrix in (left, right):
            self.stdin.write(struct.pack(">3i", *matrix.shape, matrix.nbytes))
            self.stdin.write(matrix.pack())
        self.stdin.flush()
        (length,) = struct.unpack(">i", self._read(4))
        _place(self._read(length), out)

    def _read(self, length: int) -> bytes:
        data = self.stdout.read(length)
        if len(data) != length:
            raise ConnectionError("the JVM that multiplies has ended; what it said is above")
        return data


def _as_stored(operand: Buffer) -> tuple[Buffer, bool]:
    """Return the matrix with contiguous rows, and whether the operand is its transpose."""
    by_rows, by_columns = operand.array.strides
    return (operand.T, True) if by_rows < by_columns else (operand, False)


def _place(data: bytes, out: Buffer) -> None:
    out.array[...] = arrays.unpack(data, *out.shape, out.dtype).array
