"""The published claims: verdicts by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.published_claims.__main__ import QUICK, claims_on, evidence_of, paper_cells
from benchmarks.published_claims.claims import (
    Evidence,
    bytes_fall,
    comparable_to_cloud,
    faster_than_dtfm,
    recovers_faster,
    uses_more_devices,
)
from benchmarks.published_claims.verdict import OURS, Verdict
from cleave.planner.coding import CodingPolicy
from simulator.method import Outcome, Part
from simulator.sweep import Processes, Row


def row(
    devices: int | None,
    method: str,
    step_s: float,
    bytes_: float = 1.0,
    *,
    used: int = 1,
    needs: float = 1.0,
    recovery_s: float = 0.0,
) -> Row:
    recovery = (Part("again", recovery_s),) if recovery_s else ()
    misfit = "too big" if needs > 1e9 else ""
    parts = (Part("all", step_s),)
    return Row(
        devices,
        Outcome(
            method, "a setting", used, parts, bytes_, bytes_, 1e9, needs, misfit, recovery=recovery
        ),
    )


def evidence(*rows: Row) -> Evidence:
    return Evidence("some", {"some": rows}, layers={"some": 10})


def dtfm(devices: int, *times: float) -> list[Row]:
    return [
        row(devices, f"{name} ({variant})", seconds)
        for name in ("dtfm", "dtfm-all")
        for variant, seconds in zip(("formula", "pipelined", "serial"), times, strict=True)
    ]


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ((4, 5, 6), Verdict.HOLDS),
        ((3, 5, 6), Verdict.SOMETIMES),
        ((1, 2, 3), Verdict.FAILS),
    ],
)
def test_verdicts_follow_the_rows(times: tuple[float, ...], verdict: Verdict) -> None:
    claim = faster_than_dtfm(evidence(row(8, "cleave", 1.0), *dtfm(8, *times)))
    assert claim.verdict("cleave") is verdict
    assert len(claim.rows) == 6
    assert all(len(line) == len(claim.columns) for line in claim.rows)


def test_each_of_our_methods_has_a_verdict_of_its_own() -> None:
    rows = [row(n, name, s) for n in (8, 16) for name, s in (("cleave", 2), ("cleave-stages", 1))]
    slow, fast = dtfm(8, 3, 3, 3), dtfm(16, 3, 3, 4)
    claim = faster_than_dtfm(evidence(*rows, *slow, *fast))
    assert claim.verdict("cleave") is Verdict.FAILS
    assert claim.only_if("cleave") == ""
    assert claim.verdict("cleave-stages") is Verdict.SOMETIMES
    assert claim.only_if("cleave-stages") == (
        "2 of 12 trials; against dtfm (serial), dtfm-all (serial); on 16 devices"
    )


def test_a_method_without_a_plan_reaches_nothing() -> None:
    nothing = row(8, "cleave-stages", math.inf), *dtfm(8, 2, 3, 4)
    assert faster_than_dtfm(evidence(*nothing)).reached("cleave-stages") == "no plan, 0 of 6"
    more = row(16, "cleave-stages", 1.0), *dtfm(16, 2, 3, 4)
    reached = faster_than_dtfm(evidence(*nothing, *more)).reached("cleave-stages")
    assert reached == "2x to 4x, 2 of 12 (no plan in 6)"


def test_coding_is_for_ours_and_for_the_baselines() -> None:
    plain, coded = (paper_cells(QUICK, each) for each in (CodingPolicy.OFF, CodingPolicy.ON))
    for before, after in zip(plain.every, coded.every, strict=True):
        assert (before.name, before.devices) == (after.name, after.devices)
        for slow, fast in zip(before.conditions.devices, after.conditions.devices, strict=True):
            assert fast.uplink_bytes_per_s == pytest.approx(slow.uplink_bytes_per_s / 0.675)
            assert fast.downlink_bytes_per_s == pytest.approx(slow.downlink_bytes_per_s / 0.675)
            assert fast.memory_bytes == slow.memory_bytes
        assert all(device.codes_uplink for device in after.conditions.fp32_devices)


def test_a_card_is_a_condition_of_its_own() -> None:
    rows = [row(8, "cleave", 1.0), *dtfm(8, 4, 4, 4), row(None, "cloud-1xa100", 1.0)]
    behind = {"10 Gbit/s": [row(8, "cleave", 2.0)]}
    both = Evidence("some", {"some": rows}, carded=behind)
    for claim in (faster_than_dtfm(both), comparable_to_cloud(both)):
        assert claim.verdict("cleave") is Verdict.SOMETIMES
        assert "PS card unlimited" in claim.only_if("cleave")
        assert {line[2] for line in claim.rows} == {"unlimited", "10 Gbit/s"}


def test_devices_are_counted_where_they_work() -> None:
    # The pipeline is offered 64 and works on six; tiles work on all.
    tiles = [row(n, "cleave", 64 / n, used=n) for n in (32, 64)]
    others = [row(n, "alpa", 64 / n, used=6, needs=2e9) for n in (32, 64)]
    claim = uses_more_devices(evidence(*tiles, *others), 1280)
    alpa = next(line for line in claim.rows if line[0] == "alpa")
    assert alpa[2:] == ("6", "6", "11x", "no: needs 2 of 1 GB")


def test_a_layer_again_is_a_baseline_of_recovery() -> None:
    tiles = row(8, "cleave", 100.0, recovery_s=0.01)
    claim = recovers_faster(evidence(tiles, row(8, "alpa", 1.0, recovery_s=1000.0)))
    alpa, layer = claim.rows
    assert alpa[-2:] == (">10000x", "201x")
    # A tenth of 100 s against 0.01; with 5 s each, 15 against 5.01.
    assert layer[-2:] == ("1000x", "3x")


def test_slopes_by_hand() -> None:
    claim = bytes_fall(evidence(row(4, "cleave", 1.0, 8.0), row(16, "cleave", 1.0, 4.0)))
    assert claim.verdict("cleave") is Verdict.HOLDS
    assert claim.rows[0][3] == "-0.50"


@pytest.mark.slow
@pytest.mark.nightly
def test_every_claim_is_tested_by_every_method() -> None:
    claims = claims_on(QUICK, evidence_of(QUICK, paper_cells(QUICK), Processes()))
    assert len(claims) == 7
    for claim in claims:
        assert claim.rows
        assert all(claim.verdict(name) is not Verdict.UNTRIED for name in OURS)
        assert all(len(line) == len(claim.columns) for line in claim.rows)
