package cleave.core.graphs;

import cleave.core.kernels.DType;
import java.nio.ByteBuffer;
import java.util.List;

/** What a device core wants done with graphs: all of it in order. */
public interface GraphWork {
    void keepGraph(long id, ByteBuffer model);

    void keepArray(long id, DType dtype, ByteBuffer payload);

    void keepIndices(long id, ElementType type, ByteBuffer payload);

    /** Make one array of the rows of some, which are forgotten. */
    void join(long id, List<Long> ids);

    void forget(List<Long> ids);

    /** Run a graph, then tell the core. */
    void run(GraphOrder order);

    /** Return rows of an array to the core. */
    void fetch(FetchOrder order);
}
