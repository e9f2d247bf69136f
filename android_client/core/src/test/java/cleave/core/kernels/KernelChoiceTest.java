package cleave.core.kernels;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

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

    @Test
    public void withoutOneThatIsRightThereIsNone() {
        KernelException error =
                assertThrows(
                        KernelException.class, () -> choose(broken(new OutOfMemoryError())));
        assertEquals("no kernel multiplies correctly on this device", error.getMessage());
    }
}
