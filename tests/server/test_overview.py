"""Overviews: equal to the counters, None for what is not known, and never too large. No sockets."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from cleave.energy.grid import load_grid
from cleave.energy.typical import load_typical
from cleave.errors import CleaveError, UsageError
from cleave.gemm import Gemm
from cleave.planner.stages.model import PlannedStage
from cleave.protocol import limits, messages
from cleave.protocol.codec import encode
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.messages import Feature, Reply
from cleave.scheduler.counters import BytesByKind, FleetCounters, StepProgress, Traffic
from cleave.scheduler.instructions import ForRuntime, Send
from cleave.scheduler.sessions.session import EventKind
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.state import HolderView, StageView, StepView
from cleave.server.api import overview as overviews
from cleave.server.api.event_log import EventLog
from cleave.server.api.overview import (
    DEVICE_COLUMNS,
    MAX_HOLDERS,
    MAX_STREAMS,
    STREAM_S,
    Look,
    Overview,
    Question,
    Rates,
    ServerFacts,
    Training,
    WorkKind,
    stages_answer,
)
from cleave.server.block_times import KEPT, MOST_SPANS, BlockTimes, Lane, TimeSpan
from cleave.server.jobs.energy import EnergyMeter
from cleave.server.jobs.jobs import Jobs, JobState, TrainingJob
from cleave.training.loop.records import StepRecord, to_dict
from profiles.library import load_profiles
from tests.scheduler import test_admission
from tests.scheduler.stage_devices import step_work
from tests.scheduler.test_admission import submit
from tests.server.clocks import Clock

HELLO = dataclasses.replace(
    test_admission.HELLO, name="phone", dtypes=("fp32",), memory_bytes=10**9, flops_per_s=1e10,
    downlink_bytes_per_s=1e7, uplink_bytes_per_s=5e6, latency_s=0.01,
)  # fmt: skip
POWERED = "raspberry-pi-5"


class Fleet:
    """A fleet without sockets."""

    def __init__(self, clock: Clock) -> None:
        self.manager = SessionManager()
        self.done = FleetCounters()
        self.spans: list[TimeSpan] = []
        self.step: StepProgress | None = None
        self._clock = clock

    def counters(self) -> FleetCounters:
        return self.done

    def progress(self) -> StepProgress | None:
        return self.step

    def timeline(self, session: int) -> list[TimeSpan]:
        return self.spans

    def join(self, id: int, **changes: Any) -> None:
        self.manager.opened(id, self._clock())
        hello = dataclasses.replace(HELLO, **changes)
        self.manager.received(id, hello, self._clock())

    def submit(self, gemm: Gemm) -> list[ForRuntime]:
        return submit(self.manager, gemm, 7, self._clock())

    def answer(self, order: Send, run: messages.Run) -> None:
        """A device sends the right block, which is put in its place."""
        task = self.manager.sessions[order.session].expected[run.id]
        rows, columns = task.gemm.block.m.size, task.gemm.block.n.size
        result = messages.Result(run.id, rows, columns, "fp32", 0.5, bytes(task.output_bytes))
        self.manager.received(order.session, result, self._clock())


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    return Fleet(clock)


@pytest.fixture
def overview(fleet: Fleet, clock: Clock) -> Overview:
    return overview_of(fleet, clock)


def overview_of(
    fleet: Fleet, clock: Clock, egress: float | None = None, ingress: float | None = None
) -> Overview:
    """An overview of a fleet, of a server whose network card sends and takes in so fast."""
    profiles = load_profiles()
    made = Overview(
        ServerFacts("1.2", "box", "auto", egress, ingress),
        EventLog(clock),
        profiles,
        EnergyMeter(profiles.values(), load_typical(), load_grid("DEU")),
        clock.clocks,
    )
    made.live = fleet
    return made


def rows(overview: Overview) -> list[dict[str, Any]]:
    devices = overview.answer(Question())["devices"]
    return [dict(zip(devices["columns"], row, strict=True)) for row in devices["rows"]]


def test_an_empty_server(overview: Overview) -> None:
    seen = overview.answer(Question())
    assert seen["server"]["name"] == "box"
    assert seen["card"] == {"egress_bytes_per_s": None, "ingress_bytes_per_s": None}
    assert seen["devices"] == {"columns": list(DEVICE_COLUMNS), "rows": [], "total": 0, "by": []}
    assert seen["job"] is seen["plan"] is seen["stages"] is seen["timeline"] is None
    assert {n for way in seen["traffic"].values() for n in way.values()} == {0}
    assert seen["totals"]["blocks"] == 0
    assert seen["rates"]["blocks_per_s"] is None  # no time has passed
    assert seen["energy"]["devices_j"] is seen["energy"]["gco2e"] is None
    encode(messages.Reply(1, ok=True, data=seen))


def test_while_it_starts(overview: Overview) -> None:
    overview.live = None
    with pytest.raises(CleaveError, match="still starting"):
        overview.answer(Question())


def test_devices_and_what_is_not_known_of_them(
    overview: Overview, fleet: Fleet, clock: Clock
) -> None:
    fleet.join(1, profile=POWERED)
    fleet.join(2, profile="../../etc/passwd.toml", latency_s=0.0)
    fleet.manager.opened(3, clock())  # has not said hello
    clock.now_s += 10
    for session in (fleet.manager.sessions[1], fleet.manager.sessions[2]):
        session.counters = DeviceCounters(3, 8e9, 10**8, 10**7, compute_s=4.0)
    known, stranger = rows(overview)
    assert (known["device"], known["name"], known["state"]) == (1, "phone", "ready")
    assert (known["kind"], stranger["kind"]) == ("sbc", None)
    assert known["identity"] is None
    assert known["reputation"] == "unchecked"
    assert (known["blocks"], known["compute_s"]) == (3, 4.0)
    assert (known["down_bytes"], known["up_bytes"]) == (10**8, 10**7)
    assert known["downlink_bytes_per_s"] == pytest.approx(1e7)
    assert known["uplink_bytes_per_s"] == pytest.approx(1e6)
    assert known["flops_per_s"] == pytest.approx(2e9)
    assert known["profile_downlink_bytes_per_s"] == 1e7
    assert stranger["profile_flops_per_s"] == 1e10
    assert known["round_trip_s"] == pytest.approx(0.02)
    assert known["energy_j"] > 0
    assert stranger["energy_j"] is None
    energy = overview.answer(Question())["energy"]
    assert energy["devices_j"] == known["energy_j"]
    assert (energy["devices_known"], energy["devices_unknown"]) == (1, 1)
    assert energy["gco2e"] == pytest.approx(
        known["energy_j"] / 3.6e6 * load_grid("Germany").gco2e_per_kwh
    )
    assert any("1 of 2 devices" in line for line in energy["assumed"])


def test_a_kind_that_a_device_states_stands_in_for_a_profile(
    overview: Overview, fleet: Fleet, clock: Clock
) -> None:
    fleet.join(1, kind="phone")
    fleet.join(2, kind="phone", profile=POWERED)  # a profile says more
    fleet.join(3, kind="toaster")
    fleet.join(4, kind="tablet")  # of which none was measured
    fleet.join(5, kind="sbc", flops_per_s=5e12)  # faster than those that were
    fleet.manager.sessions[1].counters.compute_s = 4.0
    clock.now_s += 10
    seen = overview.answer(Question())
    devices = rows(overview)
    assert [device["kind"] for device in devices] == ["phone", "sbc", None, "tablet", "sbc"]
    assert sorted(count for _, _, count in seen["devices"]["by"]) == [1, 1, 1, 2]
    assert devices[0]["energy_j"] == pytest.approx(6.75 * 4)  # nothing was sent
    assert [device["energy_basis"] for device in devices[2:]] == ["unknown"] * 3
    said = seen["energy"]["assumed"]
    assert "1 of 5 devices: power of a typical phone, because theirs is unknown" in said


def test_energy_of_those_who_left_is_kept(overview: Overview, fleet: Fleet, clock: Clock) -> None:
    fleet.join(1)
    session = fleet.manager.sessions[1]
    overview.happened(EventKind.JOIN, session, "")
    session.telemetry["energy_j"] = 50.0
    assert overview.answer(Question())["energy"]["devices_j"] == 50.0
    fleet.manager.closed(1, "gone", clock())
    overview.happened(EventKind.LEAVE, session, "gone")
    seen = overview.answer(Question())
    assert seen["energy"]["devices_j"] == 50.0
    assert (seen["totals"]["joined"], seen["totals"]["left"]) == (1, 1)


def test_events_are_told_once_and_in_order(overview: Overview, fleet: Fleet) -> None:
    fleet.join(1)
    session = fleet.manager.sessions[1]
    overview.happened(EventKind.JOIN, session, "pixel-7")
    overview.happened(EventKind.WRONG, session, "an element is wrong")
    overview.events.add(EventKind.JOB, 0, "job-1 (opt-tiny) running")
    overview.happened(EventKind.REISSUE, None, "3 units were given to other devices")
    first = overview.answer(Question())["events"]
    assert [row[2:] for row in first["rows"]] == [
        ["join", 1, "phone (pixel-7)"],
        ["wrong", 1, "phone: an element is wrong"],
        ["job", 0, "job-1 (opt-tiny) running"],
        ["reissue", 0, "3 units were given to other devices"],
    ]
    assert first["last"] == 4
    assert overview.answer(Question(after_event=4))["events"]["rows"] == []
    assert len(overview.answer(Question(after_event=2))["events"]["rows"]) == 2
    assert overview.answer(Question())["totals"]["wrong"] == 1


def test_who_was_turned_away_while_probed_did_not_leave(overview: Overview, fleet: Fleet) -> None:
    fleet.join(1)
    overview.happened(EventKind.QUARANTINE, fleet.manager.sessions[1], "wrong")
    totals = overview.answer(Question())["totals"]
    assert (totals["joined"], totals["left"]) == (0, 0)


def test_the_plan_fills_as_blocks_come_back(overview: Overview, fleet: Fleet, clock: Clock) -> None:
    fleet.join(1)
    fleet.join(2)
    gemm = Gemm(256, 512, 128)
    orders = fleet.submit(gemm)
    clock.now_s += 1.5
    plan = overview.answer(Question())["plan"]
    assert (plan["m"], plan["n"], plan["k"], plan["generation"]) == (256, 512, 128, 7)
    assert plan["name"] == "256×128 · 128×512"
    assert plan["elapsed_s"] == pytest.approx(1.5)
    assert plan["predicted_s"] > 0
    volume = sum(
        (m1 - m0) * (n1 - n0) * (k1 - k0) for _, m0, m1, n0, n1, k0, k1, *_ in plan["tiles"]
    )
    assert volume == gemm.volume
    assert sum(tile[-1] for tile in plan["tiles"]) == 0
    runs = [
        (order, order.message)
        for order in orders
        if isinstance(order, Send) and isinstance(order.message, messages.Run)
    ]
    assert sum(tile[-2] for tile in plan["tiles"]) == len(runs)
    for count, (order, run) in enumerate(runs[:-1], 1):
        fleet.answer(order, run)
        seen = overview.answer(Question())
        assert sum(tile[-1] for tile in seen["plan"]["tiles"]) == count
        assert seen["totals"]["blocks"] == count
    fleet.answer(*runs[-1])
    seen = overview.answer(Question())
    assert seen["plan"] is None
    assert seen["totals"]["flops"] == 2 * gemm.volume
    ((generation, name, predicted_s, took_s),) = seen["gemms"]
    assert (generation, name, predicted_s) == (7, plan["name"], plan["predicted_s"])
    assert took_s == pytest.approx(1.5)


def test_work_of_a_device_that_left_stays_in_totals_and_rates(
    overview: Overview, fleet: Fleet, clock: Clock
) -> None:
    for device in (1, 2):
        fleet.join(device)
    runs = [order for order in fleet.submit(Gemm(256, 512, 128)) if isinstance(order, Send)]
    order = next(o for o in runs if o.session == 1 and isinstance(o.message, messages.Run))
    clock.now_s += 2.0
    fleet.answer(order, order.message)  # type: ignore[arg-type]
    before = overview.answer(Question())
    assert before["totals"]["blocks"] == rows(overview)[0]["blocks"] == 1
    assert before["rates"]["blocks_per_s"] == 0.5
    fleet.manager.closed(1, "its owner closed it", clock())
    left = overview.answer(Question())
    assert left["devices"]["total"] == 1
    fleet.join(3)  # the same device again
    for seen in (left, overview.answer(Question())):
        assert [seen["totals"][n] for n in ("blocks", "flops")] == [1, before["totals"]["flops"]]
        assert seen["rates"] == before["rates"]


def test_a_step_by_stages_and_whose_the_devices_are(overview: Overview, fleet: Fleet) -> None:
    fleet.join(1)
    fleet.join(2, features=(Feature.GRAPHS.value,))
    fleet.manager.sessions[1].own = False
    assert [device["own"] for device in rows(overview)] == [False, True]
    work = step_work(3, 2, [PlannedStage(0, 2, (2,)), PlannedStage(2, 3, (2,), loss=True)])
    orders = fleet.manager.begin_step(work, 1.0)
    stages = overview.answer(Question())["stages"]
    assert (stages["batches"], stages["ended"], stages["repeated"]) == (2, False, 0)
    assert stages["logged"] is None
    first, last = stages["stages"]
    assert first == {
        "first": 0, "stop": 2, "loss": False, "slice": None, "forward": 0, "backward": 0,
        "landed": 0,
        "devices": 1, "holders": [[2, 2, 0, 0, 0]],
    }  # fmt: skip
    assert (last["first"], last["stop"], last["loss"]) == (2, 3, True)
    assert last["holders"] == [[2, 0, 0, 0, 0]]
    assert any(isinstance(one, Send) and one.session == 2 for one in orders)
    fleet.manager.end_steps(2.0)
    assert overview.answer(Question())["stages"] is None


def test_a_timeline_in_unix_time(overview: Overview, fleet: Fleet) -> None:
    fleet.join(4)
    fleet.spans = [TimeSpan(Lane.RECEIVE, 1.0, 2.0), TimeSpan(Lane.COMPUTE, 2.0, 5.0)]
    seen = overview.answer(Question(device=4))["timeline"]
    assert seen == {"device": 4, "spans": [["receive", 1.0, 2.0], ["compute", 2.0, 5.0]]}
    assert overview.answer(Question(device=5))["timeline"] is None


def test_a_stream_of_what_devices_did_lately(
    overview: Overview, fleet: Fleet, clock: Clock
) -> None:
    for number in range(MAX_STREAMS + 2):
        fleet.join(number + 1)
    begin_s = clock() - STREAM_S - 2
    fleet.spans = [
        TimeSpan(Lane.RECEIVE, begin_s, begin_s + 1),
        TimeSpan(Lane.COMPUTE, begin_s, begin_s + 3),
    ]
    assert overview.answer(Question())["stream"] is None
    seen = overview.answer(Question.of({"stream": True}))["stream"]
    (first, spans), *others = seen["devices"]
    assert first == 1
    assert spans == [[1, 302_000, 3_000]]  # what it received is too long ago
    assert (len(others), seen["hidden"]) == (MAX_STREAMS - 1, 2)
    assert seen["window_s"] == STREAM_S
    clock.now_s += STREAM_S
    assert overview.answer(Question(stream=True))["stream"]["devices"] == []


def test_a_stream_covers_the_time_of_which_all_is_known(
    overview: Overview, fleet: Fleet, clock: Clock
) -> None:
    fleet.join(1)
    fleet.spans = [TimeSpan(Lane.COMPUTE, clock() - 40, clock() - 30)]
    assert overview.answer(Question(stream=True))["stream"]["window_s"] == pytest.approx(40)
    fleet.spans += [TimeSpan(Lane.SEND, clock() - 20, clock())] * (MOST_SPANS - 1)
    assert overview.answer(Question(stream=True))["stream"]["window_s"] == pytest.approx(40)
    fleet.spans = fleet.spans[1:] + fleet.spans[-1:]  # the oldest is dropped
    assert overview.answer(Question(stream=True))["stream"]["window_s"] == pytest.approx(20)


@pytest.mark.parametrize(
    "arguments", [{"after_event": -1}, {"job": 3}, {"device": "x"}, {"after_record": True}]
)
def test_arguments_of_other_types(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="counts"):
        Question.of(arguments)


@pytest.mark.slow
def test_any_fleet_fits_a_reply(
    overview: Overview, fleet: Fleet, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.manager, "state", lambda session: session.state)
    for id in range(1, 5001):
        fleet.join(id, name="\N{ROCKET}" * 60)
        session = fleet.manager.sessions[id]
        session.reason = "\N{ROCKET}" * 4096
        if id <= 300:
            overview.happened(EventKind.LEAVE, session, "\N{ROCKET}" * 4096)
    seen = overview.answer(Question())
    assert seen["devices"]["total"] == 5000
    assert seen["devices"]["by"] == [[None, "ready", 5000]]
    assert 0 < len(seen["devices"]["rows"]) < 5000
    assert len(msgpack.packb(to_dict(_a_step()))) <= overviews.STEP_BYTES
    room = overviews.MAX_RECORDS_BYTES + overviews.MAX_TILES * 46
    holder = HolderView(10**6, *[10**4] * 4)
    stage = StageView(100, 100, False, 10**4, 10**4, 10**4, (holder,) * 100)
    stages = stages_answer(StepView(10**4, False, 10**4, (stage,) * 150))
    assert stages is not None
    assert sum(len(one["holders"]) for one in stages["stages"]) == MAX_HOLDERS
    assert {one["devices"] for one in stages["stages"]} == {100}
    room += len(msgpack.packb(stages)) + overviews.MAX_JOBS * 500
    assert len(msgpack.packb(seen)) + room < limits.MAX_HEADER_BYTES


def test_owners_of_devices_are_told_what_a_device_moves_now(
    overview: Overview, fleet: Fleet
) -> None:
    assert overview.training() == Training()
    job = TrainingJob("job-1", 1, {}, 20, "opt-nano")
    queue = SimpleNamespace(all=lambda: [job], running=job)
    overview.jobs = cast(Jobs, queue)
    job.state = JobState.RUNNING
    fleet.join(1)
    assert overview.training() == Training("running", 1)  # no step tells how much it is
    for wall_s in (600.0, 2.0, 2.0):  # the first step waited for a device
        traffic = Traffic(BytesByKind(tiles=6_000_000, other=10**9), BytesByKind(tiles=2_000_000))
        step = dataclasses.replace(_a_step(), wall_s=wall_s, traffic=traffic)
        job.records.append(to_dict(step))
    job.records.append({"event": "eval", "step": 3})
    assert overview.training() == Training("running", 1, 4e6, 4e6)
    fleet.join(2)
    assert overview.training() == Training("running", 2, 2e6, 2e6)
    alone = to_dict(dataclasses.replace(_a_step(), method="local", traffic=Traffic()))
    job.records += 5 * [alone]
    # The server alone is faster.
    assert overview.training() == Training("running", 2, 0, 2e6)
    overview.combine = lambda answer, question: answer  # other servers have devices, too
    assert overview.training() == Training("running", None, None, 2e6)
    job.state, queue.running = JobState.DONE, None
    assert overview.training() == Training("done", None, None, 2e6)


TILES, LAYERS = WorkKind.TILES, WorkKind.LAYERS


@pytest.mark.parametrize(
    ("asked", "step", "work", "settled"),
    [
        ("", None, None, False),  # the job starts
        ("auto", None, None, False),
        ("auto", "stages", (LAYERS,), False),
        ("auto", "local", (), False),
        ("auto", "tiles", (TILES,), False),
        ("tiles", None, (TILES,), False),
        ("tiles", "local", (TILES,), False),  # while no device is connected
        ("stages", None, (LAYERS,), True),  # it waits for its first device
        ("stages", "local", (LAYERS,), True),
        ("stages", "mixed", (TILES, LAYERS), True),
        ("diloco", "diloco", (LAYERS,), True),
        ("local", "local", (), True),
    ],
)
def test_owners_of_devices_are_told_the_kind_of_work(
    overview: Overview,
    asked: str,
    step: str | None,
    work: tuple[WorkKind, ...] | None,
    settled: bool,
) -> None:
    job = TrainingJob("job-1", 1, {}, 20, "opt-nano", state=JobState.RUNNING, method=asked)
    overview.jobs = cast(Jobs, SimpleNamespace(all=lambda: [job], running=job))
    if step is not None:
        mixed = step == "mixed"
        method = "stages" if mixed else step
        tiles = 5 if mixed or step == "tiles" else 0
        made = dataclasses.replace(_a_step(), method=method, tiles=tiles, local_gemms=0)
        job.records.append(to_dict(made))
    told = overview.training()
    assert (told.work, told.settled) == (work, settled)


# --- its parts ---


def test_rates_are_of_the_last_seconds() -> None:
    rates = Rates(0.0, window_s=10.0)
    looks = [Look(float(second), DeviceCounters(second * 5)) for second in range(1, 40)]
    for look in looks:
        before = rates.since(look)
        assert before.at_s == max(0.0, look.at_s - 10)
        assert before.fleet.blocks == 5 * before.at_s


def test_who_looks_seldom_sees_all_since_the_last_look() -> None:
    rates = Rates(0.0, window_s=10.0)
    assert rates.since(Look(100.0)).at_s == 0.0
    assert rates.since(Look(160.0)).at_s == 100.0


def test_the_log_forgets_the_oldest(clock: Clock) -> None:
    log = EventLog(clock, kept=3)
    for number in range(1, 6):
        log.add(EventKind.JOIN, number, "x" * 1000)
    assert [event.id for event in log.after(0, 10)[0]] == [3, 4, 5]
    assert [event.id for event in log.after(4, 10)[0]] == [5]
    assert [event.id for event in log.after(0, 2)[0]] == [4, 5]
    assert log.after(9, 10) == ([], 5)
    assert len(log.after(4, 1)[0][0].text) == 200


def test_what_devices_say_cannot_write_on_a_terminal(clock: Clock) -> None:
    log = EventLog(clock)
    log.add(EventKind.LEAVE, 1, "phone: \x1b]0;own\x07\x1b[2J\nsecond line")
    assert log.after(0, 1)[0][0].text == "phone: ]0;own[2J second line"


def test_years_of_work_can_still_be_told(overview: Overview, fleet: Fleet) -> None:
    fleet.manager.scheduler.counters.flops = 2**70
    answer = overview.answer(Question())
    assert encode(Reply(1, ok=True, data=answer))
    assert answer["totals"]["flops"] == 2.0**70


def test_graphs_are_computed_first_and_fetched_later() -> None:
    times = BlockTimes()
    times.sending(0.0)
    times.asked(1, 1.0)
    times.fetching(2, 1.0)
    times.fetching(3, 1.0)
    times.computed(1, 2.0, 3.5)
    times.answered(2, 0.0, 4.0)
    times.answered(3, 0.0, 6.0)
    times.computed(9, 1.0, 7.0)  # nobody asked for it
    assert times.spans() == [
        TimeSpan(Lane.RECEIVE, 0.0, 1.0), TimeSpan(Lane.COMPUTE, 1.0, 3.0),
        TimeSpan(Lane.SEND, 3.0, 4.0), TimeSpan(Lane.SEND, 4.0, 6.0),
    ]  # fmt: skip


def test_block_times_follow_the_order_of_runs() -> None:
    times = BlockTimes()
    times.sending(0.0)
    times.sending(0.5)
    times.asked(1, 1.0)
    times.sending(1.0)
    times.asked(2, 2.0)
    times.asked(3, 2.0)
    times.given_up((3,))
    times.answered(1, 2.0, 4.0)
    times.answered(2, 1.0, 5.0)
    times.answered(3, 1.0, 6.0)  # nobody waited for it
    assert times.spans() == [
        TimeSpan(Lane.RECEIVE, 0.0, 1.0), TimeSpan(Lane.COMPUTE, 1.0, 3.0),
        TimeSpan(Lane.SEND, 3.0, 4.0), TimeSpan(Lane.RECEIVE, 1.0, 2.0),
        TimeSpan(Lane.COMPUTE, 3.0, 4.0), TimeSpan(Lane.SEND, 4.0, 5.0),
    ]  # fmt: skip
    for run in range(10, 200):
        times.sending(float(run))
        times.asked(run, float(run))
        times.answered(run, 1e9, run + 0.5)  # it says that it computed for years
    spans = times.spans()
    assert len(spans) == 3 * KEPT
    assert all(span.start_s <= span.end_s for span in spans)


def _a_step() -> StepRecord:
    """Return a step's record with the longest numbers."""
    most = 2**53
    kinds = BytesByKind(**{each.name: most for each in dataclasses.fields(BytesByKind)})
    traffic = Traffic(kinds, kinds)
    numbers: dict[str, Any] = {
        each.name: most for each in dataclasses.fields(StepRecord) if each.type in ("int", "float")
    }
    return StepRecord(
        **numbers,
        clock="virtual",
        method="stages",
        traffic=traffic,
        saved=traffic,
        against_loss=1.5,
    )
