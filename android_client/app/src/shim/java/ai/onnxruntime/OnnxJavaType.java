package ai.onnxruntime;

/** For tests, like {@link OrtEnvironment}. */
public enum OnnxJavaType {
    FLOAT(1, 4),
    INT64(7, 8),
    BOOL(9, 1),
    UINT8(2, 1),
    UNKNOWN(0, 0);

    /** ONNX's number of it. */
    final int onnx;

    final int itemBytes;

    OnnxJavaType(int onnx, int itemBytes) {
        this.onnx = onnx;
        this.itemBytes = itemBytes;
    }

    static OnnxJavaType of(int onnx) {
        for (OnnxJavaType type : values()) {
            if (type.onnx == onnx) {
                return type;
            }
        }
        return UNKNOWN;
    }
}
