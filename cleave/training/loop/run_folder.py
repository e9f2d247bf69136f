"""The run folder: configuration, metrics, checkpoints and loss curve of one training run.

config.toml      the run's settings
fleet.toml       the devices that `cleave train` emulated
model/           the model's configuration and tokenizer, for exporting the trained model
checkpoints/     the latest checkpoints; see `cleave.training.loop.checkpoint`
best/            with `--keep-best`, checkpoints with the lowest held-out loss
journal/         with `--journal`, GEMM results since the latest checkpoint
resident/        with `--state devices`, a checkpoint and all later steps; see `ResidentFiles`
metrics.jsonl    one JSON object per line, appended during the run
loss.png         the loss curve, drawn from metrics.jsonl
lock             lock file that names the process using the folder
"""

import errno
import io
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Self

from cleave.errors import CleaveError, UsageError, unknown
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

# Names of subfolders.
CHECKPOINTS = "checkpoints"
BEST = "best"
JOURNAL = "journal"
RESIDENT = "resident"
LAYERS = f"{RESIDENT}/layers"
REST = f"{RESIDENT}/rest"
LOG = f"{RESIDENT}/log"
DESCRIPTION = "model"
# Subfolders to which a run writes. They must not be symbolic links.
_OWN_FOLDERS = (CHECKPOINTS, BEST, JOURNAL, RESIDENT, DESCRIPTION, "tensorboard", "wandb", "ray")

_STEP = re.compile(r"step-(\d{6,})(\.replaced)?")  # name of a checkpoint
_NO_LOCKS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT,  # the folder is read-only
    errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP,
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. One process at a time may write to it; any number may read."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str | None = None, *, now: datetime | None = None) -> Self:
        """Create a new run folder in `root`.

        Args:
            name: name of the folder; None for the local time, with a number if that name exists.
            now: the local time; None for the current time.

        Raises:
            UsageError: if the name is invalid or already exists.
            CleaveError: if the folder cannot be created.
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
        """Raise UsageError if `name` is not a valid folder name, or already exists in `root`."""
        if name in ("", ".", "..") or set(name) & set("/\\") or not name.isprintable():
            raise UsageError(f"--name must have visible characters and no slashes, not be {name!r}")
        if (root / name).exists():
            raise _taken(root / name)

    def remove_if_empty(self) -> None:
        """Remove the folder if it contains at most a lock file, as it does after a failed start."""
        if self.path.is_dir() and {each.name for each in self.path.iterdir()} <= {LOCK}:
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()

    @contextmanager
    def lock(self, wait_s: float = 0.0, advice: str = "") -> Iterator[str]:
        """Lock the folder against other processes for the duration of a `with` block.

        Args:
            wait_s: maximum time, in seconds, to wait for another process to release the lock.
            advice: appended to the error message if another process holds the lock.

        Yields:
            An empty string if the folder is locked; otherwise the reason why it cannot be locked
            (it is read-only, or its file system does not support locks).

        Raises:
            UsageError: if another process holds the lock.
            CleaveError: if a subfolder is a symbolic link, or the lock file was not written by
                Cleave.
        """
        try:
            for name in _OWN_FOLDERS:
                refuse_link(self.path / name)
            make_folder(self.path)
            lock = Lock(self.path / LOCK, wait_s)
        except LockedError as error:
            raise UsageError(
                f"{error.holder} is using the run folder {str(self.path)!r}; wait until it ends, "
                f"or stop it{advice}"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise cannot_write(Path(error.filename or self.path), error) from error
            yield error.strerror or str(error)
        else:
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

    def write_config(
        self, config: Mapping[str, Any], comments: Mapping[str, str] | None = None
    ) -> None:
        """Write settings to config.toml. Omit None values, which TOML cannot represent.

        `comments` maps the name of a setting to a comment to write after its value.
        """
        import tomli_w

        known = comments or {}
        lines = []
        for line in tomli_w.dumps(_without_none(config)).splitlines():
            comment = known.get(line.partition(" = ")[0])
            lines.append(f"{line}  # {comment}\n" if comment else f"{line}\n")
        try:
            write_atomically(self.config_path, "".join(lines).encode())
        except OSError as error:
            raise cannot_write(self.config_path, error) from error

    def read_config(self) -> dict[str, Any]:
        """Return the contents of config.toml; raise UsageError if it is missing or damaged."""
        try:
            return tomllib.loads(self.config_path.read_text("utf-8"))
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise UsageError(
                    f"{str(self.config_path)!r} cannot be read ({error.strerror}); make it readable"
                ) from error
            raise unknown("run folder", str(self.path), runs_beside(self.path)) from error
        except ValueError as error:
            raise UsageError(
                f"{str(self.config_path)!r} is damaged ({error}); repair it, or start a new run"
            ) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl as one line, which survives a crash of this process.

        NaN and infinity are written as null, numpy and torch scalars as plain numbers. After a
        crash, call `rewind` before the first `append`.

        Raises:
            CleaveError: if the file cannot be written. Its contents are unchanged.
        """
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        try:
            with open_to_append(self.metrics_path) as file:
                _append_whole(file, line.encode())
        except OSError as error:
            raise cannot_write(self.metrics_path, error) from error

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of metrics.jsonl in order. Ignore an incomplete last line.

        Raises:
            CleaveError: if a complete line is not a JSON object, or the file cannot be read.
        """
        for number, (line, record) in enumerate(self._lines(), start=1):
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise CleaveError(
                    f"line {number} of {str(self.metrics_path)!r} is damaged; remove the line, or "
                    "resume the run, which removes it"
                )

    @property
    def last_step(self) -> int:
        """Return the last step in metrics.jsonl; 0 if there is none."""
        records = (record for _, record in self._lines() if record is not None)
        return max((r["step"] for r in records if r.get("event") == "step"), default=0)

    def check_unfinished(self, steps: int) -> None:
        """Raise UsageError if the run's records say that it ended after `steps` steps or more."""
        last: dict[str, Any] = {}
        for _, record in self._lines():
            if record is not None and record.get("event") in ("step", "done"):
                last = record
        if last.get("event") == "done" and last.get("steps", 0) >= steps:
            raise UsageError(
                f"{str(self.path)!r} is already at step {last['steps']}; to train it further, "
                f"use --steps above {last['steps']}"
            )

    def rewind(self, step: int) -> int:
        """Remove records of steps after `step`, and damaged lines, from metrics.jsonl.

        If a record is removed, loss.png is removed too. Return the last step whose record was
        removed; 0 if none was.

        Raises:
            CleaveError: if the file cannot be read or written, or is not the metrics of a run.
        """
        lines = list(self._lines())
        kept = [
            line
            for line, record in lines
            if record is not None and line.endswith(b"\n") and not _is_later(record, step)
        ]
        if not self.metrics_path.exists():
            return 0
        # After a power loss, the file may contain zero bytes instead of its last records.
        begin = b"".join(line for line, _ in lines[:1]).strip(b"\0")
        if not b'{"'.startswith(begin[:2]) and not any(record for _, record in lines):
            raise CleaveError(
                f"{str(self.metrics_path)!r} is not the metrics file of a run; move it away"
            )
        try:
            refuse_link(self.metrics_path)
            write_atomically(self.metrics_path, b"".join(kept))
            lost = [record for _, record in lines if record is not None and _is_later(record, step)]
            if lost:
                self.plot_path.unlink(missing_ok=True)
            return max((r["step"] for r in lost if r.get("event") == "step"), default=0)
        except OSError as error:
            raise cannot_write(self.metrics_path, error) from error

    def plot(self) -> Path | None:
        """Plot training, held-out and compared losses by step in loss.png.

        Return the path of loss.png, or None if no loss has been recorded.
        """
        records = list(self.records())
        train = _curve(records, "loss")
        evaluation = _curve(records, "eval_loss")
        compared = _curve(records, "against_loss")
        if not train and not evaluation:
            return None

        # pyplot would need a display, and would share state with the caller's plots.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5))
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if compared:  # wide, so that it stays visible below an equal curve
            axes.plot(
                *zip(*compared, strict=True), linewidth=7, color="#f0b27a", label="compared run"
            )
        if train:
            axes.plot(*zip(*train, strict=True), linewidth=1, color="#1f4e79", label="train")
        if evaluation:
            axes.plot(*zip(*evaluation, strict=True), marker="o", markersize=4, label="validation")
        axes.set(title=f"Loss of {self.path.name}", xlabel="step", ylabel="loss (nats per token)")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="upper right")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        try:
            write_atomically(self.plot_path, image.getvalue())
        except OSError as error:
            raise cannot_write(self.plot_path, error) from error
        return self.plot_path

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield each line of metrics.jsonl with its JSON object; None for a damaged line."""
        try:
            with self.metrics_path.open("rb") as file:
                for line in file:
                    yield line, _parse(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CleaveError(
                f"{str(self.metrics_path)!r} cannot be read ({error.strerror}); check the file and "
                "its permissions"
            ) from error


def _append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to a file. If writing fails, restore the file's previous length."""
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
    return [
        (record["step"], record[field])
        for record in records
        if isinstance(record.get("step"), int | float)
        and isinstance(record.get(field), int | float)
    ]


def _plain(value: Any) -> Any:
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
    """Convert `value` to types that TOML can represent, without None values."""
    if isinstance(value, Mapping):
        return {str(k): _without_none(item) for k, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value if item is not None]
    return str(value) if isinstance(value, Path) else value


def _taken(path: Path) -> UsageError:
    return UsageError(
        f"the run folder {str(path)!r} already exists; choose another name, or resume that run"
    )


def runs_beside(path: Path) -> list[str]:
    """Return the paths of all run folders in the parent folder of `path` and in `runs`."""
    places = (path.parent, Path("runs"))
    found = {run.parent.resolve(): run.parent for at in places for run in at.glob("*/config.toml")}
    return sorted(map(str, found.values()))


def held_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, latest first."""
    return sorted({step_of(path) for path in newest_first(folder)}, reverse=True)


def newest_first(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, latest first."""
    try:
        found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CleaveError(
            f"the checkpoints in {str(folder)!r} cannot be listed ({error.strerror}); check that "
            "it is a folder you may read"
        ) from error
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)


def resumable_step(run: Path) -> int | None:
    """Return the last step that a resumed run need not repeat, judged by the names of its files.

    Return None if the run has no checkpoint.
    """
    rest = held_steps(run / REST)
    complete = [step for step in held_steps(run / LAYERS) if step in rest]
    last = max([*held_steps(run / CHECKPOINTS), *complete], default=None)
    while last is not None and log_file(run / LOG, last + 1).exists():
        last += 1
    return last


def log_file(folder: Path, step: int) -> Path:
    """Return the path of a step's file in the folder `LOG`."""
    return folder / f"step-{step:06d}.log"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; -1 for other files."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
