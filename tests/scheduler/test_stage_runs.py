"""Whole layers go to the operator's own devices, and it is said why there are none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from cleave.errors import UsageError
from cleave.planner.stages.model import PlannedStage
from cleave.protocol import messages
from cleave.protocol.messages import Feature, Hello
from cleave.scheduler.instructions import ForRuntime, Send, TellStep
from cleave.scheduler.sessions.admission import Admission, AdmissionResult, SharedSecretAuth
from cleave.scheduler.sessions.reputation import ASIDE_AFTER
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.outcomes import StepFailed
from cleave.scheduler.stages.runs import StagesOn
from tests.invariants import check_state
from tests.scheduler import test_admission
from tests.scheduler.stage_devices import resident_of, step_work

MEMORY_BYTES = 2**30
HELLO = replace(test_admission.HELLO, features=(Feature.GRAPHS.value,))
BROWSER = replace(HELLO, features=())


class Marked(SharedSecretAuth):
    """Lets everybody in under the identity in `credential`; some are the operator's own."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self.own = own

    def admit(self, hello: Hello, address: str) -> AdmissionResult:
        identity = int(hello.credential)
        if hello.measure:
            return Admission(measures=identity)
        return Admission(identity, own=identity in self.own)


def server(*own: int, stages_on: StagesOn | str = StagesOn.OWN) -> SessionManager:
    return SessionManager(auth=Marked(set(own)), stages_on=stages_on)


def come(manager: SessionManager, *devices: int, hello: Hello = HELLO) -> None:
    for device in devices:
        manager.opened(device, 0.0)
        manager.received(device, replace(hello, credential=str(device)), 0.0)


def offered(manager: SessionManager) -> dict[int, int]:
    return {device: rates.memory_bytes for device, rates in manager.stages.able.items()}


def test_only_ones_own_devices_get_whole_layers() -> None:
    manager = server(1, 3)
    come(manager, 1, 2)
    come(manager, 3, hello=BROWSER)
    assert manager.ready_devices == 3
    assert offered(manager) == {1: MEMORY_BYTES}
    assert manager.stages.why_none() == ""


@pytest.mark.parametrize("stages_on", [StagesOn.ANY, "any"])
def test_any_device_gets_them_where_the_server_is_told(stages_on: StagesOn | str) -> None:
    manager = server(1, stages_on=stages_on)
    come(manager, 1, 2)
    come(manager, 3, hello=BROWSER)
    assert offered(manager) == dict.fromkeys((1, 2), MEMORY_BYTES)
    assert manager.stages.why_none() == ""


def test_other_words_are_refused() -> None:
    for word in ("", "all", "OWN"):
        with pytest.raises(UsageError, match=f"--stages-on is '{word}'; use own or any"):
            server(stages_on=word)


def test_a_programs_devices_are_its_own() -> None:
    """They have one credential, which the program gave them."""
    manager = SessionManager("key")
    come_with = replace(HELLO, credential="key")
    manager.opened(1, 0.0)
    manager.received(1, come_with, 0.0)
    assert offered(manager) == {1: MEMORY_BYTES}


# --- why there are none ---


def test_a_device_that_fails_each_order_is_set_aside_and_the_step_says_so() -> None:
    manager = server(1)
    come(manager, 1)
    work = step_work(2, 2, [PlannedStage(0, 2, (1,), loss=True)])
    orders, asked = manager.begin_step(work, 1.0), 0
    while not any(isinstance(order, TellStep) for order in orders):
        run = _orders(orders)[0]
        asked += 1
        orders = manager.received(1, messages.TaskError(run.id, "it has no such op"), 2.0)
    (outcome,) = [order.outcome for order in orders if isinstance(order, TellStep)]
    assert isinstance(outcome, StepFailed)
    assert not outcome.final
    assert "device 1: its runs fail, most recently with: it has no such op" in outcome.reason
    assert asked == ASIDE_AFTER
    assert manager.state(manager.sessions[1]) is DeviceState.ASIDE
    assert not manager.sessions[1].expected
    assert "set aside" in manager.stages.why_none()


def test_an_order_that_fails_is_asked_again_and_its_late_followers_cost_nothing() -> None:
    manager = server(1)
    come(manager, 1)
    work = step_work(2, 2, [PlannedStage(0, 2, (1,), loss=True)])
    runs = _orders(manager.begin_step(work, 1.0))
    assert len(runs) > 1
    after = manager.received(1, messages.TaskError(runs[0].id, "busy"), 2.0)
    said = [o.message for o in after if isinstance(o, Send)]
    (cancel,) = [message for message in said if isinstance(message, messages.Cancel)]
    assert set(cancel.ids) == {run.id for run in runs[1:]}
    assert len(_orders(after)) == 1
    for run in runs[1:]:  # these crossed with the cancel
        assert manager.received(1, messages.TaskError(run.id, "no value"), 2.0) == []
    assert manager.sessions[1].counters.failures == 1
    assert manager.sessions[1].setbacks.in_a_row == 1


def _orders(orders: Iterable[ForRuntime]) -> list[messages.RunGraph | messages.Fetch]:
    sent = [order.message for order in orders if isinstance(order, Send)]
    return [m for m in sent if isinstance(m, messages.RunGraph | messages.Fetch)]


def test_nobody_is_there() -> None:
    manager = server()
    assert manager.stages.why_none() == "no device is connected"
    manager.opened(1, 0.0)  # it said nothing yet
    assert manager.stages.why_none() == "no device is connected"
    come(manager, 2, hello=replace(HELLO, measure=True, downlink_bytes_per_s=0.0))
    assert manager.sessions[2].state is DeviceState.PROBING
    assert manager.stages.why_none() == "no device is connected"


@pytest.mark.parametrize(
    ("own", "hello", "why"),
    [
        (1, BROWSER, ": graphs need a newer version of Cleave, or ONNX Runtime on the device"),
        (9, HELLO, "now: it is not yours (pair it with `cleave pair --own`, mark it with "),
        (
            1,
            replace(HELLO, downlink_bytes_per_s=0.0),
            "now: it is being measured, ",
        ),
    ],
    ids=["no graphs", "not own", "measured"],
)
def test_why_no_device_may_train_whole_layers(own: int, hello: Hello, why: str) -> None:
    manager = server(own)
    come(manager, 1, hello=hello)
    said = manager.stages.why_none()
    assert said.startswith("1 device is connected, but it cannot train whole layers now")
    assert why in said
    come(manager, 2, 3, hello=hello)
    assert manager.stages.why_none().startswith("3 devices are connected, but none can train ")


# --- marks that change ---


def sent(wanted: list[ForRuntime], device: int) -> list[type]:
    return [type(o.message) for o in wanted if isinstance(o, Send) and o.session == device]


def test_a_mark_counts_at_once() -> None:
    manager = server()
    come(manager, 1, 2)
    assert manager.mark_own(1, True, 1.0) == []
    assert offered(manager) == {1: MEMORY_BYTES}
    manager.mark_own(1, False, 2.0)
    assert "none is yours" in manager.stages.why_none()
    assert manager.mark_own(7, True, 3.0) == []  # it is not there
    assert manager.ready_devices == 2


def test_a_step_goes_on_without_a_device_that_is_ones_own_no_more() -> None:
    manager = server(1)
    come(manager, 1, 2)
    work = step_work(2, 2, [PlannedStage(0, 2, (1,), loss=True)])
    assert messages.RunGraph in sent(manager.begin_step(work, 1.0), 1)
    gone = manager.mark_own(1, False, 2.0)
    assert set(sent(gone, 1)) == {messages.Drop}  # what it held
    assert sent(gone, 2) == []
    assert manager.stages.occupied_bytes(1) == 0
    assert not manager.stages.busy(1)
    assert messages.RunGraph in sent(manager.mark_own(2, True, 3.0), 2)  # what the step waits for
    check_state(manager)


def test_a_step_does_not_begin_with_devices_that_may_not_take_part_any_more() -> None:
    """They were there, and one's own, when the step was planned."""
    manager = server(1, 2, 3)
    come(manager, 1, 2, 3)
    work = step_work(2, 2, [PlannedStage(0, 1, (1, 2)), PlannedStage(1, 2, (2,), loss=True)])
    manager.mark_own(1, False, 1.0)
    manager.closed(2, "it vanished", 1.0)
    begun = manager.begin_step(work, 2.0)
    assert sent(begun, 1) == sent(begun, 2) == []
    assert messages.RunGraph in sent(begun, 3)
    check_state(manager)


def test_a_mark_means_nothing_where_any_device_will_do() -> None:
    manager = server(1, stages_on="any")
    come(manager, 1)
    work = step_work(2, 2, [PlannedStage(0, 2, (1,), loss=True)])
    manager.begin_step(work, 1.0)
    assert manager.mark_own(1, False, 2.0) == []
    assert manager.stages.busy(1)


def test_memory_is_reserved_where_the_trained_state_is() -> None:
    """Device 2 took the state over from device 1, and the plan does not say so."""
    manager = server(1, 2)
    come(manager, 1, 2)
    work = step_work(2, 2, [PlannedStage(0, 2, (1,))])
    work = replace(work, resident=resident_of(work))
    manager.begin_step(work, 1.0)
    manager.closed(1, "it vanished", 2.0)
    manager.withdraw_step(3.0)
    begun = manager.begin_step(replace(work, token=object()), 4.0)
    assert messages.RunGraph in sent(begun, 2)
    assert manager.sessions[2].reserved_bytes == MEMORY_BYTES
    check_state(manager)
