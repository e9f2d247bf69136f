"""Where this machine's user keeps what can be made again: graphs, tokenizers, encoded text."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $CLEAVE_CACHE, or `cleave` in the system's folder for caches of this user."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("CLEAVE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("cleave")
