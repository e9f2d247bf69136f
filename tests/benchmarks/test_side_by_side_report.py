"""The comparison's report: what rows decide, and the page that is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.side_by_side.carrying import Carried
from benchmarks.side_by_side.method import Method
from benchmarks.side_by_side.order import default_order
from benchmarks.side_by_side.plots import draw, summarize
from benchmarks.side_by_side.report import page
from benchmarks.side_by_side.row import Ending, Row
from benchmarks.side_by_side.setting import Fault, Link, Setting
from benchmarks.side_by_side.shapes import SMOLLM2
from benchmarks.side_by_side.simulated import pairs, spec_of
from benchmarks.side_by_side.verdicts import fastest, goals, short, survival, winners
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
    assert "0.28 of the time of `ddp:fp32`" in texts[0]
    assert texts[0].endswith(": met.")
    assert "0.42 of the time of `hivemind:fp32`" in texts[1]
    assert texts[1].endswith("**not met**.")
    assert "1.25 of the time of `plain:fp32`" in texts[2]
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


def test_whoever_wins_is_named() -> None:
    faster = [*ROWS[:2], row("pipeline:fp32", 80)]
    (text,) = winners(faster)
    assert "`pipeline:fp32` is the fastest with 80.0 s a step, 1.25 times as fast as" in text
    (text,) = winners(ROWS[:4])
    assert "`stages:fp32` is the fastest" in text


def test_survival_says_what_a_fault_did() -> None:
    killed = replace(HOME, fault=Fault.KILL)
    on = row("stages:fp32", 1, killed, losses=[*LOSSES, 8.0])
    on.seconds, on.fault_step = [100.0, 130.0, 110.0], 3
    assert survival(on, ROWS).startswith("goes on; seconds before, in and after: 100.0, 130.0, 110")
    assert "not compared to the end" in survival(on, ROWS)
    longer = [replace(ROWS[0], losses=[*LOSSES, 8.0]), *ROWS[1:]]
    assert "those of plain PyTorch" in survival(on, longer)
    off = replace(on, losses=[*LOSSES, 8.1])
    assert "**not those of plain PyTorch**" in survival(off, longer)
    ended = row("ddp:fp32", 1, killed, ending=Ending.FAILED, reason="worker-0 ended with 1: gone")
    assert survival(ended, ROWS) == "failed after 3 steps: worker-0 ended with 1: gone"
    assert survival(None, ROWS) == "not measured"


def test_a_reason_fits_a_table() -> None:
    assert short("Error: [/a/b.cc:53] read | failed\nmore") == "Error: read / failed"
    assert len(short("word " * 100)) < 120


def test_the_page_has_every_row_and_every_reason() -> None:
    late = row("tiles:fp32", 0, losses=[], ending=Ending.LATE, reason="too long")
    late.seconds = []
    killed = replace(HOME, fault=Fault.KILL)
    ended = row("ddp:fp32", 1, killed, ending=Ending.FAILED, reason="connection reset")
    text = page([*ROWS, late, ended])
    for shown in (*ROWS, late):
        assert f"| `{shown.method.name}` |" in text
    assert "late after 0 s: too long" in text
    assert "failed after 3 steps: connection reset" in text
    assert "a machine, 2026-01-02, commit `abc`: 8 rows" in text
    assert "| `ddp:fp32` | 360.0 | 6.00 | 360.0 | 750 | 750 |" in text


def test_the_page_says_what_is_not_measured_yet() -> None:
    wanted = default_order()
    made = [
        Row(key.method, key.setting, seconds=[1.0] * 3, losses=LOSSES, date="2026-01-02")
        for key in wanted
    ]
    assert "not measured yet" not in page(made)
    assert f"**1 of the {len(wanted)} rows" in page(made[1:])


def test_the_same_rows_give_the_same_plot(tmp_path: Path) -> None:
    draw(ROWS, tmp_path / "one.svg")
    draw(ROWS, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "hivemind:fp32" in (tmp_path / "one.svg").read_text()


def test_the_summary_has_the_fastest_of_each_way_with_the_right_losses(tmp_path: Path) -> None:
    wrong = row("hivemind:fp32:8bit", 10, losses=[11.0, 10.0, 8.0])
    summarize([*ROWS, row("ddp:fp32:halved", 180), wrong], tmp_path / "summary.svg")
    text = (tmp_path / "summary.svg").read_text()
    for shown in ("Cleave by stages", "DDP", "hivemind", "180.0", "240.0"):
        assert shown in text
    assert "360.0" not in text


def test_plain_pytorch_stands_beside_rows_behind_every_link() -> None:
    lan = replace(HOME, link=Link(1000, 1000))
    (text,) = winners([*ROWS[:1], row("stages:fp32", 70, lan), row("ddp:fp32", 90, lan)])
    assert "One machine alone, on both cores and without links: 60.0 s." in text


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


def test_the_page_says_what_links_cost_where_that_is_known() -> None:
    sums = [Carried("1000/1000", 500, 20.0, 6_000_000_000, 23.0, "a machine")]
    line = "| 1000/1000 | 500 | 20.0 | 6.0 | 23.0 |"
    assert line in page(ROWS, sums)
    assert "MB summed" not in page(ROWS)
    assert "MB summed" not in page(ROWS, [replace(sums[0], machine="another")])
