"""Each recipe of docs/how-to/recipes.md trains: scaled down, on a tiny model of the same kind."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cleave.training.loop.run_folder import RunFolder
from tests.cli.test_data import CHATML
from tests.integration.processes import here, records
from tests.training.runs import nightly, save_model, write_chats

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "how-to" / "recipes.md"
SMALL = (
    "--steps", "2", "--batch", "1", "--accumulate", "2", "--seq", "16", "--eval-every", "1",
    "--eval-batches", "1",
)  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # can be quantized


def settings(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def prepared(folder: Path, name: str) -> tuple[str, ...]:
    """Make a recipe's data and a small model of its kind. Return the options that name them."""
    held = settings(name)
    words = [f"Step {n} adds {n % 7} to what was there before.\n" for n in range(400)]
    data = folder / held["data"]
    if data.suffix == ".jsonl" and held.get("lora"):
        write_chats(data, 80)
    elif data.suffix == ".jsonl":
        data.write_text("".join(json.dumps({"text": line}) + "\n" for line in words))
    elif data.suffix:
        data.write_text("".join(words))
    else:
        (data / "more").mkdir(parents=True)
        for number, line in enumerate(words):
            (data / "more" / f"{number}.md").write_text(line)
    if "/" not in held["model"]:
        return ("--model", "opt-nano", "--data", str(data))
    family = "qwen2" if "Qwen" in held["model"] else "llama"
    model = save_model(folder / "model", family, **WIDE)
    if "Instruct" in held["model"]:
        (model / "chat_template.jinja").write_text(CHATML)
    return ("--model", str(model), "--data", str(data))


def test_the_page_shows_every_recipe() -> None:
    shown = re.findall(r"examples/recipes/([\w-]+)\.toml", PAGE.read_text())
    assert set(shown) == {path.stem for path in FOLDER.glob("*.toml")}
    assert len(set(shown)) == 5


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("chat-lora", 0),
        ("more-pretraining", 0),
        ("lab-overnight", 2),
        ("classroom", 2),
        nightly("qlora-7b", 2),
        nightly("chat-lora", 2),
    ],
)
def test_a_recipe_trains(tmp_path: Path, name: str, devices: int) -> None:
    held, ours = settings(name), prepared(tmp_path, name)
    config = str(FOLDER / f"{name}.toml")
    shown = here("data", "show", "--config", config, *ours, "--seq", "16", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    prompts = [held["prompt"]] * 2 if "prompt" in held else []
    sampled = ("--sample-every", "1") if prompts else ()
    done = here(
        "train", "--config", config, *ours, *SMALL, *sampled, "--devices", str(devices),
        "--name", "run", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = records(done.stdout)
    steps = [record for record in seen if record["event"] == "step"]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step["loss"]) for step in steps)
    if held.get("method") == "stages":
        assert [step["method"] for step in steps] == ["stages"] * 2
    assert len([record for record in seen if record["event"] == "eval"]) == 2
    samples = [record for record in seen if record["event"] == "sample"]
    assert [sample["prompt"] for sample in samples] == prompts
    run = RunFolder(tmp_path / "runs" / "run")
    kept = run.read_config()
    small = {"model", "data", "steps", "batch", "accumulate", "seq", "eval_every", "eval_batches",
             "sample_every"}  # fmt: skip
    assert {k: v for k, v in held.items() if k not in small}.items() <= kept.items()
    if held.get("lora"):
        merged = here("export", str(run.path), str(tmp_path / "out"), "--merge", cwd=tmp_path)
        assert merged.returncode == 0, merged.stderr
