package cleave.core.graphs;

import cleave.core.kernels.DType;
import cleave.core.kernels.Numbers;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Keeps arrays, and runs graphs on them that write others, or replace some. The device's core has
 * checked who may ask for what; {@code cleave/machine/graph_run.py} is the same in Python. For one
 * thread.
 */
public final class GraphStore {
    /** A graph, looked at and opened at its first run. */
    private static final class Graph {
        final ByteBuffer model;
        GraphMemory memory;
        GraphSession session;

        Graph(ByteBuffer model) {
            this.model = model;
        }
    }

    /** As it came: 16 bits are widened for each run, and take half the memory between. */
    private static final class Sent {
        final DType dtype;
        final ByteBuffer payload;

        Sent(DType dtype, ByteBuffer payload) {
            this.dtype = dtype;
            this.payload = payload;
        }
    }

    private final OpenGraph open;
    private final Map<Long, Graph> graphs = new HashMap<>();
    private final Map<Long, Sent> sent = new HashMap<>();
    private final Map<Long, Value> values = new HashMap<>();

    public GraphStore(OpenGraph open) {
        this.open = open;
    }

    /** Keep a graph; what it is shows at its first run. */
    public void keepGraph(long id, ByteBuffer model) {
        graphs.put(id, new Graph(model));
    }

    /** Keep an array, which is not copied. */
    public void keepArray(long id, DType dtype, ByteBuffer payload) {
        sent.put(id, new Sent(dtype, payload));
    }

    /** Keep integers or truth values. */
    public void keepIndices(long id, ElementType type, ByteBuffer payload) {
        ByteBuffer data = direct(payload.remaining());
        data.put(payload.duplicate()).flip();
        values.put(id, new Value(type, new long[] {data.remaining() / type.itemBytes}, data));
    }

    /** Make one array of the rows of some, which are forgotten. Where one is missing, none is. */
    public void join(long id, List<Long> ids) {
        List<Sent> parts = new ArrayList<>();
        int bytes = 0;
        for (long part : ids) {
            Sent found = sent.remove(part);
            if (found != null) {
                parts.add(found);
                bytes = Math.addExact(bytes, found.payload.remaining());
            }
        }
        if (parts.size() < ids.size()) {
            return;
        }
        ByteBuffer whole = ByteBuffer.allocate(bytes);
        for (Sent part : parts) {
            whole.put(part.payload.duplicate());
        }
        whole.flip();
        sent.put(id, new Sent(parts.get(0).dtype, whole));
    }

    /** Forget arrays and graphs. */
    public void forget(List<Long> ids) {
        for (long id : ids) {
            sent.remove(id);
            values.remove(id);
            Graph graph = graphs.remove(id);
            if (graph != null && graph.session != null) {
                graph.session.close();
            }
        }
    }

    /** Forget all. */
    public void close() {
        forget(new ArrayList<>(graphs.keySet()));
        sent.clear();
        values.clear();
    }

    /**
     * Run a graph; all outputs that are wanted are kept then, or none. What they were to replace is
     * lost where it fails.
     *
     * @param roomBytes what it may work in
     * @throws GraphException when it cannot be run, needs more memory, or its outputs are not as
     *     large as was said
     */
    public void run(GraphOrder order, long roomBytes) throws GraphException {
        boolean done = false;
        try {
            refuseTooLarge(order, roomBytes);
            runWhole(order);
            done = true;
        } finally {
            if (!done) { // whatever was thrown
                values.keySet().removeAll(order.outputs);
            }
        }
    }

    /**
     * Rows of an array, rounded to the dtype that is asked for.
     *
     * @throws GraphException when the array is not there, or has other rows or columns
     */
    public ByteBuffer fetch(FetchOrder order) throws GraphException {
        Sent array = sent.get(order.array);
        Value value = values.get(order.array);
        if (array == null && (value == null || value.type != ElementType.FLOAT32)) {
            throw new GraphException("array " + order.array + " of numbers is not here");
        }
        DType dtype = array == null ? DType.FP32 : array.dtype;
        ByteBuffer elements = array == null ? value.data() : array.payload.duplicate();
        long items = elements.remaining() / dtype.itemBytes;
        long rows = items / order.columns;
        if (items % order.columns != 0
                || order.rows > rows
                || order.firstRow > rows - order.rows) {
            throw new GraphException(
                    "an array of " + items + " elements has no " + order.rows + " rows of "
                            + order.columns + " columns from row " + order.firstRow + " on");
        }
        int from = (int) (order.firstRow * order.columns * dtype.itemBytes);
        int bytes = (int) (order.rows * order.columns * dtype.itemBytes);
        elements.position(elements.position() + from);
        elements.limit(elements.position() + bytes);
        return Numbers.narrowed(Numbers.widened(elements, dtype), order.out);
    }

    /** Refuse a run that needs more memory than it may work in, before anything of it is made. */
    private void refuseTooLarge(GraphOrder order, long roomBytes) throws GraphException {
        Graph graph = graphs.get(order.graph);
        if (graph == null) {
            throw new GraphException("graph " + order.graph + " is not here");
        }
        if (graph.memory == null) {
            GraphCheck.check(graph.model);
            graph.memory = new GraphMemory(graph.model);
        }
        List<GraphMemory.Given> given = new ArrayList<>();
        for (long id : order.inputs) {
            given.add(given(id));
        }
        List<Boolean> kept = new ArrayList<>();
        for (long id : order.outputs) {
            kept.add(id != 0);
        }
        long needed = graph.memory.peakBytes(given, kept);
        if (needed > roomBytes) {
            throw new GraphException(
                    "the run needs " + needed + " bytes, but only " + Math.max(roomBytes, 0)
                            + " are free; send fewer rows, or drop arrays first");
        }
    }

    private GraphMemory.Given given(long id) throws GraphException {
        if (id == 0) {
            return new GraphMemory.Given(-1, false);
        }
        Value value = values.get(id);
        if (value != null) {
            return new GraphMemory.Given(value.items(), false);
        }
        Sent array = sent.get(id);
        if (array == null) {
            throw missing(id);
        }
        long items = array.payload.remaining() / array.dtype.itemBytes;
        return new GraphMemory.Given(items, array.dtype != DType.FP32);
    }

    private static GraphException missing(long id) {
        return new GraphException("array " + id + " is not here: what was to make it failed");
    }

    private void runWhole(GraphOrder order) throws GraphException {
        Graph graph = graphs.get(order.graph);
        if (graph.session == null) {
            graph.session = open.open(graph.model);
        }
        List<GraphInput> inputs = graph.session.inputs();
        List<String> outputs = graph.session.outputs();
        if (order.inputs.size() != inputs.size() || order.outputs.size() != outputs.size()) {
            throw new GraphException(
                    "the graph has " + inputs.size() + " inputs and " + outputs.size()
                            + " outputs, not " + order.inputs.size() + " and "
                            + order.outputs.size());
        }
        Map<String, Value> given = new LinkedHashMap<>();
        for (int i = 0; i < inputs.size(); i++) {
            given.put(inputs.get(i).name, shaped(inputs.get(i), order.inputs.get(i)));
        }
        List<Long> ids = new ArrayList<>();
        List<String> names = new ArrayList<>();
        for (int i = 0; i < outputs.size(); i++) {
            if (order.outputs.get(i) != 0) {
                ids.add(order.outputs.get(i));
                names.add(outputs.get(i));
            }
        }
        List<Value> found = graph.session.run(given, names.isEmpty() ? outputs : names);
        for (int i = 0; i < ids.size(); i++) {
            long bytes = found.get(i).data().remaining();
            if (bytes != order.outputBytes.get(i)) {
                throw new GraphException(
                        "an output is " + bytes + " bytes, not " + order.outputBytes.get(i)
                                + " as announced");
            }
        }
        for (int i = 0; i < ids.size(); i++) {
            values.put(ids.get(i), found.get(i));
        }
    }

    /** An input in the graph's shape, whose size that is not fixed follows from its own. */
    private Value shaped(GraphInput input, long id) throws GraphException {
        if (id == 0) {
            long[] shape = input.fixedShape();
            long bytes = input.fixed();
            if (bytes > Integer.MAX_VALUE / Float.BYTES) {
                throw new GraphException("the input " + input.name + " is larger than any array");
            }
            return new Value(ElementType.FLOAT32, shape, direct((int) bytes * Float.BYTES));
        }
        Value value = values.get(id);
        if (value == null) {
            Sent array = sent.get(id);
            if (array == null) {
                throw missing(id);
            }
            value = widened(array);
        }
        return value.shaped(input.shapeOf(value.items()));
    }

    private static Value widened(Sent array) throws GraphException {
        int items = array.payload.remaining() / array.dtype.itemBytes;
        if (items > Integer.MAX_VALUE / Float.BYTES) {
            throw new GraphException("an array of " + items + " elements is too large for fp32");
        }
        ByteBuffer data = direct(items * Float.BYTES);
        if (array.dtype == DType.FP32) {
            data.put(array.payload.duplicate()).flip();
        } else {
            data.asFloatBuffer().put(Numbers.widened(array.payload, array.dtype));
        }
        return new Value(ElementType.FLOAT32, new long[] {items}, data);
    }

    private static ByteBuffer direct(int bytes) {
        return ByteBuffer.allocateDirect(bytes).order(ByteOrder.LITTLE_ENDIAN);
    }
}
