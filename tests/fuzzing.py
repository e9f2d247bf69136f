"""What the fuzz tests and `benchmarks/fuzz.py` share: hostile bytes, and a server that gets them.

Inputs are made from the structure of messages (fields of other types, left out, twice, lengths that
lie) and from bytes (flipped, cut, spliced). Everything is drawn from one `Random`, so that a seed
names a history.
"""

from __future__ import annotations

import math
import re
import struct
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import count
from random import Random
from typing import Any, Final

import msgpack
import numpy as np

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.device.core import DeviceCore
from cleave.errors import ProtocolError
from cleave.fleet.product import Output
from cleave.gemm import Gemm
from cleave.machine.backends import Compute, NumpyBackend, execute
from cleave.planner.plan import ElementBytes, Planner
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import features, limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import ErrorCode, Message, Op, Role
from cleave.scheduler.instructions import (
    Check,
    Close,
    Done,
    Failed,
    Instruction,
    Joined,
    Place,
    Send,
)
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.tiles.gemm_job import GemmJob, MatrixRef
from cleave.scheduler.tiles.tasks import GemmTask
from cleave.verify import Fault, Judgement
from tests.invariants import leftovers
from tests.scheduler.test_scheduler import BoxPlanner

TYPES: Final[dict[str, type[Any]]] = {cls.TYPE: cls for cls in typing.get_args(messages.Message)}

_pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True, autoreset=True).pack

STRANGE: Final[tuple[bytes, ...]] = (
    b"\xc0",  # nil
    b"\xc1",  # never used
    b"\xc2",
    b"\xc3",
    b"\xff",  # -1
    b"\xd3" + bytes([128]) + bytes(7),  # the least integer
    b"\xcf" + b"\xff" * 8,  # the largest
    b"\xcf\x80" + bytes(7),  # 2**63
    b"\xcf\x7f" + b"\xff" * 7,  # the largest id
    b"\xd3" + bytes(8),  # 0 in nine bytes
    *(
        b"\xcb" + struct.pack(">d", x)
        for x in (math.nan, math.inf, -math.inf, -0.0, -1.0, 1e308, 5e-324)
    ),
    b"\xca" + struct.pack(">f", 0.5),
    b"\xa0",
    b"\xa2\xff\xfe",  # not UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xa4\x1b[2J",
    b"\xd9\x01a",  # a longer header than it needs
    b"\xdb\x00\x00\x00\x01a",
    b"\xdb\xff\xff\xff\xff",  # lengths that lie: 4 GB of text, bytes, items, pairs, extension
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdd\x00\x10\x00\x00",  # just what the reader's limits allow
    b"\xdf\x00\x08\x00\x00",
    b"\xdb\x00\x10\x00\x00",
    b"\xc4\x02ab",
    b"\xd4\x05x",  # an extension type
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x03\xffabc",  # not a timestamp
    b"\xd7\xff" + b"\xff" * 8,
    b"\x90",
    b"\x80",
    b"\x92\x01\xa1x",
    b"\x81\xa1a\x01",
    b"\x81\x01\x02",  # keys that are no text
    b"\x81\xc4\x01a\x02",
    b"\x81\x90\x02",
    b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
    b"\x91" * 40 + b"\xc0",
    b"\x91" * 1100 + b"\xc0",
    b"\x81\xa1a" * 40 + b"\xc0",
    b"\xdd\x00\x10\x00\x00" * 300,
    b"\xdc\x00\x03\x01\x02\x03",
    _pack("x" * (limits.MAX_TEXT + 1)),
    _pack([0] * 70),
    _pack({f"k{i}": 1.0 for i in range(limits.MAX_TELEMETRY + 1)}),
)
"""Encoded values that no field should trip over."""


class Mutator:
    """Makes inputs for `decode`.

    Args:
        random: where chance comes from.
        corpus: inputs that did something new; grows with `keep`.
    """

    def __init__(self, random: Random, corpus: Sequence[bytes] = ()) -> None:
        self.random = random
        self.corpus = list(corpus)
        self._seen: set[str] = set()
        self._makers = {name: _maker(cls) for name, cls in TYPES.items()}
        self._names = list(self._makers)

    def keep(self, data: bytes, outcome: str) -> bool:
        """Remember an input with an outcome that was not seen before."""
        if outcome in self._seen:
            return False
        self._seen.add(outcome)
        if len(data) < 4096:
            self.corpus.append(data)
        return True

    def next(self) -> bytes:
        """One input."""
        random = self.random
        match random.randrange(8):
            case 0:
                return b"".join(encode(self.message()))
            case 1 | 2 | 3:
                data = self.structured(self.message())
                return self.flipped(data) if random.random() < 0.2 else data
            case 4:
                return self.flipped(b"".join(encode(self.message())))
            case 5 | 6 if self.corpus:
                return self.flipped(random.choice(self.corpus))
            case _:
                return random.randbytes(random.randrange(40))

    def message(self) -> Message:
        """A message that is valid."""
        return self.message_of(self.random.choice(self._names))

    def message_of(self, kind: str) -> Message:
        """A valid message of a type."""
        message: Message = self._makers[kind](self.random)
        return message

    def structured(self, message: Message) -> bytes:
        """A message with fields of other types, missing, twice, unknown, or parts that are off."""
        random = self.random
        values = {f.name: getattr(message, f.name) for f in fields(message)}
        payload = values.pop("payload", None)
        entries = [(_pack(name), _pack(_plain(value))) for name, value in values.items()]
        kind, parts, count_of_entries = _pack(message.TYPE), 2 + (payload is not None), None
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            at = random.randrange(len(entries) + 1)
            match random.randrange(12):
                case 0 | 1 | 2 | 3 | 4 if at < len(entries):
                    entries[at] = (entries[at][0], random.choice(STRANGE))
                case 5 if at < len(entries):
                    del entries[at]
                case 6 if at < len(entries):
                    entries.append((entries[at][0], random.choice(STRANGE)))
                case 7:
                    entries.insert(at, (random.choice(STRANGE), random.choice(STRANGE)))
                case 8:
                    entries.insert(at, (_pack("unknown"), random.choice(STRANGE)))
                case 9:
                    kind = random.choice(
                        (random.choice(STRANGE), _pack(random.choice(self._names)))
                    )
                case 10:
                    parts = random.choice((0, 1, 2, 3, 4, 15))
                case _:
                    count_of_entries = random.choice((0, 15, 2**16 - 1, 2**32 - 1))
        n = len(entries) if count_of_entries is None else count_of_entries
        head = random.choice(
            (bytes([0x90 | parts]),) * 6
            + (b"\xdc" + struct.pack(">H", parts), b"\xdd" + struct.pack(">I", parts))
        )
        fields_map = bytes([0x80 | n]) if n < 16 else b"\xdf" + struct.pack(">I", n)
        body = head + kind + fields_map + b"".join(k + v for k, v in entries)
        return body if payload is None else body + self._payload(bytes(payload))

    def _payload(self, payload: bytes) -> bytes:
        random = self.random
        length = len(payload)
        match random.randrange(10):
            case 0:
                length += random.choice((-1, 1, 100))
            case 1:
                length = 2**32 - 1
            case 2:
                return random.choice(STRANGE)
            case 3:
                return b""
            case 4:
                return b"\xc6\x00"
        return b"\xc6" + struct.pack(">I", max(0, length)) + payload

    def flipped(self, data: bytes) -> bytes:
        """Bytes changed, removed, added, doubled, or mixed with those of another input."""
        random = self.random
        mixed = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.randrange(len(mixed) + 1)
            match random.randrange(8):
                case 0 if mixed:
                    mixed[at % len(mixed)] = random.randrange(256)
                case 1 if mixed:
                    mixed[at % len(mixed)] ^= 1 << random.randrange(8)
                case 2:
                    mixed[at:at] = random.randbytes(random.randrange(1, 6))
                case 3:
                    del mixed[at : at + random.randrange(1, 6)]
                case 4:
                    mixed[at:at] = mixed[at : at + random.randrange(1, 20)]
                case 5:
                    mixed[at:at] = random.choice(STRANGE)
                case 6:
                    del mixed[at:]
                case _:
                    other = random.choice(self.corpus) if self.corpus else random.randbytes(8)
                    mixed[at:] = other[random.randrange(len(other) + 1) :]
        return bytes(mixed)


def with_field(message: Message, name: str, value: bytes, *, last: bool = False) -> bytes:
    """A message with other bytes in one field, or in place of its payload.

    Args:
        message: the rest.
        name: which field.
        value: its bytes.
        last: end there.
    """
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    payload = values.pop("payload", None)
    if last and name in values:
        values[name] = values.pop(name)
    body = bytes([0x92 + (payload is not None)]) + _pack(message.TYPE) + bytes([0x80 | len(values)])
    for key, known in values.items():
        body += _pack(key) + (value if key == name else _pack(_plain(known)))
    if name == "payload":
        return body + value
    return body if payload is None or last else body + _pack(payload)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _maker(cls: type[Any]) -> Callable[[Random], Any]:
    """A function that makes a valid message of a type."""
    hints = typing.get_type_hints(cls)
    makers = {f.name: _value_maker(f.name, hints[f.name]) for f in fields(cls)}
    if cls is messages.Welcome:  # of another version it is no message
        makers["version"] = lambda random: limits.VERSION
    return lambda random: cls(**{name: make(random) for name, make in makers.items()})


def _value_maker(name: str, hint: Any) -> Callable[[Random], Any]:
    if name == "payload":
        return lambda r: r.randbytes(r.choice((0, 4, 16, 300)))
    if name == "dtype" or name == "out":
        return lambda r: r.choice(("fp32", "fp32", "bf16", "fp16", "int8"))
    simple: dict[Any, Callable[[Random], Any]] = {
        int: lambda r: r.choice((0, 1, 2, 7, 2**31, 2**63 - 1)),
        float: lambda r: r.choice((0.0, 0.5, 1e9, 1e308)),
        str: lambda r: r.choice(("", "a", "matmul", "ключ", "x" * 300)),
        bool: lambda r: r.random() < 0.5,
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = list(hint)
        return lambda r: r.choice(choices)
    if typing.get_origin(hint) is tuple:
        item = _value_maker("", typing.get_args(hint)[0])
        return lambda r: tuple(item(r) for _ in range(r.choice((0, 1, 2, 20))))
    if typing.get_args(hint)[1] is float:
        return lambda r: {f"v{i}": r.choice((-1.0, 0.0, 1e300)) for i in range(r.randrange(4))}
    plain: tuple[Any, ...] = (None, True, -5, 2.5, "t", [1, [2, {}]], {"a": {"b": []}})
    return lambda r: {f"v{i}": r.choice(plain) for i in range(r.randrange(4))}


_VARIES = re.compile(r"(?<=valid): .*|(?<=message type) .*|0x[0-9a-f]+|-?\d[\d.e+]*")


def decoded(data: bytes) -> str:
    """Decode an input; returns what came of it, in words without its values.

    Raises:
        Exception: anything but `ProtocolError` is a fault of the codec.
    """
    message, reason = None, ""
    try:
        message = decode(data)
    except ProtocolError as error:
        reason = str(error)
    if message is None:
        assert 0 < len(reason) < 2 * limits.MAX_TEXT
        return f"refused: {_VARIES.sub('_', reason)[:80]}"
    again = b"".join(encode(message))
    assert decode(again) == message, "what was read is written otherwise"
    return f"read: {message.TYPE}"


# --- a server among hostile devices -------------------------------------------------------------

HONEST: Final = 1
_CREDENTIAL: Final = "key"

HELLO: Final = messages.Hello(
    Role.DEVICE,
    credential=_CREDENTIAL,
    name="device",
    ops=(Op.MATMUL.value,),
    dtypes=tuple(d.value for d in DType),
    memory_bytes=2**30,
    flops_per_s=1e9,
    downlink_bytes_per_s=1e6,
    uplink_bytes_per_s=1e6,
)
UNSTATED: Final = replace(HELLO, downlink_bytes_per_s=0.0, uplink_bytes_per_s=0.0)

HELLOS: Final = (
    *(HELLO,) * 6,
    *(UNSTATED,) * 3,
    replace(UNSTATED, measure=True),
    replace(HELLO, measure=True),
    replace(HELLO, flops_per_s=1e308, downlink_bytes_per_s=1e308, uplink_bytes_per_s=1e308),
    replace(HELLO, flops_per_s=1e-308, downlink_bytes_per_s=1e-308, uplink_bytes_per_s=1e-308),
    replace(HELLO, latency_s=1e308, memory_bytes=2**63 - 1),
    replace(HELLO, features=features.ALL),
    replace(UNSTATED, features=features.ALL),
    replace(HELLO, memory_bytes=limits.MIN_DEVICE_MEMORY_BYTES, dtypes=("fp32",)),
    replace(HELLO, memory_bytes=limits.MIN_DEVICE_MEMORY_BYTES - 1),
    replace(HELLO, version=99),
    replace(HELLO, credential="guess"),
    replace(HELLO, ops=()),
    replace(HELLO, role=Role.OPERATOR),
)


@dataclass
class _Product:
    job: GemmJob
    left: Array
    right: Array
    output: Output
    done: bool = False


@dataclass
class _Peer:
    """A hostile session: what it was asked, so that it can answer it wrongly."""

    runs: dict[int, messages.Run] = field(default_factory=dict)
    erred: bool = False


class Arena:
    """A session manager, an honest device, and hostile sessions; carries out orders like a runtime.

    It raises AssertionError when the server does what it must not: orders for sessions that have
    ended, an error without an end, the honest device refused, a wrong result used, work that fails.

    Args:
        random: where chance comes from.
        thorough: plan with the real planner as well, which takes longer.
    """

    def __init__(self, random: Random, *, thorough: bool = True) -> None:
        self.random = random
        self.manager = SessionManager(_CREDENTIAL, verify=True)
        self.mutator = Mutator(random)
        self.now_s = 0.0
        self.peers: dict[int, _Peer] = {}  # hostile sessions that are open
        self.gone: list[int] = []
        self.products: dict[int, _Product] = {}
        self.checks: list[Check] = []
        self.done = 0
        self._thorough = thorough
        self._ids = count(HONEST)
        self._names = count(1)
        self._core = DeviceCore(HELLO.memory_bytes)
        self._computing: list[Compute] = []
        self._backend = NumpyBackend()
        self._planner = TilePlanner()
        self.manager.opened(next(self._ids), self.now_s)
        self._obey(self.manager.received(HONEST, HELLO, self.now_s))
        while self.work_honestly() or self.checks:  # it is there before the others come
            self.check()
        assert HONEST in self.manager.scheduler.devices

    # --- what a runtime does ---

    def open(self) -> int:
        """A hostile peer connects."""
        session = next(self._ids)
        self.peers[session] = _Peer()
        self.manager.opened(session, self.now_s)
        return session

    def receive(self, session: int, data: bytes) -> str:
        """Bytes came on a session; returns what came of it, in words."""
        known = self.manager.sessions.get(session)
        state = known.state.value if known else "gone"
        self.now_s += 1e-3
        try:
            message = decode(data)
        except ProtocolError as error:
            kind = "no message"
            reason = str(error)
            orders = self.manager.refuse(session, ErrorCode.PROTOCOL, reason, self.now_s)
        else:
            kind = message.TYPE
            # Half of those that come have passed the test of their arithmetic, so to speak.
            passed = isinstance(message, messages.Hello) and self.random.random() < 0.5
            self.manager.verify = not passed
            orders = self.manager.received(session, message, self.now_s)
            self.manager.verify = True
        if known is None:
            assert not orders, f"orders for a session that has ended: {orders}"
        self._obey(orders)
        outcome = "taken" if session in self.peers else "ended"
        if session in self.peers and kind == "no message":
            raise AssertionError("a session survives what is no message")
        return f"{state}, {kind}: {outcome} {sorted({type(o).__name__ for o in orders})}"

    def say(self, session: int, message: Message) -> str:
        """A message, as bytes."""
        return self.receive(session, b"".join(encode(message)))

    def break_off(self, session: int) -> None:
        """The connection of a hostile session breaks."""
        self._forget(session)
        self._obey(self.manager.closed(session, "the connection broke", self.now_s))

    def tick(self, took_s: float) -> None:
        """Time passes, in which the honest device gives signs of life."""
        self.now_s += took_s
        self._obey(self.manager.received(HONEST, messages.Heartbeat(), self.now_s))
        self._obey(self.manager.tick(self.now_s))

    def check(self) -> None:
        """Carry out a pending check of a result, which a runtime does in a thread."""
        if not self.checks:
            return
        order = self.checks.pop(self.random.randrange(len(self.checks)))
        product, detail, fault = self.products.get(order.task.job), order.task.gemm, None
        if product is not None:  # else it was done meanwhile
            rows, columns = detail.block.m.size, detail.block.n.size
            result = arrays.unpack(order.payload, rows, columns, DType(detail.out))
            if not np.array_equal(result.array, self._product(product, detail)):
                fault = Fault("it is off")
        self._obey(self.manager.checked(order, Judgement(fault), self.now_s))

    @staticmethod
    def _product(wanted: _Product, task: GemmTask) -> Array:
        block = task.block
        left = wanted.left[block.m.start : block.m.stop, block.k.start : block.k.stop]
        product: Array = (
            left @ wanted.right[block.k.start : block.k.stop, block.n.start : block.n.stop]
        )
        return product

    def _forget(self, session: int) -> None:
        del self.peers[session]
        self.gone.append(session)
        del self.gone[:-50]

    def _obey(self, orders: Sequence[Instruction]) -> None:
        for order in orders:
            match order:
                case Send(session, message):
                    parts = encode(message)
                    if session == HONEST:
                        self._hear(message)
                        continue
                    assert session in self.peers, f"{message.TYPE} to a session that has ended"
                    peer = self.peers[session]
                    assert not peer.erred, f"{message.TYPE} after an error"
                    assert parts
                    peer.erred = isinstance(message, messages.Error)
                    if isinstance(message, messages.Run):
                        peer.runs[message.id] = message
                case Close(session):
                    assert session in self.peers, "a session is closed that has ended"
                    assert session not in self.manager.sessions
                    self._forget(session)
                case Joined():
                    pass
                case Check():
                    self.checks.append(order)
                case Place(task, payload):
                    product = self.products[task.job]
                    assert not product.done
                    product.output.place(task.gemm, payload)
                case Done(job):
                    product = self.products.pop(job)
                    product.output.finish()
                    found = product.output.out.float32()
                    assert np.array_equal(found, product.left @ product.right), (
                        "a wrong result is used"
                    )
                    self.done += 1
                    for side in (product.job.a, product.job.b):
                        self._obey(self.manager.release(side.operand, self.now_s))
                case Failed(_, reason):
                    raise AssertionError(f"hostile devices make a work fail: {reason}")
        assert not any(peer.erred for peer in self.peers.values()), "an error that ends nothing"

    # --- the honest device ---

    def _hear(self, message: Message) -> None:
        assert not isinstance(message, messages.Error | messages.Bye), "the honest one is sent away"
        for action in self._core.received(message):
            assert isinstance(action, Compute), action
            self._computing.append(action)

    def work_honestly(self) -> bool:
        """The honest device answers a run; False when it has none."""
        if not self._computing:
            return False
        order = self._computing.pop(0)
        payload = bytes(execute(self._backend, order).pack())
        for answer in self._core.computed(order.run, payload, 1e-4):
            assert isinstance(answer, messages.Result)
            data = b"".join(encode(answer))
            self._obey(self.manager.received(HONEST, decode(data), self.now_s))
        return True

    def submit(self) -> None:
        """A GEMM of small integers."""
        random = self.random
        m, n, k = (random.randint(1, 6) for _ in range(3))
        rng = np.random.default_rng(random.randrange(2**32))
        left = rng.integers(1, 4, (m, k)).astype(np.float32)
        right = rng.integers(1, 4, (k, n)).astype(np.float32)
        planner: Planner = BoxPlanner(random.randrange(2**32))
        if self._thorough and random.random() < 0.2:
            planner = self._planner
        job = GemmJob(
            next(self._names),
            Gemm(m, n, k),
            MatrixRef(next(self._names), False),
            MatrixRef(next(self._names), False),
            ElementBytes(4, 4),
            "fp32",
            "fp32",
            planner,
        )
        self.products[job.id] = _Product(job, left, right, Output(arrays.empty(m, n, DType.FP32)))
        a, b = Buffer(left, DType.FP32), Buffer(right, DType.FP32)
        self._obey(self.manager.submit(job, a, b, self.now_s))

    # --- hostile devices ---

    def message(self, session: int) -> Message:
        """Something that a hostile device may well say now."""
        random = self.random
        known = self.manager.sessions.get(session)
        if known is None or known.state is DeviceState.JOINING:
            return random.choice(HELLOS) if random.random() < 0.9 else self.mutator.message()
        match random.randrange(16):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7:
                return self.answer(session)
            case 8:
                run = random.choice([*self.peers[session].runs, 1, 2**52, 2**63 - 1])
                return messages.TaskError(run, random.choice(("", "no", "x" * limits.MAX_TEXT)))
            case 9 | 10:
                return messages.Heartbeat()
            case 11:
                names = random.choice((1, 3, limits.MAX_TELEMETRY + 1))
                return messages.Telemetry({f"v{random.randrange(90)}": 1.0 for _ in range(names)})
            case 12 if random.random() < 0.5:
                return messages.Drain()
            case 13 if random.random() < 0.3:
                return messages.Bye("enough")
            case 14 if random.random() < 0.3:
                return messages.Error(random.choice(list(ErrorCode)), "no")
            case 15 if random.random() < 0.5:
                return self.mutator.message()
            case _:
                return messages.Heartbeat()

    def answer(self, session: int) -> Message:
        """The result of a run: right, wrong, of another form, late, of another device, unasked."""
        random = self.random
        asked = self.peers[session].runs
        rows, columns, dtype, payload = 1, 1, "fp32", bytes(4)
        known = self.manager.sessions[session]
        run = random.choice([*known.expected] or [*asked][-1:] or [1])
        match random.randrange(10):
            case 0:
                run = random.randrange(1, 400)
            case 1 | 2 if asked:
                run = random.choice([*asked])
        task = known.expected.get(run)
        if task is not None and task.job in self.products:
            right = self._product(self.products[task.job], task.gemm)
            if random.random() < 0.6:
                right = right + 1
            rows, columns, payload = *right.shape, right.astype("<f4").tobytes()
        elif known.probe is not None:
            step = known.probe._step
            rows, columns = step.rows, step.columns
            payload = bytes(4 * rows * columns)
        match random.randrange(14):
            case 0:
                rows, columns = columns + 1, rows
            case 1:
                dtype = "bf16"
            case 2:
                payload = payload[:-1]
            case 3:
                rows = columns = 2**63 - 1
        compute_s = random.choice((0.0, 0.25, 1e308))
        if random.random() < 0.05:  # what only runs of graphs are answered with
            return messages.Computed(run, compute_s)
        return messages.Result(run, rows, columns, dtype, compute_s, payload)

    def step(self) -> str:
        """One hostile input, and now and then what honest ones do; returns what came of it."""
        random = self.random
        if len(self.products) < 3 and random.random() < 0.1:
            self.submit()
        if random.random() < 0.1:
            self.work_honestly()
        if random.random() < 0.2:
            self.check()
        if random.random() < 0.01:
            self.tick(random.choice((0.1, 3.0, limits.HANDSHAKE_S + 1, limits.SILENCE_S + 1)))
        if len(self.peers) < 4:
            self.open()
        session = random.choice([*self.peers])
        if random.random() < 0.01:
            self.break_off(session)
            return "broken off"
        data = b"".join(encode(self.message(session)))
        if random.random() < 0.1:
            data = self.mutator.flipped(data) if random.random() < 0.5 else self.mutator.next()
        if self.gone and random.random() < 0.02:
            session = random.choice(self.gone)
        self.input = data
        return self.receive(session, data)

    input = b""
    """The last hostile input, for reports."""

    def finish(self) -> None:
        """The hostile go silent: the honest device does what is left, and nothing of them stays."""
        self.tick(limits.SILENCE_S + 1)
        assert not self.peers, "silent sessions stay"
        while self.work_honestly() or self.checks:
            self.check()
        assert not self.products, f"{len(self.products)} jobs are stuck"
        assert list(self.manager.sessions) == [HONEST]
        assert list(self.manager.scheduler.devices) == [HONEST]
        assert self.manager.scheduler.idle
        self._obey(self.manager.pause(self.now_s))
        assert self._core.occupied_bytes == 0
        assert leftovers(self.manager) == []
