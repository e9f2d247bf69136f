"""A device's session, which combines a connection to the PS, a `DeviceCore` and a `Computer`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from cleave import coding
from cleave.arrays import DType
from cleave.device.compute_thread import Computer, Outcome
from cleave.device.core import Action, DeviceCore, HeldArrays, Order
from cleave.errors import CleaveError, ProtocolError, VersionError
from cleave.machine.sensors import IDLE_BYTES
from cleave.protocol import codec, features, limits, messages
from cleave.protocol.codec import decode, encode, payload_bytes
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import Bye, ByeCode, Error, ErrorCode, Message, Op, Role
from cleave.transport.connection import Connection, ConnectionLostError
from profiles.device_profile import DeviceKind

_DONE: Final = (ByeCode.DRAINED, ByeCode.MEASURED, ByeCode.LEAVING)  # no reconnect
_PASSING: Final = (ErrorCode.LIMIT, ErrorCode.PROTOCOL)  # temporary causes


def least_wait_s(message: Bye | Error) -> float | None:
    """Return the minimum wait in seconds before a reconnect; None if reconnecting is forbidden."""
    stated_s = min(message.retry_after_s, limits.MAX_RETRY_AFTER_S)
    if isinstance(message, Bye):
        return None if message.code in _DONE else stated_s
    if message.code in _PASSING:
        return stated_s
    known = message.code in ErrorCode.__members__.values()
    return stated_s if stated_s > 0 and not known else None


VERSIONS: Final = (limits.VERSION,)  # protocol versions that a device supports
_ANSWER_S: Final = 60.0  # time to wait for a pong, which a long message may delay on a slow link


class RefusedError(CleaveError):
    """The server ended the session with an error.

    Attributes:
        comes_back_s: minimum wait in seconds before a reconnect; None if reconnecting is forbidden.
        for_good: whether the refusal is permanent, for example because of an invalid credential or
            version, a quarantine, or a second session of the same device.
    """

    def __init__(self, error: messages.Error) -> None:
        super().__init__(f"the server refused this device: {error.message}")
        self.code = error.code
        self.comes_back_s = least_wait_s(error)
        self.for_good = self.comes_back_s is None


class UnansweredError(CleaveError):
    """The server closed the connection or timed out before the welcome. A retry may succeed."""


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device's number (0 until the PS welcomes the device) and its session's work counters."""

    device: int = 0
    done: DeviceCounters = field(default_factory=DeviceCounters)


@dataclass(slots=True)
class Keeping:
    """The arrays that a device keeps between the sessions of one process."""

    held: HeldArrays | None = None


TELEMETRY_S: Final = 30.0  # interval between two telemetry messages of a device, in seconds


class DeviceSession:
    """Runs one device over one connection to the PS.

    The session passes the PS's messages to a `DeviceCore`, starts the tasks and sends the messages
    that the core returns.

    Args:
        on_welcomed: called with the device's number once the PS has welcomed the device.
        on_idle: called after a `drop`, at most once a second, if the device has no unfinished runs
            and stores less than `IDLE_BYTES`.
        on_welcome: called with the PS's `welcome` message, which may contain a new credential.
        telemetry: returns measurements for the PS; called in a thread every `TELEMETRY_S` seconds.
        check: called with every received message before it is processed. An exception ends the
            session.
        silence_s: seconds without a message after which the session pings the PS.
        keeping: stores the device's arrays for its next session if the connection is lost.

    Attributes:
        bye: the PS's `bye` message; None until the session ends with `bye`.
        measured: the PS's `measured` message, if the session requested a measurement; else None.
    """

    def __init__(
        self,
        connection: Connection,
        computer: Computer,
        hello: messages.Hello,
        on_welcomed: Callable[[int], None] | None = None,
        on_idle: Callable[[], None] | None = None,
        on_welcome: Callable[[messages.Welcome], None] | None = None,
        telemetry: Callable[[], dict[str, float]] | None = None,
        *,
        check: Callable[[Message], None] | None = None,
        silence_s: float = limits.SILENCE_S,
        keeping: Keeping | None = None,
    ) -> None:
        self._keeping = keeping or Keeping()
        held = self._keeping.held
        hello = replace(hello, holds=held.of) if held is not None else hello
        self.core = DeviceCore(hello.memory_bytes, hello.features, held)
        self.bye: messages.Bye | None = None
        self.measured: messages.Measured | None = None
        self.downlink_bytes = 0
        self.uplink_bytes = 0
        self._connection = connection
        self._computer = computer
        self._hello = hello
        self._on_welcomed = on_welcomed or (lambda _: None)
        self._on_idle = on_idle or (lambda: None)
        self._on_welcome = on_welcome or (lambda _: None)
        self._check = check or (lambda _: None)
        self._telemetry = telemetry
        self._welcomed = asyncio.Event()
        self._idled_s = 0.0
        self._outbox: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._ending = False
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._vanished = False

    @property
    def status(self) -> DeviceStatus:
        welcome = self.core.welcome
        done = DeviceCounters(
            self.core.blocks, self.core.flops, self.downlink_bytes, self.uplink_bytes
        )
        return DeviceStatus(welcome.device if welcome else 0, done)

    @property
    def comes_back_s(self) -> float | None:
        """Return the minimum wait in seconds before a reconnect; None if that is forbidden."""
        return 0.0 if self.bye is None else least_wait_s(self.bye)

    @property
    def welcomed(self) -> bool:
        return self.core.welcome is not None

    @property
    def moves_to(self) -> str:
        """Return the address of the server to connect to next; empty without a redirect."""
        bye = self.bye
        moved = bye is not None and bye.code is ByeCode.MOVED and self.welcomed
        return bye.address if bye is not None and moved else ""

    def drain(self) -> None:
        """Tell the PS to send no new requests, and to end the session after the pending requests.

        Call this method from the session's event loop.
        """
        self._act(self.core.drain())

    async def run(self) -> str:
        """Process the PS's messages until the session ends. Return why it ended.

        Raises:
            CleaveError: if the PS refuses or does not welcome the device, or violates the protocol.
        """
        self._send(self._hello)
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send_all())
                jobs = (self._heartbeat(), self._watch(), self._send_telemetry())
                beside = (sending, *map(group.create_task, jobs))
                try:
                    return await self._serve(sending)
                finally:
                    for task in beside:
                        task.cancel()
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
            raise first from first.__cause__
        finally:
            self._computer.close()
            await self._connection.close()

    async def _serve(self, sending: asyncio.Task[None]) -> str:
        """Receive messages until the session ends. Return why it ended."""
        try:
            return await self._receive_all()
        except ConnectionLostError as error:
            self._keeping.held = None if self.core.draining else self.core.held
            if self.core.welcome is None:
                raise _closed(error) from error
            return "the server no longer answers" if self._vanished else str(error)
        except ProtocolError as error:
            another = isinstance(error, VersionError)
            code = ErrorCode.VERSION if another else ErrorCode.PROTOCOL
            self._send(messages.Error(code, str(error), versions=VERSIONS if another else ()))
            self._ending = True
            await asyncio.wait([sending], timeout=1.0)
            raise

    async def _receive_all(self) -> str:
        """Pass each message to the core and execute the actions. Return why the session ended."""
        while True:
            timeout_s = None if self.core.welcome else limits.HANDSHAKE_S
            try:
                async with asyncio.timeout(timeout_s):
                    data = await self._connection.receive()
            except TimeoutError:
                raise _unwelcomed() from None
            self._heard_s = time.monotonic()
            self.downlink_bytes += len(data)
            message = decode(data)
            self._check(message)
            match message:
                case messages.Bye():
                    self.bye = message
                    return message.reason or "the server ended the session"
                case messages.Error():
                    raise RefusedError(message)
                case _ if not self.welcomed and not isinstance(message, messages.Welcome):
                    raise ProtocolError(
                        f"a device does not expect {message.TYPE} before its welcome"
                    )
                case messages.Measured() if self._hello.measure:
                    self.measured = message
                    return "the link is measured"
                case messages.Welcome():
                    self._keeping.held = None  # the core has it now
                    self._on_welcome(message)
                    self._act(self.core.received(message))
                    self._on_welcomed(message.device)
                    self._welcomed.set()
                case messages.PutCoded() if payload_bytes(message.payload) >= CODED_LEAST_BYTES:
                    # Messages must be processed in order, so later messages wait for decompression.
                    put = await asyncio.to_thread(self.core.decoded, message)
                    self._act(self.core.received(put))
                case _:
                    self._act(self.core.received(message))
                    if isinstance(message, messages.Drop):
                        self._notice_idle()

    def _notice_idle(self) -> None:
        """Call `on_idle`, at most once a second, if the device has no runs and stores little."""
        now_s = time.monotonic()
        held = self.core.occupied_bytes
        if self.core.idle and held < IDLE_BYTES and now_s - self._idled_s > 1.0:
            self._idled_s = now_s
            self._on_idle()

    def _act(self, actions: list[Action]) -> None:
        """Execute actions from the core: start tasks and queue messages."""
        for action in actions:
            if isinstance(action, Order):
                self._computer.start(action, self._answer)
            else:
                self._send(action)

    def _answer(self, order: Order, outcome: Outcome) -> None:
        """Pass a task's outcome to the core and execute the resulting actions."""
        if isinstance(outcome, str):
            self._act(self.core.failed(order.run, outcome))
        else:
            self._act(self.core.computed(order.run, *outcome))

    def _send(self, message: Message) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def _send_all(self) -> None:
        """Encode and send queued messages, in order, until the session ends."""
        try:
            while True:
                while self._outbox:
                    parts = await self._encoded(self._outbox.popleft())
                    self.uplink_bytes += await self._connection.send(parts)
                if self._ending:
                    return
                self._wake.clear()
                await self._wake.wait()
        except ConnectionLostError:
            return  # `_receive_all` gets the same error and reports it

    async def _encoded(self, message: Message) -> list[codec.Buffer]:
        """Encode a message. Compress a large result if the PS permitted compressed results."""
        if (
            isinstance(message, messages.Result)
            and self.core.codes_results
            and payload_bytes(message.payload) >= CODED_LEAST_BYTES
            and (found := await asyncio.to_thread(coding.coded_payload, message)) is not None
        ):
            return encode(coding.with_coded(message, found))
        return encode(message)

    async def _watch(self) -> None:
        """Close the connection when the PS no longer answers pings.

        An idle PS may send nothing for a long time, but answers pings. Without pings, a failure of
        the PS or the network could stay undetected for about 15 minutes, because the operating
        system continues to accept data to send.
        """
        with suppress(ConnectionLostError):  # `_receive_all` reports the error
            while True:
                heard_s = self._heard_s
                wait_s = heard_s + self._silence_s - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                elif await self._connection.answers(_ANSWER_S):
                    self._heard_s = time.monotonic()
                elif self._heard_s == heard_s:
                    self._vanished = True
                    await self._connection.close()
                    return

    async def _send_telemetry(self) -> None:
        await self._welcomed.wait()
        while self._telemetry is not None:
            values = await asyncio.to_thread(self._telemetry)
            if values:
                self._send(messages.Telemetry(values))
            await asyncio.sleep(TELEMETRY_S)

    async def _heartbeat(self) -> None:
        """Send heartbeats at twice the rate that the PS requires."""
        await self._welcomed.wait()
        while self.core.welcome is not None:
            await asyncio.sleep(max(0.1, self.core.welcome.heartbeat_s / 2))
            # A heartbeat skips the queue: on a slow uplink, sending the queued results may take
            # longer than the PS waits for a heartbeat.
            self._outbox.appendleft(messages.Heartbeat())
            self._wake.set()


async def check_admission(connection: Connection, hello: messages.Hello) -> None:
    """Raise CleaveError unless the PS admits a device with this `hello`. Close the connection.

    The device measures its speed, which takes seconds, between this check and its session. To use
    up no join code, this session begins as a link measurement, and ends at the welcome.

    Raises:
        RefusedError: if the PS refuses the device.
        UnansweredError: if the PS closes the connection or does not answer.
    """
    try:
        async with asyncio.timeout(limits.HANDSHAKE_S):
            await connection.send(encode(replace(hello, measure=True)))
            answer = decode(await connection.receive())
    except TimeoutError:
        raise _unwelcomed() from None
    except ConnectionLostError as error:
        raise _closed(error) from error
    finally:
        await connection.close()
    if isinstance(answer, messages.Error):
        raise RefusedError(answer)


def _unwelcomed() -> UnansweredError:
    return UnansweredError(
        f"the server did not accept this device within {limits.HANDSHAKE_S:.0f} s"
    )


def _closed(error: ConnectionLostError) -> UnansweredError:
    return UnansweredError(f"the server closed the connection: {error}")


def device_hello(
    *,
    credential: str,
    name: str,
    memory_bytes: int,
    flops_per_s: float = 0.0,
    graph_flops_per_s: float = 0.0,
    graph_bf16_flops_per_s: float = 0.0,
    downlink_bytes_per_s: float = 0.0,
    uplink_bytes_per_s: float = 0.0,
    join_code: str = "",
    profile: str = "",
    kind: DeviceKind | None = None,
    graphs: bool = False,
) -> messages.Hello:
    """Return the `hello` message of a device. A rate of 0 means unknown.

    Args:
        memory_bytes: memory budget for arrays and results, in bytes.
        join_code: join code to exchange for a new credential; empty if the device has no join code.
        profile: name of the device profile; empty if unknown.
        kind: kind of device, such as a phone; None if unknown.
    """
    return messages.Hello(
        role=Role.DEVICE,
        credential=credential,
        join_code=join_code,
        name=name,
        ops=(Op.MATMUL.value,),
        dtypes=tuple(dtype.value for dtype in DType),
        memory_bytes=memory_bytes,
        flops_per_s=flops_per_s,
        graph_flops_per_s=graph_flops_per_s,
        graph_bf16_flops_per_s=graph_bf16_flops_per_s,
        downlink_bytes_per_s=downlink_bytes_per_s,
        uplink_bytes_per_s=uplink_bytes_per_s,
        profile=profile,
        kind=kind.value if kind else "",
        versions=VERSIONS,
        features=features.of_device(graphs=graphs),
    )
