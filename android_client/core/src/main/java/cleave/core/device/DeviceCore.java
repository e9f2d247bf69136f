package cleave.core.device;

import cleave.core.coding.Coded;
import cleave.core.graphs.ElementType;
import cleave.core.kernels.DType;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.Codec;
import cleave.core.protocol.Feature;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.ProtocolException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * The device's state machine: arrays in, products wanted, results out. It knows no socket, clock or
 * element; {@code cleave/device/core.py} is the same in Python.
 */
public final class DeviceCore {
    /** The one op that there is. */
    public static final String MATMUL = "matmul";

    private final Store store;
    private final GraphOrders graphOrders;
    private final Map<Long, Running> running = new HashMap<>();
    private final boolean measured;
    private final List<String> offers;
    private boolean codesResults;
    private HeldArrays resumes; // until the welcome
    private Message welcome;
    private boolean draining;
    private long blocks;
    private double flops;

    /**
     * @param memoryBytes what it offered in {@code hello}; going over it is the server's fault and
     *     ends the session
     * @param measured whether it asked for its link to be measured
     * @param offers the features that it named, each of which it has once the server names it
     * @param resumes what it still has from its last session, which {@code hello} names; or null
     */
    public DeviceCore(
            long memoryBytes, boolean measured, List<String> offers, HeldArrays resumes) {
        store = new Store(memoryBytes);
        graphOrders = new GraphOrders(store);
        this.measured = measured;
        this.offers = offers;
        this.resumes = resumes;
    }

    /** The server's welcome, or null until it came. */
    public Message welcome() {
        return welcome;
    }

    /** Whether the server allows results to come coded. */
    public boolean codesResults() {
        return codesResults;
    }

    /** Blocks answered with a result. */
    public long blocks() {
        return blocks;
    }

    /** Floating-point operations of these. */
    public double flops() {
        return flops;
    }

    /** Bytes that count against the memory that it offered. */
    public long takenBytes() {
        return store.takenBytes();
    }

    /** Whether every run it was given is answered. */
    public boolean isIdle() {
        return running.isEmpty();
    }

    /** Whether the answer to a run is still wanted. */
    public boolean wants(long run) {
        return running.containsKey(run);
    }

    /**
     * Take a message of the server other than {@code bye} and {@code error}.
     *
     * @throws ProtocolException for a message that a server must not send; the session is to be
     *     ended
     */
    public List<Action> received(Message message) throws ProtocolException {
        switch (message.type) {
            case PUT:
                return put(message);
            case PUT_CODED:
                need(Feature.CODING, message);
                return putCoded(message);
            case CODE_RESULTS:
                need(Feature.CODING, message);
                codesResults = true;
                return Collections.emptyList();
            case RUN:
                return run(message);
            case GRAPH:
                need(Feature.GRAPHS, message);
                return graphOrders.graph(message);
            case CONCAT:
                need(Feature.GRAPHS, message);
                return graphOrders.concat(message);
            case RUN_GRAPH:
                need(Feature.GRAPHS, message);
                return runGraph(message);
            case FETCH:
                need(Feature.GRAPHS, message);
                return fetch(message);
            case DROP:
                return drop(message.ids("ids"));
            case CANCEL:
                for (long run : message.ids("ids")) {
                    take(run);
                }
                return Collections.emptyList();
            case WELCOME:
                if (welcome == null) {
                    welcome = message;
                    return resume(message.text("arrays"));
                }
                break;
            case MEASURED:
                if (measured) {
                    return Collections.emptyList();
                }
                break;
            default:
                break;
        }
        throw new ProtocolException(
                "a device does not expect a " + message.type.wireName + " message here");
    }

    /**
     * The result of a run; nothing is sent if it was cancelled meanwhile.
     *
     * @param payload its elements; of no matter where a graph keeps its outputs here
     * @param computeS time that the arithmetic took
     */
    public List<Action> computed(long run, ByteBuffer payload, double computeS) {
        Running done = take(run);
        if (done == null) {
            return Collections.emptyList();
        }
        blocks += 1;
        flops += done.flops;
        for (Stored output : done.outputs) {
            output.made = true;
        }
        if (done.out == null) {
            return send(
                    Message.of(MessageType.COMPUTED)
                            .with("id", run)
                            .with("compute_s", Math.max(0.0, computeS))
                            .build());
        }
        return send(
                Message.of(MessageType.RESULT)
                        .with("id", run)
                        .with("rows", done.rows)
                        .with("columns", done.columns)
                        .with("dtype", done.out.wireName)
                        .with("compute_s", Math.max(0.0, computeS))
                        .payload(payload)
                        .build());
    }

    /** A run could not be done. */
    public List<Action> failed(long run, String reason) {
        return take(run) == null ? Collections.emptyList() : taskError(run, reason);
    }

    /** The owner wants the device back: take nothing new, answer what is there. */
    public List<Action> drain() {
        if (draining) {
            return Collections.emptyList();
        }
        draining = true;
        return send(Message.of(MessageType.DRAIN).build());
    }

    /**
     * The arrays and graphs that the device may keep if its connection is lost now; null if there
     * are none of use. Outputs that no run has made yet are not among them, nor what a kernel has.
     */
    public HeldArrays held() {
        if (welcome == null) {
            return resumes;
        }
        String name = welcome.text("arrays");
        if (!has(Feature.KEEPS) || name.isEmpty() || draining) {
            return null;
        }
        Map<Long, Stored> kept = store.all();
        kept.values().removeIf(stored -> !stored.made || stored.held);
        boolean graphs =
                kept.values().stream().anyMatch(stored -> stored.kind == Stored.Kind.GRAPH);
        return graphs ? new HeldArrays(name, kept) : null;
    }

    /**
     * The session is over: nothing is wanted any more.
     *
     * @param held what is kept; null for nothing
     */
    public List<Action> end(HeldArrays held) {
        running.clear();
        Map<Long, Stored> dropped = store.all();
        if (held != null) {
            dropped.keySet().removeAll(held.store.keySet());
        }
        List<Action> actions = drop(new ArrayList<>(dropped.keySet()));
        store.clear();
        resumes = null;
        return actions;
    }

    /** Tell the server what the device still has, or drop it where the server does not know it. */
    private List<Action> resume(String arrays) {
        HeldArrays held = resumes;
        resumes = null;
        if (held == null) {
            return Collections.emptyList();
        }
        held.store.forEach(store::put);
        List<Long> ids = new ArrayList<>(held.store.keySet());
        if (!held.of.equals(arrays) || !has(Feature.KEEPS)) {
            return drop(ids);
        }
        return send(Message.of(MessageType.HELD).with("ids", ids).build());
    }

    private Running take(long run) {
        Running found = running.remove(run);
        if (found != null) {
            store.release(found.resultBytes);
        }
        return found;
    }

    /** Whether a feature is part of this session. */
    private boolean has(Feature feature) {
        return offers.contains(feature.wireName)
                && welcome != null
                && welcome.texts("features").contains(feature.wireName);
    }

    private void need(Feature feature, Message message) throws ProtocolException {
        if (!has(feature)) {
            throw new ProtocolException(
                    message.type.wireName
                            + " belongs to a feature that is not part of this session");
        }
    }

    private List<Action> putCoded(Message message) throws ProtocolException {
        DType dtype = known(message.text("dtype"));
        long bytes;
        try {
            long elements = Math.multiplyExact(message.integer("rows"), message.integer("columns"));
            bytes = Math.multiplyExact(elements, (long) dtype.itemBytes);
        } catch (ArithmeticException error) {
            bytes = Long.MAX_VALUE; // there is no such memory
        }
        store.needRoom(message.integer("id"), bytes); // before any memory is taken for it
        return put(Coded.put(message, dtype, bytes));
    }

    private List<Action> put(Message message) throws ProtocolException {
        long id = message.integer("id");
        long rows = message.integer("rows");
        long columns = message.integer("columns");
        String name = message.text("dtype");
        ElementType indices = has(Feature.GRAPHS) ? ElementType.ofIndices(name) : null;
        int itemBytes = indices == null ? known(name).itemBytes : indices.itemBytes;
        ByteBuffer payload = message.payload();
        if (!hasSize(rows, columns, itemBytes, payload.remaining())) {
            throw new ProtocolException(
                    "array " + id + " came with " + payload.remaining() + " bytes, which is no "
                            + rows + "x" + columns + " " + name);
        }
        if (indices != null) {
            return graphOrders.indices(id, indices, payload);
        }
        store.needRoom(id, payload.remaining());
        Stored stored = Stored.array(new Matrix(rows, columns, known(name), payload));
        store.put(id, stored);
        // Where there may be graphs, it shows at the first use whether the kernel needs it.
        return has(Feature.GRAPHS) ? Collections.emptyList() : held(stored);
    }

    private static List<Action> held(Stored stored) {
        stored.held = true;
        return Collections.singletonList(shell -> shell.hold(stored.matrix));
    }

    private List<Action> drop(List<Long> ids) {
        List<Action> actions = new ArrayList<>();
        List<Long> ofGraphs = new ArrayList<>();
        for (long id : ids) {
            Stored stored = store.remove(id);
            if (stored == null) {
                continue;
            }
            if (stored.held) {
                actions.add(shell -> shell.forget(stored.matrix));
            }
            if (stored.given) {
                ofGraphs.add(id);
            }
        }
        if (!ofGraphs.isEmpty()) {
            actions.add(shell -> shell.graphs().forget(ofGraphs));
        }
        return actions;
    }

    /** The id of a run that may begin. */
    private long needRun(Message message) throws ProtocolException {
        long id = message.integer("id");
        if (running.containsKey(id)) {
            throw new ProtocolException("run " + id + " was asked for twice");
        }
        if (running.size() >= Limits.MAX_RUNS_IN_FLIGHT) {
            throw new ProtocolException(
                    "more than " + Limits.MAX_RUNS_IN_FLIGHT + " runs were asked for and not yet "
                            + "answered");
        }
        return id;
    }

    private List<Action> run(Message message) throws ProtocolException {
        long id = needRun(message);
        DType out = known(message.text("out"));
        Product product;
        try {
            product = Orders.product(message, out, store);
        } catch (Orders.CannotRunException error) {
            return taskError(id, error.getMessage());
        }
        begin(
                id,
                new Running(
                        product.resultBytes(),
                        product.flops(),
                        product.rows,
                        product.columns,
                        product.out));
        List<Action> actions = new ArrayList<>();
        for (long input : message.ids("inputs")) {
            Stored stored = store.get(input);
            if (!stored.held) {
                actions.addAll(held(stored));
            }
        }
        actions.add(shell -> shell.compute(id, product));
        return actions;
    }

    private List<Action> runGraph(Message message) throws ProtocolException {
        long id = needRun(message);
        try {
            List<Stored> outputs = new ArrayList<>();
            List<Action> actions = graphOrders.run(message, outputs);
            begin(id, Running.graph(message.integer("flops"), outputs));
            return actions;
        } catch (Orders.CannotRunException error) {
            List<Action> actions = new ArrayList<>(taskError(id, error.getMessage()));
            if (!error.lost.isEmpty()) {
                actions.add(shell -> shell.graphs().forget(error.lost));
            }
            return actions;
        }
    }

    private List<Action> fetch(Message message) throws ProtocolException {
        long id = needRun(message);
        DType out = known(message.text("out"));
        long rows = message.integer("rows");
        long columns = message.integer("columns");
        try {
            List<Action> actions = graphOrders.fetch(message, out);
            begin(id, new Running(rows * columns * out.itemBytes, 0, rows, columns, out));
            return actions;
        } catch (Orders.CannotRunException error) {
            return taskError(id, error.getMessage());
        }
    }

    private void begin(long id, Running begun) {
        running.put(id, begun);
        store.reserve(begun.resultBytes);
    }

    private static boolean hasSize(long rows, long columns, int itemBytes, long bytes) {
        if (rows == 0 || columns == 0) {
            return bytes == 0;
        }
        // Division, for a product of two counts may have more than 64 bits.
        return bytes % itemBytes == 0
                && (bytes / itemBytes) % rows == 0
                && (bytes / itemBytes) / rows == columns;
    }

    private static DType known(String name) throws ProtocolException {
        DType dtype = DType.named(name);
        if (dtype == null) {
            throw new ProtocolException(
                    "unknown dtype '" + name.substring(0, Math.min(40, name.length())) + "'");
        }
        return dtype;
    }

    private static List<Action> taskError(long run, String reason) {
        return send(
                Message.of(MessageType.TASK_ERROR)
                        .with("id", run)
                        .with("reason", Codec.cleanText(reason))
                        .build());
    }

    private static List<Action> send(Message message) {
        return Collections.singletonList(shell -> shell.send(message));
    }
}
