"""The codec, with random messages, random bytes and messages at its limits."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.device.core import DeviceCore, Order
from cleave.errors import ProtocolError, VersionError
from cleave.machine.backends import Compute
from cleave.protocol import limits
from cleave.protocol.codec import decode, encode, wire_size
from cleave.protocol.messages import (
    Bye,
    ByeCode,
    Cancel,
    Drop,
    ErrorCode,
    Hello,
    JobRecord,
    Message,
    Put,
    Reply,
    Request,
    Role,
    Run,
    RunGraph,
    TaskError,
    Telemetry,
    Welcome,
    clean,
    clean_plain,
)
from tests.examples import examples
from tests.protocol.vectors import HAS_PAYLOAD, TYPES
from tests.vectors.generate import nested

ids = st.integers(0, 2**limits.OBJECT_ID_BITS - 1)
many_ids = st.lists(ids, max_size=40).map(tuple)
texts = st.text(max_size=60)
said = texts.map(clean)  # as it is once it has been read
reals = st.floats(0, allow_nan=False, allow_infinity=False)
payloads = st.binary(max_size=400)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
maps = st.dictionaries(texts, plain_values, max_size=4)
dtypes = st.sampled_from(["fp32", "bf16", "fp16"]) | said
finite = st.floats(allow_nan=False, allow_infinity=False)

_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "Any": payloads,
    "ByeCode": st.sampled_from(ByeCode) | said.map(ByeCode),
    "Count": ids,
    "ErrorCode": st.sampled_from(ErrorCode) | said.map(ErrorCode),
    "Ids": many_ids,
    "Inputs": many_ids,
    "Rate": reals,
    "Role": st.sampled_from(Role),
    "Text": said,
    "Texts": st.lists(said, max_size=4).map(tuple),
    "bool": st.booleans(),
    "dict[Text, Any]": maps.map(clean_plain),
    "dict[Text, Real]": st.dictionaries(said, finite, max_size=6),
}


def _values(field: Any) -> st.SearchStrategy[Any]:
    if field.name == "version":  # of another version, most fields are not read
        return st.just(limits.VERSION)
    if field.metadata.get("verbatim"):
        return maps if field.name == "arguments" else texts
    return _BY_TYPE[str(field.type)]


any_message: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, role=st.sampled_from(Role), version=ids.filter(lambda v: v != limits.VERSION)),
    *(st.builds(cls, **{f.name: _values(f) for f in fields(cls)}) for cls in TYPES.values()),
)


def _bytes(message: Message) -> bytes:
    return b"".join(encode(message))


# --- round trips ------------------------------------------------------------------------------


@given(any_message)
@settings(max_examples=examples(600))
def test_round_trip(message: Message) -> None:
    parts = encode(message)
    data = b"".join(parts)
    assert decode(data) == message
    assert wire_size(message) == len(data)
    assert len(parts) == (2 if message.TYPE in HAS_PAYLOAD else 1)


def test_a_payload_is_viewed_in_place() -> None:
    data = _bytes(Put(1, 1, 2, "fp32", b"abcdefgh"))
    payload = decode(data).payload  # type: ignore[union-attr]
    assert isinstance(payload, memoryview)
    assert payload.obj is data
    assert bytes(payload) == b"abcdefgh"


def _minimal(cls: type[Any]) -> tuple[Any, ...]:
    samples = {
        "Role": Role.DEVICE,
        "ErrorCode": ErrorCode.LIMIT,
        "Count": 1,
        "Rate": 0.5,
        "Text": "x",
        "bool": True,
        "Ids": (),
        "Inputs": (),
    }
    required = (f for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
    return tuple(samples[str(f.type)] for f in required)


# --- fuzzing ----------------------------------------------------------------------------------


@given(any_message, st.data())
@settings(max_examples=examples(300))
def test_every_prefix_is_refused(message: Message, data: st.DataObject) -> None:
    whole = _bytes(message)
    with pytest.raises(ProtocolError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(any_message, st.binary(min_size=1, max_size=10))
@settings(max_examples=examples(300))
def test_every_suffix_is_refused(message: Message, suffix: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(_bytes(message) + suffix)


# --- limits -----------------------------------------------------------------------------------


class _Pretended:
    """A payload that only says how large it is."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def pack(self) -> memoryview:
        return memoryview(bytes(self.nbytes))  # zeros: pages that nobody touches


def test_largest_message() -> None:
    empty = wire_size(Put(1, 1, 1, "fp32", bytes(65536))) - 65536
    fits = limits.MAX_MESSAGE_BYTES - empty
    assert sum(len(part) for part in encode(Put(1, 1, 1, "fp32", _Pretended(fits)))) == (
        limits.MAX_MESSAGE_BYTES
    )
    with pytest.raises(ProtocolError, match=str(limits.MAX_MESSAGE_BYTES)):
        encode(Put(1, 1, 1, "fp32", _Pretended(fits + 1)))
    with pytest.raises(ProtocolError, match=str(limits.MAX_MESSAGE_BYTES)):
        decode(bytes(limits.MAX_MESSAGE_BYTES + 1))


def test_largest_header() -> None:
    room = limits.MAX_HEADER_BYTES - wire_size(Request(1, "x", {"a": "x" * 70000})) + 70000
    fits = Request(1, "x", {"a": "x" * room})
    assert wire_size(fits) == limits.MAX_HEADER_BYTES
    assert decode(_bytes(fits)) == fits
    with pytest.raises(ProtocolError):
        encode(Request(1, "x", {"a": "x" * (room + 1)}))


def test_longest_text_and_most_ids() -> None:
    for message in (
        Bye("x" * limits.MAX_TEXT),
        Bye("📱" * limits.MAX_TEXT),
        Drop((1,) * limits.MAX_IDS),
        Run(1, "matmul", (1,) * limits.MAX_RUN_INPUTS, False, False, "fp32"),
        RunGraph(1, 2, *((1,) * limits.MAX_RUN_INPUTS,) * 3),
    ):
        assert decode(_bytes(message)) == message


BEYOND: dict[str, Message] = {
    "text": Bye("x" * (limits.MAX_TEXT + 1)),
    "ids": Drop((1,) * (limits.MAX_IDS + 1)),
    "inputs": Run(1, "matmul", (1,) * (limits.MAX_RUN_INPUTS + 2), False, False, "fp32"),
    "inputs of a graph": RunGraph(1, 2, (1,) * (limits.MAX_RUN_INPUTS + 1), (), ()),
    "outputs of a graph": RunGraph(1, 2, (), (1,) * (limits.MAX_RUN_INPUTS + 1), ()),
    "sizes of outputs": RunGraph(1, 2, (), (), (1,) * (limits.MAX_RUN_INPUTS + 1)),
    "id too large": Welcome(device=2**limits.OBJECT_ID_BITS),
    "id beyond msgpack": Welcome(device=2**64),
    "id negative": Welcome(device=-1),
    "real negative": Hello(Role.DEVICE, latency_s=-1.0),
    "real not finite": Hello(Role.DEVICE, flops_per_s=float("inf")),
    "telemetry not finite": Telemetry({"a": float("nan")}),
    "nested too deep": Request(1, "x", {"a": nested(limits.MAX_NESTING + 1)}),
    "nested much too deep": JobRecord("x", {"a": nested(800)}),
    "bytes in a map": Reply(1, True, {"a": b"x"}),
    "not utf-8": Bye("\ud800"),
    "not plain": Request(1, "x", {"a": object()}),
    "key not text": Request(1, "x", {"a": {1: 2}}),
}


@pytest.mark.parametrize("name", BEYOND)
def test_encode_refuses_what_decode_would(name: str) -> None:
    """`limits.py`: both sides check them. A fault is found where it is made."""
    with pytest.raises(ProtocolError):
        encode(BEYOND[name])


# --- what peers say ---------------------------------------------------------------------------

ESCAPES = "a\x1b[2J\x1b]0;t\x07b\r\nc\u202ed\u2066e\x00\x9b31mf\u200bg\u2028h"
SHOWN = "a[2J]0;tb  cde31mfg h"


def test_all_that_a_peer_says_is_clean_once_it_is_read() -> None:
    """Every text of every message, but for secrets and what an operator asks for."""
    verbatim = {
        "hello": {"credential", "join_code", "holds"},
        "welcome": {"credential", "arrays"},
    }
    verbatim["request"] = {"arguments"}
    seen = 0
    for name, cls in TYPES.items():
        for field in fields(cls):
            hint = str(field.type)
            if hint in ("Text", "ByeCode", "ErrorCode"):
                dirty, tidy = ESCAPES, SHOWN
            elif hint == "Texts":
                dirty, tidy = (ESCAPES,), (SHOWN,)  # type: ignore[assignment]
            elif hint == "dict[Text, Real]":
                dirty, tidy = {ESCAPES: 1.0}, {SHOWN: 1.0}  # type: ignore[assignment]
            elif hint == "dict[Text, Any]":
                dirty = {ESCAPES: [{"x": ESCAPES}]}  # type: ignore[assignment]
                tidy = {SHOWN: [{"x": SHOWN}]}  # type: ignore[assignment]
            else:
                continue
            message = cls(*_minimal(cls))
            if hint.endswith("Code"):
                setattr(message, field.name, type(getattr(message, field.name))(dirty))
            else:
                setattr(message, field.name, dirty)
            if name in HAS_PAYLOAD:
                message.payload = b""
            read = getattr(decode(_bytes(message)), field.name)
            assert read == (dirty if field.name in verbatim.get(name, ()) else tidy), field.name
            seen += 1
    assert seen > 25


def test_no_secret_is_part_of_an_error() -> None:
    """Whatever is wrong with it; and of no text that a message is written as."""
    import msgpack

    secret = "s3cr3t"
    seen = []
    for name, cls in TYPES.items():
        for field in fields(cls):
            if not field.metadata.get("secret"):
                continue
            seen.append(field.name)
            for wrong in ([secret], {"k": [secret, {1: secret}]}, secret * 2000, {secret: b"x"}):
                raw = {"role": "device", "version": 1, "device": 1, "id": 1, "ok": True}
                packed = msgpack.packb([name, raw | {"action": "a", field.name: wrong}])
                with pytest.raises(ProtocolError) as raised:
                    decode(packed)
                assert secret not in str(raised.value)
    assert seen == ["credential", "join_code", "holds", "credential", "arrays", "arguments", "data"]
    assert secret not in repr(Hello(Role.DEVICE, credential=secret, join_code=secret))
    assert secret not in repr(Welcome(1, credential=secret))
    assert secret not in repr(Reply(1, True, {"code": secret}))


def test_an_unknown_code_is_a_code_like_any_other() -> None:
    assert ErrorCode("tired") == ErrorCode("tired") != ErrorCode.LIMIT
    assert ErrorCode("limit") is ErrorCode.LIMIT
    assert "tired" not in [code.value for code in ErrorCode]
    with pytest.raises(ValueError, match="7"):
        ErrorCode(7)  # type: ignore[arg-type]


def test_a_welcome_of_another_version_says_so_before_anything_else() -> None:
    import msgpack

    with pytest.raises(VersionError, match=r"version 2, but .* 1; install"):
        decode(msgpack.packb(["welcome", {"version": 2, "device": "seven", "heartbeat_s": []}]))


# --- limits at the device ---------------------------------------------------------------------


def test_a_device_gives_reasons_that_can_be_sent() -> None:
    core = DeviceCore(2**30)
    pairs = 500
    for i in range(pairs):
        core.received(Put(2 * i, 10**6 + i, 0, "fp32", b""))
        core.received(Put(2 * i + 1, 0, 10**6, "fp32", b""))
    (answer,) = core.received(Run(1, "matmul", tuple(range(2 * pairs)), False, False, "fp32"))
    assert isinstance(answer, TaskError)
    assert decode(_bytes(answer)) == answer


few_ids = st.integers(0, 5)
sides = st.integers(0, 6)
itemsize = {"fp32": 4, "bf16": 2, "fp16": 2}


@st.composite
def _fitting_put(draw: st.DrawFn) -> Put:
    rows, columns, dtype = draw(sides), draw(sides), draw(st.sampled_from(sorted(itemsize)))
    return Put(draw(few_ids), rows, columns, dtype, bytes(rows * columns * itemsize[dtype]))


@dataclass
class _Finish:
    """Not a message: the backend is done with a run, well or not."""

    run: int
    well: bool


ps_messages: st.SearchStrategy[Message] = st.one_of(
    _fitting_put(),
    st.builds(
        Put,
        id=few_ids,
        rows=sides | ids,
        columns=sides | ids,
        dtype=dtypes,
        payload=payloads,
    ),
    st.builds(
        Run,
        id=few_ids,
        op=st.just("matmul"),
        inputs=st.tuples(few_ids, few_ids) | st.lists(few_ids, max_size=6).map(tuple),
        transpose_a=st.booleans(),
        transpose_b=st.booleans(),
        out=st.sampled_from(sorted(itemsize)),
    ),
    st.builds(Drop, ids=st.lists(few_ids, max_size=3).map(tuple)),
    st.builds(Cancel, ids=st.lists(few_ids, max_size=3).map(tuple)),
    any_message,
)


@given(
    st.integers(0, 400),
    st.lists(ps_messages | st.builds(_Finish, few_ids, st.booleans()), max_size=40),
)
@settings(max_examples=examples(600))
def test_no_messages_harm_a_device(memory_bytes: int, steps: list[Message | _Finish]) -> None:
    """It obeys or raises ProtocolError, answers what can be sent, and keeps to its memory."""
    core = DeviceCore(memory_bytes)
    arrays: dict[int, int] = {}  # bytes by id, counted here once more
    results: dict[int, int] = {}
    for step in steps:
        try:
            if isinstance(step, _Finish):
                payload = bytes(results.get(step.run, 0))
                answers = (
                    core.computed(step.run, payload, 0.5)
                    if step.well
                    else core.failed(step.run, "x" * (limits.MAX_TEXT + 1))
                )
                assert len(answers) == (step.run in results)
                results.pop(step.run, None)
            else:
                answers = core.received(decode(_bytes(step)))
        except ProtocolError:
            continue  # a session would end here; the core must hold even so
        match step:
            case Put():
                assert isinstance(step.payload, bytes)
                arrays[step.id] = len(step.payload)
            case Drop():
                arrays = {id: size for id, size in arrays.items() if id not in step.ids}
            case Cancel():
                results = {id: size for id, size in results.items() if id not in step.ids}
        for answer in answers:
            if isinstance(answer, Order):
                assert isinstance(answer, Compute)
                assert answer.run not in results
                results[answer.run] = answer.rows * answer.columns * itemsize[answer.out.value]
            else:
                assert decode(_bytes(answer)) == answer
        assert core.occupied_bytes == sum(arrays.values())
        assert core.occupied_bytes + sum(results.values()) <= memory_bytes
        assert core.idle == (not results)
