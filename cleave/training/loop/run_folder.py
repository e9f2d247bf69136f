"""The folder of one training run: its configuration, its metrics and its loss curve.

config.toml      the run's settings
fleet.toml       the devices that `cleave train` emulated
model/           the model's configuration and tokenizer, for an export
checkpoints/     see `checkpoint`
best/            the checkpoint with the lowest held-out loss, if kept
metrics.jsonl    one JSON object per line, appended during the run
loss.png         the loss curve, drawn from the metrics
lock             locked while a process uses the folder, and names that process
"""

import errno
import io
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Self

from cleave.errors import CleaveError, UsageError
from cleave.files import (
    LOCK,
    Lock,
    LockedError,
    make_folder,
    new_folder,
    open_to_append,
    refuse_link,
    write_all,
    write_atomically,
)
from cleave.training.loop.disk import cannot_write

CHECKPOINTS = "checkpoints"
"""Subfolder of the run's checkpoints."""

BEST = "best"
"""Subfolder of the checkpoint with the lowest held-out loss."""

JOURNAL = "journal"
"""Subfolder of finished products; see `cleave.training.loop.journal`."""

DESCRIPTION = "model"
"""Subfolder that describes the run's model."""

OWN_FOLDERS = (CHECKPOINTS, BEST, JOURNAL, DESCRIPTION, "tensorboard", "wandb", "ray")
"""Subfolders that a run writes to, which therefore must not be links."""

_NO_LOCKS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT,  # read-only folders
    errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP,
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, with one writer at a time and any number of readers."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str | None = None, *, now: datetime | None = None) -> Self:
        """Make a new folder under `root`, named `name` or by the local time.

        Raises UsageError when the name is taken or is not a plain name, CleaveError when the folder
        cannot be made.
        """
        if name is not None:
            cls.check_name(root, name)
        stem = name or (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
        attempt = 1
        while True:
            path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
            try:
                new_folder(path)
            except FileExistsError:
                if name is not None:
                    raise _taken(path) from None
                attempt += 1
            except OSError as error:
                raise cannot_write(path, error) from error
            else:
                return cls(path)

    @staticmethod
    def check_name(root: Path, name: str) -> None:
        """Refuse a name that is invalid for a run folder or already exists in `root`.

        Raises:
            UsageError: when the name is refused.
        """
        if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
            raise UsageError(
                f"{name!r} is not a name for a run: use one of visible characters without slashes."
            )
        if (root / name).exists():
            raise _taken(root / name)

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing was written to it, as after a refused run."""
        if self.path.is_dir() and {each.name for each in self.path.iterdir()} <= {LOCK}:
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    @contextmanager
    def lock(self, wait_s: float = 0.0, advice: str = "") -> Iterator[str]:
        """Return a context manager that locks the folder against other processes.

        It yields an empty text, or why the folder cannot be locked: it may be read-only, or its
        file system may have no locks.

        Args:
            wait_s: how long to wait for another process to release the folder.
            advice: further advice for the user if another process uses the folder.

        Raises:
            UsageError: when another process uses the folder.
            CleaveError: when a subfolder is a link, or the lock file is not Cleave's.
        """
        try:
            for name in OWN_FOLDERS:
                refuse_link(self.path / name)
            make_folder(self.path)
            lock = Lock(self.path / LOCK, wait_s)
        except LockedError as error:
            raise UsageError(
                f"{error.holder} uses the run folder {str(self.path)!r}: wait until that ends, or "
                f"stop it{advice}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise cannot_write(Path(error.filename or self.path), error) from error
            yield error.strerror or str(error)
            return
        with lock:
            yield ""

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def plot_path(self) -> Path:
        return self.path / "loss.png"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write `config` as TOML, without None values: TOML has no null."""
        import tomli_w

        try:
            write_atomically(self.config_path, tomli_w.dumps(_without_none(config)).encode())
        except OSError as error:
            raise cannot_write(self.config_path, error) from error

    def read_config(self) -> dict[str, Any]:
        """Return the written configuration. Raises UsageError if it is missing or damaged."""
        try:
            return tomllib.loads(self.config_path.read_text("utf-8"))
        except OSError as error:
            raise UsageError(
                f"{str(self.path)!r} is not the folder of a run, its config.toml cannot be read "
                f"({error.strerror}): give the folder that `cleave train` made."
            ) from error
        except ValueError as error:
            raise UsageError(
                f"{str(self.config_path)!r} is damaged ({error}): repair it, or start a new run."
            ) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, whole or not at all. On return the OS has it.

        NaN and infinity, which JSON lacks, are written as null; numpy and torch scalars as numbers.
        After a crash, call `rewind` before the first `append`.
        """
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        try:
            with open_to_append(self.metrics_path) as file:
                _append_whole(file, line.encode())
        except OSError as error:
            raise cannot_write(self.metrics_path, error) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records so far, in order, without an incomplete last line.

        Raises CleaveError for any other line that is not a JSON object.
        """
        for number, (line, record) in enumerate(self._lines(), start=1):
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise CleaveError(
                    f"Line {number} of {str(self.metrics_path)!r} is damaged: "
                    "remove that line, or resume the run, which does it."
                )

    def rewind(self, step: int) -> None:
        """Restore the metrics to those after `step`, before the run resumes there.

        Drops damaged or incomplete lines, every record of a later step, and a plot that shows one.

        Raises:
            CleaveError: when the metrics cannot be written, or the file does not hold metrics.
        """
        lines = list(self._lines())
        kept = [
            line
            for line, record in lines
            if record is not None and line.endswith(b"\n") and not _is_later(record, step)
        ]
        if not self.metrics_path.exists():
            return
        begin = b"".join(line for line, _ in lines[:1]).strip(b"\0")  # a power loss leaves zeros
        if begin and not begin.startswith(b'{"') and not any(record for _, record in lines):
            raise CleaveError(
                f"{str(self.metrics_path)!r} does not hold the metrics of a run: move it away"
            )
        try:
            refuse_link(self.metrics_path)
            write_atomically(self.metrics_path, b"".join(kept))
            if any(record is not None and _is_later(record, step) for _, record in lines):
                self.plot_path.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.metrics_path, error) from error

    def plot(self) -> Path | None:
        """Draw "loss" and, if recorded, "eval_loss" and "against_loss" over "step" into loss.png.

        Returns its path, or None when no loss has been recorded yet.
        """
        records = list(self.records())
        train = _curve(records, "loss")
        evaluation = _curve(records, "eval_loss")
        compared = _curve(records, "against_loss")
        if not train and not evaluation:
            return None

        # Not pyplot: it needs a display and shares state with the caller's plots.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if train:
            axes.plot(*zip(*train, strict=True), linewidth=1, label="train")
        if compared:
            axes.plot(*zip(*compared, strict=True), linewidth=1, ls="--", label="compared run")
        if evaluation:
            axes.plot(*zip(*evaluation, strict=True), marker="o", markersize=4, label="validation")
        axes.set(title=f"Loss of {self.path.name}", xlabel="step", ylabel="loss (nats per token)")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        try:
            write_atomically(self.plot_path, image.getvalue())
        except OSError as error:
            raise cannot_write(self.plot_path, error) from error
        return self.plot_path

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield each line of metrics.jsonl with its ending, and its record or None."""
        try:
            with self.metrics_path.open("rb") as file:
                for line in file:
                    yield line, _parse(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleaveError(
                f"{str(self.metrics_path)!r} cannot be read ({error.strerror}): "
                "check the file and its permissions."
            ) from error


def _append_whole(file: FileIO, data: bytes) -> None:
    """Write at the end of a file. On OSError, nothing is written."""
    end = file.seek(0, os.SEEK_END)
    try:
        write_all(file, data)
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_later(record: dict[str, Any], step: int) -> bool:
    recorded = record.get("steps" if record.get("event") == "done" else "step")
    return isinstance(recorded, int | float) and recorded > step


def _curve(records: list[dict[str, Any]], field: str) -> list[tuple[float, float]]:
    """Return (step, value) of the records that have both as numbers."""
    return [
        (record["step"], record[field])
        for record in records
        if isinstance(record.get("step"), int | float)
        and isinstance(record.get(field), int | float)
    ]


def _plain(value: Any) -> Any:
    """Return `value` in a form that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item())
    return value


def _without_none(value: Any) -> Any:
    """Return `value` in a form that TOML can hold."""
    if isinstance(value, Mapping):
        return {str(k): _without_none(item) for k, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value if item is not None]
    return str(value) if isinstance(value, Path) else value


def _taken(path: Path) -> UsageError:
    return UsageError(
        f"The run folder {str(path)!r} exists already: choose another name, or resume that run."
    )
