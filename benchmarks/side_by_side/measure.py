"""Measures one row: starts a method's contender and records how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.common import machine
from benchmarks.links import LimitedNamespace
from benchmarks.side_by_side.contenders import group, hivemind, plain, served, virtual
from benchmarks.side_by_side.method import Way
from benchmarks.side_by_side.processes import AbsentError, LateError, Processes, RunError
from benchmarks.side_by_side.row import Ending, Key, Row
from benchmarks.side_by_side.run import Run
from benchmarks.side_by_side.shapes import model_path

CONTENDERS: Final[dict[Way, Callable[[Run], None]]] = {
    Way.PLAIN: plain.run,
    Way.DDP: group.run,
    Way.FSDP: group.run,
    Way.PIPELINE: group.run,
    Way.HIVEMIND: hivemind.run,
    Way.TILES: served.run,
    Way.STAGES: served.run,
    Way.AUTO: served.run,
    Way.RESIDENT: served.run,
    Way.VIRTUAL: virtual.run,
}

_ENDINGS: Final = {AbsentError: Ending.ABSENT, LateError: Ending.LATE}


def measure(
    key: Key,
    namespaces: Sequence[LimitedNamespace],
    *,
    counted: int,
    limit_s: float,
    logs: Path,
    commit: str,
) -> Row:
    """Measure a method in a setting.

    Args:
        key: the method and the setting.
        namespaces: namespaces of the devices, behind the setting's links.
        counted: number of steps to count without a fault.
        limit_s: time limit of the run in seconds.
        logs: folder for the run's output.
        commit: the measured commit.
    """
    method, setting = key
    row = Row(method, setting, limit_s=limit_s, machine=machine(), commit=commit)
    row.date = datetime.now(UTC).isoformat(timespec="seconds")
    model = model_path(setting.model, logs.parent)
    began_s = time.monotonic()
    with Processes(logs, began_s + limit_s) as processes:
        run = Run(method, setting, model, counted, namespaces, processes, logs, row)
        try:
            CONTENDERS[method.way](run)
            if not run.done:
                raise RunError(f"it did {len(row.losses)} steps of {run.steps}")
        except RunError as error:
            row.ending = _ENDINGS.get(type(error), Ending.FAILED)
            row.reason, row.output = str(error), error.output
        except OSError as error:
            row.ending, row.reason = Ending.FAILED, str(error)
    row.took_s = time.monotonic() - began_s
    return row
