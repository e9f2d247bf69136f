package cleave.gpu;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import cleave.core.kernels.Chosen;
import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.KernelChoice;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.KernelFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.junit.Test;

/** The kernel among others: right, and used where it is the fastest. */
public class GpuChoiceTest {
    private final List<String> refused = new ArrayList<>();

    private Chosen choose(KernelFactory... factories) throws KernelException {
        return KernelChoice.choose(
                Arrays.asList(factories),
                (name, why) -> refused.add(name + ": " + why),
                new Random(1),
                System::nanoTime);
    }

    @Test
    public void passesTheSelfCheck() throws KernelException {
        Chosen chosen = choose(GpuKernel.factory());
        assertEquals("gpu", chosen.kernel.name());
        assertTrue(chosen.flopsPerS > 0);
        assertEquals(new ArrayList<>(), refused);
        chosen.kernel.close();
    }

    @Test
    public void theSlowerOneIsNotUsed() throws KernelException {
        Chosen chosen = choose(CpuKernel.factory(1, Thread::new), GpuKernel.factory());
        String other = chosen.kernel.name().equals("cpu") ? "gpu" : "cpu";
        assertEquals(Arrays.asList(other + ": another kernel is faster here"), refused);
        chosen.kernel.close();
    }
}
