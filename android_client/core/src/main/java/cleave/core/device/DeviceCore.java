package cleave.core.device;

import cleave.core.coding.Coded;
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
    private final Map<Long, Product> running = new HashMap<>();
    private final boolean measured;
    private final boolean offersCoding;
    private boolean codesResults;
    private Message welcome;
    private boolean draining;
    private long blocks;
    private double flops;

    /**
     * @param memoryBytes what it offered in {@code hello}; going over it is the server's fault and
     *     ends the session
     * @param measured whether it asked for its link to be measured
     * @param offersCoding whether it named the feature {@code coding}, which it has once the server
     *     names it
     */
    public DeviceCore(long memoryBytes, boolean measured, boolean offersCoding) {
        store = new Store(memoryBytes);
        this.measured = measured;
        this.offersCoding = offersCoding;
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
                needCoding(message);
                return putCoded(message);
            case CODE_RESULTS:
                needCoding(message);
                codesResults = true;
                return Collections.emptyList();
            case RUN:
                return run(message);
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
                    return Collections.emptyList();
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
     * @param payload its elements
     * @param computeS time that the arithmetic took
     */
    public List<Action> computed(long run, ByteBuffer payload, double computeS) {
        Product product = take(run);
        if (product == null) {
            return Collections.emptyList();
        }
        blocks += 1;
        flops += product.flops();
        return send(
                Message.of(MessageType.RESULT)
                        .with("id", run)
                        .with("rows", product.rows)
                        .with("columns", product.columns)
                        .with("dtype", product.out.wireName)
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

    /** The session is over: nothing is wanted any more, and nothing is kept. */
    public List<Action> end() {
        for (long run : new ArrayList<>(running.keySet())) {
            take(run);
        }
        return drop(store.ids());
    }

    private Product take(long run) {
        Product product = running.remove(run);
        if (product != null) {
            store.release(product.resultBytes());
        }
        return product;
    }

    private void needCoding(Message message) throws ProtocolException {
        boolean agreed =
                offersCoding
                        && welcome != null
                        && welcome.texts("features").contains(Feature.CODING.wireName);
        if (!agreed) {
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
        needRoom(message.integer("id"), bytes); // before any memory is taken for it
        return put(Coded.put(message, dtype, bytes));
    }

    private void needRoom(long id, long bytes) throws ProtocolException {
        if (store.get(id) != null) {
            throw new ProtocolException("array " + id + " was sent twice");
        }
        if (!store.fits(bytes)) {
            throw new ProtocolException(
                    "array " + id + " does not fit: " + taken() + " and it has " + bytes);
        }
    }

    private List<Action> put(Message message) throws ProtocolException {
        long id = message.integer("id");
        long rows = message.integer("rows");
        long columns = message.integer("columns");
        DType dtype = known(message.text("dtype"));
        ByteBuffer payload = message.payload();
        if (!hasSize(rows, columns, dtype, payload.remaining())) {
            throw new ProtocolException(
                    "array " + id + " came with " + payload.remaining() + " bytes, which is no "
                            + rows + "x" + columns + " " + dtype.wireName);
        }
        needRoom(id, payload.remaining());
        Matrix matrix = new Matrix(rows, columns, dtype, payload);
        store.put(id, matrix);
        return Collections.singletonList(shell -> shell.hold(matrix));
    }

    private List<Action> drop(List<Long> ids) {
        List<Action> actions = new ArrayList<>();
        for (long id : ids) {
            Matrix matrix = store.remove(id);
            if (matrix != null) {
                actions.add(shell -> shell.forget(matrix));
            }
        }
        return actions;
    }

    private List<Action> run(Message message) throws ProtocolException {
        long id = message.integer("id");
        if (running.containsKey(id)) {
            throw new ProtocolException("run " + id + " was asked for twice");
        }
        if (running.size() >= Limits.MAX_RUNS_IN_FLIGHT) {
            throw new ProtocolException(
                    "more than " + Limits.MAX_RUNS_IN_FLIGHT + " runs were asked for and not yet "
                            + "answered");
        }
        DType out = known(message.text("out"));
        Product product;
        try {
            product = Orders.product(message, out, store);
        } catch (Orders.CannotRunException error) {
            return taskError(id, error.getMessage());
        }
        running.put(id, product);
        store.reserve(product.resultBytes());
        return Collections.singletonList(shell -> shell.compute(id, product));
    }

    private String taken() {
        return store.takenBytes() + " of " + store.memoryBytes() + " bytes are taken";
    }

    private static boolean hasSize(long rows, long columns, DType dtype, long bytes) {
        if (rows == 0 || columns == 0) {
            return bytes == 0;
        }
        // Division, for a product of two counts may have more than 64 bits.
        return bytes % dtype.itemBytes == 0
                && (bytes / dtype.itemBytes) % rows == 0
                && (bytes / dtype.itemBytes) / rows == columns;
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
