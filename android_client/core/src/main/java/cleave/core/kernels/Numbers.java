package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** 16-bit floats: widened exactly, rounded to nearest, ties to even. */
public final class Numbers {
    private static final int INFINITY = 0x7f800000;
    private static final int FP16_OVERFLOW = 0x47800000; // 65536
    private static final int FP16_NORMAL = 0x38800000; // 2^-14
    private static final float FP16_SMALLEST = 0x1p-24f;

    private Numbers() {}

    /** The fp32 number of a bf16's bits. */
    public static float fromBf16(short bits) {
        return Float.intBitsToFloat(bits << 16);
    }

    /** The bits of the bf16 nearest to an fp32 number. */
    public static short toBf16(float value) {
        int bits = Float.floatToRawIntBits(value);
        if ((bits & 0x7fffffff) > INFINITY) {
            return (short) ((bits >>> 16) | 0x40);
        }
        return (short) ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16);
    }

    /** The number of an fp16's bits. */
    public static float fromFp16(short bits) {
        int sign = (bits & 0x8000) << 16;
        int exponent = (bits >> 10) & 0x1f;
        int fraction = bits & 0x3ff;
        if (exponent == 0) {
            float magnitude = fraction * FP16_SMALLEST;
            return sign == 0 ? magnitude : -magnitude;
        }
        int wide = exponent == 0x1f ? INFINITY : (exponent + 112) << 23;
        return Float.intBitsToFloat(sign | wide | (fraction << 13));
    }

    /** The bits of the fp16 nearest to an fp32 number. */
    public static short toFp16(float value) {
        int bits = Float.floatToRawIntBits(value);
        int sign = (bits >>> 16) & 0x8000;
        int magnitude = bits & 0x7fffffff;
        if (magnitude > INFINITY) {
            return (short) (sign | 0x7e00);
        }
        if (magnitude >= FP16_OVERFLOW) {
            return (short) (sign | 0x7c00);
        }
        if (magnitude < FP16_NORMAL) {
            // Adding 0.5 in fp32 rounds at the last place of an fp16 of that size.
            float shifted = Float.intBitsToFloat(magnitude) + 0.5f;
            return (short) (sign | (Float.floatToRawIntBits(shifted) - 0x3f000000));
        }
        int rebiased = magnitude - 0x38000000;
        return (short) (sign | ((rebiased + 0xfff + ((magnitude >>> 13) & 1)) >>> 13));
    }

    /** All elements of a payload, widened to fp32, in an array of their own. */
    public static float[] widened(ByteBuffer payload, DType dtype) {
        float[] wide = new float[payload.remaining() / dtype.itemBytes];
        new Elements(payload, dtype).read(0, wide.length, wide, 0);
        return wide;
    }

    /**
     * fp32 elements as {@code dtype}, each rounded once, in a little-endian buffer of their own.
     */
    public static ByteBuffer narrowed(float[] values, DType dtype) {
        ByteBuffer payload =
                ByteBuffer.allocate(values.length * dtype.itemBytes).order(ByteOrder.LITTLE_ENDIAN);
        new Elements(payload, dtype).write(0, values.length, values, 0);
        return payload;
    }
}
