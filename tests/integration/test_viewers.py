"""Viewers of a real server: what they may ask, and how they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cleave.errors import CleaveError, UsageError
from cleave.scheduler.fleet_events import EventKind
from cleave.server.app import App, open_app
from cleave.server.fleet_server import Server, serve
from cleave.server.jobs.jobs import Jobs
from cleave.training.loop.run_job import JobRunner
from cleave_cli.operator_client import OperatorClient
from tests.integration.processes import here, started, wait_for_event


@contextmanager
def served(runs: Path) -> Iterator[tuple[Server, App]]:
    """What `cleave serve --data none` does, in this process."""
    with open_app("none", "", "") as server_app:
        server = serve(
            operator_credential=server_app.operator_token,
            viewer_credential=server_app.viewer_token,
            operator=server_app.operators.serve,
            auth=server_app.access,
        )
        with server:

            def job_happened(kind: EventKind, text: str) -> None:
                server_app.overview.events.add(kind, 0, text)

            jobs = Jobs(server.fleet, JobRunner(runs), server_app.history, job_happened)
            server_app.operators.jobs = server_app.overview.jobs = jobs
            server_app.operators.server = server
            server_app.open(server)
            yield server, server_app
            jobs.close(10.0)


def viewed(dashboard_url: str) -> str:
    """Where the page of a dashboard connects to."""
    return dashboard_url.replace("http", "ws", 1).replace("/#", "/ws#")


def asked(url: str, *requests: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests, in one session."""

    async def scenario() -> list[dict[str, Any]]:
        client = await OperatorClient.connect(url)
        answers = [await client.request(action, arguments) for action, arguments in requests]
        await client.close()
        return answers

    return asyncio.run(scenario())


def url_of(server: Server, token: str) -> str:
    return f"{server.address}#c={token}"


def test_viewers_may_only_look(tmp_path: Path) -> None:
    actions = (
        "submit", "attach", "stop", "pair", "codes", "void", "dashboard", "devices", "revoke",
        "release", "own", "history",
    )  # fmt: skip

    async def scenario(url: str) -> None:
        client = await OperatorClient.connect(url)
        for action in actions:
            assert (await client.request("status", {}))["jobs"] == []
            with pytest.raises(UsageError, match=f"a viewer may ask for .* not for '{action}'"):
                await client.request(action, {"job": "job-1", "device": "1"})
        assert (await client.request("status", {}))["jobs"] == []  # the session continues
        await client.close()

    with served(tmp_path) as (server, server_app):
        asyncio.run(scenario(url_of(server, server_app.viewer_token)))


def test_operators_may_look_and_are_told_where(tmp_path: Path) -> None:
    async def scenario(url: str) -> str:
        client = await OperatorClient.connect(url)
        await client.request("status", {})
        told = str((await client.request("dashboard", {}))["url"])
        await client.close()
        return told

    with served(tmp_path) as (server, server_app):
        told = asyncio.run(scenario(server.operator_url))
        assert told == server.dashboard_url
        parts = urlsplit(told)
        assert (parts.scheme, parts.path) == ("http", "/")
        assert parts.fragment == f"c={server_app.viewer_token}"


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _), pytest.raises(CleaveError, match="nor is it a viewer's"):
        asyncio.run(OperatorClient.connect(url_of(server, "guess")))


def test_the_address_is_printed_again(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with started("serve", "--port", "0", "--data", data, "--json") as (_, lines):
        listening = wait_for_event(lines, "listening")
        shown = here("dashboard", "--data", data)
        assert shown.stdout.strip() == listening["dashboard_url"]
        assert "▀" in shown.stderr
    assert here("dashboard", "--data", data).returncode == 1
