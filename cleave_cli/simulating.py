"""Options and the progress bar of commands that run many simulations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Jobs = Annotated[
    int, typer.Option("--jobs", "-j", min=1, help="Processes to simulate with, of this machine.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray", help="Simulate on the Ray cluster at this host:port; auto: the one of this node."
    ),
]


@dataclass(frozen=True, slots=True)
class SimulationProgress:
    """A progress bar on stderr that counts finished simulations."""

    _bar: Progress
    _task: TaskID

    def done(self, what: str) -> None:
        """Count one finished simulation, and show `what` as its description."""
        self._bar.update(self._task, advance=1, description=what)

    def say(self, what: str) -> None:
        """Show a description of the running simulation."""
        self._bar.update(self._task, description=what)


@contextmanager
def simulation_progress(total: int) -> Iterator[SimulationProgress]:
    """Show a progress bar until the `with` block ends.

    Args:
        total: number of simulations.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield SimulationProgress(bar, bar.add_task("simulating", total=total))
