"""Who is checked, who is believed, who is thrown out."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from cleave.errors import UsageError
from cleave.scheduler.sessions.reputation import (
    FORGIVEN_BY,
    KNOWN_AFTER,
    QUARANTINE,
    Reputation,
    Suspects,
    Wrong,
)
from cleave.scheduler.sessions.result_judging import CheckScope, Verification
from cleave.server.access import FAULTS_COUNT_S


def known() -> Reputation:
    return Reputation(right=KNOWN_AFTER)


@pytest.mark.parametrize(
    ("faults", "thrown_out"),
    [
        ([], False),
        ([Wrong.SMALL], False),
        ([Wrong.SMALL] * 2, False),
        ([Wrong.SMALL] * 3, True),
        ([Wrong.FORM], False),
        ([Wrong.FORM] * 2, True),
        ([Wrong.GROSS], True),
    ],
)
def test_what_costs_a_device_its_place(faults: list[Wrong], thrown_out: bool) -> None:
    reputation = known()
    for fault in faults:
        reputation.was_wrong(fault)
    assert reputation.quarantined is thrown_out
    assert reputation.known is (not faults)


def test_a_bit_that_flips_now_and_then_is_forgiven() -> None:
    reputation = Reputation()
    for _ in range(5):
        reputation.was_wrong(Wrong.SMALL)
        for _ in range(FORGIVEN_BY):
            reputation.was_right()
        assert not reputation.quarantined
    assert not reputation.known  # and is checked for ever


@pytest.mark.parametrize("right_between", [1, FORGIVEN_BY // 3])
def test_right_results_in_between_do_not_save_whom_the_rules_throw_out(right_between: int) -> None:
    """Forgiven in parts, 2.9997 points would be less than 3, and the third fault none."""
    for how, times in ((Wrong.SMALL, 3), (Wrong.FORM, 2)):
        reputation = known()
        for number in range(times):
            assert not reputation.quarantined, (how, number)
            reputation.was_wrong(how)
            if number < times - 1:
                for _ in range(right_between):
                    reputation.was_right()
        assert reputation.quarantined, how


def test_the_document_states_the_rules_that_hold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    _, _, rules = text.partition("## What happens then")
    rows = [line.split("|")[1:4] for line in rules.splitlines() if line.startswith("|")][2:]
    ordinals = ("first", "second", "third", "fourth")
    stated = [(float(points), nth.strip()) for _, points, nth in rows[: len(Wrong)]]
    held = [(how.value, ordinals[math.ceil(QUARANTINE / how.value) - 1]) for how in Wrong]
    assert stated == held
    assert f"At {QUARANTINE:g} points" in rules
    assert f"{FORGIVEN_BY:,} right results" in rules
    assert f"the last {FAULTS_COUNT_S / 3600:g} hours" in rules
    assert f"until {KNOWN_AFTER} of its results" in text


def test_a_reputation_goes_through_a_store() -> None:
    reputation = known()
    reputation.was_wrong(Wrong.FORM)
    assert Reputation(**asdict(reputation)) == reputation


def test_one_array_explains_what_was_under_way_and_no_more() -> None:
    suspects = Suspects()
    assert not suspects.explains(1, frozenset({1, 2}))
    suspects.begin(frozenset({1, 2}), last_run=9)
    assert suspects.explains(5, frozenset({3, 2}))
    assert not suspects.explains(6, frozenset({1, 4}))  # it was 2, or this is another fault
    assert suspects.explains(7, frozenset({2, 5}))
    assert not suspects.explains(10, frozenset({2, 5}))  # of what was sent again


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Verification()),
        ("all", Verification(CheckScope.ALL)),
        ("off", Verification(CheckScope.OFF)),
        ("sample:0.1", Verification(CheckScope.SAMPLE, 0.1)),
        ("sample:1", Verification(CheckScope.SAMPLE, 1.0)),
        (True, Verification()),
        (False, Verification(CheckScope.OFF)),
    ],
)
def test_what_may_be_asked_for(text: str | bool, expected: Verification) -> None:
    assert Verification.of(text) == expected


@pytest.mark.parametrize(
    "text", ["", "some", "sample", "sample:", "sample:0", "sample:1.1", "sample:-1", "sample:nan",
             "sample:x", "all:0.5", "auto:1"]
)  # fmt: skip
def test_what_may_not(text: str) -> None:
    with pytest.raises(UsageError, match="use auto, all, off, or sample:P") as caught:
        Verification.of(text)
    assert repr(text) in str(caught.value)


def test_auto_checks_what_crossed_a_process_boundary() -> None:
    assert Verification().active(crossed=True)
    assert not Verification().active(crossed=False)
    assert Verification(CheckScope.ALL).active(crossed=False)
    assert not Verification(CheckScope.OFF).active(crossed=True)


def test_a_sample_is_for_devices_that_were_never_wrong() -> None:
    rng = random.Random(0)
    sample = Verification.of("sample:0.1")
    taken = sum(sample.wants(known(), rng) for _ in range(10_000))
    assert 850 < taken < 1150
    failed = known()
    failed.was_wrong(Wrong.SMALL)
    for reputation in (Reputation(), failed):
        assert all(sample.wants(reputation, rng) for _ in range(100))
