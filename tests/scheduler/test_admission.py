"""Devices with an identity: let in, known again, credited, quarantined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.gemm import Gemm
from cleave.planner.plan import ElementBytes
from cleave.planner.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.messages import ErrorCode, Hello, Message, Op, Role
from cleave.scheduler.admission import (
    MAX_NAME,
    Admission,
    Clearance,
    Contribution,
    OneKey,
    Refusal,
    Verdict,
)
from cleave.scheduler.check_policy import Verification
from cleave.scheduler.conduct import Conduct
from cleave.scheduler.device_history import CREDIT_S, GRACE_S, MAX_CREDIT
from cleave.scheduler.gemm_job import GemmWork, MatrixRef
from cleave.scheduler.instructions import Check, Close, Instruction, Joined, Note, Send
from cleave.scheduler.reputation import QUARANTINE, Wrong
from cleave.scheduler.session import DeviceState
from cleave.scheduler.session_manager import Coordinator
from cleave.verify import Fault, Judgement

HELLO = Hello(
    Role.DEVICE,
    name="what it says",
    ops=(Op.MATMUL.value,),
    dtypes=tuple(d.value for d in DType),
    memory_bytes=2**30,
    flops_per_s=1e9,
    downlink_bytes_per_s=1e6,
    uplink_bytes_per_s=2e6,
)
UNMEASURED = replace(HELLO, downlink_bytes_per_s=0.0, uplink_bytes_per_s=0.0)


class Door:
    """Lets everybody in under the identity in `credential`, and writes down what it is told."""

    server = "S"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[tuple[int, str, bool]] = []
        self.done: dict[int, Contribution] = {}
        self.faults: dict[int, list[str]] = {}
        self.quarantine: dict[int, str] = {}
        self.points: dict[int, float] = {}
        self.conduct: dict[int, Conduct] = {}
        self.faults_before = 0
        self.failures: list[str] = []
        self.measured_by = ""
        self.measures: int | None = None
        self.at_once = 1

    def admit(self, hello: Hello, address: str) -> Verdict:
        self.asked.append(address)
        if hello.measure:
            return Admission(
                measured_by=self.measured_by, at_once=self.at_once, measures=self.measures
            )
        if not hello.credential.isdigit():
            return Refusal(ErrorCode.CREDENTIAL, "not a number")
        identity = int(hello.credential)
        before = self.faults_before
        return Admission(
            identity,
            f"device {identity}",
            "new",
            before,
            float(before),
            self.conduct.get(identity, Conduct()),
        )

    def admit_operator(self, credential: str, address: str) -> Clearance | Refusal:
        raise AssertionError("no operator came")

    def failed(self, address: str) -> None:
        self.failures.append(address)

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        self.left.append((identity, reason, lost))

    def contributed(self, identity: int, done: Contribution) -> None:
        self.done[identity] = self.done.get(identity, Contribution()) + done

    def conducted(self, identity: int, conduct: Conduct) -> None:
        self.conduct[identity] = conduct

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        self.faults.setdefault(identity, []).append(fault)
        self.points[identity] = self.points.get(identity, 0.0) + penalty

    def quarantined(self, identity: int, reason: str) -> None:
        self.quarantine[identity] = reason


def come(
    coordinator: Coordinator,
    session: int,
    credential: str = "7",
    hello: Hello = HELLO,
    now_s: float = 0.0,
    address: str = "here",
) -> list[Instruction]:
    coordinator.opened(session, now_s, address)
    return coordinator.received(session, replace(hello, credential=credential), now_s)


def sent(orders: list[Instruction], session: int) -> list[Message]:
    return [o.message for o in orders if isinstance(o, Send) and o.session == session]


def submit(coordinator: Coordinator, side: int = 4) -> list[Instruction]:
    ones = Buffer(np.ones((side, side), np.float32), DType.FP32)
    refs = MatrixRef(10, False), MatrixRef(11, False)
    gemm = GemmWork(
        1, Gemm(side, side, side), *refs, ElementBytes(4, 4), "fp32", "fp32", TilePlanner()
    )
    return coordinator.submit(gemm, ones, ones, 1.0)


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def coordinator(door: Door) -> Coordinator:
    return Coordinator(door=door)


def test_a_device_is_told_its_credential_and_has_its_known_name(coordinator: Coordinator) -> None:
    orders = come(coordinator, 1)
    assert orders == [Send(1, messages.Welcome(1, server="S", credential="new")), Joined(1)]
    assert (coordinator.sessions[1].name, coordinator.sessions[1].identity) == ("device 7", 7)


def test_who_is_refused_is_told_why(coordinator: Coordinator, door: Door) -> None:
    orders = come(coordinator, 1, "x")
    assert orders == [Send(1, messages.Error(ErrorCode.CREDENTIAL, "not a number")), Close(1)]
    assert not coordinator.sessions
    assert not door.left


@pytest.mark.parametrize("change", [{"ops": ()}, {"memory_bytes": 1}, {"version": 99}])
def test_who_does_not_fit_uses_no_code_up(
    coordinator: Coordinator, door: Door, change: dict[str, object]
) -> None:
    come(coordinator, 1, hello=replace(HELLO, **change))  # type: ignore[arg-type]
    assert not coordinator.sessions
    assert not door.asked


# --- the same device twice ---


def test_the_newer_of_two_sessions_counts(coordinator: Coordinator, door: Door) -> None:
    come(coordinator, 1)
    come(coordinator, 2, "8")
    submit(coordinator)
    orders = come(coordinator, 3, now_s=2.0)
    (error,) = sent(orders, 1)
    assert isinstance(error, messages.Error)
    assert error.code is ErrorCode.DUPLICATE
    assert "--name" in error.message
    assert Close(1) in orders
    assert any(isinstance(o, Note) and "device 7 joined again" in o.text for o in orders)
    assert list(coordinator.sessions) == [2, 3]
    assert coordinator.ready_devices == 2
    assert door.left == [(7, error.message, False)]


def test_devices_without_an_identity_are_never_the_same() -> None:
    coordinator = Coordinator(door=OneKey("key"))
    come(coordinator, 1, "key")
    come(coordinator, 2, "key")
    assert coordinator.ready_devices == 2


# --- gone, and back ---


def measured(coordinator: Coordinator, session: int, now_s: float) -> None:
    """Let the probe end, by hand: what it finds is tested elsewhere."""
    record = coordinator.sessions[session]
    assert record.rates is not None
    record.rates = replace(
        record.rates, downlink_bytes_per_s=5e6, uplink_bytes_per_s=3e6, latency_s=0.01
    )
    record.probe = None
    coordinator._ready(record, now_s)


@pytest.mark.parametrize(
    ("address", "after_s", "known"),
    [("here", GRACE_S, True), ("here", GRACE_S + 1, False), ("elsewhere", 1.0, False)],
)
def test_a_device_that_is_soon_back_is_not_measured_again(
    coordinator: Coordinator, address: str, after_s: float, known: bool
) -> None:
    come(coordinator, 1, hello=UNMEASURED)
    assert coordinator.sessions[1].state is DeviceState.PROBING
    measured(coordinator, 1, 1.0)
    coordinator.closed(1, "the connection broke", 10.0)
    orders = come(coordinator, 2, hello=UNMEASURED, now_s=10.0 + after_s, address=address)
    assert (Joined(2) in orders) == known
    rates = coordinator.sessions[2].rates
    assert rates is not None
    if known:
        link = (rates.downlink_bytes_per_s, rates.uplink_bytes_per_s, rates.latency_s)
        assert link == (5e6, 3e6, 0.01)
        assert rates.device == 2


def shown_slow(coordinator: Coordinator, session: int, claim: float) -> None:
    """A device that claims more than its probe found: 1 GFLOP/s."""
    come(coordinator, session, hello=replace(UNMEASURED, flops_per_s=claim))
    rates = coordinator.sessions[session].rates
    assert rates is not None
    coordinator.sessions[session].rates = replace(rates, flops_per_s=1e9)
    measured(coordinator, session, 1.0)


@pytest.mark.parametrize(
    ("claim", "claims_now", "known"),
    [
        (50e9, 50e9, 1e9),  # what it showed, as its link
        (50e9, 48e9, 1e9),  # it measured itself anew
        (50e9, 0.5e9, 0.5e9),  # it claims less than it showed
        (50e9, 5e12, None),  # with another processor: that has to be seen
        (0.0, 0.0, 1e9),  # it does not know, and 5e10 was assumed
    ],
)
def test_a_speed_that_was_found_is_known_after_a_quick_return(
    coordinator: Coordinator, claim: float, claims_now: float, known: float | None
) -> None:
    shown_slow(coordinator, 1, claim)
    for session in (2, 3):  # and after a second one
        coordinator.closed(session - 1, "the connection broke", 10.0 * session)
        again = replace(UNMEASURED, flops_per_s=claims_now)
        come(coordinator, session, hello=again, now_s=10.0 * session + 1)
        rates = coordinator.sessions[session].rates
        assert rates is not None
        if known is None:
            assert coordinator.sessions[session].state is DeviceState.PROBING
            return
        assert coordinator.sessions[session].state is DeviceState.READY
        assert rates.flops_per_s == known
        assert rates.downlink_bytes_per_s == 5e6


def test_a_claim_that_nothing_spoke_against_is_believed_anew(coordinator: Coordinator) -> None:
    come(coordinator, 1, hello=UNMEASURED)
    measured(coordinator, 1, 1.0)
    coordinator.closed(1, "the connection broke", 10.0)
    come(coordinator, 2, hello=replace(UNMEASURED, flops_per_s=5e12), now_s=11.0)
    rates = coordinator.sessions[2].rates
    assert rates is not None
    assert rates.flops_per_s == 5e12


def test_a_device_lost_while_it_was_measured_is_measured_again(coordinator: Coordinator) -> None:
    come(coordinator, 1, hello=UNMEASURED)
    coordinator.closed(1, "the connection broke", 1.0)
    come(coordinator, 2, hello=UNMEASURED, now_s=2.0)
    assert coordinator.sessions[2].state is DeviceState.PROBING


def test_what_is_known_of_those_who_left_is_forgotten(coordinator: Coordinator) -> None:
    for number in range(5):
        come(coordinator, number, str(number))
        coordinator.closed(number, "gone", 1.0)
    coordinator.tick(1.0 + GRACE_S + CREDIT_S)
    assert not coordinator.regulars._departed


ENDS = {
    "lost": (None, True),
    "bye": (messages.Bye("home"), False),
    "drain": (messages.Drain(), False),
    "error": (messages.Error(ErrorCode.PROTOCOL, "what?"), True),
    "rule broken": (messages.Welcome(1), True),
}


@pytest.mark.parametrize(("message", "lost"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("hello", [HELLO, UNMEASURED], ids=["ready", "probing"])
def test_every_end_is_told_once(
    coordinator: Coordinator, door: Door, message: Message | None, lost: bool, hello: Hello
) -> None:
    come(coordinator, 1, hello=hello)
    if message is not None:
        coordinator.received(1, message, 1.0)
    coordinator.closed(1, "the connection broke", 1.0)
    assert [(identity, was_lost) for identity, _, was_lost in door.left] == [(7, lost)]


def test_silence_is_a_loss(coordinator: Coordinator, door: Door) -> None:
    come(coordinator, 1)
    coordinator.tick(limits.SILENCE_S + 1)
    assert [lost for _, _, lost in door.left] == [True]


def test_an_operator_can_end_the_sessions_of_a_device(coordinator: Coordinator) -> None:
    come(coordinator, 1)
    come(coordinator, 2, "8")
    orders = coordinator.refuse_identity(7, ErrorCode.CREDENTIAL, "revoked", 1.0)
    assert sent(orders, 1) == [messages.Error(ErrorCode.CREDENTIAL, "revoked")]
    assert list(coordinator.sessions) == [2]
    assert coordinator.refuse_identity(9, ErrorCode.CREDENTIAL, "nobody", 1.0) == []


# --- contribution ---


def one_result(coordinator: Coordinator, session: int) -> Check:
    """A GEMM of one block, answered by a device that passed the probe."""
    coordinator.verification, coordinator.verify = Verification.of(True), True
    orders = submit(coordinator)
    (run,) = [m for m in sent(orders, session) if isinstance(m, messages.Run)]
    payload = bytes(4 * 4 * 4)
    result = messages.Result(run.id, 4, 4, "fp32", 0.5, payload)
    (check,) = coordinator.received(session, result, 2.0)
    assert isinstance(check, Check)
    return check


def test_what_a_device_did_is_told_now_and_then_and_in_the_end(
    coordinator: Coordinator, door: Door
) -> None:
    come(coordinator, 1)
    come(coordinator, 2, "8", hello=replace(HELLO, measure=True))
    one_result(coordinator, 1)
    record = coordinator.sessions[1]
    record.downlink_bytes, record.uplink_bytes = 100, 200
    coordinator.received(1, messages.Telemetry({"energy_j": 3.0, "power_w": 9.0}), 2.0)
    assert not door.done
    coordinator.received(1, messages.Heartbeat(), CREDIT_S)
    coordinator.tick(CREDIT_S)
    expected = Contribution(1, 2.0 * 4**3, 100, 200, 0.5, 3.0)
    assert door.done == {7: expected}
    record.uplink_bytes += 50
    coordinator.received(1, messages.Telemetry({"energy_j": 4.0}), CREDIT_S + 1)
    coordinator.closed(1, "gone", CREDIT_S + 1)
    assert door.done == {7: expected + Contribution(uplink_bytes=50, energy_j=1.0)}


def test_what_a_device_states_of_itself_is_bounded(coordinator: Coordinator, door: Door) -> None:
    come(coordinator, 1)
    coordinator.received(1, messages.Telemetry({"energy_j": -1e300}), 0.0)
    coordinator.credit(0.0)
    assert not door.done
    coordinator.received(1, messages.Telemetry({"energy_j": 1e300}), 0.0)
    coordinator.sessions[1].compute_s = 1e300
    coordinator.credit(0.0)
    assert door.done[7].compute_s == MAX_CREDIT
    assert door.done[7].energy_j == 0  # no device draws so much


def test_energy_that_a_device_cannot_have_drawn_is_no_contribution(
    coordinator: Coordinator, door: Door
) -> None:
    come(coordinator, 1, hello=replace(HELLO, profile="snapdragon-888"))
    coordinator.received(1, messages.Telemetry({"energy_j": 300.0}), 60.0)
    coordinator.credit(60.0)
    assert door.done[7].energy_j == 300.0
    for absurd in (1e4, 1e300, float("nan"), float("inf")):  # a phone draws 25 W at most
        coordinator.received(1, messages.Telemetry({"energy_j": absurd}), 120.0)
        coordinator.credit(120.0)
        assert door.done[7].energy_j == 300.0
    coordinator.received(1, messages.Telemetry({"energy_j": 600.0}), 120.0)
    coordinator.credit(120.0)
    assert door.done[7].energy_j == 600.0


@pytest.mark.parametrize("name", ["", "a\x1b[31mb\nc", "x" * 4096, "\u202e", "ключ 📱"])
def test_names_can_be_shown(name: str) -> None:
    coordinator = Coordinator()
    come(coordinator, 1, "", hello=replace(HELLO, name=name))
    shown = coordinator.sessions[1].name
    assert len(shown) <= MAX_NAME
    assert shown.isprintable()


# --- quarantine ---


def test_quarantine_is_of_the_identity(coordinator: Coordinator, door: Door) -> None:
    door.faults_before = int(QUARANTINE) - 1  # in sessions before
    come(coordinator, 1)
    check = one_result(coordinator, 1)
    orders = coordinator.checked(check, Judgement(Fault("row 3 is wrong")), 3.0)
    (error,) = [m for m in sent(orders, 1) if isinstance(m, messages.Error)]
    assert error.code is ErrorCode.QUARANTINED
    assert door.faults == {7: ["row 3 is wrong"]}
    assert door.quarantine == {7: error.message}
    assert door.left == [(7, error.message, False)]


def test_a_result_of_another_form_is_remembered_and_the_second_quarantines(
    coordinator: Coordinator, door: Door
) -> None:
    come(coordinator, 1)
    check = one_result(coordinator, 1)
    coordinator.checked(check, Judgement(), 2.0)
    orders = submit(coordinator)
    for _ in range(2):
        assert 1 in coordinator.sessions
        (run,) = [m for m in sent(orders, 1) if isinstance(m, messages.Run)]
        wrong = messages.Result(run.id, 1, 16, "fp32", 0.0, bytes(64))
        orders = coordinator.received(1, wrong, 3.0)
    (error,) = [m for m in sent(orders, 1) if isinstance(m, messages.Error)]
    assert error.code is ErrorCode.QUARANTINED
    assert door.points == {7: 2 * Wrong.FORM.value}
    assert len(door.faults[7]) == 2
    assert 7 in door.quarantine


# --- one key ---


def test_one_key_opens_as_credential_or_as_code() -> None:
    door = OneKey("key", "token")
    assert door.admit(replace(HELLO, credential="key"), "") == Admission()
    assert door.admit(replace(HELLO, credential="of another server", join_code="key"), "") == (
        Admission()
    )
    assert isinstance(door.admit(replace(HELLO, credential="k", join_code="y"), ""), Refusal)
    assert isinstance(door.admit(replace(HELLO, credential=""), ""), Refusal)
    assert OneKey("").admit(HELLO, "") == Admission()
    assert door.admit_operator("token", "") is Clearance.OPERATOR
    assert isinstance(door.admit_operator("key", ""), Refusal)
