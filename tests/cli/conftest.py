"""The commands, built once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
from typer.main import get_command


@pytest.fixture(scope="module", autouse=True)
def _built_once() -> Iterator[None]:
    """Let `CliRunner` build the commands once, not for each call, which takes 0.1 s."""
    with mock.patch("typer.testing._get_command", cache(get_command)):
        yield
