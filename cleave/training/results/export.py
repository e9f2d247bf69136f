"""Export a run's model to a folder in the Hugging Face format, for `from_pretrained`.

The model's configuration and tokenizer are read from the run folder. Only an export that merges
adapters loads the base model.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from cleave.errors import DISTRIBUTION, CleaveError, UsageError
from cleave.files import (
    LOCK,
    Lock,
    LockedError,
    copy_file,
    new_file,
    new_folder,
    own_folder,
    refuse_link,
    write_all,
    write_atomically,
)
from cleave.training.loop.checkpoint import WEIGHTS, LoadedCheckpoint, load_checkpoint, load_latest
from cleave.training.loop.disk import cannot_write
from cleave.training.loop.finite import first_not_finite
from cleave.training.loop.losses import ComparedRun, losses_of
from cleave.training.loop.run_folder import BEST, CHECKPOINTS, DESCRIPTION, RunFolder
from cleave.training.lora.adapters import ADAPTER_CONFIG, adapted_model, add_adapters, fixed_tensors
from cleave.training.lora.quantized import dequantize_all
from cleave.training.lora.spec import LoraSpec
from cleave.training.results.gguf_file import GGUF_FILE, check_gguf, write_gguf
from cleave.workload.build import ModelSource, hub_folder, quiet_transformers, resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cleave.training.data.tokenizer import TextTokenizer

# Dtypes of exported weights, by the value of `--dtype`.
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_DESCRIBING: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_MORE_TEMPLATES: Final = "additional_chat_templates"
_OF_WHOLE_MODELS: Final = ("config.json", "generation_config.json")
_VERSIONS: Final = (DISTRIBUTION, "torch", "transformers")
_PATHS: Final = re.compile(r".*(name_or_path|_file|_dir)")  # JSON keys whose values may be paths
_HUB: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        whole: False if only adapters were exported.
        remark: message if a step without a checkpoint had a lower held-out loss; otherwise empty.
    """

    folder: Path
    step: int
    parameters: int
    dtype: str
    whole: bool = True
    remark: str = ""


def keep_description(
    folder: Path,
    model: PreTrainedModel,
    source: ModelSource,
    tokenizer: TextTokenizer,
    *,
    anew: bool = False,
) -> None:
    """Write a model's configuration and tokenizer files to a run folder.

    The files are copied from `source.folder`, or created if the model has no folder. Existing files
    are replaced only if `anew` is True.
    """
    final = folder / DESCRIPTION
    if final.exists() and not anew:
        return
    temporary = _beside(final)
    try:
        new_folder(temporary)
        if source.folder is not None:
            for name in _DESCRIBING:
                if (file := source.folder / name).is_file():
                    copy_file(file, temporary / name)
            if (more := source.folder / _MORE_TEMPLATES).is_dir():
                _copy_files(more, temporary / _MORE_TEMPLATES)
        else:
            _describe(temporary, model, tokenizer)
        refuse_link(final)
        if final.exists():
            replaced = _beside(final)
            final.rename(replaced)
            temporary.rename(final)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            temporary.rename(final)
    except OSError as error:
        raise cannot_write(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_files(source: Path, into: Path) -> None:
    new_folder(into)
    for file in source.iterdir():
        if file.is_file():
            copy_file(file, into / file.name)


def _describe(folder: Path, model: PreTrainedModel, tokenizer: TextTokenizer) -> None:
    """Create configuration and tokenizer files for a model that was not loaded from a folder."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    config: Any = type(model.config).from_dict(model.config.to_dict())
    # Training disables the key-value cache. The end-of-text token must be the tokenizer's.
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
    gguf: bool = False,
    while_training: bool = False,
    facts: Mapping[str, str] | None = None,
) -> Exported:
    """Export a run's model to a folder in the Hugging Face format, or as a GGUF file in a folder.

    If the run trains adapters, only the adapters are exported, unless `merge` is True.

    Args:
        into: path of the new folder. If the folder exists, it must be empty.
        step: step of the checkpoint to export; 0 for the newest intact checkpoint.
        best: whether to export the checkpoint with the lowest held-out loss, and ignore `step`.
        dtype: dtype of the exported weights, a key of `DTYPES`.
        merge: whether to merge the adapters into the base model and export the whole model.
        gguf: whether to write the file `GGUF_FILE`, with a Modelfile for Ollama, instead of the
            files for `from_pretrained`.
        while_training: whether another process may be training this run. The run folder is then
            neither locked nor changed.
        facts: additional rows of the model card: values by label.

    Raises:
        UsageError: if an argument is invalid or does not match the run, or if another process
            uses one of the folders.
        CleaveError: if the checkpoint is damaged, a weight is not finite in `dtype`, or a file
            cannot be written.
    """
    if dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError(f"{str(into)!r} already exists; use a new folder, or an empty one")
    job = run.read_config()
    adapters = bool(job.get("lora"))
    if merge and not adapters:
        raise UsageError(
            f"--merge is for runs with adapters (--lora), but {str(run.path)!r} has none"
        )
    if gguf and adapters and not merge:
        raise UsageError("--gguf writes whole models; add --merge to merge the adapters")
    if while_training and into.resolve().is_relative_to(run.path.resolve()):
        raise UsageError(
            "--while-training only reads the run folder; export to a folder outside "
            f"{str(run.path)!r}"
        )
    advice = ", or add --while-training and export its newest checkpoint to a folder elsewhere"
    with nullcontext() if while_training else run.lock(advice=advice):
        checkpoint = find_checkpoint(run, step, best=best)
        description = description_of(run)
        if gguf:
            check_gguf(_config(description))
        whole = merge or not adapters
        base = "" if whole else base_of(job)
        weights = _merged(job, checkpoint) if merge else weights_of(checkpoint)
        floats = {n: t.to(DTYPES[dtype]) for n, t in weights.items() if t.is_floating_point()}
        if name := first_not_finite(floats):
            raise CleaveError(
                f"{name!r} of step {checkpoint.step} has a value that is not finite in {dtype}; "
                "use --dtype fp32 or bf16, or another --step"
            )
        with _new_folder(into) as folder:
            for file in sorted(description.iterdir()) if not gguf else ():
                if file.is_dir():
                    _copy_files(file, folder / file.name)
                elif whole or file.name not in _OF_WHOLE_MODELS:
                    copy_file(file, folder / file.name)
            if gguf:
                config = described_config(description, weights.keys())
                path, name = folder / GGUF_FILE, run.path.resolve().name
                write_gguf(path, name, config, description, weights, DTYPES[dtype])
                with new_file(folder / "Modelfile") as of_ollama:
                    write_all(of_ollama, f"FROM ./{GGUF_FILE}\n".encode())
            elif whole:
                _write_weights(folder, weights, DTYPES[dtype])
            else:
                _write_adapters(folder, description, job, base, weights, DTYPES[dtype])
            _remove_paths(folder)
            library = "gguf" if gguf else "peft" if base else "transformers"
            card = _card(run, job, checkpoint.step, facts or {}, base, library)
            (folder / "README.md").unlink(missing_ok=True)  # `peft` wrote its own model card
            with new_file(folder / "README.md") as readme:
                write_all(readme, card.encode())
            mode = (folder / "README.md").stat().st_mode
            # Only the owner can read the files that safetensors writes.
            for file in folder.iterdir():
                if file.is_file():
                    file.chmod(mode)
    count = sum(tensor.numel() for tensor in weights.values())
    remark = _lower(run, checkpoint.step) if best else ""
    return Exported(into, checkpoint.step, count, dtype, whole, remark)


@contextmanager
def _new_folder(into: Path) -> Iterator[Path]:
    """Yield a temporary folder and rename it to `into` on exit; on errors, delete it."""
    temporary = into.with_name(f".{into.name}.export")
    try:
        own_folder(temporary)
        with Lock(temporary / LOCK) as lock:
            for file in temporary.iterdir():
                if file.is_dir():
                    shutil.rmtree(file)
                elif file.name != LOCK:
                    file.unlink()
            try:
                yield temporary
                if os.name == "nt":  # Windows cannot rename a folder with an open file
                    lock.release()
                    (temporary / LOCK).unlink()
                if into.exists():
                    into.rmdir()
                temporary.rename(into)
                (into / LOCK).unlink(missing_ok=True)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except LockedError as error:
        raise UsageError(f"{error.holder} is already exporting to {str(into)!r}") from None
    except OSError as error:
        raise cannot_write(into, error) from error
    except SafetensorError as error:  # its text has the number of the system's error
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise cannot_write(into, OSError(number, os.strerror(number))) from error


def _remove_paths(folder: Path) -> None:
    """Remove absolute paths of this machine from the JSON configuration files in a folder.

    `adapter_config.json` keeps the path of the base model, which `peft` needs.
    """
    for file in (folder / name for name in _DESCRIBING if name.endswith("config.json")):
        if not file.is_file():
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        kept = {
            key: value
            for key, value in values.items()
            if not (_PATHS.fullmatch(key) and isinstance(value, str))
            or not any(kind(value).is_absolute() for kind in (PurePosixPath, PureWindowsPath))
        }
        if kept != values:
            write_atomically(file, (json.dumps(kept, indent=2) + "\n").encode())


def _public(text: str) -> str:
    """Return the last component of a path, so that a model card reveals no paths of this machine.

    The name of a model on the Hugging Face Hub is returned unchanged.
    """
    if _HUB.fullmatch(text) and not Path(text).exists():
        return text
    return PureWindowsPath(text).name or text


def _lower(run: RunFolder, step: int) -> str:
    """Return a message if the held-out loss was lower after another step; otherwise ""."""
    losses = losses_of(run.records(), 2**63)
    least = min(losses, key=lambda each: losses[each], default=step)
    if step not in losses or losses[least] >= losses[step]:
        return ""
    return (
        f"the held-out loss was lower after step {least} ({losses[least]:.4f}, here "
        f"{losses[step]:.4f}); that checkpoint was not kept"
    )


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def find_checkpoint(run: RunFolder, step: int = 0, *, best: bool = False) -> LoadedCheckpoint:
    """Load a checkpoint of a run.

    Args:
        step: step of the checkpoint; 0 for the newest intact checkpoint.
        best: whether to load the checkpoint with the lowest held-out loss, and ignore `step`.

    Raises:
        UsageError: if the requested checkpoint does not exist.
        CleaveError: if the checkpoint is damaged or cannot be read.
    """
    if best:
        if (found := load_latest(run.path / BEST)) is None:
            raise UsageError(
                f"{str(run.path)!r} has no best checkpoint; train with --eval-every N --keep-best"
            )
        return found
    folder = run.path / CHECKPOINTS
    if step:
        path = folder / f"step-{step:06d}"
        if not path.is_dir():
            held = ", ".join(str(int(p.name[5:])) for p in sorted(folder.glob("step-??????")))
            raise UsageError(
                f"{str(run.path)!r} has no checkpoint of step {step}; it has checkpoints of "
                f"{held or 'no step'}"
            )
        return load_checkpoint(path)
    if (found := load_latest(folder)) is None:
        raise UsageError(
            f"{str(run.path)!r} has no checkpoint, because the run has not ended or writes none; "
            "continue it with --resume, or train without --checkpoint-every 0"
        )
    return found


def weights_of(checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    """Return a checkpoint's model weights by parameter name."""
    return {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(WEIGHTS)
    }


def _merged(job: Mapping[str, Any], checkpoint: LoadedCheckpoint) -> dict[str, Tensor]:
    adapted: Any = adapted_model(job, checkpoint)
    dequantize_all(adapted)
    _part_shared(adapted)
    with quiet_transformers():
        merged = adapted.merge_and_unload()
    parameters = {name: parameter.detach() for name, parameter in merged.named_parameters()}
    return {**fixed_tensors(merged), **parameters}


def _part_shared(adapted: nn.Module) -> None:
    """Give each adapted layer its own copy of a weight that it shares with another module.

    Otherwise, merging the layer's adapter would change the other module.
    """
    uses = Counter(id(p) for _, p in adapted.named_parameters(remove_duplicate=False))
    for layer in adapted.modules():
        inner: Any = getattr(layer, "base_layer", None)
        if inner is not None and uses[id(inner.weight)] > 1:
            inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)


def base_of(job: Mapping[str, Any]) -> str:
    """Return the folder, or the name on the Hub, of the model to which a job's adapters belong.

    Raise UsageError if the model's weights were newly initialized, because no folder has them.
    """
    name = Path(job["model"]).expanduser()
    if hub_folder(job["model"]) is not None and not name.exists():
        return str(job["model"])
    if name.is_absolute() and not name.exists():
        return str(name)  # an export of adapters does not read the folder, which no longer exists
    folder = resolve_model(job["model"]).folder
    if folder is None:
        raise UsageError(
            f"the run's adapters belong to newly initialized weights of {job['model']!r}, which no "
            "folder contains; add --merge to write the whole model"
        )
    return str(folder.resolve())


def description_of(run: RunFolder) -> Path:
    """Return the subfolder of a run folder with the model's configuration and tokenizer.

    Raise UsageError if the subfolder is missing, as in runs of earlier versions of Cleave.
    """
    folder = run.path / DESCRIPTION
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{str(folder)!r} is incomplete, because an earlier version trained the run; "
            f"`cleave train --resume {run.path}` completes it, even for one step"
        )
    return folder


def described_config(folder: Path, names: Set[str]) -> Any:
    """Load a model's configuration, with `tie_word_embeddings` as in the checkpoint.

    If a model's weight files contain both LM head and embedding, `from_pretrained` does not tie
    them, even if the configuration requests it. The checkpoint then contains both weights, and
    `tie_word_embeddings` of the returned configuration is False.

    Raises:
        CleaveError: if `names`, the names of the checkpoint's weights, do not match the model.
    """
    from transformers import AutoModelForCausalLM

    config = _config(folder)
    for tied in (None, False):
        if tied is not None:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tied
        with torch.device("meta"), quiet_transformers():
            model: Any = AutoModelForCausalLM.from_config(config)
        wanted = {name for name, _ in model.named_parameters()} | fixed_tensors(model).keys()
        if wanted == names:
            return config
    name = min(wanted ^ names)
    raise CleaveError(
        f"the checkpoint does not match the configuration: only one of them has {name!r}; use "
        f"the run's own `{DESCRIPTION}` folder, or, if an earlier version wrote the checkpoint, "
        f"train one more step with --resume"
    )


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _write_weights(folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write a model's weights with transformers' `save_pretrained`, which handles tied weights."""
    from transformers import AutoModelForCausalLM

    config = described_config(folder, weights.keys())
    with torch.device("meta"):  # allocates no memory for initial weights
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = {name for name, _ in model.named_buffers()}
    narrow = {n: held if n in buffers else held.to(dtype) for n, held in weights.items()}
    generation = folder / "generation_config.json"
    kept = generation.read_bytes() if generation.is_file() else None
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=narrow)
    if kept is not None:
        write_atomically(generation, kept)


def _write_adapters(
    folder: Path,
    description: Path,
    job: Mapping[str, Any],
    base: str,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Write adapters and their configuration with `peft`'s `save_pretrained`."""
    from transformers import AutoModelForCausalLM

    config = _config(description)
    with torch.device("meta"):
        plain = replace(LoraSpec.of(job["lora"]), bits=0)
        adapted = add_adapters(AutoModelForCausalLM.from_config(config), plain)
    adapted.peft_config["default"].base_model_name_or_path = base
    held = {f"base_model.model.{name}": tensor.to(dtype) for name, tensor in weights.items()}
    with quiet_transformers():
        adapted.save_pretrained(str(folder), state_dict=held, save_embedding_layers=False)
    path = folder / ADAPTER_CONFIG
    found = json.loads(path.read_text("utf-8"))
    found["target_modules"].sort()  # `peft` writes a set in random order
    write_atomically(path, json.dumps(found, indent=2, sort_keys=True).encode())


def _card(
    run: RunFolder,
    job: Mapping[str, Any],
    step: int,
    facts: Mapping[str, str],
    base: str,
    library: str,
) -> str:
    """Return the Markdown of the model card. `base` is empty if the whole model is exported."""
    records = list(run.records())
    steps = [r for r in records if r.get("event") == "step" and r["step"] <= step]
    evals = [r for r in records if r.get("event") == "eval" and r["step"] <= step]
    rows = [
        ("model", _public(str(job.get("model")))),
        ("data", _public(str(job.get("data") or "the source of Python's standard library"))),
        ("steps", f"{step:,} of {job.get('steps', step):,}"),
        ("batch", f"{job.get('batch')} x {job.get('seq')} tokens, x {job.get('accumulate', 1)}"),
        ("travelled in", str(job.get("dtype"))),
        ("method", str(job.get("method"))),
    ]
    if job.get("lora"):
        rows.append(("adapters", f"LoRA, {job['lora']}" + ("" if base else ", merged")))
    evals = [record for record in evals if record["eval_loss"] is not None]
    if steps:
        rows.append(("training loss", f"{_loss(steps[0])} to {_loss(steps[-1])}"))
        rows.append(("tokens", f"{sum(r['tokens'] for r in steps):,}"))
        down, up = (sum(r[f"{way}_bytes"] for r in steps) for way in ("downlink", "uplink"))
        rows.append(("to and from devices", f"{down / 1e9:.3g} GB and {up / 1e9:.3g} GB"))
    if evals:
        loss = _loss(evals[-1], "eval_loss")
        rows.append(("held-out loss", f"{loss} after step {evals[-1]['step']}"))
    compared = ComparedRun({r["step"]: r["against_loss"] for r in steps if r.get("against_loss")})
    for r in steps:
        compared.against(r["step"], math.nan if r["loss"] is None else r["loss"])
    if compared.steps:
        text = f"losses of {compared.steps} steps differ by at most {compared.most:.1e}"
        rows.append(("compared with another run", text))
    rows += facts.items()
    rows.append(("versions", ", ".join(f"{name} {version(name)}" for name in _VERSIONS)))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    of_base = f"\nbase_model: {_public(base)}" if base else ""
    fleet = any(r["downlink_bytes"] for r in steps)
    where = "a fleet of devices" if fleet else "one machine"
    return (
        f"---\nlibrary_name: {library}{of_base}\npipeline_tag: text-generation\n"
        f"tags:\n- cleave\n---\n\n"
        f"# {run.path.resolve().name}\n\n"
        f"Trained with Cleave on {where}.\n\n"
        f"| | |\n| --- | --- |\n{table}\n"
    )


def _loss(record: Mapping[str, Any], field: str = "loss") -> str:
    return "not finite" if record[field] is None else f"{record[field]:.4f}"
