package ai.onnxruntime;

import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.util.Arrays;

/** For tests, like {@link OrtEnvironment}: buffers are direct ones. */
public class OnnxTensor extends OnnxTensorLike {
    private final TensorInfo info;
    private final Buffer data; // so that it stays as long as this; null where ORT has its own

    OnnxTensor(Pointer pointer, Buffer data) throws OrtException {
        super(pointer);
        this.data = data;
        Pointer found = Api.made(Api.GET_TENSOR_TYPE_AND_SHAPE, pointer);
        info = new TensorInfo(found);
        Api.release(Api.RELEASE_TENSOR_INFO, found);
    }

    public static OnnxTensor createTensor(OrtEnvironment env, FloatBuffer data, long[] shape)
            throws OrtException {
        return of(data, shape, OnnxJavaType.FLOAT);
    }

    public static OnnxTensor createTensor(OrtEnvironment env, LongBuffer data, long[] shape)
            throws OrtException {
        return of(data, shape, OnnxJavaType.INT64);
    }

    public static OnnxTensor createTensor(
            OrtEnvironment env, ByteBuffer data, long[] shape, OnnxJavaType type)
            throws OrtException {
        return of(data, shape, type);
    }

    public TensorInfo getInfo() {
        return info;
    }

    /** A copy of its elements. */
    public ByteBuffer getByteBuffer() {
        long items = Arrays.stream(info.getShape()).reduce(1, (product, size) -> product * size);
        int bytes = (int) items * info.type.itemBytes;
        ByteBuffer copy = ByteBuffer.allocate(bytes);
        try {
            Pointer elements = Api.made(Api.GET_TENSOR_MUTABLE_DATA, pointer);
            copy.put(elements.getByteBuffer(0, bytes)).rewind();
        } catch (OrtException error) {
            throw new IllegalStateException(error);
        }
        return copy;
    }

    private static OnnxTensor of(Buffer data, long[] shape, OnnxJavaType type)
            throws OrtException {
        long from = (long) data.position() * type.itemBytes;
        Pointer elements = Native.getDirectBufferPointer(data).share(from);
        long bytes = (long) data.remaining() * type.itemBytes;
        Pointer cpu = Api.made(Api.CREATE_CPU_MEMORY_INFO, 0, 0);
        try {
            return new OnnxTensor(
                    Api.made(
                            Api.CREATE_TENSOR_WITH_DATA,
                            cpu,
                            elements,
                            bytes,
                            shape,
                            (long) shape.length,
                            type.onnx),
                    data);
        } finally {
            Api.release(Api.RELEASE_MEMORY_INFO, cpu);
        }
    }
}
