package cleave.core.device;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import cleave.core.graphs.GraphWork;
import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.ProtocolException;
import cleave.core.protocol.Vectors;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import org.junit.Test;

public class DeviceCoreTest {
    /** What a core wanted done. */
    private static final class Recorder implements Shell {
        final List<Message> sent = new ArrayList<>();
        final List<Matrix> held = new ArrayList<>();
        final List<Matrix> forgotten = new ArrayList<>();
        final List<Product> products = new ArrayList<>();
        final RecordedGraphs store = new RecordedGraphs();

        @Override
        public void send(Message message) {
            sent.add(message);
        }

        @Override
        public void hold(Matrix matrix) {
            held.add(matrix);
        }

        @Override
        public void forget(Matrix matrix) {
            forgotten.add(matrix);
        }

        @Override
        public GraphWork graphs() {
            return store;
        }

        @Override
        public void compute(long run, Product product) {
            products.add(product);
        }

        Recorder take(List<Action> actions) {
            for (Action action : actions) {
                action.in(this);
            }
            return this;
        }
    }

    @Test
    public void faultsAreAnsweredAsTheProtocolSays() throws Exception {
        for (JsonObject vector : Vectors.read("faults.json")) {
            assertEquals(
                    Vectors.name(vector), vector.get("answer").getAsString(), answer(vector));
        }
    }

    @Test
    public void productsAreTheBytesOfTheVectors() throws Exception {
        for (JsonObject vector : Vectors.read("matmul.json")) {
            DeviceCore core = welcomed(1 << 30);
            Recorder shell = new Recorder();
            for (JsonElement put : vector.getAsJsonArray("put")) {
                shell.take(core.received(message("put", put.getAsJsonObject(), put)));
            }
            JsonObject run = vector.getAsJsonObject("run");
            shell.take(core.received(message("run", run, null)));
            ByteBuffer payload = CpuKernel.small().multiply(shell.products.get(0));
            shell.take(core.computed(run.get("id").getAsLong(), payload, 0.5));
            JsonObject wanted = vector.getAsJsonObject("result");
            Message result = shell.sent.get(0);
            String name = Vectors.name(vector);
            assertEquals(name, wanted.get("rows").getAsLong(), result.integer("rows"));
            assertEquals(name, wanted.get("columns").getAsLong(), result.integer("columns"));
            assertEquals(name, wanted.get("dtype").getAsString(), result.text("dtype"));
            assertEquals(
                    name,
                    ByteBuffer.wrap(Vectors.bytes(wanted.get("payload"))),
                    result.payload());
        }
    }

    @Test
    public void memoryIsCountedFromPutToDropAndFromRunToAnswer() throws Exception {
        DeviceCore core = welcomed(1000);
        Recorder shell = new Recorder().take(core.received(put(1, 2, 3)));
        shell.take(core.received(put(2, 3, 2)));
        assertEquals(48, core.takenBytes());
        shell.take(core.received(run(7, 1, 2)));
        assertEquals(64, core.takenBytes());
        assertFalse(core.isIdle());
        shell.take(core.received(drop(1, 2, 3)));
        assertEquals(16, core.takenBytes());
        assertEquals(shell.held, shell.forgotten);
        assertTrue("a computation goes on with what was dropped", core.wants(7));
        shell.take(core.computed(7, ByteBuffer.allocate(16), 0.1));
        assertEquals(0, core.takenBytes());
        assertTrue(core.isIdle());
        assertEquals(1, core.blocks());
        assertEquals(24.0, core.flops(), 0);
    }

    @Test
    public void whatIsCancelledIsNotAnswered() throws Exception {
        DeviceCore core = welcomed(1000);
        Recorder shell = new Recorder().take(core.received(put(1, 2, 2)));
        shell.take(core.received(run(7, 1, 1)));
        shell.take(core.received(run(8, 1, 1)));
        Message cancel =
                Message.of(MessageType.CANCEL).with("ids", Arrays.asList(7L, 99L)).build();
        shell.take(core.received(cancel));
        assertFalse(core.wants(7));
        shell.take(core.computed(7, ByteBuffer.allocate(16), 0.1));
        shell.take(core.failed(7, "no"));
        assertEquals(Collections.emptyList(), shell.sent);
        shell.take(core.failed(8, "no"));
        assertSame(MessageType.TASK_ERROR, shell.sent.get(0).type);
        assertEquals(16, core.takenBytes());
    }

    @Test
    public void moreRunsThanTheProtocolAllowsEndTheSession() throws Exception {
        DeviceCore core = welcomed(1 << 30);
        core.received(put(1, 2, 2));
        for (int run = 0; run < 4096; run++) {
            core.received(run(run, 1, 1));
        }
        assertThrows(ProtocolException.class, () -> core.received(run(4096, 1, 1)));
    }

    @Test
    public void shapesBeyondSixtyFourBitsAreRefused() throws Exception {
        DeviceCore core = welcomed(1 << 30);
        long huge = 1L << 62;
        core.received(put(1, huge, 0));
        core.received(put(2, 0, huge));
        Recorder shell = new Recorder().take(core.received(run(1, 1, 2)));
        assertSame(MessageType.TASK_ERROR, shell.sent.get(0).type);
        Message wrong = putOf(3, 1L << 32, 1L << 32, 0);
        assertThrows(ProtocolException.class, () -> core.received(wrong));
    }

    @Test
    public void drainIsSaidOnceAndEndForgetsEverything() throws Exception {
        DeviceCore core = welcomed(1000);
        Recorder shell = new Recorder().take(core.received(put(1, 2, 2)));
        shell.take(core.received(run(1, 1, 1)));
        shell.take(core.drain()).take(core.drain());
        assertEquals(1, shell.sent.size());
        shell.take(core.end(null));
        assertEquals(shell.held, shell.forgotten);
        assertEquals(0, core.takenBytes());
        assertFalse(core.wants(1));
    }

    @Test
    public void whatWasNotAgreedOnIsRefused() throws Exception {
        DeviceCore core = new DeviceCore(1000, false, Arrays.asList("coding"), null);
        core.received(Message.of(MessageType.WELCOME).with("device", 1).build());
        Message order = Message.of(MessageType.CODE_RESULTS).build();
        assertThrows(ProtocolException.class, () -> core.received(order));
        assertFalse(core.codesResults());
    }

    @Test
    public void outputsCountFromTheirRunToTheirDropAndOnceThoughTheyAreReplaced() throws Exception {
        DeviceCore core = welcomed(1000, Arrays.asList("graphs"));
        Recorder shell = new Recorder().take(core.received(put(1, 2, 2)));
        Message graph =
                Message.of(MessageType.GRAPH)
                        .with("id", 2)
                        .payload(ByteBuffer.allocate(10))
                        .build();
        shell.take(core.received(graph));
        shell.take(core.received(runGraph(1, Arrays.asList(1L, 0L), 3)));
        assertEquals(16 + 10 + 32, core.takenBytes());
        shell.take(core.computed(1, ByteBuffer.allocate(0), 0.5));
        shell.take(core.received(runGraph(2, Arrays.asList(1L, 3L), 3)));
        assertEquals(16 + 10 + 32, core.takenBytes());
        assertSame(MessageType.COMPUTED, shell.sent.get(0).type);
        shell.take(core.received(drop(1, 2, 3)));
        assertEquals(0, core.takenBytes());
        assertEquals(
                Arrays.asList(
                        "graph 2",
                        "array 1",
                        "run [1, 0] to [3]",
                        "run [1, 3] to [3]",
                        "forget [1, 2, 3]"),
                shell.store.asked);
        assertEquals("the kernel has no use for it", Collections.emptyList(), shell.held);
    }

    private static final List<String> KEEPING = Arrays.asList("graphs", "keeps");

    /** A device with an array and a graph. */
    private static DeviceCore withGraph() throws ProtocolException {
        DeviceCore core = welcomed(1000, KEEPING);
        core.received(put(1, 2, 2));
        core.received(graph());
        return core;
    }

    private static Message graph() {
        ByteBuffer model = ByteBuffer.allocate(10);
        return Message.of(MessageType.GRAPH).with("id", 2).payload(model).build();
    }

    /** Let a run make an output. */
    private static void make(DeviceCore core, long run, long input, long output)
            throws ProtocolException {
        core.received(runGraph(run, Arrays.asList(input), output));
        core.computed(run, ByteBuffer.allocate(0), 0.5);
    }

    private static DeviceCore next(DeviceCore before) {
        return new DeviceCore(1000, false, KEEPING, before.held());
    }

    @Test
    public void ofOutputsOnlyThoseThatTheirRunsHaveMadeAreKept() throws Exception {
        DeviceCore core = withGraph();
        make(core, 1, 1, 10);
        make(core, 2, 1, 11);
        make(core, 3, 1, 12);
        make(core, 4, 10, 10); // in its place
        core.received(runGraph(5, Arrays.asList(11L), 11)); // not answered
        core.received(runGraph(6, Arrays.asList(1L), 13));
        core.failed(6, "not enough memory");
        core.received(runGraph(7, Arrays.asList(1L), 14));
        core.received(Message.of(MessageType.CANCEL).with("ids", Arrays.asList(7L)).build());
        core.received(runGraph(8, Arrays.asList(12L, 99L), 12)); // cannot be run
        Recorder next = new Recorder();
        next.take(next(core).received(welcome(KEEPING, "A")));
        assertEquals(Arrays.asList(1L, 2L, 10L), next.sent.get(0).ids("ids"));
        Recorder last = new Recorder().take(core.end(core.held()));
        assertEquals(Arrays.asList("forget [11, 12, 13, 14]"), last.store.asked);
        assertEquals(0, core.takenBytes());
    }

    @Test
    public void whatIsKeptIsThereInTheNextSession() throws Exception {
        DeviceCore before = withGraph();
        make(before, 1, 1, 3);
        DeviceCore core = next(before);
        Recorder shell = new Recorder().take(core.received(welcome(KEEPING, "A")));
        assertSame(MessageType.HELD, shell.sent.get(0).type);
        assertEquals(16 + 10 + 32, core.takenBytes());
        shell.take(core.received(runGraph(1, Arrays.asList(1L, 3L), 4)));
        assertEquals(Arrays.asList("run [1, 3] to [4]"), shell.store.asked);
        shell.take(core.received(drop(1, 2, 3)));
        assertEquals("forget [1, 2, 3]", shell.store.asked.get(1));
    }

    @Test
    public void whatIsKeptIsDroppedWhereTheServerDoesNotKnowIt() throws Exception {
        List<Message> welcomes =
                Arrays.asList(
                        welcome(KEEPING, "B"),
                        welcome(KEEPING, ""),
                        welcome(Arrays.asList("graphs"), "A"));
        for (Message welcome : welcomes) {
            DeviceCore before = withGraph();
            make(before, 1, 1, 3);
            DeviceCore core = next(before);
            Recorder shell = new Recorder().take(core.received(welcome));
            assertEquals(Arrays.asList("forget [1, 2, 3]"), shell.store.asked);
            assertEquals(Collections.emptyList(), shell.sent);
            assertEquals(0, core.takenBytes());
            core.received(graph());
        }
    }

    @Test
    public void nothingIsKeptWithoutAGraphOrTheFeatureNorWhileDraining() throws Exception {
        DeviceCore draining = withGraph();
        draining.drain();
        assertNull(draining.held());
        DeviceCore plain = welcomed(1000, Arrays.asList("graphs"));
        plain.received(graph());
        assertNull(plain.held());
        DeviceCore empty = welcomed(1000, KEEPING);
        empty.received(put(1, 2, 2));
        assertNull(empty.held());
    }

    @Test
    public void whatAKernelHasIsNotKept() throws Exception {
        DeviceCore core = withGraph();
        core.received(put(3, 2, 2));
        Recorder shell = new Recorder().take(core.received(run(1, 3, 3)));
        shell.take(core.end(core.held()));
        assertEquals(shell.held, shell.forgotten);
        assertEquals(Collections.emptyList(), shell.store.asked);
    }

    private static Message runGraph(long id, List<Long> inputs, long output) {
        return Message.of(MessageType.RUN_GRAPH)
                .with("id", id)
                .with("graph", 2)
                .with("inputs", inputs)
                .with("outputs", Collections.singletonList(output))
                .with("output_bytes", Collections.singletonList(32L))
                .build();
    }

    private static String answer(JsonObject vector) throws Exception {
        JsonElement feature = vector.get("feature");
        String of = feature == null ? "measure" : feature.getAsString();
        List<String> features = Arrays.asList("coding", of);
        DeviceCore core = welcomed(vector.get("memory_bytes").getAsLong(), features);
        Recorder last = null;
        for (JsonElement element : vector.getAsJsonArray("receive")) {
            if (last != null) {
                assertEquals(Vectors.name(vector), Collections.emptyList(), last.sent);
            }
            try {
                Message message = Vectors.message(element.getAsJsonObject());
                last = new Recorder().take(core.received(message));
            } catch (ProtocolException error) {
                return "error";
            }
        }
        return last.sent.isEmpty() ? "none" : last.sent.get(0).type.wireName;
    }

    private static DeviceCore welcomed(long memoryBytes) throws ProtocolException {
        return welcomed(memoryBytes, Arrays.asList("coding"));
    }

    private static DeviceCore welcomed(long memoryBytes, List<String> features)
            throws ProtocolException {
        DeviceCore core = new DeviceCore(memoryBytes, false, features, null);
        core.received(welcome(features, "A"));
        return core;
    }

    private static Message welcome(List<String> features, String arrays) {
        return Message.of(MessageType.WELCOME)
                .with("device", 1)
                .with("features", features.toArray(new String[0]))
                .with("arrays", arrays)
                .build();
    }

    private static Message message(String type, JsonObject fields, JsonElement payload)
            throws ProtocolException {
        JsonObject parts = new JsonObject();
        parts.addProperty("type", type);
        parts.add("fields", fields);
        if (payload != null) {
            parts.add("payload", payload.getAsJsonObject().get("payload"));
        }
        return Vectors.message(parts);
    }

    private static Message put(long id, long rows, long columns) {
        return putOf(id, rows, columns, (int) (rows * columns * 4));
    }

    private static Message putOf(long id, long rows, long columns, int bytes) {
        return Message.of(MessageType.PUT)
                .with("id", id)
                .with("rows", rows)
                .with("columns", columns)
                .with("dtype", "fp32")
                .payload(ByteBuffer.allocate(bytes))
                .build();
    }

    private static Message run(long id, long a, long b) {
        return Message.of(MessageType.RUN)
                .with("id", id)
                .with("op", "matmul")
                .with("inputs", Arrays.asList(a, b))
                .with("transpose_a", false)
                .with("transpose_b", false)
                .with("out", "fp32")
                .build();
    }

    private static Message drop(Long... ids) {
        return Message.of(MessageType.DROP).with("ids", Arrays.asList(ids)).build();
    }

    private static Message drop(int a, int b, int c) {
        return drop((long) a, (long) b, (long) c);
    }
}
