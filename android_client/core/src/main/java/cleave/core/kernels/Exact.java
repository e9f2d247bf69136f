package cleave.core.kernels;

import java.nio.ByteBuffer;

/** Products in double precision, and how far a kernel's result may be from them. */
public final class Exact {
    private static final double FP32_ROUNDING = 0x1p-24;

    private Exact() {}

    /**
     * The largest error of a result, as a share of what rounding allows; above 1 it is wrong.
     *
     * <p>What is allowed for an element: the error bound of an fp32 sum of that many products in
     * any order, and half the distance of neighbouring numbers of {@code out}.
     */
    public static double errorShare(Product product, ByteBuffer payload) {
        if (payload.remaining() != product.resultBytes()) {
            return Double.POSITIVE_INFINITY;
        }
        float[] got = Numbers.widened(payload, product.out);
        double[] exact = new double[got.length];
        double[] magnitudes = new double[got.length];
        double depth = 0;
        for (Product.Pair pair : product.pairs) {
            add(product, pair, exact, magnitudes);
            depth += product.depth(pair);
        }
        double worst = 0;
        for (int i = 0; i < got.length; i++) {
            double allowed =
                    (depth + 1) * FP32_ROUNDING * magnitudes[i]
                            + relativeRounding(product.out) * Math.abs(exact[i])
                            + smallestDistance(product.out);
            double share = Math.abs(got[i] - exact[i]) / allowed;
            if (Double.isNaN(share)) {
                return Double.POSITIVE_INFINITY;
            }
            worst = Math.max(worst, share);
        }
        return worst;
    }

    /**
     * Whether a result is exact, each NaN any other: for products whose sums fp32 and {@code out}
     * hold.
     */
    public static boolean isEqual(Product product, ByteBuffer payload) {
        if (payload.remaining() != product.resultBytes()) {
            return false;
        }
        float[] got = Numbers.widened(payload, product.out);
        double[] exact = new double[got.length];
        for (Product.Pair pair : product.pairs) {
            add(product, pair, exact, new double[got.length]);
        }
        for (int i = 0; i < got.length; i++) {
            boolean bothNan = Double.isNaN(exact[i]) && Float.isNaN(got[i]);
            if (got[i] != exact[i] && !bothNan) {
                return false;
            }
        }
        return true;
    }

    private static void add(
            Product product, Product.Pair pair, double[] exact, double[] magnitudes) {
        float[] left = Numbers.widened(pair.a.payload(), pair.a.dtype);
        float[] right = Numbers.widened(pair.b.payload(), pair.b.dtype);
        int rows = (int) product.rows;
        int columns = (int) product.columns;
        int depth = (int) product.depth(pair);
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < columns; j++) {
                double sum = 0;
                double magnitude = 0;
                for (int k = 0; k < depth; k++) {
                    double x = left[product.transposeA ? k * rows + i : i * depth + k];
                    double y = right[product.transposeB ? j * depth + k : k * columns + j];
                    sum += x * y;
                    magnitude += Math.abs(x * y);
                }
                exact[i * columns + j] += sum;
                magnitudes[i * columns + j] += magnitude;
            }
        }
    }

    private static double relativeRounding(DType dtype) {
        switch (dtype) {
            case BF16:
                return 0x1p-8;
            case FP16:
                return 0x1p-11;
            default:
                return FP32_ROUNDING;
        }
    }

    private static double smallestDistance(DType dtype) {
        return dtype == DType.FP16 ? 0x1p-24 : 0x1p-126;
    }
}
