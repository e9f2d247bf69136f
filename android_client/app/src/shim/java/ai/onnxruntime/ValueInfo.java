package ai.onnxruntime;

/** For tests, like {@link OrtEnvironment}. */
public interface ValueInfo {}
