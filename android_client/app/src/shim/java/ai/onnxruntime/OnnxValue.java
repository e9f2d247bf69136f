package ai.onnxruntime;

/** For tests, like {@link OrtEnvironment}. */
public interface OnnxValue extends AutoCloseable {
    @Override
    void close();
}
