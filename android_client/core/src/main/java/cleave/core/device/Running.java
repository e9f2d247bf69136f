package cleave.core.device;

import cleave.core.kernels.DType;

/** A run that is not answered yet: what its answer says. */
final class Running {
    final long resultBytes;
    final double flops;
    final long rows;
    final long columns;
    final DType out; // null where a graph keeps its outputs here

    Running(long resultBytes, double flops, long rows, long columns, DType out) {
        this.resultBytes = resultBytes;
        this.flops = flops;
        this.rows = rows;
        this.columns = columns;
        this.out = out;
    }

    /** A server says what a graph takes: of more than this no device does so much. */
    private static final double MOST_FLOPS = 1e15;

    /** Of a graph, whose outputs count in the store. */
    static Running graph(double flops) {
        return new Running(0, Math.min(flops, MOST_FLOPS), 0, 0, null);
    }
}
