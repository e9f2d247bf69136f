"""The protocol's messages as dataclasses. `docs/protocol.md` defines their meaning."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from msgspec import Meta

from cleave.protocol import limits


def clean(text: str) -> str:
    """Return `text` as one line of printable characters, without terminal control characters."""
    if text.isprintable():  # true for almost all strings
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "" for c in text)


def clean_plain(value: Any) -> Any:
    """Return `value` with all its strings sanitized, including map keys and nested strings."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return type(value)(clean_plain(item) for item in value)
    if isinstance(value, dict):
        return {clean(key): clean_plain(item) for key, item in value.items()}
    return value


Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**limits.OBJECT_ID_BITS - 1)]
"""A non-negative 63-bit integer: an ID, a count, or a size."""

# A finite number.
Real: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

Rate: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]  # a rate or a duration

Text: TypeAlias = Annotated[str, Meta(max_length=limits.MAX_TEXT)]
Ids: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_IDS)]
Inputs: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RUN_INPUTS)]
Texts: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=limits.MAX_IDS)]

REQUIRED: Final = {"required": True}
"""Marks a field that an encoded message must contain, even if the dataclass has a default."""

SECRET: Final = {"secret": True}  # marks a field whose value is never shown in an error

VERBATIM: Final = {"verbatim": True}
"""Marks a field whose strings are not sanitized, because they are compared or are file names.
The strings of all other fields are sanitized on receipt (see `cleave.protocol.messages`)."""


class Op(Enum):
    """A compute operation that a device may offer in `hello`."""

    MATMUL = "matmul"


class Role(Enum):
    """The role of a client, as declared in `hello`."""

    DEVICE = "device"
    OPERATOR = "operator"


class Feature(Enum):
    """An optional feature of this protocol version. Peers negotiate which features they use."""

    MEASURE = "measure"
    GRAPHS = "graphs"
    CODING = "coding"
    MOVES = "moves"
    KEEPS = "keeps"


class _OpenEnum(StrEnum):
    """An enum that accepts unknown values, because newer peers may define additional members."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or len(value) > limits.MAX_TEXT:
            return None
        tidy = clean(value)
        if tidy != value:
            return cls(tidy)
        other = str.__new__(cls, value)
        other._name_ = other._value_ = value
        return other


class ByeCode(_OpenEnum):
    """Reason code of a `bye` message, which ends a session without a fault."""

    UNSTATED = ""
    CLOSING = "closing"
    DRAINED = "drained"
    MEASURED = "measured"
    LEAVING = "leaving"
    MOVED = "moved"


class ErrorCode(_OpenEnum):
    """Reason code of an `error` message, which ends a session because the peer is at fault."""

    VERSION = "version"
    CREDENTIAL = "credential"
    PROTOCOL = "protocol"
    LIMIT = "limit"
    REQUEST = "request"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"


class _Always:
    """A message that needs no feature, so every session may use it."""

    __slots__ = ()
    FEATURE: ClassVar[Feature | None] = None


@dataclass(slots=True)
class Hello(_Always):
    """Client to PS: the first message, which describes the client."""

    TYPE: ClassVar[str] = "hello"
    role: Role = field(metadata=REQUIRED)
    version: Count = field(default=limits.VERSION, metadata=REQUIRED)
    credential: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)
    name: Text = ""
    ops: Texts = ()
    dtypes: Texts = ()
    memory_bytes: Count = 0
    profile: Text = ""
    flops_per_s: Rate = 0.0
    downlink_bytes_per_s: Rate = 0.0
    uplink_bytes_per_s: Rate = 0.0
    latency_s: Rate = 0.0
    measure: bool = False
    join_code: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)
    kind: Text = ""
    versions: Ids = ()
    features: Texts = ()
    graph_flops_per_s: Rate = 0.0
    graph_bf16_flops_per_s: Rate = 0.0
    holds: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)


@dataclass(slots=True)
class Welcome(_Always):
    """PS to client: the client's `hello` is accepted, and the session begins."""

    TYPE: ClassVar[str] = "welcome"
    device: Count
    version: Count = limits.VERSION
    heartbeat_s: Rate = limits.HEARTBEAT_S
    server: Text = ""
    credential: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)
    features: Texts = ()
    arrays: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)


@dataclass(slots=True)
class Held:
    """Device to PS: the arrays and graphs that the device still has from its last session."""

    TYPE: ClassVar[str] = "held"
    FEATURE: ClassVar[Feature | None] = Feature.KEEPS
    ids: Ids


@dataclass(slots=True)
class Put(_Always):
    """PS to device: store this array under this ID. The payload is row-major."""

    TYPE: ClassVar[str] = "put"
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    payload: Any = None


@dataclass(slots=True)
class PutCoded:
    """PS to device: store this array, as for `put`. The payload is compressed (`cleave.coding`)."""

    TYPE: ClassVar[str] = "put_coded"
    FEATURE: ClassVar[Feature | None] = Feature.CODING
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    payload: Any = None


@dataclass(slots=True)
class CodeResults:
    """PS to device: the device may send compressed results from now on."""

    TYPE: ClassVar[str] = "code_results"
    FEATURE: ClassVar[Feature | None] = Feature.CODING


@dataclass(slots=True)
class Run(_Always):
    """PS to device: apply the operation `op` to the arrays `inputs`; respond with a `result`.

    The inputs of `matmul` are pairs a0, b0, a1, b1, ... The result is the sum of all a_i @ b_i,
    accumulated in fp32 and returned in the dtype `out`.
    """

    TYPE: ClassVar[str] = "run"
    id: Count
    op: Text
    inputs: Inputs
    transpose_a: bool
    transpose_b: bool
    out: Text


@dataclass(slots=True)
class Graph:
    """PS to device: store this ONNX graph under this ID. Graphs and arrays share one ID space.

    `products` is a 16-bit dtype in which the device may compute matrix products, with sums in fp32.
    """

    TYPE: ClassVar[str] = "graph"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    payload: Any = None
    products: Text = ""


@dataclass(slots=True)
class Concat:
    """PS to device: concatenate the rows of arrays `ids` into a new array `id`. Delete `ids`."""

    TYPE: ClassVar[str] = "concat"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    ids: Inputs


@dataclass(slots=True)
class RunGraph:
    """PS to device: run a graph, store its outputs, and respond with `computed`.

    `inputs` and `outputs` are array IDs in the graph's order. An input with ID 0 is an array of
    zeros. An output with ID 0 is discarded. `output_bytes` contains the sizes of the
    other outputs in bytes.
    """

    TYPE: ClassVar[str] = "run_graph"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    graph: Count
    inputs: Inputs
    outputs: Inputs
    output_bytes: Inputs
    flops: Count = 0


@dataclass(slots=True)
class Fetch:
    """PS to device: respond with `rows` rows of an array as a `result` in the dtype `out`."""

    TYPE: ClassVar[str] = "fetch"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    array: Count
    first_row: Count
    rows: Count
    columns: Count
    out: Text


@dataclass(slots=True)
class Computed:
    """Device to PS: a `run_graph` succeeded, and its outputs are stored on the device."""

    TYPE: ClassVar[str] = "computed"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    compute_s: Rate


@dataclass(slots=True)
class Result(_Always):
    """Device to PS: the result of a `run` or `fetch`. The payload is row-major."""

    TYPE: ClassVar[str] = "result"
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    compute_s: Rate
    payload: Any = None


@dataclass(slots=True)
class ResultCoded:
    """Device to PS: a `run` or `fetch` result with a compressed payload (`cleave.coding`)."""

    TYPE: ClassVar[str] = "result_coded"
    FEATURE: ClassVar[Feature | None] = Feature.CODING
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    compute_s: Rate
    payload: Any = None


@dataclass(slots=True)
class TaskError(_Always):
    """Device to PS: a `run`, `run_graph` or `fetch` failed. The session continues."""

    TYPE: ClassVar[str] = "task_error"
    id: Count
    reason: Text


@dataclass(slots=True)
class Drop(_Always):
    """PS to device: delete the stored arrays and graphs with these IDs."""

    TYPE: ClassVar[str] = "drop"
    ids: Ids


@dataclass(slots=True)
class Cancel(_Always):
    """PS to device: skip the runs with these IDs, because the PS no longer needs their results."""

    TYPE: ClassVar[str] = "cancel"
    ids: Ids


@dataclass(slots=True)
class Measured:
    """PS to device: the measured link rates that the device requested. `bye` follows."""

    TYPE: ClassVar[str] = "measured"
    FEATURE: ClassVar[Feature | None] = Feature.MEASURE
    downlink_bytes_per_s: Rate
    uplink_bytes_per_s: Rate
    latency_s: Rate


@dataclass(slots=True)
class Heartbeat(_Always):
    """Device to PS: the device is still connected. `welcome` sets the longest interval."""

    TYPE: ClassVar[str] = "heartbeat"


@dataclass(slots=True)
class Telemetry(_Always):
    """Device to PS: measured values by name. Each name ends in its SI unit."""

    TYPE: ClassVar[str] = "telemetry"
    values: dict[Text, Real] = field(default_factory=dict)


@dataclass(slots=True)
class Drain(_Always):
    """Device to PS: send no new runs. The device finishes its current runs and then leaves."""

    TYPE: ClassVar[str] = "drain"


@dataclass(slots=True)
class Bye(_Always):
    """From either side: the sender ends the session, and neither side is at fault."""

    TYPE: ClassVar[str] = "bye"
    reason: Text = ""
    code: ByeCode = ByeCode.UNSTATED
    retry_after_s: Rate = 0.0
    address: Text = ""


@dataclass(slots=True)
class Error(_Always):
    """From either side: the sender ends the session because the peer is at fault."""

    TYPE: ClassVar[str] = "error"
    code: ErrorCode
    message: Text
    retry_after_s: Rate = 0.0
    versions: Ids = ()

    def __post_init__(self) -> None:
        self.message = self.message[: limits.MAX_TEXT]


@dataclass(slots=True)
class Request(_Always):
    """Operator to PS: perform an action. `docs/operator-api.md` lists the actions."""

    TYPE: ClassVar[str] = "request"
    id: Count
    action: Text
    arguments: dict[Text, Any] = field(default_factory=dict, metadata=SECRET | VERBATIM)


@dataclass(slots=True)
class Reply(_Always):
    """PS to operator: the response to one `request`."""

    TYPE: ClassVar[str] = "reply"
    id: Count
    ok: bool
    data: dict[Text, Any] = field(default_factory=dict, repr=False, metadata=SECRET)


@dataclass(slots=True)
class JobRecord(_Always):
    """PS to operator: one record of a job's progress (a step, an evaluation, or the end)."""

    TYPE: ClassVar[str] = "job_record"
    job: Text
    record: dict[Text, Any] = field(default_factory=dict)


Message: TypeAlias = (
    Hello | Welcome | Held | Put | PutCoded | CodeResults | Run | Graph | Concat | RunGraph | Fetch
    | Computed | Result | ResultCoded | TaskError | Drop | Cancel | Measured | Heartbeat
    | Telemetry | Drain | Bye | Error | Request | Reply | JobRecord
)  # fmt: skip
