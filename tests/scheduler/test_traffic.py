"""What crosses the network is counted once, as what it is for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.stages.model import KeptBatches, PlannedStage
from cleave.protocol import limits, messages
from cleave.protocol.allowance import Allowance
from cleave.scheduler.counters import Traffic, TrafficKind
from cleave.scheduler.instructions import ForRuntime, Send
from cleave.scheduler.sessions.session import Session
from tests.scheduler.stage_devices import step_work
from tests.scheduler.test_stage_runs import HELLO, come, server

COUNTED = st.lists(st.tuples(st.booleans(), st.sampled_from(TrafficKind), st.integers(0, 10**12)))


@given(COUNTED, COUNTED)
def test_kinds_add_up_to_all_that_was_counted(
    first: list[tuple[bool, TrafficKind, int]], then: list[tuple[bool, TrafficKind, int]]
) -> None:
    traffic = Traffic()

    def count(messages_sent: list[tuple[bool, TrafficKind, int]]) -> None:
        for down, kind, nbytes in messages_sent:
            (traffic.down if down else traffic.up).count(kind, nbytes)

    count(first)
    before = traffic.snapshot()
    count(then)
    spent = traffic - before
    assert spent.down.total == sum(n for down, _, n in then if down)
    assert spent.up.total == sum(n for down, _, n in then if not down)
    for kind in TrafficKind:
        assert getattr(spent.down, kind.value) == sum(n for d, k, n in then if d and k is kind)
    assert before + spent == traffic


def sent(wanted: list[ForRuntime]) -> list[Send]:
    return [one for one in wanted if isinstance(one, Send)]


def test_counting_a_late_answer_to_a_cancelled_run_leaves_it_an_answer() -> None:
    session = Session(1, 0.0, allowance=Allowance(0.0))
    late = messages.Result(7, 1, 1, "fp32", 0.0, bytes(4))
    session.cancelled_runs.sent(7)
    session.cancelled_runs.cancelled(7, 4)
    assert session.kind_of(late) is TrafficKind.TILES
    assert session.too_much(late, limits.MAX_UNASKED_BYTES + 1, 1.0) == ""
    assert session.kind_of(late) is TrafficKind.OTHER  # it comes once
    assert session.kind_of(HELLO) is TrafficKind.OTHER


def test_a_step_by_stages_says_what_each_message_is_for() -> None:
    manager = server(1)
    come(manager, 1)
    session = manager.sessions[1]
    work = step_work(1, 1, [PlannedStage(0, 1, (1,))], kept_batches={1: KeptBatches(1)})
    down, up = [], []
    waiting = sent(manager.begin_step(work, 1.0))
    while waiting:
        order = waiting.pop(0)
        down.append((type(order.message), order.kind))
        match order.message:
            case messages.RunGraph(id=run):
                answer: messages.Computed | messages.Result = messages.Computed(run, 0.0)
            case messages.Fetch(id=run, rows=rows, columns=columns, out=out):
                answer = messages.Result(run, rows, columns, out, 0.0, bytes(4 * rows * columns))
            case _:
                continue
        up.append((type(answer), session.kind_of(answer)))
        waiting += sent(manager.received(1, answer, 2.0))
        waiting += sent(manager.resolve(True, "", 2.0))  # of the first numbers nothing is known
        if len(up) == 2:  # the output came: the PS computes the loss
            waiting += sent(manager.give(0, work.x[0], None, 3.0))
    put, graph = messages.Put, messages.Graph
    arrays = [(type_, kind) for type_, kind in down if type_ in (put, graph)]
    assert arrays == [
        (put, TrafficKind.ACTIVATIONS),  # x
        (put, TrafficKind.WEIGHTS),
        (put, TrafficKind.ACTIVATIONS),  # a mask
        (graph, TrafficKind.GRAPHS),
        (put, TrafficKind.ACTIVATIONS),  # dy
        (graph, TrafficKind.GRAPHS),
    ]
    assert {kind for type_, kind in down if type_ not in (put, graph)} == {TrafficKind.OTHER}
    assert [kind for type_, kind in up if type_ is messages.Result] == [
        TrafficKind.ACTIVATIONS,  # y
        TrafficKind.ACTIVATIONS,  # dx
        TrafficKind.GRADIENTS,
    ]
    assert {kind for type_, kind in up if type_ is messages.Computed} == {TrafficKind.OTHER}
