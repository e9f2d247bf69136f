package cleave.core.session;

import cleave.core.graphs.ElementType;
import cleave.core.graphs.FetchOrder;
import cleave.core.graphs.GraphException;
import cleave.core.graphs.GraphOrder;
import cleave.core.graphs.GraphStore;
import cleave.core.graphs.GraphWork;
import cleave.core.graphs.OpenGraph;
import cleave.core.kernels.DType;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.function.LongPredicate;
import java.util.function.LongSupplier;

/**
 * Runs one session's graphs in a thread of its own, one after another as they were asked for: a run
 * may take longer than the time between heartbeats.
 */
final class GraphThread implements GraphWork {
    private static final double NANOS_PER_S = 1e9;

    /** Learns what became of runs. */
    interface Answers {
        /** @param payload of a fetch; empty else */
        void computed(long run, ByteBuffer payload, double computeS);

        void failed(long run, String reason);
    }

    private interface Work {
        ByteBuffer done() throws GraphException;
    }

    private final GraphStore store;
    private final LongPredicate wanted;
    private final Answers answers;
    private final LongSupplier room;
    private final LongSupplier nanos;
    private final ExecutorService thread;

    /**
     * @param wanted asked before a run begins; if it is not, nothing is answered
     * @param room the bytes that a run may work in, when it begins
     */
    GraphThread(
            OpenGraph open,
            LongPredicate wanted,
            LongSupplier room,
            Answers answers,
            LongSupplier nanos) {
        this(new GraphStore(open), makeThread(), wanted, room, answers, nanos);
    }

    private GraphThread(
            GraphStore store,
            ExecutorService thread,
            LongPredicate wanted,
            LongSupplier room,
            Answers answers,
            LongSupplier nanos) {
        this.store = store;
        this.thread = thread;
        this.wanted = wanted;
        this.room = room;
        this.answers = answers;
        this.nanos = nanos;
    }

    /** The same thread with what it keeps, for the next session. */
    GraphThread next(LongPredicate wanted, LongSupplier room, Answers answers) {
        return new GraphThread(store, thread, wanted, room, answers, nanos);
    }

    private static ExecutorService makeThread() {
        return Executors.newSingleThreadExecutor(
                task -> {
                    Thread made = new Thread(task, "cleave-graphs");
                    made.setDaemon(true);
                    return made;
                });
    }

    @Override
    public void keepGraph(long id, ByteBuffer model) {
        tell(() -> store.keepGraph(id, model));
    }

    @Override
    public void keepArray(long id, DType dtype, ByteBuffer payload) {
        tell(() -> store.keepArray(id, dtype, payload));
    }

    @Override
    public void keepIndices(long id, ElementType type, ByteBuffer payload) {
        tell(() -> store.keepIndices(id, type, payload));
    }

    @Override
    public void join(long id, List<Long> ids) {
        tell(() -> store.join(id, ids));
    }

    @Override
    public void forget(List<Long> ids) {
        tell(() -> store.forget(ids));
    }

    @Override
    public void run(GraphOrder order) {
        ask(
                order.run,
                () -> {
                    store.run(order, room.getAsLong());
                    return ByteBuffer.allocate(0);
                });
    }

    @Override
    public void fetch(FetchOrder order) {
        ask(order.run, () -> store.fetch(order));
    }

    /** Forget all, after what was asked for; nothing may be asked for from now on. */
    void close() {
        thread.execute(store::close);
        thread.shutdown();
    }

    /** What fails here is not there when a run names it, which is told then. */
    private void tell(Runnable work) {
        thread.execute(
                () -> {
                    try {
                        work.run();
                    } catch (RuntimeException | OutOfMemoryError error) {
                        // Runs that need it say that it is missing.
                    }
                });
    }

    private void ask(long run, Work work) {
        thread.execute(
                () -> {
                    if (!wanted.test(run)) {
                        return;
                    }
                    ByteBuffer payload;
                    double computeS;
                    try {
                        long began = nanos.getAsLong();
                        payload = work.done();
                        computeS = (nanos.getAsLong() - began) / NANOS_PER_S;
                    } catch (GraphException error) {
                        answers.failed(run, error.getMessage());
                        return;
                    } catch (RuntimeException | LinkageError error) {
                        answers.failed(run, error.toString());
                        return;
                    } catch (OutOfMemoryError error) {
                        answers.failed(run, "not enough memory");
                        return;
                    }
                    answers.computed(run, payload, computeS);
                });
    }
}
