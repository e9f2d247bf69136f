"""The folder of a server: its own, locked, closed to others."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cleave.errors import CleaveError
from cleave.server.store.data_folder import DataFolder, read_operator_url


def test_the_token_is_made_once_and_for_one_reader(tmp_path: Path) -> None:
    with DataFolder(tmp_path / "data") as folder:
        token = folder.token("operator")
        assert folder.token("operator") == token
    file = tmp_path / "data" / "operator.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with DataFolder(tmp_path / "data") as folder:
        assert folder.token("operator") == token
        assert folder.token("viewer") == folder.token("viewer") != token
    viewers = tmp_path / "data" / "viewer.token"
    assert stat.S_IMODE(viewers.stat().st_mode) == 0o600
    with DataFolder(tmp_path / "other") as folder:
        assert folder.token("operator") != token


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder:
        folder.token("operator")
        file = tmp_path / "operator.token"
        file.chmod(0o640)
        with pytest.raises(CleaveError, match="0640"):
            folder.token("operator")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.chmod(0o600)
        file.write_text("short")
        with pytest.raises(CleaveError, match="truncated"):
            folder.token("operator")


def test_the_operators_url_is_there_while_the_server_is(tmp_path: Path) -> None:
    with DataFolder(tmp_path) as folder:
        assert read_operator_url(tmp_path) == ""
        folder.write_url("ws://one")
        folder.write_url("ws://two")
        assert read_operator_url(tmp_path) == "ws://two"
        assert stat.S_IMODE(folder.url_path.stat().st_mode) == 0o600
        folder.remove_url()
        assert read_operator_url(tmp_path) == ""


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CleaveError, match=r"cannot be used \(File exists\); .*--data"):
        DataFolder(tmp_path / "file")
