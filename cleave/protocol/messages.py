"""The messages, as dataclasses. `docs/protocol.md` defines their meaning."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias

from msgspec import Meta

from cleave.protocol import limits
from cleave.protocol.texts import clean

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**limits.OBJECT_ID_BITS - 1)]
"""An id, a number of things, or a size."""

Real: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A finite number."""

Rate: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
"""A rate or a time: finite and not negative."""

Text: TypeAlias = Annotated[str, Meta(max_length=limits.MAX_TEXT)]
Ids: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_IDS)]
Inputs: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=limits.MAX_RUN_INPUTS)]
Texts: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=limits.MAX_IDS)]

REQUIRED: Final = {"required": True}
"""Marks a field that a message must contain, even if it has a default here."""

SECRET: Final = {"secret": True}
"""Marks a field whose value is never shown in an error."""

VERBATIM: Final = {"verbatim": True}
"""Marks a field whose texts are not changed, because they are compared or are file names. All other
texts are cleaned when they are received (`cleave.protocol.texts`)."""


class Op(Enum):
    """An operation that a device may offer."""

    MATMUL = "matmul"


class Role(Enum):
    """The kind of client that says hello."""

    DEVICE = "device"
    OPERATOR = "operator"


class Feature(Enum):
    """A feature that a peer of this version may or may not have."""

    MEASURE = "measure"
    GRAPHS = "graphs"
    CODING = "coding"
    MOVES = "moves"


class _OpenEnum(StrEnum):
    """An enum to which newer peers may add: an unknown name becomes a value."""

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
    """Why a session ends with `bye`."""

    UNSTATED = ""
    CLOSING = "closing"
    DRAINED = "drained"
    MEASURED = "measured"
    LEAVING = "leaving"
    MOVED = "moved"


class ErrorCode(_OpenEnum):
    """Why a session ends with `error`."""

    VERSION = "version"
    CREDENTIAL = "credential"
    PROTOCOL = "protocol"
    LIMIT = "limit"
    REQUEST = "request"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"


@dataclass(slots=True)
class Hello:
    """First message of a client."""

    TYPE: ClassVar[str] = "hello"
    FEATURE: ClassVar[Feature | None] = None
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


@dataclass(slots=True)
class Welcome:
    """The server's answer to `hello`."""

    TYPE: ClassVar[str] = "welcome"
    FEATURE: ClassVar[Feature | None] = None
    device: Count
    version: Count = limits.VERSION
    heartbeat_s: Rate = limits.HEARTBEAT_S
    server: Text = ""
    credential: Text = field(default="", repr=False, metadata=SECRET | VERBATIM)
    features: Texts = ()


@dataclass(slots=True)
class Put:
    """PS to device: keep this array under this id. One payload, row-major."""

    TYPE: ClassVar[str] = "put"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    payload: Any = None


@dataclass(slots=True)
class PutCoded:
    """PS to device: like `put`, with a compressed payload (`cleave.coding`)."""

    TYPE: ClassVar[str] = "put_coded"
    FEATURE: ClassVar[Feature | None] = Feature.CODING
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    payload: Any = None


@dataclass(slots=True)
class CodeResults:
    """PS to device: results may be compressed from now on."""

    TYPE: ClassVar[str] = "code_results"
    FEATURE: ClassVar[Feature | None] = Feature.CODING


@dataclass(slots=True)
class Run:
    """PS to device: compute `op` of the named arrays and answer with `result`.

    For `matmul` the inputs are pairs a0, b0, a1, b1, ...; the result is the sum of the products
    a_i @ b_i, accumulated in fp32 and returned as `out`.
    """

    TYPE: ClassVar[str] = "run"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    op: Text
    inputs: Inputs
    transpose_a: bool
    transpose_b: bool
    out: Text


@dataclass(slots=True)
class Graph:
    """PS to device: keep this ONNX graph under this id; graphs and arrays share the ids."""

    TYPE: ClassVar[str] = "graph"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    payload: Any = None


@dataclass(slots=True)
class Concat:
    """PS to device: join the rows of some arrays into one array, and drop those arrays."""

    TYPE: ClassVar[str] = "concat"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    ids: Inputs


@dataclass(slots=True)
class RunGraph:
    """PS to device: run a graph, keep its outputs, and answer with `computed`.

    `inputs` and `outputs` have one id for each input and output of the graph, in its order. An
    input of 0 means zeros; an output of 0 is not kept. `output_bytes` has the size of each kept
    output, in order.
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
    """PS to device: answer with `result`: some rows of an array, in the dtype `out`."""

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
    """Device to PS: the outputs of a `run_graph` are kept."""

    TYPE: ClassVar[str] = "computed"
    FEATURE: ClassVar[Feature | None] = Feature.GRAPHS
    id: Count
    compute_s: Rate


@dataclass(slots=True)
class Result:
    """Device to PS: the answer to `run` and `fetch`. One payload, row-major."""

    TYPE: ClassVar[str] = "result"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    compute_s: Rate
    payload: Any = None


@dataclass(slots=True)
class ResultCoded:
    """Device to PS: like `result`, with a compressed payload (`cleave.coding`)."""

    TYPE: ClassVar[str] = "result_coded"
    FEATURE: ClassVar[Feature | None] = Feature.CODING
    id: Count
    rows: Count
    columns: Count
    dtype: Text
    compute_s: Rate
    payload: Any = None


@dataclass(slots=True)
class TaskError:
    """Device to PS: a `run`, `run_graph` or `fetch` failed; the session continues."""

    TYPE: ClassVar[str] = "task_error"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    reason: Text


@dataclass(slots=True)
class Drop:
    """PS to device: delete these arrays and graphs."""

    TYPE: ClassVar[str] = "drop"
    FEATURE: ClassVar[Feature | None] = None
    ids: Ids


@dataclass(slots=True)
class Cancel:
    """PS to device: the results of these runs are not needed any more."""

    TYPE: ClassVar[str] = "cancel"
    FEATURE: ClassVar[Feature | None] = None
    ids: Ids


@dataclass(slots=True)
class Measured:
    """PS to a device that asked for a measurement: the rates of its link; `bye` follows."""

    TYPE: ClassVar[str] = "measured"
    FEATURE: ClassVar[Feature | None] = Feature.MEASURE
    downlink_bytes_per_s: Rate
    uplink_bytes_per_s: Rate
    latency_s: Rate


@dataclass(slots=True)
class Heartbeat:
    """Device to PS: the device is still connected."""

    TYPE: ClassVar[str] = "heartbeat"
    FEATURE: ClassVar[Feature | None] = None


@dataclass(slots=True)
class Telemetry:
    """Device to PS: values measured on the device, any subset. Their names end in SI units."""

    TYPE: ClassVar[str] = "telemetry"
    FEATURE: ClassVar[Feature | None] = None
    values: dict[Text, Real] = field(default_factory=dict)


@dataclass(slots=True)
class Drain:
    """Device to PS: send no new runs; the device answers its current ones and leaves."""

    TYPE: ClassVar[str] = "drain"
    FEATURE: ClassVar[Feature | None] = None


@dataclass(slots=True)
class Bye:
    """Either side: this session ends on purpose."""

    TYPE: ClassVar[str] = "bye"
    FEATURE: ClassVar[Feature | None] = None
    reason: Text = ""
    code: ByeCode = ByeCode.UNSTATED
    retry_after_s: Rate = 0.0
    address: Text = ""


@dataclass(slots=True)
class Error:
    """Either side: this session ends because of a fault of the peer."""

    TYPE: ClassVar[str] = "error"
    FEATURE: ClassVar[Feature | None] = None
    code: ErrorCode
    message: Text
    retry_after_s: Rate = 0.0
    versions: Ids = ()

    def __post_init__(self) -> None:
        self.message = self.message[: limits.MAX_TEXT]


@dataclass(slots=True)
class Request:
    """Operator to PS: perform an action; `docs/protocol.md` lists the actions."""

    TYPE: ClassVar[str] = "request"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    action: Text
    arguments: dict[Text, Any] = field(default_factory=dict, metadata=SECRET | VERBATIM)


@dataclass(slots=True)
class Reply:
    """PS to operator: the answer to one `request`."""

    TYPE: ClassVar[str] = "reply"
    FEATURE: ClassVar[Feature | None] = None
    id: Count
    ok: bool
    data: dict[Text, Any] = field(default_factory=dict, repr=False, metadata=SECRET)


@dataclass(slots=True)
class JobRecord:
    """PS to operator: one record of a job's stream (a step, an evaluation, the end)."""

    TYPE: ClassVar[str] = "job_record"
    FEATURE: ClassVar[Feature | None] = None
    job: Text
    record: dict[Text, Any] = field(default_factory=dict)


Message: TypeAlias = (
    Hello
    | Welcome
    | Put
    | PutCoded
    | CodeResults
    | Run
    | Graph
    | Concat
    | RunGraph
    | Fetch
    | Computed
    | Result
    | ResultCoded
    | TaskError
    | Drop
    | Cancel
    | Measured
    | Heartbeat
    | Telemetry
    | Drain
    | Bye
    | Error
    | Request
    | Reply
    | JobRecord
)
