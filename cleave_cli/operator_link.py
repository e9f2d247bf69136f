"""Operator requests to a server, which is identified by its URL or by its data folder."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from cleave.errors import CleaveError
from cleave_cli.options import not_empty
from cleave_cli.render.text import say

Server = Annotated[
    str,
    Option(
        help="@FILE, a copy of the server's operator.url. Default: the server of --data.",
        callback=not_empty,
    ),
]
Data = Annotated[
    Path | None,
    Option(
        envvar="CLEAVE_DATA",
        help="Data folder of the server on this machine, if not the default folder.",
    ),
]


def ask(action: str, arguments: dict[str, Any], server: str, data: Path | None) -> dict[str, Any]:
    """Send a request to a server; if no server runs, execute the request on the data folder.

    `server` is an operator URL. If it is empty, the request is for the server that uses the data
    folder `data` (None: the default folder).
    """
    url = _find(server, data)
    if url:
        return asyncio.run(_ask_server(url, action, arguments))
    from cleave.server.store import data_folder

    with data_folder.DataFolder(data or data_folder.default_folder()) as folder:
        return _ask_store(folder.store_path, action, arguments)


def running_server(server: str, data: Path | None) -> str:
    """Return the operator URL that `ask` would use; raise CleaveError if no server is running."""
    url = _find(server, data)
    if not url:
        raise CleaveError("no server runs here; start one with `cleave serve`")
    return url


def server_of_this_machine() -> str:
    """Return the operator URL of the server on this machine; empty if no server is running."""
    from cleave.server.store import data_folder

    named = os.environ.get("CLEAVE_DATA", "")
    path = Path(named) if named else data_folder.default_folder()
    return _find("", path) if path.is_dir() else ""


def _find(server: str, data: Path | None) -> str:
    """Return `server` if not empty, else the URL of the server of `data`; empty if none runs."""
    from cleave.server.store import data_folder

    if server:
        return server
    path = data or data_folder.default_folder()
    if not path.is_dir():
        raise CleaveError(
            f"no server was found in {path}; start one with `cleave serve`, or pass --server "
            "@FILE, where FILE is a copy of its operator.url"
        )
    try:
        with data_folder.DataFolder(path):
            return ""
    except data_folder.FolderInUseError:
        url = data_folder.read_operator_url(path)
        if not url:
            raise CleaveError(f"the server that uses {path} is still starting; try again") from None
        return url


async def _ask_server(url: str, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from cleave_cli.operator_client import OperatorClient

    async with OperatorClient.connect(url) as client:
        return await client.request(action, arguments)


def _ask_store(path: Path, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Execute a request on the database at `path`, without a running server."""
    from cleave.server.access import Access
    from cleave.server.api.device_admin import DeviceAdmin
    from cleave.server.store.job_history import as_without_server, with_successors
    from cleave.server.store.store import Store, StoredJob

    with closing(Store(path)) as store, closing(Access(store, operator_token="")) as access:

        def jobs() -> list[StoredJob]:
            return with_successors([as_without_server(job) for job in store.jobs()])

        return DeviceAdmin(access, jobs, time.time).answer(action, arguments)


def say_decided(answer: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print the outcome of a change to a device or join code, as JSON (`answer`) or as `text`."""
    if as_json:
        typer.echo(json.dumps(answer))
        return
    say(text)
    if answer["unwritten"]:
        say(f"this has taken effect, but is not on disk yet: {answer['unwritten']}")


def when(unix_s: float | None) -> str:
    """Format a Unix time as a local date and time; empty for None."""
    return "" if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
