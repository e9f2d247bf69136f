"""Hostile coded arrays: as many bytes as were said, or a ProtocolError."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.coded_bytes import CodedMutator, decoded_array

INPUTS = 5_000


def test_any_bytes_are_an_array_or_an_error() -> None:
    mutator = CodedMutator(Random(2026))
    outcomes: Counter[str] = Counter()
    for _ in range(INPUTS):
        one = mutator.next()
        outcome = decoded_array(one)
        outcomes[outcome] += 1
        mutator.keep(one, outcome)
    refused = sum(times for outcome, times in outcomes.items() if outcome.startswith("refused"))
    assert INPUTS / 10 < refused < 9 * INPUTS / 10, "neither all are refused nor hardly any"
    assert len(outcomes) > 12, "the inputs reach hardly anything"
