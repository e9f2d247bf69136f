package cleave.core.protocol;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/** Whether values are what fields may hold, as docs/protocol.md's table of field types says. */
final class Checks {
    /** A value is none of its kind; who catches it knows which field it was. */
    private static final class WrongValue extends Exception {
        private static final long serialVersionUID = 1;

        WrongValue() {
            super(null, null, false, false);
        }
    }

    private Checks() {}

    /**
     * The value as its kind holds it.
     *
     * @throws ProtocolException when it is none of that kind; values may be secret, and are not
     *     shown
     */
    static Object check(MessageType type, MessageType.Field field, Object value)
            throws ProtocolException {
        try {
            return as(field.kind, value);
        } catch (WrongValue error) {
            throw new ProtocolException(
                    "field '" + field.name + "' of a " + type.wireName + " message is no valid "
                            + field.kind.name().toLowerCase(Locale.ROOT));
        }
    }

    private static Object as(Kind kind, Object value) throws WrongValue {
        switch (kind) {
            case ID:
            case COUNT:
                return id(value);
            case REAL:
                return real(value);
            case TEXT:
                return Codec.shown(text(value));
            case SECRET:
                return text(value);
            case BOOL:
                return only(value, value instanceof Boolean);
            case IDS:
                return ids(value, Limits.MAX_IDS);
            case INPUTS:
                return ids(value, Limits.MAX_RUN_INPUTS);
            case TEXTS:
                return texts(value);
            case VALUES:
                return values(value);
            case MAP:
                return map(value, 1);
            default:
                return only(value, "device".equals(value) || "operator".equals(value));
        }
    }

    private static Object only(Object value, boolean right) throws WrongValue {
        if (!right) {
            throw new WrongValue();
        }
        return value;
    }

    private static Long id(Object value) throws WrongValue {
        return (Long) only(value, value instanceof Long && (Long) value >= 0);
    }

    private static Double finite(Object value) throws WrongValue {
        boolean number =
                value instanceof Long || value instanceof Double || value instanceof BigInteger;
        only(value, number);
        double found = ((Number) value).doubleValue();
        only(value, !Double.isNaN(found) && !Double.isInfinite(found));
        return found;
    }

    private static Double real(Object value) throws WrongValue {
        Double found = finite(value);
        only(value, found >= 0);
        return found;
    }

    private static String text(Object value) throws WrongValue {
        only(value, value instanceof String);
        String found = (String) value;
        boolean fits =
                found.length() <= Limits.MAX_TEXT
                        || found.codePointCount(0, found.length()) <= Limits.MAX_TEXT;
        only(value, fits);
        return found;
    }

    private static List<Long> ids(Object value, int most) throws WrongValue {
        List<Long> found = new ArrayList<>();
        for (Object item : items(value, most)) {
            found.add(id(item));
        }
        return found;
    }

    private static List<String> texts(Object value) throws WrongValue {
        List<String> found = new ArrayList<>();
        for (Object item : items(value, Limits.MAX_IDS)) {
            found.add(Codec.shown(text(item)));
        }
        return found;
    }

    private static List<?> items(Object value, int most) throws WrongValue {
        only(value, value instanceof List && ((List<?>) value).size() <= most);
        return (List<?>) value;
    }

    private static Map<String, Double> values(Object value) throws WrongValue {
        only(value, value instanceof Map);
        Map<String, Double> found = new LinkedHashMap<>();
        for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
            found.put(Codec.shown(text(entry.getKey())), finite(entry.getValue()));
        }
        return found;
    }

    private static Map<String, Object> map(Object value, int depth) throws WrongValue {
        only(value, value instanceof Map);
        Map<String, Object> found = new LinkedHashMap<>();
        for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
            found.put(Codec.shown(text(entry.getKey())), plain(entry.getValue(), depth));
        }
        return found;
    }

    /** An untyped value: what JSON has, not nested too deep. */
    private static Object plain(Object value, int depth) throws WrongValue {
        only(value, depth <= Limits.MAX_NESTING);
        if (value instanceof Map) {
            return map(value, depth + 1);
        }
        if (value instanceof List) {
            List<Object> found = new ArrayList<>();
            for (Object item : (List<?>) value) {
                found.add(plain(item, depth + 1));
            }
            return found;
        }
        if (value instanceof String) {
            return Codec.shown((String) value);
        }
        return value;
    }
}
