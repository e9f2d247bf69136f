"""A run's model as a Hugging Face folder, which `from_pretrained` loads.

A run keeps what describes its model (configuration, tokenizer) in its folder from the start, so an
export needs a checkpoint and nothing else: the folder that the model came from may be gone.
"""

from __future__ import annotations

import importlib
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from cleave.errors import CleaveError, UsageError
from cleave.training.adapters import adapted_model, add_adapters
from cleave.training.checkpoint import WEIGHTS, LoadedCheckpoint, load_checkpoint, load_latest
from cleave.training.disk import cannot_write
from cleave.training.lora import LoraSpec
from cleave.training.quantized import dequantize_all
from cleave.training.run_folder import BEST, CHECKPOINTS, RunFolder
from cleave.workload.models.build import ModelSource, quiet_transformers, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cleave.training.tokenizer import TextTokenizer

DESCRIPTION: Final = "model"
"""The folder of a run that describes its model, within it."""

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""In which weights can be written."""

_DESCRIBING: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_OF_WHOLE_MODELS: Final = ("config.json", "generation_config.json")
_VERSIONS: Final = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes:
        folder: where.
        step: the optimizer step after which the weights were so.
        parameters: how many there are.
        dtype: in which they were written.
        whole: whether it is a whole model, and not adapters.
    """

    folder: Path
    step: int
    parameters: int
    dtype: str
    whole: bool = True


def keep_description(
    folder: Path, model: PreTrainedModel, source: ModelSource, tokenizer: TextTokenizer
) -> None:
    """Write what describes a model, unless it is there.

    Args:
        folder: of the run.
        model: the model.
        source: where it came from: a folder's own files are copied.
        tokenizer: of its texts.

    Raises:
        CleaveError: when it cannot be written.
    """
    final = folder / DESCRIPTION
    if final.exists():
        return
    temporary = _beside(final)
    try:
        temporary.mkdir(parents=True)
        if source.folder is not None:
            for name in _DESCRIBING:
                if (file := source.folder / name).is_file():
                    shutil.copyfile(file, temporary / name)
        else:
            _describe(temporary, model, tokenizer)
        temporary.rename(final)
    except OSError as error:
        raise cannot_write(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _describe(folder: Path, model: PreTrainedModel, tokenizer: TextTokenizer) -> None:
    """Write the configuration of a model of the registry, and the built-in tokenizer."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    config: Any = type(model.config).from_dict(model.config.to_dict())
    # In training no keys and values are kept; and its texts end as the tokenizer says.
    config.use_cache = True
    config.bos_token_id = config.eos_token_id = tokenizer.eos_id
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    end = tokenizer.decode([tokenizer.eos_id])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.library_tokenizer,
        bos_token=end,
        eos_token=end,
        model_max_length=config.max_position_embeddings,
    )
    wrapped.save_pretrained(folder)


def export_run(
    run: RunFolder,
    into: Path,
    *,
    step: int = 0,
    best: bool = False,
    dtype: str = "fp32",
    merge: bool = False,
    facts: Mapping[str, str] | None = None,
) -> Exported:
    """Write a run's model as a Hugging Face folder; of a run with adapters, the adapters.

    Args:
        run: the run.
        into: the new folder; one that is there must be empty.
        step, best: see `find_checkpoint`.
        dtype: of the weights, one of `DTYPES`.
        merge: of a run with adapters: write the whole model, with adapters merged into its weights.
        facts: what the model card says besides.

    Raises:
        UsageError: when the run or the folder is none that can be used.
        CleaveError: when a checkpoint is damaged, or the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; give one of {', '.join(DTYPES)}")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError(f"{str(into)!r} exists already; give a new folder, or an empty one")
    job = run.read_config()
    adapters = bool(job.get("lora"))
    if merge and not adapters:
        raise UsageError(
            f"--merge is for runs with adapters (--lora), and {str(run.path)!r} has none"
        )
    checkpoint = find_checkpoint(run, step, best=best)
    whole = merge or not adapters
    base = None if whole else _base_folder(job)
    held = _merged(job, checkpoint) if merge else weights_of(checkpoint)
    weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in held.items()}
    temporary = _beside(into)
    try:
        temporary.mkdir(parents=True)
        description = description_of(run)
        for file in sorted(description.iterdir()):
            if whole or file.name not in _OF_WHOLE_MODELS:
                shutil.copyfile(file, temporary / file.name)
        if base is None:
            _write_weights(temporary, weights, DTYPES[dtype])
        else:
            _write_adapters(temporary, description, job, base, weights)
        card = _card(run, job, checkpoint.step, facts or {}, base)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if into.exists():
            into.rmdir()
        temporary.rename(into)
    except OSError as error:
        raise cannot_write(into, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    count = sum(tensor.numel() for tensor in weights.values())
    return Exported(into, checkpoint.step, count, dtype, whole)


def _beside(path: Path) -> Path:
    """Return a name for a folder that takes the place of `path` once it is whole."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def find_checkpoint(run: RunFolder, step: int = 0, *, best: bool = False) -> LoadedCheckpoint:
    """Load a checkpoint of a run.

    Args:
        run: the run.
        step: of the checkpoint; 0 for the newest whole one.
        best: whether it is the one with the lowest held-out loss.

    Raises:
        UsageError: when there is no such checkpoint.
        CleaveError: when it is damaged.
    """
    return _best(run) if best else _checkpoint(run, step)


def weights_of(checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    """Return the weights that a checkpoint holds, by parameter."""
    return {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(WEIGHTS)
    }


def _merged(job: Mapping[str, Any], checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    """Return the weights of a run's model with its adapters merged into them, by parameter."""
    adapted: Any = adapted_model(job, checkpoint)
    dequantize_all(adapted)
    merged = adapted.merge_and_unload()
    return {name: parameter.detach() for name, parameter in merged.named_parameters()}


def _base_folder(job: Mapping[str, Any]) -> Path:
    """Return the folder of the model that a run's adapters belong to.

    Raises:
        UsageError: when it is in no folder.
    """
    name = Path(job["model"]).expanduser()
    if name.is_absolute() and not name.exists():
        return name  # it is gone, and adapters are written without it
    folder = resolve_model(job["model"]).folder
    if folder is None:
        raise UsageError(
            f"the run's adapters belong to fresh weights of {job['model']!r}, which are in no "
            f"folder; give --merge to write the whole model"
        )
    return folder.resolve()


def _best(run: RunFolder) -> LoadedCheckpoint:
    """Load the checkpoint with the lowest held-out loss."""
    if (found := load_latest(run.path / BEST)) is None:
        raise UsageError(
            f"{str(run.path)!r} has no best checkpoint; train with --eval-every N --keep-best"
        )
    return found


def _checkpoint(run: RunFolder, step: int) -> LoadedCheckpoint:
    """Load a checkpoint of a run."""
    folder = run.path / CHECKPOINTS
    if step:
        path = folder / f"step-{step:06d}"
        if not path.is_dir():
            held = ", ".join(str(int(p.name[5:])) for p in sorted(folder.glob("step-??????")))
            raise UsageError(
                f"{str(run.path)!r} has no checkpoint of step {step}; it has those of "
                f"{held or 'no step'}"
            )
        return load_checkpoint(path)
    if (found := load_latest(folder)) is None:
        raise UsageError(
            f"{str(run.path)!r} has no checkpoint: it did not end, or was to have none; go on with "
            f"it by --resume, or train without --checkpoint-every 0"
        )
    return found


def description_of(run: RunFolder) -> Path:
    """Return the folder that describes a run's model.

    Raises:
        UsageError: when there is none.
    """
    folder = run.path / DESCRIPTION
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{str(folder)!r} does not describe the run's model: an earlier version trained it; "
            f"`cleave train --resume {run.path}` writes it, if only for one step"
        )
    return folder


def _write_weights(folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write weights and configuration with the model's own code, which knows names and ties."""
    from transformers import AutoConfig, AutoModelForCausalLM

    local = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **local)
    with torch.device("meta"):  # its own weights are not needed
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    wanted = {name for name, _ in model.named_parameters()}
    if wanted != weights.keys():
        name = min(wanted ^ weights.keys())
        raise CleaveError(
            f"the checkpoint and the configuration do not belong together: {name!r} is in one of "
            f"them only; use the run's own `{DESCRIPTION}` folder"
        )
    generation = folder / "generation_config.json"
    kept = generation.read_bytes() if generation.is_file() else None
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=dict(weights))
    if kept is not None:
        generation.write_bytes(kept)


def _write_adapters(
    folder: Path,
    description: Path,
    job: Mapping[str, Any],
    base: Path,
    weights: Mapping[str, Tensor],
) -> None:
    """Write adapters and their configuration with `peft`'s own code.

    Args:
        folder: where.
        description: of the model that they belong to.
        job: the run's settings.
        base: the folder of that model.
        weights: what was trained, by parameter of the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    local = {"local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(description, **local)
    with torch.device("meta"):
        plain = replace(LoraSpec.of(job["lora"]), bits=0)
        adapted = add_adapters(AutoModelForCausalLM.from_config(config), plain)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    held = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    adapted.save_pretrained(str(folder), state_dict=held, save_embedding_layers=False)


def _card(
    run: RunFolder,
    job: Mapping[str, Any],
    step: int,
    facts: Mapping[str, str],
    base: Path | None,
) -> str:
    """Return the model card: what was trained, on what, by what, and what it took."""
    records = list(run.records())
    steps = [r for r in records if r.get("event") == "step" and r["step"] <= step]
    evals = [r for r in records if r.get("event") == "eval" and r["step"] <= step]
    rows = [
        ("model", str(job.get("model"))),
        ("data", str(job.get("data") or "the source of Python's standard library")),
        ("steps", f"{step:,} of {job.get('steps', step):,}"),
        ("batch", f"{job.get('batch')} x {job.get('seq')} tokens, x {job.get('accumulate', 1)}"),
        ("travelled in", str(job.get("dtype"))),
        ("method", str(job.get("method"))),
    ]
    if job.get("lora"):
        rows.append(("adapters", f"LoRA, {job['lora']}" + ("" if base else ", merged")))
    if steps:
        rows.append(("training loss", f"{steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}"))
        rows.append(("tokens", f"{sum(r['tokens'] for r in steps):,}"))
        down, up = (sum(r[f"{way}_bytes"] for r in steps) for way in ("downlink", "uplink"))
        rows.append(("to and from devices", f"{down / 1e9:.3g} GB and {up / 1e9:.3g} GB"))
    if evals:
        rows.append(
            ("held-out loss", f"{evals[-1]['eval_loss']:.4f} after step {evals[-1]['step']}")
        )
    rows += facts.items()
    ours = importlib.import_module("cleave").__version__
    versions = {"cleave": ours} | {name: version(name) for name in _VERSIONS}
    rows.append(("versions", ", ".join(f"{name} {v}" for name, v in versions.items())))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    library = f"peft\nbase_model: {base}" if base else "transformers"
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\ntags:\n- cleave\n---\n\n"
        f"# {run.path.resolve().name}\n\n"
        "Trained with Cleave on a fleet of devices: the same loss as on one machine.\n\n"
        f"| | |\n| --- | --- |\n{table}\n"
    )
