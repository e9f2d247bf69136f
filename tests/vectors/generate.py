"""Writes the test vectors: ``python -m tests.vectors.generate``.

Messages come from the Python codec, odd and invalid ones are put together by hand below. Products
are computed here with Python's integers and rounded with `struct`, without numpy or torch, so that
they check the backends as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgpack

from cleave.protocol import limits
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import (
    Bye,
    ByeCode,
    Cancel,
    CodeResults,
    Computed,
    Concat,
    Drain,
    Drop,
    Error,
    ErrorCode,
    Feature,
    Fetch,
    Graph,
    Heartbeat,
    Held,
    Hello,
    JobRecord,
    Measured,
    Message,
    Put,
    PutCoded,
    Reply,
    Request,
    Result,
    ResultCoded,
    Role,
    Run,
    RunGraph,
    TaskError,
    Telemetry,
    Welcome,
)
from tests.protocol import session_example
from tests.vectors.coded_payloads import CODED, coding_vectors
from tests.vectors.graph_models import graph_vectors
from tests.vectors.graph_runs import run_vectors

FOLDER: Final = Path(__file__).parent
LARGEST_ID: Final = 2**limits.OBJECT_ID_BITS - 1
_SAFE_INT: Final = 2**53 - 1  # what every JSON reader keeps exactly

Json = dict[str, Any]
Matrix = list[list[int]]


# --- bytes and fields as JSON -----------------------------------------------------------------


def repeated(part: bytes, times: int) -> Json:
    """Many equal bytes, written short."""
    return {"hex": part.hex(), "times": times}


def plain(value: Any) -> Any:
    """A field's value as JSON: enums by value, integers that JSON readers round as text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value) is int and abs(value) > _SAFE_INT:
        return {"$int": str(value)}
    return value


def described(message: Message) -> Json:
    """Type and fields of a message."""
    values = {f.name: plain(getattr(message, f.name)) for f in fields(message)}
    values.pop("payload", None)
    return {"type": message.TYPE, "fields": values}


def of_feature(feature: Feature | None) -> Json:
    """What a vector says of the feature that a client needs for it, if any."""
    return {} if feature is None else {"feature": feature.value}


# --- messages.json ----------------------------------------------------------------------------


def _messages() -> list[tuple[str, str, Message]]:
    device = Hello(
        role=Role.DEVICE,
        credential="k7Jd_2-x",
        name="Anna's phone",
        ops=("matmul",),
        dtypes=("fp32", "bf16", "fp16"),
        memory_bytes=2**30,
        profile="pixel-8",
        flops_per_s=5e10,
        downlink_bytes_per_s=1.25e7,
        uplink_bytes_per_s=2.5e6,
        latency_s=0.015625,
    )
    block = struct.pack("<4f", 1, 2, 3, 4)
    long_run = Run(8, "matmul", tuple(range(1, 401)), False, True, "fp32")
    return [
        ("hello-device", "what a phone says", device),
        ("hello-operator", "an operator needs no more", Hello(Role.OPERATOR, credential="k7Jd")),
        ("hello-measure", "wants no work", replace(device, measure=True)),
        ("hello-code", "a join code in reserve", replace(device, join_code="7KQ4-MWX2-PDH9")),
        ("hello-kind", "a page that runs on a tablet", replace(device, profile="", kind="tablet")),
        ("hello-graphs", "a device that runs graphs",
         replace(device, features=("measure", "graphs"), graph_flops_per_s=9e10)),
        ("hello-coding", "a device that reads coded arrays, and codes",
         replace(device, features=("measure", "coding"))),
        ("hello-versions",
         "what it speaks and has; names that the reader does not know are no harm",
         replace(device, versions=(1, 2), features=("measure", "tea"))),
        ("hello-holds", "a device that lost its connection, and still has its arrays",
         replace(device, features=("graphs", "keeps"), holds="1f3a")),
        ("hello-unicode", "text is UTF-8", Hello(Role.DEVICE, name="Łukasz’ 📱")),
        ("welcome", "the answer to a device", Welcome(device=7)),
        ("welcome-credential", "to a device that used a join code",
         Welcome(device=7, server="4ZT9QK7M2C", credential="k7Jd_2-x")),
        ("welcome-features", "those of hello that the PS has", Welcome(7, features=("measure",))),
        ("welcome-arrays", "to a device that may keep its arrays",
         Welcome(7, features=("graphs", "keeps"), arrays="1f3a")),
        ("welcome-operator", "operators are no devices", Welcome(device=0)),
        ("held", "two arrays and a graph", Held((3, 5, 9))),
        ("held-nothing", "no arrays", Held(())),
        ("put-fp32", "1 2 / 3 4", Put(1, 2, 2, "fp32", block)),
        ("put-bf16", "1 -2", Put(2, 1, 2, "bf16", bytes.fromhex("803f00c0"))),
        ("put-fp16", "1 -2", Put(3, 2, 1, "fp16", bytes.fromhex("003c00c0"))),
        ("put-int64", "1 -2, for graphs", Put(3, 1, 2, "int64", struct.pack("<2q", 1, -2))),
        ("put-bool", "true false, for graphs", Put(3, 2, 1, "bool", b"\x01\x00")),
        ("put-uint8", "0 255, for graphs", Put(3, 1, 2, "uint8", b"\x00\xff")),
        ("put-no-rows", "an empty payload", Put(4, 0, 5, "fp32", b"")),
        ("put-no-columns", "empty in the other way", Put(5, 5, 0, "bf16", b"")),
        ("put-largest-id", "ids end at 2**63 - 1", Put(LARGEST_ID, 1, 1, "fp32", block[:4])),
        ("put-bin8-long", "254 bytes", Put(6, 1, 127, "bf16", b"\xa5" * 254)),
        ("put-bin16-shortest", "256 bytes", Put(6, 1, 64, "fp32", b"\xa5" * 256)),
        ("put-bin16-long", "65534 bytes", Put(6, 1, 32767, "bf16", b"\xa5" * 65534)),
        ("put-bin32-shortest", "65536 bytes", Put(6, 1, 16384, "fp32", b"\xa5" * 65536)),
        ("put-coded", "1 -2", PutCoded(2, 1, 2, "bf16", CODED)),
        ("put-coded-empty", "no columns", PutCoded(5, 5, 0, "bf16", b"")),
        ("put-coded-largest-id", "2**63 - 1", PutCoded(LARGEST_ID, 1, 2, "bf16", CODED)),
        ("code-results", "no fields", CodeResults()),
        ("run", "one pair", Run(1, "matmul", (1, 2), False, True, "bf16")),
        ("run-chained", "three pairs, partial sum", Run(2, "matmul", (1, 2, 3, 4, 5, 6), *_TF)),
        ("run-largest-ids", "2**63 - 1", Run(LARGEST_ID, "matmul", (LARGEST_ID, 0), *_TF)),
        ("run-long", "a header of more than 512 bytes", long_run),
        ("run-unknown-op", "well formed; a device answers task_error", replace(long_run, op="fft")),
        ("graph", "bytes that are no model: here nobody looks at them", Graph(9, b"model")),
        ("graph-empty", "of no bytes", Graph(9, b"")),
        ("graph-bin32", "65536 bytes, as id 2**63 - 1", Graph(LARGEST_ID, b"\x0a" * 65536)),
        ("concat", "three arrays become one", Concat(4, (1, 2, 3))),
        ("concat-largest-ids", "2**63 - 1", Concat(LARGEST_ID, (LARGEST_ID, 0))),
        ("run-graph", "two of three outputs are kept", _RUN_GRAPH),
        ("run-graph-zeros", "an input of zeros", replace(_RUN_GRAPH, inputs=(1, 0))),
        ("run-graph-nothing-kept", "as many ids as the graph has outputs, and no size",
         replace(_RUN_GRAPH, outputs=(0, 0, 0), output_bytes=())),
        ("run-graph-no-inputs", "a graph of constants; how long it takes is not said",
         RunGraph(2, 9, (), (10,), (4,))),
        ("run-graph-largest-ids", "2**63 - 1",
         RunGraph(*_LARGEST, (LARGEST_ID, 0), (LARGEST_ID,), (LARGEST_ID,), LARGEST_ID)),
        ("run-graph-long", "a header of more than 512 bytes",
         replace(_RUN_GRAPH, inputs=tuple(range(1, 401)))),
        ("fetch", "rows 2 and 3 of 4 columns", Fetch(3, 10, 2, 2, 4, "bf16")),
        ("fetch-largest-ids", "2**63 - 1", Fetch(*_LARGEST, *_LARGEST, LARGEST_ID, "fp32")),
        ("computed", "the outputs are kept", Computed(1, 0.25)),
        ("computed-largest-id", "2**63 - 1", Computed(LARGEST_ID, 0.0)),
        ("result", "1 2 / 3 4", Result(1, 2, 2, "fp32", 0.001953125, block)),
        ("result-empty", "no rows", Result(2, 0, 3, "bf16", 0.0, b"")),
        ("result-largest-id", "2**63 - 1", Result(LARGEST_ID, 1, 1, "fp16", 0.5, b"\x00\x3c")),
        ("result-bin16", "300 bytes", Result(3, 1, 75, "fp32", 0.25, b"\x5a" * 300)),
        ("result-coded", "1 -2", ResultCoded(1, 2, 1, "bf16", 0.25, CODED)),
        ("result-coded-empty", "no rows", ResultCoded(2, 0, 3, "fp32", 0.0, b"")),
        ("task-error", "the session goes on", TaskError(9, "array 4 is not here")),
        ("drop", "three arrays", Drop((1, 2, 300))),
        ("drop-nothing", "allowed, does nothing", Drop(())),
        ("cancel", "two runs", Cancel((4294967296, LARGEST_ID))),
        ("measured", "to a device that set measure", Measured(1.25e7, 2.5e6, 0.015625)),
        ("heartbeat", "no fields", Heartbeat()),
        ("telemetry", "any names", Telemetry({"temperature_c": 41.5, "battery_ratio": 0.875})),
        ("telemetry-empty", "nothing to tell", Telemetry()),
        ("drain", "no fields", Drain()),
        ("bye", "with a reason", Bye("drained")),
        ("bye-silent", "without", Bye()),
        *((f"bye-{code.value}", "one of the codes", Bye("why", code)) for code in ByeCode if code),
        ("bye-retry", "come back, but not yet", Bye("closing", ByeCode.CLOSING, 2.5)),
        ("bye-elsewhere", "to a device with moves",
         Bye("moved", ByeCode.MOVED, address="ws://192.0.2.7:8766/ws#c=")),
        ("bye-longest", "4096 characters", Bye("é" * limits.MAX_TEXT)),
        *((f"error-{code.value}", "one of the codes", Error(code, "why")) for code in ErrorCode),
        ("error-retry", "come back, but not yet", Error(ErrorCode.LIMIT, "full", 30.0)),
        ("error-versions", "what the PS speaks",
         Error(ErrorCode.VERSION, "1 and 3 here", versions=(1, 3))),
        ("request-status", "no arguments", Request(1, "status")),
        ("request-attach", "a job's id", Request(2, "attach", {"job": "job-1"})),
        ("request-submit", "nested maps", Request(3, "submit", {"job": _JOB, "name": "first"})),
        ("reply", "yes", Reply(3, True, {"job": "job-1"})),
        ("reply-refused", "no", Reply(4, False, {"text": "no such job", "exit_code": 2})),
        ("reply-status", "lists of maps", Reply(1, True, {"jobs": [], "devices": [_DEVICE]})),
        ("job-record", "one step", JobRecord("job-1", {"event": "step", "step": 1, "loss": 5.5})),
        ("job-record-end", "the last", JobRecord("job-1", {"event": "end", "state": "done"})),
    ]  # fmt: skip


_TF: Final = (True, False, "fp32")
_LARGEST: Final = (LARGEST_ID, LARGEST_ID)
_RUN_GRAPH: Final = RunGraph(1, 9, (1, 2), (10, 0, 11), (16, 32), 4000)
_JOB: Final = {"model": "opt-125m", "steps": 10, "learning_rate": 0.0009765625}
_DEVICE: Final = {"device": 7, "name": "a", "state": "busy", "blocks": 3, "compute_s": 0.5}


def _message_vectors() -> list[Json]:
    vectors = []
    for name, about, message in _messages():
        header, *payload = (bytes(part) for part in encode(message))
        vector = {"name": name, "about": about, **of_feature(message.FEATURE)}
        vector |= {**described(message), "header": header.hex()}
        if payload:
            (data,) = payload
            many = len(data) > 64
            vector["payload"] = repeated(data[:1], len(data)) if many else data.hex()
        vectors.append(vector)
    return vectors


# --- decode.json: bytes that this codec does not write, but has to read ---------------------------


def pack(*parts: Any) -> bytes:
    """One message of any parts, right or wrong."""
    return _packed(list(parts))


def _packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def _fields(message: Message, **changes: Any) -> Json:
    """The fields of a message as they are packed, with changes; None takes one away."""
    values = {
        f.name: value.value if isinstance(value := getattr(message, f.name), Enum) else value
        for f in fields(message)
        if f.name != "payload"
    }
    return {k: v for k, v in {**values, **changes}.items() if v is not None}


_PUT: Final = Put(1, 1, 1, "fp32")
_HELLO: Final = Hello(Role.DEVICE)
_RUN: Final = Run(1, "matmul", (1, 2), False, False, "fp32")
_FETCH: Final = Fetch(3, 10, 0, 2, 4, "fp32")
_RESULT: Final = Result(1, 1, 1, "fp32", 0.5)
_FOUR: Final = bytes.fromhex("0000803f")
_OF_VERSION_2: Final[Json] = {
    "role": "device",
    "version": 2,
    "versions": [2, 1],
    "name": {"first": "Anna's", "last": "phone"},
    "memory_bytes": "1 GiB",
    "ops": 7,
    "shape": [1, None],
}
_PLAIN: Final[Json] = {"a": [None, True, False, -1, 2**64 - 1, 0.5, "x", [], {}, {"": [1]}]}


def _decode_vectors() -> list[Json]:
    put, device = Put(1, 1, 1, "fp32", _FOUR), b"\x92" + _packed("welcome") + b"\x81\xa6device"
    # The fields of a message as a map, or all of its bytes.
    cases: list[tuple[str, str, Json | bytes, Message]] = [
        ("hello-defaults", "fields left out have their defaults", {"role": "device", "version": 1},
         _HELLO),
        ("welcome-defaults", "likewise", {"device": 3}, Welcome(3)),
        ("bye-defaults", "likewise", {}, Bye()),
        ("error-defaults", "likewise", {"code": "limit", "message": "silent"},
         Error(ErrorCode.LIMIT, "silent")),
        ("error-unknown-code", "there may be more codes than a reader knows",
         {"code": "tired", "message": "later", "retry_after_s": 30},
         Error(ErrorCode("tired"), "later", 30.0)),
        ("bye-unknown-code", "likewise", {"reason": "so long", "code": "moving"},
         Bye("so long", ByeCode("moving"))),
        ("hello-version-2", "of another version only what all have in common is read",
         _OF_VERSION_2, Hello(Role.DEVICE, 2, versions=(2, 1))),
        ("telemetry-defaults", "likewise", {}, Telemetry()),
        ("run-graph-defaults", "likewise", _fields(_RUN_GRAPH, flops=None),
         replace(_RUN_GRAPH, flops=0)),
        ("computed-integer-for-float", "1 is as good as 1.0", {"id": 1, "compute_s": 1},
         Computed(1, 1.0)),
        ("request-defaults", "likewise", {"id": 1, "action": "status"}, Request(1, "status")),
        ("reply-defaults", "likewise", {"id": 1, "ok": True}, Reply(1, True)),
        ("job-record-defaults", "likewise", {"job": "j"}, JobRecord("j")),
        ("unknown-field", "unknown fields are ignored, whatever they hold",
         {"mood": {"good": [1, 2.5, None, "x"]}}, Heartbeat()),
        ("unknown-field-before-payload", "also where a payload follows",
         _fields(_PUT, scale=[0.5]), put),
        ("unknown-long-field", "also when they are long", _fields(_PUT, comment="x" * 600), put),
        ("unknown-field-named-payload", "the payload is a part, not a field",
         _fields(_PUT, payload="x"), put),
        ("fields-in-another-order", "the order of fields has no meaning",
         dict(reversed(_fields(_RUN).items())), _RUN),
        ("integer-for-float", "1 is as good as 1.0", _fields(_RESULT, compute_s=2),
         replace(_RESULT, compute_s=2.0, payload=_FOUR)),
        ("float32", "floats may have four bytes",
         b"\x92" + _packed("telemetry") + b"\x81" + _packed("values")
         + b"\x81" + _packed("a") + b"\xca" + struct.pack(">f", 1.5),
         Telemetry({"a": 1.5})),
        ("nested-32-deep", "the deepest value that arguments may hold",
         {"id": 1, "action": "a", "arguments": {"a": nested(32)}},
         Request(1, "a", {"a": nested(limits.MAX_NESTING)})),
        ("plain-values", "all that untyped values may be",
         {"id": 1, "action": "a", "arguments": _PLAIN}, Request(1, "a", _PLAIN)),
        ("telemetry-negative", "only rates and times cannot be below 0",
         {"values": {"temperature_c": -10.5}}, Telemetry({"temperature_c": -10.5})),
        ("long-integer", "integers may be longer than they need",
         device + b"\xcf" + bytes(7) + b"\x05", Welcome(5)),
        ("signed-integer", "and of a signed type, if they are not negative",
         device + b"\xd3" + bytes(7) + b"\x05", Welcome(5)),
        ("long-array-and-map", "array32 and map16",
         b"\xdd\x00\x00\x00\x02" + _packed("drain") + b"\xde\x00\x00", Drain()),
        ("long-text", "str8 for a short text", b"\x92\xd9\x05drain\x80", Drain()),
        ("long-bin", "bin32 for a short payload",
         b"\x93" + _packed("put") + _packed(_fields(_PUT)) + b"\xc6\x00\x00\x00\x04" + _FOUR,
         put),
        ("long-ids", "array16 for two ids",
         b"\x92" + _packed("drop") + b"\x81" + _packed("ids") + b"\xdc\x00\x02\x01\x02",
         Drop((1, 2))),
    ]  # fmt: skip
    vectors = []
    for name, about, written, message in cases:
        payload = getattr(message, "payload", None)
        parts = () if payload is None else (payload,)
        data = written if isinstance(written, bytes) else pack(message.TYPE, written, *parts)
        vector = {"name": name, "about": about, **of_feature(message.FEATURE)}
        vector |= {**described(message), "bytes": data.hex()}
        if payload is not None:
            vector["payload"] = payload.hex()
        vectors.append(vector)
    return vectors


# --- invalid.json -----------------------------------------------------------------------------


def _hello(**changes: Any) -> bytes:
    """A hello that is right but for what is given."""
    return pack("hello", _fields(_HELLO, **changes))


def nested(depth: int) -> Any:
    """A number within lists, `depth` deep itself."""
    return [nested(depth - 1)] if depth > 1 else 0


def _invalid_vectors() -> list[Json]:
    put = b"\x93" + _packed("put") + _packed(_fields(_PUT))
    whole = put + b"\xc4\x04" + _FOUR
    beat = pack("heartbeat", {})
    cases: list[tuple[str, str, Any]] = [
        # not an envelope
        ("empty", "no bytes", b""),
        ("text", "JSON, not msgpack", b'["heartbeat",{}]'),
        ("reserved-byte", "0xc1 is never used by msgpack", b"\x92\xc1\x80"),
        ("not-an-array", "a map", _packed({"type": "heartbeat"})),
        ("bare-text", "a text alone", _packed("heartbeat")),
        ("no-parts", "an empty array", b"\x90"),
        ("one-part", "no fields", pack("heartbeat")),
        ("type-not-text", "a number for a type", pack(7, {})),
        ("type-is-bin", "bytes for a type", pack(b"heartbeat", {})),
        ("fields-not-a-map", "an array of fields", pack("heartbeat", [])),
        ("fields-nil", "nil for fields", pack("heartbeat", None)),
        ("field-name-not-text", "a number for a field's name", pack("heartbeat", {1: 2})),
        ("field-name-is-bin", "bytes for a field's name", pack("heartbeat", {b"a": 2})),
        ("type-not-utf8", "0xff is no UTF-8", b"\x92\xa2\xff\xff\x80"),
        ("text-not-utf8", "a lone surrogate", b"\x92" + _packed("bye") + b"\x81" + _packed("reason")
         + b"\xa3\xed\xa0\x80"),
        ("unknown-type", "no such message", pack("hola", {})),
        ("type-in-capitals", "types are lower case", pack("Heartbeat", {})),
        # length
        ("truncated-in-header", "the last byte is missing", pack("drop", {"ids": [1, 2]})[:-1]),
        ("truncated-in-bin-header", "bin8 without its length", put + b"\xc4"),
        ("truncated-before-payload", "no payload at all", put),
        ("truncated-payload", "three of four bytes", whole[:-1]),
        ("trailing-byte", "one byte too many", beat + b"\x00"),
        ("trailing-message", "two messages in one", beat + beat),
        ("trailing-after-payload", "one byte too many", whole + b"\x00"),
        ("payload-missing", "an array of two", b"\x92" + put[1:]),
        ("payload-unexpected", "an array of three", pack("heartbeat", {}, b"")),
        ("fourth-part", "an array of four", b"\x94" + whole[1:] + b"\xc0"),
        ("payload-nil", "nil for a payload", put + b"\xc0"),
        ("payload-is-text", "text for a payload", put + _packed("abcd")),
        ("payload-is-array", "an array for a payload", put + b"\x94\x00\x00\x00\x00"),
        ("bin-too-long", "bin32 states 2**32 - 1 bytes", put + b"\xc6\xff\xff\xff\xff" + _FOUR),
        ("bin-too-short", "bin8 states 3 of 4 bytes", put + b"\xc4\x03" + _FOUR),
        ("array-claims-too-much", "2**32 - 1 ids in no bytes", b"\x92" + _packed("drop") + b"\x81"
         + _packed("ids") + b"\xdd\xff\xff\xff\xff"),
        ("map-claims-too-much", "2**32 - 1 fields in no bytes", b"\x92" + _packed("drain")
         + b"\xdf\xff\xff\xff\xff"),
        # fields
        ("hello-without-role", "a required field is missing", pack("hello", {"version": 1})),
        ("hello-without-version", "likewise: it has no default", pack("hello", {"role": "device"})),
        ("put-without-id", "likewise", pack("put", _fields(_PUT, id=None), _FOUR)),
        ("run-without-inputs", "likewise", pack("run", _fields(_RUN, inputs=None))),
        ("graph-without-id", "likewise", pack("graph", {}, b"model")),
        ("graph-without-payload", "an array of two", pack("graph", {"id": 9})),
        ("graph-is-text", "text for a payload", pack("graph", {"id": 9}, "model")),
        *((f"run-graph-without-{name.replace('_', '-')}", "a required field is missing",
           pack("run_graph", _fields(_RUN_GRAPH, **{name: None})))
          for name in ("id", "graph", "inputs", "outputs", "output_bytes")),
        ("run-graph-inputs-hold-nil", "nil for no input", pack("run_graph",
         _fields(_RUN_GRAPH, inputs=[None]))),
        ("run-graph-outputs-not-an-array", "one id for many", pack("run_graph",
         _fields(_RUN_GRAPH, outputs=10))),
        ("run-graph-output-bytes-negative", "-1", pack("run_graph",
         _fields(_RUN_GRAPH, output_bytes=[-1, 32]))),
        ("run-graph-flops-is-float", "1e9 for an integer", pack("run_graph",
         _fields(_RUN_GRAPH, flops=1e9))),
        ("concat-without-ids", "it has no default", pack("concat", {"id": 4})),
        ("concat-ids-not-an-array", "one id for many", pack("concat", {"id": 4, "ids": 1})),
        ("fetch-without-out", "it has no default", pack("fetch", _fields(_FETCH, out=None))),
        ("fetch-row-negative", "-1", pack("fetch", _fields(_FETCH, first_row=-1))),
        ("computed-without-time", "it has no default", pack("computed", {"id": 1})),
        ("computed-with-payload", "an array of three", pack("computed",
         {"id": 1, "compute_s": 0.5}, b"")),
        ("hello-unknown-role", "not one of the roles", _hello(role="king")),
        ("hello-role-not-text", "an array", _hello(role=["device"])),
        ("error-code-not-text", "a number", pack("error", {"code": 3, "message": ""})),
        ("bye-code-not-text", "a number", pack("bye", {"code": 3})),
        ("error-retry-negative", "-1", pack("error", {"code": "limit", "message": "",
         "retry_after_s": -1})),
        ("error-versions-hold-text", "text for a count", pack("error", {"code": "version",
         "message": "", "versions": ["1"]})),
        ("hello-version-is-text", "text for a count", _hello(version="1")),
        ("hello-version-2-without-role", "what all versions have in common", pack("hello",
         {"version": 2})),
        ("features-not-text", "numbers for features", _hello(features=[1])),
        ("welcome-version-2", "a version that this client did not offer", pack("welcome",
         {"device": 7, "version": 2})),
        ("id-negative", "-1", pack("welcome", {"device": -1})),
        ("id-too-large", "2**63", pack("welcome", {"device": 2**63})),
        ("id-is-float", "1.0 for an integer", pack("welcome", {"device": 1.0})),
        ("id-is-bool", "true for an integer", pack("welcome", {"device": True})),
        ("id-is-text", "text for an integer", pack("welcome", {"device": "1"})),
        ("id-is-nil", "nil is not the default", pack("welcome", {"device": None})),
        ("ids-not-an-array", "one id for many", pack("drop", {"ids": 1})),
        ("ids-hold-text", "text for an id", pack("drop", {"ids": [1, "2"]})),
        ("ids-hold-negative", "-1", pack("cancel", {"ids": [-1]})),
        ("float-is-text", "text for a float", pack("result", _fields(_RESULT, compute_s="1"),
         _FOUR)),
        ("float-is-bool", "true for a float", _hello(latency_s=True)),
        ("bool-is-integer", "1 for true", pack("run", _fields(_RUN, transpose_a=1))),
        ("text-is-bin", "bytes for text", pack("bye", {"reason": b"x"})),
        ("text-is-integer", "a number for text", pack("bye", {"reason": 1})),
        ("ops-not-text", "numbers for ops", _hello(ops=[1])),
        ("values-not-a-map", "an array", pack("telemetry", {"values": [1.0]})),
        ("values-hold-text", "text for a float", pack("telemetry", {"values": {"a": "1"}})),
        ("arguments-key-not-text", "a number for a key", pack("request", {"id": 1, "action": "a",
         "arguments": {1: 1}})),
        ("float-nan", "NaN is no rate", _hello(flops_per_s=float("nan"))),
        ("float-infinite", "infinity is no rate", _hello(uplink_bytes_per_s=float("inf"))),
        ("float-negative", "time does not run backwards", _hello(latency_s=-1.0)),
        ("telemetry-nan", "every value is finite", pack("telemetry", {"values": {
         "a": float("nan")}})),
        ("telemetry-infinite", "likewise", pack("telemetry", {"values": {"a": float("-inf")}})),
        ("extension-type", "msgpack's ext types are not used", pack("request", {"id": 1,
         "action": "a", "arguments": {"a": msgpack.ExtType(5, b"x")}})),
        ("timestamp", "nor its timestamps", pack("request", {"id": 1, "action": "a",
         "arguments": {"a": msgpack.Timestamp(1)}})),
        ("bin-in-arguments", "bytes travel as payloads only", pack("request", {"id": 1,
         "action": "a", "arguments": {"a": b"x"}})),
        # limits
        ("text-too-long", "4097 characters", pack("bye", {"reason": "x" * (limits.MAX_TEXT + 1)})),
        ("too-many-ids", "65537 ids", [b"\x92" + _packed("drop") + b"\x81" + _packed("ids")
         + b"\xdd\x00\x01\x00\x01", repeated(b"\x01", limits.MAX_IDS + 1)]),
        ("too-many-inputs", "4098 inputs", [b"\x92" + _packed("run") + b"\x86" + _packed("inputs")
         + b"\xdc\x10\x02", repeated(b"\x01", limits.MAX_RUN_INPUTS + 2),
         _packed(_fields(_RUN, inputs=None))[1:]]),
        *((f"too-many-{name.replace('_', '-')}-of-a-graph", "4097 of them",
           [b"\x92" + _packed("run_graph") + b"\x86" + _packed(name) + b"\xdc\x10\x01",
            repeated(b"\x01", limits.MAX_RUN_INPUTS + 1),
            _packed(_fields(_RUN_GRAPH, **{name: None}))[1:]])
          for name in ("inputs", "outputs", "output_bytes")),
        ("too-many-parts", "4097 arrays", [b"\x92" + _packed("concat") + b"\x82" + _packed("ids")
         + b"\xdc\x10\x01", repeated(b"\x01", limits.MAX_RUN_INPUTS + 1), _packed({"id": 4})[1:]]),
        ("header-too-long", "an unknown field of 1 MiB", [b"\x92" + _packed("heartbeat") + b"\x81"
         + _packed("x") + b"\xdb\x00\x10\x00\x00", repeated(b"x", limits.MAX_HEADER_BYTES)]),
        ("nested-33-deep", "a list as arguments may hold it, but one deeper", pack("request",
         {"id": 1, "action": "a", "arguments": {"a": nested(limits.MAX_NESTING + 1)}})),
        ("nested-too-deep", "1000 arrays, one in another", [b"\x92" + _packed("bye") + b"\x81"
         + _packed("reason"), repeated(b"\x91", 1000), b"\xc0"]),
        ("nested-much-too-deep", "500000 maps, one in another, in an unknown field",
         [b"\x92" + _packed("bye") + b"\x81" + _packed("x"), repeated(b"\x81\xa0", 500_000)]),
    ]  # fmt: skip
    return [{"name": n, "why": why, "bytes": _hex(data)} for n, why, data in cases]


def _hex(data: Any) -> Any:
    if isinstance(data, bytes):
        return data.hex()
    return [_hex(part) for part in data] if isinstance(data, list) else data


# --- matmul.json ------------------------------------------------------------------------------


def number(value: float, dtype: str) -> bytes:
    """A number in a dtype, rounded to nearest even."""
    value = float(value)
    if dtype == "fp32":
        return struct.pack("<f", value)
    if dtype == "fp16":
        try:
            return struct.pack("<e", value)
        except OverflowError:  # struct refuses what rounds to infinity
            return struct.pack("<e", float("inf") if value > 0 else float("-inf"))
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def elements(matrix: Matrix, dtype: str) -> bytes:
    """A matrix as a payload, row by row."""
    return b"".join(number(value, dtype) for row in matrix for value in row)


def product(a: Matrix, b: Matrix, depth: int) -> Matrix:
    """Exact."""
    columns = len(b[0]) if b else 0
    return [[sum(row[k] * b[k][j] for k in range(depth)) for j in range(columns)] for row in a]


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def grid(rows: int, columns: int, start: int = 1, step: int = 1) -> Matrix:
    """Small integers of both signs, none of them zero."""
    flat = [(start + step * i) % 7 + 1 for i in range(rows * columns)]
    signed = [-value if i % 3 == 2 else value for i, value in enumerate(flat)]
    return [signed[r * columns : (r + 1) * columns] for r in range(rows)]


def _matmul(
    name: str,
    about: str,
    pairs: Sequence[tuple[Matrix, Matrix]],
    dtype: str = "fp32",
    out: str = "",
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Json:
    """A vector from mathematical matrices; they are stored transposed where the run says so."""
    out = out or dtype
    total: Matrix | None = None
    puts = []
    for a, b in pairs:
        part = product(a, b, len(b))
        total = part if total is None else _sum(total, part)
        puts += [transposed(a) if transpose_a else a, transposed(b) if transpose_b else b]
    assert total is not None
    inputs = tuple(range(1, len(puts) + 1))
    run = Run(1, "matmul", inputs, transpose_a, transpose_b, out)
    sides = [(len(matrix), len(matrix[0])) for matrix in puts]
    return _product_vector(name, about, dtype, [*zip(sides, puts, strict=True)], run, total)


def _product_vector(
    name: str,
    about: str,
    dtype: str,
    puts: Sequence[tuple[tuple[int, int], Matrix]],
    run: Run,
    total: Matrix,
) -> Json:
    """A vector from matrices as they are stored, with their sides."""
    described_puts = [
        {
            "id": id,
            "rows": rows,
            "columns": columns,
            "dtype": dtype,
            "values": plain(matrix),
            "payload": elements(matrix, dtype).hex(),
        }
        for id, ((rows, columns), matrix) in enumerate(puts, 1)
    ]
    columns = puts[-1][0][0 if run.transpose_b else 1]
    result = {
        "rows": len(total),
        "columns": columns,
        "dtype": run.out,
        "exact": plain(total),
        "payload": elements(total, run.out).hex(),
    }
    fields_of_run = described(run)["fields"]
    return {"name": name, "about": about, "put": described_puts, "run": fields_of_run,
            "result": result}  # fmt: skip


def _sum(a: Matrix, b: Matrix) -> Matrix:
    return [[x + y for x, y in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def _matmul_vectors() -> list[Json]:
    a, b = grid(2, 3), grid(3, 4, 2, 3)
    chain = [(a, b), (grid(2, 5, 3), grid(5, 4, 1, 2)), (grid(2, 1, 5), grid(1, 4))]
    vectors = [
        _matmul("fp32", "2x3 by 3x4", [(a, b)]),
        _matmul("transpose-a", "A lies transposed", [(a, b)], transpose_a=True),
        _matmul("transpose-b", "B lies transposed", [(a, b)], transpose_b=True),
        _matmul("transpose-both", "both do", [(a, b)], transpose_a=True, transpose_b=True),
        _matmul("chained", "three pairs of depths 3, 5 and 1", chain),
        _matmul("chained-transposed", "every A and every B lies transposed", chain,
            transpose_a=True, transpose_b=True),
        _matmul("vectors", "a row by a column", [(grid(1, 9), grid(9, 1))]),
        _matmul("outer", "a column by a row", [(grid(5, 1), grid(1, 3))]),
        _matmul("odd-sides", "7x5 by 5x3", [(grid(7, 5), grid(5, 3, 4))]),
    ]  # fmt: skip
    for dtype in ("bf16", "fp16"):
        narrow = 256 if dtype == "bf16" else 2048  # from here on, odd integers are not exact
        ones = [[1]] * 9
        vectors += [
            _matmul(dtype, "in and out", [(a, b)], dtype),
            _matmul(f"{dtype}-to-fp32", "a partial sum", [(a, b)], dtype, "fp32"),
            _matmul(f"{dtype}-chained", "pairs, B transposed", chain, dtype, transpose_b=True),
            _matmul(f"{dtype}-chained-to-fp32", "as weight gradients are", chain, dtype, "fp32",
                transpose_a=True),
            _matmul(f"{dtype}-accumulation",
                f"{narrow} + 1 + ... + 1: wrong unless sums are kept in fp32",
                [([[narrow] + [1] * 8], ones)], dtype),
            _matmul(f"{dtype}-accumulation-chained",
                f"{narrow}, + 1, + 1: wrong unless rounded once, after the last pair",
                [([[narrow]], [[1]]), ([[1]], [[1]]), ([[1]], [[1]])], dtype),
            _matmul(f"{dtype}-ties",
                "halfway between two values: to the even one, away from and towards zero",
                [([[narrow, 1], [narrow, 3], [-narrow, -1], [-narrow, -3]], [[1], [1]])], dtype),
        ]  # fmt: skip
    largest = (2**8 - 1) * 2**120  # of bf16
    vectors += [
        _matmul("fp16-overflow", "65519 rounds to 65504, 65520 to infinity",
            [([[65504, 15], [65504, 16], [-65504, -16]], [[1], [1]])], "fp16"),
        _matmul("bf16-overflow", "halfway above the largest value: infinity",
            [([[largest, 2**118], [largest, 2**119], [-largest, -(2**119)]], [[1], [1]])], "bf16"),
        _same_array_twice(),
        _empty("no-rows", "0x2 by 2x3 is 0x3", (0, 2), (2, 3), "fp32"),
        _empty("no-columns", "2x3 by 3x0 is 2x0", (2, 3), (3, 0), "fp16"),
        _empty("no-depth", "2x0 by 0x3 is all zeros", (2, 0), (0, 3), "bf16"),
    ]  # fmt: skip
    return vectors


def _same_array_twice() -> Json:
    vector = _matmul("same-array-twice", "A by its own transpose", [(grid(2, 3), _T)])
    del vector["put"][1]
    vector["run"] |= {"inputs": [1, 1], "transpose_b": True}
    return vector


_T: Final = transposed(grid(2, 3))


def _empty(name: str, about: str, a: tuple[int, int], b: tuple[int, int], dtype: str) -> Json:
    puts = [(sides, grid(*sides)) for sides in (a, b)]
    zeros = [[0] * b[1] for _ in range(a[0])]
    return _product_vector(name, about, dtype, puts, replace(_RUN, out=dtype), zeros)


# --- session.json: a whole session, as the PS and a device have it --------------------------------


def _session_vectors() -> list[Json]:
    return [
        {
            "name": f"{number}-{message.TYPE}",
            "about": about,
            "from": who,
            **described(message),
            **({"payload": payload.hex()} if payload is not None else {}),
            "bytes": data.hex(),
        }
        for number, ((who, data), about) in enumerate(
            zip(session_example.session(), session_example.ABOUT, strict=True), 1
        )
        for message in [decode(data)]
        for payload in [getattr(message, "payload", None)]
    ]


# --- faults.json: what a device does with messages that are well formed and cannot be obeyed -----


def _fault_vectors() -> list[Json]:
    put = _zeros
    a, b = put(1, 2, 3), put(2, 3, 2)
    run = _RUN
    task_errors: list[tuple[str, str, list[Message]]] = [
        ("unknown-op", "an op that was not offered", [a, b, replace(run, op="fft")]),
        ("no-inputs", "nothing to multiply", [replace(run, inputs=())]),
        ("odd-inputs", "half a pair", [a, b, replace(run, inputs=(1, 2, 1))]),
        ("array-not-here", "array 3 never came", [a, replace(run, inputs=(1, 3))]),
        ("array-dropped", "array 2 is gone", [a, b, Drop((2,)), run]),
        ("depths-differ", "2x3 by 2x3", [a, put(2, 2, 3), run]),
        ("depths-differ-transposed", "3x2 by 3x2", [a, b, replace(run, transpose_a=True)]),
        ("dtypes-differ", "fp32 by bf16", [a, put(2, 3, 2, "bf16"), run]),
        ("shapes-differ", "2x2 and 3x3 cannot be added", [a, b, replace(run, inputs=(1, 2, 2, 1))]),
        ("out-of-another-dtype", "bf16 of fp32 inputs", [a, b, replace(run, out="bf16")]),
        ("out-of-another-16-bit-dtype", "fp16 of bf16 inputs",
         [put(1, 2, 3, "bf16"), put(2, 3, 2, "bf16"), replace(run, out="fp16")]),
        ("result-over-memory", "no bytes in, 1024 out", [put(1, 16, 0), put(2, 0, 16), run]),
        ("result-over-what-is-left", "960 bytes of arrays, a result of 64",
         [put(1, 4, 0), put(2, 0, 4), put(3, 240, 1), run]),
        ("second-result-over-memory", "two results of 576 bytes",
         [put(1, 12, 0), put(2, 0, 12), run, replace(run, id=2)]),
    ]  # fmt: skip
    errors: list[tuple[str, str, list[Message]]] = [
        ("put-twice", "id 1 is there", [a, a]),
        ("put-too-short", "20 bytes for 24", [replace(a, payload=bytes(20))]),
        ("put-too-long", "28 bytes for 24", [replace(a, payload=bytes(28))]),
        ("put-unknown-dtype", "no such dtype", [replace(a, dtype="fp8")]),
        ("put-dtype-of-a-feature", "only a device with the feature graphs takes int64",
         [put(1, 1, 3, "int64")]),
        ("put-uint8-without-its-feature", "nor uint8", [put(1, 1, 3, "uint8")]),
        ("put-over-memory", "1001 bytes, 1000 offered", [put(1, 250, 1), put(2, 1, 1)]),
        ("put-over-memory-with-result", "900 bytes of a result that is under way, 104 of an array",
         [put(1, 15, 0), put(2, 0, 15), run, put(3, 26, 1)]),
        ("run-unknown-dtype", "no such dtype", [a, b, replace(run, out="fp8")]),
        ("run-twice", "run 1 is not answered yet", [a, b, run, run]),
        ("welcome-twice", "there is one handshake", [Welcome(1)]),
        ("wrong-direction", "a device gets no results", [Result(1, 0, 0, "fp32", 0.0, b"")]),
        ("measured-not-asked", "its hello did not set measure", [Measured(1e6, 1e6, 0.0)]),
        ("wrong-direction-heartbeat", "nor heartbeats", [Heartbeat()]),
    ]  # fmt: skip
    accepted: list[tuple[str, str, list[Message]]] = [
        ("drop-unknown", "ids that are not there are ignored", [Drop((7, 8)), Cancel((9,))]),
        ("put-after-drop", "the same content may come again", [a, Drop((1,)), a]),
        ("put-exactly-full", "1000 bytes, 1000 offered", [put(1, 250, 1)]),
        ("put-exactly-full-with-result",
         "900 bytes of a result that is under way, 100 of an array",
         [put(1, 15, 0), put(2, 0, 15), run, put(3, 25, 1)]),
        ("put-after-cancel", "the result of a cancelled run takes no memory",
         [put(1, 15, 0), put(2, 0, 15), run, Cancel((1,)), put(3, 250, 1)]),
        ("put-empty-when-full", "no bytes always fit", [put(1, 250, 1), put(2, 0, 9)]),
    ]  # fmt: skip
    groups = {"task_error": task_errors, "error": errors, "none": accepted}
    return [
        *_faults(groups, None),
        *_faults(_graph_faults(), Feature.GRAPHS),
        *_faults(_coding_faults(), Feature.CODING),
    ]


_Faults = dict[str, list[tuple[str, str, list[Message]]]]
"""By answer: name, what it shows, and the messages."""


def _faults(groups: _Faults, feature: Feature | None) -> list[Json]:
    return [
        {
            "name": name,
            "about": about,
            **of_feature(feature),
            "memory_bytes": 1000,
            "receive": [_with_payload(message) for message in received],
            "answer": answer,
        }
        for answer, cases in groups.items()
        for name, about, received in cases
    ]


def _zeros(id: int, rows: int, columns: int, dtype: str = "fp32") -> Put:
    itemsize = {"fp32": 4, "int64": 8, "bool": 1, "uint8": 1}.get(dtype, 2)
    return Put(id, rows, columns, dtype, bytes(rows * columns * itemsize))


def _graph_faults() -> _Faults:
    """Of a device with the feature graphs. No model is looked at: 9 is one, of 100 bytes."""
    put, graph, a = _zeros, Graph(9, bytes(100)), _zeros(1, 2, 3)
    run = RunGraph(1, 9, (1,), (10,), (24,))
    fetch = Fetch(2, 10, 0, 2, 3, "fp32")
    task_errors: list[tuple[str, str, list[Message]]] = [
        ("graph-not-here", "graph 9 never came", [a, run]),
        ("graph-dropped", "graph 9 is gone", [graph, a, Drop((9,)), run]),
        ("graph-is-an-array", "9 is an array", [a, put(9, 1, 1), run]),
        ("graph-input-not-here", "array 1 never came", [graph, run]),
        ("graph-input-dropped", "array 1 is gone", [graph, a, Drop((1,)), run]),
        ("graph-input-is-a-graph", "9 is no array", [graph, replace(run, inputs=(9,))]),
        ("sum-without-graph", "10 would be replaced, but graph 8 never came", [
            graph, a, run, replace(run, id=2, graph=8, inputs=(1, 10))]),
        ("fetch-not-here", "array 10 never came", [fetch]),
        ("fetch-dropped", "array 10 is gone", [graph, a, run, Drop((10,)), fetch]),
        ("fetch-a-graph", "9 is no array", [graph, replace(fetch, array=9)]),
        ("fetch-integers", "only floating-point arrays can be fetched", [
            put(1, 2, 3, "int64"), replace(fetch, array=1)]),
        ("fetch-uint8", "likewise", [put(1, 2, 3, "uint8"), replace(fetch, array=1)]),
        ("fetch-over-memory", "496 bytes of an array, 496 of a result, 100 of a graph", [
            graph, put(1, 124, 1), replace(fetch, array=1, rows=124, columns=1)]),
        ("run-of-a-kept-output", "run takes only what was put", [
            graph, a, run, replace(_RUN, id=2, inputs=(1, 10))]),
        ("run-of-concatenated-arrays", "likewise", [
            put(1, 1, 2), Concat(4, (1,)), replace(_RUN, inputs=(4, 4))]),
        ("fetch-after-concat", "array 1 is gone", [
            put(1, 1, 3), Concat(4, (1,)), replace(fetch, array=1, rows=1)]),
        ("run-of-integers", "there is no product of integers", [
            put(1, 1, 1, "int64"), replace(_RUN, inputs=(1, 1))]),
    ]  # fmt: skip
    errors: list[tuple[str, str, list[Message]]] = [
        ("graph-twice", "id 9 is there", [graph, graph]),
        ("graph-named-as-an-array", "graphs and arrays share their ids", [a, Graph(1, b"model")]),
        ("array-named-as-a-graph", "likewise", [graph, put(9, 1, 1)]),
        ("graph-over-memory", "950 bytes of an array, 100 of a graph", [put(1, 475, 1, "bf16"),
         graph]),
        ("put-int64-too-short", "20 bytes for 24", [Put(1, 1, 3, "int64", bytes(20))]),
        ("put-bool-too-long", "4 bytes for 3", [Put(1, 1, 3, "bool", bytes(4))]),
        ("put-uint8-too-long", "4 bytes for 3", [Put(1, 1, 3, "uint8", bytes(4))]),
        ("output-named-as-an-array", "id 1 is there", [graph, a, replace(run, outputs=(1,))]),
        ("output-named-as-an-output", "id 10 is there", [graph, a, run, replace(run, id=2)]),
        ("array-named-as-an-output", "likewise", [graph, a, run, put(10, 1, 1)]),
        ("output-replaces-an-input-given-twice", "10 stands in inputs twice", [graph, a, run,
         replace(run, id=2, inputs=(10, 10))]),
        ("output-replaces-an-input-of-another-size", "24 bytes and 20", [graph, a, run,
         replace(run, id=2, inputs=(1, 10), output_bytes=(20,))]),
        ("two-outputs-replace-one-input", "10 twice", [graph, a, run,
         replace(run, id=2, inputs=(1, 10), outputs=(10, 10), output_bytes=(24, 24))]),
        ("output-without-size", "one output is kept, of no size", [graph, a, replace(run,
         output_bytes=())]),
        ("size-without-output", "no output is kept, and one size is said", [graph, a, replace(run,
         outputs=(0,))]),
        ("outputs-over-memory", "124 bytes are taken, outputs of 877", [graph, a, replace(run,
         output_bytes=(877,))]),
        ("put-over-memory-with-output", "outputs count from the run_graph on", [graph, a,
         replace(run, output_bytes=(876,)), put(2, 1, 1)]),
        ("put-over-memory-after-cancel", "outputs of a cancelled run count until they are dropped",
         [graph, a, replace(run, output_bytes=(876,)), Cancel((1,)), put(2, 1, 1)]),
        ("concat-nothing", "an array of no arrays has no columns", [Concat(4, ())]),
        ("concat-not-here", "array 2 never came", [a, Concat(4, (1, 2))]),
        ("concat-twice-the-same", "array 1 is taken once", [a, Concat(4, (1, 1))]),
        ("concat-named-as-an-array", "id 2 is there", [a, put(2, 1, 3), put(3, 1, 3),
         Concat(2, (1, 3))]),
        ("concat-named-as-a-part", "id 1 is there", [a, Concat(1, (1,))]),
        ("concat-other-columns", "3 and 2", [a, put(2, 2, 2), Concat(4, (1, 2))]),
        ("concat-other-dtype", "fp32 and bf16", [a, put(2, 2, 3, "bf16"), Concat(4, (1, 2))]),
        ("concat-integers", "only floating-point arrays", [put(1, 1, 3, "int64"),
         Concat(4, (1,))]),
        ("concat-an-output", "only arrays that were put", [graph, a, run, Concat(4, (10,))]),
        ("concat-a-graph", "9 is no array", [graph, Concat(4, (9,))]),
        ("concat-concatenated", "4 was not put", [a, Concat(4, (1,)), Concat(5, (4,))]),
        ("put-over-memory-after-concat", "1000 bytes, and one more", [put(1, 125, 1),
         put(2, 125, 1), Concat(4, (1, 2)), put(3, 1, 1, "bool")]),
        ("run-graph-twice", "run 1 is not answered yet", [graph, a, run, replace(run,
         outputs=(11,))]),
        ("fetch-twice", "run 1 is not answered yet", [graph, a, run, replace(fetch, id=1)]),
        ("fetch-unknown-dtype", "no such dtype", [a, replace(fetch, array=1, out="fp8")]),
        ("fetch-as-integers", "int64 is no dtype of results", [a, replace(fetch, array=1,
         out="int64")]),
        ("wrong-direction-computed", "a device is not told so", [Computed(1, 0.5)]),
    ]  # fmt: skip
    accepted: list[tuple[str, str, list[Message]]] = [
        ("graph-after-drop", "the same content may come again", [graph, Drop((9,)), graph]),
        ("put-int64", "24 bytes", [put(1, 1, 3, "int64")]),
        ("put-bool", "3 bytes", [put(1, 1, 3, "bool")]),
        ("put-uint8", "3 bytes", [put(1, 1, 3, "uint8")]),
        ("concat", "10 rows of 3", [a, put(2, 8, 3), Concat(4, (2, 1))]),
        ("put-after-concat", "the names of the parts are free", [a, put(2, 8, 3),
         Concat(4, (2, 1)), put(1, 1, 1), put(2, 1, 1)]),
        ("concat-dropped", "996 bytes are free again", [put(1, 249, 1), Concat(4, (1,)),
         Drop((4,)), put(4, 250, 1)]),
        ("put-exactly-full-with-output", "100, 24, 872 and 4 bytes of 1000", [graph, a, replace(run,
         output_bytes=(872,)), put(2, 1, 1)]),
        ("drop-before-answer", "a graph, its input and its output, while it runs", [graph, a, run,
         Drop((9, 1, 10))]),
        ("put-after-drop-before-answer", "their memory counts as free at once", [graph, a, run,
         Drop((9, 1, 10)), put(2, 250, 1)]),
    ]  # fmt: skip
    return {"task_error": task_errors, "error": errors, "none": accepted}


def _coding_faults() -> _Faults:
    """Of a device with the feature coding."""
    coded = PutCoded(1, 1, 2, "bf16", CODED)
    errors: list[tuple[str, str, list[Message]]] = [
        ("put-coded-cut", "its last byte is missing", [replace(coded, payload=CODED[:-1])]),
        ("put-coded-too-long", "one byte follows", [replace(coded, payload=CODED + b"\x00")]),
        ("put-coded-other-shape", "two elements for three", [replace(coded, columns=3)]),
        ("put-coded-other-dtype", "bf16 for fp32", [replace(coded, dtype="fp32")]),
        ("put-coded-plain", "it is not coded", [replace(coded, payload=bytes(4))]),
        ("put-coded-integers", "int64 is never coded", [replace(coded, dtype="int64")]),
        ("put-coded-unknown-dtype", "no such dtype", [replace(coded, dtype="fp8")]),
        ("put-coded-twice", "id 1 is there", [coded, coded]),
        ("put-coded-over-memory", "1000 bytes are taken, it has 4",
         [_zeros(2, 249, 1), coded, replace(coded, id=3)]),
        ("result-coded-to-a-device", "nor results", [ResultCoded(1, 1, 2, "bf16", 0.0, CODED)]),
    ]  # fmt: skip
    accepted: list[tuple[str, str, list[Message]]] = [
        ("put-coded", "two elements", [coded]),
        ("put-coded-empty", "none", [replace(coded, columns=0, payload=b"")]),
        ("put-coded-exactly-full", "4 bytes count, whatever it took", [_zeros(2, 249, 1), coded]),
        ("put-after-put-coded", "they are arrays alike", [coded, _zeros(2, 1, 1)]),
        ("code-results", "and once more", [CodeResults(), CodeResults()]),
    ]
    return {"task_error": [], "error": errors, "none": accepted}


def _with_payload(message: Message) -> Json:
    payload = getattr(message, "payload", None)
    return described(message) | ({} if payload is None else {"payload": _shorter(payload)})


def _shorter(payload: bytes) -> Any:
    return repeated(b"\x00", len(payload)) if len(payload) > 64 else payload.hex()


# --- files ------------------------------------------------------------------------------------


def build() -> dict[str, str]:
    """The files by name."""
    contents = {
        "messages.json": _message_vectors(),
        "decode.json": _decode_vectors(),
        "invalid.json": _invalid_vectors(),
        "matmul.json": _matmul_vectors(),
        "faults.json": _fault_vectors(),
        "session.json": _session_vectors(),
        "graphs.json": graph_vectors(),
        "graph_runs.json": run_vectors(),
        "coding.json": [dict(vector, feature="coding") for vector in coding_vectors()],
    }
    return {
        name: _render({"protocol_version": limits.VERSION, "vectors": vectors})
        for name, vectors in contents.items()
    }


def _render(document: Json) -> str:
    """JSON with one vector a line group: its keys on lines of their own, their values in one."""
    groups = []
    for vector in document["vectors"]:
        lines = [
            f"      {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}"
            for key, value in vector.items()
        ]
        groups.append("    {\n" + ",\n".join(lines) + "\n    }")
    version = document["protocol_version"]
    body = ",\n".join(groups)
    return f'{{\n  "protocol_version": {version},\n  "vectors": [\n{body}\n  ]\n}}\n'


def main() -> None:
    """Write the files next to this one."""
    for name, text in build().items():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
