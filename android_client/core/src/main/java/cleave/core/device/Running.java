package cleave.core.device;

import cleave.core.kernels.DType;
import java.util.Collections;
import java.util.List;

/** A run that is not answered yet: what its answer says. */
final class Running {
    final long resultBytes;
    final double flops;
    final long rows;
    final long columns;
    final DType out; // null where a graph keeps its outputs here
    final List<Stored> outputs; // that a graph keeps here

    Running(long resultBytes, double flops, long rows, long columns, DType out) {
        this(resultBytes, flops, rows, columns, out, Collections.emptyList());
    }

    private Running(
            long resultBytes,
            double flops,
            long rows,
            long columns,
            DType out,
            List<Stored> outputs) {
        this.resultBytes = resultBytes;
        this.flops = flops;
        this.rows = rows;
        this.columns = columns;
        this.out = out;
        this.outputs = outputs;
    }

    /** A server says what a graph takes: of more than this no device does so much. */
    private static final double MOST_FLOPS = 1e15;

    /** Of a graph, whose outputs count in the store. */
    static Running graph(double flops, List<Stored> outputs) {
        return new Running(0, Math.min(flops, MOST_FLOPS), 0, 0, null, outputs);
    }
}
