package cleave.core.graphs;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.function.DoubleSupplier;

/**
 * Tells how exactly graphs are computed: small graphs of our own, compared with 64-bit arithmetic.
 * What computes in fewer bits than fp32's looks right, and trains another model. {@code
 * web_client/src/graphs/self_test.ts} has the same graphs.
 */
public final class SelfTest {
    /** Errors from this on are no rounding of fp32, as in Python and in browsers. */
    public static final double LARGEST_ERROR = 2e-5;

    private static final int DEPTH = 4096; // of sums: as wide as layers are
    private static final double EPSILON = 1e-5; // of ONNX's LayerNormalization

    private SelfTest() {}

    /**
     * Try all graphs; returns the worst error, relative to an output's largest element.
     *
     * @throws GraphException when one cannot be run, or an error is no rounding of fp32
     */
    public static double run(OpenGraph open) throws GraphException {
        double worst = 0;
        for (Trial trial : trials()) {
            double error = trial.error(open);
            if (error >= LARGEST_ERROR) {
                throw new GraphException(
                        String.format(
                                Locale.ROOT,
                                "graphs are not computed exactly: in its self-test it is off by "
                                        + "%.0e (%s), and fp32 by less than %.0e",
                                error,
                                trial.name,
                                LARGEST_ERROR));
            }
            worst = Math.max(worst, error);
        }
        return worst;
    }

    /** The same at every call. */
    private static List<Trial> trials() {
        DoubleSupplier random = normal();
        return Arrays.asList(
                products(array(random, 8, DEPTH), array(random, DEPTH, 32)),
                attention(
                        array(random, 16, 64), array(random, 64, 16), array(random, 16, 32)),
                curves(),
                normalization(
                        array(random, 8, 768), array(random, 768), array(random, 768)));
    }

    /** Deep sums of products of either sign, in which rounded factors do not cancel. */
    private static Trial products(Value x, Value w) {
        GraphWriter graph =
                new GraphWriter()
                        .input("x", GraphWriter.BATCH, DEPTH)
                        .input("w", w.shape())
                        .node("MatMul", "y", "x", "w")
                        .output("y", GraphWriter.BATCH, w.shape()[1]);
        return new Trial("deep products", graph)
                .give("x", x)
                .give("w", w)
                .want("y", multiplied(wide(x), wide(w), DEPTH));
    }

    /** A softmax between products, of scores that are far from each other. */
    private static Trial attention(Value q, Value k, Value v) {
        int depth = (int) k.shape()[0];
        int keys = (int) k.shape()[1];
        double[] weights = multiplied(wide(q), wide(k), depth);
        for (int row = 0; row < weights.length; row += keys) {
            double most = Arrays.stream(weights, row, row + keys).max().getAsDouble();
            double sum = 0;
            for (int i = row; i < row + keys; i++) {
                weights[i] = Math.exp(weights[i] - most);
                sum += weights[i];
            }
            for (int i = row; i < row + keys; i++) {
                weights[i] /= sum;
            }
        }
        GraphWriter graph =
                new GraphWriter()
                        .input("q", GraphWriter.BATCH, depth)
                        .input("k", k.shape())
                        .input("v", v.shape())
                        .node("MatMul", "scores", "q", "k")
                        .node("Softmax", "weights", "scores")
                        .node("MatMul", "y", "weights", "v")
                        .output("y", GraphWriter.BATCH, v.shape()[1]);
        return new Trial("softmax", graph)
                .give("q", q)
                .give("k", k)
                .give("v", v)
                .want("y", multiplied(weights, wide(v), keys));
    }

    /** The curves of activations, from -10 to 10. */
    private static Trial curves() {
        int items = 2001;
        int[] next = {-items / 2};
        Value x = array(() -> next[0]++ / 100.0, 1, items);
        GraphWriter graph = new GraphWriter().input("x", GraphWriter.BATCH, items);
        for (String operation : new String[] {"Exp", "Sigmoid", "Tanh"}) {
            graph.node(operation, operation, "x").output(operation, GraphWriter.BATCH, items);
        }
        double[] wide = wide(x);
        return new Trial("curves", graph)
                .give("x", x)
                .want("Exp", Arrays.stream(wide).map(Math::exp).toArray())
                .want("Sigmoid", Arrays.stream(wide).map(v -> 1 / (1 + Math.exp(-v))).toArray())
                .want("Tanh", Arrays.stream(wide).map(Math::tanh).toArray());
    }

    private static Trial normalization(Value x, Value scale, Value shift) {
        int width = scale.items();
        double[] factors = wide(scale);
        double[] terms = wide(shift);
        double[] y = wide(x);
        for (int row = 0; row < y.length; row += width) {
            double mean = Arrays.stream(y, row, row + width).sum() / width;
            double squares = 0;
            for (int i = row; i < row + width; i++) {
                y[i] -= mean;
                squares += y[i] * y[i];
            }
            double root = Math.sqrt(squares / width + EPSILON);
            for (int i = 0; i < width; i++) {
                y[row + i] = y[row + i] / root * factors[i] + terms[i];
            }
        }
        GraphWriter graph =
                new GraphWriter()
                        .input("x", GraphWriter.BATCH, width)
                        .input("scale", width)
                        .input("shift", width)
                        .node("LayerNormalization", "y", "x", "scale", "shift")
                        .output("y", GraphWriter.BATCH, width);
        return new Trial("normalization", graph)
                .give("x", x)
                .give("scale", scale)
                .give("shift", shift)
                .want("y", y);
    }

    /** The product of matrices that lie row by row; {@code depth} is what they have in common. */
    private static double[] multiplied(double[] a, double[] b, int depth) {
        int columns = b.length / depth;
        double[] product = new double[a.length / depth * columns];
        for (int n = 0; n < product.length; n++) {
            int row = n / columns * depth;
            for (int k = 0; k < depth; k++) {
                product[n] += a[row + k] * b[k * columns + n % columns];
            }
        }
        return product;
    }

    private static Value array(DoubleSupplier next, long... shape) {
        long items = Arrays.stream(shape).reduce(1, (product, size) -> product * size);
        ByteBuffer data =
                ByteBuffer.allocateDirect((int) items * Float.BYTES)
                        .order(ByteOrder.LITTLE_ENDIAN);
        for (int i = 0; i < items; i++) {
            data.putFloat(i * Float.BYTES, (float) next.getAsDouble());
        }
        return new Value(ElementType.FLOAT32, shape, data);
    }

    private static double[] wide(Value value) {
        FloatBuffer data = value.data().asFloatBuffer();
        double[] wide = new double[data.remaining()];
        for (int i = 0; i < wide.length; i++) {
            wide[i] = data.get(i);
        }
        return wide;
    }

    /** Numbers of a normal distribution. */
    private static DoubleSupplier normal() {
        int[] state = {20};
        DoubleSupplier uniform =
                () -> {
                    state[0] = state[0] * 1664525 + 1013904223;
                    return ((state[0] & 0xffffffffL) + 0.5) / 0x1p32;
                };
        return () ->
                Math.sqrt(-2 * Math.log(uniform.getAsDouble()))
                        * Math.cos(2 * Math.PI * uniform.getAsDouble());
    }
}
