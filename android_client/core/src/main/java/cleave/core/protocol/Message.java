package cleave.core.protocol;

import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * One message: its type, its fields under the names of docs/protocol.md, and its payload where its
 * type has one. All fields are there and valid; those that were left out have their defaults.
 */
public final class Message {
    /** The fields of a hello that mean the same in every version of the protocol. */
    private static final List<String> OF_ALL_VERSIONS = Arrays.asList("role", "version", "versions");

    public final MessageType type;
    private final Map<String, Object> fields;
    private final ByteBuffer payload;

    private Message(MessageType type, Map<String, Object> fields, ByteBuffer payload) {
        this.type = type;
        this.fields = fields;
        this.payload = payload;
    }

    /**
     * A message from checked or unchecked values.
     *
     * @param given fields by name; unknown ones are ignored
     * @param payload from position to limit, not copied; null exactly where the type has none
     * @throws ProtocolException when a field is missing or not valid
     */
    static Message checked(MessageType type, Map<String, ?> given, ByteBuffer payload)
            throws ProtocolException {
        boolean another = isAnotherVersion(type, given.get("version"));
        if (another && type == MessageType.WELCOME) {
            throw new VersionException(
                    "the server continues in protocol version " + given.get("version")
                            + " and this client speaks " + Limits.VERSION);
        }
        Map<String, Object> fields = new LinkedHashMap<>();
        for (MessageType.Field field : type.fields.values()) {
            boolean read = !another || OF_ALL_VERSIONS.contains(field.name);
            if (read && given.containsKey(field.name)) {
                fields.put(field.name, Checks.check(type, field, given.get(field.name)));
            } else if (field.missing != null) {
                fields.put(field.name, field.missing);
            } else {
                throw new ProtocolException(
                        "a " + type.wireName + " message lacks its '" + field.name + "'");
            }
        }
        return new Message(type, Collections.unmodifiableMap(fields), payload);
    }

    private static boolean isAnotherVersion(MessageType type, Object version) {
        return type.fields.containsKey("version")
                && version instanceof Long
                && (Long) version >= 0
                && (Long) version != Limits.VERSION;
    }

    /** Begins a message of ours. */
    public static Builder of(MessageType type) {
        return new Builder(type);
    }

    /** The field, an id or a count. */
    public long integer(String name) {
        return (Long) fields.get(name);
    }

    public double real(String name) {
        return (Double) fields.get(name);
    }

    public String text(String name) {
        return (String) fields.get(name);
    }

    public boolean flag(String name) {
        return (Boolean) fields.get(name);
    }

    @SuppressWarnings("unchecked") // as its kind says, and Checks has seen to
    public List<Long> ids(String name) {
        return (List<Long>) fields.get(name);
    }

    @SuppressWarnings("unchecked") // likewise
    public List<String> texts(String name) {
        return (List<String>) fields.get(name);
    }

    /** All fields by name. */
    public Map<String, Object> fields() {
        return fields;
    }

    /** A view of the payload of its own, from position to limit; null where the type has none. */
    public ByteBuffer payload() {
        return payload == null ? null : payload.duplicate();
    }

    /** Puts a message of ours together. */
    public static final class Builder {
        private final MessageType type;
        private final Map<String, Object> given = new LinkedHashMap<>();
        private ByteBuffer payload;

        private Builder(MessageType type) {
            this.type = type;
        }

        public Builder with(String name, long value) {
            return put(name, value);
        }

        public Builder with(String name, double value) {
            return put(name, value);
        }

        public Builder with(String name, boolean value) {
            return put(name, value);
        }

        public Builder with(String name, String value) {
            return put(name, value);
        }

        public Builder with(String name, String... values) {
            return put(name, Arrays.asList(values));
        }

        public Builder with(String name, List<Long> ids) {
            return put(name, ids);
        }

        public Builder with(String name, Map<String, ?> values) {
            return put(name, values);
        }

        /** Elements from position to limit; not copied. */
        public Builder payload(ByteBuffer elements) {
            payload = elements;
            return this;
        }

        /**
         * The message.
         *
         * @throws IllegalArgumentException when it is none that a peer would take
         */
        public Message build() {
            boolean known = type.fields.keySet().containsAll(given.keySet());
            if (!known || (payload != null) != type.hasPayload) {
                throw new IllegalArgumentException(
                        "no " + type.wireName + " message: " + given.keySet());
            }
            try {
                return checked(type, given, payload);
            } catch (ProtocolException error) {
                throw new IllegalArgumentException(error.getMessage(), error);
            }
        }

        private Builder put(String name, Object value) {
            given.put(name, value);
            return this;
        }
    }
}
