"""Options of the commands that use a trained model, and running it here or on devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from rich.console import Console
from rich.progress import Progress
from typer import Argument, Option

from cleave.errors import CleaveError, UsageError
from cleave_cli.options import not_empty

if TYPE_CHECKING:
    from cleave.training.results.uses import UseRequest


Model: TypeAlias = Annotated[
    Path, Argument(help="A run folder, or a Hugging Face folder.", show_default=False)
]
Devices: TypeAlias = Annotated[
    int, Option(help="Number of emulated devices; 0: this machine alone.")
]
Server: TypeAlias = Annotated[
    str,
    Option(
        help="Use the devices of a server: @FILE, a copy of its operator.url. Paths are on the "
        "server.",
        callback=not_empty,
    ),
]
Step: TypeAlias = Annotated[
    int, Option(help="Step of the checkpoint; 0: the newest intact one.", min=0)
]
Tokens: TypeAlias = Annotated[int, Option(help="Maximum number of new tokens.", min=1)]
Temperature: TypeAlias = Annotated[
    float, Option(help="0: always the likeliest token; higher: more varied.", min=0.0)
]
TopP: TypeAlias = Annotated[
    float, Option(help="Sample from the likeliest tokens with this total probability.")
]
Seed: TypeAlias = Annotated[int, Option(help="Seed of the choice of tokens.")]


def use(
    request: UseRequest, devices: int, server: str, report: Callable[[dict[str, Any]], None]
) -> None:
    """Evaluate a model or generate text, on this machine, on emulated devices or on a server.

    `report` is called with each record of `cleave.training.results.uses`, as a dictionary.
    """
    import cleave
    from cleave.training.loop.records import Record, to_dict
    from cleave.training.loop.run_job import use_model

    if devices < 0:
        raise UsageError(f"--devices is {devices}; give 0 to use this machine alone, or more")
    if devices and server:
        raise UsageError("--devices are emulated here; leave them out with --server")
    if server:
        _on_server(server, request, report)
        return

    def told(record: Record) -> None:
        report(to_dict(record))

    with cleave.emulated(devices) if devices else nullcontext() as fleet:
        use_model(request, fleet, told, lambda: False)


def _on_server(server: str, request: UseRequest, report: Callable[[dict[str, Any]], None]) -> None:
    import asyncio

    from cleave.training.loop.run_job import USE
    from cleave_cli.operator_client import OperatorClient

    async def follow() -> None:
        client = await OperatorClient.connect(server)
        try:
            job = (await client.request("submit", {USE: request.to_dict()}))["job"]
            try:
                async for record in client.records():
                    if record.get("event") in ("failed", "stopped"):
                        raise CleaveError(f"{job} {record['event']}: {record.get('text')}")
                    report(record)
            except asyncio.CancelledError:
                # Stop the job, because no client would read its other records.
                await client.request("stop", {"job": job})
        finally:
            await client.close()

    asyncio.run(follow())


@contextmanager
def progress_bar(what: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar in the `with` block; yield a function (done, total) that updates it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
