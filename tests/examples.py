"""How many examples of a property are tried: all of them, or few in the fast loop."""

from __future__ import annotations

import os

FAST = "CLEAVE_FAST_TESTS"
"""Set in the environment by `pytest --unit`, also for its workers."""


def examples(thorough: int) -> int:
    """Return how many to try: as many as given, or a tenth of that in the fast loop."""
    return max(3, thorough // 10) if os.environ.get(FAST) else thorough
