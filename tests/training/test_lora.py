"""LoRA in `cleave train`: as `peft` and plain PyTorch train it, and as others load it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import cleave
from cleave.errors import CleaveError, UsageError
from cleave.training.loop.dropout import Chance
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.lora.adapters import add_adapters
from cleave.training.lora.spec import LoraSpec
from cleave.training.results.export import export_run, find_checkpoint
from cleave.training.results.trained import open_trained
from cleave.workload.build import load_folder
from cleave_cli.main import app
from tests.graphs.models import ADAPTED, TOKENS, small_model
from tests.training.runs import losses, losses_by_pytorch, nightly, save_model

TEXT = "def step(a, b):\n    return a\n"


@given(
    st.integers(1, 512),
    st.floats(0.5, 512),
    st.lists(st.sampled_from(["q_proj", "v_proj", "fc1"]), min_size=1, max_size=3, unique=True),
    st.booleans(),
)
def test_what_it_reads(rank: int, alpha: float, targets: list[str], dora: bool) -> None:
    text = f"r={rank}, alpha={alpha!r},targets={'+'.join(targets)},dora={str(dora).lower()}"
    assert LoraSpec.of(text) == LoraSpec(rank, alpha, tuple(targets), dora=dora)
    assert LoraSpec.of("r=4") == LoraSpec(4, 8.0, ("all-linear",))
    assert LoraSpec.of("r=4,dora,save=lm_head+embed_tokens").save == ("lm_head", "embed_tokens")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank=4", "'rank=4'; choose from r, alpha"),
        ("r=0", "r=0; use a whole number"),
        ("r=4,r=8", "r twice"),
        ("r=4,alpha=nan", "alpha=nan; use a number above 0"),
        ("targets=q_proj++v_proj", "use names of linear layers with +"),
        ("dropout=1", "dropout=1; use a probability"),
        ("dora=maybe", "dora=maybe; use true or false"),
        ("r=4,dropout=0.1", "--lora has dropout"),
    ],
)
def test_what_it_refuses(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("+", r"\+")):
        JobSpec("opt-nano", lora=text, method="stages")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        nightly({"accumulate": 3, "memory": "recompute"}),
        {"memory": "lean"},
        nightly({"method": "tiles"}),
    ],
    ids=str,
)
def test_dropout_depends_on_the_seed_and_on_nothing_else(
    tmp_path: Path, base: Path, corpus_file: Path, more: dict[str, Any]
) -> None:
    def all_of(name: str, seed: int = 1) -> list[float]:
        settings = {**more, "learning_rate": 0.01, "seed": seed, "warmup_steps": 0}
        job = job_of(base, corpus_file, f"{SMALL},dropout=0.3", schedule="constant", **settings)
        run = run_in(tmp_path, name)
        found: list[float] = []
        with cleave.emulated(2) as fleet:
            for steps in (3,) if name != "cut" else (1, 3):
                torch.rand(steps)  # what else this process draws changes nothing
                here = fleet if job.method == "tiles" else None
                found += losses(
                    replace(job, steps=steps), run, here, resume=steps > 1 and len(found) > 0
                )
        held = find_checkpoint(run).tensors
        assert all(".lora_" in name for name in held if name.startswith("model."))
        return found

    whole = all_of("whole")
    assert all_of("cut") == whole
    assert all_of("other", seed=2)[1:] != whole[1:]


def test_no_two_modules_steps_or_sequences_drop_alike() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    chance = Chance.of(model, 3)
    ones, found = torch.ones(2, 64), []
    for step, first in ((0, 0), (0, 2), (1, 0)):
        with chance.of_pass(step, first, 2):
            found += [values for module in model for values in module(ones)]
    assert len({tuple(values.tolist()) for values in found}) == len(found)
    assert {value for values in found for value in values.tolist()} == {0.0, 2.0}
    with chance.of_pass(0, 1, 1):  # another server does the second sequence alone
        assert torch.equal(model[0](ones[:1])[0], found[1])
    assert torch.equal(model.eval()(ones), ones)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Llama and its tokenizer."""
    return save_model(tmp_path_factory.mktemp("base") / "small")


SMALL = f"r=4,targets={'+'.join(ADAPTED)}"
DORA = "r=4,dora,targets=q_proj"


def job_of(base: Path, corpus: Path, lora: str = SMALL, **more: Any) -> JobSpec:
    settings = {"method": "local", "steps": 4, "checkpoint_every": 1, **more}
    return JobSpec(str(base), str(corpus), batch=2, seq=TOKENS, lora=lora, **settings)


def run_in(tmp_path: Path, name: str = "mine") -> RunFolder:
    return RunFolder.create(tmp_path / "runs", name)


def plain_losses(job: JobSpec, change: Callable[[nn.Module], None] | None = None) -> list[float]:
    """Train adapters as `SMALL` with `peft` and PyTorch alone; `change` the model before."""
    from peft import LoraConfig, get_peft_model

    model, _ = load_folder(job.model)
    if change is not None:
        change(model)
    torch.manual_seed(job.seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(ADAPTED))
    return losses_by_pytorch(
        job,
        lambda model, batches: nn.functional.cross_entropy(
            model(input_ids=batches[0].ids, use_cache=False).logits.flatten(0, 1),
            batches[0].labels.flatten(),
        ),
        get_peft_model(model, config),
        lambda parameters: torch.optim.AdamW(
            parameters, lr=job.learning_rate or 2e-4, betas=(0.9, 0.95), weight_decay=0.1
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        nightly("local"),
        "tiles",
        nightly("stages"),  # test_staged.py has adapters by stages
    ],
)
def test_the_losses_are_those_of_peft(
    tmp_path: Path, base: Path, corpus_file: Path, method: str
) -> None:
    job = job_of(base, corpus_file, method=method, schedule="constant", warmup_steps=0)
    with cleave.emulated(2) as fleet:
        found = losses(job, run_in(tmp_path), None if method == "local" else fleet)
    assert found == pytest.approx(plain_losses(job), rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("lora", "dtype"), [(DORA, "fp32"), (f"{SMALL},save=lm_head", "bf16")])
def test_the_losses_of_stages_are_those_of_one_machine(
    tmp_path: Path, base: Path, corpus_file: Path, lora: str, dtype: str
) -> None:
    alone = losses(job_of(base, corpus_file, lora, dtype=dtype), run_in(tmp_path, "alone"))
    with cleave.emulated(3) as fleet:
        job = job_of(base, corpus_file, lora, dtype=dtype, method="stages")
        staged = losses(job, run_in(tmp_path, "staged"), fleet)
    assert staged == pytest.approx(alone, rel=1e-4 if dtype == "fp32" else 2e-2)


@pytest.mark.slow
def test_other_frozen_weights_are_refused(tmp_path: Path, base: Path, corpus_file: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(base, folder)
    run = run_in(tmp_path)
    losses(job_of(folder, corpus_file, steps=1), run)
    config = (folder / "config.json").read_bytes()
    other, _ = load_folder(folder)
    with torch.no_grad():
        other.get_parameter("model.layers.1.mlp.up_proj.weight").add_(0.01)
    other.save_pretrained(folder)
    (folder / "config.json").write_bytes(config)
    with pytest.raises(CleaveError, match="have changed since the adapters were trained"):
        losses(job_of(folder, corpus_file, steps=2), run, resume=True)
    with pytest.raises(CleaveError, match="have changed since the adapters were trained"):
        open_trained(run.path)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor([ids])).logits
    return found


def merged(run: RunFolder, folder: Path) -> Any:
    """Export the whole model, and load it as transformers does."""
    from transformers import AutoModelForCausalLM

    export_run(run, folder, merge=True)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.slow
@pytest.mark.parametrize("lora", [nightly("r=4"), f"{DORA},save=lm_head"])
def test_others_load_what_is_exported(
    tmp_path: Path, base: Path, corpus_file: Path, lora: str
) -> None:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    run = run_in(tmp_path)
    losses(job_of(base, corpus_file, lora, learning_rate=0.01), run)
    ours = open_trained(run.path)
    ids = ours.tokenizer.encode_batch([TEXT])[0].tolist()
    expected = logits(ours.model, ids)
    assert not torch.allclose(expected, logits(load_folder(base)[0], ids), atol=1e-3)

    said = CliRunner().invoke(app, ["export", str(run.path), "--json"], catch_exceptions=False)
    folder = Path(json.loads(said.stdout)["folder"])
    assert json.loads(said.stdout)["adapters"]
    assert not (folder / "config.json").exists()
    targets = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(folder), ids), expected)
    assert AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == ids
    assert torch.equal(logits(open_trained(folder).model, ids), expected)
    assert f"LoRA, {lora}" in (folder / "README.md").read_text()
    assert f"base_model: {base.name}\n" in (folder / "README.md").read_text()
    assert str(base) not in (folder / "README.md").read_text()
    assert (folder / "adapter_model.safetensors").stat().st_mode & 0o444 == 0o444

    assert torch.allclose(logits(merged(run, tmp_path / "merged"), ids), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        nightly("llama", "save=head"),
        nightly("gpt2", "save=tokens"),
        ("llama", "save=tokens+head"),
        nightly("gpt2", "targets=head"),
    ],
)
def test_a_tied_head_that_is_trained_is_written_apart(
    tmp_path: Path, corpus_file: Path, family: str, chosen: str
) -> None:
    """Others load the logits that were trained, from the adapters and from the whole model."""
    from peft import AutoPeftModelForCausalLM

    sizes: Any = {"tie_word_embeddings": True} if family == "llama" else {}
    base = save_model(tmp_path / "base", family, **sizes)
    tokens = "embed_tokens" if family == "llama" else "wte"
    lora = "r=4," + chosen.replace("tokens", tokens).replace("head", "lm_head")
    run = run_in(tmp_path)
    losses(job_of(base, corpus_file, lora, learning_rate=0.01), run)
    ours = open_trained(run.path)
    ids = ours.tokenizer.encode_batch([TEXT])[0].tolist()
    expected = logits(ours.model, ids)
    export_run(run, tmp_path / "adapters")
    others = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    assert torch.equal(logits(others, ids), expected)
    model = merged(run, tmp_path / "merged")
    assert torch.allclose(logits(model, ids), expected, atol=1e-4)
    assert not model.config.tie_word_embeddings
    assert torch.equal(logits(open_trained(tmp_path / "merged").model, ids), logits(model, ids))


@pytest.mark.slow
def test_exports_that_cannot_be(tmp_path: Path, base: Path, corpus_file: Path) -> None:
    fresh = run_in(tmp_path, "fresh")
    losses(job_of(Path("opt-nano"), corpus_file, "r=2", steps=1), fresh)
    with pytest.raises(UsageError, match="newly initialized weights of 'opt-nano'"):
        export_run(fresh, tmp_path / "adapters")
    assert export_run(fresh, tmp_path / "merged", merge=True).parameters > 10_000
    plain = run_in(tmp_path, "plain")
    losses(job_of(Path("opt-nano"), corpus_file, "", steps=1), plain)
    with pytest.raises(UsageError, match="--merge is for runs with adapters"):
        export_run(plain, tmp_path / "never", merge=True)


def test_damaged_folders_of_adapters_are_one_sentence(tmp_path: Path, base: Path) -> None:
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    good = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(base)}
    elsewhere = {**good, "base_model_name_or_path": "/nowhere"}
    for text, says in (
        (json.dumps(good), "but no adapter_model"),
        (json.dumps(good), "cannot be loaded"),
        ("{", "cannot be loaded"),
        (json.dumps(elsewhere), "move it there"),
    ):
        config.write_text(text)
        with pytest.raises(UsageError, match=says):
            open_trained(tmp_path)
        weights.write_bytes(b"damaged")


@pytest.mark.slow
def test_layers_that_are_not_there(tmp_path: Path, base: Path, corpus_file: Path) -> None:
    for lora, name in (("targets=qkv", "'qkv'"), ("save=head", "'head'")):
        with pytest.raises(UsageError, match=f"--lora names {name}.*it has .*q_proj"):
            losses(job_of(base, corpus_file, lora), run_in(tmp_path, name.strip("'")))


@pytest.mark.nightly
def test_adapters_multiply_here_whatever_came_first(base: Path) -> None:
    """The same traffic, whether a model is offloaded before or after it gets adapters."""
    counted = []
    ids = torch.arange(32).reshape(2, 16)
    for early in (True, False):
        with cleave.emulated(2) as fleet:
            model, _ = load_folder(base)
            if early:
                cleave.offload(model, fleet)
            add_adapters(model, LoraSpec(4))
            if not early:
                cleave.offload(model, fleet)
            model(input_ids=ids, labels=ids).loss.backward()
            counters = fleet.counters()
            counted.append((counters.gemms, counters.downlink_bytes, counters.uplink_bytes))
            cleave.restore(model)
    assert counted[0] == counted[1]


@pytest.mark.nightly  # makes graphs of a bf16 model
def test_frozen_weights_of_a_bf16_model_go_by_stages_as_they_are() -> None:
    ids = torch.arange(2 * TOKENS).reshape(2, TOKENS)
    found = []
    for narrow in (False, True):
        model: Any = small_model("llama").bfloat16()
        if not narrow:
            model = model.float()
        add_adapters(model, LoraSpec(4, targets=ADAPTED))
        with cleave.emulated(2) as fleet:
            cleave.offload(model, fleet, method="stages")
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append((loss.item(), fleet.counters().downlink_bytes))
            cleave.restore(model)
    (exact, wide_bytes), (close, narrow_bytes) = found
    assert close == pytest.approx(exact, rel=1e-3)  # activations are bf16 outside the layers
    assert narrow_bytes < wide_bytes
