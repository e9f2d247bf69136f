package cleave.core.graphs;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import cleave.core.kernels.DType;
import cleave.core.kernels.Numbers;
import cleave.core.protocol.Vectors;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import org.junit.Test;

public class GraphStoreTest {
    /** y = x + w, in Java: rows of three, and a w of that shape. */
    private static final class Sum implements GraphSession {
        @Override
        public List<GraphInput> inputs() {
            return Arrays.asList(
                    new GraphInput("x", new long[] {-1, 3}),
                    new GraphInput("w", new long[] {1, 3}));
        }

        @Override
        public List<String> outputs() {
            return Collections.singletonList("y");
        }

        @Override
        public List<Value> run(Map<String, Value> given, List<String> wanted) {
            Value x = given.get("x");
            FloatBuffer terms = given.get("w").data().asFloatBuffer();
            FloatBuffer from = x.data().asFloatBuffer();
            ByteBuffer y =
                    ByteBuffer.allocateDirect(4 * x.items()).order(ByteOrder.LITTLE_ENDIAN);
            for (int i = 0; i < x.items(); i++) {
                y.asFloatBuffer().put(i, from.get(i) + terms.get(i % 3));
            }
            return Collections.singletonList(new Value(ElementType.FLOAT32, x.shape(), y));
        }

        @Override
        public void close() {
            // It holds nothing.
        }
    }

    private static final long ROOM = 1 << 20; // bytes

    private final GraphStore store = new GraphStore(model -> new Sum());

    public GraphStoreTest() throws Exception {
        for (JsonObject vector : Vectors.read("graphs.json")) {
            if (Vectors.name(vector).equals("adding")) {
                store.keepGraph(1, ByteBuffer.wrap(Vectors.bytes(vector.get("model"))));
            }
        }
    }

    @Test
    public void arraysOfEveryDtypeAreWidenedForARunAndJoined() throws Exception {
        for (DType dtype : DType.values()) {
            keep(2, dtype, 1, 2, 3);
            keep(3, dtype, 4, 5, 6);
            keep(4, dtype, 0.5f, 0.25f, -1);
            store.join(5, Arrays.asList(2L, 3L));
            run(5, 4, 6, 24);
            assertArrayEquals(new float[] {1.5f, 2.25f, 2, 4.5f, 5.25f, 5}, fetch(6, 0, 2), 0);
            assertArrayEquals(new float[] {4, 5, 6}, fetch(5, 1, 1), 0);
            assertThrows("a part of another", GraphException.class, () -> fetch(2, 0, 1));
            store.forget(Arrays.asList(4L, 5L, 6L));
        }
    }

    @Test
    public void anOutputReplacesAnInputAndIsLostWhereTheRunFails() throws Exception {
        keep(2, DType.FP32, 1, 1, 1);
        run(2, 0, 3, 12); // zeros
        run(3, 2, 3, 12);
        assertArrayEquals(new float[] {2, 2, 2}, fetch(3, 0, 1), 0);
        assertThrows(GraphException.class, () -> run(3, 2, 3, 16)); // another size than was said
        assertThrows(GraphException.class, () -> fetch(3, 0, 1));
        assertThrows(GraphException.class, () -> run(3, 2, 4, 12));
    }

    @Test
    public void whatDoesNotFitIsRefused() throws Exception {
        keep(2, DType.FP32, 1, 1, 1, 1);
        keep(3, DType.FP32, 1, 1, 1);
        assertThrows(GraphException.class, () -> run(2, 3, 4, 16));
        assertThrows("zeros of an open shape", GraphException.class, () -> run(0, 3, 4, 12));
        assertThrows(GraphException.class, () -> run(9, 3, 4, 12));
        assertThrows("no such rows", GraphException.class, () -> fetch(3, 1, 1));
        assertThrows(GraphException.class, () -> fetch(3, Long.MAX_VALUE, 1));
        store.keepGraph(1, ByteBuffer.wrap(new byte[] {1, 2, 3}));
        assertThrows("no model", GraphException.class, () -> run(3, 3, 4, 12));
    }

    @Test
    public void sizesThatAreOpenFollowFromTheElements() throws Exception {
        GraphInput input = new GraphInput("x", new long[] {2, -1, 5});
        for (int batch = 0; batch < 20; batch++) {
            assertArrayEquals(new long[] {2, batch, 5}, input.shapeOf(10L * batch));
            long odd = 10L * batch + 1;
            assertThrows(GraphException.class, () -> input.shapeOf(odd));
        }
        assertEquals(10, input.fixed());
    }

    private void keep(long id, DType dtype, float... items) {
        ByteBuffer payload = Numbers.narrowed(items, dtype);
        payload.rewind();
        store.keepArray(id, dtype, payload);
    }

    private void run(long x, long w, long y, long bytes) throws GraphException {
        List<Long> outputs = Collections.singletonList(y);
        store.run(
                new GraphOrder(
                        7, 1, Arrays.asList(x, w), outputs, Collections.singletonList(bytes)),
                ROOM);
    }

    @Test
    public void aRunThatNeedsMoreMemoryThanThereIsIsRefused() throws Exception {
        keep(2, DType.FP32, 1, 2, 3);
        GraphOrder order =
                new GraphOrder(
                        7,
                        1,
                        Arrays.asList(2L, 0L),
                        Collections.singletonList(0L),
                        Collections.emptyList());
        assertThrows("24 bytes", GraphException.class, () -> store.run(order, 23));
        store.run(order, 24);
    }

    private float[] fetch(long array, long first, long rows) throws GraphException {
        ByteBuffer found = store.fetch(new FetchOrder(8, array, first, rows, 3, DType.FP32));
        return Numbers.widened(found, DType.FP32);
    }
}
