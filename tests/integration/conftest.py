"""Fixtures of the tests with sockets and processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cleave
from cleave.server.fleet_server import Server


@pytest.fixture
def served() -> Iterator[Server]:
    """A server that keeps nothing."""
    with cleave.serve() as server:
        yield server
