"""All limits of the protocol.

The limits are part of the protocol: a client written from `docs/protocol.md` relies on these
values. Unless a limit says otherwise, the session ends when a peer exceeds the limit.
"""

from typing import Final

VERSION: Final = 1
"""Protocol version, sent in `hello`. Client and PS must use the same version."""

MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Maximum size of a WebSocket message in bytes, including header and payload."""

MAX_HEADER_BYTES: Final = 1 * 2**20  # maximum size of a message without its payload, in bytes
MAX_HELLO_BYTES: Final = 8 * 2**10  # maximum size of a `hello` message in bytes

MAX_DEVICE_HEADER_BYTES: Final = 64 * 2**10
"""Maximum size of a device's message without its payload, in bytes. Only results have payloads."""

MAX_RUN_INPUTS: Final = 4096
"""Maximum number of inputs of a `run` or `run_graph`, of outputs of a `run_graph`, and of arrays
in a `concat`."""

MAX_GRAPH_BYTES: Final = 4 * 2**20  # maximum size of a serialized ONNX graph in bytes

MAX_GRAPH_NODES: Final = 4096
"""Maximum number of operations in a graph, including the operations of its subgraphs."""

MAX_GRAPH_DEPTH: Final = 4  # maximum nesting depth of graphs; the outermost graph has depth 1

CODED_CHUNK: Final = 2**20
"""Number of elements in each chunk of a compressed payload. The last chunk may be shorter."""

CODED_LEAST_BYTES: Final = 16 * 2**10
"""Minimum size of a payload that is compressed, in bytes. Compressing a shorter payload would save
under 0.5 ms at 100 Mbit/s. Waking one or two threads takes about as long, and calling the
decompressor of a browser takes longer."""

MAX_IDS: Final = 65536  # maximum number of IDs in one `drop` or `cancel` message
MAX_TEXT: Final = 4096  # maximum length of a text field (names, reasons), in characters

MAX_NESTING: Final = 32
"""Maximum nesting depth of lists and maps in an untyped value (a job's settings, a record)."""

MAX_TELEMETRY: Final = 64  # maximum number of differently named telemetry values in one session
MIN_DEVICE_MEMORY_BYTES: Final = 16 * 2**20  # minimum memory that a device must offer, in bytes

MIN_BYTES_PER_S: Final = 1000.0
"""Minimum uplink and downlink rate that a device may declare, in bytes/s."""

MIN_FLOPS_PER_S: Final = 1e6  # minimum compute rate that a device may declare, in FLOP/s

MAX_PER_S: Final = 1e15
"""Maximum link rate (bytes/s) and compute rate (FLOP/s) that a device may declare."""

MAX_LATENCY_S: Final = 60.0  # maximum latency that a device may declare, in seconds

MAX_RUNS_IN_FLIGHT: Final = 4096
"""Maximum number of runs in one session whose response has not arrived yet."""

UNASKED_PER_S: Final = 20
"""Sustained rate of unrequested messages that a device may send, in messages per second. Every
message counts as unrequested except the response to a run."""

MAX_UNASKED: Final = 1000
"""Maximum burst of unrequested messages, for example after the network or the server was stuck."""

UNASKED_BYTES_PER_S: Final = 64 * 2**10
"""Sustained rate of unrequested messages that a device may send, in bytes per second."""

MAX_UNASKED_BYTES: Final = 4 * 2**20  # maximum burst of unrequested messages in bytes

REST_S: Final = 60.0
"""Seconds for which the PS refuses a device that exceeded a limit on unrequested messages."""

SHORT_STAY_S: Final = 30.0
"""A device's session is a short stay if the device leaves within this many seconds."""

MAX_SHORT_STAYS: Final = 5  # maximum burst of short stays

SHORT_STAY_REST_S: Final = 10.0
"""Seconds after which a device that used up its short stays may make one more."""

MAX_FRAMES: Final = 4096  # maximum number of WebSocket frames in one message

FREE_FRAMES: Final = 16
"""Number of free WebSocket frames in a message, in addition to one free frame per `FRAME_BYTES`
bytes. Each further frame counts as a ping."""

FRAME_BYTES: Final = 1024
"""Number of message bytes for each additional free frame. Browsers split a message wherever their
send buffers end."""

MAX_UNFINISHED_BYTES: Final = 256 * 2**20
"""Maximum total size, over all sessions, of partly received messages in bytes. Results of a job do
not count."""

HANDSHAKE_S: Final = 10.0
"""Seconds within which a peer must complete `hello` / `welcome` before it is disconnected."""

CLOSE_S: Final = 2.0  # seconds to wait for the peer to close its end of the connection

MAX_UNADMITTED_BYTES: Final = 64 * 2**10
"""Maximum bytes that a client may send before its `hello` is accepted, including the HTTP
request and WebSocket frame headers."""

MAX_WAITING_PER_ADDRESS: Final = 128
"""Maximum number of connections from one IP address whose `hello` is not accepted yet."""

MAX_WAITING: Final = 512
"""Maximum number of connections from all IP addresses whose `hello` is not accepted yet."""

MAX_FAILED: Final = 64
"""Maximum burst of failed connections from one IP address. A connection fails if it ends without
an accepted `hello` and without a response to an HTTP request."""

FAILED_PER_S: Final = 10.0
"""Sustained rate of failed connections from one IP address, in connections per second. Once an
address exceeds the rate, the PS closes its new connections at once."""

MAX_DEVICES: Final = 20_000  # maximum number of connected devices
MAX_OPERATORS: Final = 64  # maximum number of connected operators

MAX_RETRY_AFTER_S: Final = 3600.0
"""Maximum `retry_after_s`. Clients reduce larger values to this maximum."""

HEARTBEAT_S: Final = 2.0  # maximum seconds between two `heartbeat` messages from a device

SILENCE_S: Final = 12.0
"""Seconds without a message from a device after which the PS considers the device lost."""

OBJECT_ID_BITS: Final = 63
"""Number of bits in the IDs of arrays and runs, which are integers from 0 to 2**63 - 1."""
