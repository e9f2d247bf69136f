"""What pip calls this package: the name `cleave` on PyPI is another project's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cleave.errors import DISTRIBUTION, to_install

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SAID_IN = (".md", ".py", ".toml", ".yml", ".yaml", ".ts", ".tsx", ".html", ".java", "Dockerfile")
NOT_OURS = {"node_modules", "build", "dist", "CHANGELOG.md", Path(__file__).name}

OF_OTHERS = re.compile(
    r"\bcleave\\?\["  # an extra
    r"|pip install (-\S+ )*['\"]?cleave(?![\w-])"
    r"|\bcleave-(\*|[0-9.]+)\S*\.whl"
)


def test_commands_install_this_package() -> None:
    """A clone installs itself. Elsewhere the libraries are named, because no release is on PyPI."""
    extras = PROJECT["optional-dependencies"]
    assert to_install("lora") == f"pip install -e '{ROOT}[lora]'"
    assert PROJECT["name"] == DISTRIBUTION
    of_its_own = [n for needs in extras.values() for n in needs if n.startswith("cleave")]
    assert of_its_own
    assert all(need.startswith(f"{DISTRIBUTION}[") for need in of_its_own)


@pytest.mark.parametrize(
    ("extra", "named"),
    [("gguf", {"gguf"}), ("tls", {"cryptography", "ifaddr"}), ("train", {"torch", "zeroconf"})],
)
def test_without_a_clone_libraries_are_named(extra: str, named: set[str], tmp_path: Path) -> None:
    told = to_install(extra, tmp_path)
    assert all(f"'{name}>=" in told for name in named)
    assert DISTRIBUTION not in told


def test_extras_that_messages_name_exist() -> None:
    named = set()
    for path in texts():
        called = re.findall(
            r"(?:to_install|not_installed)\([^()]*['\"](\w+)['\"]\)", path.read_text()
        )
        named |= set(called) | set(re.findall(rf"{DISTRIBUTION}\[(\w+)\]", path.read_text()))
    assert {"train", "lora", "ray"} <= named <= PROJECT["optional-dependencies"].keys()


def test_nothing_installs_another_project() -> None:
    for path in texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not OF_OTHERS.search(line), f"{path}:{number} names another project's package"


def texts() -> list[Path]:
    return [
        path
        for folder in ROOT.iterdir()
        if not folder.name.startswith(".") and folder.name not in NOT_OURS
        for path in ([folder] if folder.is_file() else folder.rglob("*"))
        if path.name.endswith(SAID_IN) and not NOT_OURS & set(path.relative_to(ROOT).parts)
    ]
