package cleave.app;

import cleave.core.graphs.OpenGraph;

/** Looks whether ONNX Runtime is in this app: {@link OrtGraphs} cannot be loaded without it. */
final class OnnxRuntime {
    private OnnxRuntime() {}

    /** What runs graphs; null where the app was built without it. */
    static OpenGraph graphs(int threads) {
        try {
            // Its native library is loaded later, and not in the caller's thread.
            Class.forName(
                    "ai.onnxruntime.OrtEnvironment", false, OnnxRuntime.class.getClassLoader());
        } catch (ClassNotFoundException error) {
            return null;
        }
        return new OrtGraphs(threads);
    }
}
