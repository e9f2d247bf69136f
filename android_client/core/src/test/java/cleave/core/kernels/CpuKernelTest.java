package cleave.core.kernels;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import org.junit.Test;

public class CpuKernelTest {
    private static CpuKernel kernel(int threads, InnerLoop loop) {
        return new CpuKernel(threads, Thread::new, loop);
    }

    @Test
    public void resultsAreRightForAllLoopsThreadsDtypesTurnsAndOddSizes() throws Exception {
        for (InnerLoop loop : InnerLoop.values()) {
            for (int threads : new int[] {1, 3}) {
                CpuKernel kernel = kernel(threads, loop);
                Random random = new Random(threads);
                assertTrue(Trials.worstError(kernel, Trials.products(random)) <= 1);
                List<Product> large = new ArrayList<>();
                int turn = 0;
                for (DType dtype : DType.values()) {
                    large.add(
                            Trials.product(
                                    301, 523, new int[] {131, 77}, dtype, dtype, turn > 0,
                                    turn > 1, random));
                    turn += 1;
                }
                assertTrue(Trials.worstError(kernel, large) <= 1);
                kernel.close();
            }
        }
    }

    @Test
    public void resultsAreTheSameToTheBitWhicheverLoopIsFaster() {
        Random random = new Random(7);
        int[] depths = {131, 77};
        Product product =
                Trials.product(
                        45, 301, depths, DType.FP32, DType.FP32, false, false, random);
        CpuKernel one = kernel(1, InnerLoop.FOUR_BY_FOUR);
        CpuKernel other = kernel(2, InnerLoop.ONE_BY_EIGHT);
        assertEquals(one.multiply(product), other.multiply(product));
        one.close();
        other.close();
    }

    @Test
    public void anEmptySumIsZeroAndAnEmptyResultIsEmpty() {
        CpuKernel kernel = kernel(2, InnerLoop.FOUR_BY_FOUR);
        ByteBuffer zeros = kernel.multiply(empty(2, 0, 3));
        assertEquals(ByteBuffer.allocate(24), zeros);
        assertEquals(0, kernel.multiply(empty(0, 5, 3)).remaining());
        assertEquals(0, kernel.multiply(empty(1L << 60, 0, 0)).remaining());
        kernel.close();
    }

    @Test
    public void infinitiesAndNansStayWhereTheyAre() {
        float[] a = new float[5 * 5];
        a[0] = Float.POSITIVE_INFINITY;
        a[6] = Float.NaN;
        float[] b = new float[25];
        Arrays.fill(b, 1);
        Matrix left = new Matrix(5, 5, DType.FP32, Numbers.narrowed(a, DType.FP32));
        Matrix right = new Matrix(5, 5, DType.FP32, Numbers.narrowed(b, DType.FP32));
        Product product =
                new Product(
                        Collections.singletonList(new Product.Pair(left, right)),
                        false, false, 5, 5, DType.FP32);
        for (InnerLoop loop : InnerLoop.values()) {
            CpuKernel kernel = kernel(1, loop);
            float[] sums = Numbers.widened(kernel.multiply(product), DType.FP32);
            for (int i = 0; i < 25; i++) {
                float wanted = i < 5 ? Float.POSITIVE_INFINITY : i < 10 ? Float.NaN : 0;
                assertEquals(wanted, sums[i], 0);
            }
        }
    }

    @Test
    public void theFastestRightKernelIsChosenAndTheOthersAreExplained() throws Exception {
        List<String> reports = new ArrayList<>();
        KernelFactory wrong = factory("wrong", new WrongKernel());
        KernelFactory missing =
                new KernelFactory() {
                    @Override
                    public String name() {
                        return "missing";
                    }

                    @Override
                    public Kernel make() throws KernelException {
                        throw new KernelException("there is none");
                    }
                };
        KernelFactory right = factory("cpu", kernel(1, InnerLoop.ONE_BY_EIGHT));
        Chosen chosen =
                KernelChoice.choose(
                        Arrays.asList(wrong, missing, right),
                        (name, reason) -> reports.add(name + ": " + reason),
                        new Random(1),
                        System::nanoTime);
        assertEquals("cpu", chosen.kernel.name());
        assertTrue(chosen.flopsPerS > 1e6);
        assertEquals(
                Arrays.asList("wrong: its results are wrong", "missing: there is none"), reports);
        assertThrows(
                KernelException.class,
                () ->
                        KernelChoice.choose(
                                Collections.singletonList(missing),
                                (name, reason) -> assertNull(null),
                                new Random(1),
                                System::nanoTime));
    }

    @Test
    public void aThreadThatFailsIsNoticed() {
        Crew crew = new Crew(2, Thread::new);
        RuntimeException error =
                assertThrows(
                        RuntimeException.class,
                        () ->
                                crew.work(
                                        100,
                                        2,
                                        (member, piece) -> {
                                            throw new IllegalStateException("broken");
                                        }));
        assertSame(IllegalStateException.class, error.getClass());
        crew.close();
    }

    private static Product empty(long rows, long depth, long columns) {
        ByteBuffer left = ByteBuffer.allocate((int) (rows * depth * 4));
        ByteBuffer right = ByteBuffer.allocate((int) (depth * columns * 4));
        Matrix a = new Matrix(rows, depth, DType.FP32, left);
        Matrix b = new Matrix(depth, columns, DType.FP32, right);
        return new Product(
                Collections.singletonList(new Product.Pair(a, b)),
                false, false, rows, columns, DType.FP32);
    }

    private static KernelFactory factory(String name, Kernel kernel) {
        return new KernelFactory() {
            @Override
            public String name() {
                return name;
            }

            @Override
            public Kernel make() {
                return kernel;
            }
        };
    }

    /** Fast, and wrong. */
    private static final class WrongKernel implements Kernel {
        @Override
        public String name() {
            return "wrong";
        }

        @Override
        public String about() {
            return "";
        }

        @Override
        public void hold(Matrix matrix) {
            // Not needed.
        }

        @Override
        public void forget(Matrix matrix) {
            // Not needed.
        }

        @Override
        public ByteBuffer multiply(Product product) {
            return ByteBuffer.allocate(product.resultBytes());
        }

        @Override
        public void close() {
            // Nothing to give back.
        }
    }
}
