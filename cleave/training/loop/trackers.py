"""Log a run's metrics to TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final, Protocol, Self

from cleave.errors import UsageError, not_installed
from cleave.files import own_folder, refuse_link, write_atomically
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import EvalRecord, Record, StepRecord
from cleave.training.loop.run_folder import RunFolder

# File in the run folder with the ID of the wandb run that a resumed training run continues.
_WANDB_ID: Final = "wandb-run-id"


class Tracker(Protocol):
    """Interface for logging the metrics of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def tracker_names(text: str) -> list[str]:
    """Parse the value of `--report-to`, such as `tensorboard+wandb`, into tracker names.

    Raises:
        UsageError: if a tracker is unknown or its package is not installed.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split("+"))) if text else []
    for name in names:
        if name not in _OPEN:
            raise UsageError(
                f"--report-to has {name!r}; use {' or '.join(_OPEN)}, or both with + between them"
            )
    for name in names:
        if find_spec(name) is None:
            raise not_installed(f"--report-to {name}", name, name)
    return names


class Trackers:
    """The open trackers of a run.

    If a tracker raises an error, the tracker is removed, and `note` is called with a message.
    """

    def __init__(self, trackers: Mapping[str, Tracker], note: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._note = note

    @classmethod
    def open(cls, job: JobSpec, run: RunFolder, step: int, note: Callable[[str], None]) -> Self:
        """Open the trackers of `job.report_to`, for a run with `step` completed steps."""
        opened: dict[str, Tracker] = {}
        for name in tracker_names(job.report_to):
            try:
                opened[name] = _OPEN[name](job, run, step)
            except Exception as error:  # noqa: BLE001 - trackers raise exceptions of any class
                note(_failed(name, error))
        return cls(opened, note)

    def report(self, record: Record) -> None:
        """Log the metrics of a `StepRecord` or an `EvalRecord`; ignore other records."""
        match record:
            case StepRecord():
                values = {
                    "train/loss": record.loss,
                    "train/learning_rate": record.learning_rate,
                    "train/tokens_per_s": record.tokens / max(record.wall_s, 1e-9),
                    "fleet/downlink_bytes": float(record.downlink_bytes),
                    "fleet/uplink_bytes": float(record.uplink_bytes),
                    f"fleet/{record.clock}_s": record.fleet_s,
                }
            case EvalRecord():
                values = {"eval/loss": record.eval_loss}
            case _:
                return
        self._each(lambda tracker: tracker.log(record.step, values))

    def close(self) -> None:
        """Flush and close all trackers."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # noqa: BLE001 - as above
                del self._trackers[name]
                self._note(_failed(name, error))


def _failed(name: str, error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{name} gets no more metrics ({type(error).__name__}: {first}); training continues"


class _TensorBoard:
    """Tracker that writes TensorBoard event files to the run folder's `tensorboard` subfolder."""

    def __init__(self, job: JobSpec, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        own_folder(run.path / "tensorboard")
        # `purge_step` hides earlier metrics of the steps that the resumed run repeats.
        self._writer: Any = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Tracker that logs to a Weights & Biases run, configured by wandb's environment variables."""

    def __init__(self, job: JobSpec, run: RunFolder, step: int) -> None:
        import wandb

        logging.getLogger("wandb").setLevel(logging.WARNING)
        # Without this check, wandb would prompt for an API key and block training.
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise UsageError("wandb has no API key; run `wandb login`, or set WANDB_MODE=offline")
        kept = run.path / _WANDB_ID
        refuse_link(run.path / "wandb")
        if not kept.is_file():
            write_atomically(kept, secrets.token_hex(4).encode())
        self._run: Any = wandb.init(
            id=kept.read_text(),
            resume="allow",
            name=run.path.name,
            dir=str(run.path),
            config=job.to_dict(),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb's own step counter cannot decrease, but a resumed run may repeat steps.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


# The classes of trackers by their names in `--report-to`.
_OPEN: Final[Mapping[str, Callable[[JobSpec, RunFolder, int], Tracker]]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
}
