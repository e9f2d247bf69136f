"""Tables of rows as text: seconds, bytes, memory, losses, and checks."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.side_by_side.method import LOSS_LIMITS, Method, Way
from benchmarks.side_by_side.row import Key, Row
from benchmarks.side_by_side.setting import Fault, Setting
from cleave.planner.coding import LINK_BYTES_PER_S

FLOOR_LIMIT: Final = 1.1
"""Limit of a step's bytes over the lower bound `StepWork.floor_bytes`."""

VIRTUAL_LIMIT: Final = 0.15
"""Maximum relative difference of a step from virtual time."""

PLAIN: Final = Method(Way.PLAIN, "fp32")
_WIDTH: Final = 80
_COLUMNS: Final = 3  # in 80 characters


def reference_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return plain PyTorch's row for comparing losses; None if there is none.

    Links and faults do not change plain PyTorch's losses.
    """
    alike = [
        other
        for other in rows
        if other.method == PLAIN and other.losses and work(other.setting) == work(row.setting)
    ]
    # Runs may have different numbers of steps.
    return max(alike, key=lambda other: len(other.losses), default=None)


def work(setting: Setting) -> tuple[object, ...]:
    """Return the part of a setting that defines the training, without devices and links."""
    return setting.model, setting.tokens, setting.seq, setting.rank


def difference(row: Row, reference: Row) -> float:
    """Return the largest relative difference of losses in the common steps."""
    pairs = zip(row.losses, reference.losses, strict=False)
    return max((abs(mine - other) / abs(other) for mine, other in pairs), default=0.0)


def agrees(row: Row, reference: Row | None) -> bool:
    """Return whether a row's losses match the reference within its dtype's limit."""
    if reference is None:
        return True
    return difference(row, reference) <= LOSS_LIMITS[row.method.dtype]


def other(row: Row, rows: Iterable[Row], method: Method) -> Row | None:
    """Return another method's timed row in the same setting; None if there is none.

    Plain PyTorch has no links, so its row may have another setting with the same work.
    """
    timed = [found for found in rows if found.method == method and found.measured]
    same = [found for found in timed if found.setting == row.setting]
    if not same and method.way is Way.PLAIN:
        same = [found for found in timed if work(found.setting) == work(row.setting)]
    return same[0] if same else None


@dataclass(frozen=True)
class Saving:
    """The time that compression saves in a step.

    Attributes:
        ratio: time of a step over that without compression.
        limit: maximum of the ratio.
    """

    ratio: float
    limit: float


def saving(row: Row, rows: Iterable[Row]) -> Saving | None:
    """Return the saving by compression; None if it was not measured.

    The busiest link's share of a step should shrink to 0.70, plus 0.03 for compressing. On links
    that are too fast for compression, a step may take 1.02 times as long.
    """
    if not row.method.way.of_cleave or row.method.variant:
        return None
    plain = other(row, rows, replace(row.method, variant="off"))
    if plain is None or not row.measured:
        return None
    slow = min(row.setting.link.down, row.setting.link.up) <= LINK_BYTES_PER_S
    elsewhere = max(0.0, 1 - plain.links_s / plain.step_s)
    limit = 0.70 + 0.30 * elsewhere + 0.03 if slow else 1.02
    return Saving(row.step_s / plain.step_s, limit)


def settings_of(rows: Iterable[Row]) -> list[Setting]:
    """Return the distinct settings of rows, in order."""
    return [*dict.fromkeys(row.setting for row in rows)]


def show(rows: Sequence[Row]) -> None:
    """Print rows, with a table for each setting."""
    for setting in settings_of(rows):
        _show_setting(setting, [row for row in rows if row.setting == setting], rows)


def heading(setting: Setting) -> str:
    """Return a setting's description as a sentence."""
    adapters = f"; adapters of rank {setting.rank} are trained" if setting.rank else ""
    faults = {
        Fault.NONE: "",
        Fault.STOP: "; one device is stopped for a minute",
        Fault.KILL: "; one device is killed",
    }
    cores = f" of {setting.cores:g} cores" if setting.cores else ""
    return (
        f"{setting.model}, {setting.batch} x {setting.seq} tokens a step, {setting.devices} "
        f"devices{cores} behind {setting.link.name} Mbit/s (down/up), "
        f"{setting.round_trip_ms:g} ms there and back{adapters}{faults[setting.fault]}"
    )


def title(setting: Setting) -> str:
    """Return a setting's short description."""
    what = f"adapters of rank {setting.rank}" if setting.rank else "the whole model"
    cores = f", {setting.cores:g} cores each" if setting.cores else ""
    return (
        f"{setting.model}, {what}, {setting.tokens} tokens behind {setting.link.name} Mbit/s{cores}"
    )


def named(key: Key) -> str:
    """Return a one-line description of a row's method and setting."""
    setting = key.setting
    adapters = f", adapters of rank {setting.rank}" if setting.rank else ""
    fault = f", {setting.fault.value}" if setting.fault is not Fault.NONE else ""
    cores = f", {setting.cores:g} cores each" if setting.cores else ""
    return (
        f"{key.method.name} {setting.model} {setting.batch} x {setting.seq} behind "
        f"{setting.link.name}{adapters}{cores}{fault}"
    )


def _show_setting(setting: Setting, some: Sequence[Row], rows: Sequence[Row]) -> None:
    say(heading(setting))
    print(f"\n{'':18} {'':8} {'MB a device and step':>21} {'peak memory, MB':>16}")
    head = ("method", "s a step", "down", "up", "server", "device", "losses off")
    print("{:18} {:>8} {:>10} {:>10} {:>8} {:>7} {:>10}".format(*head))
    for row in some:
        reference = reference_of(row, rows)
        off = f"{difference(row, reference):.1e}" if reference and row.losses else "-"
        step = f"{row.step_s:.2f}" if row.measured else row.ending.value
        print(
            f"{row.method.name:18} {step:>8} {_mb(max(row.down_bytes, default=0)):>10} "
            f"{_mb(max(row.up_bytes, default=0)):>10} {_mb(row.server_peak_bytes):>8} "
            f"{_mb(row.device_peak_bytes):>7} {off:>10}"
        )
    print()
    _show_losses([row for row in some if row.losses])
    for row in some:
        for text in [*checks(row, rows)]:
            say(f"{row.method.name}: {text}")
    print()


def checks(row: Row, rows: Sequence[Row]) -> Iterable[str]:
    """Yield texts on a row's settings and checks."""
    if row.best:
        yield row.best
    if not row.whole:
        yield f"{row.ending.value}: {row.reason} (limit: {row.limit_s:g} s)"
    if row.fault_step:
        shown = ", ".join(f"{seconds:.1f}" for seconds in row.seconds)
        yield f"the fault came in step {row.fault_step}; seconds of steps from 2 on: {shown}"
    elif (reference := reference_of(row, rows)) and row.losses and row.method != PLAIN:
        limit = LOSS_LIMITS[row.method.dtype]
        yield (
            f"losses {difference(row, reference):.1e} off {PLAIN.name} (at most {limit:g}): "
            f"{_met(agrees(row, reference))}"
        )
    if saved := saving(row, rows):
        yield (
            f"with coding a step takes {saved.ratio:.3f} of the time without (at most "
            f"{saved.limit:.3f}): {_met(saved.ratio <= saved.limit)}"
        )
    if row.floor_ratio and row.method.way is Way.STAGES:
        yield (
            f"without coding a step would send {row.floor_ratio:.3f} times the least bytes (at "
            f"most {FLOOR_LIMIT:g}): {_met(row.floor_ratio <= FLOOR_LIMIT)}"
        )
    if not row.measured:
        return
    alone = other(row, rows, Method(Way.PLAIN, row.method.dtype))
    if alone is not None and alone is not row:
        yield f"{row.step_s / alone.step_s:.2f} times the step of this machine alone"
    in_virtual = other(row, rows, replace(row.method, way=Way.VIRTUAL))
    if in_virtual is not None and row.method.way is Way.STAGES:
        ratio = row.step_s / in_virtual.step_s
        yield (
            f"{ratio:.3f} times the step in virtual time (1 +/- {VIRTUAL_LIMIT:g}): "
            f"{_met(abs(ratio - 1) <= VIRTUAL_LIMIT)}"
        )
    if row.plan:
        yield row.plan
    if row.lost:
        yield f"devices left {row.lost} times"


def _met(right: bool) -> str:
    return "met" if right else "NOT met"


def _show_losses(rows: Sequence[Row]) -> None:
    """Print the losses of each step in columns."""
    for first in range(0, len(rows), _COLUMNS):
        some = rows[first : first + _COLUMNS]
        print("loss" + "".join(f"{row.method.name:>22}" for row in some))
        for step in range(max(len(row.losses) for row in some)):
            told = (f"{row.losses[step]:.6f}" if step < len(row.losses) else "-" for row in some)
            print(f"{step + 1:4}" + "".join(f"{text:>22}" for text in told))
        print()


def say(text: str) -> None:
    """Print text in lines of at most 80 columns."""
    print(textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.0f}" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f}" if nbytes else "-"
