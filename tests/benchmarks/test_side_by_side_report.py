"""The comparison's report: what rows decide, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.side_by_side.method import Method
from benchmarks.side_by_side.plots import draw
from benchmarks.side_by_side.row import Ending, Row
from benchmarks.side_by_side.setting import Fault, Link, Setting
from benchmarks.side_by_side.shapes import SMOLLM2
from benchmarks.side_by_side.simulated import pairs, spec_of
from benchmarks.side_by_side.verdicts import fastest, goals, survival, winners
from cleave.workload.step import step_flops
from simulator.work import train_flops

HOME = Setting("opt-125m", 8192, 512, Link(100, 20))
LORA = Setting("opt-125m", 8192, 512, Link(50, 10), rank=16)
LOSSES = [11.0, 10.0, 9.0]


def row(name: str, seconds: float, setting: Setting = HOME, **more: object) -> Row:
    """Return a whole row of three steps."""
    made = Row(Method.of(name), setting, seconds=[seconds] * 2, losses=LOSSES, machine="a machine")
    made.date, made.commit, made.limit_s = "2026-01-02T03:04:05+00:00", "abc", 3600
    return replace(made, **more)  # type: ignore[arg-type]


ROWS = [
    row("plain:fp32", 60),
    row("stages:fp32", 100, down_bytes=[2e8] * 4, up_bytes=[1e8] * 4),
    row("ddp:fp32", 360, down_bytes=[7.5e8] * 4, up_bytes=[7.5e8] * 4, links_s=360.0),
    row("hivemind:fp32", 240),
    row("plain:fp32", 40, LORA),
    row("stages:fp32", 50, LORA),
]


def test_goals_are_judged_by_their_own_limits() -> None:
    texts = [*goals(ROWS)]
    assert len(texts) == 3
    assert "0.28 times as long as `ddp:fp32`" in texts[0]
    assert texts[0].endswith(": met.")
    assert "0.42 times as long as `hivemind:fp32`" in texts[1]
    assert texts[1].endswith("**not met**.")
    assert "1.25 times as long as `plain:fp32`" in texts[2]
    assert texts[2].endswith(": met.")


def test_a_method_with_other_losses_is_not_the_fastest() -> None:
    wrong = row("hivemind:fp32:8bit", 10, losses=[11.0, 10.0, 8.0])
    found = fastest([*ROWS[:4], wrong], [wrong.method.way], "fp32")
    assert found is not None
    assert found.method.name == "hivemind:fp32"


def test_half_as_many_bytes_are_no_merit_of_a_way() -> None:
    halves = [*ROWS, row("stages:bf16", 30), row("stages:bf16", 10, LORA)]
    assert [*goals(halves)] == [*goals(ROWS)]
    assert [*winners(halves)] == [*winners(ROWS)]


def test_survival_says_what_a_fault_did() -> None:
    killed = replace(HOME, fault=Fault.KILL)
    on = row("stages:fp32", 1, killed, losses=[*LOSSES, 8.0])
    on.seconds, on.fault_step = [100.0, 130.0, 110.0], 3
    assert survival(on, ROWS).startswith(
        "continues; seconds before, in and after: 100.0, 130.0, 110"
    )
    assert "not compared to the end" in survival(on, ROWS)
    longer = [replace(ROWS[0], losses=[*LOSSES, 8.0]), *ROWS[1:]]
    assert "those of plain PyTorch" in survival(on, longer)
    off = replace(on, losses=[*LOSSES, 8.1])
    assert "**not those of plain PyTorch**" in survival(off, longer)
    ended = row("ddp:fp32", 1, killed, ending=Ending.FAILED, reason="worker-0 ended with 1: gone")
    assert survival(ended, ROWS) == "failed after 3 steps: worker-0 ended with 1: gone"
    assert survival(None, ROWS) == "not measured"


def test_the_same_rows_give_the_same_plot(tmp_path: Path) -> None:
    draw(ROWS, tmp_path / "one.svg")
    draw(ROWS, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "hivemind:fp32" in (tmp_path / "one.svg").read_text()


def test_smollm2_has_its_published_number_of_parameters() -> None:
    assert spec_of(SMOLLM2).parameters == 134_515_008


def test_ddp_is_simulated_by_what_its_bytes_and_the_cores_take() -> None:
    (pair,) = pairs([ROWS[0], ROWS[2]])
    spec = spec_of("opt-125m")
    sent_s = 1.5 * 4 * spec.parameters / HOME.link.up
    assert pair.step_s == pytest.approx(60 + sent_s, rel=0.01)
    assert train_flops(spec, 16, 512) > step_flops(spec, 16, 512)
    assert pair.right


def test_what_the_simulator_does_not_know_is_not_compared() -> None:
    killed = replace(HOME, fault=Fault.KILL)
    assert pairs([*ROWS, row("ddp:fp32", 1, killed), row("fsdp:fp32", 1)]) == pairs(ROWS)
    assert pairs([row("ddp:fp32", 360)]) == []
    faster = replace(HOME, link=Link(1000, 1000))  # than this machine carries
    assert pairs([*ROWS, row("ddp:fp32", 1, faster)]) == pairs(ROWS)
