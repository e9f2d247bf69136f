"""`cleave export`: export a run's model in Hugging Face format, to a folder and to the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cleave.errors import CleaveError, UsageError
from cleave_cli.commands.trained_model import Step
from cleave_cli.options import Json

if TYPE_CHECKING:
    from cleave.training.loop.run_folder import RunFolder


def export(
    run: Annotated[Path, Argument(help="A run folder of cleave train.", show_default=False)],
    folder: Annotated[Path | None, Argument(help="New folder. Default: RUN/export.")] = None,
    step: Step = 0,
    best: Annotated[
        bool,
        Option("--best", help="Export the checkpoint with the lowest held-out loss (--keep-best)."),
    ] = False,
    dtype: Annotated[str, Option(help="Dtype of the weights: fp32, bf16 or fp16.")] = "fp32",
    merge: Annotated[
        bool,
        Option(
            "--merge", help="For --lora: write the whole model, with the adapters merged into it."
        ),
    ] = False,
    gguf: Annotated[
        bool, Option("--gguf", help="Write a GGUF file, for llama.cpp and Ollama.")
    ] = False,
    push_to_hub: Annotated[
        str,
        Option(help="Also upload to this Hugging Face repository; a new repository is private."),
    ] = "",
    while_training: Annotated[
        bool,
        Option("--while-training", help="Export while the run is still training; needs FOLDER."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's model to a folder that transformers loads with from_pretrained(FOLDER).

    The folder contains a checkpoint's weights, the configuration, the tokenizer, and a model card
    that states the training data, the devices, and the cost of training. For a run with adapters
    (--lora), only the adapters' weights are written, for peft, unless --merge is given. With
    --gguf, the folder contains model.gguf, with the weights and the tokenizer, and a Modelfile.

    Examples:

      cleave export runs/20261121-101500

      cleave export runs/20261121-101500 my-model --dtype bf16 --merge

      cleave export runs/20261121-101500 my-model --dtype fp16 --gguf
    """
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.results.export import base_of, export_run
    from cleave_cli.commands.export import HubRepository

    held = RunFolder(run)
    into = folder or run / "export"
    job = held.read_config()
    base = base_of(job) if job.get("lora") and not merge else ""
    of_folder = Path(base).is_absolute()
    if push_to_hub and of_folder:
        raise UsageError(
            f"the adapters need the model in {base!r}, which others do not have; add --merge to "
            "upload the whole model, or export without --push-to-hub, put the model's public name "
            "into adapter_config.json, and use `hf upload`"
        )
    hub = HubRepository(push_to_hub) if push_to_hub else None
    done = export_run(
        held,
        into,
        step=step,
        best=best,
        dtype=dtype,
        merge=merge,
        gguf=gguf,
        while_training=while_training,
        facts=_facts(held),
    )
    if done.remark:
        typer.echo(done.remark, err=True)
    address = hub.push(done.folder) if hub is not None else ""
    if of_folder:
        typer.echo(
            "adapter_config.json names the folder of the base model, which peft needs; put the "
            "model's public name there before you publish the adapters",
            err=True,
        )
    if as_json:
        found = {"folder": str(done.folder), "step": done.step, "parameters": done.parameters}
        found |= {"dtype": done.dtype, "adapters": not done.whole}
        typer.echo(json.dumps({**found, "hub": address} if address else found))
        return
    count = f"{done.parameters / 1e6:.1f}M parameters in {done.dtype}"
    typer.echo(f"{done.folder}: {count}, after step {done.step}")
    if address:
        typer.echo(f"uploaded to: {address}")
    if gguf:
        typer.echo(f"load it with: llama-server -m {into / 'model.gguf'}")
        typer.echo(f"or with: ollama create NAME -f {into / 'Modelfile'}")
        return
    loader = "AutoModelForCausalLM" if done.whole else "AutoPeftModelForCausalLM"
    typer.echo(f"load it with: {loader}.from_pretrained({str(done.folder)!r})")


def _facts(run: RunFolder) -> dict[str, str]:
    """Return what is known of a run's number of devices and energy, for the model card."""
    from cleave.energy.account import fleet_footprint
    from cleave.energy.run_energy import run_energy
    from cleave.energy.typical import load_assumptions, load_typical
    from profiles.library import load_profiles

    run.read_config()  # raises if the folder is not a run folder
    try:
        energy = run_energy(run.records())
    except UsageError:  # the run was killed or is still running
        return {}
    found = fleet_footprint(
        energy.usages, load_profiles(), load_typical(), load_assumptions(), None, energy.ps
    )
    how = "emulated" if energy.virtual else "real"
    facts = {"devices": f"{found.devices:,}, {how}" if found.devices else "none"}
    known = found.devices > found.devices_unknown or energy.ps.energy_j is not None
    if found.energy_j and known:  # if not known, the sum includes only the network's share
        unknown = f", without {found.devices_unknown} devices" if found.devices_unknown else ""
        facts["energy"] = f"{found.energy_j / 3.6e6:.3g} kWh{unknown}"
    return facts


class HubRepository:
    """A model repository on the Hugging Face Hub.

    A new repository is private. Create this object before a long export, so that a missing token
    or network is reported first.

    Args:
        name: name of the repository, such as `org/model`.

    Raises:
        CleaveError: if the repository cannot be created or reached.
    """

    def __init__(self, name: str) -> None:
        from huggingface_hub import HfApi

        self._api: Any = HfApi(library_name="cleave")
        try:
            self._name = self._api.create_repo(name, private=True, exist_ok=True).repo_id
        except Exception as error:  # the library raises errors of any class
            raise _failed(f"--push-to-hub {name}", error) from error

    def push(self, folder: Path) -> str:
        """Upload the files of a folder as one commit. Return the address of the repository.

        Raises:
            CleaveError: if the upload fails. The folder is not changed.
        """
        try:
            commit = self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message="Upload a model from Cleave"
            )
        except Exception as error:
            raise _failed(f"the upload of {str(folder)!r}", error) from error
        return str(commit.repo_url)


def _failed(what: str, error: Exception) -> CleaveError:
    lines = str(error).strip().splitlines()
    why = lines[0].rstrip(".") if lines else type(error).__name__
    return CleaveError(
        f"{what} failed ({why}); check the name and the network, and log in with `hf auth login`, "
        "or set HF_TOKEN"
    )
