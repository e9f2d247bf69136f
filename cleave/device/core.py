"""The device's state machine: arrays in, multiplications to do, blocks out.

It uses no socket and no clock, and looks at no element. Messages of the PS go in with `received`;
what comes out are `Compute` requests for a backend and messages to send. A finished computation
comes back through `computed` or `failed`.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from cleave.arrays import DType
from cleave.errors import ProtocolError
from cleave.machine.multiplication import Compute, StoredArray
from cleave.protocol import limits, messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import Message, Op

Action: TypeAlias = Compute | Message


class DeviceCore:
    """A device's memory and runs.

    Args:
        memory_bytes: what it offered in `hello`; a PS that exceeds it breaks the protocol, which
            ends the session.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.occupied_bytes = 0
        self.draining = False
        self.welcome: messages.Welcome | None = None
        self.blocks = 0
        self.flops = 0
        self._results_bytes = 0  # of runs not yet answered
        self._store: dict[int, StoredArray] = {}
        self._running: dict[int, Compute] = {}

    @property
    def idle(self) -> bool:
        """Say whether every run that the device was given is answered."""
        return not self._running

    def received(self, message: Message) -> list[Action]:
        """Take a message of the PS.

        Raises:
            ProtocolError: for a message that a PS must not send; the session must end.
        """
        match message:
            case messages.Put():
                self._put(message)
                return []
            case messages.Run():
                return [self._run(message)]
            case messages.Drop():
                for name in message.ids:
                    array = self._store.pop(name, None)
                    if array is not None:
                        self.occupied_bytes -= array.nbytes
                return []
            case messages.Cancel():
                for run in message.ids:
                    self._take(run)
                return []
            case messages.Welcome() if self.welcome is None:
                self.welcome = message
                return []
            case _:
                raise ProtocolError(f"a device does not expect a {message.TYPE} message here")

    def computed(self, run: int, payload: Any, compute_s: float) -> list[Action]:
        """Take the result of a run; nothing is sent if the run was cancelled meanwhile."""
        order = self._take(run)
        if order is None:
            return []
        self.blocks += 1
        self.flops += order.flops
        return [
            messages.Result(run, order.rows, order.columns, order.out.value, compute_s, payload)
        ]

    def failed(self, run: int, reason: str) -> list[Action]:
        """Note that a run could not be done; nothing is sent if it was cancelled meanwhile."""
        if self._take(run) is None:
            return []
        return [messages.TaskError(run, reason[: limits.MAX_TEXT])]

    def _take(self, run: int) -> Compute | None:
        order = self._running.pop(run, None)
        if order is not None:
            self._results_bytes -= order.result_bytes
        return order

    def drain(self) -> list[Action]:
        """Tell the PS that the device answers the runs that it has and takes no new ones."""
        if self.draining:
            return []
        self.draining = True
        return [messages.Drain()]

    def _put(self, message: messages.Put) -> None:
        dtype = _dtype(message.dtype)
        nbytes = message.rows * message.columns * dtype.itemsize
        payload = message.payload
        length = payload_bytes(payload)
        if length != nbytes:
            raise ProtocolError(
                f"array {message.id} came with {length} bytes; "
                f"{message.rows}x{message.columns} {message.dtype} has {nbytes}"
            )
        if message.id in self._store:
            raise ProtocolError(f"array {message.id} was sent twice")
        taken = self.occupied_bytes + self._results_bytes
        if taken + nbytes > self.memory_bytes:
            raise ProtocolError(
                f"array {message.id} does not fit: {taken} of {self.memory_bytes} "
                f"bytes are taken and it has {nbytes}"
            )
        self.occupied_bytes += nbytes
        self._store[message.id] = StoredArray(message.rows, message.columns, dtype, payload, nbytes)

    def _run(self, message: messages.Run) -> Action:
        if message.id in self._running:
            raise ProtocolError(f"run {message.id} was asked for twice")
        if len(self._running) >= limits.MAX_RUNS_IN_FLIGHT:
            raise ProtocolError(
                f"more than {limits.MAX_RUNS_IN_FLIGHT} runs were asked for and not yet answered"
            )
        try:
            order = self._order(message)
        except _CannotRunError as error:
            return messages.TaskError(message.id, str(error)[: limits.MAX_TEXT])
        self._running[message.id] = order
        self._results_bytes += order.result_bytes
        return order

    def _order(self, message: messages.Run) -> Compute:
        if message.op != Op.MATMUL.value:
            raise _CannotRunError(f"this device has no op {message.op!r}, only 'matmul'")
        if not message.inputs or len(message.inputs) % 2:
            raise _CannotRunError(f"matmul needs pairs of arrays, not {len(message.inputs)}")
        arrays = []
        for name in message.inputs:
            array = self._store.get(name)
            if array is None:
                raise _CannotRunError(f"array {name} is not here")
            arrays.append(array)
        pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        shapes = set()
        depth = 0
        for a, b in pairs:
            m, ka = (a.columns, a.rows) if message.transpose_a else (a.rows, a.columns)
            kb, n = (b.columns, b.rows) if message.transpose_b else (b.rows, b.columns)
            if ka != kb or a.dtype is not b.dtype or a.dtype is not pairs[0][0].dtype:
                raise _CannotRunError(
                    f"a {m}x{ka} {a.dtype.value} array cannot be multiplied "
                    f"by a {kb}x{n} {b.dtype.value} one"
                )
            shapes.add((m, n))
            depth += ka
        if len(shapes) > 1:
            some = sorted(shapes)[:3]
            raise _CannotRunError(f"products of different shapes cannot be added: {some}")
        out = _dtype(message.out)
        if out is not DType.FP32 and any(a.dtype is not out for a, _ in pairs):
            raise _CannotRunError(f"the result is asked for as {out.value}, which no input is")
        rows, columns = shapes.pop()
        order = Compute(
            message.id,
            pairs,
            message.transpose_a,
            message.transpose_b,
            rows,
            columns,
            out,
            2 * rows * columns * depth,
        )
        if order.result_bytes > limits.MAX_MESSAGE_BYTES - limits.MAX_HEADER_BYTES:
            raise _CannotRunError(f"a result of {order.result_bytes} bytes fits no message")
        taken = self.occupied_bytes + self._results_bytes
        if taken + order.result_bytes > self.memory_bytes:
            raise _CannotRunError(
                f"the result has {order.result_bytes} bytes and {taken} of {self.memory_bytes} "
                f"are taken"
            )
        return order


class _CannotRunError(Exception):
    """One run cannot be done; the session goes on."""


_DTYPES: Final = {dtype.value: dtype for dtype in DType}  # found faster than by DType(name)


def _dtype(name: str) -> DType:
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise ProtocolError(f"unknown dtype {name!r}")
    return dtype
