"""The Android client's kernel multiplies what Python hands it, as benchmarks have it do."""

from __future__ import annotations

from benchmarks.client_kernels import JAVA, java_kernels
from tests.android.jvm import Classes
from tests.products import assert_multiplies


def test_both_inner_loops_multiply_what_they_are_handed(classes: Classes) -> None:
    with java_kernels(classes) as kernels:
        assert set(kernels) == set(JAVA)
        for multiply in kernels.values():
            assert_multiplies(multiply)
