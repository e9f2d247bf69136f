"""The user's cache folder for graphs, tokenizers and encoded text."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $CLEAVE_CACHE if set, otherwise the folder `cleave` in the user's cache folder."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("CLEAVE_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("cleave")
