package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.function.LongSupplier;

/** What a kernel must get right before it is used, and how fast it is. Random, awkward in size. */
public final class Trials {
    private static final double NANOS_PER_S = 1e9;

    /** Rows and columns of the result, then the depths of its pairs. */
    private static final int[][] SIDES = {
        {1, 1, 1},
        {3, 1, 3},
        {7, 13, 5, 1},
        {127, 65, 3},
        {33, 127, 127, 64},
        {2, 3, 0},
        {5, 70, 20},
        {70, 5, 20},
        {1, 2, 1000, 3},
    };

    private Trials() {}

    /** The products. */
    public static List<Product> products(Random random) {
        List<Product> made = new ArrayList<>();
        for (DType dtype : DType.values()) {
            for (int[] sides : SIDES) {
                int turn = made.size() % 4;
                DType out = made.size() % 2 == 0 ? dtype : DType.FP32;
                int[] depths = Arrays.copyOfRange(sides, 2, sides.length);
                made.add(
                        product(sides[0], sides[1], depths, dtype, out, turn > 1, turn % 2 == 1,
                                random));
            }
        }
        return made;
    }

    /** A product of matrices of random numbers from -1 to 1. */
    public static Product product(
            int rows,
            int columns,
            int[] depths,
            DType dtype,
            DType out,
            boolean transposeA,
            boolean transposeB,
            Random random) {
        List<Product.Pair> pairs = new ArrayList<>();
        for (int depth : depths) {
            pairs.add(
                    new Product.Pair(
                            transposeA
                                    ? matrix(depth, rows, dtype, random)
                                    : matrix(rows, depth, dtype, random),
                            transposeB
                                    ? matrix(columns, depth, dtype, random)
                                    : matrix(depth, columns, dtype, random)));
        }
        return new Product(pairs, transposeA, transposeB, rows, columns, out);
    }

    /** A product of two fp32 squares, as speed is measured with. */
    public static Product square(int side, Random random) {
        return product(
                side, side, new int[] {side}, DType.FP32, DType.FP32, false, false, random);
    }

    /**
     * A kernel's largest {@link Exact#errorShare} over the products.
     *
     * @throws KernelException what the kernel throws
     */
    public static double worstError(Kernel kernel, List<Product> products) throws KernelException {
        double worst = 0;
        for (Product product : products) {
            hold(kernel, product);
            try {
                worst = Math.max(worst, Exact.errorShare(product, kernel.multiply(product)));
            } finally {
                forget(kernel, product);
            }
        }
        return worst;
    }

    /**
     * The speed that a kernel sustains on fp32 squares, in FLOP/s. A first product does not count,
     * because the kernel may compile or allocate in it.
     *
     * @param side of the squares
     * @param budgetS duration of the measurement
     * @param nanos a clock
     * @throws KernelException what the kernel throws
     */
    public static double flopsPerS(
            Kernel kernel, int side, double budgetS, Random random, LongSupplier nanos)
            throws KernelException {
        Product product = square(side, random);
        hold(kernel, product);
        try {
            kernel.multiply(product);
            long began = nanos.getAsLong();
            double flops = 0;
            double seconds;
            do {
                kernel.multiply(product);
                flops += product.flops();
                seconds = Math.max(1, nanos.getAsLong() - began) / NANOS_PER_S;
            } while (seconds < budgetS);
            return flops / seconds;
        } finally {
            forget(kernel, product);
        }
    }

    /**
     * Whether what overflowed shows: infinities and NaN come out where they belong, and all else is
     * exact. A driver may do otherwise, and a training would not learn that it diverged.
     *
     * @throws KernelException what the kernel throws
     */
    public static boolean keepsInfinitiesAndNan(Kernel kernel) throws KernelException {
        for (DType dtype : DType.values()) {
            Product product = withInfinitiesAndNan(dtype);
            hold(kernel, product);
            try {
                if (!Exact.isEqual(product, kernel.multiply(product))) {
                    return false;
                }
            } finally {
                forget(kernel, product);
            }
        }
        return true;
    }

    /** Small whole numbers, and in rows of the left one infinity, one NaN. */
    private static Product withInfinitiesAndNan(DType dtype) {
        float[] left = {
            1, 2, 3,
            Float.POSITIVE_INFINITY, 1, 2,
            -1, Float.NEGATIVE_INFINITY, 2,
            1, 2, Float.NaN,
            Float.POSITIVE_INFINITY, Float.NEGATIVE_INFINITY, 1,
        };
        float[] right = {1, 0, -2, 3, 1, 4}; // infinity times 0 is NaN
        Matrix a = new Matrix(5, 3, dtype, Numbers.narrowed(left, dtype));
        Matrix b = new Matrix(3, 2, dtype, Numbers.narrowed(right, dtype));
        List<Product.Pair> pairs = Collections.singletonList(new Product.Pair(a, b));
        return new Product(pairs, false, false, 5, 2, dtype);
    }

    private static void hold(Kernel kernel, Product product) throws KernelException {
        for (Product.Pair pair : product.pairs) {
            kernel.hold(pair.a);
            kernel.hold(pair.b);
        }
    }

    private static void forget(Kernel kernel, Product product) {
        for (Product.Pair pair : product.pairs) {
            kernel.forget(pair.a);
            kernel.forget(pair.b);
        }
    }

    private static Matrix matrix(int rows, int columns, DType dtype, Random random) {
        float[] values = new float[rows * columns];
        for (int i = 0; i < values.length; i++) {
            values[i] = 2 * random.nextFloat() - 1;
        }
        ByteBuffer payload = Numbers.narrowed(values, dtype);
        return new Matrix(rows, columns, dtype, payload);
    }
}
