"""Merge several servers' overviews into one overview of all servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cleave.server.api.overview import MAX_DEVICES_BYTES, MAX_STREAMS, Answer, row_bytes


def merged(own: Answer, others: Sequence[Answer]) -> Answer:
    """Return one overview of several servers, merged from `own` and `others`.

    The job, events, server facts, latest GEMMs and energy are taken from `own`. The energy in `own`
    must already cover all servers. Session numbers must be unique across the servers.
    """
    every = [own, *others]
    return {
        **own,
        "card": _sum([each["card"] for each in every]),
        "totals": _sum([each["totals"] for each in every]),
        "traffic": _sum_deep([each["traffic"] for each in every]),
        "saved": _sum_deep([each["saved"] for each in every]),
        "rates": {**_sum([each["rates"] for each in every]), "window_s": own["rates"]["window_s"]},
        "devices": _devices([each["devices"] for each in every]),
        "plan": _first(each["plan"] for each in every),
        "stages": _first(each["stages"] for each in every),
        "timeline": _first(each["timeline"] for each in every),
        "stream": _stream([each["stream"] for each in every if each["stream"] is not None]),
    }


def ended(answer: Answer) -> Answer:
    """Return a lost server's last overview, reduced to the totals of its past work.

    Rates and bandwidths become 0, and all sessions count as ended. Devices, plans and timelines are
    removed.
    """
    return {
        **answer,
        "totals": {**answer["totals"], "left": answer["totals"]["joined"]},
        "card": dict.fromkeys(answer["card"], 0.0),
        "rates": dict.fromkeys(answer["rates"], 0.0),
        "devices": {**answer["devices"], "rows": [], "total": 0, "by": []},
        **dict.fromkeys(("plan", "stages", "timeline", "stream")),
    }


def _first(values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _sum(maps: Sequence[Answer]) -> Answer:
    """Add up dictionaries key by key. A sum is None if any of its terms is None."""
    return {
        name: None if any(each[name] is None for each in maps) else sum(e[name] for e in maps)
        for name in maps[0]
    }


def _sum_deep(maps: Sequence[Answer]) -> Answer:
    return {name: _sum([each[name] for each in maps]) for name in maps[0]}


def _devices(tables: Sequence[Answer]) -> Answer:
    rows, room = [], MAX_DEVICES_BYTES
    for row in (row for table in tables for row in table["rows"]):
        room -= row_bytes(row)
        if room < 0:
            break
        rows.append(row)
    by: Counter[tuple[str | None, str]] = Counter()
    for table in tables:
        for kind, state, count in table["by"]:
            by[kind, state] += count
    return {
        "columns": tables[0]["columns"],
        "rows": rows,
        "total": sum(table["total"] for table in tables),
        "by": [[kind, state, count] for (kind, state), count in by.items()],
    }


def _stream(streams: Sequence[Answer]) -> Answer | None:
    if not streams:
        return None
    devices = [device for stream in streams for device in stream["devices"]]
    hidden = sum(stream["hidden"] for stream in streams) + max(0, len(devices) - MAX_STREAMS)
    window_s = min(stream["window_s"] for stream in streams)
    return {"window_s": window_s, "devices": devices[:MAX_STREAMS], "hidden": hidden}
