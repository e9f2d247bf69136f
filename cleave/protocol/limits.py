"""Every limit of the protocol, in one place. Both sides check them; breaking one ends the session.

A limit is part of the protocol: a client written from `docs/protocol.md` relies on these values.
"""

from typing import Final

VERSION: Final = 1
"""Protocol version, sent in `hello`; both sides must speak the same."""

MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Largest WebSocket message, header and payload together."""

MAX_HEADER_BYTES: Final = 1 * 2**20
"""Largest message without its payload."""

MAX_HELLO_BYTES: Final = 8 * 2**10
"""Largest `hello`, and so the largest message that a connection may send before it is accepted."""

MAX_DEVICE_HEADER_BYTES: Final = 64 * 2**10
"""Largest header of a message from a device, and so its largest message besides results."""

MAX_RUN_INPUTS: Final = 4096
"""Most arrays that one `run` or `run_graph` may name as inputs, and as outputs, and `concat` as
parts."""

MAX_GRAPH_BYTES: Final = 4 * 2**20
"""Largest graph."""

MAX_GRAPH_NODES: Final = 4096
"""Most operations of one graph, with those of graphs inside it."""

MAX_GRAPH_DEPTH: Final = 4
"""Most graphs that may stand inside each other, the outermost counted."""

CODED_CHUNK: Final = 2**20
"""Elements of a coded payload that are coded together; the last chunk has what is left."""

CODED_LEAST_BYTES: Final = 16 * 2**10
"""Shorter payloads travel plain: what is saved of them takes less than half a millisecond at 100
Mbit/s, as long as waking a thread or two may take, and less than a browser's call to inflate."""

MAX_IDS: Final = 65536
"""Most ids in one `drop` or `cancel`."""

MAX_TEXT: Final = 4096
"""Longest text field (names, reasons), in characters."""

MAX_NESTING: Final = 32
"""Deepest nesting of lists and maps in an untyped value (a job's settings, a record)."""

MAX_TELEMETRY: Final = 64
"""Most named values that a session may report."""

MIN_DEVICE_MEMORY_BYTES: Final = 16 * 2**20
"""Least memory a device must offer."""

MIN_BYTES_PER_S: Final = 1000.0
"""Slowest link, either way, that a device may state."""

MIN_FLOPS_PER_S: Final = 1e6
"""Slowest computation that a device may state."""

MAX_PER_S: Final = 1e15
"""Fastest link (bytes/s) and computation (FLOP/s) that a device is believed to have."""

MAX_LATENCY_S: Final = 60.0
"""Longest latency that a device may state."""

MAX_RUNS_IN_FLIGHT: Final = 4096
"""Most unanswered `run` messages on one session."""

UNASKED_PER_S: Final = 20
"""Messages per second that a device may go on sending, besides answers to runs that it was sent."""

MAX_UNASKED: Final = 1000
"""Most such messages at once, as may come after a network or the server was stuck."""

UNASKED_BYTES_PER_S: Final = 64 * 2**10
"""Bytes per second of such messages."""

MAX_UNASKED_BYTES: Final = 4 * 2**20
"""Most bytes of such messages at once."""

REST_S: Final = 60.0
"""Seconds for which a device that sent too much is not let in again."""

SHORT_STAY_S: Final = 30.0
"""A device that leaves sooner after it connected makes a short stay: ..."""

MAX_SHORT_STAYS: Final = 5
"""... so many it may make at once, ..."""

SHORT_STAY_REST_S: Final = 10.0
"""... and one more whenever so many seconds have passed."""

MAX_FRAMES: Final = 4096
"""Most WebSocket frames of one message."""

FREE_FRAMES: Final = 16
"""Frames that any message may have, plus one for each `FRAME_BYTES`; further ones count like
pings."""

FRAME_BYTES: Final = 1024
"""See `FREE_FRAMES`. Browsers split messages where their buffers happen to end."""

MAX_UNFINISHED_BYTES: Final = 256 * 2**20
"""Most bytes, over all sessions, of incomplete messages that are not results of a job."""

HANDSHAKE_S: Final = 10.0
"""A peer that has not completed `hello` / `welcome` after this time is disconnected."""

CLOSE_S: Final = 2.0
"""How long a side that closed its connection waits for the other to close it as well."""

MAX_UNADMITTED_BYTES: Final = 64 * 2**10
"""Most bytes that a connection may send, the HTTP request included, before its `hello` is
accepted."""

MAX_WAITING_PER_ADDRESS: Final = 128
"""Most connections from one address whose `hello` is not accepted yet."""

MAX_WAITING: Final = 512
"""Most such connections from all addresses."""

MAX_FAILED: Final = 64
"""Most connections at once of one address that end without an accepted `hello` or an answered HTTP
request, ..."""

FAILED_PER_S: Final = 10.0
"""... and such connections a second, for long. More from there are cut before anything is spent on
them."""

MAX_DEVICES: Final = 20_000
"""Most devices at once."""

MAX_OPERATORS: Final = 64
"""Most operators at once."""

MAX_RETRY_AFTER_S: Final = 3600.0
"""Longest `retry_after_s`; more is taken as this."""

HEARTBEAT_S: Final = 2.0
"""A device sends a `heartbeat` at least this often."""

SILENCE_S: Final = 12.0
"""A device from which nothing came for this long is lost."""

OBJECT_ID_BITS: Final = 63
"""Ids of arrays and runs are integers from 0 to 2**63 - 1."""
