package cleave.core.profile;

import cleave.core.kernels.DType;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Numbers;
import cleave.core.kernels.Product;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.function.BooleanSupplier;
import java.util.function.DoubleConsumer;
import java.util.function.DoubleSupplier;
import java.util.function.LongSupplier;

/**
 * Measures how fast a kernel is: blocks of many shapes, then one large product again and again, to
 * see it slow down when it gets hot. All in the calling thread, which is the kernel's.
 */
public final class ProfileRun {
    private static final int[] SIDES = {8, 16, 31, 32, 48, 64, 96, 127, 128, 192, 256, 384, 512};
    private static final int[] DEPTHS = {16, 64, 200, 256, 512, 1024, 2048};
    private static final int SHAPES = 40;
    private static final int SMALL_SHAPES = 10; // as many as a model needs, for the slowest phone
    private static final double SMALL_FLOPS = 4e6;
    private static final int SUSTAINED_SIDE = 512;
    private static final int WINDOWS = 60;
    private static final int REPEATS = 3;
    private static final int STRIPS = 3;
    private static final double NANOS_PER_S = 1e9;

    private final Kernel kernel;
    private final double samplesS;
    private final double sustainedS;
    private final LongSupplier nanos;
    private final DoubleSupplier temperatureC;
    private final DoubleConsumer progress;
    private final BooleanSupplier stopped;

    /**
     * @param samplesS seconds for the shapes; what does not fit in them is left out
     * @param sustainedS seconds for the large product
     * @param nanos a clock that never goes back
     * @param temperatureC of the battery, or NaN
     * @param progress told how much is done, from 0 to 1
     * @param stopped whether its owner does not want it any more
     */
    public ProfileRun(
            Kernel kernel,
            double samplesS,
            double sustainedS,
            LongSupplier nanos,
            DoubleSupplier temperatureC,
            DoubleConsumer progress,
            BooleanSupplier stopped) {
        this.kernel = kernel;
        this.samplesS = samplesS;
        this.sustainedS = sustainedS;
        this.nanos = nanos;
        this.temperatureC = temperatureC;
        this.progress = progress;
        this.stopped = stopped;
    }

    /**
     * Measure.
     *
     * @return null when it was stopped
     * @throws KernelException when the kernel fails
     */
    public Measurements run() throws KernelException {
        List<Sample> samples = samples();
        List<Window> windows = windows();
        if (stopped.getAsBoolean()) {
            return null;
        }
        String about = kernel.name() + ", " + kernel.about();
        return new Measurements(about, samples, windows);
    }

    /** One shape after the other, in every series; round the shapes while there is time. */
    private List<Sample> samples() throws KernelException {
        List<Sample> samples = new ArrayList<>();
        long beganNanos = nanos.getAsLong();
        double secondsAFlop = 0;
        for (int[] shape : shapes()) {
            for (Series series : Series.values()) {
                for (int strips : new int[] {1, STRIPS}) {
                    double doneS = (nanos.getAsLong() - beganNanos) / NANOS_PER_S;
                    double flops = 2.0 * shape[0] * shape[1] * shape[2];
                    double expectedS = secondsAFlop * flops * strips * strips * (REPEATS + 1);
                    boolean needed = samples.size() < 2 * SMALL_SHAPES * Series.values().length;
                    if (stopped.getAsBoolean() || (!needed && doneS + expectedS > samplesS)) {
                        continue;
                    }
                    Sample sample = sample(series, shape, strips);
                    samples.add(sample);
                    secondsAFlop = Math.max(0.5 * secondsAFlop, sample.seconds / flops);
                    progress.accept(Math.min(1, doneS / samplesS) * samplesShare());
                }
            }
        }
        return samples;
    }

    private double samplesShare() {
        return samplesS / (samplesS + sustainedS);
    }

    /** The same every time; the first are small. */
    private static List<int[]> shapes() {
        Random random = new Random(1);
        List<int[]> shapes = new ArrayList<>();
        while (shapes.size() < SHAPES) {
            int rows = SIDES[random.nextInt(SIDES.length)];
            int columns = SIDES[random.nextInt(SIDES.length)];
            int depth = DEPTHS[random.nextInt(DEPTHS.length)];
            boolean small = 2.0 * rows * columns * depth <= SMALL_FLOPS;
            if (small || shapes.size() >= SMALL_SHAPES) {
                shapes.add(new int[] {rows, columns, depth});
            }
        }
        return shapes;
    }

    /** Seconds a block, of a tile of some strips a side; the first time does not count. */
    private Sample sample(Series series, int[] shape, int strips) throws KernelException {
        int rows = shape[0];
        int columns = shape[1];
        int depth = shape[2];
        List<Matrix> left = new ArrayList<>();
        List<Matrix> right = new ArrayList<>();
        for (int i = 0; i < strips; i++) {
            left.add(matrix(rows, depth, series.transposeA, series.inputs));
            right.add(matrix(depth, columns, series.transposeB, series.inputs));
        }
        double[] tookS = new double[REPEATS];
        for (int i = -1; i < REPEATS; i++) {
            long beganNanos = nanos.getAsLong();
            tile(series, left, right, rows, columns);
            if (i >= 0) {
                tookS[i] = (nanos.getAsLong() - beganNanos) / NANOS_PER_S;
            }
        }
        Arrays.sort(tookS);
        double seconds = Math.max(tookS[REPEATS / 2], 1e-9) / (strips * strips);
        return new Sample(series, rows, columns, depth, strips, seconds);
    }

    private void tile(Series series, List<Matrix> left, List<Matrix> right, int rows, int columns)
            throws KernelException {
        List<Matrix> held = new ArrayList<>();
        try {
            for (Matrix a : left) {
                kernel.hold(a);
                held.add(a);
            }
            for (Matrix b : right) {
                kernel.hold(b);
                held.add(b);
            }
            for (Matrix a : left) {
                for (Matrix b : right) {
                    kernel.multiply(product(series, a, b, rows, columns));
                }
            }
        } finally {
            for (Matrix matrix : held) {
                kernel.forget(matrix);
            }
        }
    }

    private static Product product(Series series, Matrix a, Matrix b, int rows, int columns) {
        return new Product(
                Collections.singletonList(new Product.Pair(a, b)),
                series.transposeA,
                series.transposeB,
                rows,
                columns,
                series.out);
    }

    private List<Window> windows() throws KernelException {
        int side = SUSTAINED_SIDE;
        Matrix a = matrix(side, side, false, DType.FP32);
        Matrix b = matrix(side, side, false, DType.FP32);
        List<Window> windows = new ArrayList<>();
        kernel.hold(a);
        kernel.hold(b);
        try {
            Product product = product(Series.FP32_NN, a, b, side, side);
            long beganNanos = nanos.getAsLong();
            double atS = 0;
            while (atS < sustainedS && !stopped.getAsBoolean()) {
                double flops = 0;
                double endS = atS;
                while (endS - atS < sustainedS / WINDOWS && !stopped.getAsBoolean()) {
                    kernel.multiply(product);
                    flops += product.flops();
                    endS = (nanos.getAsLong() - beganNanos) / NANOS_PER_S;
                }
                double middleS = (atS + endS) / 2;
                double speed = flops / Math.max(endS - atS, 1e-9);
                windows.add(new Window(middleS, speed, temperatureC.getAsDouble()));
                atS = endS;
                progress.accept(
                        samplesShare() + (1 - samplesShare()) * Math.min(1, atS / sustainedS));
            }
        } finally {
            kernel.forget(a);
            kernel.forget(b);
        }
        return windows;
    }

    private static Matrix matrix(int rows, int columns, boolean transposed, DType dtype) {
        float[] values = new float[rows * columns];
        int state = 31 * rows + columns;
        for (int i = 0; i < values.length; i++) {
            state = state * 1664525 + 1013904223; // quicker than java.util.Random
            values[i] = state * 0x1p-32f;
        }
        return new Matrix(
                transposed ? columns : rows,
                transposed ? rows : columns,
                dtype,
                Numbers.narrowed(values, dtype));
    }
}
