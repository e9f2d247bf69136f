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
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cleave.protocol import limits, messages
from cleave.protocol.messages import ErrorCode
from cleave.scheduler.sessions.session import DeviceState
from tests.examples import examples
from tests.fuzzing import HELLOS, HONEST, TYPES, Arena

EXAMPLES = int(os.environ.get("CLEAVE_EXAMPLES", "20"))
INPUTS = 10_000

seeds = st.integers(0, 2**32 - 1)


class Hostile(RuleBasedStateMachine):
    """Several sessions that say anything, and one that does its work."""

    def __init__(self) -> None:
        super().__init__()
        self.random = Random(0)
        self.arena = Arena(self.random)

    def _one(self, seed: int) -> int:
        self.random.seed(seed)
        return self.random.choice(list(self.arena.peers))

    @rule()
    def open(self) -> None:
        if len(self.arena.peers) < 6:
            self.arena.open()

    @rule(seed=seeds, hello=st.sampled_from(HELLOS))
    def open_and_say_hello(self, seed: int, hello: messages.Hello) -> None:
        if len(self.arena.peers) < 6:
            self.arena.say(self.arena.open(), hello)

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds, hello=st.sampled_from(HELLOS))
    def hello_again(self, seed: int, hello: messages.Hello) -> None:
        self.arena.say(self._one(seed), hello)

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds, kind=st.sampled_from(sorted(TYPES)))
    def any_message(self, seed: int, kind: str) -> None:
        session = self._one(seed)
        self.arena.say(session, self.arena.mutator.message_of(kind))

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds, times=st.integers(1, 10))
    def what_fits_the_state(self, seed: int, times: int) -> None:
        for _ in range(times):
            if self.arena.peers:
                session = self._one(seed)
                self.arena.say(session, self.arena.message(session))

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds, times=st.integers(1, 5))
    def answer(self, seed: int, times: int) -> None:
        session = self._one(seed)
        for _ in range(times):
            known = self.arena.manager.sessions.get(session)
            if known is not None and known.state is not DeviceState.JOINING:
                self.arena.say(session, self.arena.answer(session))

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds, values=st.integers(1, limits.MAX_TELEMETRY), times=st.integers(1, 30))
    def flood(self, seed: int, values: int, times: int) -> None:
        session = self._one(seed)
        telemetry = messages.Telemetry({f"v{i}": 1.0 for i in range(values)})
        for _ in range(times):
            self.arena.say(session, telemetry)
            self.arena.say(session, messages.Heartbeat())

    @precondition(lambda self: self.arena.peers)
    @rule(
        seed=seeds,
        farewell=st.sampled_from(
            [messages.Drain(), messages.Bye("x"), messages.Error(ErrorCode.LIMIT, "x")]
        ),
    )
    def leave(self, seed: int, farewell: messages.Drain | messages.Bye | messages.Error) -> None:
        self.arena.say(self._one(seed), farewell)

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds)
    def bad_bytes(self, seed: int) -> None:
        session = self._one(seed)
        self.arena.receive(session, self.arena.mutator.next())

    @precondition(lambda self: self.arena.peers)
    @rule(seed=seeds)
    def break_off(self, seed: int) -> None:
        self.arena.break_off(self._one(seed))

    @precondition(lambda self: self.arena.gone)
    @rule(seed=seeds)
    def after_the_end(self, seed: int) -> None:
        self.random.seed(seed)
        self.arena.receive(self.random.choice(self.arena.gone), self.arena.mutator.next())

    @rule(seed=seeds)
    def submit(self, seed: int) -> None:
        self.random.seed(seed)
        self.arena.submit()

    @rule(times=st.integers(1, 5))
    def work_honestly(self, times: int) -> None:
        for _ in range(times):
            self.arena.work_honestly()

    @rule(seed=seeds)
    def check(self, seed: int) -> None:
        self.random.seed(seed)
        self.arena.check()

    @rule(
        took_s=st.sampled_from(
            [0.1, limits.HEARTBEAT_S, limits.HANDSHAKE_S + 1, limits.SILENCE_S + 1]
        )
    )
    def time_passes(self, took_s: float) -> None:
        self.arena.tick(took_s)

    @invariant()
    def sessions_that_ended_are_forgotten(self) -> None:
        assert set(self.arena.manager.sessions) == {HONEST, *self.arena.peers}
        for session in self.arena.manager.sessions.values():
            assert len(session.telemetry) <= limits.MAX_TELEMETRY

    def teardown(self) -> None:
        self.arena.finish()


def test_any_message_in_any_state() -> None:
    run_state_machine_as_test(
        Hostile,
        settings=settings(
            max_examples=examples(EXAMPLES),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.slow
def test_any_bytes_in_any_state() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(20):
        arena = Arena(Random(seed), thorough=seed % 4 == 0)
        for _ in range(INPUTS // 20):
            outcomes[arena.step()] += 1
        arena.finish()
        assert arena.done > 2
    states = {outcome.split(",")[0] for outcome in outcomes}
    assert {"joining", "probing", "ready", "draining", "gone"} <= states
