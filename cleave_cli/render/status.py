"""Terminal output of a server's overview, for `cleave status`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cleave_cli.options import counted, human_bytes
from cleave_cli.render.text import by_kind, printable
from cleave_cli.render.training import tasks_text

EVENTS_SHOWN: Final = 8
TROUBLED_SHOWN: Final = 5
OWN_SHOWN: Final = 5

_NO_KIND: Final = "kind not stated"

_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 60
_RECENT_STEPS: Final = 10  # steps from which to estimate the time left, as on the dashboard


@dataclass
class Seen:
    """State collected from a server's overviews, which contain only new records and events.

    Attributes:
        events: the latest events, oldest first.
        complete: True if all records of the job have been received.
    """

    latest: dict[str, Any] = field(default_factory=dict)
    job: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    next_record: int = 0
    last_event: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def take(self, overview: dict[str, Any]) -> None:
        """Add the records and events of a new overview."""
        self.latest = overview
        table = overview["events"]
        self.events = (self.events + _rows(table))[-EVENTS_SHOWN:]
        self.last_event = table["last"]
        job = overview["job"]
        if job is None:
            self.complete = True
            return
        if job["job"] != self.job:  # for a new job, request its records from the first
            self.job, self.steps, self.next_record = job["job"], [], 0
            if job["first_record"] > 0:
                self.complete = False
                return
        self.steps += [record for record in job["records"] if record.get("event") == "step"]
        self.next_record = job["next_record"]
        self.complete = not job["records"]


def shown(seen: Seen) -> RenderableType:
    """Return the server's job, fleet, traffic, energy and events as terminal output."""
    overview = seen.latest
    parts: list[RenderableType] = [_server(overview["server"])]
    if counts := overview["server"].get("servers"):
        parts.append(_text(_servers(counts)))
    if trouble := overview["server"].get("store"):
        parts.append(Text(f"store  {trouble}", style="bold"))
    parts.append("")
    parts += [*_job(overview["job"], seen.steps), ""]
    devices = _rows(overview["devices"])
    own = _own(devices, overview["devices"]["total"])
    parts += [_fleet(overview["devices"]), *own, *_troubled(devices), ""]
    if step := overview.get("stages"):
        names = {device["device"]: device["name"] for device in devices}
        parts += [*shown_stages(step, names), ""]
    parts += [*_traffic(overview), ""]
    parts += _events(seen.events)
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a string of at most `width` bars, one per mean of a group of consecutive values.

    A bar is blank if none of its values is finite.
    """
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    least, most = (min(known), max(known)) if known else (0.0, 0.0)
    steps = (len(_BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(
        _BARS[round((mean - least) * steps)] if math.isfinite(mean) else " " for mean in means
    )


def _server(server: dict[str, Any]) -> RenderableType:
    up_s = server["now_s"] - server["started_s"]
    return _text(
        f"{server['name']}, cleave {server['version']}, up {span(up_s)}; checks: {server['verify']}"
    )


def _servers(counts: Sequence[int | None]) -> str:
    """Format the number of devices per server. None stands for a server that does not answer."""
    known = " + ".join(f"{count}" for count in counts if count is not None)
    lost = [f"server {n}" for n, count in enumerate(counts, 1) if count is None]
    silent = f"; no answer from {', '.join(lost)}" if lost else ""
    return f"{len(counts)} servers with {known} devices{silent}"


def _job(job: dict[str, Any] | None, steps: list[dict[str, Any]]) -> list[RenderableType]:
    if job is None:
        return [_text("no job; submit one with: cleave train --model NAME")]
    title = f"{job['job']} ({job['model']}) {job['state']}"
    waits = [_text(f"waits  {job['waits']}", style="bold")] if job.get("waits") else []
    if not job["steps"]:  # an inference job, which has no steps
        return [_text(title, style="bold"), *waits]
    if not steps:
        after = job.get("step")  # of the run that the job resumes; older servers omit it
        step = f"step {after:,}" if after else "no step yet"
        none = f"{title}, {step} of {job['steps']:,}"
        return [_text(none, style="bold"), *waits, *_tasks(job)]
    last, recent = steps[-1], steps[-_RECENT_STEPS:]
    done = f"{title}, step {last['step']:,} of {job['steps']:,}"
    lines = [_text(done, style="bold"), *waits]
    losses = [float(record["loss"]) for record in steps]
    lines.append(_text(f"loss   {losses[-1]:.4f}  {sparkline(losses, _CURVE_WIDTH)}"))
    # Use the median, because a step without devices is an outlier.
    wall_s = statistics.median(record["wall_s"] for record in recent)
    if wall_s > 0:
        tokens = statistics.median(record["tokens"] for record in recent)
        left = ""
        if job["state"] == "running" and not waits:
            left = f", about {span(wall_s * (job['steps'] - last['step']))} left"
        lines.append(
            _text(
                f"step   {last['wall_s']:.2f} s: {last['fleet_s']:.2f} s waiting for devices, "
                f"{last['ps_s']:.2f} s on the server"
            )
        )
        lines.append(_text(f"pace   {tokens / wall_s:,.0f} tokens/s{left}"))
    return [*lines, *_tasks(job)]


def _tasks(job: dict[str, Any]) -> list[Text]:
    """Return a line with the progress of the running step; no line if no step is running."""
    tasks, last = job.get("tasks"), job.get("last_step")
    if not tasks or (last is not None and last["step"] >= job["steps"]):
        return []
    return [_text(f"next   {tasks_text(*tasks)} of the step under way")]


def _fleet(devices: dict[str, Any]) -> RenderableType:
    if not devices["total"]:
        return _text("no devices; create a join code with: cleave pair")
    counts: dict[str, list[str]] = {}
    for kind, state, number in sorted(devices["by"], key=lambda row: (row[0] or "~", row[1])):
        shown = kind or _NO_KIND
        counts.setdefault(shown, []).append(f"{number:,} {state}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(f"{counted(devices['total'], 'device')}, by kind:")
    for shown, cells in counts.items():
        table.add_row(_text(f"  {shown}"), _text(", ".join(cells)))
    return table


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    columns = table.get("columns", ())
    return [dict(zip(columns, row, strict=False)) for row in table.get("rows", ())]


def _own(devices: list[dict[str, Any]], total: int) -> list[RenderableType]:
    mine = [device["name"] for device in devices if device.get("own")]
    if not mine:
        return []
    if len(mine) == total:
        return [Text("all devices are your own" if total > 1 else "the device is your own")]
    more = f" and {len(mine) - OWN_SHOWN:,} more" if len(mine) > OWN_SHOWN else ""
    text = f"your own: {', '.join(mine[:OWN_SHOWN])}{more}"
    return [_text(text, overflow="ellipsis", no_wrap=True)]


def _troubled(devices: list[dict[str, Any]]) -> list[RenderableType]:
    """Return one line for each device whose state has a reason, such as a quarantine."""
    found = [row for row in devices if row["reason"]]
    lines = [
        Text(f"{row['name']} is {row['state']}: {row['reason']}", overflow="ellipsis", no_wrap=True)
        for row in found[:TROUBLED_SHOWN]
    ]
    if len(found) > TROUBLED_SHOWN:
        lines.append(Text(f"and {len(found) - TROUBLED_SHOWN:,} more: cleave devices"))
    return list(lines)


def _traffic(overview: dict[str, Any]) -> list[RenderableType]:
    rates, card, totals = overview["rates"], overview["card"], overview["totals"]
    if rates["window_s"] is None:
        return []
    lines = []
    for label, way, total in (("down", "egress", "down_bytes"), ("up", "ingress", "up_bytes")):
        rate, most = rates[f"{way}_bytes_per_s"], card[f"{way}_bytes_per_s"]
        against = f", {rate / most:.0%} of the card's {human_bytes(most)}/s" if most else ""
        lines.append(
            _text(f"{label:<6} {human_bytes(rate)}/s{against}; {human_bytes(totals[total])} in all")
        )
        if kinds := overview.get("traffic", {}).get(label):
            lines.append(_text(f"       {by_kind(kinds)}"))
    lines.append(
        _text(
            f"work   {rates['flops_per_s'] / 1e9:,.1f} GFLOP/s, {rates['blocks_per_s']:,.0f} "
            f"blocks/s; {totals['reissued']:,} reissued, {totals['wrong']:,} wrong; "
            f"rates are means of {rates['window_s']:,.0f} s"
        )
    )
    energy = overview["energy"]
    if energy["devices_j"] is not None:
        carbon = f", {energy['gco2e']:,.1f} g CO2e" if energy["gco2e"] is not None else ""
        lines.append(
            _text(
                f"energy {energy['devices_j'] / 3600:,.2f} Wh{carbon}, of devices of known power "
                f"({energy['devices_known']:,} here, "
                f"{energy.get('devices_measured', 0):,} measured)"
            )
        )
    if energy.get("ps_j") is not None:
        lines.append(
            _text(f"server {energy['ps_j'] / 3600:,.2f} Wh since it started ({energy['ps_basis']})")
        )
    return list(lines)


def _events(events: list[dict[str, Any]]) -> list[RenderableType]:
    return [
        _text(
            f"{time.strftime('%H:%M:%S', time.localtime(event['time_s']))}  "
            f"{event['kind']:<10}  {event['text']}",
            overflow="ellipsis",
            no_wrap=True,
        )
        for event in events
    ]


def _text(text: str, **style: Any) -> Text:
    """Return styled text from the server, without terminal control characters."""
    return Text(printable(text), **style)


def span(seconds: float) -> str:
    """Format a duration with a unit, such as "5 min"."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


HOLDERS_SHOWN: Final = 12

_LAYERS: Final = 14  # width in characters; all columns together take 80
_NAME: Final = 18


def shown_stages(step: Mapping[str, Any], names: Mapping[int, str]) -> list[RenderableType]:
    """Return an 80-column table of an overview's `stages`. `names` maps device numbers to names."""
    batches, again = step["batches"], step["repeated"]
    words = [f"stages {batches:,} micro-batch{'' if batches == 1 else 'es'}"]
    if again:
        words.append(f"{again:,} {'pass' if again == 1 else 'passes'} repeated")
    if step["ended"]:
        words.append("the step has ended")
    if (logged := step.get("logged")) is not None:
        steps = "step" if logged == 1 else "steps"
        words.append(f"devices keep the weights, {logged:,} {steps} since the snapshot")
    table = Table(box=None, pad_edge=False)
    table.add_column("layers", no_wrap=True, max_width=_LAYERS)
    table.add_column("device", no_wrap=True, max_width=_NAME, overflow="ellipsis")
    for heading in ("in flight", "its sums", "forward", "backward", "here"):
        table.add_column(heading, justify="right", no_wrap=True)
    room, hidden = HOLDERS_SHOWN, 0
    for stage in step["stages"]:
        holders = stage["holders"][: max(0, room)]
        room -= max(1, len(holders))
        hidden += stage["devices"] - len(holders)
        passed = [f"{stage[name]:,}" for name in ("forward", "backward", "landed")]
        if not holders:
            none = "" if stage["devices"] else "waiting for one"
            table.add_row(_layers(stage), none, "", "", *passed)
        for number, (device, forward, backward, summed, coming) in enumerate(holders):
            name = names.get(device, f"device {device}")
            sums = f"{coming:,} coming" if coming else f"{summed:,}"
            cells = [printable(name), f"{forward + backward:,}", sums]
            table.add_row(*([_layers(stage), *cells, *passed] if number == 0 else ["", *cells]))
    lines: list[RenderableType] = [Text("; ".join(words), style="bold"), table]
    if hidden:
        lines.append(Text(f"and {hidden:,} more: cleave status --json"))
    return lines


def _layers(stage: Mapping[str, Any]) -> str:
    if (part := stage.get("slice")) is not None:
        number, of = part
        return f"loss {number + 1} of {of}"
    first, last = stage["first"] + 1, stage["stop"]
    layers = f"{first}" if first == last else f"{first} to {last}"
    return f"{layers}, loss" if stage["loss"] else layers
