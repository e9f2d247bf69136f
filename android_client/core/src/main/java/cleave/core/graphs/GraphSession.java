package cleave.core.graphs;

import java.util.List;
import java.util.Map;

/** A graph that is ready to be run, whatever runs it. For one thread. */
public interface GraphSession {
    /** In the graph's order. */
    List<GraphInput> inputs();

    /** Names in the graph's order. */
    List<String> outputs();

    /**
     * The outputs that are wanted, in the order of their names.
     *
     * @param given all inputs by name
     * @throws GraphException when it cannot be run
     */
    List<Value> run(Map<String, Value> given, List<String> wanted) throws GraphException;

    /** Give back what it holds. */
    void close();
}
