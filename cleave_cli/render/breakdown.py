"""The breakdown of a step by stages: what the server and each device did, and the bottleneck.

The devices' times overlap with one another and with the server's, so they do not add up to the
duration of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

_SERVER: Final = {
    "loss_s": "the loss",
    "sums_s": "adding the gradients",
    "optimizer_s": "the optimizer",
    "audit_s": "audits",
    "planning_s": "planning",
}
_DEVICE: Final = {"compute_s": "computation", "down_s": "downlink", "up_s": "uplink"}
_LEVELS: Final = ".-+#"  # of computation in a part of a step
_NAME: Final = 17  # characters of a device's name
_LIMITS: Final = 0.6  # smallest share of a step for which a part is called the bottleneck


def server_parts(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the time in seconds of each part of the server's work in a step, longest first."""
    parts = {name: record.get(key, 0.0) for key, name in _SERVER.items()}
    parts["other work"] = max(0.0, record["ps_s"] - sum(parts.values()))
    return dict(sorted(parts.items(), key=lambda each: -each[1]))


def bottleneck(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return what takes the most time in a step by stages, and a clause that says how much.

    Args:
        record: a `StepRecord` as a dictionary, with at least one device.
    """
    wall_s = max(record["wall_s"], 1e-9)
    part, part_s = next(iter(server_parts(record).items()))
    found = [(record["ps_s"], "the server's own work", f" ({part}: {part_s:.3g} s)")]
    for key, what in _DEVICE.items():
        most = max(record["devices"], key=lambda device: device[key])
        found.append((most[key], f"the {what} of {most['name']}", ""))
    seconds, what, details = max(found)
    text = f"{what} takes {seconds:.3g} of {wall_s:.3g} s{details}"
    if seconds < _LIMITS * wall_s:
        text += "; server and devices also wait for each other, less so with larger batches"
    return what, text


def breakdown(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `--verbose` prints after a step by stages."""
    parts = ", ".join(f"{name} {s:.2g} s" for name, s in server_parts(record).items() if s >= 0.01)
    yield f"server {record['ps_s']:.3g} of {record['wall_s']:.3g} s: {parts}"
    timelines = [device.get("timeline", ()) for device in record["devices"]]  # an older server's
    width = max(map(len, timelines))
    columns = "".join(f" {name:>6}" for name in ("comp.", "down", "up s"))
    yield f"{'device':{_NAME}} {'timeline':{width}}{columns}"
    for device, timeline in zip(record["devices"], timelines, strict=True):
        bar = "".join(_LEVELS[math.ceil(share * 3)] for share in timeline)
        seconds = "".join(f" {device[key]:6.3g}" for key in _DEVICE)
        yield f"{device['name'][:_NAME]:{_NAME}} {bar}{seconds}"
    yield "#: computes, +: up to two thirds of the time, -: up to one third, .: not at all"
