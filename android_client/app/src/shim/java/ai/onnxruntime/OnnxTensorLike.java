package ai.onnxruntime;

import com.sun.jna.Pointer;

/** For tests, like {@link OrtEnvironment}. */
public abstract class OnnxTensorLike implements OnnxValue {
    final Pointer pointer;

    OnnxTensorLike(Pointer pointer) {
        this.pointer = pointer;
    }

    @Override
    public void close() {
        Api.release(Api.RELEASE_VALUE, pointer);
    }
}
