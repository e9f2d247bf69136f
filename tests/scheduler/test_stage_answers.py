"""What a device answers to orders of a step by stages: one rule for each, whatever it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.planner.stages.model import PlannedStage
from cleave.protocol import messages
from cleave.protocol.messages import ErrorCode, Message
from cleave.scheduler.instructions import Close, ForRuntime, Send, TellStep
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.outcomes import StageDone, StepFailed, StepResult
from cleave.scheduler.stages.work import StageOrder, StepWork
from tests.examples import examples
from tests.scheduler.stage_devices import SUM_ROWS, SymbolicDevice, step_work
from tests.scheduler.test_stage_runs import come, server
from tests.scheduler.test_stage_step import check

LAYERS = 2
HONEST, HOSTILE = 1, 2
WHO = (HONEST, HOSTILE)


@dataclass
class Fleet:
    """A manager and two devices that do orders on symbols; what they answer is up to a test."""

    work: StepWork
    manager: SessionManager = field(default_factory=lambda: server(*WHO))
    devices: dict[int, SymbolicDevice] = field(
        default_factory=lambda: {device: SymbolicDevice(failed=True) for device in WHO}
    )
    outcome: Any = None
    errors: list[messages.Error] = field(default_factory=list)
    now_s: float = 1.0

    def begin(self) -> None:
        come(self.manager, *WHO)
        self.obey(self.manager.begin_step(self.work, self.now_s))

    def obey(self, orders: list[ForRuntime]) -> None:
        for order in orders:
            match order:
                case Send(session, messages.Error() as error):
                    assert session == HOSTILE
                    self.errors.append(error)
                case Send(session, message) if session in self.devices:
                    task = self._task(session, message)
                    if isinstance(message, messages.Put) and message.id >= 2**52:
                        continue  # of a trial
                    if not isinstance(message, messages.Welcome | messages.Run):
                        self.devices[session].take(message, task)
                case Close(session):
                    assert session == HOSTILE
                    del self.devices[session]
                case TellStep(outcome) if not isinstance(outcome, StageDone):
                    self.outcome = outcome

    def _task(self, session: int, message: Message) -> StageOrder | None:
        if not isinstance(message, messages.RunGraph | messages.Fetch):
            return None
        there = self.manager.sessions.get(session)
        held = there.expected.get(message.id) if there is not None else None
        # It may have been cancelled, or the session ended, in the same breath.
        order = held.detail if held is not None else StageOrder(None, None)  # type: ignore[arg-type]
        assert isinstance(order, StageOrder)
        return order

    def say(self, session: int, message: Message) -> None:
        if session in self.devices:
            self.now_s += 1e-3
            self.obey(self.manager.received(session, message, self.now_s, 100))

    def right(self, session: int) -> Answer:
        """The right answer to the first order of a device."""
        order, run, found = self.devices[session].orders.popleft()
        if found is None:
            return messages.Computed(run, 0.0)
        return messages.Result(run, order.rows, order.columns, order.out, 0.0, found)

    def answer_rightly(self, session: int) -> None:
        self.say(session, self.right(session))


Answer = messages.Computed | messages.Result


def failed(answer: Answer) -> messages.TaskError:
    return messages.TaskError(answer.id, "boom")


# What a device says instead of the right answer.
WAYS: dict[str, Callable[[Any], list[Message]]] = {
    "right": lambda answer: [answer],
    "twice": lambda answer: [answer, answer],
    "fails": lambda answer: [failed(answer)],
    "fails twice": lambda answer: [failed(answer)] * 2,
    "fails and does": lambda answer: [failed(answer), answer],
    "unknown": lambda answer: [replace(answer, id=10**6), answer],
    "other kind": lambda answer: [
        messages.Result(answer.id, 1, 1, "fp32", 0.0, bytes(4))
        if isinstance(answer, messages.Computed)
        else messages.Computed(answer.id, 0.0)
    ],
    "other form": lambda answer: [
        replace(answer, dtype="float128") if isinstance(answer, messages.Result) else answer
    ],
    "hello": lambda answer: [messages.Hello(messages.Role.DEVICE)],
}


@pytest.mark.parametrize("how", WAYS)
def test_each_wrong_answer_to_an_order_has_one_rule(how: str) -> None:
    work = step_work(LAYERS, 4, [PlannedStage(0, LAYERS, WHO, loss=True)])
    fleet = Fleet(work)
    fleet.begin()
    for said in WAYS[how](fleet.right(HOSTILE)):
        fleet.say(HOSTILE, said)
    there = fleet.manager.sessions.get(HOSTILE)
    if how == "hello":
        assert [error.code for error in fleet.errors] == [ErrorCode.PROTOCOL]
        assert there is None
    else:
        assert not fleet.errors
        assert there is not None
        assert there.counters.failures == (how in ("fails", "fails twice", "fails and does",
                                                   "other kind"))  # fmt: skip
        assert there.reputation.wrong == (how == "other kind")
    while fleet.outcome is None:
        waiting = [d for d in fleet.devices if fleet.devices[d].orders]
        fleet.answer_rightly(waiting[0])
    check(fleet.outcome, work)


@settings(max_examples=examples(100), deadline=None)
@given(seed=st.integers(0, 2**32), sums=st.sampled_from([SUM_ROWS, 2000]))
def test_whatever_one_device_answers_a_step_is_right_and_nobody_else_pays(
    seed: int, sums: int
) -> None:
    rng = random.Random(seed)
    ways = rng.sample([*WAYS], rng.randrange(1, len(WAYS)))
    split = rng.random() < 0.5
    stages = [PlannedStage(0, LAYERS, WHO, loss=True)]
    if split:
        stages = [PlannedStage(0, 1, (HONEST,)), PlannedStage(1, LAYERS, (HOSTILE,), loss=True)]
    work = step_work(LAYERS, 4, stages, sums)
    fleet = Fleet(work)
    fleet.begin()
    for _ in range(5000):
        if fleet.outcome is not None:
            break
        waiting = [d for d in fleet.devices if fleet.devices[d].orders]
        assert waiting, fleet.manager.stages.view()
        device = rng.choice(waiting)
        answer = fleet.right(device)
        how = rng.choice(ways) if device == HOSTILE and rng.random() < 0.5 else "right"
        for said in WAYS[how](answer):
            fleet.say(device, said)
    assert not isinstance(fleet.outcome, StepFailed), fleet.outcome
    assert isinstance(fleet.outcome, StepResult)
    check(fleet.outcome, work)
    honest = fleet.manager.sessions[HONEST]
    assert not honest.counters.failures
    assert not honest.setbacks.aside
    for session in fleet.manager.sessions.values():
        assert len(session.expected) < 10


def test_a_step_shows_what_a_device_sustains_in_graphs() -> None:
    """What a device says of itself was measured in a moment, and on an idle machine."""
    work = step_work(LAYERS, 4, [PlannedStage(0, LAYERS, WHO, loss=True)])
    fleet = Fleet(work)
    fleet.begin()
    before = {d: fleet.manager.sessions[d].rates for d in WHO}
    claimed = fleet.manager.sessions[HOSTILE].claimed_flops_per_s
    for seconds in (1.0, 1e-12):  # the second one is not to be believed
        done = {d: fleet.manager.sessions[d].counters.flops for d in WHO}
        began_s = fleet.now_s
        while fleet.outcome is None:
            for device in [d for d in WHO if fleet.devices[d].orders]:
                slow = seconds if device == HOSTILE else 0.0
                fleet.now_s += 1.0
                fleet.say(device, replace(fleet.right(device), compute_s=slow))
        assert isinstance(fleet.outcome, StepResult)
        assert [use.compute_s > 0.2 for use in fleet.outcome.used] == [seconds == 1.0]
        assert fleet.manager.sessions[HONEST].rates == before[HONEST]
        rates = fleet.manager.stages.able[HOSTILE]
        spent = fleet.manager.sessions[HOSTILE].counters.flops - done[HOSTILE]
        assert rates.flops_per_s <= 2 * claimed
        if seconds == 1.0:
            (use,) = fleet.outcome.used
            answers = round(use.compute_s)
            part_s = (fleet.now_s - began_s) / len(use.timeline)
            assert sum(use.timeline) * part_s == pytest.approx(answers, rel=1e-2)
            assert max(use.timeline) <= 1.0
            assert rates.flops_per_s == pytest.approx(max(1e6, spent / answers))
        fleet.outcome = None
        fleet.obey(fleet.manager.begin_step(replace(work, token=object()), fleet.now_s))
    assert fleet.manager.stages.flops == sum(
        session.counters.flops for session in fleet.manager.sessions.values()
    )
