package cleave.core.device;

import cleave.core.device.Orders.CannotRunException;
import cleave.core.graphs.ElementType;
import cleave.core.graphs.FetchOrder;
import cleave.core.graphs.GraphOrder;
import cleave.core.kernels.DType;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;
import cleave.core.protocol.ProtocolException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashSet;
import java.util.List;
import java.util.Set;

/** From messages of the feature {@code graphs} and a store to what they ask for. */
final class GraphOrders {
    private final Store store;

    GraphOrders(Store store) {
        this.store = store;
    }

    /** Keep a graph. */
    List<Action> graph(Message message) throws ProtocolException {
        long id = message.integer("id");
        ByteBuffer model = message.payload();
        if (model.remaining() > Limits.MAX_GRAPH_BYTES) {
            throw new ProtocolException(
                    "graph " + id + " has " + model.remaining() + " bytes, over "
                            + Limits.MAX_GRAPH_BYTES);
        }
        store.needRoom(id, model.remaining());
        store.put(id, Stored.of(Stored.Kind.GRAPH, model.remaining()));
        return Collections.singletonList(shell -> shell.graphs().keepGraph(id, model));
    }

    /** Keep integers or truth values, of the size that their message says. */
    List<Action> indices(long id, ElementType type, ByteBuffer payload) throws ProtocolException {
        store.needRoom(id, payload.remaining());
        store.put(id, Stored.of(Stored.Kind.INDICES, payload.remaining()));
        return Collections.singletonList(shell -> shell.graphs().keepIndices(id, type, payload));
    }

    /** Make one array of several. */
    List<Action> concat(Message message) throws ProtocolException {
        long id = message.integer("id");
        List<Long> ids = message.ids("ids");
        boolean alike = !ids.isEmpty() && new HashSet<>(ids).size() == ids.size();
        Stored first = alike ? store.get(ids.get(0)) : null;
        for (long part : ids) {
            Stored found = store.get(part);
            alike =
                    alike
                            && found != null
                            && found.matrix != null
                            && first.matrix.columns == found.matrix.columns
                            && first.matrix.dtype == found.matrix.dtype;
        }
        if (!alike) {
            throw new ProtocolException(
                    "array " + id + " cannot be made of arrays "
                            + ids.subList(0, Math.min(8, ids.size()))
                            + ": it takes arrays that were put, each once, all of the same columns "
                            + "and dtype");
        }
        store.needRoom(id, 0); // the parts make room for it
        List<Action> actions = given(ids);
        long bytes = 0;
        for (long part : ids) {
            Stored removed = store.remove(part);
            bytes += removed.bytes;
            if (removed.held) {
                actions.add(shell -> shell.forget(removed.matrix));
            }
        }
        store.put(id, Stored.of(Stored.Kind.JOINED, bytes));
        actions.add(shell -> shell.graphs().join(id, ids));
        return actions;
    }

    /**
     * Run a graph; its outputs are in the store from now on.
     *
     * @param made filled with these outputs
     * @throws CannotRunException when it cannot be done with what is in the store
     */
    List<Action> run(Message message, List<Stored> made)
            throws ProtocolException, CannotRunException {
        long id = message.integer("id");
        long graph = message.integer("graph");
        List<Long> inputs = message.ids("inputs");
        List<Long> outputs = message.ids("outputs");
        List<Long> sizes = message.ids("output_bytes");
        List<Long> kept = new ArrayList<>(outputs);
        kept.removeIf(name -> name == 0);
        if (kept.size() != sizes.size()) {
            throw new ProtocolException(
                    "run " + id + " keeps " + kept.size() + " outputs and says the size of "
                            + sizes.size());
        }
        List<Long> replaced = replaced(inputs, kept, sizes);
        Set<Long> seen = new HashSet<>();
        for (long name : kept) {
            if (!seen.add(name) || (store.get(name) != null && !replaced.contains(name))) {
                throw new ProtocolException("array " + name + " was sent twice");
            }
        }
        for (int i = 0; i < kept.size(); i++) {
            Stored output = Stored.of(Stored.Kind.OUTPUT, sizes.get(i));
            made.add(output);
            if (replaced.contains(kept.get(i))) { // and lost, even if this run fails
                store.remove(kept.get(i));
                store.put(kept.get(i), output);
            }
        }
        Stored model = store.get(graph);
        if (model == null || model.kind != Stored.Kind.GRAPH) {
            throw new CannotRunException("graph " + graph + " is not here", replaced);
        }
        for (long name : inputs) {
            Stored found = store.get(name);
            if (name != 0 && (found == null || found.kind == Stored.Kind.GRAPH)) {
                throw new CannotRunException("array " + name + " is not here", replaced);
            }
        }
        for (int i = 0; i < kept.size(); i++) {
            if (!replaced.contains(kept.get(i))) {
                store.needRoom(kept.get(i), sizes.get(i));
                store.put(kept.get(i), made.get(i));
            }
        }
        List<Action> actions = given(inputs);
        GraphOrder order = new GraphOrder(id, graph, inputs, outputs, sizes);
        actions.add(shell -> shell.graphs().run(order));
        return actions;
    }

    /**
     * Return rows of an array.
     *
     * @throws CannotRunException when it has no such rows, or they do not fit
     */
    List<Action> fetch(Message message, DType out) throws CannotRunException {
        long array = message.integer("array");
        long rows = message.integer("rows");
        long columns = message.integer("columns");
        Stored found = store.get(array);
        if (found == null
                || columns == 0
                || found.kind == Stored.Kind.GRAPH
                || found.kind == Stored.Kind.INDICES) {
            throw new CannotRunException("array " + array + " is not here");
        }
        Orders.checkResult(rows, columns, out, store);
        FetchOrder order =
                new FetchOrder(
                        message.integer("id"),
                        array,
                        message.integer("first_row"),
                        rows,
                        columns,
                        out);
        List<Action> actions = given(Collections.singletonList(array));
        actions.add(shell -> shell.graphs().fetch(order));
        return actions;
    }

    /** Outputs of earlier runs, inputs of this one, whose places its outputs take. */
    private List<Long> replaced(List<Long> inputs, List<Long> kept, List<Long> sizes) {
        List<Long> found = new ArrayList<>();
        for (int i = 0; i < kept.size(); i++) {
            Long name = kept.get(i);
            Stored before = store.get(name);
            if (before != null
                    && before.kind == Stored.Kind.OUTPUT
                    && before.bytes == sizes.get(i)
                    && Collections.frequency(inputs, name) == 1) {
                found.add(name);
            }
        }
        return found;
    }

    /** What gives arrays to the graphs that they do not have. */
    private List<Action> given(List<Long> ids) {
        List<Action> actions = new ArrayList<>();
        for (long id : ids) {
            Stored stored = store.get(id);
            if (stored != null && !stored.given) {
                stored.given = true;
                actions.add(
                        shell ->
                                shell.graphs()
                                        .keepArray(
                                                id, stored.matrix.dtype, stored.matrix.payload()));
            }
        }
        return actions;
    }
}
