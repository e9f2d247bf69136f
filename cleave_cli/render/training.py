"""The output of a training run, as text with a progress bar or as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

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
from cleave_cli.render.text import by_kind, filled, printable, say

if TYPE_CHECKING:
    from cleave.scheduler.counters import StepProgress
    from cleave.training.loop.records import Record

_REASONS = 4  # maximum number of reasons in the summary
_INDENT = len("step ")
_SERVER: Final = {
    "loss_s": "the loss",
    "sums_s": "adding the gradients",
    "optimizer_s": "the optimizer",
    "audit_s": "audits",
    "planning_s": "planning, or starting its own device",
}
_DEVICE: Final = {"compute_s": "computation", "down_s": "downlink", "up_s": "uplink"}
_LEVELS: Final = ".-+#"  # levels of computation in a part of a step
_LEGEND: Final = "#: computes, +: up to two thirds of the time, -: up to one third, .: not at all"
_NAME: Final = 17  # characters of a device's name
_LIMITS: Final = 0.6  # minimum share of a step for a part to be called the bottleneck


class Display:
    """Prints the records of a run as JSON lines on stdout, and messages on stderr."""

    def start(self, steps: int) -> None:
        """Set the total number of steps, for a progress bar; 0 if unknown."""

    def watch(self, progress: Callable[[], StepProgress | None]) -> None:
        """Set the function that returns the current step's progress, for a progress bar."""

    def record(self, record: Record) -> None:
        """Show a record from a run in this process."""
        from cleave.training.loop.records import to_dict

        self.plain(to_dict(record))

    def plain(self, record: dict[str, Any]) -> None:
        """Show a record that was converted to a dictionary, as sent by a server."""
        if record.get("event") == "note":
            self.note(str(record.get("text", "")))
        elif record.get("event") not in ("end", "tasks"):
            typer.echo(json.dumps(record))

    def note(self, text: str) -> None:
        """Show a message for the user."""
        say(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _StepProgress(Progress):
    """A progress bar for 80 columns, with the result of the last step on a second line."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if line := task.fields["line"]:
                yield Padding(Text(line), (0, 0, 0, _INDENT))


class HumanDisplay(Display):
    """Prints lines on stderr. If stderr is a terminal, also shows a progress bar.

    Args:
        verbose: whether to show tiles, traffic by kind, the bytes that compression saved, and what
            each device did in a step by stages.
        log_every: number of steps per printed line; 0 for no lines. None means 0 on a terminal, and
            otherwise 1.
    """

    def __init__(self, *, verbose: bool = False, log_every: int | None = None) -> None:
        self._verbose = verbose
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._log_every = not self._console.is_terminal if log_every is None else log_every
        self._progress = _StepProgress(
            TextColumn("step"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _TasksColumn(lambda: self._tasks()),
            _TimeLeftColumn(),
            console=self._console,
        )
        self._energy: dict[str, Any] = {}
        self._limit = ""  # kind of the last bottleneck that was printed
        self._seen = ""  # kind of the bottleneck of the last printed line
        self._legend: Sequence[str] = (_LEGEND,)  # not printed yet
        self._told = ""  # progress of the current step, as reported by a server
        self._most = 0  # maximum of `done` in the current step so far
        self._tasks: Callable[[], str] = lambda: self._told
        self._task = self._progress.add_task("train", total=None, line="")

    def start(self, steps: int) -> None:
        """Set the total number of steps in the progress bar; 0 if unknown."""
        self._progress.update(self._task, total=steps or None)

    def watch(self, progress: Callable[[], StepProgress | None]) -> None:
        """Show the progress of the current step, as `progress` returns it."""

        def tasks() -> str:
            found = progress()
            return self._so_far(found.done, found.of) if found is not None else ""

        self._tasks = tasks

    def _so_far(self, done: int, of: int) -> str:
        """Format the progress of the current step, with the number of tasks that are repeated."""
        self._most = max(self._most, done)
        again = f", {self._most - done:,} again" if done < self._most else ""
        return tasks_text(done, of) + again

    def plain(self, record: dict[str, Any]) -> None:
        """Update the progress bar with a record, or print the record's text or summary."""
        match record.get("event"):
            case "tasks":
                self._told = self._so_far(record["done"], record["of"])
            case "step":
                self._told, self._most = "", 0
                line, limit, limited = _step_line(record, verbose=self._verbose), self._limit, ""
                if record.get("devices"):  # older servers omit this field
                    limit, text = bottleneck(record)
                    limited = f"\nbottleneck: {printable(text)}"
                    if self._verbose:
                        self.note("\n".join([*breakdown(record), *self._legend]))
                        self._legend = ()
                self._progress.update(self._task, completed=record["step"], line=line + limited)
                if self._log_every and record["step"] % self._log_every == 0:
                    # A bottleneck that changes with every step is not informative.
                    if limit != self._limit and (self._verbose or self._seen in ("", limit)):
                        line, self._limit = line + limited, limit
                    self._console.print(f"step {record['step']}  {line}", soft_wrap=True)
                    self._seen = limit
            case "eval":
                loss = loss_text(record["eval_loss"])
                self.note(f"held-out loss after step {record['step']}: {loss}")
            case "sample":
                self.note(f"sample after step {record['step']}: {record['prompt']}")
                self.note(record["text"])
            case "note" | "fleet" | "disk" | "servers" | "stopped":
                self.note(str(record.get("text", "")))
            case "energy":
                self._energy = record
            case "done":
                self._progress.stop()
                self._console.print(_summary(record, self._energy, verbose=self._verbose))

    def note(self, text: str) -> None:
        """Print a message above the progress bar."""
        text = printable(text)
        if self._console.is_terminal:
            text = filled(text, self._console.width)
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class _TasksColumn(ProgressColumn):
    """Shows the progress of the current step, as returned by `tasks`."""

    max_refresh = 0.25

    def __init__(self, tasks: Callable[[], str]) -> None:
        super().__init__()
        self._tasks = tasks

    def render(self, task: Task) -> Text:
        return Text(self._tasks())


class _TimeLeftColumn(TimeRemainingColumn):
    """Shows the estimated time left; empty if no steps remain or the time is unknown."""

    def render(self, task: Task) -> Text:
        if task.finished or task.time_remaining is None:
            return Text()
        return super().render(task) + Text(" left", style="progress.remaining")


def tasks_text(done: int, of: int) -> str:
    """Format the progress of a step: `done` of `of` tasks. `of` is 0 if the total is unknown."""
    return f"task {done:,} of {of:,}" if of else f"task {done:,}"


def make_display(*, as_json: bool, verbose: bool = False, log_every: int | None = None) -> Display:
    """Return a display that prints JSON lines (`as_json`) or shows a progress bar."""
    return Display() if as_json else HumanDisplay(verbose=verbose, log_every=log_every)


def _step_line(record: dict[str, Any], *, verbose: bool) -> str:
    wall_s = record["wall_s"]
    parts = [f"loss {record['loss']:.4f}"]
    if (other := record.get("against_loss")) is not None:
        parts[0] += f" ({other:.4f})"
    if record["downlink_bytes"] and record["clock"] == "virtual":
        parts += [f"{record['fleet_s']:.3g} s simulated", f"{wall_s:.3g} s here"]
    else:
        parts += [f"{wall_s:.3g} s", f"{record['tokens'] / max(wall_s, 1e-9):.0f} tokens/s"]
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
    """Format the loss of a record. None means that the loss is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


def _summary(record: dict[str, Any], energy: dict[str, Any], *, verbose: bool) -> Table:
    table = Table(title="stopped early" if record["stopped"] else "done", show_header=False)
    resumed_after = record.get("resumed_after", 0)  # older servers omit this field
    after = f"; the other rows: only steps after {resumed_after}" if resumed_after else ""
    table.add_row("steps", f"{record['steps']}{after}")
    if record["tokens"]:
        table.add_row("loss", f"{record['first_loss']:.4f} to {record['loss']:.4f}")
    table.add_row("tokens", f"{record['tokens']:,}")
    rate = record["tokens"] / max(record["wall_s"], 1e-9)
    table.add_row("time here", f"{record['wall_s']:.1f} s ({rate:.0f} tokens/s)")
    if record["downlink_bytes"]:
        virtual = record["clock"] == "virtual"
        clock = "on the simulated clock of its devices" if virtual else "spent waiting for devices"
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
        table.add_row("without devices", f"{record['local_gemms']:,} multiplications on the server")
    if record.get("kept_gemms") and record["offload"] == "auto":
        table.add_row("kept on the server", _kept(record, "saving"))
    for name in ("energy", "carbon"):
        if energy.get(f"{name}_text"):
            table.add_row(name, printable(energy[f"{name}_text"]))
    table.add_row("run folder", printable(record["run_folder"]))
    return table


def _details(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the summary rows (name, value) for `--verbose`."""
    if record["downlink_bytes"]:
        for way, kinds in record.get("traffic", {}).items():
            yield f"  {way} by kind", by_kind(kinds, "\n")
        for way, kinds in record.get("saved", {}).items():
            if any(kinds.values()):
                yield f"  compression saved, {way}", by_kind(kinds, "\n")
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
    if not math.isfinite(record["kept_saves_s"]):  # unknown: no device was connected
        return kept
    return f"{kept}, {saving} {record['kept_saves_s']:.3g} s, as predicted"


# --- the breakdown of a step by stages ---


def _server_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the time in seconds of each part of the server's work in a step, longest first."""
    parts = {name: record.get(key, 0.0) for key, name in _SERVER.items()}
    parts["other work"] = max(0.0, record["ps_s"] - sum(parts.values()))
    return dict(sorted(parts.items(), key=lambda each: -each[1]))


def bottleneck(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of work that takes the most time in a step by stages, and a clause about it.

    Args:
        record: a `StepRecord` as a dictionary, with at least one device. On a virtual clock, the
            server's own work takes no time.
    """
    virtual = record["clock"] == "virtual"
    step_s = max(record["fleet_s" if virtual else "wall_s"], 1e-9)
    part, part_s = next(iter(_server_parts(record).items()))
    found = [(record["ps_s"], "ps_s", "the server's own work", f" ({part}: {part_s:.3g} s)")]
    found = [] if virtual else found
    for key, name in _DEVICE.items():
        most = max(record["devices"], key=lambda device: device[key])
        found.append((most[key], key, f"the {name} of {most['name']}", ""))
    seconds, kind, what, details = max(found)
    span = f"{seconds:.3g} of {step_s:.3g} {'simulated ' if virtual else ''}s"
    if seconds >= _LIMITS * step_s:
        return kind, f"{what} takes {span}{details}"
    text = f"no part takes most of the step; the longest is {what} with {span}{details}"
    return kind, f"{text}; with larger batches, devices wait less"


def breakdown(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `--verbose` prints after a step by stages.

    The devices' times overlap with one another and with the server's, so they do not add up.
    """
    parts = ", ".join(f"{name} {s:.2g} s" for name, s in _server_parts(record).items() if s >= 0.01)
    yield f"server {record['ps_s']:.3g} of {record['wall_s']:.3g} s: {parts}"
    timelines = [device.get("timeline", ()) for device in record["devices"]]  # an older server's
    width = max(map(len, timelines))
    columns = "".join(f" {name:>6}" for name in ("comp s", "down s", "up s"))
    clock = "fleet_s" if record["clock"] == "virtual" else "wall_s"
    span = f"computation from 0 to {record[clock]:.3g} s"
    yield f"{'device':{_NAME}} {span:{width}}{columns}"
    for device, timeline in zip(record["devices"], timelines, strict=True):
        bar = "".join(_LEVELS[math.ceil(share * 3)] for share in timeline)
        seconds = "".join(f" {device[key]:6.3g}" for key in _DEVICE)
        yield f"{device['name'][:_NAME]:{_NAME}} {bar}{seconds}"
