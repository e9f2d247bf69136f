"""An address that nobody else can reach is said to be one."""

from __future__ import annotations

import pytest

from cleave_cli.options import only_here


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_of_this_machine_alone(host: str) -> None:
    assert "--host 0.0.0.0" in only_here(f"http://{host}:8765/join#c=x")


def test_of_a_network() -> None:
    assert only_here("https://192.0.2.7:8765/join#c=x") == ""
