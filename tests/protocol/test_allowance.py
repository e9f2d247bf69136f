"""What devices may say unasked: honest ones never meet the limit, and floods end at it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cleave.protocol import limits, messages
from cleave.protocol.allowance import Allowance, Bucket, CancelledRuns, is_answer
from cleave.protocol.messages import ErrorCode, Message
from cleave.scheduler.instructions import ForRuntime, Send
from cleave.scheduler.sessions.session_manager import SessionManager
from tests.scheduler.test_admission import HELLO, FakeAuth, come, sent, submit

MEASURE = replace(HELLO, measure=True)


def late(run: int) -> messages.Result:
    return messages.Result(run, 64, 64, "fp32", 0.1, bytes(4 * 64 * 64))


def ended(orders: list[ForRuntime], session: int = 1) -> messages.Error | None:
    errors = (message for message in sent(orders, session) if isinstance(message, messages.Error))
    return next(errors, None)


def say(manager: SessionManager, message: Message, times: int, now_s: float) -> int:
    """Say the same so often; how often it was taken."""
    for taken in range(times):
        if ended(manager.received(1, message, now_s, 20)) is not None:
            return taken
    return times


def test_a_bucket_fills_with_time_and_no_higher() -> None:
    bucket = Bucket(per_s=2.0, most=10, now_s=5.0)
    assert bucket.take(10, 5.0)
    assert not bucket.take(1, 5.4)
    assert bucket.take(1, 5.5)
    assert not bucket.take(11, 1e6)
    assert bucket.take(10, 1e6)
    assert not bucket.take(1, 0.0)  # a clock that goes back brings nothing


def test_many_small_messages_and_few_large_ones() -> None:
    small, large = Allowance(0.0), Allowance(0.0)
    assert all(small.said(13, 0.0) == "" for _ in range(limits.MAX_UNASKED))
    assert "1000 unrequested messages" in small.said(13, 0.0)
    size = limits.MAX_DEVICE_HEADER_BYTES
    assert all(large.said(size, 0.0) == "" for _ in range(limits.MAX_UNASKED_BYTES // size))
    assert "4194304 unrequested bytes" in large.said(size, 0.0)


@pytest.mark.parametrize("every_s", [0.1, 1.0])
def test_a_device_may_say_ten_a_second_for_ever_and_all_at_once_after_a_stall(
    every_s: float,
) -> None:
    manager = SessionManager(auth=FakeAuth())
    come(manager, 1)
    now_s = 0.0
    for _ in range(5000):
        now_s += every_s
        assert say(manager, messages.Heartbeat(), 1, now_s) == 1
    now_s += limits.SILENCE_S  # as long as a network may be stuck
    held_up = int(limits.SILENCE_S / every_s)
    assert say(manager, messages.Heartbeat(), held_up, now_s) == held_up
    assert say(manager, messages.Heartbeat(), 600, now_s) == 600  # or the server, ten minutes


FLOODS: dict[str, Message] = {
    "heartbeats": messages.Heartbeat(),
    "telemetry": messages.Telemetry({"power_w": 5.0}),
    "answers nobody awaits": late(77),
    "failures nobody awaits": messages.TaskError(77, "no"),
}


@pytest.mark.parametrize("message", FLOODS.values(), ids=FLOODS)
def test_a_flood_ends_its_session_and_the_device_rests(message: Message) -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    come(manager, 1)
    come(manager, 2, "8")
    for _ in range(limits.MAX_UNASKED):
        assert ended(manager.received(1, message, 1.0, 20)) is None
    error = ended(manager.received(1, message, 1.0, 20))
    assert error is not None
    assert error.code is ErrorCode.LIMIT
    assert list(manager.sessions) == [2]
    assert not auth.quarantine
    back = ended(come(manager, 3, now_s=1.0), 3)
    assert back is not None
    assert (back.code, "60 s" in back.message) == (ErrorCode.LIMIT, True)
    manager.received(2, messages.Heartbeat(), 60.0)
    manager.tick(61.5)
    assert ended(come(manager, 4, now_s=61.5), 4) is None
    assert list(manager.sessions) == [2, 4]


def test_an_answer_counts_for_one_run_once() -> None:
    cancelled_runs = CancelledRuns()
    cancelled_runs.cancelled(5, 100)
    assert cancelled_runs.largest_bytes == 100
    assert is_answer(5, {}, cancelled_runs)
    assert not is_answer(5, {}, cancelled_runs)
    assert is_answer(6, {6: None}, cancelled_runs)
    for run in range(2 * limits.MAX_RUNS_IN_FLIGHT):  # it reads what it is told, and answers none
        cancelled_runs.cancelled(run, run)
    assert not is_answer(limits.MAX_RUNS_IN_FLIGHT - 1, {}, cancelled_runs)
    assert is_answer(limits.MAX_RUNS_IN_FLIGHT, {}, cancelled_runs)


def test_no_answer_comes_after_one_to_a_later_run() -> None:
    """Messages keep their order: it had read the cancel before it read the later run."""
    cancelled_runs = CancelledRuns()
    for run in (1, 2, 3):
        cancelled_runs.sent(run)
    cancelled_runs.cancelled(1, 100)
    cancelled_runs.sent(4)
    cancelled_runs.cancelled(2, 50)
    assert is_answer(3, {3: None, 4: None}, cancelled_runs)  # sent before either cancel
    assert cancelled_runs.largest_bytes == 100
    assert is_answer(4, {4: None}, cancelled_runs)  # sent after the first, before the second
    assert cancelled_runs.largest_bytes == 50
    assert not is_answer(1, {}, cancelled_runs)
    assert is_answer(2, {}, cancelled_runs)


def test_how_long_a_message_may_be_follows_what_is_awaited() -> None:
    manager = SessionManager(auth=FakeAuth())
    come(manager, 1)
    assert manager.awaited_bytes(1) == (0, 0)
    asked = sent(submit(manager, 64), 1)
    runs = [message for message in asked if isinstance(message, messages.Run)]
    work, most = manager.awaited_bytes(1)
    assert 0 < work == most <= 4 * 64 * 64
    manager.withdraw(1, 1.0)
    assert manager.awaited_bytes(1) == (0, work)  # it may be on its way
    for each in runs:
        manager.received(1, late(each.id), 1.0)
    assert manager.awaited_bytes(1) == (0, 0)
    come(manager, 2, hello=MEASURE)
    assert manager.awaited_bytes(2) == (0, 4)  # a round trip
    assert manager.awaited_bytes(99) == (0, 0)


def test_one_link_is_measured_at_a_time_with_one_code() -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    auth.measured_by, auth.at_once = "code 1", 2
    for session in (1, 2):
        assert ended(come(manager, session, hello=MEASURE), session) is None
    orders = come(manager, 3, hello=MEASURE)
    error = ended(orders, 1)
    assert error is not None
    assert error.code is ErrorCode.DUPLICATE
    assert list(manager.sessions) == [2, 3]
    auth.measured_by = "device 7"
    come(manager, 4, hello=MEASURE)
    assert list(manager.sessions) == [2, 3, 4]
    auth.measured_by = ""  # a fleet with one credential for all
    come(manager, 5, hello=MEASURE)
    come(manager, 6, hello=MEASURE)
    assert list(manager.sessions) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("first", [messages.Heartbeat(), replace(HELLO, ops=())])
def test_what_is_no_hello_is_a_failed_attempt(first: Message) -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    manager.opened(1, 0.0, "there")
    error = ended(manager.received(1, first, 0.0))
    assert error is not None
    assert error.code is ErrorCode.PROTOCOL
    assert auth.failures == ["there"]
    come(manager, 2)
    manager.received(2, messages.Cancel((1,)), 0.0)  # later it is none: it has come in
    assert auth.failures == ["there"]


def test_orders_go_to_who_is_there() -> None:
    manager = SessionManager(auth=FakeAuth())
    come(manager, 1)
    say(manager, messages.Heartbeat(), limits.MAX_UNASKED + 1, 1.0)
    assert not manager.exceeded(1, "again", 1.0)
    assert not [o for o in manager.tick(2.0) if isinstance(o, Send)]


def test_a_device_that_rests_is_not_measured_either() -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    come(manager, 1)
    say(manager, messages.Heartbeat(), limits.MAX_UNASKED + 1, 1.0)
    auth.measured_by, auth.measures = "device 7", 7
    back = ended(come(manager, 2, hello=MEASURE, now_s=1.0), 2)
    assert back is not None
    assert (back.code, back.retry_after_s) == (ErrorCode.LIMIT, limits.REST_S)
    assert ended(come(manager, 3, hello=MEASURE, now_s=1.0 + limits.REST_S), 3) is None


def test_a_flood_of_a_device_that_is_measured_makes_it_rest() -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    auth.measured_by, auth.measures = "device 7", 7
    come(manager, 1, hello=MEASURE)
    say(manager, messages.Heartbeat(), limits.MAX_UNASKED + 1, 1.0)
    back = ended(come(manager, 2, now_s=1.0), 2)
    assert back is not None
    assert back.retry_after_s == limits.REST_S
    auth.measured_by, auth.measures = "code 1", None  # others may come by the same code
    come(manager, 3, hello=MEASURE)
    manager.exceeded(3, "too much", 1.0)
    assert ended(come(manager, 4, hello=MEASURE, now_s=1.0), 4) is None


def test_a_device_that_leaves_soon_after_it_came_again_and_again_waits() -> None:
    auth = FakeAuth()
    manager = SessionManager(auth=auth)
    for session in range(1, limits.MAX_SHORT_STAYS + 1):
        assert ended(come(manager, session), session) is None
        manager.closed(session, "the connection was closed", 0.0)
    waits = ended(come(manager, 6), 6)
    assert waits is not None
    assert (waits.code, waits.retry_after_s) == (ErrorCode.LIMIT, limits.SHORT_STAY_REST_S)
    assert "left 5 times shortly after joining" in waits.message
    assert ended(come(manager, 7, hello=MEASURE), 7) is None  # no work is planned for that
    assert ended(come(manager, 8, now_s=limits.SHORT_STAY_REST_S), 8) is None
