package ai.onnxruntime;

/** For tests, like {@link OrtEnvironment}. */
public enum OrtLoggingLevel {
    ORT_LOGGING_LEVEL_FATAL(4);

    private final int value;

    OrtLoggingLevel(int value) {
        this.value = value;
    }

    public int getValue() {
        return value;
    }
}
