"""The credentials that a device keeps."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cleave.device.credentials import SavedCredential, SavedCredentials, state_folder
from cleave.errors import CleaveError
from cleave.transport.join_url import JoinUrl

ADDRESS = "ws://192.0.2.1:8765/ws"
SAVED = SavedCredential("S1", "laptop", ADDRESS, "secret")


@pytest.fixture
def kept(tmp_path: Path) -> SavedCredentials:
    return SavedCredentials(tmp_path / "state" / "credentials")


def test_a_credential_is_found_by_the_servers_id(kept: SavedCredentials) -> None:
    assert kept.find(JoinUrl(ADDRESS, "CODE", server="S1"), "laptop") == ""
    kept.save(SAVED)
    moved = JoinUrl("ws://192.0.2.9:1/ws", "CODE", server="S1")
    assert kept.find(moved, "laptop") == "secret"
    assert kept.keys(moved, "laptop") == ("secret", "CODE")
    assert kept.find(moved, "other name") == ""
    # Another server at the same address gets nothing.
    assert kept.keys(JoinUrl(ADDRESS, "CODE", server="S2"), "laptop") == ("CODE", "")


def test_or_by_its_address_where_the_url_tells_no_id(kept: SavedCredentials) -> None:
    kept.save(SAVED)
    assert kept.keys(JoinUrl(ADDRESS, ""), "laptop") == ("secret", "")
    assert kept.keys(JoinUrl("ws://192.0.2.9:1/ws", "CODE"), "laptop") == ("CODE", "")


def test_the_last_one_counts(kept: SavedCredentials) -> None:
    kept.save(SAVED)
    kept.save(SavedCredential("S1", "laptop", "ws://elsewhere/ws", "newer"))
    kept.save(SavedCredential("S1", "second", ADDRESS, "of the second"))
    target = JoinUrl(ADDRESS, "CODE", server="S1")
    assert kept.find(target, "laptop") == "newer"
    assert kept.find(target, "second") == "of the second"
    assert len(list(kept.folder.iterdir())) == 2


def test_only_its_owner_can_read_it(kept: SavedCredentials) -> None:
    kept.save(SAVED)
    (file,) = kept.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("text", ["", "{", "[]", '{"server": "S1"}', '{"x": 1}', "\x00\xff"])
def test_a_broken_file_is_no_credential(kept: SavedCredentials, text: str) -> None:
    kept.folder.mkdir(parents=True)
    (kept.folder / "broken.json").write_text(text, encoding="latin-1")
    kept.save(SAVED)
    assert kept.find(JoinUrl(ADDRESS, "", server="S1"), "laptop") == "secret"


def test_a_servers_id_names_no_file_outside(kept: SavedCredentials) -> None:
    kept.save(SavedCredential("../../etc/passwd\0", "../x", ADDRESS, "secret"))
    assert len(list(kept.folder.glob("*.json"))) == 1


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CleaveError, match="new join code"):
        SavedCredentials(tmp_path / "file" / "credentials").save(SAVED)


def test_where_it_is(tmp_path: Path) -> None:
    assert state_folder({"CLEAVE_STATE": str(tmp_path)}) == tmp_path / "credentials"
    assert state_folder({}).name == "credentials"
