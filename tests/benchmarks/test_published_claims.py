"""The published claims: verdicts by hand."""

from __future__ import annotations

import pytest

from benchmarks.published_claims.__main__ import QUICK, claims_on, evidence_of, paper_cells
from benchmarks.published_claims.claims import (
    Evidence,
    bytes_fall,
    faster_than_dtfm,
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


def test_coding_is_for_ours_and_for_the_baselines() -> None:
    plain, coded = (paper_cells(QUICK, each) for each in (CodingPolicy.OFF, CodingPolicy.ON))
    for before, after in zip(plain.every, coded.every, strict=True):
        assert (before.name, before.devices) == (after.name, after.devices)
        for slow, fast in zip(before.conditions.devices, after.conditions.devices, strict=True):
            assert fast.uplink_bytes_per_s == pytest.approx(slow.uplink_bytes_per_s / 0.675)
            assert fast.downlink_bytes_per_s == pytest.approx(slow.downlink_bytes_per_s / 0.675)
            assert fast.memory_bytes == slow.memory_bytes
        assert all(device.codes_uplink for device in after.conditions.fp32_devices)


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
