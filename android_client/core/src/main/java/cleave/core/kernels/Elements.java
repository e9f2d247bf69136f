package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.ShortBuffer;

/**
 * Elements of a payload of any dtype, read as fp32 and written rounded, in runs. For one thread.
 */
final class Elements {
    private final DType dtype;
    private final FloatBuffer floats; // null for 16-bit elements
    private final ShortBuffer halves; // null for fp32
    private short[] scratch = new short[0];

    /** @param payload from position to limit, at any alignment */
    Elements(ByteBuffer payload, DType dtype) {
        this.dtype = dtype;
        ByteBuffer bytes = payload.duplicate().order(ByteOrder.LITTLE_ENDIAN);
        floats = dtype == DType.FP32 ? bytes.asFloatBuffer() : null;
        halves = dtype == DType.FP32 ? null : bytes.asShortBuffer();
    }

    /** Copy so many elements from an index on into an array from an offset on, widened. */
    void read(int index, int count, float[] to, int at) {
        if (floats != null) {
            floats.position(index);
            floats.get(to, at, count);
            return;
        }
        short[] bits = room(count);
        halves.position(index);
        halves.get(bits, 0, count);
        if (dtype == DType.BF16) {
            for (int i = 0; i < count; i++) {
                to[at + i] = Float.intBitsToFloat(bits[i] << 16);
            }
        } else {
            for (int i = 0; i < count; i++) {
                to[at + i] = Numbers.fromFp16(bits[i]);
            }
        }
    }

    /** Copy so many elements of an array from an offset on to an index, each rounded once. */
    void write(int index, int count, float[] from, int at) {
        if (floats != null) {
            floats.position(index);
            floats.put(from, at, count);
            return;
        }
        short[] bits = room(count);
        if (dtype == DType.BF16) {
            for (int i = 0; i < count; i++) {
                bits[i] = Numbers.toBf16(from[at + i]);
            }
        } else {
            for (int i = 0; i < count; i++) {
                bits[i] = Numbers.toFp16(from[at + i]);
            }
        }
        halves.position(index);
        halves.put(bits, 0, count);
    }

    private short[] room(int count) {
        if (scratch.length < count) {
            scratch = new short[count];
        }
        return scratch;
    }
}
