"""The inputs of a job, and checks that a resumed run has the same inputs as before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from cleave.errors import CleaveError
from cleave.training.data.batches import Corpus, build_corpus
from cleave.training.data.documents import read_documents
from cleave.training.data.tokenizer import (
    TextTokenizer,
    default_tokenizer,
    folder_tokenizer,
    json_object,
)
from cleave.training.loop.checkpoint import DamagedCheckpointError, LoadedCheckpoint
from cleave.training.loop.context import TrainContext
from cleave.training.loop.job import MAY_CHANGE, JobSpec, Packing
from cleave.training.loop.journal import holds_beginning
from cleave.training.loop.run_folder import JOURNAL, RunFolder
from cleave.training.loop.state_files import check_folder
from cleave.training.loop.trackers import tracker_names
from cleave.training.lora.spec import LoraSpec
from cleave.training.servers.ranks import Ranks
from cleave.workload.build import ModelSource, resolve_model

_TOKENIZER_SIZE = 4096

# Settings that name files. A resumed run compares the contents of the files, not the names.
_BY_CONTENT: Final = ("model", "data", "eval_data")

FINGERPRINTS: Final = "fingerprints"  # key of the fingerprints in a checkpoint's metadata
_WORDS: Final = {
    "text": "training text",
    "held_out": "held-out text",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "model": "model configuration",
}
# Configuration keys that do not affect the model, but may change whenever the model is saved.
_NOT_OF_THE_MODEL: Final = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """SHA-256 digests, in hex, of the inputs that determine a run's results.

    `template` is empty if the model has no chat template. `model` is the digest of the
    configuration in the model folder, and is empty for a model without a folder.
    """

    text: str
    held_out: str
    tokenizer: str
    template: str
    model: str

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: TextTokenizer, folder: Path | None) -> Self:
        """Return the fingerprints of a run's inputs. `folder` is None without a model folder."""
        return cls(
            text=hashlib.sha256(corpus.train.data).hexdigest(),
            held_out=hashlib.sha256(corpus.validation.data).hexdigest(),
            tokenizer=tokenizer.fingerprint,
            template=_of_template(folder) if folder is not None else "",
            model=_of_config(folder / "config.json") if folder is not None else "",
        )

    def changed(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the fingerprints whose values in `saved` differ."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return [name for name in mine if saved.get(name) != mine[name]]


@dataclass(frozen=True, slots=True)
class Dataset:
    """The inputs of a job: model source, tokenizer and encoded text, with their fingerprints."""

    source: ModelSource
    tokenizer: TextTokenizer
    corpus: Corpus
    fingerprints: Fingerprints


def prepare(job: JobSpec, context: TrainContext) -> Dataset:
    """Find a job's model, load its tokenizer, and read and encode the training and held-out text.

    This function writes only to the user's cache folder and the job's `state_dir`.

    Raises:
        CleaveError: if an input is missing or invalid, or does not match the model.
    """
    source = resolve_model(job.model)
    job.check_model(source.spec)
    if job.lora:
        LoraSpec.of(job.lora).config()  # raises an error if peft is not installed
    tracker_names(job.report_to)  # raises an error if a tracker is not installed
    if job.state_dir:
        check_folder(Path(job.state_dir))
    for path in filter(None, (job.data, job.eval_data)):
        read_documents(path)  # report a missing path before training a tokenizer
    if source.folder:
        tokenizer = folder_tokenizer(source.folder)
    else:
        size = min(_TOKENIZER_SIZE, source.spec.vocabulary)
        tokenizer = default_tokenizer(vocab_size=size, progress=context.note)
    corpus = build_corpus(
        job.data or None,
        tokenizer,
        held_out=job.eval_data or None,
        min_tokens=job.seq + 1,
        progress=context.note,
    )
    separate = job.packing == Packing.SEPARATE.value
    corpus.check(job.seq, separate=separate, judged=bool(job.eval_every))
    if (largest := corpus.largest_id) >= source.spec.vocabulary:
        raise CleaveError(
            f"the tokenizer of {job.model!r} encodes this text with token {largest}, but the model "
            f"has only {source.spec.vocabulary} tokens; the folder's files do not match"
        )
    return Dataset(source, tokenizer, corpus, Fingerprints.of(corpus, tokenizer, source.folder))


def losses_comparable(
    checkpoint: LoadedCheckpoint | None, job: JobSpec, changed: Sequence[str]
) -> bool:
    """Return True if the held-out batches are the same before and after a checkpoint."""
    if checkpoint is None:
        return False
    before: Mapping[str, Any] = checkpoint.meta.get("job", {})
    same_batches = before.get("eval_batches", job.eval_batches) == job.eval_batches
    return same_batches and "held_out" not in changed


def check_start(job: JobSpec, run: RunFolder, damaged: Sequence[DamagedCheckpointError]) -> None:
    """Raise CleaveError if a resumed run without an intact checkpoint must not start at step 1.

    The run may start over only if it has no damaged checkpoint, and its journal contains results
    from before the first checkpoint.
    """
    where = str(run.path)
    if damaged:
        faults = "; ".join(f"{fault.path.name}: {fault.reason}" for fault in damaged)
        raise CleaveError(
            f"no checkpoint of {where!r} is intact ({faults}); restore a copy of one, or add "
            f"--restart to start over at step 1 (damaged checkpoints are renamed, not deleted)"
        )
    if not (job.journal and holds_beginning(run.path / JOURNAL)):
        raise CleaveError(
            f"{where!r} has no checkpoint, because the run ended before it wrote one; add "
            "--restart to start over at step 1"
        )


def check_alike(ranks: Ranks, checkpoint: LoadedCheckpoint | None, dataset: Dataset) -> None:
    """Raise CleaveError unless all servers have the same inputs and the same checkpoint."""
    if ranks.count == 1:
        return
    step = checkpoint.step if checkpoint is not None else None
    everyone = ranks.agree({**asdict(dataset.fingerprints), "checkpoint": step})
    for rank, each in enumerate(everyone):
        for name, value in each.items():
            if value != everyone[0][name]:
                raise CleaveError(
                    f"server {rank + 1} has a different {name.replace('_', '-')} from server 1; "
                    "model, data and run folder must be the same on all servers, for example in a "
                    "shared folder"
                )


def changes_since(
    checkpoint: LoadedCheckpoint,
    job: JobSpec,
    dataset: Dataset,
    context: TrainContext,
    *,
    accepted: bool,
) -> list[str]:
    """Return the names of the fingerprints that have changed since a checkpoint.

    Raises:
        CleaveError: if a setting outside `MAY_CHANGE` has changed, or if a fingerprint has changed
            and `accepted` is False.
    """
    meta, known = checkpoint.meta, checkpoint.meta.get(FINGERPRINTS, {})
    saved: dict[str, Any] = meta.get("job", {})
    for setting in fields(JobSpec):
        # A checkpoint written before a setting existed used the setting's default.
        before, now = saved.get(setting.name, setting.default), getattr(job, setting.name)
        if setting.name not in (*MAY_CHANGE, *_BY_CONTENT) and before != now:
            raise CleaveError(
                f"the checkpoint was made with {setting.name} {before!r}, but this run has "
                f"{now!r}; resume with the same settings, or start a new run without --resume"
            )
    changed = dataset.fingerprints.changed(known)
    if changed and not accepted:
        raise CleaveError(
            f"this run used {_in_words(changed)} up to step {checkpoint.step}; restore the "
            "original inputs (the built-in tokenizer and text depend on the Python version), or "
            "pass --accept-changes to continue with the current ones"
        )
    if changed:
        context.note(f"continuing with {_in_words(changed)}")
    return changed


def _in_words(names: list[str]) -> str:
    """Return a phrase that names the changed inputs, such as "another tokenizer"."""
    return " and ".join(f"another {_WORDS[name]}" for name in names)


def _of_template(folder: Path) -> str:
    stated = json_object(folder / "tokenizer_config.json").get("chat_template")
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*"))]
    found = [stated, *(path.read_text(encoding="utf-8") for path in files if path.is_file())]
    if not any(found):
        return ""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _of_config(path: Path) -> str:
    kept = {key: value for key, value in json_object(path).items() if key not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
