"""The number of examples of a property."""

from __future__ import annotations

import os

AMOUNT = "CLEAVE_TESTS"
"""Environment variable: `unit` in `make unit`, `all` in `make test-all`, unset in `make test`."""

_DIVISORS = {"unit": 10, "all": 1}


def examples(thorough: int) -> int:
    """Return how many examples to try of those that a thorough test tries.

    `make test` tries a fifth and `make unit` a tenth.
    """
    return max(3, thorough // _DIVISORS.get(os.environ.get(AMOUNT, ""), 5))


def thorough() -> bool:
    """Return True in `make test-all`, which runs nightly tests and all examples."""
    return os.environ.get(AMOUNT) == "all"
