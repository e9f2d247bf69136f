"""Stages in a browser against a real server: layers run by ONNX Runtime in WebAssembly."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route
from torch import Tensor

import cleave
from cleave.arrays import DType
from cleave.machine import webgpu_session
from cleave.planner.stages.model import PsCompute
from cleave.training.loop.job import JobSpec
from cleave.training.loop.run_folder import RunFolder
from cleave.training.stages.audits import Auditor
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel
from tests.graphs.models import trained
from tests.integration import cuts
from tests.integration.processes import (
    PATIENCE_S,
    losses,
    own_address,
    page_address,
    server,
    stages_job,
    started,
    training_by_stages,
    wait_for_event,
)
from tests.integration.test_stages import Prepared, rows
from tests.machine import swiftshader
from tests.training.runs import losses_on_one_device, rounds_job
from tests.training.test_staged import EvenStages
from tests.web.test_join import (
    DEVICE,
    PATIENCE_MS,
    accept_the_certificate,
    await_count,
    forced,
    join,
    pages_of_program,
    visit,
)

STEPS = 2
Plain = Callable[[JobSpec], list[float]]

# `test_join.py` has the short journey: a page that trains by tiles and by stages.
pytestmark = [pytest.mark.usefixtures("pages"), pytest.mark.nightly]


def own_page(place: dict[str, Any]) -> str:
    """The same for a browser: the join page."""
    return page_address(own_address(place))


def without_isolation(route: Route) -> None:
    """Answer without what lets a page share memory, as browsers ignore it over plain http."""
    response = route.fetch()
    headers = {k: v for k, v in response.headers.items() if "opener-policy" not in k}
    route.fulfill(response=response, headers=headers)


@pytest.mark.parametrize("way", ["secure", "plain", "gpu", "with the state"])
def test_a_browser_alone_trains_by_stages(
    browser: Browser,
    corpus_file: Path,
    tmp_path: Path,
    lasting: dict[str, Any],
    plain_losses: Plain,
    way: str,
) -> None:
    """In two threads behind a certificate that nobody signed, in one without shared memory, on the
    GPU, whose ONNX Runtime alone is loaded then, and with weights and optimizer state."""
    expected = plain_losses(stages_job(corpus_file, STEPS))
    loaded: list[str] = []
    secure = server(tmp_path, "--tls", "auto") if way == "secure" else nullcontext(lasting)
    with secure as place, visit(browser) as page:
        page.add_init_script(
            "Object.defineProperty(navigator, 'hardwareConcurrency', { value: 3 })"
        )
        page.context.on("request", lambda request: loaded.append(request.url))
        if way == "secure":
            accept_the_certificate(page, own_page(place))
        elif way == "plain":
            page.route("**/join", without_isolation)
            page.goto(own_page(place))
        elif way == "gpu":
            page.goto(forced(own_page(place), "webgpu"))
        else:
            page.goto(own_page(place))
        assert page.evaluate("crossOriginIsolated") == (way != "plain")
        page.get_by_role("button", name="Start helping").click()
        page.wait_for_selector("[data-state=working]", timeout=PATIENCE_MS)
        command = (*training_by_stages(corpus_file, STEPS), "--server", place["operator_url"])
        state = "devices" if way == "with the state" else "server"
        with started(*command, "--state", state) as (trainer, lines):
            seen = losses(lines)
            assert trainer.wait(PATIENCE_S) == 0
        # Forward and backward of two layers at least, in each step.
        await_count(page, "graphs", 4 * STEPS)
    (runtime,) = {url for url in loaded if "ort-wasm" in url}
    assert ("asyncify" in runtime) == (way == "gpu")
    assert seen == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
def test_devices_of_every_kind_train_alike_and_none_is_accused(
    browser: Browser, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch, ONNX Runtime, WebGPU in software and a browser; the server audits all results."""
    in_software = swiftshader.environment() if webgpu_session.installed() else None
    for name, value in (in_software or {}).items():
        monkeypatch.setenv(name, value)
    prepared = Prepared()
    auditor = Auditor(100.0, random.Random(1))  # everything
    runners = ("torch:cpu", "cpu", "webgpu" if in_software else "cpu")
    with (
        cleave.serve(stages_on="any", pages=pages_of_program) as served,
        visit(browser) as page,
        ExitStack() as devices,
    ):
        join(page, page_address(served.url))
        for runner in runners:
            _, said = devices.enter_context(
                started("join", served.url, "--runner", runner, *DEVICE)
            )
            assert wait_for_event(said, "note")["text"].startswith(f"{runner} runs layers at ")
        served.fleet.wait_for(1 + len(runners), PATIENCE_S)
        work = ModelWork(prepared.model, prepared.graphs, dtype)
        ps, runtime = PsCompute(1e11, 0.0), served.fleet.runtime
        staged = StagedModel(work, runtime, EvenStages(loss=True), ps, auditor=auditor)

        def gradients(ids: Tensor) -> float:
            loss = staged.gradients(rows(ids))
            assert isinstance(loss, float)
            return loss

        found = trained(prepared.model, gradients, prepared.batches, clip=1.0)
        staged.close()
        await_count(page, "graphs", 2 * len(prepared.batches))
    within = 1e-5 if dtype is DType.FP32 else 2e-2
    assert found == pytest.approx(prepared.plain_losses(), rel=within)
    assert auditor.counters.outputs > 0
    assert auditor.counters.sums > 0
    assert auditor.counters.faults == 0


@pytest.mark.parametrize("kernel", ["wasm", "webgpu"])
def test_a_browser_keeps_weights_and_optimizer_state_though_its_connection_is_cut(
    browser: Browser, corpus_file: Path, tmp_path: Path, plain_losses: Plain, kernel: str
) -> None:
    job = stages_job(corpus_file, cuts.STEPS)
    with (
        cleave.serve(stages_on="any", pages=pages_of_program) as served,
        cuts.cutting(served.live.manager) as cut,
        visit(browser) as page,
    ):
        join(page, forced(page_address(served.url), kernel))
        seen = cuts.losses_with_cuts(served, cut, job, tmp_path)
    assert seen == pytest.approx(plain_losses(job), rel=1e-4)


@pytest.mark.parametrize("state", ["server", "devices"])
def test_a_closed_tab_costs_its_share_alone(
    browser: Browser, corpus_file: Path, tmp_path: Path, plain_losses: Plain, state: str
) -> None:
    """A browser and a process train together; the tab is closed after the first step."""
    expected = plain_losses(stages_job(corpus_file, STEPS))
    with server(tmp_path) as place, visit(browser) as page:
        join(page, own_page(place))
        command = (*training_by_stages(corpus_file, STEPS), "--server", place["operator_url"])
        with (
            started("join", own_address(place), *DEVICE, cwd=tmp_path) as (_, said),
            started(*command, "--state", state) as (trainer, lines),
        ):
            wait_for_event(said, "ready")
            seen = [wait_for_event(lines, "step")["loss"]]
            page.close()
            seen += losses(lines)
            assert trainer.wait(PATIENCE_S) == 0
    assert seen == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("kernel", "exchange"), [("wasm", "int8"), ("wasm", "sparse"), ("webgpu", "sparse")]
)
def test_a_browser_trains_an_adapter_by_local_updates(
    browser: Browser,
    corpus_file: Path,
    tmp_path: Path,
    lasting: dict[str, Any],
    kernel: str,
    exchange: str,
) -> None:
    job = rounds_job(corpus_file, exchange)
    command = (
        "train", "--method", "diloco", "--model", job.model, "--data", job.data, "--steps",
        str(job.steps), "--every", str(job.every), "--exchange", exchange, "--lora", job.lora,
        "--learning-rate", str(job.learning_rate), "--batch", str(job.batch), "--seq",
        str(job.seq), "--checkpoint-every", "0", "--json", "--server", lasting["operator_url"],
    )  # fmt: skip
    with visit(browser) as page:
        join(page, forced(own_page(lasting), kernel))
        with started(*command, cwd=tmp_path) as (trainer, lines):
            seen = losses(lines)
            assert trainer.wait(PATIENCE_S) == 0
        await_count(page, "graphs", 4 * job.steps)
    expected = losses_on_one_device(job, RunFolder(tmp_path / "alone"))
    assert seen == pytest.approx(expected, rel=1e-4)
    assert len(set(seen)) == job.steps // job.every
