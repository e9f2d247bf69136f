"""Advice on what to install works in a clone and with an installed wheel, without a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.errors import to_install


def test_a_clone_installs_itself() -> None:
    root = Path(__file__).parents[1]
    assert to_install("gguf") == f"pip install -e '{root}[gguf]'"


@pytest.mark.parametrize(
    ("extra", "named"),
    [("gguf", {"gguf"}), ("tls", {"cryptography", "ifaddr"}), ("train", {"torch", "zeroconf"})],
)
def test_a_wheel_names_the_libraries(extra: str, named: set[str], tmp_path: Path) -> None:
    told = to_install(extra, tmp_path)
    assert all(f"'{name}>=" in told for name in named)
    assert "cleave-train" not in told
