package ai.onnxruntime;

import stub.Unknown;

public class TensorInfo implements ValueInfo {
    public final OnnxJavaType type;

    TensorInfo() {
        throw Unknown.body();
    }

    public long[] getShape() {
        throw Unknown.body();
    }
}
