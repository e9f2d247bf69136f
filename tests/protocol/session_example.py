"""The short session that `docs/protocol.md` shows, as the real PS and a real device have it."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from cleave import arrays
from cleave.arrays import Buffer, DType
from cleave.device.core import DeviceCore, Order
from cleave.fleet.product import Output
from cleave.gemm import Gemm
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.planner.plan import ElementBytes
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import limits
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Drain, Hello, Message, Role
from cleave.scheduler.instructions import Done, ForRuntime, Place, Send
from cleave.scheduler.sessions.admission import SharedSecretAuth
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef

HELLO: Final = Hello(
    Role.DEVICE,
    credential="7KQ4-MWX2-PDH9",
    name="demo",
    ops=("matmul",),
    dtypes=("fp32",),
    memory_bytes=limits.MIN_DEVICE_MEMORY_BYTES,
    downlink_bytes_per_s=1e6,
    uplink_bytes_per_s=1e6,
    versions=(limits.VERSION,),
)
A: Final = [[1, 2], [3, 4]]
B: Final = [[5, 6], [7, 8]]


class _Talk:
    """A PS and a device, and all that they said, as bytes."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bytes]] = []
        self._ps = SessionManager(auth=SharedSecretAuth(HELLO.credential))
        self._device = DeviceCore(HELLO.memory_bytes)
        self._output = Output(arrays.empty(2, 2, DType.FP32))
        self._done = False

    def run(self) -> None:
        self._ps.opened(1, 0.0)
        self._tell(HELLO)
        refs = MatrixRef(1, False), MatrixRef(2, False)
        job = GemmJob(1, Gemm(2, 2, 2), *refs, ElementBytes(4, 4), "fp32", "fp32", TilePlanner())
        a, b = (Buffer(np.array(side, np.float32), DType.FP32) for side in (A, B))
        self._obey(self._ps.submit(job, a, b, 0.0))
        assert self._done
        assert (self._output.out.float32() == np.array(A) @ np.array(B)).all()
        for operand in (1, 2):
            self._obey(self._ps.release(operand, 0.0))
        self._obey(self._ps.pause(0.0))  # nothing more is coming: what was released is dropped
        (drain,) = self._device.drain()
        assert isinstance(drain, Drain)
        self._tell(drain)

    def _tell(self, message: Message) -> None:
        """The device says something."""
        data = b"".join(encode(message))
        self.said.append(("device", data))
        self._obey(self._ps.received(1, decode(data), 0.0))

    def _obey(self, orders: list[ForRuntime]) -> None:
        waiting = deque(orders)
        while waiting:
            match waiting.popleft():
                case Send(_, message):
                    data = b"".join(encode(message))
                    self.said.append(("PS", data))
                    self._hear(decode(data))
                case Place(task, payload):
                    self._output.place(task.gemm, payload)
                case Done():
                    self._output.finish()
                    self._done = True

    def _hear(self, message: Message) -> None:
        """The device is told something; whoever is told bye answers nothing."""
        if message.TYPE == "bye":
            return
        for action in self._device.received(message):
            assert isinstance(action, Compute)
            product = execute(NumpyBackend(), action).pack()
            for answer in self._device.computed(action.run, bytes(product), 0.0):
                assert not isinstance(answer, Order)
                self._tell(answer)


def session() -> list[tuple[str, bytes]]:
    """Who said what, from `hello` to `bye`."""
    talk = _Talk()
    talk.run()
    return talk.said


ABOUT: Final = (
    "it offers 16 MiB, and states its link, which is not measured then",
    "it is device 1, and must send a message every 2 s",
    "1 2 / 3 4, as array 1",
    "5 6 / 7 8, as array 2",
    "array 1 by array 2, as run 1",
    "19 22 / 43 50; how long computing took is not said",
    "both arrays are not needed any more",
    "its owner wants it back",
    "it has answered everything, and may close; so does the PS",
)
"""What the document says of each message."""

_A_LINE: Final = 24  # bytes


def shown() -> str:
    """The session as the document shows it."""
    lines = []
    for (who, data), about in zip(session(), ABOUT, strict=True):
        message = decode(data)
        lines.append(f"{who}: {message.TYPE}, {len(data)} bytes: {about}")
        for at in range(0, len(data), _A_LINE):
            lines.append("   " + data[at : at + _A_LINE].hex(" "))
        lines.append("")
    return "\n".join(lines)
