package cleave.gpu;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import cleave.core.kernels.DType;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.junit.AfterClass;
import org.junit.BeforeClass;
import org.junit.Test;

/** The kernel as it is shipped, on whatever OpenGL ES 3.1 is here. */
public class GpuKernelTest {
    private static final int[][] SHAPES = {
        {1, 1, 1}, {1, 1, 256}, {256, 1, 3}, {1, 255, 17}, {3, 5, 7}, {31, 63, 15}, {32, 64, 16},
        {33, 65, 17}, {64, 128, 256}, {97, 101, 103}, {255, 129, 201}, {256, 256, 256}
    };

    private static Kernel kernel;

    @BeforeClass
    public static void make() throws KernelException {
        kernel = GpuKernel.factory().make();
    }

    @AfterClass
    public static void close() {
        kernel.close();
    }

    @Test
    public void saysWhatItIs() {
        assertEquals("gpu", kernel.name());
        assertTrue(kernel.about(), !kernel.about().isEmpty());
    }

    @Test
    public void multipliesEveryShapeDtypeAndLayout() throws KernelException {
        for (int[] shape : SHAPES) {
            for (DType dtype : DType.values()) {
                for (int layout = 0; layout < 4; layout++) {
                    compare(dtype, (layout & 1) != 0, (layout & 2) != 0, DType.FP32, shape);
                }
                compare(dtype, false, true, dtype, shape);
            }
        }
    }

    @Test
    public void addsPairsUpAndSkipsEmptyOnes() throws KernelException {
        int[][] pairs = {{33, 65, 0}, {33, 65, 17}, {33, 65, 0}, {33, 65, 129}};
        compare(DType.FP32, false, true, DType.FP32, pairs);
        compare(DType.BF16, true, false, DType.BF16, pairs);
    }

    @Test
    public void anEmptySumIsZeroAlsoAfterAnotherProduct() throws KernelException {
        compare(DType.FP32, false, false, DType.FP32, new int[] {4, 4, 4});
        compare(DType.FP32, false, false, DType.FP32, new int[] {4, 4, 0});
    }

    @Test
    public void nothingTimesNothingIsEmpty() throws KernelException {
        compare(DType.FP32, false, false, DType.FP32, new int[] {0, 4, 4});
        compare(DType.FP32, false, false, DType.FP32, new int[] {4, 0, 4});
    }

    @Test
    public void whatIsTooLargeBecomesInfiniteAndNanStays() throws KernelException {
        ByteBuffer numbers = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN);
        numbers.putFloat(3e38f).putFloat(Float.NaN).flip();
        Matrix column = new Matrix(2, 1, DType.FP32, numbers);
        ByteBuffer ten = ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN);
        ten.putFloat(10).flip();
        Matrix one = new Matrix(1, 1, DType.FP32, ten);
        ByteBuffer found = multiplied(product(column, one, DType.FP32), column, one);
        assertEquals(Float.POSITIVE_INFINITY, found.getFloat(0), 0);
        assertTrue(Float.isNaN(found.getFloat(4)));
    }

    @Test
    public void aMatrixThatIsNotHeldIsAnError() throws KernelException {
        Matrix a = random(2, 2, DType.FP32, new Random(1));
        Matrix b = random(2, 2, DType.FP32, new Random(2));
        kernel.hold(a);
        assertThrows(
                KernelException.class, () -> kernel.multiply(product(a, b, DType.FP32)));
        kernel.forget(a);
        assertThrows(
                KernelException.class, () -> kernel.multiply(product(a, a, DType.FP32)));
    }

    private static Product product(Matrix a, Matrix b, DType out) {
        List<Product.Pair> pairs = Arrays.asList(new Product.Pair(a, b));
        return new Product(pairs, false, false, a.rows, b.columns, out);
    }

    private static ByteBuffer multiplied(Product product, Matrix... held) throws KernelException {
        for (Matrix matrix : held) {
            kernel.hold(matrix);
        }
        ByteBuffer found = kernel.multiply(product).order(ByteOrder.LITTLE_ENDIAN);
        for (Matrix matrix : held) {
            kernel.forget(matrix);
        }
        return found;
    }

    /** Shapes are rows, columns, depth; rows and columns are those of the first. */
    private static void compare(
            DType dtype, boolean transposeA, boolean transposeB, DType out, int[]... shapes)
            throws KernelException {
        int rows = shapes[0][0];
        int columns = shapes[0][1];
        Random random = new Random(7);
        List<Product.Pair> pairs = new ArrayList<>();
        List<Matrix> held = new ArrayList<>();
        double[] sums = new double[rows * columns];
        double[] sizes = new double[rows * columns];
        int depths = 0;
        for (int[] shape : shapes) {
            int depth = shape[2];
            Matrix a = random(transposeA ? depth : rows, transposeA ? rows : depth, dtype, random);
            Matrix b =
                    random(
                            transposeB ? columns : depth,
                            transposeB ? depth : columns,
                            dtype,
                            random);
            held.add(a);
            held.add(b);
            pairs.add(new Product.Pair(a, b));
            add(elements(a), transposeA, elements(b), transposeB, sums, sizes, shape);
            depths += depth;
        }
        Product product = new Product(pairs, transposeA, transposeB, rows, columns, out);
        ByteBuffer found = multiplied(product, held.toArray(new Matrix[0]));
        String layout = (transposeA ? "t" : "n") + (transposeB ? "t" : "n");
        String what = dtype + " to " + out + " " + layout + " " + Arrays.deepToString(shapes);
        assertEquals(what, (long) rows * columns * out.itemBytes, found.remaining());
        double unit = out == DType.FP32 ? 0 : out == DType.BF16 ? 0x1p-8 : 0x1p-11;
        for (int i = 0; i < sums.length; i++) {
            double rounding = unit * Math.abs(sums[i]) + (out == DType.FP16 ? 0x1p-25 : 0);
            double bound = (depths + 2) * 0x1p-23 * sizes[i] + rounding;
            assertEquals(what + " at " + i, sums[i], element(found, i, out), bound);
        }
    }

    private static void add(
            double[] a,
            boolean transposeA,
            double[] b,
            boolean transposeB,
            double[] sums,
            double[] sizes,
            int[] shape) {
        int rows = shape[0];
        int columns = shape[1];
        int depth = shape[2];
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < columns; j++) {
                for (int k = 0; k < depth; k++) {
                    double left = a[transposeA ? k * rows + i : i * depth + k];
                    double right = b[transposeB ? j * depth + k : k * columns + j];
                    sums[i * columns + j] += left * right;
                    sizes[i * columns + j] += Math.abs(left * right);
                }
            }
        }
    }

    private static Matrix random(int rows, int columns, DType dtype, Random random) {
        ByteBuffer payload = ByteBuffer.allocate(rows * columns * dtype.itemBytes);
        payload.order(ByteOrder.LITTLE_ENDIAN);
        while (payload.hasRemaining()) {
            float value = (float) random.nextGaussian();
            if (dtype == DType.FP32) {
                payload.putFloat(value);
            } else if (dtype == DType.BF16) {
                payload.putShort((short) (Float.floatToRawIntBits(value) >> 16));
            } else {
                payload.putShort((short) (random.nextInt(0x4400) | random.nextInt(2) << 15));
            }
        }
        payload.flip();
        return new Matrix(rows, columns, dtype, payload);
    }

    private static double[] elements(Matrix matrix) {
        double[] found = new double[(int) (matrix.rows * matrix.columns)];
        for (int i = 0; i < found.length; i++) {
            found[i] = element(matrix.payload(), i, matrix.dtype);
        }
        return found;
    }

    private static double element(ByteBuffer payload, int index, DType dtype) {
        int at = payload.position() + index * dtype.itemBytes;
        if (dtype == DType.FP32) {
            return payload.getFloat(at);
        }
        int bits = payload.getShort(at) & 0xffff;
        if (dtype == DType.BF16) {
            return Float.intBitsToFloat(bits << 16);
        }
        int exponent = bits >> 10 & 0x1f;
        double fraction = (bits & 0x3ff) * 0x1p-10;
        double size =
                exponent == 31
                        ? (fraction == 0 ? Double.POSITIVE_INFINITY : Double.NaN)
                        : exponent == 0
                                ? fraction * 0x1p-14
                                : (1 + fraction) * Math.pow(2, exponent - 15);
        return bits >> 15 == 0 ? size : -size;
    }
}
