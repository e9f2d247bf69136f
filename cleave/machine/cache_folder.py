"""Where this machine's user caches graphs, tokenizers and encoded text."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $CLEAVE_CACHE, or `cleave` in the user's cache folder of the system."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("CLEAVE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("cleave")
