package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.concurrent.ThreadFactory;

/** Multiplies with the processor: blocks that fit into its caches, on several threads. */
public final class CpuKernel implements Kernel {
    /** Products below this are over sooner than threads are woken for them. */
    private static final double SHARED_FLOPS = 2e6;

    /** Pieces for each thread, so that all end at about the same time; at least, if rows allow. */
    private static final int PIECES_PER_THREAD = 3;

    private static final int FEWEST_ROWS = 32;

    private final Crew crew;
    private final InnerLoop loop;
    private final Block[] blocks;

    CpuKernel(int threads, ThreadFactory factory, InnerLoop loop) {
        crew = new Crew(threads, factory);
        this.loop = loop;
        blocks = new Block[threads];
    }

    /**
     * A factory of this kernel, with the inner loop that is faster here.
     *
     * @param threads how many multiply, 1 or more
     * @param factory makes those that help the thread that calls; they should be daemons
     */
    public static KernelFactory factory(int threads, ThreadFactory factory) {
        if (threads < 1) {
            throw new IllegalArgumentException("1 thread or more multiplies, not " + threads);
        }
        return new KernelFactory() {
            @Override
            public String name() {
                return "cpu";
            }

            @Override
            public Kernel make() {
                return new CpuKernel(threads, factory, LoopTrial.faster(System::nanoTime));
            }
        };
    }

    /** One for little work, ready at once: one thread, and an inner loop that nobody timed. */
    public static Kernel small() {
        return new CpuKernel(1, Thread::new, InnerLoop.ONE_BY_EIGHT);
    }

    @Override
    public String name() {
        return "cpu";
    }

    @Override
    public String about() {
        return (crew.size == 1 ? "1 thread" : crew.size + " threads") + ", "
                + loop.rows + "x" + loop.depth + " inner loop";
    }

    @Override
    public void hold(Matrix matrix) {
        // Matrices are read where they lie.
    }

    @Override
    public void forget(Matrix matrix) {
        // See hold.
    }

    @Override
    public ByteBuffer multiply(Product product) {
        ByteBuffer result =
                ByteBuffer.allocate(product.resultBytes()).order(ByteOrder.LITTLE_ENDIAN);
        if (product.isEmpty()) {
            return result;
        }
        int members = product.flops() < SHARED_FLOPS ? 1 : crew.size;
        int panels = parts((int) product.columns, InnerLoop.PANEL);
        int rowsEach = rowsEach((int) product.rows, panels, members);
        int pieces = panels * parts((int) product.rows, rowsEach);
        crew.work(
                pieces,
                members,
                (member, piece) -> {
                    int row = piece / panels * rowsEach;
                    int column = piece % panels * InnerLoop.PANEL;
                    int rows = Math.min(rowsEach, (int) product.rows - row);
                    int columns = Math.min(InnerLoop.PANEL, (int) product.columns - column);
                    block(member).compute(product, row, rows, column, columns, result);
                });
        return result;
    }

    @Override
    public void close() {
        crew.close();
    }

    /** A thread's room, made when it is first needed. */
    private Block block(int member) {
        if (blocks[member] == null) {
            blocks[member] = new Block(loop);
        }
        return blocks[member];
    }

    /** As many as there is room for, and fewer where threads would have nothing to do. */
    private static int rowsEach(int rows, int panels, int members) {
        int wanted = members == 1 ? 1 : parts(PIECES_PER_THREAD * members, panels);
        int even = parts(rows, wanted);
        int most = Math.min(Block.MOST_ROWS, even);
        return Math.min(Block.MOST_ROWS, Math.max(FEWEST_ROWS, parts(most, 4) * 4));
    }

    private static int parts(int whole, int part) {
        return (whole + part - 1) / part;
    }
}
