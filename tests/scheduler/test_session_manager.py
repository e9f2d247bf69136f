"""The PS's core: handshake, liveness, probing, and what devices may say when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cleave import arrays
from cleave.arrays import DType
from cleave.protocol import limits, messages
from cleave.protocol.messages import ByeCode, ErrorCode, Feature, Hello, Message, Role
from cleave.scheduler.instructions import Check, Close, ForRuntime, Joined, Place, Send
from cleave.scheduler.sessions.joining import FULL_RETRY_S
from cleave.scheduler.sessions.reputation import QUARANTINE
from cleave.scheduler.sessions.result_judging import Verification
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.verify import Fault, Judgement
from tests.scheduler import test_admission
from tests.scheduler.test_admission import submit
from tests.scheduler.test_probe import Joining, right

HELLO = replace(test_admission.HELLO, name="laptop")


def _sent(orders: list[ForRuntime], session: int = 1) -> list[Message]:
    return [o.message for o in orders if isinstance(o, Send) and o.session == session]


def _ready(manager: SessionManager, session: int = 1, hello: Hello = HELLO) -> list[ForRuntime]:
    manager.opened(session, 0.0)
    return manager.received(session, hello, 0.0)


def _refusal(orders: list[ForRuntime]) -> messages.Error:
    """The error that a refused peer gets, before its session is closed."""
    send, close = orders[:2]
    assert isinstance(send, Send)
    assert isinstance(send.message, messages.Error)
    assert close == Close(send.session)
    return send.message


# --- handshake ---


REFUSED: dict[str, tuple[Message, ErrorCode, str]] = {
    "version": (replace(HELLO, version=99), ErrorCode.VERSION, "99"),
    "credential": (replace(HELLO, credential="guess"), ErrorCode.CREDENTIAL, "credential"),
    "no credential": (replace(HELLO, credential=""), ErrorCode.CREDENTIAL, "credential"),
    "strange credential": (replace(HELLO, credential="ключ"), ErrorCode.CREDENTIAL, "credential"),
    "op": (replace(HELLO, ops=("conv",), credential="key"), ErrorCode.PROTOCOL, "matmul"),
    "dtype": (replace(HELLO, dtypes=("bf16",), credential="key"), ErrorCode.PROTOCOL, "fp32"),
    "memory": (replace(HELLO, memory_bytes=1000, credential="key"), ErrorCode.LIMIT, "memory"),
    "no hello": (messages.Heartbeat(), ErrorCode.PROTOCOL, "hello"),
    "a result first": (
        messages.Result(1, 1, 1, "fp32", 0.0, bytes(4)),
        ErrorCode.PROTOCOL,
        "hello",
    ),
}


@pytest.mark.parametrize(("message", "code", "text"), REFUSED.values(), ids=REFUSED)
def test_who_does_not_fit_is_told_why(message: Message, code: ErrorCode, text: str) -> None:
    manager = SessionManager(credential="key")
    manager.opened(1, 0.0)
    error = _refusal(manager.received(1, message, 0.0))
    assert error.code is code
    assert text in error.message
    assert not manager.sessions
    assert manager.ready_devices == 0


def test_another_version_is_told_which_are_spoken_whatever_else_is_wrong() -> None:
    """Role and version are judged before all other fields: those may mean something else."""
    hello = Hello(Role.DEVICE, 2, versions=(3, 2))  # as it is read; no ops, no memory
    error = _refusal(_ready(SessionManager("secret"), hello=hello))
    assert (error.code, error.versions) == (ErrorCode.VERSION, (limits.VERSION,))
    assert "1 and the device speaks 2, 3;" in error.message


def test_a_hello_in_another_version_than_both_speak_is_told_to_come_in_that() -> None:
    hello = Hello(Role.DEVICE, 2, versions=(2, 1))
    error = _refusal(_ready(SessionManager(), hello=hello))
    assert (error.code, error.versions) == (ErrorCode.VERSION, (limits.VERSION,))
    assert "this device sent hello in protocol version 2" in error.message
    assert "; send it in version" in error.message


def test_of_features_those_count_that_both_have() -> None:
    manager = SessionManager()
    orders = _ready(manager, hello=replace(HELLO, features=("tea", "measure")))
    (welcome,) = _sent(orders)
    assert isinstance(welcome, messages.Welcome)
    assert welcome.features == ("measure",)
    assert manager.sessions[1].features == {messages.Feature.MEASURE}
    (plain,) = _sent(_ready(manager, 2), 2)
    assert isinstance(plain, messages.Welcome)
    assert plain.features == ()


def test_who_finds_no_room_is_told_when_to_come_again() -> None:
    manager = SessionManager(max_devices=1)
    _ready(manager)
    error = _refusal(_ready(manager, 2))
    assert (error.code, error.retry_after_s) == (ErrorCode.LIMIT, FULL_RETRY_S)


RATES = (
    *("flops_per_s", "graph_flops_per_s", "graph_bf16_flops_per_s"),
    *("downlink_bytes_per_s", "uplink_bytes_per_s"),
)
EXTREME: dict[str, dict[str, Any]] = {
    "huge": dict.fromkeys(RATES, 1e308),
    "tiny": dict.fromkeys(RATES, 1e-308),
    "far": {"latency_s": 1e308},
    "memory": {"memory_bytes": 2**62},
    "least memory": {"memory_bytes": limits.MIN_DEVICE_MEMORY_BYTES},
    "mixed": {"flops_per_s": 1e-308, "downlink_bytes_per_s": 1e308, "latency_s": 5e-324},
}


@pytest.mark.parametrize("values", EXTREME.values(), ids=EXTREME)
def test_whatever_a_device_states_work_can_be_planned(values: dict[str, Any]) -> None:
    manager = SessionManager()
    orders = _ready(manager, 1, replace(HELLO, **values))
    _ready(manager, 2)
    assert Joined(1) in orders
    assert any(isinstance(m, messages.Run) for o in [submit(manager, 64)] for m in _all(o))


def _all(orders: list[ForRuntime]) -> list[Message]:
    return [o.message for o in orders if isinstance(o, Send)]


# --- liveness ---


def test_silence_ends_a_session_and_its_work_goes_on_elsewhere() -> None:
    manager = SessionManager()
    _ready(manager, 1)
    submit(manager)
    helping = _ready(manager, 2)
    manager.received(2, messages.Heartbeat(), limits.SILENCE_S)
    orders = manager.tick(limits.SILENCE_S + 0.5)
    assert _refusal(orders).code is ErrorCode.LIMIT
    assert any(isinstance(m, messages.Run) for m in _sent([*helping, *orders], 2))
    assert list(manager.sessions) == [2]
    assert manager.epoch >= 3


@pytest.mark.parametrize(
    "message", [messages.Heartbeat(), messages.Telemetry({"battery": 0.5})], ids=lambda m: m.TYPE
)
def test_any_message_is_a_sign_of_life(message: Message) -> None:
    manager = SessionManager()
    _ready(manager)
    manager.received(1, message, 10.0)
    assert manager.tick(10.0 + limits.SILENCE_S - 0.5) == []


def test_who_says_no_hello_is_disconnected() -> None:
    manager = SessionManager()
    manager.opened(1, 5.0)
    assert manager.tick(5.0 + limits.HANDSHAKE_S - 0.1) == []
    assert _refusal(manager.tick(5.1 + limits.HANDSHAKE_S)).code is ErrorCode.LIMIT
    assert not manager.sessions


def test_telemetry_is_kept_and_bounded() -> None:
    manager = SessionManager()
    _ready(manager)
    manager.received(1, messages.Telemetry({"power_w": 3.0}), 1.0)
    manager.received(1, messages.Telemetry({"power_w": 4.0, "battery": 0.5}), 1.0)
    assert manager.sessions[1].telemetry == {"power_w": 4.0, "battery": 0.5}
    many = messages.Telemetry({f"x{i}": 1.0 for i in range(1000)})
    assert _refusal(manager.received(1, many, 1.0)).code is ErrorCode.PROTOCOL


# --- draining ---


def test_states_are_named() -> None:
    manager = SessionManager()
    manager.opened(1, 0.0)
    session = manager.sessions[1]
    seen = [manager.state(session)]
    manager.received(1, HELLO, 0.0)
    seen.append(manager.state(session))
    submit(manager)
    seen.append(manager.state(session))
    manager.received(1, messages.Drain(), 1.0)
    manager.received(1, messages.Drain(), 1.0)
    seen.append(manager.state(session))
    manager.closed(1, "gone", 1.0)
    seen.append(manager.state(session))
    assert [s.value for s in seen] == ["joining", "ready", "busy", "draining", "lost"]


# --- results ---


def _checking(manager: SessionManager) -> None:
    manager.verification, manager.verify = Verification.of(True), True


def _work_on_one(*, verify: bool = False) -> tuple[SessionManager, messages.Run]:
    manager = SessionManager()
    _ready(manager)
    if verify:  # from now on: the device passed the probe
        _checking(manager)
    (run,) = [m for m in _sent(submit(manager)) if isinstance(m, messages.Run)]
    return manager, run


def _result(run: messages.Run, **changes: Any) -> messages.Result:
    return replace(messages.Result(run.id, 4, 4, "fp32", 0.25, bytes(64)), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 3},
        {"columns": 16, "rows": 1},
        {"dtype": "bf16"},
        {"payload": bytes(63)},
        {"payload": b""},
        {"payload": memoryview(bytes(65))},
    ],
    ids=["rows", "shape", "dtype", "short", "empty", "long"],
)
def test_a_result_of_another_form_is_a_failed_run(changes: dict[str, Any]) -> None:
    manager, run = _work_on_one()
    orders = manager.received(1, _result(run, **changes), 2.0)
    assert not any(isinstance(o, Place) for o in orders)
    (again,) = [m for m in _sent(orders) if isinstance(m, messages.Run)]
    assert again.id != run.id
    assert again.inputs == run.inputs
    assert manager.sessions[1].counters.blocks == 0
    place, _ = manager.received(1, _result(again), 3.0)
    assert isinstance(place, Place)


def test_answers_nobody_waits_for_are_counted_as_late() -> None:
    manager, run = _work_on_one()
    assert manager.received(1, _result(run, id=12345), 2.0) == []
    assert manager.received(1, messages.TaskError(54321, "?"), 2.0) == []
    manager.received(1, _result(run), 2.0)
    assert manager.received(1, _result(run), 2.0) == []
    assert manager.received(1, messages.TaskError(run.id, "?"), 2.0) == []
    assert manager.scheduler.counters.late == 4
    assert manager.scheduler.counters.results == 1


@pytest.mark.parametrize("changes", [{}, {"rows": 1}, {"payload": bytes(3)}], ids=str)
def test_a_second_answer_does_not_pass_for_the_one_that_is_being_checked(
    changes: dict[str, Any],
) -> None:
    manager, run = _work_on_one(verify=True)
    (check,) = manager.received(1, _result(run), 2.0)
    assert isinstance(check, Check)
    assert manager.received(1, _result(run, **changes), 2.0) == []
    assert manager.received(1, messages.TaskError(run.id, "?"), 2.0) == []
    place, _ = manager.checked(check, Judgement(), 3.0)
    assert isinstance(place, Place)
    assert place.payload is check.payload


def test_rows_in_doubt_are_used_as_the_server_mended_them_and_nobody_is_blamed() -> None:
    manager, run = _work_on_one(verify=True)
    (check,) = manager.received(1, _result(run), 2.0)
    assert isinstance(check, Check)
    mended = arrays.empty(1, 1, DType.FP32)
    place, _ = manager.checked(check, Judgement(mended=mended, recomputed=1), 3.0)
    assert isinstance(place, Place)
    assert place.payload is mended
    assert not manager.sessions[1].reputation.wrong


def test_who_misrounds_too_many_elements_is_quarantined_and_its_result_not_used() -> None:
    manager, run = _work_on_one(verify=True)
    (check,) = manager.received(1, _result(run), 2.0)
    assert isinstance(check, Check)
    orders = manager.checked(check, Judgement(spots=16, misrounded=13), 3.0)
    error = next(x.message for x in reversed(orders) if isinstance(x, Send))
    assert isinstance(error, messages.Error)
    assert error.code is ErrorCode.QUARANTINED
    assert "13 of 16 elements were not the right rounding" in error.message
    assert not any(isinstance(order, Place) for order in orders)


def test_a_device_that_lies_while_it_drains_gets_nothing_after_its_end() -> None:
    """Its last answer lets it go; that it would be quarantined, too, comes too late."""
    manager, run = _work_on_one(verify=True)
    manager.sessions[1].reputation.penalty = QUARANTINE - 1
    manager.received(1, messages.Drain(), 1.0)
    (check,) = manager.received(1, _result(run), 2.0)
    assert isinstance(check, Check)
    orders = manager.checked(check, Judgement(Fault("it is off")), 3.0)
    assert orders == [Send(1, messages.Bye("drained", ByeCode.DRAINED)), Close(1)]


def test_a_device_computes_no_longer_than_it_is_there() -> None:
    manager, run = _work_on_one()
    manager.received(1, _result(run, compute_s=1e308), 2.0)
    assert manager.sessions[1].counters.compute_s == 2.0


# --- probing ---

UNKNOWN = replace(HELLO, downlink_bytes_per_s=0.0, uplink_bytes_per_s=0.0)


def _behind(link: tuple[float, float, float], memory_bytes: int, hello: Hello = UNKNOWN) -> Joining:
    """An honest device behind a link of given rates, which computes in no time."""
    hello = replace(hello, memory_bytes=memory_bytes)
    return Joining(right, hello, float("inf"), link=link, verify=False)


any_memory = pytest.mark.parametrize("memory_bytes", [limits.MIN_DEVICE_MEMORY_BYTES, 2**30])
any_link = pytest.mark.parametrize(
    ("down", "up", "latency_s"),
    [
        (100e6, 7e6, 0.0),
        (100e6, 7e6, 0.02),
        (2e6, 0.5e6, 0.05),
        (1e6, 10e6, 0.01),
        (2e9, 1e9, 1e-5),
    ],
)


@any_memory
@any_link
def test_a_link_that_is_not_stated_is_measured(
    down: float, up: float, latency_s: float, memory_bytes: int
) -> None:
    link = _behind((down, up, latency_s), memory_bytes)
    assert link.manager.sessions[1].state is DeviceState.PROBING
    assert link.manager.ready_devices == 0
    link.run()
    assert link.manager.ready_devices == 1
    rates = link.manager.sessions[1].rates
    assert rates is not None
    assert rates.downlink_bytes_per_s == pytest.approx(down, rel=0.1)
    assert rates.uplink_bytes_per_s == pytest.approx(up, rel=0.1)
    assert rates.latency_s <= 2 * latency_s + 1e-3
    assert link.core.occupied_bytes == 0  # nothing of it is left behind
    assert submit(link.manager, 64)


def test_work_waits_for_the_probe() -> None:
    link = _behind((10e6, 5e6, 0.0), 2**30)
    assert submit(link.manager) == []
    assert not link.manager.scheduler.idle
    link.run()
    assert link.manager.scheduler.idle
    assert link.manager.scheduler.counters.results == 1


@any_memory
@any_link
def test_a_device_that_wants_to_be_measured_is_told_and_gets_no_work(
    down: float, up: float, latency_s: float, memory_bytes: int
) -> None:
    hello = replace(UNKNOWN, measure=True, uplink_bytes_per_s=5e6)
    link = _behind((down, up, latency_s), memory_bytes, hello)
    assert submit(link.manager) == []
    link.run()
    measured, bye = link.last
    assert isinstance(measured, messages.Measured)
    assert measured.downlink_bytes_per_s == pytest.approx(down, rel=0.1)
    assert measured.uplink_bytes_per_s == pytest.approx(up, rel=0.1)
    assert measured.latency_s == pytest.approx(latency_s, rel=0.15, abs=2e-4 + 300 / down)
    assert isinstance(bye, messages.Bye)
    assert not link.manager.sessions
    assert link.manager.epoch == 0


def test_a_device_whose_answer_was_lost_is_asked_again() -> None:
    manager = SessionManager()
    _ready(manager, 1)
    submit(manager)
    orders = _ready(manager, 2)
    first, now_s = manager.sessions[1], 1.0
    while manager.state(first) is not DeviceState.OVERDUE:
        assert now_s < 60
        now_s += 0.5
        for device in (1, 2):  # they say that they are there, and do not answer
            orders += manager.received(device, messages.Heartbeat(), now_s)
        orders += manager.tick(now_s)
    (run,) = [m for m in _sent(orders, 2) if isinstance(m, messages.Run)]
    answer = messages.Result(run.id, 4, 4, "fp32", 0.0, bytes(64))
    orders = manager.received(2, answer, now_s)
    assert any(isinstance(m, messages.Cancel) for m in _sent(orders, 1))
    assert manager.state(first) is DeviceState.OVERDUE  # it may be frozen
    assert set(manager.scheduler.device_memory.holders(10)) == {2}  # it is not planned with
    manager.received(1, messages.Heartbeat(), now_s)
    assert manager.state(first) is DeviceState.READY
    assert set(manager.scheduler.device_memory.holders(10)) == {1, 2}


def test_only_devices_that_said_hello_in_time_are_sent_to_another_server() -> None:
    manager = SessionManager()
    moves = replace(HELLO, features=(Feature.MOVES.value,))
    for session in (1, 2):
        manager.opened(session, 0.0)  # both connected before the other server was told of devices
    manager.received(1, moves, 1.0)
    manager.received(2, moves, 3.0)
    sent = manager.move(2, "ws://there", 4.0, admitted_before_s=2.0)
    assert [order.session for order in sent if isinstance(order, Close)] == [1]
    assert list(manager.sessions) == [2]
