"""Building the package: pages where npm is, and without it all the rest."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small copy of the source tree."""
    for name in ("setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    pyproject = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(pyproject)
    for package in ("cleave", "cleave_cli", "emulator", "profiles", "simulator"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("web", "__pycache__")
        )
    client = tmp_path / "web_client"
    client.mkdir()
    (client / "package.json").write_text('{"scripts": {"build": "true"}}')
    return tmp_path


def build(source: Path, path: str) -> tuple[list[str], str]:
    """The files in a wheel that is made of a source tree, and what was said."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "made"],
        cwd=source, capture_output=True, text=True, env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (source / "made").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist(), done.stderr


def npm_that(source: Path, does: str) -> str:
    """A PATH with an npm of this behaviour."""
    folder = source / "bin"
    folder.mkdir()
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{does}\n")
    npm.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.slow
def test_with_npm_the_pages_are_in_the_wheel(source: Path) -> None:
    makes = (
        'if [ "$1" = run ]; then mkdir -p ../cleave/server/web/assets; cd ../cleave/server/web; '
        "echo page > index.html; echo page > join.html; echo x > assets/x.js; fi"
    )
    files, said = build(source, npm_that(source, makes))
    for name in ("index.html", "join.html", "assets/x.js"):
        assert f"cleave/server/web/{name}" in files
    assert "cleave/energy/grid_carbon.csv" in files
    assert "profiles/library/devices/raspberry-pi-5.toml" in files
    assert "without web pages" not in said
    assert not any(name.startswith(("web_client", "tests")) for name in files)


@pytest.mark.slow
def test_without_npm_the_package_is_made_all_the_same(source: Path) -> None:
    (source / "empty").mkdir()
    files, said = build(source, str(source / "empty"))
    assert "cleave/server/http/pages.py" in files
    assert "made without web pages: npm is not installed" in said


@pytest.mark.slow
def test_where_npm_fails_it_says_why(source: Path) -> None:
    _, said = build(source, npm_that(source, "echo 'no network here' >&2; exit 1"))
    assert "`npm ci --no-audit --no-fund` failed: no network here" in said


def test_pages_are_built_again_when_a_source_is_newer(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    rules: dict[str, Any] = runpy.run_path(str(source / "setup.py"))
    stale = rules["pages_are_stale"]
    assert stale()
    web = source / "cleave" / "server" / "web"
    web.mkdir()
    for page in ("index.html", "join.html"):
        (web / page).write_text("")
    assert not stale()
    later_s = time.time() + 10
    (source / "web_client" / "package.json").touch()
    os.utime(source / "web_client" / "package.json", (later_s, later_s))
    assert stale()
