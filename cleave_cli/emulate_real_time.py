"""Real-time mode of `cleave emulate`: run the devices; show a status line and a summary."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from cleave.errors import CleaveError, UsageError
from cleave.files import check_output, open_output
from cleave_cli.options import counted, human_bytes
from cleave_cli.render.text import filled, say

if TYPE_CHECKING:
    from emulator.realtime import Lateness, RealTimeCounters
    from profiles.fleet_device import FleetDevice


class Watch:
    """The observers of an emulation, which write the files of `--trace` and `--log`."""

    def __init__(self, trace: Path | None, log: Path | None) -> None:
        from emulator.activity import TraceLog, TraceWriter

        if trace is not None and log is not None and trace.absolute() == log.absolute():
            raise UsageError(f"--trace and --log are both {trace}; use two different files")
        self._trace_path = trace
        self._log_path = log
        self.observers: list[Any] = []
        self._trace = TraceWriter()
        self._file: IO[str] | None = None
        self._fault: OSError | None = None
        if trace is not None:
            _checked(trace)  # report an error before the emulation starts
            self.observers.append(self._trace)
        if log is not None:
            _checked(log)
            self._file = io.TextIOWrapper(io.BufferedWriter(open_output(log)), encoding="utf-8")
            self.observers.append(TraceLog(self._log))

    def _log(self, line: str) -> None:
        """Write a line to the log. If writing fails, `finish` raises the error."""
        try:
            if self._file is not None and self._fault is None:
                self._file.write(line)
        except OSError as error:
            self._fault = error

    def finish(self) -> None:
        """Write the trace file and close the log; raise CleaveError if the log is incomplete."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._fault = error
        if self._trace_path is not None:
            self._trace.write(self._trace_path)
            if self._trace.left_out:
                typer.echo(f"the trace omits the last {self._trace.left_out:,} events", err=True)
        if self._fault is not None:
            raise CleaveError(f"{self._log_path} is incomplete: {self._fault.strerror}")


def _checked(path: Path) -> None:
    """Raise UsageError if a file cannot be written."""
    try:
        check_output(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


_LOOK_S = 1.0
_JUDGED_S = 10.0  # length of the window in which late results are counted
_LEAST_ANSWERS = 20  # minimum number of results in a window for a warning
_MOST_LATE = 0.01  # maximum share of late results without a warning
_ADVICE = "emulate fewer devices, use --no-compute, or a --speed below 1"


def real_time(
    members: list[FleetDevice],
    server: str,
    compute: bool,
    speed: float,
    duration: float,
    seed: int,
    start_hour: float,
    watch: Watch,
    *,
    as_json: bool,
) -> None:
    """Emulate a fleet in real time on the server at join URL `server` (empty: a new server)."""
    import os

    # Busy-waiting threads would starve the event loop.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import asyncio

    from cleave.server.http.pages import Pages
    from cleave.transport.join_url import parse_join_url, read_url
    from cleave_cli.own_server import own_server
    from emulator.deferred import default_backend
    from emulator.realtime import RealTimeFleet, need_descriptors

    need_descriptors(len(members))
    target = parse_join_url(read_url(server)) if server else None
    backend = default_backend() if compute else None
    # Without `compute`, devices return zeros, which verification and audits of stages would reject.
    options = ("--stages-on", "any") if compute else ("--verify", "off")
    with nullcontext(None) if target else own_server(*options) as own:
        if own is not None:
            target = parse_join_url(own.url)
            command = f"cleave train --model opt-tiny --server \\\n  '{own.operator_url}'"
            text = (
                f"a server is running; train on it with\n\n  {command}\n\n"
                f"`cleave status` and `cleave devices` need the same --server\n"
            )
            _say(as_json, "serving", text, url=own.url, operator_url=own.operator_url)
        assert target is not None
        page = own.dashboard_url if own else target.page("/").partition("#")[0]
        text = f"its dashboard: {page}{'' if own else ' (`cleave dashboard` signs you in)'}"
        if own and not Pages.of_package().complete:
            text = "no dashboard: build the web pages with `make web`, and start again"
        _say(as_json, "dashboard", text, url=page)
        if own is None and not compute:
            text = "the devices return zeros, so their server needs: cleave serve --verify off"
            _say(as_json, "note", text, reason=text)
        fleet = RealTimeFleet(
            members, target, backend, speed=speed, seed=seed, start_hour=start_hour
        )
        fleet.observers.extend(watch.observers)
        try:
            gone = (lambda: own.process.poll() is not None) if own else (lambda: False)
            asyncio.run(watched(fleet, len(members), duration, gone, as_json=as_json))
        finally:
            watch.finish()


async def watched(
    fleet: Any, devices: int, duration: float, gone: Callable[[], bool], *, as_json: bool
) -> None:
    """Run a fleet for `duration` seconds (0: no limit), or until Ctrl-C or `gone` returns True."""
    import asyncio
    import signal
    import time

    from rich.console import Console
    from rich.live import Live

    running = asyncio.ensure_future(fleet.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, running.cancel)
        except NotImplementedError:  # event loops on Windows do not support signal handlers
            break
    console = Console(stderr=True, highlight=False)
    live = Live(console=console, auto_refresh=False, transient=True)
    began_s = seen_s = time.monotonic()
    before = fleet.counters()
    shown = not as_json and console.is_terminal
    pace = Pace()
    with live if shown else Live(console=Console(quiet=True), auto_refresh=False):
        while not running.done():
            left_s = duration - (time.monotonic() - began_s) if duration else _LOOK_S
            if left_s <= 0 or gone():
                running.cancel()
            await asyncio.wait([running], timeout=max(0.01, min(_LOOK_S, left_s)))
            now, now_s = fleet.counters(), time.monotonic()
            values = _rates(before, now, now_s - seen_s, devices)
            before, seen_s = now, now_s
            if text := pace.falls_behind(now.lateness, now_s):
                _say(as_json, "late", text, reason=text)
            if as_json:
                typer.echo(json.dumps({"event": "rates", **values}))
            elif shown:
                live.update(_line(values), refresh=True)
    end = fleet.counters()
    with suppress(asyncio.CancelledError):
        running.result()
    _summary(end, fleet.notes, devices, time.monotonic() - began_s, as_json=as_json)
    if gone():
        raise CleaveError(
            "the server that this emulation started has exited; start the emulation again"
        )


class Pace:
    """Checks, during a run, whether this machine computes the devices' results in time."""

    def __init__(self) -> None:
        self._from_s: float | None = None
        self._answers = self._late = 0
        self._told = False

    def falls_behind(self, lateness: Lateness, now_s: float) -> str:
        """Return a warning the first time that too many recent results were late; otherwise ""."""
        if self._from_s is not None and now_s < self._from_s + _JUDGED_S:
            return ""
        answers, late = lateness.answers - self._answers, lateness.late - self._late
        self._from_s, self._answers, self._late = now_s, lateness.answers, lateness.late
        if self._told or answers < _LEAST_ANSWERS or late <= _MOST_LATE * answers:
            return ""
        self._told = True
        return (
            f"{late / answers:.0%} of the last {answers:,} results were late: this machine cannot "
            f"keep up, so do not trust the times from now on; {_ADVICE}"
        )


def _rates(
    before: RealTimeCounters, now: RealTimeCounters, seconds: float, devices: int
) -> dict[str, Any]:
    done = now.done - before.done
    return {
        "devices": devices,
        "connected": now.connected,
        "blocks_per_s": done.blocks / seconds,
        "flops_per_s": done.flops / seconds,
        "downlink_bytes_per_s": done.downlink_bytes / seconds,
        "uplink_bytes_per_s": done.uplink_bytes / seconds,
        "answers": now.lateness.answers,
        "late": now.lateness.late,
        "worst_s": now.lateness.worst_s,
    }


def _line(v: dict[str, Any]) -> str:
    return (
        f"{v['connected']:,} of {v['devices']:,} devices; {v['blocks_per_s']:,.0f} blocks/s, "
        f"{v['flops_per_s'] / 1e9:,.1f} GFLOP/s\n"
        f"down {human_bytes(v['downlink_bytes_per_s'])}/s, "
        f"up {human_bytes(v['uplink_bytes_per_s'])}/s; "
        f"{v['late']:,} of {v['answers']:,} results late"
    )


def _summary(
    end: RealTimeCounters, notes: dict[str, int], devices: int, seconds: float, *, as_json: bool
) -> None:
    late, done = end.lateness, end.done
    share = late.late / late.answers if late.answers else 0.0
    text = (
        f"{counted(devices, 'device')}, {seconds:.0f} s: joined {counted(end.joined, 'time')}, "
        f"{counted(done.blocks, 'block')}, "
        f"{done.flops / 1e9:,.1f} GFLOP, {human_bytes(done.downlink_bytes)} down, "
        f"{human_bytes(done.uplink_bytes)} up"
    )
    text += f"; {share:.1%} of the results were late" if late.answers else "; no job ran"
    if share > _MOST_LATE:
        text += (
            f" (the worst by {late.worst_s:.2g} s): this machine cannot keep up, so do not trust "
            f"the times; {_ADVICE}"
        )
    if not end.joined and not notes:
        text += "\nno device joined: all were outside their hours; try another --start-hour"
    for reason, times in sorted(notes.items(), key=lambda item: -item[1])[:5]:
        text += f"\n  {counted(times, 'time')}: {reason}"
    _say(
        as_json,
        "summary",
        filled(text),
        devices=devices,
        seconds=seconds,
        joined=end.joined,
        blocks=done.blocks,
        flops=int(done.flops),
        downlink_bytes=done.downlink_bytes,
        uplink_bytes=done.uplink_bytes,
        answers=late.answers,
        late=late.late,
        worst_s=late.worst_s,
        notes=notes,
    )


def _say(as_json: bool, event: str, text: str, **values: Any) -> None:
    if as_json:
        typer.echo(json.dumps({"event": event, **values}))
    else:
        say(text)
