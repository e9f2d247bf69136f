package ai.onnxruntime;

import com.sun.jna.Memory;
import com.sun.jna.Pointer;

/** For tests, like {@link OrtEnvironment}. */
public class TensorInfo implements ValueInfo {
    public final OnnxJavaType type;
    private final long[] shape;

    /** @param info a tensor's, which stays its owner's */
    TensorInfo(Pointer info) throws OrtException {
        type = OnnxJavaType.of(Api.smallNumber(Api.GET_TENSOR_ELEMENT_TYPE, info));
        long count = Api.number(Api.GET_DIMENSIONS_COUNT, info);
        Memory sizes = new Memory(Math.max(1, count) * Long.BYTES);
        Api.call(Api.GET_DIMENSIONS, info, sizes, count);
        shape = sizes.getLongArray(0, (int) count);
    }

    /** Sizes that are not fixed are -1. */
    public long[] getShape() {
        return shape.clone();
    }
}
