"""Devices with an identity: let in, known again, credited, quarantined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cleave.arrays import Buffer, DType
from cleave.gemm import Gemm
from cleave.planner.plan import ElementBytes
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits, messages
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import ErrorCode, Hello, Message, Op, Role
from cleave.scheduler.events import DeviceReady
from cleave.scheduler.instructions import Check, Close, ForRuntime, Joined, Note, Send
from cleave.scheduler.sessions.admission import (
    AccessLevel,
    Admission,
    AdmissionResult,
    Behavior,
    Measurement,
    Refusal,
    SharedSecretAuth,
)
from cleave.scheduler.sessions.device_history import CREDIT_S, GRACE_S, MAX_CREDIT
from cleave.scheduler.sessions.reputation import QUARANTINE, Wrong
from cleave.scheduler.sessions.result_judging import Verification
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
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


class FakeAuth:
    """Lets everybody in under the identity in `credential`, and writes down what it is told."""

    server = "S"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[tuple[int, str, bool]] = []
        self.done: dict[int, DeviceCounters] = {}
        self.faults: dict[int, list[str]] = {}
        self.quarantine: dict[int, str] = {}
        self.points: dict[int, float] = {}
        self.behavior: dict[int, Behavior] = {}
        self.measured: dict[int, Measurement] = {}
        self.faults_before = 0
        self.failures: list[str] = []
        self.measured_by = ""
        self.measures: int | None = None
        self.at_once = 1

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
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
            self.behavior.get(identity, Behavior()),
        )

    def admit_operator(self, credential: str, address: str) -> AccessLevel | Refusal:
        raise AssertionError("no operator came")

    def failed(self, address: str) -> bool:
        self.failures.append(address)
        return True

    def departed(self, identity: int, reason: str, *, lost: bool) -> None:
        self.left.append((identity, reason, lost))

    def contributed(self, identity: int, done: DeviceCounters) -> None:
        self.done[identity] = self.done.get(identity, DeviceCounters()) + done

    def record_behavior(self, identity: int, behavior: Behavior) -> None:
        self.behavior[identity] = behavior

    def record_measurement(self, identity: int, measured: Measurement) -> None:
        self.measured[identity] = measured

    def faulted(self, identity: int, fault: str, penalty: float) -> None:
        self.faults.setdefault(identity, []).append(fault)
        self.points[identity] = self.points.get(identity, 0.0) + penalty

    def quarantined(self, identity: int, reason: str) -> None:
        self.quarantine[identity] = reason


def come(
    manager: SessionManager,
    session: int,
    credential: str = "7",
    hello: Hello = HELLO,
    now_s: float = 0.0,
    address: str = "here",
) -> list[ForRuntime]:
    manager.opened(session, now_s, address)
    return manager.received(session, replace(hello, credential=credential), now_s)


def sent(orders: list[ForRuntime], session: int) -> list[Message]:
    return [o.message for o in orders if isinstance(o, Send) and o.session == session]


def submit(
    manager: SessionManager, gemm: int | Gemm = 4, job: int = 1, now_s: float = 1.0
) -> list[ForRuntime]:
    """Submit a product of ones: a GEMM, or one whose sides are all equal."""
    gemm = Gemm(gemm, gemm, gemm) if isinstance(gemm, int) else gemm
    a, b = (
        Buffer(np.ones(sides, np.float32), DType.FP32)
        for sides in ((gemm.m, gemm.k), (gemm.k, gemm.n))
    )
    refs = MatrixRef(10 * job, False), MatrixRef(10 * job + 1, False)
    made = GemmJob(job, gemm, *refs, ElementBytes(4, 4), "fp32", "fp32", TilePlanner())
    return manager.submit(made, a, b, now_s)


@pytest.fixture
def auth() -> FakeAuth:
    return FakeAuth()


@pytest.fixture
def manager(auth: FakeAuth) -> SessionManager:
    return SessionManager(auth=auth)


def test_a_device_is_told_its_credential_and_has_its_known_name(manager: SessionManager) -> None:
    orders = come(manager, 1)
    assert orders == [Send(1, messages.Welcome(1, server="S", credential="new")), Joined(1)]
    assert (manager.sessions[1].name, manager.sessions[1].identity) == ("device 7", 7)


@pytest.mark.parametrize("change", [{"ops": ()}, {"memory_bytes": 1}, {"version": 99}])
def test_who_does_not_fit_uses_no_code_up(
    manager: SessionManager, auth: FakeAuth, change: dict[str, object]
) -> None:
    come(manager, 1, hello=replace(HELLO, **change))  # type: ignore[arg-type]
    assert not manager.sessions
    assert not auth.asked


# --- the same device twice ---


def test_the_newer_of_two_sessions_counts(manager: SessionManager, auth: FakeAuth) -> None:
    come(manager, 1)
    come(manager, 2, "8")
    submit(manager)
    orders = come(manager, 3, now_s=2.0)
    (error,) = sent(orders, 1)
    assert isinstance(error, messages.Error)
    assert error.code is ErrorCode.DUPLICATE
    assert "--name" in error.message
    assert Close(1) in orders
    assert any(isinstance(o, Note) and "device 7 joined again" in o.text for o in orders)
    assert list(manager.sessions) == [2, 3]
    assert manager.ready_devices == 2
    assert auth.left == [(7, error.message, False)]


# --- gone, and back ---


def measured(manager: SessionManager, session: int, now_s: float) -> None:
    """Let the probe end, by hand: what it finds is tested elsewhere."""
    record = manager.sessions[session]
    assert record.rates is not None
    record.rates = replace(
        record.rates, downlink_bytes_per_s=5e6, uplink_bytes_per_s=3e6, latency_s=0.01
    )
    record.probe, record.state = None, DeviceState.READY
    manager.scheduler.handle(DeviceReady(record.rates), now_s)


@pytest.mark.parametrize(
    ("address", "after_s", "known"),
    [("here", GRACE_S, True), ("here", GRACE_S + 1, False), ("elsewhere", 1.0, False)],
)
def test_a_device_that_is_soon_back_is_not_measured_again(
    manager: SessionManager, address: str, after_s: float, known: bool
) -> None:
    come(manager, 1, hello=UNMEASURED)
    assert manager.sessions[1].state is DeviceState.PROBING
    measured(manager, 1, 1.0)
    manager.closed(1, "the connection broke", 10.0)
    orders = come(manager, 2, hello=UNMEASURED, now_s=10.0 + after_s, address=address)
    assert (Joined(2) in orders) == known
    rates = manager.sessions[2].rates
    assert rates is not None
    if known:
        link = (rates.downlink_bytes_per_s, rates.uplink_bytes_per_s, rates.latency_s)
        assert link == (5e6, 3e6, 0.01)
        assert rates.device == 2


def shown_slow(manager: SessionManager, session: int, claim: float) -> None:
    """A device that claims more than its probe found: 1 GFLOP/s."""
    come(manager, session, hello=replace(UNMEASURED, flops_per_s=claim))
    rates = manager.sessions[session].rates
    assert rates is not None
    manager.sessions[session].rates = replace(rates, flops_per_s=1e9)
    measured(manager, session, 1.0)


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
    manager: SessionManager, claim: float, claims_now: float, known: float | None
) -> None:
    shown_slow(manager, 1, claim)
    for session in (2, 3):  # and after a second one
        manager.closed(session - 1, "the connection broke", 10.0 * session)
        again = replace(UNMEASURED, flops_per_s=claims_now)
        come(manager, session, hello=again, now_s=10.0 * session + 1)
        rates = manager.sessions[session].rates
        assert rates is not None
        if known is None:
            assert manager.sessions[session].state is DeviceState.PROBING
            return
        assert manager.sessions[session].state is DeviceState.READY
        assert rates.flops_per_s == known
        assert rates.downlink_bytes_per_s == 5e6


def test_a_claim_that_nothing_spoke_against_is_believed_anew(manager: SessionManager) -> None:
    come(manager, 1, hello=UNMEASURED)
    measured(manager, 1, 1.0)
    manager.closed(1, "the connection broke", 10.0)
    come(manager, 2, hello=replace(UNMEASURED, flops_per_s=5e12), now_s=11.0)
    rates = manager.sessions[2].rates
    assert rates is not None
    assert rates.flops_per_s == 5e12


def test_a_device_lost_while_it_was_measured_is_measured_again(manager: SessionManager) -> None:
    come(manager, 1, hello=UNMEASURED)
    manager.closed(1, "the connection broke", 1.0)
    come(manager, 2, hello=UNMEASURED, now_s=2.0)
    assert manager.sessions[2].state is DeviceState.PROBING


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
    manager: SessionManager, auth: FakeAuth, message: Message | None, lost: bool, hello: Hello
) -> None:
    come(manager, 1, hello=hello)
    if message is not None:
        manager.received(1, message, 1.0)
    manager.closed(1, "the connection broke", 1.0)
    assert [(identity, was_lost) for identity, _, was_lost in auth.left] == [(7, lost)]


def test_silence_is_a_loss(manager: SessionManager, auth: FakeAuth) -> None:
    come(manager, 1)
    manager.tick(limits.SILENCE_S + 1)
    assert [lost for _, _, lost in auth.left] == [True]


def test_an_operator_can_end_the_sessions_of_a_device(manager: SessionManager) -> None:
    come(manager, 1)
    come(manager, 2, "8")
    orders = manager.refuse_identity(7, ErrorCode.CREDENTIAL, "revoked", 1.0)
    assert sent(orders, 1) == [messages.Error(ErrorCode.CREDENTIAL, "revoked")]
    assert list(manager.sessions) == [2]
    assert manager.refuse_identity(9, ErrorCode.CREDENTIAL, "nobody", 1.0) == []


# --- contribution ---


def one_result(manager: SessionManager, session: int) -> Check:
    """A GEMM of one block, answered by a device that passed the probe."""
    manager.verification, manager.verify = Verification.of(True), True
    orders = submit(manager)
    (run,) = [m for m in sent(orders, session) if isinstance(m, messages.Run)]
    payload = bytes(4 * 4 * 4)
    result = messages.Result(run.id, 4, 4, "fp32", 0.5, payload)
    (check,) = manager.received(session, result, 2.0)
    assert isinstance(check, Check)
    return check


def test_what_a_device_did_is_told_now_and_then_and_in_the_end(
    manager: SessionManager, auth: FakeAuth
) -> None:
    come(manager, 1)
    come(manager, 2, "8", hello=replace(HELLO, measure=True))
    one_result(manager, 1)
    record = manager.sessions[1]
    record.counters.downlink_bytes, record.counters.uplink_bytes = 100, 200
    manager.received(1, messages.Telemetry({"energy_j": 3.0, "power_w": 9.0}), 2.0)
    assert not auth.done
    manager.received(1, messages.Heartbeat(), CREDIT_S)
    manager.tick(CREDIT_S)
    expected = DeviceCounters(1, 2.0 * 4**3, 100, 200, 0.5, 3.0)
    assert auth.done == {7: expected}
    record.counters.uplink_bytes += 50
    manager.received(1, messages.Telemetry({"energy_j": 4.0}), CREDIT_S + 1)
    manager.closed(1, "gone", CREDIT_S + 1)
    assert auth.done == {7: expected + DeviceCounters(uplink_bytes=50, energy_j=1.0)}


def test_what_a_device_states_of_itself_is_bounded(manager: SessionManager, auth: FakeAuth) -> None:
    come(manager, 1)
    manager.received(1, messages.Telemetry({"energy_j": -1e300}), 0.0)
    manager.credit(0.0)
    assert not auth.done
    manager.received(1, messages.Telemetry({"energy_j": 1e300}), 0.0)
    manager.sessions[1].counters.compute_s = 1e300
    manager.credit(0.0)
    assert auth.done[7].compute_s == MAX_CREDIT
    assert auth.done[7].energy_j == 0  # no device draws so much


def test_energy_that_a_device_cannot_have_drawn_is_no_contribution(
    manager: SessionManager, auth: FakeAuth
) -> None:
    come(manager, 1, hello=replace(HELLO, profile="snapdragon-888"))
    manager.received(1, messages.Telemetry({"energy_j": 300.0}), 60.0)
    manager.credit(60.0)
    assert auth.done[7].energy_j == 300.0
    for absurd in (1e4, 1e300, float("nan"), float("inf")):  # a phone draws 25 W at most
        manager.received(1, messages.Telemetry({"energy_j": absurd}), 120.0)
        manager.credit(120.0)
        assert auth.done[7].energy_j == 300.0
    manager.received(1, messages.Telemetry({"energy_j": 600.0}), 120.0)
    manager.credit(120.0)
    assert auth.done[7].energy_j == 600.0


# --- quarantine ---


def test_quarantine_is_of_the_identity(manager: SessionManager, auth: FakeAuth) -> None:
    auth.faults_before = int(QUARANTINE) - 1  # in sessions before
    come(manager, 1)
    check = one_result(manager, 1)
    orders = manager.checked(check, Judgement(Fault("row 3 is wrong")), 3.0)
    (error,) = [m for m in sent(orders, 1) if isinstance(m, messages.Error)]
    assert error.code is ErrorCode.QUARANTINED
    assert auth.faults == {7: ["row 3 is wrong"]}
    assert auth.quarantine == {7: error.message}
    assert auth.left == [(7, error.message, False)]


def test_a_result_of_another_form_is_remembered_and_the_second_quarantines(
    manager: SessionManager, auth: FakeAuth
) -> None:
    come(manager, 1)
    check = one_result(manager, 1)
    manager.checked(check, Judgement(), 2.0)
    orders = submit(manager)
    for _ in range(2):
        assert 1 in manager.sessions
        (run,) = [m for m in sent(orders, 1) if isinstance(m, messages.Run)]
        wrong = messages.Result(run.id, 1, 16, "fp32", 0.0, bytes(64))
        orders = manager.received(1, wrong, 3.0)
    (error,) = [m for m in sent(orders, 1) if isinstance(m, messages.Error)]
    assert error.code is ErrorCode.QUARANTINED
    assert auth.points == {7: 2 * Wrong.FORM.value}
    assert len(auth.faults[7]) == 2
    assert 7 in auth.quarantine


# --- one key ---


def test_one_key_opens_as_credential_or_as_code() -> None:
    auth = SharedSecretAuth("key", "token")
    assert auth.admit(replace(HELLO, credential="key"), "") == Admission(own=True)
    assert auth.admit(replace(HELLO, credential="of another server", join_code="key"), "") == (
        Admission(own=True)
    )
    assert isinstance(auth.admit(replace(HELLO, credential="k", join_code="y"), ""), Refusal)
    assert isinstance(auth.admit(replace(HELLO, credential=""), ""), Refusal)
    assert SharedSecretAuth("").admit(HELLO, "") == Admission(own=True)
    assert auth.admit_operator("token", "") is AccessLevel.OPERATOR
    assert isinstance(auth.admit_operator("key", ""), Refusal)
