"""A trained model that a command uses: here, or with its multiplications on an emulated fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from cleave.errors import UsageError

if TYPE_CHECKING:
    from cleave.training.trained import TrainedModel


Model: TypeAlias = Annotated[
    Path, typer.Argument(help="A run folder, or a Hugging Face folder.", show_default=False)
]
Devices: TypeAlias = Annotated[
    int, typer.Option(help="Emulated devices that multiply; 0: this machine alone.")
]
Step: TypeAlias = Annotated[
    int, typer.Option(help="Of a run's checkpoint; 0: the newest that is whole.", min=0)
]


@contextmanager
def trained_model(model: Path, step: int, devices: int) -> Iterator[TrainedModel]:
    """Open a model, and close its fleet at the end.

    Args:
        model: a run folder, or one that a model was saved in.
        step: of a run's checkpoint; 0 for the newest.
        devices: emulated ones that multiply; 0 for none.

    Raises:
        CleaveError: when it cannot be opened.
    """
    import cleave
    from cleave.training.trained import open_trained

    if devices < 0:
        raise UsageError(f"--devices is {devices}; give 0 to use this machine alone, or more")
    trained = open_trained(model, step)
    if not devices:
        yield trained
        return
    with cleave.emulated(devices) as fleet:
        cleave.offload(trained.model, fleet)
        try:
            yield trained
        finally:
            cleave.restore(trained.model)


@contextmanager
def progress_bar(what: str, *, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr that is gone at the end; yield what is called with done and total."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
