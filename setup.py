"""Builds the web pages into the wheel; everything else of the package is in pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CLIENT = ROOT / "web_client"
PAGES = ROOT / "cleave" / "server" / "web"
NOT_SOURCES = ("node_modules", "tests")


class BuildWithPages(build_py):
    """`build_py`, after the pages were built where they are missing or older than their sources.

    Without npm, or where its build fails, the package is made without pages: the server then says
    at `/` how to get them.
    """

    def run(self) -> None:
        """Build."""
        if pages_are_stale():
            problem = build_pages()
            if problem:
                print(f"cleave: made without web pages: {problem}", file=sys.stderr)
        super().run()


def pages_are_stale() -> bool:
    """Whether the sources are there and something of them is newer than the built pages."""
    sources = [
        path
        for path in CLIENT.rglob("*")
        if path.is_file()
        and path.suffix != ".wasm"  # built, too
        and path.relative_to(CLIENT).parts[0] not in NOT_SOURCES
    ]
    pages = [PAGES / "index.html", PAGES / "join.html"]
    if not sources or not all(page.exists() for page in pages):
        return bool(sources)
    built_s = min(page.stat().st_mtime for page in pages)
    return max(path.stat().st_mtime for path in sources) > built_s


def build_pages() -> str:
    """Build them; what was in the way, or nothing."""
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    for command in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        done = subprocess.run([npm, *command], cwd=CLIENT, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return f"`npm {' '.join(command)}` failed: {lines[-1] if lines else done.returncode}"
    return ""


setup(cmdclass={"build_py": BuildWithPages})
