package ai.onnxruntime;

import stub.Unknown;

public abstract class OnnxTensorLike implements OnnxValue {
    OnnxTensorLike() {}

    @Override
    public void close() {
        throw Unknown.body();
    }
}
