"""The PS's core, which connects device sessions with GEMM jobs, steps by stages and scheduling.

The module has no I/O and no clock. It receives messages with their times and returns instructions,
so live and simulated runtimes run the same code. Helpers decide on joining, trials, results and
pace. Only this module passes events to the scheduler and ends sessions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.errors import ProtocolError
from cleave.planner.coding import CodingPolicy, coded_ratio
from cleave.planner.plan import PsRates
from cleave.protocol import features, limits, messages
from cleave.protocol.messages import ByeCode, ErrorCode, Feature, Message, Op
from cleave.scheduler import events
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.instructions import (
    Check,
    Close,
    Decision,
    Dismiss,
    Drained,
    ForRuntime,
    Note,
    Overdue,
    Refuse,
    Send,
    SendArray,
    SendCancel,
    SendDrop,
    SendRun,
    SendStage,
    Stuck,
    TellStep,
)
from cleave.scheduler.rounds.rounds import LocalRounds
from cleave.scheduler.rounds.work import RoundWork
from cleave.scheduler.sessions.admission import Authenticator, Refusal, SharedSecretAuth
from cleave.scheduler.sessions.device_history import DeviceHistory
from cleave.scheduler.sessions.joining import Joining, bounded, superseded
from cleave.scheduler.sessions.reputation import Wrong
from cleave.scheduler.sessions.result_judging import ResultJudge, Verification, wrong_form
from cleave.scheduler.sessions.session import DeviceState, Session
from cleave.scheduler.sessions.trials import Trials, common_delay_of, judge_paces
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import StepFailed, StepResult
from cleave.scheduler.stages.resident import KeptState
from cleave.scheduler.stages.runs import StageRuns, StagesOn
from cleave.scheduler.stages.work import StageOrder, StepWork
from cleave.scheduler.tiles.gemm_job import GemmJob
from cleave.scheduler.tiles.scheduler import Scheduler
from cleave.scheduler.tiles.tasks import Task
from cleave.verify import Judgement

# the reason in the `bye` to a device that moves to another server of the same training job
MOVED: Final = "another server needs it more"
_MOST_NAMED: Final = 3  # maximum number of devices named in one message
STUCK_S: Final = 60.0  # minimum seconds between two reports that a job is stuck


class SessionManager:
    """The PS's core, which turns messages into scheduler events and instructions into messages.

    Methods that handle an event return the instructions that the runtime must carry out.

    Args:
        credential: the credential that a device's `hello` must contain; empty if devices need no
            credential. Ignored if `auth` is given.
        verify: which results are verified before use: a value of `--verify`, or True for `auto`.
        crossed: whether results cross a process boundary. If not, the mode `auto` verifies no
            results.
        rng: secret random generator for the selection of results to verify and for probes.
        max_devices: maximum number of connected devices; None if unlimited.
        observe: whether plans use each device's measured pace (`cleave.scheduler.sessions.pace`).
        stages_on: which devices may train whole layers: a value of `--stages-on`.
        coding: policy that selects the links on which payloads are compressed: a value of
            `--coding`.
        card: rates of the server's network card, which all devices share; None if unlimited.
        expected_devices: minimum number of devices that are assumed to share the card.
        kept: records of the trained state that devices had when an earlier PS process ended.
    """

    def __init__(
        self,
        credential: str = "",
        *,
        verify: Verification | str | bool = False,
        crossed: bool = True,
        rng: random.Random | None = None,
        auth: Authenticator | None = None,
        max_devices: int | None = None,
        observe: bool = True,
        stages_on: StagesOn | str = StagesOn.OWN,
        coding: CodingPolicy | str = CodingPolicy.OFF,
        card: PsRates | None = None,
        expected_devices: int = 1,
        kept: Sequence[KeptState] = (),
    ) -> None:
        self.scheduler = Scheduler()
        self.sessions: dict[int, Session] = {}
        any_device = StagesOn.of(stages_on) is StagesOn.ANY
        self.stages = StageRuns(self.sessions, self.scheduler.names, any_device=any_device)
        self.stages.holders.expect(kept)
        self.rounds = LocalRounds(self.sessions, self.scheduler.names)
        self.auth = auth if auth is not None else SharedSecretAuth(credential)
        self.verification = Verification.of(verify)
        self.verify = self.verification.active(crossed)
        self.observe = observe
        self.history = DeviceHistory(self.auth)
        self.epoch = 0
        self._rng = rng or random.SystemRandom()
        self._joining = Joining(
            self.auth,
            self.history,
            self._rng,
            max_devices=max_devices,
            observe=observe,
            coding=CodingPolicy.of(coding),
            card=card,
            expected=expected_devices,
        )
        self._trials = Trials(self.history, self._rng, observe=observe)
        self._judge = ResultJudge(self.auth, self.history)
        self._buffers: dict[int, Buffer] = {}
        self._regions = WeakValueDictionary[int, Buffer]()  # key: array; weak values
        self._stuck_s: float | None = None  # time when a stuck job was last reported

    @property
    def ready_devices(self) -> int:
        """Return the number of devices that are available for tasks."""
        return len(self.scheduler.devices)

    def why_aside(self) -> str:
        """Return why devices were set aside, or an empty string if any device is available."""
        if self.ready_devices:
            return ""
        aside = [s for s in list(self.sessions.values()) if s.setbacks.aside]
        return "; ".join(f"{s.name} is set aside: {s.setbacks.text}" for s in aside[:_MOST_NAMED])

    def state(self, session: Session) -> DeviceState:
        """Return the current state of a device session, including overdue, busy and set aside."""
        if session.state is DeviceState.READY and session.setbacks.aside:
            return DeviceState.ASIDE
        if session.state is DeviceState.READY and self.scheduler.overdue(session.id):
            return DeviceState.OVERDUE
        if session.state is DeviceState.READY and self._busy(session):
            return DeviceState.BUSY
        return session.state

    def _busy(self, session: Session) -> bool:
        return any(part.busy(session.id) for part in (self.stages, self.rounds, self.scheduler))

    # --- sessions ---

    def opened(self, session: int, now_s: float, address: str = "") -> None:
        """Create a session for a new connection. `address` is empty without a network."""
        self.sessions[session] = Session(session, now_s, address, heard_s=now_s)

    def received(
        self, session_id: int, message: Message, now_s: float, nbytes: int = 0
    ) -> list[ForRuntime]:
        """Handle a message from a device. A protocol error ends only the session of that device."""
        session = self.sessions.get(session_id)
        if session is None:
            return []
        session.heard_s = now_s
        joining = session.state is DeviceState.JOINING
        try:
            if joining:
                return self._hello(session, message, now_s)
            if too_much := session.too_much(message, nbytes, now_s):
                return self.exceeded(session_id, too_much, now_s)
            features.require(message, session.features)
            return self._carry_out(self._from_device(session, message, now_s), now_s)
        except ProtocolError as error:
            if joining:
                self.auth.failed(session.address)
            return self.refuse(session_id, ErrorCode.PROTOCOL, str(error), now_s)

    def exceeded(self, session_id: int, reason: str, now_s: float) -> list[ForRuntime]:
        """End the session of a device that sent too much. The device must wait before rejoining."""
        if (session := self.sessions.get(session_id)) is not None:
            self._joining.rest(session, now_s)
        return self.refuse(session_id, ErrorCode.LIMIT, reason, now_s, retry_after_s=limits.REST_S)

    def awaited_bytes(self, session_id: int) -> tuple[int, int]:
        """Return a session's `Session.awaited_bytes`, or zeros if the session has ended."""
        session = self.sessions.get(session_id)
        return session.awaited_bytes if session is not None else (0, 0)

    def refuse(
        self,
        session_id: int,
        code: ErrorCode,
        reason: str,
        now_s: float,
        *,
        retry_after_s: float = 0.0,
    ) -> list[ForRuntime]:
        """End a session with an error message. Do nothing if the session has already ended.

        Args:
            retry_after_s: seconds after which the device may retry; 0 if unknown.
        """
        if session_id not in self.sessions:
            return []
        session = self.sessions[session_id]
        if code is ErrorCode.QUARANTINED:
            session.arrays = ""  # the device's arrays are no longer trusted
            if session.identity is not None:
                self.auth.quarantined(session.identity, reason)
        versions = (limits.VERSION,) if code is ErrorCode.VERSION else ()
        error = messages.Error(code, reason, retry_after_s, versions)
        instructions: list[ForRuntime] = [Send(session_id, error), Close(session_id)]
        lost = code in (ErrorCode.LIMIT, ErrorCode.PROTOCOL)  # other codes: ended by the PS
        # A device that violated the protocol does not keep its arrays.
        returns = code in (ErrorCode.LIMIT, ErrorCode.DUPLICATE)
        return instructions + self.closed(session_id, reason, now_s, lost=lost, returns=returns)

    def refuse_identity(
        self, identity: int, code: ErrorCode, reason: str, now_s: float
    ) -> list[ForRuntime]:
        """End all sessions of the device with this identity, with an error message."""
        mine = [s.id for s in self.sessions.values() if s.identity == identity]
        return [one for id in mine for one in self.refuse(id, code, reason, now_s)]

    def mark_own(self, identity: int, own: bool, now_s: float) -> list[ForRuntime]:
        """Record whether the device with this identity belongs to the operator."""
        done: list[ForRuntime] = []
        for session in list(self.sessions.values()):
            if session.identity == identity and session.own != own:
                session.own = own
                done += self._carry_out(self.stages.marked(session.id), now_s)
        return done

    def closed(
        self,
        session_id: int,
        reason: str,
        now_s: float,
        *,
        lost: bool = True,
        returns: bool | None = None,
    ) -> list[ForRuntime]:
        """Record the end of a session and reassign the device's unfinished tasks.

        Args:
            lost: whether the session ended unintentionally.
            returns: whether the device may return with its arrays; by default, the value of `lost`.
        """
        returns = lost if returns is None else returns
        session = self.sessions.pop(session_id, None)
        if session is None or session.state in (DeviceState.JOINING, DeviceState.LOST):
            return []
        self.history.depart(session, reason, now_s, lost=lost)
        self._joining.left(session, now_s)
        kept: list[ForRuntime] = []
        if returns and session.arrays and session.state is not DeviceState.DRAINING:
            kept = self._carry_out(self.stages.keep(session, now_s), now_s)
        probing = session.state is DeviceState.PROBING
        session.state, session.reason = DeviceState.LOST, reason
        return kept if probing else kept + self._do(events.DeviceLost(session_id), now_s)

    def expire(self, now_s: float) -> list[ForRuntime]:
        """Reassign the stages of devices that have not returned in time."""
        return self._carry_out(self.stages.expire(now_s), now_s)

    def tick(self, now_s: float) -> list[ForRuntime]:
        """End silent sessions, start due trials, update pace estimates and report contributions."""
        instructions: list[ForRuntime] = []
        for session in list(self.sessions.values()):
            joining = session.state is DeviceState.JOINING
            limit_s = limits.HANDSHAKE_S if joining else limits.SILENCE_S
            since_s = now_s - (session.opened_s if joining else session.heard_s)
            if since_s > limit_s:
                what = "sent no hello" if joining else "was silent"
                reason = f"the device {what} for {since_s:.0f} s"
                instructions += self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
            elif session.state is DeviceState.READY:
                busy, alone = self._busy(session), self.ready_devices <= 1
                due = self._trials.tick(session, now_s, busy=busy, alone=alone)
                instructions += self._carry_out(due, now_s)
        if self.observe:
            judged = judge_paces(self.sessions.values(), self.history, now_s)
            instructions += self._carry_out(judged, now_s)
        self.history.tick(self.sessions.values(), now_s)
        self._joining.tick(now_s)
        instructions += self._carry_out(self.rounds.tick(now_s), now_s)
        return instructions + self.expire(now_s) + self._do(events.Tick(), now_s)

    def credit(self, now_s: float) -> None:
        """Report the contributions of all connected devices to the authenticator."""
        self.history.credit(self.sessions.values(), now_s)

    def _hello(self, session: Session, message: Message, now_s: float) -> list[ForRuntime]:
        if not isinstance(message, messages.Hello):
            raise ProtocolError(f"the first message must be hello, not {message.TYPE}")
        admission = self._joining.admit(message, session.address, len(self.sessions), now_s)
        if isinstance(admission, Refusal):
            code, reason, retry_s = admission.code, admission.reason, admission.retry_after_s
            return self.refuse(session.id, code, reason, now_s, retry_after_s=retry_s)
        # End earlier sessions first, so that the new session can reuse their link rates.
        ended = self._carry_out(superseded(admission, self.sessions.values()), now_s)
        for before in [s for s in self.sessions.values() if s.arrays and s.arrays == message.holds]:
            reason = "the device connected again"
            ended += self.refuse(before.id, ErrorCode.DUPLICATE, reason, now_s)
        returns = self.stages.holders.awaits(message.holds)
        begun = self._joining.begin(
            session, message, admission, now_s, verify=self.verify, returns=returns
        )
        return ended + self._carry_out(begun, now_s)

    def _from_device(self, session: Session, message: Message, now_s: float) -> Sequence[Decision]:
        trial = session.trial
        match message:
            case messages.Result() if session.probe is not None:
                return self._joining.probed(session, session.probe, message, now_s)
            case messages.Result() if trial is not None and trial.probe.awaits(message.id):
                common_s = common_delay_of(self.sessions.values())
                return self._trials.answered(session, trial, message, common_s, now_s)
            case messages.Result():
                return self._result(session, message, now_s)
            case messages.TaskError() if session.probe is not None:
                return self._joining.probe_run_failed(session, session.probe, message, now_s)
            case messages.TaskError(run, reason) if trial is not None and trial.probe.awaits(run):
                return self._trials.trial_run_failed(session, trial, run, reason, now_s)
            case messages.Computed(run) if trial is not None and trial.probe.awaits(run):
                raise ProtocolError(f"run {run} is part of a probe, so its answer must be a result")
            case messages.Computed() if session.probe is None:
                return self._result(session, message, now_s)
            case messages.TaskError():
                task = session.expected.pop(message.id, None)
                if task is None:
                    return [events.LateAnswer(session.id)]
                return self._run_failed(session, task, message.id, message.reason, now_s)
            case messages.Held() if session.returning:
                session.returning, session.held = False, frozenset(message.ids)
                ready = session.state is DeviceState.READY
                return self.stages.returned(session) if ready else []
            case messages.Heartbeat():
                overdue = self.scheduler.overdue(session.id)
                return [events.Alive(session.id)] if overdue else []
            case messages.Telemetry():
                session.telemetry.update(message.values)
                if len(session.telemetry) > limits.MAX_TELEMETRY:
                    raise ProtocolError(
                        f"a device may report at most {limits.MAX_TELEMETRY} named values"
                    )
                return []
            case messages.Drain():
                if session.state is DeviceState.PROBING:
                    return [Dismiss(session.id, ByeCode.DRAINED)]
                session.state, session.reason = DeviceState.DRAINING, "its owner wants it back"
                return [events.DeviceDraining(session.id)]
            case messages.Bye():
                left = self.closed(session.id, message.reason, now_s, lost=False)
                return [Close(session.id), *left]
            case messages.Error():
                reason = message.message
                ended = self.closed(session.id, reason, now_s, returns=False)
                return [Close(session.id), *ended]
            case _:
                raise ProtocolError(f"a server does not expect a {message.TYPE} message here")

    def _result(
        self, session: Session, message: messages.Result | messages.Computed, now_s: float
    ) -> Sequence[Decision]:
        task = session.expected.pop(message.id, None)
        if task is None:
            # While a result is being verified, its run is still in flight in the scheduler. A
            # second answer must not replace the verified one, so its payload is dropped.
            return [events.LateAnswer(session.id)]
        if reason := wrong_form(message, task):
            self._judge.was_wrong(session, Wrong.FORM, reason)
            failed = self._run_failed(session, task, message.id, reason, now_s)
            return [*failed, *self._judge.quarantine_if_due(session, reason)]
        session.counters.flops += task.flops
        session.counters.compute_s += min(message.compute_s, now_s - session.opened_s)
        if session.setbacks.did():
            self.history.remember(session)
        session.counters.blocks += 1
        if isinstance(task.detail, StageOrder):
            if self.rounds.owns(task.detail):
                return self.rounds.answered(task.detail, message, now_s)
            return self.stages.answered(task.detail, message, task.flops, now_s)
        assert isinstance(message, messages.Result)
        if session.rates is not None:
            session.pace.answered(message.id, session.rates, now_s)
        drawn = self.verify and self.verification.wants(session.reputation, self._rng)
        if drawn or (self.verify and not _is_finite(message)):
            return [Check(session.id, message.id, task, message.payload)]
        return [events.ResultArrived(session.id, message.id, message.payload)]

    def _run_failed(
        self, session: Session, task: Task, run: int, reason: str, now_s: float
    ) -> Sequence[Decision]:
        """Return the decisions that follow from a failed run. The run's task is repeated."""
        decisions = self._trials.run_failed(session, run, reason, now_s)
        if not isinstance(task.detail, StageOrder):
            return [*decisions, events.RunFailed(session.id, run, reason)]
        if session.setbacks.aside:  # the step continues without the device
            return decisions
        if self.rounds.owns(task.detail):
            return [*decisions, *self.rounds.leave(session.id, reason)]
        return [*decisions, *self.stages.refused(task.detail, run)]

    def checked(self, check: Check, judgement: Judgement, now_s: float) -> list[ForRuntime]:
        """Handle the outcome of a `Check` instruction.

        A correct result is used. After a wrong result, the task is reassigned, and the device's
        copies of the inputs are dropped. A device with too many wrong results is quarantined. If
        the check recomputed a few doubtful rows, the recomputed rows replace the device's rows.
        """
        session = self.sessions.get(check.session)
        if session is None:  # the device left, so another device has the task
            return []
        return self._carry_out(self._judge.checked(session, check, judgement), now_s)

    def sending(self, session_id: int, now_s: float) -> None:
        """Record that the PS started to send to a device. Earlier delays do not affect its pace."""
        if (session := self.sessions.get(session_id)) is not None:
            session.pace.sending(now_s)

    # --- jobs and steps ---

    def submit(self, job: GemmJob, a: Buffer, b: Buffer, now_s: float) -> list[ForRuntime]:
        """Start a GEMM job. `a` and `b` are the operands as stored in memory."""
        self._buffers[job.a.operand] = a
        self._buffers[job.b.operand] = b
        return self._do(events.Submitted(job), now_s)

    def release(self, operand: int, now_s: float) -> list[ForRuntime]:
        """Release an operand that no later GEMM uses, so that devices may drop its arrays."""
        self._buffers.pop(operand, None)
        return self._do(events.OperandReleased(operand), now_s)

    def unbind(self, operand: int) -> None:
        """Release an operand's memory on the PS until `submit` passes the operand again."""
        self._buffers.pop(operand, None)

    def withdraw(self, job: int, now_s: float) -> list[ForRuntime]:
        """Withdraw a GEMM job whose product is no longer needed. An unfinished job fails."""
        return self._do(events.Withdrawn(job), now_s)

    def pause(self, now_s: float) -> list[ForRuntime]:
        """Record that no jobs will be submitted for now, and send all pending drop messages."""
        return self._do(events.Paused(), now_s)

    def begin_step(self, work: StepWork, now_s: float) -> list[ForRuntime]:
        """Start a step by stages, and reserve all memory of its devices until the step ends."""
        begun = self.stages.begin(work, now_s)
        planned = {device for stage in work.planned for device in stage.devices}
        # Devices that are not in the plan may hold trained state.
        reserved = self._reserve(dict.fromkeys(planned | self.stages.in_use), now_s)
        return reserved + self._carry_out(begun, now_s)

    def _reserve(self, devices: Mapping[int, int | None], now_s: float) -> list[ForRuntime]:
        """Set the bytes reserved for stages on each device. None reserves all of its memory."""
        done: list[ForRuntime] = []
        for device, nbytes in devices.items():
            session = self.sessions.get(device)
            if session is None or session.rates is None:
                continue
            session.reserved_bytes = session.rates.memory_bytes if nbytes is None else nbytes
            done += self._do(events.DeviceRated(bounded(session.planned_rates)), now_s)
        return done

    def _give_back_memory(self, now_s: float) -> list[ForRuntime]:
        """Release device memory that stages no longer use, so that GEMM tiles can use it."""
        return self._reserve(
            {s.id: self.stages.occupied_bytes(s.id) for s in self.sessions.values()
             if s.reserved_bytes != self.stages.occupied_bytes(s.id)
             and s.id not in self.rounds.devices},
            now_s,
        )  # fmt: skip

    def begin_round(self, work: RoundWork, now_s: float) -> list[ForRuntime]:
        """Start a round of local updates, and reserve all memory of its devices until it ends."""
        reserved = self._reserve(dict.fromkeys(work.steps), now_s)
        reserved += self._carry_out(self.stages.expect_none(), now_s)
        return reserved + self._carry_out(self.rounds.begin(work, now_s), now_s)

    def renew(self, arrays: Mapping[StageArray, StageArray], now_s: float) -> list[ForRuntime]:
        """Replace weights on devices between two steps. `arrays` maps old arrays to new arrays."""
        return self._carry_out(self.stages.renew(arrays), now_s)

    def give(
        self, batch: int, made: StageArray, after: int | None, now_s: float
    ) -> list[ForRuntime]:
        """Pass an array from the training thread to `StageStep.give` of the current step."""
        return self._carry_out(self.stages.give(batch, made, after), now_s)

    def begin_snapshot(self, work: StepWork, position: int, now_s: float) -> list[ForRuntime]:
        """Begin to fetch the state after the last step, when `position` updates were done."""
        return self._carry_out(self.stages.begin_snapshot(work, position), now_s)

    def update(self, scalars: Sequence[StageArray], now_s: float) -> list[ForRuntime]:
        """Pass the coefficients of an optimizer step to `StageStep.update` of the current step."""
        return self._carry_out(self.stages.update(scalars), now_s)

    def resolve(self, right: bool, reason: str, now_s: float) -> list[ForRuntime]:
        """Accept or reject the step's first suspect result. `reason` says what is wrong with it."""
        return self._carry_out(self.stages.resolve(right, reason), now_s)

    def withdraw_step(self, now_s: float) -> list[ForRuntime]:
        """End the current step by stages. Devices retain their arrays for the next step."""
        self.stages.withdraw()
        return self._give_back_memory(now_s)

    def end_steps(self, now_s: float) -> list[ForRuntime]:
        """End the current step or round, and tell devices to drop all arrays for it."""
        ended = self._carry_out([*self.stages.end(), *self.rounds.end()], now_s)
        return ended + self._let_leave(now_s) + self._give_back_memory(now_s)

    # --- decisions ---

    def _carry_out(self, decisions: Iterable[Decision], now_s: float) -> list[ForRuntime]:
        """Apply decisions in order. Return the instructions for the runtime."""
        done: list[ForRuntime] = []
        for decision in decisions:
            match decision:
                case events.ResultArrived():  # first, because it is the most frequent
                    done += self._do(decision, now_s)
                case Refuse(session, code, reason):
                    done += self.refuse(session, code, reason, now_s)
                case Dismiss(session, bye):
                    done += self._dismiss(session, bye, now_s)
                case SendStage(device, message, task, kind):
                    if (asked := self.sessions.get(device)) is not None:
                        if isinstance(message, messages.RunGraph | messages.Fetch) and task:
                            asked.expected[message.id] = task
                            asked.cancelled_runs.sent(message.id)
                        elif isinstance(message, messages.Cancel):
                            self._await_no_more(asked, message.ids)
                        done.append(Send(device, message, kind))
                case TellStep(StepResult() as result, work):
                    model = work.model if isinstance(work, StepWork) else 0
                    told = TellStep(
                        replace(
                            result,
                            used=self.stages.used(now_s),
                            snapshot=self.stages.finished_snapshot(model),
                            fetching=self.stages.fetching(model),
                            kept=self.stages.kept() if result.squares else (),
                            left=self.stages.left,
                        ),
                        work,
                    )
                    done += [told, *self._rate_graphs(now_s)]
                    if result.state:
                        done += self._let_leave(now_s)
                    done += self._give_back_memory(now_s)
                case TellStep(StepFailed()):
                    done += [decision, *self._give_back_memory(now_s)]
                case _ if isinstance(decision, events.Event):
                    done += self._do(decision, now_s)
                case _:
                    done.append(decision)
        return done

    def _rate_graphs(self, now_s: float) -> list[ForRuntime]:
        """Update device rates to the layer-graph throughput sustained in the last step."""
        done: list[ForRuntime] = []
        for session, rates in self.stages.sustained():
            session.rates = bounded(rates)
            done += self._do(events.DeviceRated(bounded(session.planned_rates)), now_s)
        return done

    def _let_leave(self, now_s: float) -> list[ForRuntime]:
        """Dismiss the leaving devices that have now returned their trained state."""
        done: list[ForRuntime] = []
        for device in sorted(self.stages.holders.leaving):
            done += self._carry_out(self.stages.lost(device), now_s)
            done += self._dismiss(device, ByeCode.DRAINED, now_s)
        return done

    def _dismiss(self, session_id: int, code: ByeCode, now_s: float) -> list[ForRuntime]:
        if (session := self.sessions.pop(session_id, None)) is not None:
            self.history.depart(session, code.value, now_s, lost=False)
        return [Send(session_id, messages.Bye(code.value, code)), Close(session_id)]

    def move(
        self, count: int, address: str, now_s: float, admitted_before_s: float = math.inf
    ) -> list[ForRuntime]:
        """Move idle devices to another server.

        Args:
            count: maximum number of devices. Only idle devices that support moves are moved.
            address: join URL of the other server, without a credential. The other server accepts
                the devices' own credentials.
            admitted_before_s: move only devices admitted before this time, because the other server
                does not know devices admitted later.
        """
        idle = [
            session.id
            for session in self.sessions.values()
            if session.state is DeviceState.READY
            and session.admitted_s < admitted_before_s
            and session.rates is not None
            and Feature.MOVES in session.features
            and not self._busy(session)
        ]
        done: list[ForRuntime] = []
        for device in idle[-count:] if count > 0 else ():  # newer devices hold fewer arrays
            bye = messages.Bye(MOVED, ByeCode.MOVED, address=address)
            done += [Send(device, bye), Close(device)]
            done += self.closed(device, MOVED, now_s, lost=False)
        return done

    def _do(self, event: events.Event, now_s: float) -> list[ForRuntime]:
        """Pass an event to the scheduler and return the resulting instructions for the runtime."""
        done: list[ForRuntime] = []
        for instruction in self.scheduler.handle(event, now_s):
            match instruction:
                case SendArray():
                    done.append(self._send_array(instruction))
                case SendRun():
                    done.append(self._send_run(instruction, now_s))
                case SendDrop(device, ids):
                    done.append(Send(device, messages.Drop(ids)))
                case SendCancel():
                    done.append(self._send_cancel(instruction, now_s))
                case Stuck(_, reason):
                    if self._stuck_s is None or now_s - self._stuck_s >= STUCK_S:
                        self._stuck_s = now_s
                        done.append(Note(f"training waits: {reason}"))
                case Overdue(device, overdue):
                    self.epoch += 1
                    session = self.sessions[device]
                    session.reason = "it does not answer" if overdue else session.restriction
                    done.append(instruction)
                case Drained(device):
                    if not self.stages.hands_over(device):  # else it is dismissed later
                        done += self._dismiss(device, ByeCode.DRAINED, now_s)
                case _:
                    done.append(instruction)
        if isinstance(event, events.FleetChange):
            self.epoch += 1
            done += self._carry_out(self._of_stages(event), now_s)
        return done

    def _of_stages(self, event: events.FleetChange) -> Sequence[Decision]:
        match event:
            case events.DeviceDraining(device) if self.stages.hands_over(device):
                return []
            case events.DeviceLost(device) | events.DeviceDraining(device):
                return [*self.stages.lost(device), *self.rounds.leave(device, "it left")]
            case events.DeviceAside(device):
                reason = self.sessions[device].setbacks.text or "it was set aside"
                left = self.rounds.leave(device, reason)
                return [*self.stages.failed(device, reason), *left]
            case events.DeviceReady(rates):
                return self.stages.returned(self.sessions[rates.device])
            case events.DeviceBack():
                return self.stages.changed()
            case _:
                return []

    # --- messages for the scheduler's instructions ---

    def _send_array(self, instruction: SendArray) -> Send:
        """Return the message that sends an array. Devices share one payload, compressed once."""
        array = instruction.array
        region = self._regions.get(array.id)
        if region is None:
            region = self._buffers[array.operand].region(array.rows, array.columns)
            self._regions[array.id] = region
        (rows, columns), dtype = region.shape, region.dtype.value
        if self.observe:
            session = self.sessions[instruction.device]
            session.pace.array(session.travelling_down(array.nbytes, coded_ratio(dtype)))
        put = messages.Put(array.id, rows, columns, dtype, region)
        return Send(instruction.device, put, TrafficKind.TILES)

    def _send_run(self, instruction: SendRun, now_s: float) -> Send:
        run, task = instruction.run, instruction.task
        session = self.sessions[instruction.device]
        session.expected[run] = task
        session.cancelled_runs.sent(run)
        if self.observe:
            up_bytes = session.travelling_up(task.output_bytes, task.output_ratio)
            session.pace.asked(run, task.flops, up_bytes, now_s)
        return Send(instruction.device, _run_message(run, task))

    def _send_cancel(self, instruction: SendCancel, now_s: float) -> Send:
        session = self.sessions[instruction.device]
        self._await_no_more(session, instruction.runs)
        if session.rates is not None:
            session.pace.given_up(instruction.runs, session.rates, now_s)
        return Send(instruction.device, messages.Cancel(instruction.runs))

    @staticmethod
    def _await_no_more(session: Session, runs: Iterable[int]) -> None:
        for run in runs:
            if (awaited := session.expected.pop(run, None)) is not None:
                session.cancelled_runs.cancelled(run, awaited.output_bytes)


def _is_finite(result: messages.Result) -> bool:
    """Return whether all elements of a result are finite; True for emulated payloads."""
    if not isinstance(result.payload, bytes | bytearray | memoryview):
        return True
    return math.isfinite(arrays.largest(result.payload, DType(result.dtype)))


def _run_message(run: int, task: Task) -> messages.Run:
    detail = task.gemm
    return messages.Run(
        id=run,
        op=Op.MATMUL.value,
        inputs=tuple(array.id for array in task.inputs),
        transpose_a=detail.transpose_a,
        transpose_b=detail.transpose_b,
        out=detail.out,
    )
