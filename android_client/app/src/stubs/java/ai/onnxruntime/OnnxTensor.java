package ai.onnxruntime;

import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import stub.Unknown;

public class OnnxTensor extends OnnxTensorLike {
    OnnxTensor() {}

    public static OnnxTensor createTensor(OrtEnvironment env, FloatBuffer data, long[] shape)
            throws OrtException {
        throw Unknown.body();
    }

    public static OnnxTensor createTensor(OrtEnvironment env, LongBuffer data, long[] shape)
            throws OrtException {
        throw Unknown.body();
    }

    public static OnnxTensor createTensor(
            OrtEnvironment env, ByteBuffer data, long[] shape, OnnxJavaType type)
            throws OrtException {
        throw Unknown.body();
    }

    public TensorInfo getInfo() {
        throw Unknown.body();
    }

    public ByteBuffer getByteBuffer() {
        throw Unknown.body();
    }
}
