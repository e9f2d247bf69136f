"""The PS's core among hostile devices: any message, any bytes, in any state of a session.

What must hold is checked by `tests.fuzzing.Arena` at every order: a session that broke the protocol
gets an error and its end and nothing more, work never fails and never comes out wrong, and an
honest device is never sent away. `CLEAVE_EXAMPLES=2000` looks for longer.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest

from cleave.protocol import limits, messages
from tests.examples import examples
from tests.fuzzing import HELLOS, HONEST, Arena

SEEDS = int(os.environ.get("CLEAVE_EXAMPLES", examples(20)))
FLOOD = (
    messages.Telemetry({f"v{i}": 1.0 for i in range(limits.MAX_TELEMETRY)}),
    messages.Heartbeat(),
) * 20


def _attack(seed: int, inputs: int) -> Counter[str]:
    random, outcomes = Random(seed), Counter[str]()
    arena = Arena(random, thorough=seed % 4 == 0)
    for _ in range(inputs):
        outcomes[arena.step()] += 1
        if arena.peers and random.random() < 0.05:
            session = random.choice([*arena.peers])
            for message in random.choice([FLOOD, [random.choice([*HELLOS])]]):
                arena.say(session, message)
        assert set(arena.manager.sessions) == {HONEST, *arena.peers}
        for there in arena.manager.sessions.values():
            assert len(there.telemetry) <= limits.MAX_TELEMETRY
    arena.finish()
    assert arena.done > 2
    return outcomes


def test_any_bytes_in_any_state() -> None:
    _attack(0, 1000)


@pytest.mark.slow
def test_many_bytes_in_any_state() -> None:
    outcomes = sum((_attack(seed, 500) for seed in range(SEEDS)), Counter[str]())
    states = {outcome.split(",")[0] for outcome in outcomes}
    assert {"joining", "probing", "ready", "draining", "gone"} <= states
