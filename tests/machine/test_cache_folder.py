"""Where caches are: as the environment says, else where the system keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.files import cache_folder


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEAVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/cleave")
    monkeypatch.setenv("CLEAVE_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
