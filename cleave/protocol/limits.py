"""All limits of the protocol. Both sides check them; exceeding one ends the session.

Limits are part of the protocol: a client written from `docs/protocol.md` relies on these values.
"""

from typing import Final

VERSION: Final = 1
"""Protocol version, sent in `hello`; both sides must use the same."""

MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Maximum size of a WebSocket message, header and payload together."""

MAX_HEADER_BYTES: Final = 1 * 2**20
"""Maximum size of a message without its payload."""

MAX_HELLO_BYTES: Final = 8 * 2**10
"""Maximum size of `hello`, and so of any message before a connection is accepted."""

MAX_DEVICE_HEADER_BYTES: Final = 64 * 2**10
"""Maximum header size of a device's message, and so of its messages other than results."""

MAX_RUN_INPUTS: Final = 4096
"""Maximum inputs of a `run` or `run_graph`, outputs of a `run_graph`, and parts of a `concat`."""

MAX_GRAPH_BYTES: Final = 4 * 2**20
"""Maximum size of a graph."""

MAX_GRAPH_NODES: Final = 4096
"""Maximum operations of a graph, including its subgraphs."""

MAX_GRAPH_DEPTH: Final = 4
"""Maximum nesting of graphs, including the outermost."""

CODED_CHUNK: Final = 2**20
"""Elements per chunk of a compressed payload; the last chunk has the rest."""

CODED_LEAST_BYTES: Final = 16 * 2**10
"""Shorter payloads are not compressed: it would save under 0.5 ms at 100 Mbit/s, about the time to
wake one or two threads, and less than a browser needs to call its decompressor."""

MAX_IDS: Final = 65536
"""Maximum ids in one `drop` or `cancel`."""

MAX_TEXT: Final = 4096
"""Maximum length of a text field (names, reasons), in characters."""

MAX_NESTING: Final = 32
"""Maximum nesting of lists and maps in an untyped value (a job's settings, a record)."""

MAX_TELEMETRY: Final = 64
"""Maximum named values that a session may report."""

MIN_DEVICE_MEMORY_BYTES: Final = 16 * 2**20
"""Minimum memory that a device must offer."""

MIN_BYTES_PER_S: Final = 1000.0
"""Minimum link rate, in either direction, that a device may declare."""

MIN_FLOPS_PER_S: Final = 1e6
"""Minimum compute rate that a device may declare."""

MAX_PER_S: Final = 1e15
"""Maximum believable rate of a device's link (bytes/s) and computation (FLOP/s)."""

MAX_LATENCY_S: Final = 60.0
"""Maximum latency that a device may declare."""

MAX_RUNS_IN_FLIGHT: Final = 4096
"""Maximum unanswered `run` messages in one session."""

UNASKED_PER_S: Final = 20
"""Unrequested messages that a device may send per second: all but answers to its runs."""

MAX_UNASKED: Final = 1000
"""Maximum unrequested messages at once, for example after a stuck network or server."""

UNASKED_BYTES_PER_S: Final = 64 * 2**10
"""Bytes of unrequested messages that a device may send per second."""

MAX_UNASKED_BYTES: Final = 4 * 2**20
"""Maximum bytes of unrequested messages at once."""

REST_S: Final = 60.0
"""Seconds for which a device that sent too much is refused."""

SHORT_STAY_S: Final = 30.0
"""A device that leaves within this many seconds after it connected makes a short stay."""

MAX_SHORT_STAYS: Final = 5
"""Maximum number of short stays at once."""

SHORT_STAY_REST_S: Final = 10.0
"""Seconds after which one more short stay is allowed."""

MAX_FRAMES: Final = 4096
"""Maximum WebSocket frames of one message."""

FREE_FRAMES: Final = 16
"""Frames allowed in every message, plus one per `FRAME_BYTES`; further frames count like pings."""

FRAME_BYTES: Final = 1024
"""Bytes per additional allowed frame. Browsers split messages where their buffers happen to end."""

MAX_UNFINISHED_BYTES: Final = 256 * 2**20
"""Maximum bytes, over all sessions, of incomplete messages that are not results of a job."""

HANDSHAKE_S: Final = 10.0
"""Seconds after which a peer that has not completed `hello` / `welcome` is disconnected."""

CLOSE_S: Final = 2.0
"""Seconds that a side waits for the other to close its connection too."""

MAX_UNADMITTED_BYTES: Final = 64 * 2**10
"""Maximum bytes, including the HTTP request, that a connection may send before its `hello` is
accepted."""

MAX_WAITING_PER_ADDRESS: Final = 128
"""Maximum connections from one address whose `hello` is not accepted yet."""

MAX_WAITING: Final = 512
"""Maximum connections from all addresses whose `hello` is not accepted yet."""

MAX_FAILED: Final = 64
"""Maximum failed connections of one address at once. A connection fails if it ends without an
accepted `hello` or an answered HTTP request."""

FAILED_PER_S: Final = 10.0
"""Sustained rate of failed connections of one address. Connections above it are closed before
anything else is done."""

MAX_DEVICES: Final = 20_000
"""Maximum devices at once."""

MAX_OPERATORS: Final = 64
"""Maximum operators at once."""

MAX_RETRY_AFTER_S: Final = 3600.0
"""Maximum `retry_after_s`; larger values are reduced to it."""

HEARTBEAT_S: Final = 2.0
"""Maximum seconds between two `heartbeat` messages of a device."""

SILENCE_S: Final = 12.0
"""Seconds of silence after which a device is lost."""

OBJECT_ID_BITS: Final = 63
"""Ids of arrays and runs are integers from 0 to 2**63 - 1."""
