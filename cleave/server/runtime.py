"""The live runtime: real time, real connections, and one asyncio loop that owns all sessions.

Only the loop's thread changes the session manager. The training thread submits GEMMs and steps to
the loop, waits for results, and reads counters and device states without a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, TypeVar

import numpy as np

from cleave.arrays import Buffer
from cleave.coding import Coder, SharedArray
from cleave.errors import FleetError, ProtocolError
from cleave.fleet.product import GemmFuture
from cleave.fleet.runtime import Information, Runtime
from cleave.protocol import codec, limits, messages
from cleave.protocol.codec import decode, encode, payload_bytes
from cleave.protocol.features import may_send
from cleave.protocol.messages import ByeCode, ErrorCode, Message
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.instructions import Aside, Check, ForRuntime, Joined, Note, Overdue, Send
from cleave.scheduler.rounds.work import RoundResult, RoundWork
from cleave.scheduler.sessions.admission import clean_text
from cleave.scheduler.sessions.session import EventKind, EventListener, Session
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.outcomes import StageOutcome, StepFailed
from cleave.scheduler.stages.work import StepWork
from cleave.server.block_times import BlockTimes, TimeSpan
from cleave.transport.connection import Accepted, ConnectionLostError, CutError
from cleave.transport.frame_limits import AwaitedSizes
from cleave.verify import Judgement

_logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

CHECK_INLINE_FLOPS = 4e6
"""Maximum FLOPs of a task whose result is checked in the event loop, to avoid waking a thread."""

TICK_S = 0.25
"""Time between ticks of the session manager. A tick detects silent devices and overdue tasks."""

_CLOSING: Final = "the server is closing"
_PREFIXES: Final = (("G", 1e9), ("M", 1e6), ("k", 1e3))
_MAX_REASON: Final = 200  # maximum length of the reason why a connection ended, in characters

PACK_IN_THREAD_BYTES = 4 * 2**20
"""Size above which a strided array is packed in a worker thread, to keep the event loop free."""


@dataclass(frozen=True, slots=True)
class Numbering:
    """The sequence of session numbers of one server: `first`, `first + step` and so on."""

    first: int = 1
    step: int = 1


@dataclass(slots=True)
class _Outgoing:
    """A message in the send queue of a device."""

    message: Message
    kind: TrafficKind = TrafficKind.OTHER
    array: SharedArray | None = None  # set if the message's array may be compressed


@dataclass(slots=True)
class _Peer:
    """The runtime's state for one connected device."""

    connection: Accepted
    record: Session
    data_bytes: int = 0  # bytes that had arrived at the last tick
    times: BlockTimes = field(default_factory=BlockTimes)
    outbox: deque[_Outgoing] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    closing: bool = False
    name: str = ""  # set once the device has joined
    refusal: messages.Error | None = None  # error that the PS sent to end the session, if any
    farewell: str = ""  # reason in the `bye` that the PS sent to the device

    def close(self) -> None:
        """End the session once the queued messages are sent."""
        self.closing = True
        self.wake.set()


class LiveRuntime(Runtime):
    """A runtime that serves device sessions in an asyncio loop, in real time.

    `events` is called in the event loop's thread with every event of the fleet.
    """

    clock = "wall"

    def __init__(
        self,
        manager: SessionManager,
        events: EventListener | None = None,
        numbering: Numbering = Numbering(),
    ) -> None:
        super().__init__(manager, np.random.default_rng(secrets.randbits(128)))
        self._tell_listener = events or (lambda kind, session, text: None)
        self._given_again = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._peers: dict[int, _Peer] = {}
        self._ids = count(numbering.first, numbering.step)
        self._checker = ThreadPoolExecutor(1, "cleave-verify")
        self._coder = Coder()
        self._checking = 0  # number of checks that are queued or running in the checker's thread
        self._finished: dict[int, threading.Event] = {}
        self._step_token: object = None
        self._outcomes = queue.SimpleQueue[
            tuple[StageOutcome | RoundResult, StepWork | RoundWork | None]
        ]()
        self._closed = False
        self._ending = False

    # --- sessions, in the loop ---

    async def session(
        self,
        connection: Accepted,
        first: Message | None = None,
        address: str = "",
        answered: Callable[[messages.Error | None, str], None] | None = None,
    ) -> None:
        """Serve one device until its session ends.

        Args:
            first: the device's `hello`; None if the `hello` has not been read yet.
            answered: called after the PS has processed `first`, with an error (None if the PS
                accepted the `hello`) and the device's name. It is called again if the PS later ends
                the session with an error before the device has joined.
        """
        session = next(self._ids)
        self.manager.opened(session, self.now(), address)
        peer = _Peer(connection, self.manager.sessions[session])
        self._peers[session] = peer
        connection.await_results(lambda: AwaitedSizes(*self.manager.awaited_bytes(session)))
        sender = asyncio.create_task(self._send_all(peer))
        turned_away: messages.Error | None = None
        reason = "the connection broke"
        try:
            if first is not None:
                done = self.manager.received(session, first, self.now())
                turned_away = _refusal(done, session)
                if answered is not None:
                    answered(turned_away, _name(peer.record))
                self.execute(done)
            while not peer.closing:
                await self._heard(peer, await connection.receive())
        except CutError as error:
            reason = str(error)
            self.execute(self.manager.exceeded(session, reason, self.now()))
        except ConnectionLostError as error:
            reason = str(error)
        except ProtocolError as error:
            reason = str(error)
            self.execute(self.manager.refuse(session, ErrorCode.PROTOCOL, reason, self.now()))
        finally:
            why = self._ended(peer, clean_text(_CLOSING if self._ending else reason, _MAX_REASON))
            if peer.refusal not in (None, turned_away) and not peer.name and answered is not None:
                # The device never joined: report the error like a refused hello.
                answered(peer.refusal, _name(peer.record))
            await asyncio.wait([sender], timeout=1.0)
            sender.cancel()
            await connection.close()
            if peer.name:
                why = f" ({why})" if why else ""
                _logger.info("%s left%s; %s", peer.name, why, self._fleet_size())

    async def _heard(self, peer: _Peer, data: bytes) -> None:
        peer.record.counters.uplink_bytes += len(data)
        kind, saved_bytes = TrafficKind.OTHER, 0
        try:
            message = decode(data, limits.MAX_DEVICE_HEADER_BYTES)
            now_s = self.now()
            if isinstance(message, messages.ResultCoded):
                coded_bytes = payload_bytes(message.payload)
                message = await self._decoded(peer, message)
                saved_bytes = payload_bytes(message.payload) - coded_bytes
            kind = peer.record.kind_of(message)
            self._counters.saved.up.count(kind, saved_bytes)
        finally:  # invalid messages also count as network traffic
            self._counters.traffic.up.count(kind, len(data))
        match message:
            case messages.Result() if peer.record.probe is None:
                peer.times.answered(message.id, message.compute_s, now_s)
            case messages.Computed():
                peer.times.computed(message.id, message.compute_s, now_s)
            case messages.TaskError():
                peer.times.given_up((message.id,))
        self.execute(self.manager.received(peer.record.id, message, now_s, len(data)))

    async def _decoded(self, peer: _Peer, message: messages.ResultCoded) -> messages.Result:
        """Decompress a `result_coded` message. Raise ProtocolError if it is not allowed."""
        if not may_send(message, peer.record.features):
            raise ProtocolError("a compressed result arrived without the feature `coding`")
        if not peer.record.may_code:
            raise ProtocolError("a compressed result arrived before `code_results` permitted it")
        return await self._coder.result(message)

    def _ended(self, peer: _Peer, reason: str) -> str:
        """Close a session. Return the PS's reason for ending the session, or else `reason`."""
        session = peer.record.id
        known = session in self.manager.sessions
        self.execute(self.manager.closed(session, reason, self.now(), lost=not self._ending))
        refusal = peer.refusal
        if refusal is not None:
            reason = refusal.message
        elif not known:  # the session manager ended the session with a `bye`
            reason = peer.farewell
        outlawed = refusal is not None and refusal.code is ErrorCode.QUARANTINED
        if peer.name or outlawed:  # report now: sending the queue may take long
            kind = EventKind.QUARANTINE if outlawed else EventKind.LEAVE
            self._tell_listener(kind, peer.record, reason)
        del self._peers[session]
        peer.close()
        return reason

    async def _send_all(self, peer: _Peer) -> None:
        """Encode and send a device's queued messages, in order, until its session ends."""
        try:
            while True:
                while peer.outbox:
                    outgoing = peer.outbox.popleft()
                    message, kind = outgoing.message, outgoing.kind
                    parts = await self._encoded(outgoing)
                    began_s = self.now()
                    if isinstance(message, messages.Put):
                        peer.times.sending(began_s)
                    self.manager.sending(peer.record.id, began_s)
                    sent_bytes = await peer.connection.send(parts)
                    self._counters.traffic.down.count(kind, sent_bytes)
                    peer.record.counters.downlink_bytes += sent_bytes
                    match message:
                        case messages.Run() | messages.RunGraph() if peer.record.probe is None:
                            peer.times.asked(message.id, self.now())
                        case messages.Fetch():
                            peer.times.fetching(message.id, self.now())
                        case messages.Cancel():
                            peer.times.given_up(message.ids)
                if peer.closing:
                    await peer.connection.close()
                    return
                peer.wake.clear()
                await peer.wake.wait()
        except ConnectionLostError:
            return  # `session` gets the same error from `receive`, and reports it

    async def _encoded(self, outgoing: _Outgoing) -> list[codec.Buffer]:
        """Encode a message as a list of buffers. Compress or pack large arrays in threads."""
        message = outgoing.message
        if not isinstance(message, messages.Put):
            return encode(message)
        if outgoing.array is not None:
            coded = await self._coder.put(message, outgoing.array)
            if isinstance(coded, messages.PutCoded):
                saved_bytes = payload_bytes(message.payload) - payload_bytes(coded.payload)
                self._counters.saved.down.count(outgoing.kind, saved_bytes)
                return encode(coded)
        payload = message.payload
        strided = isinstance(payload, Buffer) and not payload.array.flags.c_contiguous
        if strided and payload_bytes(payload) > PACK_IN_THREAD_BYTES:
            return await asyncio.to_thread(encode, message)
        return encode(message)

    def _announce(self, session: int) -> None:
        record = self.manager.sessions[session]
        peer = self._peers[session]
        peer.name = _name(record)
        self._tell_listener(EventKind.JOIN, record, record.profile)
        rates = record.rates
        if rates is not None:
            _logger.info(
                "%s joined (%s, %s down, %s up); %s",
                peer.name,
                _shown(rates.flops_per_s, "FLOP/s"),
                _shown(rates.downlink_bytes_per_s, "B/s"),
                _shown(rates.uplink_bytes_per_s, "B/s"),
                self._fleet_size(),
            )

    def _fleet_size(self) -> str:
        """Return a phrase that states how many devices may receive tasks."""
        ready = self.manager.ready_devices
        if ready or self.manager.scheduler.idle:
            return f"{ready} device{'' if ready == 1 else 's'}"
        return "no devices: training waits until one joins"

    def execute(self, instructions: Iterable[ForRuntime]) -> None:
        """Report reissued tasks to the event listener, then execute the instructions."""
        self._tell_of_reissues()
        super().execute(instructions)

    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        """Queue a message for a device.

        Drop the message if the device has left or does not support messages of this type.
        """
        peer = self._peers.get(session)
        # A device that did not state a feature in its hello would reject the feature's messages.
        if peer is None or not may_send(message, peer.record.features):
            return
        if isinstance(message, messages.Error):
            peer.refusal = message
            peer.outbox.clear()  # the device needs no other message
            peer.connection.dismiss()
        elif isinstance(message, messages.Bye):
            peer.farewell = message.reason
        array = None
        if peer.record.codes_puts and isinstance(message, messages.Put):
            array = self._coder.shared(message)
        peer.outbox.append(_Outgoing(message, kind, array))
        peer.wake.set()

    def end(self, session: int) -> None:
        if (peer := self._peers.get(session)) is not None:
            peer.close()

    def tell(self, information: Information) -> None:
        """Report information from the session manager to the event listener or the log."""
        match information:
            case Joined(session):
                self._announce(session)
            case Overdue(session, overdue):
                text = "it does not answer" if overdue else "it answers again"
                self._tell_listener(EventKind.OVERDUE, self.manager.sessions.get(session), text)
            case Aside(session, aside, reason):
                self._tell_aside(session, reason if aside else "")
            case Note(text):
                _logger.warning("%s", text)

    def _tell_aside(self, session: int, reason: str) -> None:
        """Report that a device is set aside or, if `reason` is empty, that it gets tasks again."""
        record = self.manager.sessions.get(session)
        if record is not None:
            text = f"set aside: {reason}" if reason else "it passed a trial and gets tasks again"
            self._tell_listener(EventKind.ASIDE, record, text)
            level = logging.WARNING if reason else logging.INFO
            _logger.log(level, "%s: %s; %s", _name(record), text, self._fleet_size())

    def _tell_of_reissues(self) -> None:
        """Report how many tasks and stage passes were reissued since the last call."""
        done = self.manager.scheduler.counters
        given_again = done.reissued + done.speculative + self.manager.stages.repeated
        more = given_again - self._given_again
        if more:
            self._given_again = given_again
            self._tell_listener(
                EventKind.REISSUE,
                None,
                f"{more} {'task was' if more == 1 else 'tasks were'} reassigned",
            )

    def check(self, check: Check) -> list[ForRuntime]:
        """Check a result in a thread, or in the loop if the task is small and no check is running.

        Results are checked one at a time, because all blocks of a GEMM share the GEMM's secret
        vectors. Return no instructions if the checker's thread checks the result.
        """
        future = self._futures.get(check.task.job)
        if future is None or self.loop is None:
            return super().check(check)
        loop = self.loop

        def judged() -> Callable[[], list[ForRuntime]]:
            """Check the result. Return a function that processes the verdict in the event loop."""
            try:
                found = self.judge(check, future)
            except Exception as error:  # noqa: BLE001 - raised where the GEMM is waited for
                reason = f"unexpected {type(error).__name__} while checking a result: {error}"
                return partial(self._check_broke, check.task.job, reason)
            return partial(self.checked, check, *found)

        def conclude(act: Callable[[], list[ForRuntime]]) -> None:
            self._checking -= 1
            self.execute(act())

        if check.task.flops <= CHECK_INLINE_FLOPS and not self._checking:
            return judged()()
        self._checking += 1
        self._checker.submit(lambda: loop.call_soon_threadsafe(conclude, judged()))
        return []

    def _check_broke(self, job: int, reason: str) -> list[ForRuntime]:
        """End a GEMM whose check raised an error, and withdraw the GEMM to release its operands."""
        self.conclude(job, reason)
        return self.manager.withdraw(job, self.now())

    def checked(self, check: Check, judgement: Judgement, took_s: float) -> list[ForRuntime]:
        """Report the result to the event listener if it is wrong, then process the verdict."""
        if (fault := judgement.fault) is not None:
            record = self.manager.sessions.get(check.session)
            name = record.name if record else f"device {check.session}"
            _logger.warning(
                "%s sent a wrong result: %s; it is recomputed elsewhere", name, fault.reason
            )
            self._tell_listener(EventKind.WRONG, record, fault.reason)
        return super().checked(check, judgement, took_s)

    def conclude(self, job: int, error: str) -> None:
        """Mark a GEMM as ended. The training thread later rounds the GEMM's partial sums."""
        future = self._futures.get(job)
        if future is None or self._finished[job].is_set():
            return
        future.error = error
        if future.job.plan is not None:
            self._counters.tiles += len(future.job.plan.tiles)
        self._finished[job].set()

    async def watch(self) -> None:
        """Call the session manager's `tick` every `TICK_S` seconds until this task is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Record which devices are sending data, and call the session manager's `tick`.

        On a slow link, receiving one message may take longer than a device may be silent.
        """
        now_s = self.now()
        for peer in self._peers.values():
            data_bytes = peer.connection.data_bytes
            if data_bytes - peer.data_bytes >= limits.MIN_BYTES_PER_S:  # more than a trickle
                peer.data_bytes = data_bytes
                peer.record.heard_s = now_s
        self.execute(self.manager.tick(now_s))

    async def end_sessions(self) -> None:
        """Queue a `bye` for every device, and end the current step and all GEMMs with an error."""
        self._ending = True
        for peer in self._peers.values():
            peer.outbox.append(_Outgoing(messages.Bye(_CLOSING, ByeCode.CLOSING)))
            peer.close()
        # A thread that waits for a GEMM must not block forever.
        for job in list(self._futures):
            self.conclude(job, "the fleet was closed")
        self.tell_step(StepFailed("the fleet was closed", final=True), None)

    def move(self, count: int, address: str, admitted_before_s: float = math.inf) -> int:
        """Tell up to `count` idle devices to move to another server. Return how many were told.

        `address` is the other server's join URL without a credential. Only devices admitted before
        `admitted_before_s`, on the clock of `now`, are moved.
        """

        def moved() -> int:
            before = len(self.manager.sessions)
            self.execute(self.manager.move(count, address, self.now(), admitted_before_s))
            return before - len(self.manager.sessions)

        return self.in_loop(moved)

    def timeline(self, session: int) -> list[TimeSpan]:
        """Return a device's latest time spans on the clock of `now`. Call this in the loop."""
        peer = self._peers.get(session)
        return peer.times.spans() if peer is not None else []

    def now(self) -> float:
        return time.monotonic()

    def in_loop(self, ask: Callable[[], _Answer]) -> _Answer:
        """Run `ask` in the event loop and return its result. Call this from any other thread."""

        async def asked() -> _Answer:
            return ask()

        loop = self.loop
        if loop is None or not loop.is_running():  # no loop: nothing changes the state
            return ask()
        return asyncio.run_coroutine_threadsafe(asked(), loop).result()

    # --- requests from the fleet, in the training thread ---

    def start(self, future: GemmFuture) -> None:
        """Submit a GEMM to the event loop. Raise FleetError if the fleet is closed."""
        if self._closed or self.loop is None:
            raise FleetError("the fleet is closed; create a new one to continue")
        self.count(future)
        self._finished[future.job.id] = threading.Event()
        self.loop.call_soon_threadsafe(self._start, future)

    def _start(self, future: GemmFuture) -> None:
        """Submit a GEMM to the session manager. An unexpected error makes the GEMM fail."""
        try:
            self.submit(future)
        except Exception as error:  # noqa: BLE001 - raised where the GEMM is waited for
            self.conclude(future.job.id, f"unexpected {type(error).__name__}: {error}")

    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Wait for a GEMM, then round its partial sums. Return False on timeout."""
        began_s = time.perf_counter()
        job = future.job.id
        event = self._finished.get(job)
        finished = event is None or event.wait(timeout_s)
        self._counters.fleet_s += time.perf_counter() - began_s
        if not finished:
            self._counters.waited_s += time.perf_counter() - began_s
            return False
        # Rounding the partial sums is slow, so the training thread does it, not the loop.
        output = self._outputs.pop(job, None)
        if output is None:  # another waiting thread rounds the partial sums
            return self.wait_until(lambda: future.done, timeout_s)
        output.finish()
        del self._futures[job], self._finished[job]
        self._counters.waited_s += time.perf_counter() - began_s
        future.done = True
        return True

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Poll a condition until it is True. Return False on timeout.

        Raise FleetError if the fleet is closed before the condition is True.
        """

        def met() -> bool:
            holds = condition()
            if self._closed and not holds:
                raise FleetError(_CLOSING)
            return holds

        return super().wait_until(met, timeout_s)

    def withdraw(self, future: GemmFuture) -> None:
        """Withdraw a GEMM that is no longer needed, and wait until the GEMM has ended."""
        if self.loop is not None and not self._closed:
            job = future.job.id
            self._post(lambda: self.execute(self.manager.withdraw(job, self.now())))
            self.wait(future)
        elif not self.wait(future, 0.0):  # no loop remains to finish the GEMM
            future.error, future.done = _CLOSING, True

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        if self.loop is not None and not self._closed:
            self.loop.call_soon_threadsafe(call, *arguments)

    def begin_step(self, work: StepWork) -> None:
        """Start a step by stages. Raise FleetError if the fleet is closed."""
        self._begin(self.manager.begin_step, work)
        self.count_step(work)

    def begin_round(self, work: RoundWork) -> None:
        """Start a round of local updates. Raise FleetError if the fleet is closed."""
        self._begin(self.manager.begin_round, work)

    def _begin(self, what: Callable[..., list[ForRuntime]], work: StepWork | RoundWork) -> None:
        if self._closed or self.loop is None:
            raise FleetError("the fleet is closed; create a new one to continue")
        self._step_token = work.token
        self.loop.call_soon_threadsafe(self._step_call, what, work)

    def change_step(self, change: Callable[..., list[ForRuntime]], *arguments: object) -> None:
        self._post(self._step_call, change, *arguments)

    def _step_call(self, what: Callable[..., list[ForRuntime]], *arguments: object) -> None:
        """Call a method of the session manager. An unexpected error makes the step fail."""
        try:
            self.execute(what(*arguments, self.now()))
        except Exception as error:  # noqa: BLE001 - raised where the step is waited for
            self.tell_step(
                StepFailed(f"unexpected {type(error).__name__}: {error}", final=True), None
            )

    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | RoundResult | None:
        began_s = time.perf_counter()
        try:
            while True:
                outcome, work = self._outcomes.get(timeout=timeout_s)
                if work is None or work.token is self._step_token:  # skip abandoned steps
                    return outcome
        except queue.Empty:
            return None
        finally:
            took_s = time.perf_counter() - began_s
            self._counters.fleet_s += took_s
            self._counters.waited_s += took_s

    def tell_step(
        self, outcome: StageOutcome | RoundResult, work: StepWork | RoundWork | None
    ) -> None:
        """Queue an outcome for `next_outcome`, which skips outcomes of abandoned steps."""
        self._outcomes.put((outcome, work))

    def quarantine(self, device: int, reason: str) -> None:
        self._post(self._quarantine, device, reason)

    def _quarantine(self, device: int, reason: str) -> None:
        """Report a wrong result and quarantine the device that sent it. Runs in the event loop."""
        if (record := self.manager.sessions.get(device)) is not None:
            _logger.warning("%s sent a wrong result: %s", _name(record), reason)
            self._tell_listener(EventKind.WRONG, record, reason)
        self.execute(self.manager.refuse(device, ErrorCode.QUARANTINED, reason, self.now()))

    def release(self, operand: int) -> None:
        self._post(lambda: self.execute(self.manager.release(operand, self.now())))

    def unbind(self, operand: int) -> None:
        self._post(self.manager.unbind, operand)

    def close(self) -> None:
        """Stop the checker and compression threads. The `Server` stops the loop."""
        self._closed = True
        self._checker.shutdown(wait=False, cancel_futures=True)
        self._coder.close()


def _name(record: Session) -> str:
    return record.name or f"device {record.id}"


def _shown(per_s: float, suffix: str) -> str:
    """Format a rate with the prefix G, M or k. Rates below 1000 also get the prefix k."""
    prefix, factor = next((p for p in _PREFIXES if per_s >= p[1]), _PREFIXES[-1])
    value = per_s / factor
    return f"{value:.0f} {prefix}{suffix}" if value >= 10 else f"{value:.1f} {prefix}{suffix}"


def _refusal(instructions: Sequence[ForRuntime], session: int) -> messages.Error | None:
    """Return the first error that `instructions` send to a session; None without an error."""
    sent = (one for one in instructions if isinstance(one, Send))
    said = (one.message for one in sent if one.session == session)
    return next((message for message in said if isinstance(message, messages.Error)), None)
