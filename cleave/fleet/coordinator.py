"""The PS's core: device sessions on one side, GEMMs on the other, the dispatcher between them.

Pure like the dispatcher: messages and times in, orders out. It speaks the protocol (handshake,
liveness, the three verbs) so that every shell, live or virtual, runs the same code.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from cleave.arrays import Buffer, DType
from cleave.dispatch import events
from cleave.dispatch.dispatcher import Dispatcher
from cleave.dispatch.gemm_work import GemmUnit, GemmWork
from cleave.dispatch.work import Unit
from cleave.errors import ProtocolError
from cleave.fleet.admission import (
    Admission,
    Doorkeeper,
    OneKey,
    Refusal,
    clean_name,
)
from cleave.fleet.allowance import Allowance, is_answer
from cleave.fleet.orders import Check, Close, Done, Failure, Joined, Late, Note, Order, Place, Send
from cleave.fleet.probe import JOINING, STATED, THOROUGH, Probe
from cleave.fleet.regulars import Regulars
from cleave.fleet.reputation import Reputation, Wrong
from cleave.fleet.session import DeviceState, Session
from cleave.fleet.verification import Verification
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits, messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import ErrorCode, Message, Op
from cleave.verify import Fault
from profiles.device_profile import DeviceKind

ASSUMED_FLOPS_PER_S: Final = 50e9
"""What is assumed of a device that does not state its speed: a modest laptop."""


class Coordinator:
    """The PS without its sockets, threads and clock.

    Args:
        credential: what `hello` must carry; empty for none.
        verify: which results to have checked before they are used; as a command line says it, or
            True for `auto`.
        crossed: whether results cross a process boundary, which `auto` asks.
        rng: secret; draws which results are checked, and what devices are probed with.
        door: who decides which devices may come in; `credential` is not used then.
        max_devices: how many it takes at once; any number unless given.
    """

    def __init__(
        self,
        credential: str = "",
        *,
        verify: Verification | str | bool = False,
        crossed: bool = True,
        rng: random.Random | None = None,
        door: Doorkeeper | None = None,
        max_devices: int | None = None,
    ) -> None:
        self.dispatcher = Dispatcher()
        self.sessions: dict[int, Session] = {}
        self.door = door if door is not None else OneKey(credential)
        self.verification = Verification.of(verify)
        self.verify = self.verification.active(crossed)
        self._rng = rng or random.SystemRandom()
        self.max_devices = max_devices
        self.regulars = Regulars(self.door)
        self.epoch = 0
        self._buffers: dict[int, Buffer] = {}
        self._resting: dict[int | None, float] = {}  # by identity, until when

    @property
    def ready_devices(self) -> int:
        """How many devices may be given work."""
        return len(self.dispatcher.devices)

    def state(self, session: Session) -> DeviceState:
        """What a device is doing now."""
        if session.state is DeviceState.READY and self.dispatcher.overdue(session.id):
            return DeviceState.OVERDUE
        if session.state is DeviceState.READY and self.dispatcher.busy(session.id):
            return DeviceState.BUSY
        return session.state

    # --- sessions ---

    def opened(self, session: int, now_s: float, address: str = "") -> None:
        """A peer connected, from this address; its `hello` is awaited."""
        self.sessions[session] = Session(session, now_s, address, heard_s=now_s)

    def received(
        self, session_id: int, message: Message, now_s: float, nbytes: int = 0
    ) -> list[Order]:
        """A message came on a session; one that breaks the protocol ends that session alone.

        Args:
            session_id: the session.
            message: what came.
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
                self.door.failed(session.address)
            return self.refuse(session_id, ErrorCode.PROTOCOL, str(error), now_s)

    def _too_much(self, session: Session, message: Message, now_s: float, nbytes: int) -> str:
        """Whether a message is one too many of those that nothing asked for, and how."""
        if isinstance(message, messages.Result | messages.TaskError) and (
            session.probe is not None or is_answer(message.id, session.expected, session.crossing)
        ):
            return ""
        return session.allowance.said(nbytes, now_s) if session.allowance is not None else ""

    def exceeded(self, session_id: int, reason: str, now_s: float) -> list[Order]:
        """A device sent more than it may: its session ends, and it has to rest for a while."""
        session = self.sessions.get(session_id)
        if session is not None and session.identity is not None:
            self._resting[session.identity] = now_s + limits.REST_S
        return self.refuse(session_id, ErrorCode.LIMIT, reason, now_s)

    def awaited_bytes(self, session_id: int) -> tuple[int, int]:
        """The largest result of work that a session may send now, and the largest of all."""
        session = self.sessions.get(session_id)
        if session is None:
            return 0, 0
        work = max((unit.output_bytes for unit in session.expected.values()), default=0)
        probe = session.probe.awaited_bytes if session.probe is not None else 0
        return work, max(work, session.crossing.largest_bytes, probe)

    def refuse(self, session_id: int, code: ErrorCode, reason: str, now_s: float) -> list[Order]:
        """End a session that broke the rules, and say why; one that has ended gets nothing more."""
        if session_id not in self.sessions:
            return []
        session = self.sessions[session_id]
        if code is ErrorCode.QUARANTINED and session.identity is not None:
            self.door.quarantined(session.identity, reason)
        orders: list[Order] = [Send(session_id, messages.Error(code, reason)), Close(session_id)]
        lost = code in (ErrorCode.LIMIT, ErrorCode.PROTOCOL)  # else it is the PS that ends it
        return orders + self.closed(session_id, reason, now_s, lost=lost)

    def refuse_identity(
        self, identity: int, code: ErrorCode, reason: str, now_s: float
    ) -> list[Order]:
        """End every session of a device, and say why."""
        mine = [s.id for s in self.sessions.values() if s.identity == identity]
        return [order for id in mine for order in self.refuse(id, code, reason, now_s)]

    def closed(
        self, session_id: int, reason: str, now_s: float, *, lost: bool = True
    ) -> list[Order]:
        """A session ended, for whatever reason; its unfinished units go to others."""
        session = self.sessions.pop(session_id, None)
        if session is None or session.state in (DeviceState.JOINING, DeviceState.LOST):
            return []
        self.regulars.depart(session, reason, now_s, lost=lost)
        probing = session.state is DeviceState.PROBING
        session.state, session.reason = DeviceState.LOST, reason
        if probing:
            return []
        self.epoch += 1
        return self._do(events.DeviceLost(session_id), now_s)

    def tick(self, now_s: float) -> list[Order]:
        """Time passed: end sessions that are silent or have not said hello."""
        orders: list[Order] = []
        for session in list(self.sessions.values()):
            joining = session.state is DeviceState.JOINING
            limit_s = limits.HANDSHAKE_S if joining else limits.SILENCE_S
            since_s = now_s - (session.opened_s if joining else session.heard_s)
            if since_s > limit_s:
                what = "said no hello" if joining else "was silent"
                reason = f"the device {what} for {since_s:.0f} s"
                orders += self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
        self.regulars.tick(self.sessions.values(), now_s)
        self._resting = {who: s for who, s in self._resting.items() if s > now_s}
        return orders + self._do(events.Tick(), now_s)

    def credit(self, now_s: float) -> None:
        """Tell the doorkeeper what the connected devices did since it was told last."""
        self.regulars.credit(self.sessions.values(), now_s)

    def _hello(self, session: Session, message: Message, now_s: float) -> list[Order]:
        if not isinstance(message, messages.Hello):
            raise ProtocolError(f"the first message must be hello, not {message.TYPE}")
        if message.version != limits.VERSION:
            reason = (
                f"this server speaks protocol version {limits.VERSION} and the device speaks "
                f"{message.version}; install the same version of cleave on both"
            )
            return self.refuse(session.id, ErrorCode.VERSION, reason, now_s)
        if Op.MATMUL.value not in message.ops or DType.FP32.value not in message.dtypes:
            raise ProtocolError("a device needs op 'matmul' and dtype 'fp32'; this one lacks one")
        if message.memory_bytes < limits.MIN_DEVICE_MEMORY_BYTES:
            reason = (
                f"the device offers {message.memory_bytes} bytes of memory; "
                f"it must offer {limits.MIN_DEVICE_MEMORY_BYTES} or more"
            )
            return self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
        # This one is among the sessions.
        if self.max_devices is not None and len(self.sessions) > self.max_devices:
            reason = f"this server takes {self.max_devices} devices and has them; try again later"
            return self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
        # Last, for it may use up a join code.
        admission = self.door.admit(message, session.address)
        if isinstance(admission, Refusal):
            return self.refuse(session.id, admission.code, admission.reason, now_s)
        known = admission.identity is not None
        rest_s = self._resting.get(admission.identity, now_s) - now_s if known else 0.0
        if rest_s > 0:
            reason = f"this device sent more than it may; it may come back in {rest_s:.0f} s"
            return self.refuse(session.id, ErrorCode.LIMIT, reason, now_s)
        orders = self._take_over(admission, now_s)
        session.allowance = Allowance(now_s)
        session.measured_by = admission.measured_by
        session.name = admission.name or clean_name(message.name)
        session.profile = clean_name(message.profile)
        session.kind = DeviceKind.named(message.kind)
        session.identity = admission.identity
        session.reputation = Reputation(wrong=admission.faults, penalty=float(admission.faults))
        session.measure = message.measure
        session.rates = _bounded(
            DeviceRates(
                device=session.id,
                downlink_bytes_per_s=message.downlink_bytes_per_s,
                uplink_bytes_per_s=message.uplink_bytes_per_s,
                flops_per_s=message.flops_per_s or ASSUMED_FLOPS_PER_S,
                latency_s=message.latency_s,
                memory_bytes=message.memory_bytes,
                dtypes=message.dtypes,
            )
        )
        welcome = messages.Welcome(
            session.id, server=self.door.server, credential=admission.credential
        )
        orders.append(Send(session.id, welcome))
        stated = bool(message.downlink_bytes_per_s and message.uplink_bytes_per_s)
        if not stated and (before := self.regulars.rates_before(session, now_s)) is not None:
            session.rates, stated = before, True
        if stated and not session.measure and not self.verify:
            return orders + self._ready(session, now_s)
        effort = THOROUGH if session.measure else STATED if stated else JOINING
        tested = self.verify and not session.measure
        session.probe = Probe(session.rates, effort, self._rng if tested else None)
        session.state = DeviceState.PROBING
        return orders + [Send(session.id, m) for m in session.probe.begin(now_s)]

    def _take_over(self, admission: Admission, now_s: float) -> list[Order]:
        """A device that is here already comes again: the new session counts.

        Its old connection may be dead without anybody having noticed, so the new one cannot be the
        one to refuse. Where both live, the old one is told, and does not come back.
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
            return [order for orders in ends for order in orders]
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

    def _ready(self, session: Session, now_s: float) -> list[Order]:
        assert session.rates is not None
        session.state = DeviceState.READY
        self.epoch += 1
        return [Joined(session.id), *self._do(events.DeviceReady(session.rates), now_s)]

    def _probed(
        self, session: Session, probe: Probe, message: messages.Result, now_s: float
    ) -> list[Order]:
        orders: list[Order] = [Send(session.id, m) for m in probe.result(message, now_s)]
        if probe.fault:
            reason = f"it failed the test of its arithmetic: {probe.fault}"
            return self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)
        if probe.rates is not None and session.measure:
            found = probe.rates
            down, up = found.downlink_bytes_per_s, found.uplink_bytes_per_s
            answer = messages.Measured(down, up, found.latency_s)
            self.sessions.pop(session.id)
            orders += [Send(session.id, m) for m in (answer, messages.Bye("measured"))]
            orders.append(Close(session.id))
        elif probe.rates is not None:
            session.probe = None
            session.rates = _bounded(probe.device)
            orders += self._ready(session, now_s)
        return orders

    def _from_device(self, session: Session, message: Message, now_s: float) -> list[Order]:
        match message:
            case messages.Result() if session.probe is not None:
                return self._probed(session, session.probe, message, now_s)
            case messages.Result():
                return self._result(session, message, now_s)
            case messages.TaskError() if session.probe is not None:
                raise ProtocolError(f"the device could not do the probe: {message.reason}")
            case messages.TaskError():
                if session.expected.pop(message.id, None) is None:
                    return self._unexpected(session, now_s)
                return self._do(events.RunFailed(session.id, message.id, message.reason), now_s)
            case messages.Heartbeat():
                overdue = self.dispatcher.overdue(session.id)
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
                    farewell: list[Order] = [Send(session.id, messages.Bye("drained"))]
                    self.regulars.depart(
                        self.sessions.pop(session.id), "drained", now_s, lost=False
                    )
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

    def _result(self, session: Session, message: messages.Result, now_s: float) -> list[Order]:
        unit = session.expected.pop(message.id, None)
        if unit is None:
            return self._unexpected(session, now_s)
        detail: GemmUnit = unit.detail
        block = detail.block
        dtype = detail.out
        shape = (block.m.size, block.n.size, dtype)
        if (message.rows, message.columns, message.dtype) != shape or payload_bytes(
            message.payload
        ) != unit.output_bytes:
            reason = (
                f"the result is {message.rows}x{message.columns} {message.dtype} of "
                f"{payload_bytes(message.payload)} bytes, not {shape[0]}x{shape[1]} {dtype}"
            )
            session.reputation.was_wrong(Wrong.FORM)
            orders = self._do(events.RunFailed(session.id, message.id, reason), now_s)
            return orders + self._judge(session, reason, now_s)
        session.blocks += 1
        session.flops += unit.flops
        session.compute_s += min(message.compute_s, now_s - session.opened_s)
        if self.verify and self.verification.wants(session.reputation, self._rng):
            return [Check(session.id, message.id, unit, message.payload)]
        return self._do(events.ResultArrived(session.id, message.id, message.payload), now_s)

    def _unexpected(self, session: Session, now_s: float) -> list[Order]:
        """An answer nobody waits for: the dispatcher hears of it, but does not get it.

        A run whose result is being checked is still under way there; a second answer to it must not
        pass for the checked one.
        """
        return self._do(events.LateAnswer(session.id), now_s)

    def checked(self, order: Check, fault: Fault | None, now_s: float) -> list[Order]:
        """A `Check` order is carried out.

        Args:
            order: which.
            fault: what is wrong with the result; None when it is right. A wrong one is computed
                elsewhere, its inputs are sent to the device again, and a device whose reputation
                is gone is quarantined.
            now_s: the time.
        """
        session = self.sessions.get(order.session)
        if session is None:  # it went meanwhile; the unit is with another
            return []
        if fault is None:
            session.reputation.was_right()
            arrived = events.ResultArrived(session.id, order.run, order.payload)
            return self._do(arrived, now_s)
        inputs = frozenset(array.id for array in order.unit.inputs)
        if fault.gross or not session.suspects.explains(order.run, inputs):
            session.reputation.was_wrong(Wrong.GROSS if fault.gross else Wrong.SMALL)
            if session.identity is not None:
                self.door.faulted(session.identity, fault.reason)
            session.suspects.begin(inputs, max(session.expected, default=order.run))
        reason = f"a wrong result: {fault.reason}"
        failed = events.RunFailed(session.id, order.run, reason, spoiled=True)
        return self._do(failed, now_s) + self._judge(session, fault.reason, now_s)

    def _judge(self, session: Session, last: str, now_s: float) -> list[Order]:
        """Quarantine a device whose reputation is gone."""
        reputation = session.reputation
        if not reputation.quarantined or session.id not in self.sessions:
            return []
        wrong = "result" if reputation.wrong == 1 else "results"
        reason = f"quarantined after {reputation.wrong} wrong {wrong}; the last: {last}"
        return self.refuse(session.id, ErrorCode.QUARANTINED, reason, now_s)

    # --- work ---

    def submit(self, work: GemmWork, a: Buffer, b: Buffer, now_s: float) -> list[Order]:
        """Start a GEMM. `a` and `b` are its operands as they lie in memory."""
        self._buffers[work.a.operand] = a
        self._buffers[work.b.operand] = b
        return self._do(events.Submitted(work), now_s)

    def placed(self, unit: Unit, now_s: float) -> list[Order]:
        """A `Place` order is carried out."""
        return self._do(events.Assembled(unit), now_s)

    def release(self, operand: int, now_s: float) -> list[Order]:
        """Nobody will use this operand again."""
        self._buffers.pop(operand, None)
        return self._do(events.OperandReleased(operand), now_s)

    def withdraw(self, work: int, now_s: float) -> list[Order]:
        """A GEMM is done elsewhere; see `events.Withdrawn`."""
        return self._do(events.Withdrawn(work), now_s)

    def pause(self, now_s: float) -> list[Order]:
        """Nothing more is submitted for now; see `events.Paused`."""
        return self._do(events.Paused(), now_s)

    def _do(self, event: events.Event, now_s: float) -> list[Order]:
        return list(self._orders(self.dispatcher.handle(event, now_s), now_s))

    def _orders(self, commands: Iterable[events.Command], now_s: float) -> Iterable[Order]:
        for command in commands:
            match command:
                case events.SendArray(device, array):
                    region = self._buffers[array.operand].region(array.rows, array.columns)
                    rows, columns = region.shape
                    put = messages.Put(array.id, rows, columns, region.dtype.value, region)
                    yield Send(device, put)
                case events.SendRun(device, run, unit):
                    self.sessions[device].expected[run] = unit
                    self.sessions[device].crossing.sent(run)
                    yield Send(device, _run_message(run, unit))
                case events.Assemble(unit, payload):
                    yield Place(unit, payload)
                case events.SendDrop(device, ids):
                    yield Send(device, messages.Drop(ids))
                case events.SendCancel(device, runs):
                    session = self.sessions[device]
                    for run in runs:
                        if (awaited := session.expected.pop(run, None)) is not None:
                            session.crossing.cancelled(run, awaited.output_bytes)
                    yield Send(device, messages.Cancel(runs))
                case events.Finished(work):
                    yield Done(work)
                case events.Failed(work, reason):
                    yield Failure(work, reason)
                case events.Overdue(device, overdue):
                    self.epoch += 1
                    self.sessions[device].reason = "it does not answer" if overdue else ""
                    yield Late(device, overdue)
                case events.Drained(device):
                    yield Send(device, messages.Bye("drained"))
                    yield Close(device)
                    if (drained := self.sessions.pop(device, None)) is not None:
                        self.regulars.depart(drained, "drained", now_s, lost=False)


def _bounded(rates: DeviceRates) -> DeviceRates:
    """Rates that the planner can calculate with, whatever a device states or a probe finds."""
    return replace(
        rates,
        downlink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.downlink_bytes_per_s),
        uplink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.uplink_bytes_per_s),
        flops_per_s=_within(limits.MIN_FLOPS_PER_S, rates.flops_per_s),
        latency_s=min(limits.MAX_LATENCY_S, rates.latency_s),
    )


def _within(least: float, value: float) -> float:
    return min(limits.MAX_PER_S, max(least, value))


def _run_message(run: int, unit: Unit) -> messages.Run:
    detail: GemmUnit = unit.detail
    return messages.Run(
        id=run,
        op=detail.op.value,
        inputs=tuple(array.id for array in unit.inputs),
        transpose_a=detail.transpose_a,
        transpose_b=detail.transpose_b,
        out=detail.out,
    )
