package cleave.core.device;

import cleave.core.graphs.ElementType;
import cleave.core.graphs.FetchOrder;
import cleave.core.graphs.GraphOrder;
import cleave.core.graphs.GraphWork;
import cleave.core.kernels.DType;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;

/** What a core wanted done with graphs, in words. */
final class RecordedGraphs implements GraphWork {
    final List<String> asked = new ArrayList<>();

    @Override
    public void keepGraph(long id, ByteBuffer model) {
        asked.add("graph " + id);
    }

    @Override
    public void keepArray(long id, DType dtype, ByteBuffer payload) {
        asked.add("array " + id);
    }

    @Override
    public void keepIndices(long id, ElementType type, ByteBuffer payload) {
        asked.add(type.wireName + " " + id);
    }

    @Override
    public void join(long id, List<Long> ids) {
        asked.add("join " + ids + " to " + id);
    }

    @Override
    public void forget(List<Long> ids) {
        asked.add("forget " + ids);
    }

    @Override
    public void run(GraphOrder order) {
        asked.add("run " + order.inputs + " to " + order.outputs);
    }

    @Override
    public void fetch(FetchOrder order) {
        asked.add("fetch " + order.array);
    }
}
