"""The PS's core: device sessions on one side, GEMMs on the other, the scheduler between them.

Pure like the scheduler: messages and times go in, instructions come out. It implements the protocol
(handshake, liveness, `put`, `run`, `result`), so that every runtime, live or virtual, runs the same
code.
"""

from __future__ import annotations

import random
from typing import Final

from cleave.arrays import Buffer
from cleave.errors import ProtocolError
from cleave.protocol import features, limits, messages
from cleave.protocol.allowance import Allowance, is_answer
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import ByeCode, ErrorCode, Hello, Message
from cleave.scheduler import events
from cleave.scheduler.admission import (
    Admission,
    AdmissionResult,
    Authenticator,
    Refusal,
    SharedSecretAuth,
    clean_name,
    clean_text,
)
from cleave.scheduler.check_policy import Verification
from cleave.scheduler.device_history import DeviceHistory
from cleave.scheduler.gemm_job import GemmJob, GemmTask
from cleave.scheduler.handshake import bounded, stated_rates, unfit
from cleave.scheduler.instructions import (
    Aside,
    Check,
    Close,
    Drained,
    ForRuntime,
    Instruction,
    Joined,
    Note,
    Overdue,
    Send,
    SendArray,
    SendCancel,
    SendDrop,
    SendRun,
    Stuck,
)
from cleave.scheduler.pace import Estimate, Pace, Sample, common_delay_s, expected
from cleave.scheduler.probe import JOINING, STATED, THOROUGH, Probe
from cleave.scheduler.reputation import Reputation, Rounding, Wrong
from cleave.scheduler.scheduler import Scheduler
from cleave.scheduler.session import DeviceState, Session, Trial
from cleave.scheduler.setbacks import Setbacks
from cleave.scheduler.tasks import Task
from cleave.verify import Judgement
from profiles.device_profile import DeviceKind

NOT_ROUNDED: Final = "were not the right rounding of the product: far more than rounding explains"

NOTED_S: Final = 60.0
"""Seconds between two reports of something that may go on for long (a device fails, a job is
stuck)."""

TRIAL_PATIENCE_S: Final = 60.0
"""Seconds that a trial may take."""

_MAX_FAILURE: Final = 120  # characters of why a device failed


class SessionManager:
    """The PS without its sockets, threads and clock.

    Args:
        credential: what `hello` must carry; empty for none.
        verify: which results are checked before they are used: a value of `--verify`, or True for
            `auto`.
        crossed: whether results cross a process boundary; `auto` depends on it.
        rng: secret; draws which results are checked, and the numbers that devices are probed with.
        auth: decides which devices may join; `credential` is not used then.
        max_devices: how many devices it takes at once; any number unless given.
        observe: whether devices are planned with the pace that they show (`cleave.scheduler.pace`).
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
    ) -> None:
        self.scheduler = Scheduler()
        self.sessions: dict[int, Session] = {}
        self.auth = auth if auth is not None else SharedSecretAuth(credential)
        self.verification = Verification.of(verify)
        self.verify = self.verification.active(crossed)
        self._rng = rng or random.SystemRandom()
        self.max_devices = max_devices
        self.observe = observe
        self.history = DeviceHistory(self.auth)
        self.epoch = 0
        self._buffers: dict[int, Buffer] = {}
        self._rounding: dict[int, Rounding] = {}  # by identity: a new session changes nothing
        self._stuck_s: float | None = None  # when it was last said that a job is
        self._resting: dict[int, float] = {}  # by which device it is known as, until when

    @property
    def ready_devices(self) -> int:
        """Return how many devices may be given work."""
        return len(self.scheduler.devices)

    def validate(self) -> None:
        """Check that its own and the scheduler's state are consistent.

        Raises:
            AssertionError: with what is inconsistent.
        """
        self.scheduler.validate()
        for session in self.sessions.values():
            running = self.scheduler.runs_of(session.id)
            if unknown := session.expected.keys() - running:
                raise AssertionError(
                    f"{session.name} is expected to answer {sorted(unknown)}, which do not run"
                )

    def leftovers(self) -> list[str]:
        """List what is still kept, in sentences; empty when no job and no operand is in use."""
        found = self.scheduler.leftovers()
        if self._buffers:
            found.append(f"{len(self._buffers)} operands are left")
        expected = sum(len(session.expected) for session in self.sessions.values())
        if expected:
            found.append(f"{expected} answers are expected")
        return found

    def state(self, session: Session) -> DeviceState:
        """Return what a device is doing now."""
        if session.state is DeviceState.READY and session.setbacks.aside:
            return DeviceState.ASIDE
        if session.state is DeviceState.READY and self.scheduler.overdue(session.id):
            return DeviceState.OVERDUE
        if session.state is DeviceState.READY and self.scheduler.busy(session.id):
            return DeviceState.BUSY
        return session.state

    # --- sessions ---

    def opened(self, session: int, now_s: float, address: str = "") -> None:
        """Note that a peer connected from this address; its `hello` is awaited."""
        self.sessions[session] = Session(session, now_s, address, heard_s=now_s)

    def received(
        self, session_id: int, message: Message, now_s: float, nbytes: int = 0
    ) -> list[ForRuntime]:
        """Take a message of a session; one that breaks the protocol ends that session alone.

        Args:
            session_id: the session.
            message: the message.
            now_s: the time.
            nbytes: its size, where it was sent over a network.
        """
        session = self.sessions.get(session_id)
        if session is None:
            return []
        session.heard_s = now_s
        joining = session.state is DeviceState.JOINING
        try:
            if joining:
                return self._hello(session, message, now_s)
            if too_much := self._too_much(session, message, now_s, nbytes):
                return self.exceeded(session_id, too_much, now_s)
            return self._from_device(session, message, now_s)
        except ProtocolError as error:
            if joining:
                self.auth.failed(session.address)
            return self.refuse(session_id, ErrorCode.PROTOCOL, str(error), now_s)

    def _too_much(self, session: Session, message: Message, now_s: float, nbytes: int) -> str:
        """Return why a message exceeds what a device may send unasked; empty if it does not."""
        if isinstance(message, messages.Result | messages.TaskError) and (
            session.probe is not None
            or (session.trial is not None and session.trial.probe.awaits(message.id))
            or is_answer(message.id, session.expected, session.cancelled_runs)
        ):
            return ""
        return session.allowance.said(nbytes, now_s) if session.allowance is not None else ""

    def exceeded(self, session_id: int, reason: str, now_s: float) -> list[ForRuntime]:
        """End the session of a device that sent more than it may; it must wait to come back."""
        session = self.sessions.get(session_id)
        if session is not None and session.known_as is not None:
            self._resting[session.known_as] = now_s + limits.REST_S
        return self.refuse(session_id, ErrorCode.LIMIT, reason, now_s, retry_after_s=limits.REST_S)

    def awaited_bytes(self, session_id: int) -> tuple[int, int]:
        """Return the size of the largest job result that may come now, and of any result."""
        session = self.sessions.get(session_id)
        if session is None:
            return 0, 0
        job = max((task.output_bytes for task in session.expected.values()), default=0)
        probe = session.probe if session.trial is None else session.trial.probe
        tested = probe.awaited_bytes if probe is not None else 0
        return job, max(job, session.cancelled_runs.largest_bytes, tested)

    def refuse(
        self,
        session_id: int,
        code: ErrorCode,
        reason: str,
        now_s: float,
        *,
        retry_after_s: float = 0.0,
    ) -> list[ForRuntime]:
        """End a session that broke the rules, and say why; do nothing if it has already ended."""
        if session_id not in self.sessions:
            return []
        session = self.sessions[session_id]
        if code is ErrorCode.QUARANTINED and session.identity is not None:
            self.auth.quarantined(session.identity, reason)
        versions = (limits.VERSION,) if code is ErrorCode.VERSION else ()
        error = messages.Error(code, reason, retry_after_s, versions)
        instructions: list[ForRuntime] = [Send(session_id, error), Close(session_id)]
        lost = code in (ErrorCode.LIMIT, ErrorCode.PROTOCOL)  # else it is the PS that ends it
        return instructions + self.closed(session_id, reason, now_s, lost=lost)

    def refuse_identity(
        self, identity: int, code: ErrorCode, reason: str, now_s: float
    ) -> list[ForRuntime]:
        """End every session of a device, and say why."""
        mine = [s.id for s in self.sessions.values() if s.identity == identity]
        return [one for id in mine for one in self.refuse(id, code, reason, now_s)]

    def closed(
        self, session_id: int, reason: str, now_s: float, *, lost: bool = True
    ) -> list[ForRuntime]:
        """Note that a session ended, for whatever reason; its unfinished tasks go to others."""
        session = self.sessions.pop(session_id, None)
        if session is None or session.state in (DeviceState.JOINING, DeviceState.LOST):
            return []
        self.history.depart(session, reason, now_s, lost=lost)
        probing = session.state is DeviceState.PROBING
        session.state, session.reason = DeviceState.LOST, reason
        if probing:
            return []
        self.epoch += 1
        return self._do(events.DeviceLost(session_id), now_s)

    def tick(self, now_s: float) -> list[ForRuntime]:
        """Do what is due: end sessions that are silent or have not said hello, begin trials."""
        instructions: list[ForRuntime] = []
        for session in list(self.sessions.values()):
            joining = session.state is DeviceState.JOINING
            limit_s = limits.HANDSHAKE_S if joining else limits.SILENCE_S
            since_s = now_s - (session.opened_s if joining else session.heard_s)
            if since_s > limit_s:
                what = "said no hello" if joining else "was silent"
                reason = f"the device {what} for {since_s:.0f} s"
                instructions += self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
            elif session.state is DeviceState.READY:
                instructions += self._try_again(session, now_s)
        if self.observe:
            instructions += self._judge_paces(now_s)
        self.history.tick(self.sessions.values(), now_s)
        self._resting = {who: s for who, s in self._resting.items() if s > now_s}
        return instructions + self._do(events.Tick(), now_s)

    def credit(self, now_s: float) -> None:
        """Tell the authenticator what the connected devices did since it was last told."""
        self.history.credit(self.sessions.values(), now_s)

    def _hello(self, session: Session, message: Message, now_s: float) -> list[ForRuntime]:
        if not isinstance(message, messages.Hello):
            raise ProtocolError(f"the first message must be hello, not {message.TYPE}")
        # This one is among the sessions.
        full = self.max_devices is not None and len(self.sessions) > self.max_devices
        refusal = unfit(message, self.max_devices if full else None)
        # Asked last, for it may use up a join code.
        admission = refusal or self.auth.admit(message, session.address)
        if isinstance(admission, Admission):
            admission = self._rested(admission, now_s)
        if isinstance(admission, Refusal):
            code, reason, retry_s = admission.code, admission.reason, admission.retry_after_s
            return self.refuse(session.id, code, reason, now_s, retry_after_s=retry_s)
        instructions = self._take_over(admission, now_s)
        self._introduce(session, message, admission, now_s)
        assert session.rates is not None
        welcome = messages.Welcome(
            session.id,
            server=self.auth.server,
            credential=admission.credential,
            features=tuple(feature.value for feature in session.features),
        )
        instructions.append(Send(session.id, welcome))
        stated = bool(message.downlink_bytes_per_s and message.uplink_bytes_per_s)
        if not stated and (before := self.history.rates_before(session, now_s)) is not None:
            session.rates, stated = before, True
        if stated and not session.measure and not self.verify:
            return instructions + self._ready(session, now_s)
        effort = THOROUGH if session.measure else STATED if stated else JOINING
        tested = self.verify and not session.measure
        secret = self._rng if tested else None
        session.probe = Probe(session.rates, effort, secret, session.probe_ids)
        session.state = DeviceState.PROBING
        return instructions + [Send(session.id, m) for m in session.probe.begin(now_s)]

    def _rested(self, admission: Admission, now_s: float) -> AdmissionResult:
        """Refuse a device that sent more than it may, until it has waited long enough."""
        known_as = admission.known_as
        rest_s = self._resting.get(known_as, now_s) - now_s if known_as is not None else 0.0
        if rest_s <= 0:
            return admission
        reason = f"this device sent more than it may; it may come back in {rest_s:.0f} s"
        return Refusal(ErrorCode.LIMIT, reason, rest_s)

    def _introduce(
        self, session: Session, hello: Hello, admission: Admission, now_s: float
    ) -> None:
        """Note who a device is, what it says of itself, and what is remembered of it."""
        session.allowance = Allowance(now_s)
        session.measured_by = admission.measured_by
        session.name = admission.name or clean_name(hello.name)
        session.profile = clean_name(hello.profile)
        session.kind = DeviceKind.named(hello.kind)
        session.identity, session.known_as = admission.identity, admission.known_as
        if session.identity is not None:
            session.rounding = self._rounding.setdefault(session.identity, session.rounding)
        session.reputation = Reputation(wrong=admission.faults, penalty=admission.penalty)
        conduct = self.history.conduct_before(session, admission.conduct)
        session.setbacks = Setbacks.remembered(conduct.setbacks, conduct.failure)
        if self.observe:
            session.pace = Pace(Estimate(conduct.slowness, conduct.late_s))
        session.measure = hello.measure
        session.features = features.agreed(hello)
        session.rates = stated_rates(session.id, hello)
        session.claimed_flops_per_s = session.rates.flops_per_s

    def _take_over(self, admission: Admission, now_s: float) -> list[ForRuntime]:
        """End the earlier sessions of a device that joins again: the new session counts.

        The old connection may be dead without anybody having noticed, so the new one cannot be the
        one to refuse. Where both are alive, the old one is told, and does not come back.
        """
        if admission.measured_by:
            before = [
                s.id for s in self.sessions.values() if s.measured_by == admission.measured_by
            ]
            reason = (
                "a link is measured with the same join code or credential already, and this is the "
                "earlier measurement; measure one after the other"
            )
            over = before[: max(0, len(before) + 1 - admission.at_once)]
            ends = [self.refuse(id, ErrorCode.DUPLICATE, reason, now_s) for id in over]
            return [one for instructions in ends for one in instructions]
        here = [s for s in self.sessions.values() if s.identity == admission.identity]
        if admission.identity is None or not here:
            return []
        reason = (
            "the same device joined a second time, and this is the first; "
            "to run two devices on one machine, join each with a --name and a join code of its own"
        )
        text = f"{admission.name} joined again; its earlier session {here[0].id} ends"
        ended = self.refuse_identity(admission.identity, ErrorCode.DUPLICATE, reason, now_s)
        return [Note(text), *ended]

    def _ready(self, session: Session, now_s: float) -> list[ForRuntime]:
        assert session.rates is not None
        session.state = DeviceState.READY
        self.epoch += 1
        session.reason = session.pace.estimate.text
        ready = events.DeviceReady(
            bounded(session.planned_rates), careful=session.setbacks.times > 0
        )
        return [Joined(session.id), *self._do(ready, now_s)]

    def _probed(
        self, session: Session, probe: Probe, message: messages.Result, now_s: float
    ) -> list[ForRuntime]:
        instructions: list[ForRuntime] = [Send(session.id, m) for m in probe.result(message, now_s)]
        if probe.fault:
            reason = f"it failed the test of its arithmetic: {probe.fault}"
            return self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)
        if probe.rates is not None and session.measure:
            found = probe.rates
            down, up = found.downlink_bytes_per_s, found.uplink_bytes_per_s
            answer = messages.Measured(down, up, found.latency_s)
            self.sessions.pop(session.id)
            instructions += [Send(session.id, m) for m in (answer, _bye(ByeCode.MEASURED))]
            instructions.append(Close(session.id))
        elif probe.rates is not None:
            session.probe = None
            session.rates = bounded(probe.device)
            instructions += self._ready(session, now_s)
        return instructions

    def _from_device(self, session: Session, message: Message, now_s: float) -> list[ForRuntime]:
        match message:
            case messages.Result() if session.probe is not None:
                return self._probed(session, session.probe, message, now_s)
            case messages.Result() if session.trial and session.trial.probe.awaits(message.id):
                return self._tried(session, session.trial, message, now_s)
            case messages.Result():
                return self._result(session, message, now_s)
            case messages.TaskError() if session.probe is not None:
                raise ProtocolError(f"the device could not do the probe: {message.reason}")
            case messages.TaskError() if session.trial and session.trial.probe.awaits(message.id):
                session.counters.failures += 1
                return self._failed_trial(session, session.trial, message.reason, now_s)
            case messages.TaskError():
                if session.expected.pop(message.id, None) is None:
                    return self._unexpected(session, now_s)
                return self._failed(session, message.id, message.reason, now_s)
            case messages.Heartbeat():
                overdue = self.scheduler.overdue(session.id)
                return self._do(events.Alive(session.id), now_s) if overdue else []
            case messages.Telemetry():
                session.telemetry.update(message.values)
                if len(session.telemetry) > limits.MAX_TELEMETRY:
                    raise ProtocolError(
                        f"a device may report {limits.MAX_TELEMETRY} named values, not more"
                    )
                return []
            case messages.Drain():
                if session.state is DeviceState.PROBING:
                    farewell: list[ForRuntime] = [Send(session.id, _bye(ByeCode.DRAINED))]
                    self.history.depart(self.sessions.pop(session.id), "drained", now_s, lost=False)
                    return [*farewell, Close(session.id)]
                session.state, session.reason = DeviceState.DRAINING, "its owner wants it back"
                self.epoch += 1
                return self._do(events.DeviceDraining(session.id), now_s)
            case messages.Bye():
                left = self.closed(session.id, message.reason, now_s, lost=False)
                return [Close(session.id), *left]
            case messages.Error():
                return [Close(session.id), *self.closed(session.id, message.message, now_s)]
            case _:
                raise ProtocolError(f"a server does not expect a {message.TYPE} message here")

    def _result(self, session: Session, message: messages.Result, now_s: float) -> list[ForRuntime]:
        task = session.expected.pop(message.id, None)
        if task is None:
            return self._unexpected(session, now_s)
        detail: GemmTask = task.detail
        block = detail.block
        dtype = detail.out
        shape = (block.m.size, block.n.size, dtype)
        if (message.rows, message.columns, message.dtype) != shape or payload_bytes(
            message.payload
        ) != task.output_bytes:
            reason = (
                f"the result is {message.rows}x{message.columns} {message.dtype} of "
                f"{payload_bytes(message.payload)} bytes, not {shape[0]}x{shape[1]} {dtype}"
            )
            self._wrong(session, Wrong.FORM, reason)
            instructions = self._failed(session, message.id, reason, now_s)
            return instructions + self._quarantine_if_due(session, reason, now_s)
        if session.setbacks.did():
            self.history.remember(session)
        if session.rates is not None:
            session.pace.answered(message.id, session.rates, now_s)
        session.counters.blocks += 1
        session.counters.flops += task.flops
        session.counters.compute_s += min(message.compute_s, now_s - session.opened_s)
        if self.verify and self.verification.wants(session.reputation, self._rng):
            return [Check(session.id, message.id, task, message.payload)]
        return self._do(events.ResultArrived(session.id, message.id, message.payload), now_s)

    def _unexpected(self, session: Session, now_s: float) -> list[ForRuntime]:
        """Tell the scheduler of an answer that nobody waits for, without its payload.

        A run whose result is being checked is still under way in the scheduler; a second answer to
        it must not be taken for the checked one.
        """
        return self._do(events.LateAnswer(session.id), now_s)

    def checked(self, check: Check, judgement: Judgement, now_s: float) -> list[ForRuntime]:
        """Take the outcome of a `Check` instruction.

        Args:
            check: the instruction.
            judgement: what the check found. A wrong result is computed elsewhere, its inputs are
                sent to the device again, and a device that has too many wrong results is
                quarantined. A result with rows in doubt is used as the server corrected it, and
                nobody is blamed.
            now_s: the time.
        """
        session = self.sessions.get(check.session)
        if session is None:  # it went meanwhile; the task is with another
            return []
        fault = judgement.fault
        rounding = session.rounding
        rounding.saw(judgement.spots, judgement.misrounded)
        if fault is None and not rounding.biased:
            session.reputation.was_right()
            payload = check.payload if judgement.mended is None else judgement.mended
            return self._do(events.ResultArrived(session.id, check.run, payload), now_s)
        if fault is None:
            reason = f"{rounding.misrounded} of {rounding.spots} elements {NOT_ROUNDED}"
            if session.identity is not None:  # one who is released begins anew
                self._rounding.pop(session.identity, None)
            failed = events.RunFailed(session.id, check.run, reason, invalidated=True)
            instructions = self._do(failed, now_s)
            return instructions + self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)
        inputs = frozenset(array.id for array in check.task.inputs)
        if fault.gross or not session.suspects.explains(check.run, inputs):
            self._wrong(session, Wrong.GROSS if fault.gross else Wrong.SMALL, fault.reason)
            session.suspects.begin(inputs, max(session.expected, default=check.run))
        reason = f"a wrong result: {fault.reason}"
        failed = events.RunFailed(session.id, check.run, reason, invalidated=True)
        return self._do(failed, now_s) + self._quarantine_if_due(session, fault.reason, now_s)

    def _wrong(self, session: Session, how: Wrong, reason: str) -> None:
        """Count a wrong result of a device, and have it remembered beyond the session."""
        session.reputation.was_wrong(how)
        if session.identity is not None:
            self.auth.faulted(session.identity, reason, how.value)

    def _quarantine_if_due(self, session: Session, last: str, now_s: float) -> list[ForRuntime]:
        """Quarantine a device that has had too many wrong results."""
        reputation = session.reputation
        if not reputation.quarantined or session.id not in self.sessions:
            return []
        wrong = "result" if reputation.wrong == 1 else "results"
        reason = f"quarantined after {reputation.wrong} wrong {wrong}; the last: {last}"
        return self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)

    # --- failures, and trials of those that get no work for them ---

    def _failed(self, session: Session, run: int, reason: str, now_s: float) -> list[ForRuntime]:
        """Pass a failed run on to another device, and set aside a device that fails all."""
        reason = clean_text(reason, _MAX_FAILURE) or "no reason given"
        session.counters.failures += 1
        if session.rates is not None:
            session.pace.answered(run, session.rates, now_s, failed=True)
        instructions: list[ForRuntime] = []
        if session.setbacks.failed(reason, now_s):
            self.epoch += 1
            instructions.append(self._said_aside(session))
            # First, so that the run does not come back to it.
            instructions += self._do(events.DeviceAside(session.id), now_s)
        elif session.noted_s is None or now_s - session.noted_s >= NOTED_S:
            session.noted_s = now_s
            instructions.append(Note(f"{session.name} could not do a run: {reason}"))
        return instructions + self._do(events.RunFailed(session.id, run, reason), now_s)

    def _said_aside(self, session: Session) -> ForRuntime:
        """Report that a device is set aside, or is not any more, and remember it."""
        session.reason = _why(session)
        self.history.remember(session)
        return Aside(session.id, session.setbacks.aside, session.reason)

    def _try_again(self, session: Session, now_s: float) -> list[ForRuntime]:
        """Test a device that gets no work, with secret numbers that no job waits for.

        Such a device was set aside, or is so slow that nothing is planned for it.
        """
        if session.trial is not None:
            if now_s - session.trial.begun_s <= TRIAL_PATIENCE_S:
                return []
            return self._failed_trial(session, session.trial, "it does not answer a trial", now_s)
        if session.rates is None or self.scheduler.busy(session.id):
            return []
        slow = self.observe and session.pace.due(session.rates, now_s) and self.ready_devices > 1
        if not session.setbacks.due(now_s) and (session.setbacks.aside or not slow):
            return []
        instructions: list[ForRuntime] = []
        if not session.setbacks.aside:  # its memory is the trial's, for so long
            self.epoch += 1
            instructions += self._do(events.DeviceAside(session.id), now_s)
        probe = Probe(session.rates, STATED, self._rng, session.probe_ids)
        sent = probe.begin(now_s)
        nbytes = sum(payload_bytes(m.payload) for m in sent if isinstance(m, messages.Put))
        session.trial = Trial(probe, now_s, expected(session.rates, nbytes, 0.0, 0.0))
        return [*instructions, *(Send(session.id, m) for m in sent)]

    def _tried(
        self, session: Session, trial: Trial, message: messages.Result, now_s: float
    ) -> list[ForRuntime]:
        instructions: list[ForRuntime] = [
            Send(session.id, m) for m in trial.probe.result(message, now_s)
        ]
        if trial.probe.fault:
            reason = f"it failed the test of its arithmetic: {trial.probe.fault}"
            return self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)
        if trial.probe.rates is None:
            return instructions
        session.trial = None
        if self.observe and session.rates is not None:
            sample = Sample(trial.expected_s, now_s - trial.begun_s)
            session.rates = session.pace.tried(sample, session.rates, self._common_delay_s(), now_s)
        if session.setbacks.aside:
            session.setbacks.back()
            instructions.append(self._said_aside(session))
        session.reason = _why(session)
        self.history.remember(session)
        return instructions + self._come_back(session, now_s)

    def _failed_trial(
        self, session: Session, trial: Trial, reason: str, now_s: float
    ) -> list[ForRuntime]:
        session.trial = None
        instructions: list[ForRuntime] = [Send(session.id, m) for m in trial.probe.abandon()]
        if session.pace.estimate.slow:
            session.pace.put_off(now_s)
        if session.setbacks.aside:
            session.setbacks.failed(clean_text(reason, _MAX_FAILURE) or "no reason given", now_s)
            session.setbacks.put_off(now_s)
        else:
            instructions += self._come_back(session, now_s)
        session.reason = _why(session)
        self.history.remember(session)
        return instructions

    def _come_back(self, session: Session, now_s: float) -> list[ForRuntime]:
        self.epoch += 1
        careful = session.setbacks.times > 0
        return self._do(events.DeviceBack(bounded(session.planned_rates), careful=careful), now_s)

    # --- how long devices take ---

    def sending(self, session_id: int, now_s: float) -> None:
        """Note that the runtime begins to send to a device; time before that was the PS's own."""
        session = self.sessions.get(session_id)
        if session is not None:
            session.pace.sending(now_s)

    def _common_delay_s(self) -> float:
        return common_delay_s(session.pace.delay_s for session in self.sessions.values())

    def _judge_paces(self, now_s: float) -> list[ForRuntime]:
        """Plan with the pace that devices show, where it is far from what was measured."""
        judged = [s for s in self.sessions.values() if s.pace.fresh and s.rates is not None]
        if not judged:
            return []
        instructions: list[ForRuntime] = []
        common_s = self._common_delay_s()
        for session in judged:
            before = session.pace.estimate
            if not session.pace.judge(common_s, now_s):
                continue
            self.epoch += 1
            instructions += self._do(events.DeviceRated(bounded(session.planned_rates)), now_s)
            session.reason = _why(session)
            self.history.remember(session)
            if session.pace.estimate.slow != before.slow:
                text = session.pace.estimate.text or "its answers come in time again"
                instructions.append(Note(f"{session.name}: {text}"))
        return instructions

    # --- work ---

    def submit(self, job: GemmJob, a: Buffer, b: Buffer, now_s: float) -> list[ForRuntime]:
        """Start a GEMM. `a` and `b` are its operands as they lie in memory."""
        self._buffers[job.a.operand] = a
        self._buffers[job.b.operand] = b
        return self._do(events.Submitted(job), now_s)

    def release(self, operand: int, now_s: float) -> list[ForRuntime]:
        """Note that an operand will not be used again."""
        self._buffers.pop(operand, None)
        return self._do(events.OperandReleased(operand), now_s)

    def withdraw(self, job: int, now_s: float) -> list[ForRuntime]:
        """Withdraw a GEMM that is done elsewhere; see `events.Withdrawn`."""
        return self._do(events.Withdrawn(job), now_s)

    def pause(self, now_s: float) -> list[ForRuntime]:
        """Note that nothing more is submitted for now; see `events.Paused`."""
        return self._do(events.Paused(), now_s)

    def _do(self, event: events.Event, now_s: float) -> list[ForRuntime]:
        """Tell the scheduler an event; turn what it wants sent into messages, pass on the rest."""
        done: list[ForRuntime] = []
        for instruction in self.scheduler.handle(event, now_s):
            done += self._in_messages(instruction, now_s)
        return done

    def _in_messages(self, instruction: Instruction, now_s: float) -> list[ForRuntime]:
        match instruction:
            case SendArray(device, array):
                self.sessions[device].pace.array(array.nbytes)
                region = self._buffers[array.operand].region(array.rows, array.columns)
                rows, columns = region.shape
                put = messages.Put(array.id, rows, columns, region.dtype.value, region)
                return [Send(device, put)]
            case SendRun(device, run, task):
                asked = self.sessions[device]
                asked.expected[run] = task
                asked.cancelled_runs.sent(run)
                asked.pace.asked(run, task.flops, task.output_bytes, now_s)
                return [Send(device, _run_message(run, task))]
            case SendDrop(device, ids):
                return [Send(device, messages.Drop(ids))]
            case SendCancel(device, runs):
                freed = self.sessions[device]
                for run in runs:
                    if (awaited := freed.expected.pop(run, None)) is not None:
                        freed.cancelled_runs.cancelled(run, awaited.output_bytes)
                if freed.rates is not None:
                    freed.pace.given_up(runs, freed.rates, now_s)
                return [Send(device, messages.Cancel(runs))]
            case Stuck(_, reason):
                if self._stuck_s is not None and now_s - self._stuck_s < NOTED_S:
                    return []
                self._stuck_s = now_s
                return [Note(f"training waits: {reason}")]
            case Overdue(device, overdue):
                self.epoch += 1
                session = self.sessions[device]
                session.reason = "it does not answer" if overdue else _why(session)
                return [instruction]
            case Drained(device):
                if (drained := self.sessions.pop(device, None)) is not None:
                    self.history.depart(drained, "drained", now_s, lost=False)
                return [Send(device, _bye(ByeCode.DRAINED)), Close(device)]
            case _:
                return [instruction]


def _why(session: Session) -> str:
    """Return why a device gets no work, or less."""
    return session.setbacks.text or session.pace.estimate.text


def _bye(code: ByeCode) -> messages.Bye:
    return messages.Bye(code.value, code)


def _run_message(run: int, task: Task) -> messages.Run:
    detail: GemmTask = task.detail
    return messages.Run(
        id=run,
        op=detail.op.value,
        inputs=tuple(array.id for array in task.inputs),
        transpose_a=detail.transpose_a,
        transpose_b=detail.transpose_b,
        out=detail.out,
    )
