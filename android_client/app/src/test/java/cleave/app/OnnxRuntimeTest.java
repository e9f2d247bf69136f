package cleave.app;

import static org.junit.Assert.assertNull;

import org.junit.Test;

/** To be run without ONNX Runtime. */
public class OnnxRuntimeTest {
    @Test
    public void whereItIsMissingNothingRunsGraphs() {
        assertNull(OnnxRuntime.graphs(1));
    }
}
