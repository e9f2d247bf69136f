package ai.onnxruntime;

public enum OrtLoggingLevel {
    ORT_LOGGING_LEVEL_FATAL
}
