"""What a run keeps in the PS's memory, and what it computes again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import cleave
from cleave.errors import UsageError
from cleave.planner.stages.model import PsCompute
from cleave.training.loop import ps_memory
from cleave.training.loop.job import JobSpec, MemoryMode
from cleave.training.loop.ps_memory import check_memory, memory_mode
from cleave.training.loop.start import JobRunner

MODEL = nn.Linear(1000, 1000, bias=False)
JOB = JobSpec("opt-nano")


@pytest.mark.parametrize(
    ("memory_bytes", "mode"),
    [
        (None, MemoryMode.LEAN), (32e6, MemoryMode.PLAIN), (31e6, MemoryMode.RECOMPUTE),
        (22e6, MemoryMode.RECOMPUTE), (21e6, MemoryMode.LEAN),
    ],
)  # fmt: skip
def test_the_fastest_that_fits(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: float | None, mode: MemoryMode
) -> None:
    """Of a million parameters: 16 bytes each."""
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: memory_bytes)
    assert memory_mode(JOB, MODEL) is mode
    assert memory_mode(replace(JOB, memory="plain"), MODEL) is MemoryMode.PLAIN


def test_what_is_frozen_or_in_files_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 16e6)
    assert memory_mode(JOB, MODEL) is MemoryMode.LEAN
    assert memory_mode(replace(JOB, state_dir="states"), MODEL) is MemoryMode.PLAIN
    frozen = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    assert memory_mode(JOB, frozen) is MemoryMode.PLAIN


def test_several_servers_share_what_one_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 21e6)
    assert memory_mode(JOB, MODEL, 1) is MemoryMode.LEAN
    assert memory_mode(JOB, MODEL, 2) is MemoryMode.PLAIN
    assert memory_mode(replace(JOB, accumulate=2), MODEL, 2) is MemoryMode.RECOMPUTE
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 12e6)  # of 10 bytes 9 may be used
    tiles = replace(JOB, method="tiles")
    assert memory_mode(tiles, MODEL, 2) is MemoryMode.SHARDED
    assert memory_mode(tiles, MODEL, 8) is MemoryMode.PLAIN
    assert memory_mode(JOB, MODEL, 2) is MemoryMode.RECOMPUTE  # steps may go by stages
    quantized = replace(JOB, method="local", lora="r=4,bits=4")
    assert memory_mode(quantized, MODEL, 2) is MemoryMode.RECOMPUTE


@pytest.mark.parametrize(
    ("changed", "alone", "said"),
    [
        ({"batch": 9999}, True, "--batch is 9999, but a step needs .* use [0-9]+ or less"),
        (
            {"accumulate": 30_000, "method": "local"},
            False,
            "--accumulate is 30000, but .* use [0-9]+ or less",
        ),
        ({"model": "opt-125m"}, False, "opt-125m with --seq 128 needs .* use a smaller model"),
        ({"lora": "r=999999"}, False, "--lora 999999 exceeds the width"),
        ({"batch": 999_999_999}, False, "use 131,072 sequences or fewer"),
        ({"accumulate": 999_999_999}, False, "use 131,072 sequences or fewer"),
        ({"seq": 99_999}, False, "exceeds the 256 positions"),
        ({"steps": 10**30}, False, "--steps must be a number below .*, not 10+"),
    ],
)
def test_an_impossible_size_is_refused_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], alone: bool, said: str
) -> None:
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 200e6)
    runner, asked = JobRunner(tmp_path / "runs"), {"job": {"model": "opt-nano", **changed}}
    if not alone:  # without a fleet, a step by stages is impossible
        with pytest.raises(UsageError, match=said):
            runner.check(asked)
    with pytest.raises(UsageError, match=said):
        runner.run(asked, None, print, lambda: False)
    assert not (tmp_path / "runs").exists()


def test_a_step_that_only_stages_have_room_for_is_refused_without_them(
    monkeypatch: pytest.MonkeyPatch, corpus_file: Path, tmp_path: Path
) -> None:
    """Here, the fleet is too slow for stages, and this machine has too little memory."""
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 40e6)
    monkeypatch.setattr(
        "cleave.training.loop.job_fleet.measured_server", lambda *_: PsCompute(1e11, 0.0)
    )
    job = {"model": "opt-nano", "data": str(corpus_file), "batch": 400, "seq": 32, "steps": 1}
    runner = JobRunner(tmp_path)
    runner.check({"job": job})
    with cleave.emulated(1) as fleet, pytest.raises(UsageError, match="--batch is 400, but a step"):
        runner.run({"job": job}, fleet, print, lambda: False)


def test_the_largest_batch_that_is_named_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_memory, "total_memory_bytes", lambda: 200e6)
    for job in (JOB, replace(JOB, method="stages"), replace(JOB, dtype="bf16", state_dir="states")):
        with pytest.raises(UsageError) as refused:
            check_memory(replace(job, batch=60_000), 1)
        most = int(str(refused.value).split()[-3])
        check_memory(replace(job, batch=most), 1)
        with pytest.raises(UsageError, match=f"use {most} or less"):
            check_memory(replace(job, batch=most + 1), 1)


@pytest.mark.parametrize(
    ("changed", "servers", "said"),
    [
        ({"memory": "sharded", "method": "stages"}, 2, "by stages each server sends"),
        ({"memory": "sharded", "method": "tiles"}, 1, "a single server cannot shard weights"),
        (
            {"memory": "sharded", "method": "local", "lora": "r=4,bits=4"},
            2,
            "omit bits",
        ),
        ({"memory": "lean"}, 2, "use sharded"),
    ],
)
def test_a_job_is_refused_when_it_is_submitted_and_leaves_no_folder(
    changed: dict[str, str], servers: int, said: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runner = JobRunner(runs, servers=servers)
    asked = {"job": {"model": "opt-nano", **changed}, "name": "refused"}
    with pytest.raises(UsageError, match=said):
        runner.check(asked)
    with pytest.raises(UsageError, match=said):
        runner.run(asked, None, print, lambda: False)
    assert not runs.exists()
