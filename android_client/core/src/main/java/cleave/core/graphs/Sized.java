package cleave.core.graphs;

import java.util.Arrays;

/** What is known of an array before a run. */
final class Sized {
    /** Numbers from here on are not told apart: JavaScript has no larger whole numbers. */
    static final long LARGEST_NUMBER = 1L << 53;

    static final int LARGEST_RANK = 32;

    /** Arrays of more elements are never followed by value. */
    static final int MOST_VALUES = 64;

    // ONNX's numbers of types
    static final int FLOAT32 = 1;
    private static final int UINT8 = 2;
    static final int INT32 = 6;
    static final int INT64 = 7;
    static final int BOOL = 9;

    final long[] shape;
    final int type;

    /** Its elements, where these are known; else null. */
    final long[] values;

    final long elements;

    private Sized(long[] shape, int type, long[] values) throws UnboundedException {
        if (itemBytes(type) == 0) {
            throw new UnboundedException(
                    "type", "graphs have no arrays of the element type " + type);
        }
        if (shape.length > LARGEST_RANK) {
            throw UnboundedException.shape(
                    "an array has " + shape.length + " dimensions, more than " + LARGEST_RANK);
        }
        long items = 1;
        for (long size : shape) {
            if (size < 0) {
                throw UnboundedException.shape("an array has the shape " + Arrays.toString(shape));
            }
            items = times(items, Math.max(size, 1));
        }
        if (items >= LARGEST_NUMBER) {
            throw new UnboundedException("size", "an array has the shape " + Arrays.toString(shape));
        }
        this.shape = shape;
        this.type = type;
        this.values = values;
        this.elements = product(shape);
    }

    static Sized of(int type, long... shape) throws UnboundedException {
        return new Sized(shape, type, null);
    }

    /** An array with its elements, where these can be followed; {@code values} may be null. */
    static Sized followed(int type, long[] shape, long[] values) throws UnboundedException {
        boolean known =
                values != null
                        && isFollowed(type)
                        && shape.length <= 1
                        && values.length <= MOST_VALUES
                        && values.length == product(shape);
        return new Sized(shape, type, known ? values : null);
    }

    /** The same without its elements. */
    Sized unfollowed() throws UnboundedException {
        return of(type, shape);
    }

    long bytes() {
        return elements * itemBytes(type);
    }

    boolean isLike(Sized other) {
        return type == other.type && Arrays.equals(shape, other.shape);
    }

    static boolean isFollowed(int type) {
        return type == INT32 || type == INT64 || type == BOOL;
    }

    /** Bytes of an element; 0 for a type that graphs do not have. */
    static int itemBytes(int type) {
        switch (type) {
            case UINT8:
            case BOOL:
                return 1;
            case FLOAT32:
            case INT32:
                return 4;
            case INT64:
                return 8;
            default:
                return 0;
        }
    }

    /** The product of sizes, or the largest number. */
    static long product(long[] sizes) {
        long all = 1;
        for (long size : sizes) {
            all = size == 0 ? 0 : times(all, size);
        }
        return all;
    }

    /** A product, of which the largest number stands for all that are larger. */
    static long times(long a, long b) {
        try {
            return Math.max(-LARGEST_NUMBER, Math.min(Math.multiplyExact(a, b), LARGEST_NUMBER));
        } catch (ArithmeticException error) {
            return (a < 0) == (b < 0) ? LARGEST_NUMBER : -LARGEST_NUMBER;
        }
    }

    /** A number, or the largest that there is. */
    static long within(long value) {
        return Math.max(-LARGEST_NUMBER, Math.min(value, LARGEST_NUMBER));
    }
}
