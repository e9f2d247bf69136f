"""Devices that only fail: set aside, tried ever later, remembered; no job ends because of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cleave
from cleave.device.compute_thread import ComputeThread, Outcome
from cleave.device.core import DeviceCore, Order
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.protocol import messages
from cleave.protocol.messages import ErrorCode, Message
from cleave.scheduler.instructions import Aside, Check, Close, Done, ForRuntime, Note, Send
from cleave.scheduler.sessions.admission import Behavior, SharedSecretAuth
from cleave.scheduler.sessions.device_history import MAX_STRANGERS
from cleave.scheduler.sessions.probe import FIRST_ID
from cleave.scheduler.sessions.reputation import (
    ASIDE_AFTER,
    MOST_TRIAL_S,
    TRIAL_S,
    Setbacks,
    trial_in_s,
)
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles.scheduler import HOLD_MOST_S, HOLD_S
from tests.examples import examples
from tests.integration.test_verification import device, multiply
from tests.scheduler.test_admission import HELLO, FakeAuth, submit

SIDE = 64


# --- the rules alone ---


def test_failing_runs_in_a_row_set_aside_and_one_that_is_done_does_not() -> None:
    setbacks = Setbacks()
    for _ in range(50):
        for _ in range(ASIDE_AFTER - 1):
            assert not setbacks.failed("boom", 1.0)
        assert not setbacks.did()
    assert not setbacks.aside
    assert [setbacks.failed("boom", 1.0) for _ in range(ASIDE_AFTER)][-1]
    assert setbacks.aside
    assert "boom" in setbacks.text
    assert not setbacks.failed("boom", 2.0)  # it is already, and is not put off by what was asked
    assert setbacks.trial_s == 1.0 + TRIAL_S


def test_trials_come_ever_later_up_to_a_limit() -> None:
    every = [trial_in_s(times) for times in range(1, 40)]
    assert every[:3] == [TRIAL_S, 2 * TRIAL_S, 4 * TRIAL_S]
    assert every == sorted(every)
    assert every[-1] == MOST_TRIAL_S
    assert trial_in_s(10**9) == MOST_TRIAL_S


def test_the_document_states_the_rules_that_hold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    _, _, rules = text.partition("## Devices that fail")
    words = " ".join(rules.split())
    assert f"**{ASIDE_AFTER} runs in a row**" in words
    assert (
        f"after {TRIAL_S:g} s, then {2 * TRIAL_S:g} s and so on up to {MOST_TRIAL_S / 60:g} m"
        in words
    )
    assert (
        f"after {HOLD_S:g} s, then {2 * HOLD_S:g} s and so on up to {HOLD_MOST_S / 60:g} m" in words
    )


# --- in the PS's core ---


class Home:
    """A session manager and devices that do as they are told, or fail, all in an instant.

    Attributes:
        failing: sessions that answer all that they are asked with `task_error`.
        fails: says whether another answer is a `task_error` as well.
        asked: by session, runs of real work; trials are not counted.
    """

    def __init__(self, manager: SessionManager | None = None) -> None:
        self.manager = manager or SessionManager()
        self.now_s = 0.0
        self.failing: set[int] = set()
        self.fails: Callable[[], bool] = lambda: False
        self.asked: dict[int, int] = {}
        self.batches: list[int] = []  # runs of real work that reached a device at once
        self.orders: list[ForRuntime] = []
        self.done: list[int] = []
        self._cores: dict[int, DeviceCore] = {}
        self._inboxes: dict[int, deque[Message]] = {}
        self._jobs = 0

    def join(self, session: int, name: str = "", credential: str = "", address: str = "") -> None:
        self._cores[session] = DeviceCore(2**30)
        self._inboxes[session] = deque()
        self.asked[session] = 0
        self.manager.opened(session, self.now_s, address)
        hello = replace(HELLO, name=name or f"device {session}", credential=credential)
        self._obey(self.manager.received(session, hello, self.now_s))
        self.settle()

    def leave(self, session: int) -> None:
        self._obey(self.manager.closed(session, "gone", self.now_s))

    def submit(self) -> int:
        self._jobs += 1
        self._obey(submit(self.manager, SIDE, self._jobs, self.now_s))
        self.settle()
        return self._jobs

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1.0)
            for session in list(self.manager.sessions):
                self._obey(self.manager.received(session, messages.Heartbeat(), self.now_s))
            self._obey(self.manager.tick(self.now_s))
            self.settle()

    def settle(self) -> None:
        """Until nothing is on its way; the first run of each device first."""
        while waiting := [s for s, inbox in self._inboxes.items() if inbox]:
            for session in waiting:
                under_way = 0
                inbox = self._inboxes[session]
                actions: list[Any] = []
                while inbox:
                    actions += self._cores[session].received(inbox.popleft())
                for action in actions:
                    if isinstance(action, Compute):
                        under_way += action.run < FIRST_ID
                self.batches += [under_way] if under_way else []
                for action in actions:
                    assert isinstance(action, Compute), action
                    self._answer(session, action)

    def _answer(self, session: int, order: Compute) -> None:
        core = self._cores[session]
        self.asked[session] += order.run < FIRST_ID
        if session in self.failing or self.fails():
            answers = core.failed(order.run, "the kernel\x1b[2J is broken")
        else:
            block = execute(NumpyBackend(), order)
            answers = core.computed(order.run, bytes(block.pack()), 0.0)
        for message in answers:
            assert not isinstance(message, Order)
            self._obey(self.manager.received(session, message, self.now_s))

    def _obey(self, orders: list[ForRuntime]) -> None:
        self.orders += orders
        for order in orders:
            match order:
                case Send(session, message) if not isinstance(
                    message, messages.Error | messages.Bye
                ):
                    self._inboxes[session].append(message)
                case Close(session):
                    self._inboxes[session].clear()
                case Check():
                    raise AssertionError("nothing is checked here")
                case Done(job):
                    self.done.append(job)

    def state(self, session: int) -> DeviceState:
        return self.manager.state(self.manager.sessions[session])


def test_a_device_that_only_fails_is_set_aside_and_the_others_do_the_work() -> None:
    home = Home()
    for session in (1, 2):
        home.join(session)
    home.failing.add(1)
    for number in range(1, 20):
        assert home.submit() == number
        assert number in home.done
    assert home.state(1) is DeviceState.ASIDE
    assert "the kernel[2J is broken" in home.manager.sessions[1].reason
    assert home.manager.sessions[1].counters.failures == home.asked[1]
    assert home.asked[1] < 20  # of which most were under way when it was set aside
    asked = home.asked[1]
    for _ in range(5):
        home.submit()
    assert home.asked[1] == asked
    assert home.manager.ready_devices == 1
    (aside,) = [order for order in home.orders if isinstance(order, Aside)]
    assert (aside.session, aside.aside) == (1, True)


def test_it_is_tried_without_a_job_ever_later_and_comes_back_with_one_run() -> None:
    home = Home()
    home.join(1)
    home.failing.add(1)
    job = home.submit()
    assert home.state(1) is DeviceState.ASIDE
    assert not home.manager.ready_devices
    assert home.manager.why_aside().startswith("device 1 is set aside: its runs fail")
    asked, failures = home.asked[1], home.manager.sessions[1].counters.failures
    home.pass_time(TRIAL_S + 1)  # fails the trial, of which the first failure is enough
    assert home.manager.sessions[1].counters.failures > failures
    failures = home.manager.sessions[1].counters.failures
    home.pass_time(2 * TRIAL_S - 3)
    assert home.manager.sessions[1].counters.failures == failures
    home.failing.clear()
    assert job not in home.done
    home.batches.clear()
    home.pass_time(4.0)
    assert home.state(1) is not DeviceState.ASIDE
    assert job in home.done
    assert home.batches[0] == 1  # one at a time until one was done
    assert max(home.batches) > 1
    assert not home.manager.sessions[1].reason
    assert home.asked[1] > asked
    assert home.manager.sessions[1].setbacks.times == 0


@pytest.mark.nightly
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32), failing=st.sampled_from([0.03, 0.3]))
def test_the_only_device_fails_some_runs_and_every_job_is_done(seed: int, failing: float) -> None:
    home = Home()
    home.join(1)
    rng = random.Random(seed)
    home.fails = lambda: rng.random() < failing
    jobs = [home.submit() for _ in range(20)]
    for _ in range(10):  # seldom anything waits
        if len(home.done) == len(jobs):
            break
        home.pass_time(TRIAL_S)
    assert sorted(home.done) == jobs
    assert home.manager.sessions[1].counters.failures < 3 * failing * home.asked[1] + 20


WRONG = messages.Result(0, 4, 5, "fp32", 0.0, np.ones((4, 5), np.float32).tobytes())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (WRONG, ErrorCode.QUARANTINED),
        (replace(WRONG, rows=5, columns=4), ErrorCode.PROTOCOL),
        (replace(WRONG, dtype="bf16"), ErrorCode.PROTOCOL),
        (replace(WRONG, payload=bytes(79)), ErrorCode.PROTOCOL),
        (messages.Computed(0, 0.0), ErrorCode.PROTOCOL),
    ],
    ids=["numbers", "shape", "dtype", "length", "type"],
)
def test_a_wrong_answer_in_a_trial_ends_the_session(answer: Message, code: ErrorCode) -> None:
    """Wrong numbers are a lie, another form is a broken program."""
    home = Home()
    home.join(1)
    home.failing.add(1)
    home.submit()
    home.now_s = TRIAL_S + 1.0
    home.manager.sessions[1].heard_s = home.now_s
    orders = home.manager.tick(home.now_s)
    run = next(
        o.message for o in orders if isinstance(o, Send) and isinstance(o.message, messages.Run)
    )
    assert isinstance(answer, messages.Result | messages.Computed)
    said = home.manager.received(1, replace(answer, id=run.id), home.now_s)
    (error,) = [
        o.message for o in said if isinstance(o, Send) and isinstance(o.message, messages.Error)
    ]
    assert error.code is code


def test_it_is_remembered_by_identity() -> None:
    auth = FakeAuth()
    home = Home(SessionManager(auth=auth))
    home.join(1, credential="7")
    home.failing.add(1)
    home.submit()
    assert auth.behavior[7] == Behavior(1, "the kernel[2J is broken")
    failed = home.manager.sessions[1].counters.failures
    home.leave(1)
    assert auth.done[7].failures == failed
    home.failing.add(2)
    home.join(2, credential="7")
    assert home.asked[2] == 1  # the work that waited: one run, and it is set aside again
    assert home.state(2) is DeviceState.ASIDE
    assert auth.behavior[7].setbacks == 2
    home.leave(2)
    home.join(3, credential="7")
    home.submit()
    assert auth.behavior[7] == Behavior(0, "the kernel[2J is broken")


def test_without_an_identity_it_is_remembered_by_address_and_name() -> None:
    home = Home(SessionManager(auth=SharedSecretAuth("")))
    home.join(1, "box", address="10.0.0.1")
    home.failing.add(1)
    home.submit()
    home.leave(1)
    home.failing = {2, 3}
    home.join(2, "box", address="10.0.0.1")
    assert home.asked[2] == 1
    home.leave(2)
    home.join(3, "box", address="10.0.0.2")  # another one
    assert home.asked[3] >= ASIDE_AFTER
    for number in range(MAX_STRANGERS + 5):
        session = home.manager.sessions[3]
        home.manager.history.remember(replace(session, name=f"box {number}"))
    assert len(home.manager.history._strangers) == MAX_STRANGERS


def test_failures_are_said_but_not_each_of_them() -> None:
    home = Home()
    for session in (1, 2):
        home.join(session)
    home.failing.add(1)
    for _ in range(5):
        home.submit()
    notes = [order.text for order in home.orders if isinstance(order, Note)]
    assert notes == ["device 1 failed a run: the kernel[2J is broken"]


# --- over a live runtime: the job goes on ---


class Failing(ComputeThread):
    """Answers everything with `task_error`."""

    def __init__(self) -> None:
        super().__init__(NumpyBackend())
        self.asked = 0

    def start(self, order: Order, done: Any) -> None:
        def failed(order: Order, outcome: Outcome) -> None:
            self.asked += 1
            done(order, "no memory left")

        super().start(order, failed)


def test_over_sockets_a_device_that_fails_every_run_costs_a_few(notes: list[str]) -> None:
    bad = Failing()
    with (
        cleave.serve(verify=False) as server,
        device(server, "good", ComputeThread(NumpyBackend())),
        device(server, "bad", bad),
    ):
        for seed in range(12):
            ours, plain = multiply(server, seed)
            np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)
        (described,) = [d for d in server.describe_devices() if d["name"] == "bad"]
        assert described["state"] == DeviceState.ASIDE.value
        assert "no memory left" in str(described["reason"])
        assert described["failures"] == bad.asked
    assert [note for note in notes if "bad: set aside: its runs fail" in note]
