"""The trace file and the log file of `cleave emulate`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Any

import typer

from cleave.errors import CleaveError, UsageError
from cleave.files import check_output, open_output


class Watch:
    """The observers for `--trace` and `--log`, which write a trace file and a log file."""

    def __init__(self, trace: Path | None, log: Path | None) -> None:
        from emulator.trace import TraceLog, TraceWriter

        if trace is not None and log is not None and trace.absolute() == log.absolute():
            raise UsageError(f"--trace and --log are both {trace}; give two files")
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
        """Write a line to the log. `finish` reports a failure to write."""
        try:
            if self._file is not None and self._fault is None:
                self._file.write(line)
        except OSError as error:
            self._fault = error

    def finish(self) -> None:
        """Write the trace file and close the log file.

        Raises:
            CleaveError: when a file cannot be written.
        """
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._fault = error
        if self._trace_path is not None:
            self._trace.write(self._trace_path)
            if self._trace.left_out:
                typer.echo(f"the trace leaves out {self._trace.left_out:,} later events", err=True)
        if self._fault is not None:
            raise CleaveError(f"{self._log_path} is not whole: {self._fault.strerror}")


def _checked(path: Path) -> None:
    """Raise if a file cannot be written.

    Raises:
        UsageError: when the parent folder does not exist, or the file is not writable.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}")
    try:
        check_output(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
