package cleave.core.graphs;

import java.nio.ByteBuffer;

/** Makes graphs ready to be run. */
public interface OpenGraph {
    /**
     * Make a graph ready.
     *
     * @param model a checked model, from position to limit
     * @throws GraphException when it cannot be done
     */
    GraphSession open(ByteBuffer model) throws GraphException;
}
