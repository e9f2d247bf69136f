"""Viewers of a real server: what they may ask, and how they come in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.server.fleet_server import Server
from cleave_cli.operator_client import OperatorClient
from tests.integration.processes import apart, records
from tests.integration.serving import served


def viewed(dashboard_url: str) -> str:
    """Where the page of a dashboard connects to."""
    return dashboard_url.replace("http", "ws", 1).replace("/#", "/ws#")


def asked(url: str, *requests: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests, in one session."""

    async def scenario() -> list[dict[str, Any]]:
        async with OperatorClient.connect(url) as client:
            return [await client.request(action, arguments) for action, arguments in requests]

    return asyncio.run(scenario())


def url_of(server: Server, token: str) -> str:
    return f"{server.address}#c={token}"


def test_viewers_may_only_look_and_operators_are_told_where(tmp_path: Path) -> None:
    actions = (
        "submit", "attach", "stop", "pair", "codes", "void", "dashboard", "devices", "revoke",
        "release", "own", "history",
    )  # fmt: skip

    async def look(url: str) -> None:
        async with OperatorClient.connect(url) as client:
            for action in actions:
                assert (await client.request("status", {}))["jobs"] == []
                with pytest.raises(UsageError, match=f"a viewer may ask for .* not for '{action}'"):
                    await client.request(action, {"job": "job-1", "device": "1"})
            assert (await client.request("status", {}))["jobs"] == []  # the session continues

    with served(tmp_path) as (server, app, _):
        asyncio.run(look(url_of(server, app.viewer_token)))
        _, told = asked(server.operator_url, ("status", {}), ("dashboard", {}))
        assert told["url"] == server.dashboard_url
        parts = urlsplit(told["url"])
        assert (parts.scheme, parts.path) == ("http", "/")
        assert parts.fragment == f"c={app.viewer_token}"
        printed = records(
            apart("dashboard", "--operator", "--server", server.operator_url, "--json").stdout
        )
        assert printed == [{"url": f"{told['url'].partition('#')[0]}#c={app.operator_token}"}]
        with pytest.raises(CleaveError, match="it is not a viewer's token"):
            asked(url_of(server, "guess"))
        with pytest.raises(UsageError, match="uses must be below"):
            asked(server.operator_url, ("pair", {"uses": 10**30}))
