"""The browser's kernels in a browser: right, on odd sizes, with threads that share memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from benchmarks.client_kernels import page_kernels
from tests.products import assert_multiplies
from tests.web.browser import serving

WAYS = [
    pytest.param(
        isolated,
        kernel,
        id=f"{kernel}-{'isolated' if isolated else 'not-isolated'}",
        marks=[] if isolated else [pytest.mark.nightly],
    )
    for isolated, kernels in ((True, ("js", "wasm", "webgpu")), (False, ("js", "wasm")))
    for kernel in kernels
]
"""Whether threads may share memory, and the kernel; the GPU's asks for none."""

each_way = pytest.mark.parametrize(("page", "kernel"), WAYS, indirect=["page"])
FP32_ROUNDING = 2.0**-24


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest, browser: Browser, lab: Path) -> Iterator[Page]:
    with serving(lab, isolated=request.param) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_function("'lab' in globalThis")
        assert page.evaluate("lab.isolated") is request.param
        yield page
        page.close()


@pytest.mark.nightly
@each_way
def test_errors_against_double_precision_are_those_of_rounding(page: Page, kernel: str) -> None:
    errors = page.evaluate("(kernel) => lab.errors(kernel, 2)", kernel)
    assert errors["share"] <= 1.0
    for size, error in errors["fp32"].items():
        depth = int(size.split("x")[0])
        assert error <= (depth + 1) * FP32_ROUNDING, size


@pytest.mark.nightly
@each_way
def test_a_crowd_of_products_some_of_them_cancelled(page: Page, kernel: str) -> None:
    """Two threads at once; matrices are forgotten while products of them still wait."""
    assert page.evaluate("(kernel) => lab.crowd(kernel, 2, 40)", kernel) <= 1.0


@pytest.mark.nightly
@each_way
def test_products_that_python_hands_over(page: Page, lab: Path, kernel: str) -> None:
    """Benchmarks have the kernels multiply so."""
    with page_kernels(page, lab, [kernel]) as kernels:
        assert_multiplies(kernels[kernel])
