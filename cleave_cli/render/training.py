"""The output of a training run: a progress bar for people, JSON lines for programs."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from cleave_cli.options import human_bytes
from cleave_cli.render.narrow import filled
from cleave_cli.render.say import printable, say
from cleave_cli.render.traffic import by_kind

if TYPE_CHECKING:
    from cleave.fleet.counters import StepProgress
    from cleave.training.loop.records import Record

_REASONS = 4  # shown in the summary
_INDENT = len("step ")


class Display(ABC):
    """Shows the records of a run as they arrive."""

    def start(self, steps: int) -> None:  # noqa: B027 - nothing to do for some
        """Set the number of steps of the run; 0 if not known."""

    def record(self, record: Record) -> None:
        """Show a record of this process."""
        from cleave.training.loop.records import to_dict

        self.plain(to_dict(record))

    def watch(  # noqa: B027 - nothing to show for some
        self, progress: Callable[[], StepProgress | None]
    ) -> None:
        """Show the progress of the current step, read from this function."""

    @abstractmethod
    def plain(self, record: dict[str, Any]) -> None:
        """Show a record in its network form."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a text that is not a record."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class JsonDisplay(Display):
    """Prints one JSON object a line on stdout; texts for people go to stderr."""

    def plain(self, record: dict[str, Any]) -> None:
        """Print a record as one JSON line; a note goes to stderr."""
        if record.get("event") == "note":
            self.note(str(record.get("text", "")))
        elif record.get("event") not in ("end", "tasks"):
            typer.echo(json.dumps(record))

    def note(self, text: str) -> None:
        """Print a text on stderr."""
        say(text)


class _StepProgress(Progress):
    """A progress bar with the result of the last step on the next line.

    On one line, an 80-column terminal would have no room for the bar.
    """

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar, and the line of the last step once one is done."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if line := task.fields["line"]:
                yield Padding(Text(line), (0, 0, 0, _INDENT))


class HumanDisplay(Display):
    """Shows a progress bar on stderr, or prints a line for each step if stderr is no terminal.

    Args:
        verbose: also show details that a first run does not need.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = _StepProgress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _TasksColumn(lambda: self._tasks()),
            _TimeLeftColumn(),
            console=self._console,
        )
        self._energy: dict[str, Any] = {}
        self._told = ""  # progress of the step, as a server reports it
        self._tasks: Callable[[], str] = lambda: self._told
        self._task = self._progress.add_task("train", total=None, line="")

    def start(self, steps: int) -> None:
        """Set the total of the progress bar."""
        self._progress.update(self._task, total=steps or None)

    def watch(self, progress: Callable[[], StepProgress | None]) -> None:
        """Show the progress of the current step, read from this function."""

        def tasks() -> str:
            found = progress()
            return tasks_text(found.done, found.of) if found is not None else ""

        self._tasks = tasks

    def plain(self, record: dict[str, Any]) -> None:
        """Update the bar with a record, or print its text."""
        match record.get("event"):
            case "tasks":
                self._told = tasks_text(record["done"], record["of"])
            case "step":
                self._told = ""
                line = _step_line(record, verbose=self._verbose)
                self._progress.update(self._task, completed=record["step"], line=line)
                if not self._console.is_terminal:
                    self._console.print(f"step {record['step']}  {line}", soft_wrap=True)
            case "eval":
                loss = loss_text(record["eval_loss"])
                self.note(f"held-out loss after step {record['step']}: {loss}")
            case "note" | "fleet" | "disk" | "servers" | "stopped":
                self.note(str(record.get("text", "")))
            case "energy":
                self._energy = record
            case "done":
                self._progress.stop()
                self._console.print(_summary(record, self._energy, verbose=self._verbose))

    def note(self, text: str) -> None:
        """Print a text above the bar."""
        text = printable(text)
        if self._console.is_terminal:
            text = filled(text, self._console.width)
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


class _TasksColumn(ProgressColumn):
    """Shows the progress of the current step.

    Args:
        tasks: returns the progress as text.
    """

    max_refresh = 0.25

    def __init__(self, tasks: Callable[[], str]) -> None:
        super().__init__()
        self._tasks = tasks

    def render(self, task: Task) -> Text:
        """Return the progress; empty between steps."""
        return Text(self._tasks())


class _TimeLeftColumn(TimeRemainingColumn):
    """Shows the time left while steps remain and the time is known."""

    def render(self, task: Task) -> Text:
        """Return the time left; empty if the run is done or its time is not known."""
        if task.finished or task.time_remaining is None:
            return Text()
        return super().render(task) + Text(" left", style="progress.remaining")


def tasks_text(done: int, of: int) -> str:
    """Return the progress of a step as text; `of` is 0 while the total is not known."""
    return f"task {done:,} of {of:,}" if of else f"task {done:,}"


def make_display(*, as_json: bool, verbose: bool = False) -> Display:
    """Return a display of JSON lines or of a progress bar."""
    return JsonDisplay() if as_json else HumanDisplay(verbose=verbose)


def _step_line(record: dict[str, Any], *, verbose: bool) -> str:
    wall_s = record["wall_s"]
    parts = [f"loss {record['loss']:.4f}"]
    if (other := record.get("against_loss")) is not None:
        parts[0] += f" ({other:.4f})"
    if record["downlink_bytes"] and record["clock"] == "virtual":
        parts += [f"{record['fleet_s']:.3g} s simulated", f"{wall_s:.3g} s here"]
    else:
        parts.append(f"{record['tokens'] / max(wall_s, 1e-9):.0f} tokens/s")
    if record["downlink_bytes"]:
        parts += [
            f"{human_bytes(record['downlink_bytes'])} down",
            f"{human_bytes(record['uplink_bytes'])} up",
        ]
        if verbose and record["tiles"]:
            parts.append(f"{record['tiles']} tiles")
        if record["reissued"]:
            parts.append(f"{record['reissued']} reissued")
    return "  ".join(parts)


def loss_text(loss: float | None) -> str:
    """Return a record's loss as text; None stands for a loss that is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


def _summary(record: dict[str, Any], energy: dict[str, Any], *, verbose: bool) -> Table:
    table = Table(title="stopped early" if record["stopped"] else "done", show_header=False)
    resumed_after = record.get("resumed_after", 0)  # older servers do not send it
    after = f"; all else is of those after step {resumed_after}" if resumed_after else ""
    table.add_row("steps", f"{record['steps']}{after}")
    if record["tokens"]:
        table.add_row("loss", f"{record['first_loss']:.4f} to {record['loss']:.4f}")
    table.add_row("tokens", f"{record['tokens']:,}")
    rate = record["tokens"] / max(record["wall_s"], 1e-9)
    table.add_row("time here", f"{record['wall_s']:.1f} s ({rate:.0f} tokens/s)")
    if record["downlink_bytes"]:
        virtual = record["clock"] == "virtual"
        clock = "on the simulated clock of its devices" if virtual else "of it waiting for devices"
        table.add_row("fleet", f"{record['fleet_s']:.1f} s {clock}")
        table.add_row(
            "down, up",
            f"{human_bytes(record['downlink_bytes'])}, {human_bytes(record['uplink_bytes'])}",
        )
    for name, text in _details(record) if verbose else ():
        table.add_row(name, text)
    if record["tiles"] and record["reissued"] and not verbose:
        table.add_row("reissued", f"{record['reissued']:,} tiles")
    if record.get("local_gemms"):
        table.add_row("without devices", f"{record['local_gemms']:,} multiplications on the PS")
    if record.get("kept_gemms") and record["offload"] == "auto":
        table.add_row("kept on the PS", _kept(record, "saving"))
    for name in ("energy", "carbon"):
        if energy.get(f"{name}_text"):
            table.add_row(name, printable(energy[f"{name}_text"]))
    table.add_row("run folder", printable(record["run_folder"]))
    return table


def _details(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows that only `verbose` shows."""
    if record["downlink_bytes"]:
        for way, kinds in record.get("traffic", {}).items():
            yield f"  of it {way}", by_kind(kinds, "\n")
        for way, kinds in record.get("saved", {}).items():
            if any(kinds.values()):
                yield f"  coding saved {way}", by_kind(kinds, "\n")
    if record["tiles"]:
        yield "tiles, blocks", f"{record['tiles']:,}, {record['blocks']:,}"
        yield "reissued", f"{record['reissued']:,}"
    if record.get("journal_bytes") or record.get("journal_gemms"):
        yield (
            "journal",
            f"{human_bytes(record['journal_bytes'])} written in {record['journal_s']:.3g} s; "
            f"{record['journal_gemms']:,} multiplications taken from it, "
            f"saving {record['journal_saved_s']:.3g} s",
        )
    if record.get("kept_gemms"):
        if record["offload"] != "auto":
            yield "--offload auto", "would keep " + _kept(record, "and save")
        for reason in record["kept_reasons"][:_REASONS]:
            yield "", printable(reason)
        if len(record["kept_reasons"]) > _REASONS:
            yield "", f"and {len(record['kept_reasons']) - _REASONS} more in metrics.jsonl"


def _kept(record: dict[str, Any], saving: str) -> str:
    kept = f"{record['kept_gemms']:,} of {record['gemms']:,} multiplications"
    if not math.isfinite(record["kept_saves_s"]):  # no device was connected to compute them
        return kept
    return f"{kept}, {saving} {record['kept_saves_s']:.3g} s, as predicted"
