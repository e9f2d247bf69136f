package cleave.core.graphs;

import java.util.List;

/** Run a graph. */
public final class GraphOrder {
    public final long run;
    public final long graph;

    /** In the graph's order; 0 for zeros. */
    public final List<Long> inputs;

    /** In the graph's order; 0 for one that is not kept. */
    public final List<Long> outputs;

    /** The size of each output that is kept. */
    public final List<Long> outputBytes;

    public GraphOrder(
            long run, long graph, List<Long> inputs, List<Long> outputs, List<Long> outputBytes) {
        this.run = run;
        this.graph = graph;
        this.inputs = inputs;
        this.outputs = outputs;
        this.outputBytes = outputBytes;
    }
}
