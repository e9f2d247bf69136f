"""Terminal output of a step by stages: the devices of each stage and their progress."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cleave_cli.render.say import printable

HOLDERS_SHOWN: Final = 12

_LAYERS: Final = 14  # width in characters; all columns together take 80
_NAME: Final = 18


def shown_stages(step: Mapping[str, Any], names: Mapping[int, str]) -> list[RenderableType]:
    """Return a table of a step by stages, for a terminal with 80 columns.

    Args:
        step: the entry `stages` of a server's overview.
        names: maps a session number to the device's name.
    """
    batches, again = step["batches"], step["repeated"]
    words = [f"stages {batches:,} micro-batch{'' if batches == 1 else 'es'}"]
    if again:
        words.append(f"{again:,} {'pass' if again == 1 else 'passes'} done again")
    if step["ended"]:
        words.append("the step is over")
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
            none = "" if stage["devices"] else "waits for one"
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
