"""The formulas of the page "What limits a fleet", run by Node.js, against the planner itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from cleave.errors import PlanError
from cleave.planner.alternatives import Batch
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.planner import TilePlanner
from cleave.planner.report import plan_step
from cleave.planner.stage_search import plan_stages
from cleave.planner.stages import PsCompute
from cleave.workload.registry import MODELS, Family, ModelSpec
from cleave.workload.stages import Adapters, StageSizes, cut_batch
from cleave.workload.step import step_gemms

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="Node.js is not installed")

SCRIPTS: Final = Path(__file__).parents[2] / "docs" / "javascripts" / "fleet-limits"
STAGES_TOLERANCE: Final = 0.15
"""By how much stages may differ from what the planner predicts; the page says it."""
TILES_TOLERANCE: Final = 0.05

SMOLLM2: Final = ModelSpec(
    "smollm2-135m", Family.LLAMA, 30, 576, 9, 3, 64, 1536, 49152, 8192, 576, tied_head=True
)
SPECS: Final = {**MODELS, SMOLLM2.name: SMOLLM2}
ELEMENT_BYTES: Final = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Setup:
    """What the page's form is filled with; names are those of its fields."""

    model: str
    sequences: int
    sequence: int
    dtype: str
    rank: int
    devices: int
    downlinkMbit: float  # noqa: N815
    uplinkMbit: float  # noqa: N815
    latencyMs: float  # noqa: N815
    deviceGflops: float  # noqa: N815
    memoryGb: float  # noqa: N815
    cardGbit: float  # noqa: N815
    serverGflops: float  # noqa: N815

    @property
    def sizes(self) -> StageSizes:
        """Return the sizes of the model."""
        each = ELEMENT_BYTES[self.dtype]
        adapters = Adapters(self.rank) if self.rank else None
        return StageSizes(SPECS[self.model], self.sequence, each, each, adapters)

    @property
    def batch(self) -> Batch:
        """Return the batch, for the planner."""
        rows, sequence = self.sequences, self.sequence
        in_parts = replace(self.sizes, in_parts=True)
        return Batch(
            lambda parts: self.sizes.costs(cut_batch(rows, sequence, parts)),
            rows,
            state_bytes=0,
            kept_bytes=0,
            in_parts=lambda parts: in_parts.costs(cut_batch(rows, sequence, parts)),
        )

    @property
    def ps(self) -> PsCompute:
        """Return the server."""
        card = self.cardGbit * 1e9 / 8
        return PsCompute(self.serverGflops * 1e9, 0.0, PsRates(card, card))

    @property
    def fleet(self) -> list[DeviceRates]:
        """Return the devices, which code payloads where `cleave plan` would."""
        one = DeviceRates(
            0,
            self.downlinkMbit * 1e6 / 8,
            self.uplinkMbit * 1e6 / 8,
            self.deviceGflops * 1e9,
            self.latencyMs / 1e3,
            int(self.memoryGb * 1e9),
        )
        decided = CodingPolicy.AUTO.decided(one, self.ps.rates, self.devices)
        return [replace(decided, device=number) for number in range(self.devices)]

    def stages_s(self) -> float | None:
        """Return what the planner predicts for stages; None where none fit."""
        try:
            found, _, _ = self.batch.by_stages(plan_stages, self.fleet, self.ps)
        except PlanError:
            return None
        return found.step_s

    def tiles_s(self) -> float:
        """Return what the planner predicts for tiles."""
        element = ElementBytes(ELEMENT_BYTES[self.dtype], ELEMENT_BYTES[self.dtype])
        gemms = step_gemms(SPECS[self.model], self.sequences, self.sequence, fused_siblings=True)
        card = self.ps.rates or PsRates()
        devices = payload_rates(self.fleet, self.dtype)
        step = plan_step(TilePlanner(card), gemms, element, devices, card)
        return self.batch.by_tiles(step, gemms, self.ps).step_s


SETUPS: Final = {
    "eight computers": Setup("opt-1.3b", 64, 512, "bf16", 0, 8, 500, 100, 10, 500, 16, 1, 500),
    "adapters": Setup("opt-1.3b", 64, 512, "bf16", 8, 8, 100, 20, 10, 500, 16, 1, 500),
    "few tokens": Setup("opt-125m", 4, 128, "fp32", 0, 4, 100, 20, 30, 500, 8, 1, 500),
    "a slow server": Setup("opt-1.3b", 32, 512, "fp32", 0, 10, 100, 100, 1, 500, 4, 10, 20),
    "fast links": Setup("smollm2-135m", 16, 1024, "bf16", 0, 8, 3000, 300, 50, 100, 8, 1, 20),
    "parts of layers": Setup("opt-13b", 32, 1024, "fp32", 0, 16, 1000, 100, 50, 100, 8, 10, 100),
    "little memory": Setup("llama2-7b", 64, 128, "fp32", 0, 4, 1000, 1000, 20, 30, 2, 1, 20),
}


@cache
def page(*setups: Setup) -> list[dict[str, Any]]:
    """Return what the page computes for each of these set-ups."""
    program = (
        f'import {{ limitsOf }} from "{(SCRIPTS / "limits.mjs").as_uri()}";'
        'import { readFileSync } from "node:fs";'
        "const setups = JSON.parse(readFileSync(0));"
        "console.log(JSON.stringify(setups.map(limitsOf)));"
    )
    ran = subprocess.run(
        ["node", "--input-type=module", "--eval", program],
        input=json.dumps([asdict(setup) for setup in setups]),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("rank", [0, 16])
def test_the_server_alone_takes_what_the_planner_says(rank: int) -> None:
    names = ("smollm2-135m", "opt-125m", "opt-1.3b", "llama2-7b", "opt-13b")
    base = SETUPS["eight computers"]
    setups = [replace(base, model=name, rank=rank, devices=1) for name in names]
    for setup, found in zip(setups, page(*setups), strict=True):
        assert found["alone"]["seconds"] == pytest.approx(setup.batch.by_ps(setup.ps).step_s)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_stages_take_about_what_the_planner_says(name: str) -> None:
    setup, stages = SETUPS[name], page(SETUPS[name])[0]["stages"]
    expected = setup.stages_s()
    if expected is None:
        assert "Does not fit" in stages["refused"]
    else:
        assert stages["seconds"] == pytest.approx(expected, rel=STAGES_TOLERANCE)
        assert stages["memoryBytes"] <= setup.memoryGb * 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if not setup.rank])
def test_tiles_take_about_what_the_planner_says(name: str) -> None:
    (found,) = page(SETUPS[name])
    assert found["tiles"]["seconds"] == pytest.approx(SETUPS[name].tiles_s(), rel=TILES_TOLERANCE)


def test_the_parts_of_a_time_add_up_and_name_what_limits_it() -> None:
    for found in page(*SETUPS.values()):
        for method in found.values():
            if "refused" in method:
                continue
            assert sum(method["shares"].values()) == pytest.approx(1)
            assert method["shares"][method["limit"]] == max(method["shares"].values())


def test_what_limits_is_what_helps() -> None:
    base = SETUPS["few tokens"]
    before, after = page(base, replace(base, uplinkMbit=2 * base.uplinkMbit))
    assert before["stages"]["limit"] == "uplink"
    share = before["stages"]["shares"]["uplink"]
    gained = 1 - after["stages"]["seconds"] / before["stages"]["seconds"]
    assert gained == pytest.approx(share / 2, abs=0.05)


def test_adapters_do_not_go_by_tiles() -> None:
    (found,) = page(SETUPS["adapters"])
    assert "adapters" in found["tiles"]["refused"]
