"""How a job uses its fleet when it may choose: by stages, by tiles or on the server alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cleave
from cleave.errors import DeviceMemoryError
from cleave.graphs.graph_cache import GraphCache
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan
from cleave.planner.stages.search import plan_stages
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from emulator.virtual import VirtualRuntime
from profiles.fleet_device import FleetDevice
from tests.graphs.models import TOKENS
from tests.training.runs import losses, losses_of, nightly, notes_of, save_model, trained
from tests.training.test_staged import KEPT, EvenStages, SlicedLoss

FAST = FleetDevice("fast", 1e15, 1e12, 1e12, 1e-6, 2**34)
SLOW = replace(FAST, flops_per_s=1e6, downlink_bytes_per_s=1e3, uplink_bytes_per_s=1e3)
pytestmark = pytest.mark.slow  # graphs of layers are made

STEPS = 2


@pytest.fixture(autouse=True)
def server_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the speed of the server, which a busy machine would measure too low."""
    monkeypatch.setattr(
        "cleave.training.loop.job_fleet.measured_server", lambda *_: PsCompute(1e11, 0.0)
    )


def on(
    devices: Sequence[FleetDevice], job: JobSpec, folder: Path
) -> tuple[list[float], str, tuple[int, int]]:
    """Return the losses on emulated devices, the notes, and the bytes sent and tiles done."""
    with cleave.emulated(devices) as fleet:
        seen = trained(job, RunFolder(folder), fleet)
        counters = fleet.counters()
    return losses_of(seen), notes_of(seen), (counters.downlink_bytes, counters.tiles)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The records of steps in a run folder."""
    return [each for each in RunFolder(folder).records() if each["event"] == "step"]


@pytest.fixture(scope="module")
def job(corpus_file: Path) -> JobSpec:
    return JobSpec("opt-nano", str(corpus_file), STEPS, batch=2, seq=16, checkpoint_every=0)


@pytest.fixture(scope="module")
def plain(job: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(job, RunFolder(tmp_path_factory.mktemp("plain")))


MEMORY = ["plain", nightly("lean")]


@pytest.mark.parametrize("memory", MEMORY)
def test_fast_devices_train_whole_layers(
    job: JobSpec, plain: list[float], tmp_path: Path, memory: str
) -> None:
    found, said, (sent_bytes, tiles) = on(
        [FAST] * 2, replace(job, memory=memory), tmp_path / "fleet"
    )
    assert found == pytest.approx(plain, rel=1e-4)
    assert "stages: layers 1 to" in said
    assert sent_bytes > 0
    assert tiles == 0
    first, second = recorded(tmp_path / "fleet")
    assert (first["method"], second["method"]) == ("stages", "stages")
    assert 0 < first["predicted_s"] == second["predicted_s"]
    assert first["planning_s"] > 0
    assert second["planning_s"] == 0  # the devices are the same
    assert first["planning_s"] + first["audit_s"] < first["ps_s"]


def test_a_device_that_the_plan_leaves_out_is_named(
    job: JobSpec, plain: list[float], tmp_path: Path
) -> None:
    """Once, although it has no layers in either step."""
    idle = "1 of 2 devices had no layers in this step"
    found, said, _ = on([FAST, SLOW], replace(job, method="stages"), tmp_path / "one")
    assert found == pytest.approx(plain, rel=1e-4)
    assert said.count(idle) == 1


def test_new_weights_go_out_early_if_a_step_follows_at_once(
    job: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before an evaluation, which may need the devices for tiles, and not at the end."""
    steps = replace(job, steps=5, eval_every=3, eval_batches=1)
    plain = losses(steps, RunFolder(tmp_path / "plain"))
    after: list[int] = []
    folder = RunFolder(tmp_path / "fleet")

    def renew(runtime: VirtualRuntime, arrays: Any) -> None:
        after.append(1 + len(recorded(folder.path)))
        renewing(runtime, arrays)

    renewing = VirtualRuntime.renew
    monkeypatch.setattr(VirtualRuntime, "renew", renew)
    found, _, _ = on([FAST] * 2, steps, folder.path)
    assert found == pytest.approx(plain, rel=1e-4)
    assert sorted(set(after)) == [1, 2, 4]


def test_the_server_computes_the_loss_alone_where_the_plan_leaves_it_there(
    job: JobSpec, plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that train layers have no memory for tiles meanwhile."""

    def without_loss(*given: Any) -> StagePlan:
        plan = plan_stages(*given)
        stages = tuple(replace(stage, loss=False) for stage in plan.stages)
        return replace(plan, stages=stages)

    monkeypatch.setattr("cleave.training.stages.stage_setup.plan_stages", without_loss)
    found, said, (sent_bytes, tiles) = on([FAST] * 2, job, tmp_path / "fleet")
    assert found == pytest.approx(plain, rel=1e-4)
    assert "the loss on the server" in said
    assert sent_bytes > 0
    assert tiles == 0


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model whose second layer has experts, and so no graph."""
    return save_model(
        tmp_path_factory.mktemp("experts") / "small", "qwen3_moe", num_hidden_layers=3
    )


SMALL = replace(FAST, memory_bytes=20_000_000)  # for tiles alone


@pytest.mark.nightly  # test_ps_passes.py has cheaper models
@pytest.mark.parametrize(
    ("method", "devices"),
    [
        ("auto", [FAST, FAST]),
        ("stages", [FAST, FAST]),
        ("stages", [FAST, FAST, SMALL]),
    ],
)
def test_layers_without_graphs_stay_on_the_server_between_stages(
    experts: Path, corpus_file: Path, tmp_path: Path, method: str, devices: list[FleetDevice]
) -> None:
    """They go by tiles to devices that train no layers."""
    job = JobSpec(str(experts), str(corpus_file), STEPS, batch=2, seq=TOKENS, method=method)
    plain = losses(replace(job, method="local"), RunFolder(tmp_path / "plain"))
    found, said, (sent_bytes, tiles) = on(devices, job, tmp_path / "fleet")
    assert found == pytest.approx(plain, rel=1e-4)
    assert "layer 2 of 3: it has experts" in said
    assert sent_bytes > 0
    assert bool(tiles) is (SMALL in devices)


@pytest.mark.parametrize("late", ["slices of the loss", "parts of layers"])
def test_graphs_that_a_plan_needs_later_are_those_of_original_modules(
    job: JobSpec, plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """By then, the model's modules are offloaded by tiles. A graph in the cache hid that."""

    def planner(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
        slices = late == "slices of the loss"
        if not slices and not model.in_parts:
            raise DeviceMemoryError("whole layers do not fit")
        even = SlicedLoss(2, KEPT) if slices else EvenStages(loss=False)
        return replace(even(model, devices, ps), step_s=1e-9)

    cache = GraphCache(tmp_path / "cache")
    monkeypatch.setattr("cleave.training.stages.stage_setup.plan_stages", planner)
    monkeypatch.setattr("cleave.training.stages.stage_setup.GraphCache.of_user", lambda: cache)
    found, _, (sent_bytes, tiles) = on([FAST] * 4, job, tmp_path / "fleet")
    assert found == pytest.approx(plain, rel=1e-4)
    assert sent_bytes > 0
    assert tiles == 0
    assert [step["method"] for step in recorded(tmp_path / "fleet")] == ["stages"] * STEPS


@pytest.mark.parametrize("memory", MEMORY)
def test_slow_devices_leave_all_to_the_server(
    job: JobSpec, plain: list[float], tmp_path: Path, memory: str
) -> None:
    found, said, (_, tiles) = on([SLOW] * 2, replace(job, memory=memory), tmp_path / "fleet")
    assert found == pytest.approx(plain, rel=1e-4)
    assert "no stages. Using the server alone: a step takes" in said
    assert tiles == 0
    for step in recorded(tmp_path / "fleet"):
        assert (step["method"], step["predicted_s"]) == ("local", 0)


def test_without_devices_for_stages_the_reason_is_said_once(
    job: JobSpec, plain: list[float], tmp_path: Path
) -> None:
    with cleave.serve(stages_on="own") as server:  # no device is connected
        seen = trained(job, RunFolder(tmp_path / "fleet"), server.fleet)
    assert losses_of(seen) == pytest.approx(plain, rel=1e-4)
    assert notes_of(seen).count("no stages: no device is connected") == 1


def test_a_journal_leaves_stages_out(job: JobSpec, plain: list[float], tmp_path: Path) -> None:
    kept = replace(job, journal=True, checkpoint_every=2)
    found, said, _ = on([FAST], kept, tmp_path / "fleet")
    assert found == pytest.approx(plain, rel=1e-4)
    assert "stages: " not in said
    assert {step["method"] for step in recorded(tmp_path / "fleet")} == {"tiles"}
