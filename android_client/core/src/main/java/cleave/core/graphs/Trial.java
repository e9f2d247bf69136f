package cleave.core.graphs;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** A graph with inputs, and what it should return. */
final class Trial {
    /** What it tries, for people. */
    final String name;

    private final ByteBuffer model;
    private final Map<String, Value> given = new LinkedHashMap<>();
    private final Map<String, double[]> wanted = new LinkedHashMap<>();

    Trial(String name, GraphWriter graph) {
        this.name = name;
        model = graph.model();
    }

    Trial give(String input, Value value) {
        given.put(input, value);
        return this;
    }

    /** @param elements of an output, in 64 bits */
    Trial want(String output, double[] elements) {
        wanted.put(output, elements);
        return this;
    }

    /**
     * The largest error, relative to the largest element; infinity for what is no number, or of
     * another size.
     *
     * @throws GraphException when the graph cannot be run
     */
    double error(OpenGraph open) throws GraphException {
        GraphSession session = open.open(model.duplicate());
        try {
            List<String> names = new ArrayList<>(wanted.keySet());
            List<Value> found = session.run(given, names);
            double worst = 0;
            for (int i = 0; i < names.size(); i++) {
                worst = Math.max(worst, error(found.get(i), wanted.get(names.get(i))));
            }
            return worst;
        } finally {
            session.close();
        }
    }

    private static double error(Value found, double[] right) {
        if (found.type != ElementType.FLOAT32 || found.items() != right.length) {
            return Double.POSITIVE_INFINITY;
        }
        FloatBuffer data = found.data().asFloatBuffer();
        double largest = 0;
        double off = 0;
        for (int i = 0; i < right.length; i++) {
            largest = Math.max(largest, Math.abs(right[i]));
            off = Math.max(off, Math.abs(data.get(i) - right[i])); // NaN, once it is
        }
        return Double.isNaN(off) ? Double.POSITIVE_INFINITY : off / largest;
    }
}
