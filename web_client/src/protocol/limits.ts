/** Every limit of docs/protocol.md that a client keeps or checks, in one place. */

/** Protocol version, sent in `hello`. */
export const VERSION = 1;
/** Largest message, header and payload together. */
export const MAX_MESSAGE_BYTES = 256 * 2 ** 20;
/** Largest message without its payload. */
export const MAX_HEADER_BYTES = 2 ** 20;
/** Most arrays that one `run` or `run_graph` may name, or `concat` as parts. */
export const MAX_RUN_INPUTS = 4096;
/** Largest graph. */
export const MAX_GRAPH_BYTES = 4 * 2 ** 20;
/** Most operations of one graph, with those of graphs inside it. */
export const MAX_GRAPH_NODES = 4096;
/** Most graphs that may stand inside each other, the outermost counted. */
export const MAX_GRAPH_DEPTH = 4;
/** Elements of a coded payload that are coded together; the last chunk has what is left. */
export const CODED_CHUNK = 2 ** 20;
/** Most items of any list of ids or texts. */
export const MAX_IDS = 65536;
/** Longest text, in Unicode code points. */
export const MAX_TEXT = 4096;
/** Deepest nesting of an untyped value in a map field. */
export const MAX_NESTING = 32;
/** Deepest nesting that is read at all, also in fields that nobody knows. */
export const MAX_DEPTH = 999;
/** Most runs of a session without an answer. */
export const MAX_RUNS_IN_FLIGHT = 4096;
/** Least memory a device must offer. */
export const MIN_DEVICE_MEMORY_BYTES = 16 * 2 ** 20;
/** A peer that has not done its part of the handshake after this time is disconnected. */
export const HANDSHAKE_S = 10;
/** A peer that is heard nothing of for this long is gone. */
export const SILENCE_S = 12;
/** Longest wait that a server may ask for before a client comes back; more is taken as this. */
export const MAX_RETRY_AFTER_S = 3600;
/** Ids are integers from 0 to this. */
export const MAX_ID = 2n ** 63n - 1n;
