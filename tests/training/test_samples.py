"""Samples during training: what the model adds to a text, or answers, after every few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cleave
from cleave.errors import UsageError
from cleave.training.loop.job import JobSpec
from cleave.training.loop.records import Record, SampleRecord, TextRecord, to_dict
from cleave.training.loop.run_folder import RunFolder
from cleave.training.results.trained import open_trained
from cleave.training.results.uses import Generation
from tests.cli.test_data import CHATML
from tests.training.runs import losses_of, nightly, notes_of, save_model, trained

pytestmark = pytest.mark.slow

SAMPLED: dict[str, Any] = {"sample_every": 2, "prompt": "def step("}


def job_of(model: str | Path, corpus_file: Path, **more: Any) -> JobSpec:
    plain: dict[str, Any] = {"batch": 2, "seq": 16, "method": "local", "checkpoint_every": 1}
    return JobSpec(str(model), str(corpus_file), **{"steps": 3, **plain, **more})


def samples_of(seen: list[Record]) -> list[SampleRecord]:
    return [record for record in seen if isinstance(record, SampleRecord)]


def said(run: RunFolder, step: int, request: Generation) -> str:
    """Return what the model of a checkpoint answers or adds."""
    parts: list[str] = []

    def report(record: Record) -> None:
        assert isinstance(record, TextRecord)
        parts.append(record.text)

    request.run(open_trained(run.path, step), report, lambda: False)
    return "".join(parts if request.chat else parts[1:])


def folder_of(tmp_path: Path, kind: str) -> str:
    if kind == "opt-nano":
        return kind
    folder = save_model(tmp_path / "model", hidden_size=64, intermediate_size=64)
    if kind == "chat":
        (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("opt-nano", {}),
        ("chat", {"lora": "r=2", "dtype": "bf16"}),
        nightly("chat", {"lora": "r=2,bits=4,dropout=0.5", "memory": "recompute"}),
        nightly("plain", {"packing": "separate", "memory": "lean"}),
    ],
)
def test_samples_are_what_a_checkpoint_says_and_change_nothing(
    tmp_path: Path, corpus_file: Path, kind: str, more: dict[str, Any]
) -> None:
    model = folder_of(tmp_path, kind)
    runs = [RunFolder.create(tmp_path / "runs", name) for name in ("plain", "sampled")]
    plain = trained(job_of(model, corpus_file, **more), runs[0])
    seen = trained(job_of(model, corpus_file, save_total_limit=9, **more, **SAMPLED), runs[1])
    assert losses_of(seen) == losses_of(plain)
    found = samples_of(seen)
    assert [sample.step for sample in found] == [2, 3]
    tokens = min(60, open_trained(runs[1].path).most_tokens // 2)
    request = Generation("def step(", chat=kind == "chat", tokens=tokens)
    for sample in found:
        assert sample.prompt == "def step("
        assert sample.text == said(runs[1], sample.step, request)
    kept = [record for record in runs[1].records() if record["event"] == "sample"]
    assert kept == [to_dict(sample) for sample in found]


@pytest.mark.parametrize("method", ["tiles", nightly("stages")])
def test_the_server_alone_computes_samples(tmp_path: Path, corpus_file: Path, method: str) -> None:
    """Devices get no work of samples, and samples are those of the server's weights."""
    job = job_of("opt-nano", corpus_file, method=method)
    sampled = job_of("opt-nano", corpus_file, method=method, **{**SAMPLED, "sample_every": 1})
    tasks = []
    seen: list[Record] = []
    for number, each in enumerate((job, sampled)):
        run = RunFolder.create(tmp_path / "runs", str(number))
        with cleave.emulated(2) as fleet:
            seen = trained(each, run, fleet)
            counters = fleet.counters()
            tasks.append((counters.tiles, counters.downlink_bytes))
    assert tasks[0] == tasks[1]
    found = samples_of(seen)
    assert [sample.step for sample in found] == [1, 2, 3]
    assert found[1].text == said(run, 2, Generation("def step(", tokens=60))


def test_a_prompt_that_is_too_long_ends_no_training(tmp_path: Path, corpus_file: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "run")
    seen = trained(job_of("opt-nano", corpus_file, sample_every=1, prompt="x y " * 300), run)
    assert len(losses_of(seen)) == 3
    assert samples_of(seen) == []
    assert "no sample after step 1: the text has" in notes_of(seen)


@pytest.mark.parametrize("given", [{"sample_every": 2}, {"prompt": "x"}])
def test_one_setting_needs_the_other(corpus_file: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"set both or neither"):
        job_of("opt-nano", corpus_file, **given)


def test_a_resumed_run_may_have_other_samples(tmp_path: Path, corpus_file: Path) -> None:
    run = RunFolder.create(tmp_path / "runs", "run")
    trained(job_of("opt-nano", corpus_file, steps=1), run)
    seen = trained(job_of("opt-nano", corpus_file, steps=2, **SAMPLED), run, resume=True)
    assert [sample.step for sample in samples_of(seen)] == [2]
