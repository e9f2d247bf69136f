"""Overviews of the server's activity, for the dashboard, `cleave status` and `/metrics`.

Unknown values are None. The size of an overview stays below the protocol's limit for headers,
regardless of the number of devices and records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import PurePath
from statistics import median
from typing import Any, Final, Protocol

from cleave.energy.account import Ps
from cleave.errors import CleaveError, UsageError
from cleave.planner.plan import Method
from cleave.protocol.device_counters import DeviceCounters
from cleave.scheduler.counters import FleetCounters, StepProgress, TrafficKind
from cleave.scheduler.sessions.session import DeviceState, EventKind, Session
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.runs import StagesOn
from cleave.scheduler.stages.state import StepView
from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.server.access import Clocks
from cleave.server.api.event_log import EventLog
from cleave.server.block_times import MOST_SPANS, Lane, TimeSpan
from cleave.server.jobs.energy import DeviceEnergy, EnergyMeter, EnergySums
from cleave.server.jobs.jobs import Jobs, Record, TrainingJob
from cleave.server.store.store import StoredJob
from profiles.device_profile import DeviceProfile

WINDOW_S: Final = 10.0
"""Length of the window over which rates are computed; longer if overviews are less frequent."""

_APART_S: Final = 0.5  # minimum time between two kept snapshots


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot of all counters at time `at_s` on a monotonic clock."""

    at_s: float
    # all sessions, including ended sessions
    fleet: DeviceCounters = field(default_factory=DeviceCounters)
    devices: Mapping[int, DeviceCounters] = field(default_factory=dict)  # by session number


class Rates:
    """Counter snapshots from about the last `window_s` seconds, used to compute rates.

    All counters were 0 at time `began_s`.
    """

    def __init__(self, began_s: float, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._looks = deque([Look(began_s)])

    def since(self, now: Look) -> Look:
        """Record the snapshot `now`, and return the earlier snapshot to compare it with."""
        while len(self._looks) > 1 and now.at_s - self._looks[0].at_s > self._window_s:
            self._looks.popleft()
        earlier = self._looks[0]
        if now.at_s - self._looks[-1].at_s >= _APART_S:
            self._looks.append(now)
        return earlier


Answer = dict[str, Any]

DEVICE_COLUMNS: Final = (
    "device", "identity", "name", "kind", "state", "reason", "reputation", "blocks", "compute_s",
    "down_bytes", "up_bytes", "downlink_bytes_per_s", "uplink_bytes_per_s", "flops_per_s",
    "profile_downlink_bytes_per_s", "profile_uplink_bytes_per_s", "profile_flops_per_s",
    "round_trip_s", "energy_j", "energy_basis", "failures", "own",
)  # fmt: skip
EVENT_COLUMNS: Final = ("id", "time_s", "kind", "device", "text")

# Limits on the parts of an overview. Their sum is below the protocol's MAX_HEADER_BYTES.
MAX_DEVICES_BYTES: Final = 400_000
MAX_RECORDS_BYTES: Final = 350_000
MAX_RECORDS: Final = 500
MAX_JOBS: Final = 30
MAX_TILES: Final = 4000
MAX_EVENTS: Final = 100
MAX_STREAMS: Final = 24
STREAM_S: Final = 300.0  # maximum length in seconds of the device activity that a stream covers
STEP_BYTES: Final = 1000  # maximum size of a training step's record without devices, in bytes
_ROW_BYTES: Final = 173  # maximum size of a device's row without its name and reason
_FORECAST_STEPS: Final = 9  # latest steps from which the use of data is forecast
_NAME: Final = DEVICE_COLUMNS.index("name")
_REASON: Final = DEVICE_COLUMNS.index("reason")
_MAX_REASON: Final = 120
_MAX_JOB_NAME: Final = 50


class Live(Protocol):
    """Interface for the runtime that an overview describes. `LiveRuntime` implements it."""

    manager: SessionManager

    def counters(self) -> FleetCounters: ...
    def progress(self) -> StepProgress | None: ...
    def timeline(self, session: int) -> list[TimeSpan]: ...


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Facts about a server that stay constant while the server runs."""

    version: str = ""
    name: str = ""  # name of the server's machine
    verify: str = ""  # in the format of `cleave serve --verify`
    egress_bytes_per_s: float | None = None  # of the network card; None if unknown
    ingress_bytes_per_s: float | None = None
    title: str = ""  # person or project that asks for devices, shown to device owners
    about: str = ""  # what the devices train, shown to device owners


class WorkKind(StrEnum):
    """A kind of work that a job gives to devices. Owners' pages see the enum values."""

    TILES = "tiles"  # products of matrices, for all devices
    LAYERS = "layers"  # whole layers, for the devices of `--stages-on` that can run graphs


@dataclass(frozen=True, slots=True)
class Training:
    """What owners of devices are told about the training.

    Attributes:
        state: state of the running or else the latest job, a value of `JobState`; empty without
            jobs.
        devices: number of connected devices; None if other servers have devices, too.
        bytes_per_device_s: data that one of them moves per second of training, in both directions;
            0 if the server trains alone; None if unknown.
        usual_bytes_per_device_s: the last such amount that was not 0; None if unknown.
        work: kinds of work that the running job gives to devices; None if unknown.
        settled: whether the job's settings exclude other kinds of work, so that a device that
            cannot do this work need not connect.
        layers_on: which devices may train layers, a value of `cleave serve --stages-on`.
    """

    state: str = ""
    devices: int | None = 0
    bytes_per_device_s: float | None = None
    usual_bytes_per_device_s: float | None = None
    work: tuple[WorkKind, ...] | None = None
    settled: bool = False
    layers_on: str = StagesOn.OWN.value


@dataclass(frozen=True, slots=True)
class Question:
    """A client's request for an overview. The fields select what the overview includes."""

    after_event: int = 0  # id of the last event that the client already has
    job: str = ""  # id of the job to include; empty for the running or else the latest job
    after_record: int = 0  # number of the job's records that the client already has
    device: int = 0  # session number of the device whose timeline to include; 0 for none
    stream: bool = False  # whether to include the recent activity of all devices

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Question:
        """Create a question from request arguments. Raise UsageError if an argument is invalid."""
        job, stream = arguments.get("job", ""), arguments.get("stream", False)
        numbers = [arguments.get(name, 0) for name in ("after_event", "after_record", "device")]
        if not isinstance(job, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise UsageError(
                "`after_event`, `after_record` and `device` must be counts, and `job` a string"
            )
        if not isinstance(stream, bool):
            raise UsageError("`stream` must be a bool")
        return cls(numbers[0], job, numbers[1], numbers[2], stream)


class Overview:
    """Builds overviews of a running server. Use it in the server's event loop.

    Args:
        profiles: device profiles, by the profile name that devices state.
        clocks: wall clock and steady clock; the fleet must use the same steady clock.
        power: returns the energy that the server's machine has used; None if unknown.
        trouble: returns the store's current error; empty if the store works.

    Attributes:
        events: the event log. Any thread may add events of jobs and of other servers.
        live, jobs: the server's runtime and its queue of jobs; None until the server listens.
        combine: returns this server's overview with the data of other servers added.
        energy_elsewhere: returns the energy that the devices of other servers have used.
    """

    def __init__(
        self,
        facts: ServerFacts,
        events: EventLog,
        profiles: Mapping[str, DeviceProfile],
        energy: EnergyMeter,
        clocks: Clocks,
        power: Callable[[], Ps] | None = None,
        trouble: Callable[[], str] = lambda: "",
    ) -> None:
        self._power = power
        self._trouble = trouble
        self.live: Live | None = None
        self.jobs: Jobs | None = None
        self.combine: Callable[[Answer, Question], Answer] = _alone
        self.energy_elsewhere: Callable[[], Sequence[EnergySums]] = tuple
        self._facts = facts
        self.events = events
        self._profiles = profiles
        self._energy = energy
        self._clocks = clocks
        self._started_s = clocks.wall()
        self._rates = Rates(clocks.steady())
        self._wrong = 0
        self._joined = 0
        self._left = 0
        self._present: set[int] = set()
        self._usual_bytes_per_device_s: float | None = None  # as in `Training`

    def happened(self, kind: EventKind, session: Session | None, text: str) -> None:
        """Count a fleet event and add it to the event log. This method is an `EventListener`."""
        match kind:
            case EventKind.JOIN if session is not None:
                self._joined += 1
                self._present.add(session.id)
                text = f"{session.name}{f' ({text})' if text else ''}"
            case EventKind.LEAVE | EventKind.QUARANTINE if session is not None:
                if session.id in self._present:  # otherwise the device was refused during its probe
                    self._present.remove(session.id)
                    self._left += 1
                    self._energy.ended(session, self._clocks.steady())
                text = f"{session.name}: {text}" if text else session.name
            case EventKind.WRONG:
                self._wrong += 1
                text = f"{session.name}: {text}" if session is not None else text
            case EventKind.OVERDUE | EventKind.ASIDE if session is not None:
                text = f"{session.name}: {text}"
        self.events.add(kind, session.id if session is not None else 0, text)

    def answer(self, question: Question) -> Answer:
        """Create an overview with the requested parts, in the format that the protocol defines."""
        live = self.live
        if live is None:
            raise CleaveError("the server is still starting; try again")
        now_s = self._clocks.steady()
        manager, sessions = live.manager, _joined(live)
        used = [self._energy.used(session, now_s) for session in sessions]
        done, counters = manager.scheduler.counters, live.counters()
        blocks, flops = done.results + manager.stages.results, done.flops + manager.stages.flops
        now = Look(
            now_s,
            DeviceCounters(blocks, flops, counters.downlink_bytes, counters.uplink_bytes),
            {session.id: replace(session.counters) for session in sessions},
        )
        before = self._rates.since(now)
        answer = {
            "server": self._server(),
            "card": {
                "egress_bytes_per_s": self._facts.egress_bytes_per_s,
                "ingress_bytes_per_s": self._facts.ingress_bytes_per_s,
            },
            "totals": {
                "blocks": blocks,
                "flops": float(flops),  # msgpack integers are below 2^64
                "down_bytes": counters.downlink_bytes,
                "up_bytes": counters.uplink_bytes,
                "reissued": done.reissued + done.speculative + manager.stages.repeated,
                "wrong": self._wrong,
                "joined": self._joined,
                "left": self._left,
            },
            "traffic": asdict(counters.traffic),
            "saved": asdict(counters.saved),
            "rates": _fleet_rates(before, now),
            "job": self._job(question, live.progress()),
            "jobs": self._job_rows(),
            "devices": self._devices(live.manager, sessions, used, before, now),
            "plan": _plan(manager.scheduler, now_s),
            "stages": stages_answer(manager.stages.view()),
            "timeline": self._timeline(live, question.device, now_s),
            "stream": _stream(live, sessions, now_s) if question.stream else None,
            "events": self._events_after(question.after_event),
            "energy": self._energy.answer(
                sum(self.energy_elsewhere(), self._energy.sums(used)),
                self._power() if self._power else None,
            ),
            "gemms": [
                [job.id, job.title, job.predicted_s, job.took_s]
                for job in manager.scheduler.finished
            ],
        }
        return self.combine(answer, question)

    def training(self) -> Training:
        """Return what owners of devices are told about the current or latest job."""
        devices = None
        if self.combine is _alone:
            devices = len(_joined(self.live)) if self.live else 0
        any_device = self.live is not None and self.live.manager.stages.any_device
        told = Training(
            devices=devices,
            usual_bytes_per_device_s=self._usual_bytes_per_device_s,
            layers_on=(StagesOn.ANY if any_device else StagesOn.OWN).value,
        )
        job = self._wanted("")
        if job is None or not job.is_running:
            return replace(told, state=job.state.value if job is not None else "")
        per_s = _bytes_per_s(job.records)
        each = per_s / devices if per_s is not None and devices else None
        self._usual_bytes_per_device_s = each or self._usual_bytes_per_device_s
        work, settled = _work(job)
        return replace(
            told,
            state=job.state.value,
            bytes_per_device_s=each,
            usual_bytes_per_device_s=self._usual_bytes_per_device_s,
            work=work,
            settled=settled,
        )

    def energy(self) -> EnergySums:
        """Return the energy totals of this server's devices, including ended sessions."""
        now_s, sessions = self._clocks.steady(), _joined(self.live) if self.live else []
        return self._energy.sums(self._energy.used(session, now_s) for session in sessions)

    def _server(self) -> Answer:
        facts = self._facts
        return {
            "version": facts.version,
            "started_s": self._started_s,
            "now_s": self._clocks.wall(),
            "verify": facts.verify,
            "name": facts.name,
            "store": self._trouble(),
            "servers": [],
        }

    def _job(self, question: Question, progress: StepProgress | None) -> Answer | None:
        job = self._wanted(question.job)
        if job is None:
            return None
        records: list[Mapping[str, Any]] = []
        room = MAX_RECORDS_BYTES
        first = min(question.after_record, len(job.records))
        for record in job.records[first : first + MAX_RECORDS]:
            plain = record.get("event") in ("step", "eval") and not record.get("devices")
            room -= STEP_BYTES if plain else len(repr(record).encode())
            if room < 0 and records:
                break
            records.append(record)
        return {
            "job": job.id,
            "state": job.state.value,
            "waits": job.waits,
            "model": job.model,
            "steps": job.steps,
            "step": job.step,
            "started_s": job.started_s,
            "first_record": first,
            "records": records,
            "next_record": first + len(records),
            "tasks": [progress.done, progress.of] if progress and job.is_running else None,
            "last_step": _last_step(job),
        }

    def _job_rows(self) -> list[Answer]:
        """Describe the latest jobs: ended jobs first, then queued jobs in their order."""
        if self.jobs is None:
            return []
        jobs = sorted(self.jobs.all(), key=lambda job: job.place if job.is_due else 0)
        rows = [_earlier_row(job) for job in self.jobs.earlier()]
        return (rows + [_job_row(job) for job in jobs])[-MAX_JOBS:]

    def _wanted(self, id: str) -> TrainingJob | None:
        """Return job `id`.

        If `id` is empty, return the running job, or else the last started job.
        """
        if self.jobs is None:
            return None
        if id:
            return self.jobs.find(id)
        latest = max(
            self.jobs.all(), key=lambda job: (job.started_s or 0.0, job.number), default=None
        )
        return self.jobs.running or latest

    def _devices(
        self,
        manager: SessionManager,
        sessions: list[Session],
        used: list[DeviceEnergy],
        before: Look,
        now: Look,
    ) -> Answer:
        rows, room = [], MAX_DEVICES_BYTES
        for session, energy in zip(sessions, used, strict=True):
            row = self._row(manager, session, energy, before, now)
            room -= row_bytes(row)
            if room < 0:
                break
            rows.append(row)
        by = Counter((self._kind(session), manager.state(session).value) for session in sessions)
        return {
            "columns": list(DEVICE_COLUMNS),
            "rows": rows,
            "total": len(sessions),
            "by": [[kind, state, count] for (kind, state), count in by.items()],
        }

    def _kind(self, session: Session) -> str | None:
        """Return a device's kind, from its profile or, without a profile, from its `hello`."""
        profile = self._profiles.get(session.profile)
        kind = profile.kind if profile is not None else session.kind
        return kind.value if kind is not None else None

    def _row(
        self,
        manager: SessionManager,
        session: Session,
        energy: DeviceEnergy,
        before: Look,
        now: Look,
    ) -> list[object]:
        profile, rates = self._profiles.get(session.profile), session.rates
        did = now.devices[session.id]
        earlier = before.devices.get(session.id, DeviceCounters())
        recent = did - earlier
        # The window starts at the earlier snapshot or, for a newer device, when its session began.
        window_s = now.at_s - max(before.at_s, session.opened_s)
        down_per_s = up_per_s = None
        if window_s > 0:
            down_per_s = recent.downlink_bytes / window_s
            up_per_s = recent.uplink_bytes / window_s
        worked = recent if recent.compute_s > 0 else did  # if idle: the whole session
        flops_per_s = worked.flops / worked.compute_s if worked.compute_s > 0 else None
        stated = profile.flops_per_s if profile is not None else rates and rates.flops_per_s
        return [
            session.id,
            str(session.identity) if session.identity is not None else None,
            session.name,
            self._kind(session),
            manager.state(session).value,
            session.reason[:_MAX_REASON],
            _reputation(session, checked=manager.verify),
            did.blocks,
            did.compute_s,
            did.downlink_bytes,
            did.uplink_bytes,
            down_per_s,
            up_per_s,
            flops_per_s,
            rates.downlink_bytes_per_s if rates is not None else None,
            rates.uplink_bytes_per_s if rates is not None else None,
            stated,
            2 * rates.latency_s if rates is not None else None,
            energy.energy_j,
            energy.basis.value,
            did.failures,
            session.own,
        ]

    def _timeline(self, live: Live, device: int, now_s: float) -> Answer | None:
        if device not in live.manager.sessions:
            return None
        wall_s = self._clocks.wall() - now_s
        return {
            "device": device,
            "spans": [
                [lane.value, start_s + wall_s, end_s + wall_s]
                for lane, start_s, end_s in live.timeline(device)
            ],
        }

    def _events_after(self, after: int) -> Answer:
        events, last = self.events.after(after, MAX_EVENTS)
        return {
            "columns": list(EVENT_COLUMNS),
            "rows": [
                [event.id, event.time_s, event.kind.value, event.device, event.text]
                for event in events
            ],
            "last": last,
        }


def row_bytes(row: Sequence[object]) -> int:
    """Return an upper bound on the encoded size of a device's row, in bytes."""
    return _ROW_BYTES + len(f"{row[_NAME]}{row[_REASON]}".encode())


def _stream(live: Live, sessions: Sequence[Session], now_s: float) -> Answer:
    """Return the devices' recent activities. Times are in milliseconds."""
    lanes = list(Lane)
    timelines = {session.id: live.timeline(session.id) for session in sessions}
    window_s = _known_s([spans for spans in timelines.values() if spans], now_s)
    rows = []
    for device, timeline in timelines.items():
        spans = [
            [lanes.index(lane), round(1e3 * (now_s - start_s)), round(1e3 * (end_s - start_s))]
            for lane, start_s, end_s in timeline
            if end_s > now_s - window_s
        ]
        if spans:
            rows.append([device, spans])
    shown = rows[:MAX_STREAMS]
    return {"window_s": window_s, "devices": shown, "hidden": len(rows) - len(shown)}


def _known_s(timelines: Sequence[Sequence[TimeSpan]], now_s: float) -> float:
    """Return the length, in seconds, of the period up to now for which all activities are known."""
    began_s = [now_s - timeline[0].start_s for timeline in timelines]
    dropped = (
        age_s
        for age_s, timeline in zip(began_s, timelines, strict=True)
        if len(timeline) >= MOST_SPANS  # earlier activities may have been dropped
    )
    return min(STREAM_S, *dropped, max(began_s, default=STREAM_S))


def _joined(live: Live) -> list[Session]:
    """Return the sessions of the devices whose `hello` the server has accepted."""
    sessions = live.manager.sessions.values()
    return [session for session in sessions if session.state is not DeviceState.JOINING]


def _job_row(job: TrainingJob) -> Answer:
    last = next((r for r in reversed(job.records) if r.get("event") == "step"), {})
    name = str(job.arguments.get("name") or PurePath(job.run_folder).name)
    return {
        "job": job.id,
        "name": name[:_MAX_JOB_NAME],
        "model": job.model[:_MAX_JOB_NAME],
        "state": job.state.value,
        "steps": job.steps,
        "step": job.step,
        "loss": last.get("loss"),
        "earlier": False,
    }


def _earlier_row(job: StoredJob) -> Answer:
    return {
        "job": f"job-{job.number}",
        "name": PurePath(job.run_folder).name[:_MAX_JOB_NAME],
        "model": job.model[:_MAX_JOB_NAME],
        "state": job.state,
        "steps": job.steps_in_all or None,
        "step": job.steps,
        "loss": job.loss,
        "earlier": True,
    }


def _alone(answer: Answer, question: Question) -> Answer:
    """Return the overview of a server that trains without other servers."""
    return answer


def _bytes_per_s(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the data that all devices move per second in the latest steps; None if unknown.

    The result is the median, because a step that waits for its first device takes long. It omits
    what does not belong to the training, such as the tests of new devices.
    """
    steps: list[float] = []
    for record in reversed(records):
        if record.get("event") == "step" and record["wall_s"] > 0:
            kinds = [*record["traffic"]["down"].items(), *record["traffic"]["up"].items()]
            moved = sum(nbytes for kind, nbytes in kinds if kind != TrafficKind.OTHER)
            steps.append(moved / record["wall_s"])
        if len(steps) == _FORECAST_STEPS:
            break
    return median(steps) if steps else None


def _work(job: TrainingJob) -> tuple[tuple[WorkKind, ...] | None, bool]:
    """Return the work that a running job gives to devices, None if unknown, and whether for good.

    The job's method decides or, with `auto`, the method of the latest step.
    """
    step = _last_step(job) or {}
    settled = job.method in (Method.STAGES.value, Method.DILOCO.value, Method.LOCAL.value)
    method = step.get("method") if job.method == Method.AUTO.value else job.method
    if not method:
        return None, False
    # Layers that cannot become graphs stay on the server, which may use tiles for their products.
    tiles = method == Method.TILES.value or step.get("tiles") or step.get("local_gemms")
    layers = method in (Method.STAGES.value, Method.DILOCO.value)
    work = [WorkKind.TILES] * bool(tiles) + [WorkKind.LAYERS] * layers
    return tuple(work), settled


def _last_step(job: TrainingJob) -> Record | None:
    return next((r for r in reversed(job.records) if r.get("event") == "step"), None)


def _fleet_rates(before: Look, now: Look) -> Answer:
    window_s = now.at_s - before.at_s
    recent = now.fleet - before.fleet
    counts = {
        "blocks_per_s": recent.blocks,
        "flops_per_s": recent.flops,
        "egress_bytes_per_s": recent.downlink_bytes,
        "ingress_bytes_per_s": recent.uplink_bytes,
    }
    if window_s <= 0:
        return {"window_s": None, **dict.fromkeys(counts)}
    return {"window_s": window_s, **{name: n / window_s for name, n in counts.items()}}


def _reputation(session: Session, *, checked: bool) -> str:
    reputation = session.reputation
    if reputation.wrong:
        return f"{reputation.wrong} wrong"
    if not checked:
        return "unchecked"
    return "good" if reputation.known else "new"


def _plan(scheduler: Scheduler, now_s: float) -> Answer | None:
    """Return the plan of the oldest GEMM in flight; None if no GEMM is in flight."""
    job, begun_s = scheduler.oldest or (None, 0.0)
    if not isinstance(job, GemmJob):
        return None
    tiles = []
    for progress in list(job.tiles.values())[:MAX_TILES]:
        box = progress.tile
        bounds = [edge for side in (box.m, box.n, box.k) for edge in (side.start, side.stop)]
        tiles.append([progress.device, *bounds, progress.blocks, progress.done])
    return {
        "name": job.title,
        "m": job.gemm.m,
        "n": job.gemm.n,
        "k": job.gemm.k,
        "predicted_s": job.expected_s,
        "elapsed_s": now_s - begun_s,
        "generation": job.id,
        "tiles": tiles,
    }


MAX_HOLDERS: Final = 2000  # maximum number of stage holders that an overview lists, over all stages


def stages_answer(view: StepView | None) -> dict[str, Any] | None:
    """Return the state of a step by stages in the protocol's format; None if `view` is None."""
    if view is None:
        return None
    stages, room = [], MAX_HOLDERS
    for stage in view.stages:
        answer = {
            "first": stage.first,
            "stop": stage.stop,
            "loss": stage.loss,
            "slice": None if stage.slice is None else [stage.slice.number, stage.slice.of],
            "forward": stage.forward,
            "backward": stage.backward,
            "landed": stage.landed,
            "devices": len(stage.holders),
            "holders": [
                [holder.device, holder.forward, holder.backward, holder.summed, holder.coming]
                for holder in stage.holders[:room]
            ],
        }
        stages.append(answer)
        room = max(0, room - len(stage.holders))
    return {
        "batches": view.batches,
        "ended": view.ended,
        "repeated": view.repeated,
        "logged": view.logged,
        "stages": stages,
    }
