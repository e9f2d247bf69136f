package ai.onnxruntime;

public enum OnnxJavaType {
    FLOAT,
    INT64,
    BOOL,
    UINT8
}
