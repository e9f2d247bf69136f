"""Conclusions from the rows, as sentences: goals, fastest methods, survival of faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from benchmarks.side_by_side.method import LOSS_LIMITS, Method, Way
from benchmarks.side_by_side.row import Row
from benchmarks.side_by_side.setting import Fault, Link, Setting
from benchmarks.side_by_side.tables import (
    agrees,
    difference,
    reference_of,
    settings_of,
    title,
    work,
)

FULL_LIMIT: Final = 1 / 3
"""Limit of stages' time over DDP's and hivemind's: whole model, 8192 tokens, 100/20 Mbit/s."""

LORA_LIMIT: Final = 1.5
"""Limit of stages' time over the step's arithmetic alone: adapters, 50/10 Mbit/s."""

RESIDENT_LIMITS: Final = {8192: 0.9, 1024: 1.0}
"""Limit of the time over a pipeline's, by tokens: the state stays on devices, whole model."""

_TOKENS: Final = 8192
_HOME: Final = Link(100, 20)
_SLOW: Final = Link(50, 10)
_LONGEST: Final = 110  # maximum number of characters of a reason


def full_work(setting: Setting) -> bool:
    """Return whether the goal for whole models applies to a setting."""
    return _judged(setting) and not setting.rank and setting.link == _HOME


def lora_work(setting: Setting) -> bool:
    """Return whether the goal for adapters applies to a setting."""
    return _judged(setting) and bool(setting.rank) and setting.link == _SLOW


def _judged(setting: Setting) -> bool:
    shared = not setting.cores and setting.fault is Fault.NONE
    return shared and setting.tokens == _TOKENS


def fastest(rows: Sequence[Row], ways: Sequence[Way], dtype: str) -> Row | None:
    """Return the fastest finished row of some ways that matches plain PyTorch's losses.

    Args:
        rows: rows of one setting.
        ways: the ways to train.
        dtype: dtype of the arithmetic, because half the bytes are no merit of a way.
    """
    fair = [
        row
        for row in rows
        if row.method.way in ways
        and row.method.dtype == dtype
        and row.whole
        and row.measured
        and agrees(row, reference_of(row, rows))
    ]
    return min(fair, key=lambda row: row.step_s, default=None)


def calm(rows: Sequence[Row], setting: Setting) -> list[Row]:
    """Return a setting's rows without faults, and plain PyTorch's rows of the same work."""
    undisturbed = replace(setting, fault=Fault.NONE)
    return [
        row
        for row in rows
        if row.setting == undisturbed
        or (row.method.way is Way.PLAIN and work(row.setting) == work(setting))
    ]


def goals(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence with the measurements for each goal."""
    for setting, dtype in product(settings_of(rows), LOSS_LIMITS):
        here = calm(rows, setting)
        stages, kept = (fastest(here, [way], dtype) for way in (Way.STAGES, Way.RESIDENT))
        limit = RESIDENT_LIMITS.get(setting.tokens)
        pipeline = fastest(here, [Way.PIPELINE], dtype)
        if kept and pipeline and limit and not setting.cores and setting.link in (_HOME, _SLOW):
            yield _goal(kept, pipeline, limit)
        if stages is None:
            continue
        if full_work(setting):
            for way in (Way.DDP, Way.HIVEMIND):
                if (peer := fastest(here, [way], dtype)) is not None:
                    yield _goal(stages, peer, FULL_LIMIT)
        if lora_work(setting) and (plain := fastest(here, [Way.PLAIN], dtype)) is not None:
            yield _goal(stages, plain, LORA_LIMIT)


def _goal(stages: Row, peer: Row, limit: float) -> str:
    ratio = stages.step_s / peer.step_s
    met = "met" if ratio <= limit else "**not met**"
    return (
        f"{title(stages.setting)}: `{stages.method.name}` takes {ratio:.2f} times as long as "
        f"`{peer.method.name}` ({stages.step_s:.1f} s and {peer.step_s:.1f} s per step); the goal "
        f"is at most {limit:.2f}: {met}."
    )


def winners(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the fastest method for each setting and dtype, and the other side's result."""
    peers = [way for way in Way if not way.of_cleave and way is not Way.PLAIN]
    for setting, dtype in product(settings_of(rows), LOSS_LIMITS):
        here = calm(rows, setting)
        if setting.fault is not Fault.NONE:
            continue
        own = fastest(here, [Way.STAGES, Way.TILES, Way.AUTO, Way.RESIDENT], dtype)
        peer, plain = fastest(here, peers, dtype), fastest(here, [Way.PLAIN], dtype)
        if own is None or peer is None:
            continue
        first, second = sorted((own, peer), key=lambda row: row.step_s)
        alone = (
            f" One machine alone, on both cores and without links: {plain.step_s:.1f} s."
            if plain is not None
            else ""
        )
        yield (
            f"{title(setting)}: `{first.method.name}` is the fastest with {first.step_s:.1f} s "
            f"per step, {second.step_s / first.step_s:.2f} times as fast as "
            f"`{second.method.name}`; their transfers alone take {first.links_s:.0f} s and "
            f"{second.links_s:.0f} s.{alone}"
        )


def survival(row: Row | None, rows: Sequence[Row]) -> str:
    """Return text on the effect of a fault on a method."""
    if row is None:
        return "not measured"
    if not row.whole:
        return f"{row.ending.value} after {len(row.losses)} steps: {short(row.reason)}"
    reference = reference_of(row, rows)
    off = difference(row, reference) if reference is not None else float("nan")
    right = "those of plain PyTorch" if agrees(row, reference) else "**not those of plain PyTorch**"
    at = row.fault_step - 2
    seconds = f"{row.step_s:.1f}, {row.seconds[at]:.1f}, {row.seconds[at + 1]:.1f}"
    if reference is None or len(reference.losses) < len(row.losses):
        right = "not compared to the end: plain PyTorch did fewer steps"
    return f"continues; seconds before, in and after: {seconds}; losses {right} ({off:.0e} off)"


def short(reason: str) -> str:
    """Return a reason as a line that fits a table, without source locations."""
    line = re.sub(r"\[/\S+\]\s*", "", reason.split("\n")[0]).replace("|", "/")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST].rsplit(' ', 1)[0]} ..."


def disturbed(rows: Sequence[Row]) -> list[tuple[Setting, list[Method]]]:
    """Return the settings (without fault) that have rows with faults, and their methods."""
    found: dict[Setting, list[Method]] = {}
    for row in rows:
        if row.setting.fault is not Fault.NONE:
            methods = found.setdefault(replace(row.setting, fault=Fault.NONE), [])
            if row.method not in methods:
                methods.append(row.method)
    return [*found.items()]
