package cleave.core.session;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertTrue;

import cleave.core.graphs.GraphException;
import cleave.core.graphs.GraphInput;
import cleave.core.graphs.GraphSession;
import cleave.core.graphs.Value;
import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.Kernel;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.Vectors;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import org.junit.After;
import org.junit.Before;
import org.junit.Test;

public class SessionGraphsTest {
    private static final long GRAPH = 1;
    private static final long ONES = 2;
    private static final int SIDE = 3; // of the array of ones
    private static final long BYTES = 4 * SIDE * SIDE; // of an output

    /** A graph that waits to be let go on, and can be made to fail. It returns its first input. */
    private static final class SlowGraph implements GraphSession {
        final Semaphore begun = new Semaphore(0);
        final Semaphore mayEnd = new Semaphore(0);
        final Semaphore closed = new Semaphore(0);
        volatile GraphException failsWith;
        volatile boolean outOfMemory;

        @Override
        public List<GraphInput> inputs() {
            return Arrays.asList(
                    new GraphInput("x", new long[] {-1, SIDE}),
                    new GraphInput("w", new long[] {SIDE}));
        }

        @Override
        public List<String> outputs() {
            return Collections.singletonList("y");
        }

        @Override
        public List<Value> run(Map<String, Value> given, List<String> wanted)
                throws GraphException {
            begun.release();
            mayEnd.acquireUninterruptibly();
            if (outOfMemory) {
                throw new OutOfMemoryError("in a test");
            }
            if (failsWith != null) {
                throw failsWith;
            }
            return Collections.singletonList(given.get("x"));
        }

        @Override
        public void close() {
            closed.release();
        }
    }

    private static final class NoEvents implements Session.Events {
        @Override
        public void welcomed(Welcome welcome) {
            // It is all the same here.
        }

        @Override
        public void measured(LinkRates rates) {
            throw new AssertionError("nobody asked");
        }

        @Override
        public void kernelLost(String reason) {
            throw new AssertionError(reason);
        }
    }

    private FakeServer server = new FakeServer(); // of the latest session
    private final SlowGraph graph = new SlowGraph();
    private final Kernel kernel = CpuKernel.small();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final ExecutorService kernelThread = Executors.newSingleThreadExecutor();
    private final ScheduledExecutorService timer = Executors.newScheduledThreadPool(2);
    private Session session = session(null, "");
    private Future<Ending> running;

    private Session session(Kept before, String holds) {
        Message hello =
                Message.of(MessageType.HELLO)
                        .with("role", "device")
                        .with("version", 1)
                        .with("memory_bytes", 16 << 20)
                        .with("features", new String[] {"graphs", "keeps"})
                        .with("holds", holds)
                        .build();
        return new Session(
                server,
                kernel,
                kernelThread,
                hello,
                timer,
                System::nanoTime,
                new NoEvents(),
                model -> graph,
                before);
    }

    private void join(String arrays) throws Exception {
        running = threads.submit(session::run);
        assertSame(MessageType.HELLO, server.next().type);
        server.say(
                Message.of(MessageType.WELCOME)
                        .with("device", 7)
                        .with("heartbeat_s", 0.2)
                        .with("server", "S1")
                        .with("features", new String[] {"graphs", "keeps"})
                        .with("arrays", arrays)
                        .build());
    }

    /** Cut the connection, and begin a session with what the last one kept. */
    private void comeBack() throws Exception {
        server.cut();
        assertSame(End.LOST, running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS).end);
        Kept kept = session.take();
        server = new FakeServer();
        session = session(kept, kept.arrays.of);
    }

    @Before
    public void begin() throws Exception {
        join("A");
        server.say(
                Message.of(MessageType.GRAPH)
                        .with("id", GRAPH)
                        .payload(ByteBuffer.wrap(someModel()))
                        .build());
        server.put(ONES, SIDE);
    }

    @After
    public void end() throws InterruptedException {
        graph.mayEnd.release(1000);
        timer.shutdownNow();
        threads.shutdownNow();
        threads.awaitTermination(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        kernelThread.execute(kernel::close);
        kernelThread.shutdown();
    }

    /** One that the check lets through; what it does is of no matter here. */
    private static byte[] someModel() throws Exception {
        for (JsonObject vector : Vectors.read("graphs.json")) {
            if (vector.get("is_graph").getAsBoolean()) {
                return Vectors.bytes(vector.get("model"));
            }
        }
        throw new AssertionError("there is no graph");
    }

    private void run(long run, long output) {
        server.say(
                Message.of(MessageType.RUN_GRAPH)
                        .with("id", run)
                        .with("graph", GRAPH)
                        .with("inputs", Arrays.asList(ONES, 0L))
                        .with("outputs", Collections.singletonList(output))
                        .with("output_bytes", Collections.singletonList(BYTES))
                        .with("flops", 9)
                        .build());
    }

    private void fetch(long run, long array, long columns) {
        server.say(
                Message.of(MessageType.FETCH)
                        .with("id", run)
                        .with("array", array)
                        .with("first_row", 0)
                        .with("rows", 1)
                        .with("columns", columns)
                        .with("out", "fp32")
                        .build());
    }

    @Test
    public void aRunIsAnsweredAndItsOutputFetched() throws Exception {
        graph.mayEnd.release();
        run(5, 10);
        fetch(6, 10, BYTES / 4);
        Message computed = server.next();
        assertSame(MessageType.COMPUTED, computed.type);
        assertEquals(5, computed.integer("id"));
        Message result = server.next();
        assertEquals(6, result.integer("id"));
        ByteBuffer payload = result.payload().order(ByteOrder.LITTLE_ENDIAN);
        assertEquals(BYTES, payload.remaining());
        for (int i = 0; i < BYTES; i += 4) {
            assertEquals(1, payload.getFloat(payload.position() + i), 0);
        }
        assertEquals(9, session.counts().flops, 0);
    }

    @Test
    public void heartbeatsAndProductsDoNotWaitForAGraph() throws Exception {
        run(5, 10);
        graph.begun.acquire();
        for (int i = 0; i < 3; i++) {
            assertSame(MessageType.HEARTBEAT, server.nextOfAll().type);
        }
        server.run(6, ONES);
        assertEquals(6, server.next().integer("id"));
        graph.mayEnd.release();
        assertEquals(5, server.next().integer("id"));
    }

    @Test
    public void whatIsCancelledIsNeitherRunNorAnswered() throws Exception {
        run(5, 10);
        graph.begun.acquire();
        run(6, 11);
        run(7, 12);
        server.say(
                Message.of(MessageType.CANCEL).with("ids", Arrays.asList(5L, 6L)).build());
        graph.mayEnd.release(2);
        assertEquals(7, server.next().integer("id"));
        assertEquals("only the first and the last began", 1, graph.begun.drainPermits());
    }

    @Test
    public void whatFailsIsATaskErrorAndTheSessionGoesOn() throws Exception {
        graph.mayEnd.release(4);
        graph.failsWith = new GraphException("no such row");
        run(5, 10);
        assertEquals("no such row", reason(5));
        fetch(6, 10, BYTES / 4);
        assertTrue(reason(6).contains("not here"));
        graph.failsWith = null;
        graph.outOfMemory = true;
        run(7, 11);
        assertEquals("not enough memory", reason(7));
        graph.outOfMemory = false;
        run(8, 12);
        assertSame(MessageType.COMPUTED, server.next().type);
    }

    private String reason(long run) throws Exception {
        Message answer = server.next();
        assertSame(MessageType.TASK_ERROR, answer.type);
        assertEquals(run, answer.integer("id"));
        return answer.text("reason");
    }

    @Test
    public void whatTheWireCannotSendIsATaskError() throws Exception {
        server.put(3, 512); // 512 kB, and 1 MB as fp32
        fetch(5, 3, 512 * 512);
        assertTrue(reason(5).contains("1048576"));
    }

    /** Run it once, so that it is open. */
    private void runOnce() throws Exception {
        graph.mayEnd.release();
        run(5, 10);
        assertSame(MessageType.COMPUTED, server.next().type);
    }

    private void assertGivenBack() throws InterruptedException {
        assertTrue(graph.closed.tryAcquire(FakeServer.PATIENCE_S, TimeUnit.SECONDS));
    }

    @Test
    public void aSessionThatEndsGivesBackItsGraphs() throws Exception {
        runOnce();
        server.say(Message.of(MessageType.BYE).with("reason", "closing").build());
        assertSame(End.BYE, running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS).end);
        assertNull(session.take());
        assertGivenBack();
    }

    @Test
    public void aDrainedSessionGivesBackItsGraphs() throws Exception {
        runOnce();
        session.drain();
        server.cut();
        running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        assertNull(session.take());
        assertGivenBack();
    }

    @Test
    public void whatALostConnectionLeftIsThereInTheNextSession() throws Exception {
        runOnce();
        run(6, 11);
        graph.begun.acquire(2); // of which the second has not ended when the connection is lost
        comeBack();
        join("A");
        Message held = server.next();
        assertSame(MessageType.HELD, held.type);
        assertEquals(Arrays.asList(GRAPH, ONES, 10L), held.ids("ids"));
        graph.mayEnd.release(2);
        run(6, 11); // the same names mean others now
        assertSame(MessageType.COMPUTED, server.next().type);
        fetch(7, 10, BYTES / 4);
        assertEquals(7, server.next().integer("id"));
        session.leave("stopped");
        assertNull(session.take());
        assertGivenBack();
    }

    @Test
    public void whatTheServerDoesNotKnowIsGivenBack() throws Exception {
        runOnce();
        comeBack();
        join("B");
        assertGivenBack();
        fetch(6, 10, BYTES / 4);
        assertTrue(reason(6).contains("not here"));
    }

    @Test
    public void whatIsKeptIsKeptUntilAServerWelcomesTheDevice() throws Exception {
        runOnce();
        comeBack();
        running = threads.submit(session::run);
        assertEquals("A", server.next().text("holds"));
        comeBack();
        running = threads.submit(session::run);
        assertEquals("A", server.next().text("holds"));
        server.say(
                Message.of(MessageType.ERROR).with("code", "limit").with("message", "").build());
        running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        assertEquals("A", session.take().arrays.of);
    }

    @Test
    public void whatIsKeptIsGivenBackOnDemand() throws Exception {
        runOnce();
        server.cut();
        running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        session.forget();
        assertGivenBack();
        assertNull(session.take());
    }
}
