"""All limits of the protocol.

A client written from `docs/protocol.md` relies on these values. Exceeding a limit ends the session,
unless the limit's comment says otherwise.
"""

from typing import Final

VERSION: Final = 1  # sent in `hello`; client and PS must use the same version

# Sizes of messages, in bytes. A header is a message without its payload.
MAX_MESSAGE_BYTES: Final = 256 * 2**20
MAX_HEADER_BYTES: Final = 1 * 2**20
MAX_HELLO_BYTES: Final = 8 * 2**10
MAX_DEVICE_HEADER_BYTES: Final = 64 * 2**10  # of a device's message; only results have payloads

# Contents of messages
MAX_RUN_INPUTS: Final = 4096  # also outputs of a `run_graph`, and arrays in a `concat`
MAX_IDS: Final = 65536  # IDs in one `drop` or `cancel`
MAX_TEXT: Final = 4096  # characters of a text field (names, reasons)
MAX_NESTING: Final = 32  # levels of lists and maps in an untyped value (a job's settings, a record)
MAX_TELEMETRY: Final = 64  # different names of telemetry values in one session
OBJECT_ID_BITS: Final = 63  # the IDs of arrays and runs are integers from 0 to 2**63 - 1

# Graphs
MAX_GRAPH_BYTES: Final = 4 * 2**20  # size of a serialized ONNX graph
MAX_GRAPH_NODES: Final = 4096  # operations, including those of subgraphs
MAX_GRAPH_DEPTH: Final = 4  # nesting depth of graphs; the outermost graph has depth 1

# Compressed payloads
CODED_CHUNK: Final = 2**20  # elements in each chunk; the last chunk may be shorter
# Compressing a shorter payload would save under 0.5 ms at 100 Mbit/s. Waking one or two threads
# takes about as long, and calling the decompressor of a browser takes longer.
CODED_LEAST_BYTES: Final = 16 * 2**10

# What a device may declare
MIN_DEVICE_MEMORY_BYTES: Final = 16 * 2**20
MIN_BYTES_PER_S: Final = 1000.0  # uplink and downlink
MIN_FLOPS_PER_S: Final = 1e6
MAX_PER_S: Final = 1e15  # link rate in bytes/s and compute rate in FLOP/s
MAX_LATENCY_S: Final = 60.0

# Rates of a device. A burst of unrequested messages may follow a stuck network or server.
MAX_RUNS_IN_FLIGHT: Final = 4096  # runs in one session whose response has not arrived yet
UNASKED_PER_S: Final = 20  # sustained rate of all messages except the responses to runs
MAX_UNASKED: Final = 1000  # largest burst of these messages
UNASKED_BYTES_PER_S: Final = 64 * 2**10
MAX_UNASKED_BYTES: Final = 4 * 2**20
REST_S: Final = 60.0  # duration for which the PS refuses a device that exceeded these rates
SHORT_STAY_S: Final = 30.0  # a shorter session is a short stay
MAX_SHORT_STAYS: Final = 5  # short stays that a device may make in quick succession
SHORT_STAY_REST_S: Final = 10.0  # time after which a device may make one more short stay

# WebSocket frames. Browsers split a message wherever their send buffers end.
MAX_FRAMES: Final = 4096  # frames in one message
FREE_FRAMES: Final = 16  # free frames in a message; each further frame counts as a ping
FRAME_BYTES: Final = 1024  # message bytes that allow one more free frame
MAX_UNFINISHED_BYTES: Final = 256 * 2**20  # of incomplete messages in all sessions, except results

# Connections. A connection is waiting until its `hello` is accepted. A connection that ends earlier
# has failed, unless it received a response to an HTTP request.
HANDSHAKE_S: Final = 10.0  # time for a peer to complete `hello` / `welcome`
CLOSE_S: Final = 2.0  # time for the peer to close its end of the connection
MAX_UNADMITTED_BYTES: Final = 64 * 2**10  # before `hello` is accepted, including headers
MAX_WAITING_PER_ADDRESS: Final = 128  # waiting connections from one IP address
MAX_WAITING: Final = 512  # waiting connections from all IP addresses
MAX_FAILED: Final = 64  # burst of failed connections from one IP address
FAILED_PER_S: Final = (
    10.0  # sustained rate; above this rate, the PS closes new connections immediately
)
MAX_DEVICES: Final = 20_000
MAX_OPERATORS: Final = 64
MAX_RETRY_AFTER_S: Final = 3600.0  # clients reduce a larger `retry_after_s` to this value
HEARTBEAT_S: Final = 2.0  # longest interval between a device's `heartbeat` messages
SILENCE_S: Final = 12.0  # time without a message after which the PS considers a device lost
