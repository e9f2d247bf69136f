package cleave.core.protocol;

/** Every limit of docs/protocol.md that a device keeps or checks, in one place. */
public final class Limits {
    /** Protocol version, sent in {@code hello}. */
    public static final int VERSION = 1;

    /** Largest message, header and payload together. */
    public static final int MAX_MESSAGE_BYTES = 256 << 20;

    /** Largest message without its payload. */
    public static final int MAX_HEADER_BYTES = 1 << 20;

    /** Most arrays that a list of a {@code run}, {@code run_graph} or {@code concat} may name. */
    public static final int MAX_RUN_INPUTS = 4096;

    /** Largest graph. */
    public static final int MAX_GRAPH_BYTES = 4 << 20;

    /** Most operations of a graph, those of graphs inside it counted. */
    public static final int MAX_GRAPH_NODES = 4096;

    /** Most graphs in each other, the outermost counted. */
    public static final int MAX_GRAPH_DEPTH = 4;

    /** Most items of any list of ids or texts. */
    public static final int MAX_IDS = 65536;

    /** Longest text, in Unicode code points. */
    public static final int MAX_TEXT = 4096;

    /** Deepest nesting of an untyped value in a map field. */
    public static final int MAX_NESTING = 32;

    /** Deepest nesting that is read at all, also in fields that nobody knows. */
    public static final int MAX_DEPTH = 999;

    /** Elements of a coded payload that are coded together; the last chunk has what is left. */
    public static final int CODED_CHUNK = 1 << 20;

    /** Most different names that a session may report in {@code telemetry}. */
    public static final int MAX_TELEMETRY = 64;

    /** Most runs of a session without an answer. */
    public static final int MAX_RUNS_IN_FLIGHT = 4096;

    /** Least memory a device must offer. */
    public static final long MIN_DEVICE_MEMORY_BYTES = 16 << 20;

    /** A peer that has not done its part of the handshake after this time is disconnected. */
    public static final double HANDSHAKE_S = 10;

    /** What a server states in {@code welcome} unless it says something else. */
    public static final double HEARTBEAT_S = 2;

    /** A peer that is heard nothing of for this long is gone. */
    public static final double SILENCE_S = 12;

    /** Longest wait that a server may ask for before a client comes back; more is as this. */
    public static final double MAX_RETRY_AFTER_S = 3600;

    private Limits() {}
}
