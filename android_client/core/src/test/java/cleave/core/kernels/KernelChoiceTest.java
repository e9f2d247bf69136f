package cleave.core.kernels;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.junit.Test;

public class KernelChoiceTest {
    private final List<String> refused = new ArrayList<>();

    /** A kernel whose making throws. */
    private static KernelFactory broken(Throwable error) {
        return new KernelFactory() {
            @Override
            public String name() {
                return "broken";
            }

            @Override
            public Kernel make() throws KernelException {
                if (error instanceof Error) {
                    throw (Error) error;
                }
                if (error instanceof RuntimeException) {
                    throw (RuntimeException) error;
                }
                throw (KernelException) error;
            }
        };
    }

    private Chosen choose(KernelFactory... factories) throws KernelException {
        return KernelChoice.choose(
                Arrays.asList(factories),
                (name, why) -> refused.add(name + ": " + why),
                new Random(1),
                System::nanoTime);
    }

    @Test
    public void oneThatCannotBeMadeLeavesTheOthers() throws KernelException {
        Chosen chosen =
                choose(
                        broken(new KernelException("there is none here")),
                        broken(new IllegalStateException("of the driver")),
                        broken(new OutOfMemoryError()),
                        CpuKernel.factory(1, Thread::new));
        assertEquals("cpu", chosen.kernel.name());
        assertEquals(
                Arrays.asList(
                        "broken: there is none here",
                        "broken: java.lang.IllegalStateException: of the driver",
                        "broken: not enough memory"),
                refused);
        chosen.kernel.close();
    }

    private static KernelFactory finite() {
        return new KernelFactory() {
            @Override
            public String name() {
                return "finite";
            }

            @Override
            public Kernel make() {
                return new FiniteKernel();
            }
        };
    }

    @Test
    public void oneThatHidesWhatOverflowedIsWrong() {
        assertThrows(KernelException.class, () -> choose(finite()));
        assertEquals(Arrays.asList("finite: its results are wrong"), refused);
    }

    @Test
    public void withoutOneThatIsRightThereIsNone() {
        KernelException error =
                assertThrows(
                        KernelException.class, () -> choose(broken(new OutOfMemoryError())));
        assertEquals("no kernel multiplies correctly on this device", error.getMessage());
    }

    /** Right in all, but that infinities and NaN are zeros. */
    private static final class FiniteKernel implements Kernel {
        private final Kernel right = CpuKernel.small();

        @Override
        public String name() {
            return "finite";
        }

        @Override
        public String about() {
            return "";
        }

        @Override
        public void hold(Matrix matrix) throws KernelException {
            right.hold(matrix);
        }

        @Override
        public void forget(Matrix matrix) {
            right.forget(matrix);
        }

        @Override
        public ByteBuffer multiply(Product product) throws KernelException {
            float[] values = Numbers.widened(right.multiply(product), product.out);
            for (int i = 0; i < values.length; i++) {
                boolean finite = !Float.isNaN(values[i]) && !Float.isInfinite(values[i]);
                values[i] = finite ? values[i] : 0;
            }
            return Numbers.narrowed(values, product.out);
        }

        @Override
        public void close() {
            right.close();
        }
    }
}
