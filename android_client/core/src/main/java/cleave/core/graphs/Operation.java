package cleave.core.graphs;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** An operation of a graph. */
final class Operation {
    /** An attribute's value, where it is one of these. */
    static final class Attribute {
        long integer;
        final List<Long> integers = new ArrayList<>();
        String text = "";
        ByteBuffer tensor = ByteBuffer.allocate(0);
        ByteBuffer graph = ByteBuffer.allocate(0);
    }

    String name = "";

    /** Names of arrays; empty where an optional one is left out. */
    final List<String> inputs = new ArrayList<>();

    final List<String> outputs = new ArrayList<>();
    final Map<String, Attribute> attributes = new HashMap<>();

    /** Its first output, or an empty name. */
    String output() {
        return outputs.isEmpty() ? "" : outputs.get(0);
    }

    long integer(String attribute, long otherwise) {
        Attribute found = attributes.get(attribute);
        return found == null ? otherwise : found.integer;
    }

    /** An attribute that is a list of integers, or null. */
    long[] integers(String attribute) {
        Attribute found = attributes.get(attribute);
        return found == null ? null : found.integers.stream().mapToLong(n -> n).toArray();
    }

    /** The error for something that makes the size of what it computes unknown. */
    UnboundedException refused(String what) {
        return UnboundedException.shape(
                name.substring(0, Math.min(60, name.length()))
                        + ": "
                        + what.substring(0, Math.min(400, what.length())));
    }
}
