package cleave.core.protocol;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;

/** The messages of docs/protocol.md: one table, from which reading, checking and writing follow. */
public enum MessageType {
    HELLO(
            false,
            required("role", Kind.ROLE),
            required("version", Kind.COUNT),
            optional("credential", Kind.SECRET, ""),
            optional("name", Kind.TEXT, ""),
            optional("ops", Kind.TEXTS, Collections.emptyList()),
            optional("dtypes", Kind.TEXTS, Collections.emptyList()),
            optional("memory_bytes", Kind.COUNT, 0L),
            optional("profile", Kind.TEXT, ""),
            optional("flops_per_s", Kind.REAL, 0.0),
            optional("downlink_bytes_per_s", Kind.REAL, 0.0),
            optional("uplink_bytes_per_s", Kind.REAL, 0.0),
            optional("latency_s", Kind.REAL, 0.0),
            optional("measure", Kind.BOOL, false),
            optional("join_code", Kind.SECRET, ""),
            optional("kind", Kind.TEXT, ""),
            optional("versions", Kind.IDS, Collections.emptyList()),
            optional("features", Kind.TEXTS, Collections.emptyList()),
            optional("graph_flops_per_s", Kind.REAL, 0.0),
            optional("graph_bf16_flops_per_s", Kind.REAL, 0.0),
            optional("holds", Kind.SECRET, "")),
    WELCOME(
            false,
            required("device", Kind.ID),
            optional("version", Kind.COUNT, (long) Limits.VERSION),
            optional("heartbeat_s", Kind.REAL, Limits.HEARTBEAT_S),
            optional("server", Kind.TEXT, ""),
            optional("credential", Kind.SECRET, ""),
            optional("features", Kind.TEXTS, Collections.emptyList()),
            optional("arrays", Kind.SECRET, "")),
    HELD(false, required("ids", Kind.IDS)),
    PUT(
            true,
            required("id", Kind.ID),
            required("rows", Kind.COUNT),
            required("columns", Kind.COUNT),
            required("dtype", Kind.TEXT)),
    PUT_CODED(
            true,
            required("id", Kind.ID),
            required("rows", Kind.COUNT),
            required("columns", Kind.COUNT),
            required("dtype", Kind.TEXT)),
    CODE_RESULTS(false),
    RUN(
            false,
            required("id", Kind.ID),
            required("op", Kind.TEXT),
            required("inputs", Kind.INPUTS),
            required("transpose_a", Kind.BOOL),
            required("transpose_b", Kind.BOOL),
            required("out", Kind.TEXT)),
    GRAPH(true, required("id", Kind.ID), optional("products", Kind.TEXT, "")),
    CONCAT(false, required("id", Kind.ID), required("ids", Kind.INPUTS)),
    RUN_GRAPH(
            false,
            required("id", Kind.ID),
            required("graph", Kind.ID),
            required("inputs", Kind.INPUTS),
            required("outputs", Kind.INPUTS),
            required("output_bytes", Kind.INPUTS),
            optional("flops", Kind.COUNT, 0L)),
    FETCH(
            false,
            required("id", Kind.ID),
            required("array", Kind.ID),
            required("first_row", Kind.COUNT),
            required("rows", Kind.COUNT),
            required("columns", Kind.COUNT),
            required("out", Kind.TEXT)),
    COMPUTED(false, required("id", Kind.ID), required("compute_s", Kind.REAL)),
    RESULT(
            true,
            required("id", Kind.ID),
            required("rows", Kind.COUNT),
            required("columns", Kind.COUNT),
            required("dtype", Kind.TEXT),
            required("compute_s", Kind.REAL)),
    RESULT_CODED(
            true,
            required("id", Kind.ID),
            required("rows", Kind.COUNT),
            required("columns", Kind.COUNT),
            required("dtype", Kind.TEXT),
            required("compute_s", Kind.REAL)),
    TASK_ERROR(false, required("id", Kind.ID), required("reason", Kind.TEXT)),
    DROP(false, required("ids", Kind.IDS)),
    CANCEL(false, required("ids", Kind.IDS)),
    MEASURED(
            false,
            required("downlink_bytes_per_s", Kind.REAL),
            required("uplink_bytes_per_s", Kind.REAL),
            required("latency_s", Kind.REAL)),
    HEARTBEAT(false),
    TELEMETRY(false, optional("values", Kind.VALUES, Collections.emptyMap())),
    DRAIN(false),
    BYE(
            false,
            optional("reason", Kind.TEXT, ""),
            optional("code", Kind.TEXT, ""),
            optional("retry_after_s", Kind.REAL, 0.0),
            optional("address", Kind.TEXT, "")),
    ERROR(
            false,
            required("code", Kind.TEXT),
            required("message", Kind.TEXT),
            optional("retry_after_s", Kind.REAL, 0.0),
            optional("versions", Kind.IDS, Collections.emptyList())),
    REQUEST(
            false,
            required("id", Kind.ID),
            required("action", Kind.TEXT),
            optional("arguments", Kind.MAP, Collections.emptyMap())),
    REPLY(
            false,
            required("id", Kind.ID),
            required("ok", Kind.BOOL),
            optional("data", Kind.MAP, Collections.emptyMap())),
    JOB_RECORD(
            false,
            required("job", Kind.TEXT),
            optional("record", Kind.MAP, Collections.emptyMap()));

    /** A field: what it holds, and what it is where it was left out; null for a required one. */
    static final class Field {
        final String name;
        final Kind kind;
        final Object missing;

        private Field(String name, Kind kind, Object missing) {
            this.name = name;
            this.kind = kind;
            this.missing = missing;
        }
    }

    private static final Map<String, MessageType> BY_NAME = new LinkedHashMap<>();

    static {
        for (MessageType type : values()) {
            BY_NAME.put(type.wireName, type);
        }
    }

    /** Its name on the wire. */
    public final String wireName;

    final boolean hasPayload;
    final Map<String, Field> fields;

    MessageType(boolean hasPayload, Field... fields) {
        this.wireName = name().toLowerCase(Locale.ROOT);
        this.hasPayload = hasPayload;
        Map<String, Field> byName = new LinkedHashMap<>();
        for (Field field : fields) {
            byName.put(field.name, field);
        }
        this.fields = Collections.unmodifiableMap(byName);
    }

    /** The type of that name on the wire, or null. */
    static MessageType named(String wireName) {
        return BY_NAME.get(wireName);
    }

    private static Field required(String name, Kind kind) {
        return new Field(name, kind, null);
    }

    private static Field optional(String name, Kind kind, Object missing) {
        return new Field(name, kind, missing);
    }
}
