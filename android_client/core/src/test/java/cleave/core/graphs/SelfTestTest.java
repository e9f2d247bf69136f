package cleave.core.graphs;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import org.junit.Test;

/** What does not compute; what does, exactly or not, is tried in the app's tests. */
public class SelfTestTest {
    /** Returns one array for whatever is asked for. */
    private static final class Constant implements GraphSession {
        private final ByteBuffer data;
        int closed;

        Constant(float value, int items) {
            data =
                    ByteBuffer.allocateDirect(items * Float.BYTES)
                            .order(ByteOrder.LITTLE_ENDIAN);
            for (int i = 0; i < items; i++) {
                data.putFloat(i * Float.BYTES, value);
            }
        }

        @Override
        public List<GraphInput> inputs() {
            return Collections.emptyList();
        }

        @Override
        public List<String> outputs() {
            return Collections.emptyList();
        }

        @Override
        public List<Value> run(Map<String, Value> given, List<String> wanted) {
            long[] shape = {data.remaining() / Float.BYTES};
            return Collections.nCopies(
                    wanted.size(), new Value(ElementType.FLOAT32, shape, data));
        }

        @Override
        public void close() {
            closed += 1;
        }
    }

    @Test
    public void otherNumbersSizesOrNoneAreRefused() {
        int items = 8 * 32; // of the first output
        for (Constant session :
                new Constant[] {
                    new Constant(0, items),
                    new Constant(Float.NaN, items),
                    new Constant(Float.POSITIVE_INFINITY, items),
                    new Constant(0, items - 1),
                }) {
            List<ByteBuffer> models = new ArrayList<>();
            GraphException error =
                    assertThrows(
                            GraphException.class,
                            () ->
                                    SelfTest.run(
                                            model -> {
                                                models.add(model);
                                                return session;
                                            }));
            assertTrue(error.getMessage(), error.getMessage().contains("(deep products)"));
            assertEquals(models.size(), session.closed);
        }
    }

    @Test
    public void whatIsWrittenIsAGraph() throws Exception {
        GraphCheck.check(
                new GraphWriter()
                        .input("x", GraphWriter.BATCH, 300)
                        .node("Relu", "y", "x")
                        .output("y", GraphWriter.BATCH, 300)
                        .model());
    }

    @Test
    public void whatCannotBeRunIsToldAsItIs() {
        GraphException refused = new GraphException("no such operation");
        GraphException told =
                assertThrows(
                        GraphException.class,
                        () ->
                                SelfTest.run(
                                        model -> {
                                            throw refused;
                                        }));
        assertEquals(refused, told);
    }
}
