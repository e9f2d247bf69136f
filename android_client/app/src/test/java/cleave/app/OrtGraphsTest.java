package cleave.app;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import cleave.core.graphs.ElementType;
import cleave.core.graphs.FetchOrder;
import cleave.core.graphs.GraphCheck;
import cleave.core.graphs.GraphException;
import cleave.core.graphs.GraphInput;
import cleave.core.graphs.GraphOrder;
import cleave.core.graphs.GraphSession;
import cleave.core.graphs.GraphStore;
import cleave.core.graphs.OpenGraph;
import cleave.core.graphs.SelfTest;
import cleave.core.graphs.Value;
import cleave.core.kernels.DType;
import cleave.core.kernels.Numbers;
import cleave.core.protocol.Vectors;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.junit.Test;

public class OrtGraphsTest {
    private static final List<String> Y = Collections.singletonList("y");

    private final OpenGraph graphs = new OrtGraphs(1);

    /** Rounds what goes in as TF32 does: a number has ten bits after its first. */
    private static final class Rounding implements GraphSession {
        private final GraphSession session;

        Rounding(GraphSession session) {
            this.session = session;
        }

        @Override
        public List<GraphInput> inputs() {
            return session.inputs();
        }

        @Override
        public List<String> outputs() {
            return session.outputs();
        }

        @Override
        public List<Value> run(Map<String, Value> given, List<String> wanted)
                throws GraphException {
            Map<String, Value> rounded = new HashMap<>();
            for (Map.Entry<String, Value> input : given.entrySet()) {
                Value value = input.getValue();
                ByteBuffer data = direct(value.data().remaining());
                for (int i = 0; i < data.capacity(); i += Integer.BYTES) {
                    data.putInt(i, value.data().getInt(i) & 0xffff_e000);
                }
                rounded.put(input.getKey(), new Value(value.type, value.shape(), data));
            }
            return session.run(rounded, wanted);
        }

        @Override
        public void close() {
            session.close();
        }
    }

    @Test
    public void itComputesInThePrecisionOfFp32() throws Exception {
        OpenGraph checked =
                model -> {
                    GraphCheck.check(model); // servers may send such graphs
                    return graphs.open(model);
                };
        double error = SelfTest.run(checked);
        assertTrue("" + error, error > 0 && error < SelfTest.LARGEST_ERROR / 5);
    }

    @Test
    public void whatRoundsItsInputsDoesNotPass() {
        GraphException error =
                assertThrows(
                        GraphException.class,
                        () -> SelfTest.run(model -> new Rounding(graphs.open(model))));
        assertTrue(error.getMessage(), error.getMessage().contains("off by"));
    }

    @Test
    public void aGraphIsRunForAnyBatchAndAgain() throws Exception {
        GraphSession session = graphs.open(model("adding"));
        assertEquals(Y, session.outputs());
        for (int batch = 1; batch < 5; batch++) {
            Map<String, Value> given = new HashMap<>();
            given.put("x", ramp(batch, 3));
            given.put("w", ramp(3));
            Value y = session.run(given, Y).get(0);
            assertArrayEquals(new long[] {batch, 3}, y.shape());
            for (int i = 0; i < y.items(); i++) {
                assertEquals(i + i % 3, y.data().asFloatBuffer().get(i), 0);
            }
        }
        session.close();
    }

    @Test
    public void bytesAreIntegersFrom0To255AndAreNotFetched() throws Exception {
        GraphStore store = new GraphStore(graphs);
        store.keepGraph(1, model("bytes"));
        ByteBuffer payload = ByteBuffer.allocate(256);
        for (int i = 0; i < 256; i++) {
            payload.put(i, (byte) i);
        }
        store.keepIndices(2, ElementType.ofIndices("uint8"), payload);
        for (int x = 2; x < 4; x++) { // as it was put, and as the first run kept it
            List<Long> outputs = Arrays.asList(x + 10L, x + 1L);
            store.run(
                    new GraphOrder(
                            7, 1, Collections.singletonList((long) x), outputs,
                            Arrays.asList(1024L, 256L)),
                    Long.MAX_VALUE);
            ByteBuffer y = store.fetch(new FetchOrder(8, x + 10L, 0, 64, 4, DType.FP32));
            float[] numbers = Numbers.widened(y, DType.FP32);
            assertEquals(256, numbers.length);
            for (int i = 0; i < 256; i++) {
                assertEquals(i, numbers[i], 0);
            }
            FetchOrder bytes = new FetchOrder(9, x, 0, 64, 4, DType.FP32);
            assertThrows(GraphException.class, () -> store.fetch(bytes));
        }
        store.keepIndices(5, ElementType.BOOL, payload);
        GraphOrder wrong =
                new GraphOrder(
                        7, 1, Collections.singletonList(5L), Arrays.asList(0L, 0L),
                        Collections.emptyList());
        assertThrows(GraphException.class, () -> store.run(wrong, Long.MAX_VALUE));
    }

    @Test
    public void whatCannotBeOpenedOrRunIsTold() throws Exception {
        ByteBuffer nonsense = ByteBuffer.wrap(new byte[] {1, 2, 3});
        GraphException refused =
                assertThrows(GraphException.class, () -> graphs.open(nonsense));
        assertTrue(refused.getMessage(), refused.getMessage().contains("refuses the graph"));
        GraphSession session = graphs.open(model("adding"));
        Map<String, Value> given = new HashMap<>();
        given.put("x", ramp(2, 5));
        given.put("w", ramp(3));
        GraphException failed =
                assertThrows(GraphException.class, () -> session.run(given, Y));
        assertTrue(failed.getMessage(), failed.getMessage().contains("cannot be run"));
        given.put("x", ramp(2, 3)); // and the session is as good as before
        assertEquals(6, session.run(given, Y).get(0).items());
        session.close();
    }

    private static ByteBuffer model(String name) throws Exception {
        for (JsonObject vector : Vectors.read("graphs.json")) {
            if (Vectors.name(vector).equals(name)) {
                return ByteBuffer.wrap(Vectors.bytes(vector.get("model")));
            }
        }
        throw new AssertionError("there is no graph " + name);
    }

    /** 0, 1, 2 ... */
    private static Value ramp(long... shape) {
        int items = 1;
        for (long size : shape) {
            items *= (int) size;
        }
        ByteBuffer data = direct(items * Float.BYTES);
        for (int i = 0; i < items; i++) {
            data.putFloat(i * Float.BYTES, i);
        }
        return new Value(ElementType.FLOAT32, shape, data);
    }

    private static ByteBuffer direct(int bytes) {
        return ByteBuffer.allocateDirect(bytes).order(ByteOrder.LITTLE_ENDIAN);
    }
}
