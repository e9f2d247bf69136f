package cleave.core.kernels;

import java.util.function.LongSupplier;

/** Which inner loop is faster on this machine, once it is compiled. */
final class LoopTrial {
    /** For each loop: enough for a compiler to notice it, and for a few measurements after. */
    private static final long WARM_NANOS = 60_000_000;

    private static final long TIMED_NANOS = 20_000_000;
    private static final int SIDE = InnerLoop.PANEL / 4;

    private LoopTrial() {}

    /** The faster one. */
    static InnerLoop faster(LongSupplier nanos) {
        InnerLoop best = null;
        double bestPerNano = 0;
        for (InnerLoop loop : InnerLoop.values()) {
            double perNano = flopsPerNano(loop, nanos);
            if (best == null || perNano > bestPerNano) {
                best = loop;
                bestPerNano = perNano;
            }
        }
        return best;
    }

    /** The best of many short tries, for other work on the machine only ever slows them. */
    private static double flopsPerNano(InnerLoop loop, LongSupplier nanos) {
        float[] c = new float[SIDE * InnerLoop.PANEL];
        float[] b = new float[InnerLoop.DEPTH * InnerLoop.PANEL];
        float[] a = new float[SIDE * InnerLoop.DEPTH];
        double best = 0;
        long warm = nanos.getAsLong() + WARM_NANOS;
        long end = warm + TIMED_NANOS;
        for (long began = nanos.getAsLong(); began < end; ) {
            for (int i = 0; i < SIDE; i += loop.rows) {
                for (int k = 0; k < InnerLoop.DEPTH; k += loop.depth) {
                    int ci = i * InnerLoop.PANEL;
                    int bi = k * InnerLoop.PANEL;
                    loop.add(c, ci, b, bi, a, i * InnerLoop.DEPTH + k, InnerLoop.PANEL);
                }
            }
            long now = nanos.getAsLong();
            if (began > warm) {
                double flops = 2.0 * SIDE * InnerLoop.DEPTH * InnerLoop.PANEL;
                best = Math.max(best, flops / Math.max(1, now - began));
            }
            began = now;
        }
        return best;
    }
}
