"""Join URLs in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cleave.errors import UsageError
from cleave.transport.join_url import read_url, url_file

URL = "https://192.0.2.1:8765/join#c=abcd&fp=ef"


@pytest.mark.parametrize(
    "text", [URL, f"{URL}\n", f"  cleave join '{URL}'\n\nvalid for 10 minutes"]
)
def test_a_file_holds_the_url_or_what_pair_printed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.url"
    path.write_text(text)
    assert read_url(f"@{path}") == URL
    assert read_url(URL) == URL


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read from .*join\.url"):
        read_url(f"@{tmp_path / 'join.url'}")


def test_what_is_in_a_file_without_a_url_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "viewer.token"
    path.write_text("RJBc-secret\n")
    with pytest.raises(UsageError, match="holds no URL") as refused:
        read_url(f"@{path}")
    assert "secret" not in str(refused.value)


def test_a_file_is_ones_own_and_gone_afterwards() -> None:
    with url_file(URL) as named:
        path = Path(named[1:])
        assert path.stat().st_mode & 0o077 == 0
        assert read_url(named) == URL
    assert not path.exists()
