package cleave.core.kernels;

import java.util.List;
import java.util.Random;
import java.util.function.BiConsumer;
import java.util.function.LongSupplier;

/** Which kernel this device multiplies with: the fastest of those that are right. */
public final class KernelChoice {
    private static final int TIMED_SIDE = 256;
    private static final double TIMED_S = 0.2;

    private KernelChoice() {}

    /**
     * The fastest kernel that passes its self-check; the others are closed. Takes about a second,
     * in the thread that will use the kernel.
     *
     * @param report told of each kernel that is not used, and why
     * @param nanos a clock that never goes back
     * @throws KernelException when none passes
     */
    public static Chosen choose(
            List<KernelFactory> factories,
            BiConsumer<String, String> report,
            Random random,
            LongSupplier nanos)
            throws KernelException {
        Chosen best = null;
        for (KernelFactory factory : factories) {
            Chosen tried = tried(factory, report, random, nanos);
            if (tried == null) {
                continue;
            }
            Chosen slower = best != null && best.flopsPerS >= tried.flopsPerS ? tried : best;
            if (slower != null) {
                report.accept(slower.kernel.name(), "another kernel is faster here");
                slower.kernel.close();
            }
            best = slower == tried ? best : tried;
        }
        if (best == null) {
            throw new KernelException("no kernel multiplies correctly on this device");
        }
        return best;
    }

    private static Chosen tried(
            KernelFactory factory,
            BiConsumer<String, String> report,
            Random random,
            LongSupplier nanos) {
        Kernel kernel = null;
        String wrong = "its results are wrong";
        try {
            kernel = factory.make();
            boolean right = Trials.worstError(kernel, Trials.products(random)) <= 1;
            if (right && Trials.keepsInfinitiesAndNan(kernel)) {
                double flopsPerS = Trials.flopsPerS(kernel, TIMED_SIDE, TIMED_S, random, nanos);
                return new Chosen(kernel, flopsPerS);
            }
        } catch (KernelException error) {
            wrong = error.getMessage();
        } catch (OutOfMemoryError error) {
            wrong = "not enough memory";
        } catch (RuntimeException error) { // of a driver, for one: another kernel may still do
            wrong = error.toString();
        }
        report.accept(factory.name(), wrong);
        if (kernel != null) {
            kernel.close();
        }
        return null;
    }
}
