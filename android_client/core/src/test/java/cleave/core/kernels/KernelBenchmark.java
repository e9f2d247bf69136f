package cleave.core.kernels;

import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.Random;

/**
 * The CPU kernel against a naive triple loop, on fp32 squares, in turn. Prints a line of JSON for
 * each round and one of errors. Arguments: side, rounds, seconds for each measurement.
 */
public final class KernelBenchmark {
    private static final double NANOS_PER_S = 1e9;
    private static final double FP32_ROUNDING = 0x1p-24;

    private KernelBenchmark() {}

    public static void main(String[] arguments) throws KernelException {
        int side = Integer.parseInt(arguments[0]);
        int rounds = Integer.parseInt(arguments[1]);
        double budgetS = Double.parseDouble(arguments[2]);
        int threads = Runtime.getRuntime().availableProcessors();
        Random random = new Random(1);
        CpuKernel one = (CpuKernel) CpuKernel.factory(1, KernelBenchmark::daemon).make();
        CpuKernel all = (CpuKernel) CpuKernel.factory(threads, KernelBenchmark::daemon).make();
        naiveFlopsPerS(side, budgetS, random); // compiled from here on
        Trials.flopsPerS(one, side, budgetS, random, System::nanoTime);
        Trials.flopsPerS(all, side, budgetS, random, System::nanoTime);
        for (int round = 0; round < rounds; round++) {
            double naive = naiveFlopsPerS(side, budgetS, random);
            double single = Trials.flopsPerS(one, side, budgetS, random, System::nanoTime);
            double several = Trials.flopsPerS(all, side, budgetS, random, System::nanoTime);
            System.out.printf(
                    Locale.ROOT,
                    "{\"naive\": %.0f, \"one\": %.0f, \"all\": %.0f}%n",
                    naive, single, several);
        }
        List<Product> square = Collections.singletonList(Trials.square(side, random));
        double share = Trials.worstError(all, Trials.products(random));
        System.out.printf(
                Locale.ROOT,
                "{\"threads\": %d, \"about\": \"%s\", \"share\": %.3f, \"square_share\": %.4f}%n",
                threads, all.about(), share, Trials.worstError(all, square));
    }

    /** The sustained speed, measured as the kernel is. */
    private static double naiveFlopsPerS(int side, double budgetS, Random random) {
        float[] a = new float[side * side];
        float[] b = new float[side * side];
        for (int i = 0; i < a.length; i++) {
            a[i] = random.nextFloat();
            b[i] = random.nextFloat();
        }
        float[] c = new float[side * side];
        naive(a, b, c, side);
        long began = System.nanoTime();
        double flops = 0;
        double seconds;
        do {
            naive(a, b, c, side);
            flops += 2.0 * side * side * side;
            seconds = (System.nanoTime() - began) / NANOS_PER_S;
        } while (seconds < budgetS);
        if (c[0] < FP32_ROUNDING) { // a use of the result, so that it has to be computed
            throw new IllegalStateException("a sum of positive numbers is positive");
        }
        return flops / seconds;
    }

    private static void naive(float[] a, float[] b, float[] c, int side) {
        for (int i = 0; i < side; i++) {
            for (int j = 0; j < side; j++) {
                float sum = 0;
                for (int k = 0; k < side; k++) {
                    sum += a[i * side + k] * b[k * side + j];
                }
                c[i * side + j] = sum;
            }
        }
    }

    private static Thread daemon(Runnable task) {
        Thread thread = new Thread(task, "cleave-kernel");
        thread.setDaemon(true);
        return thread;
    }
}
