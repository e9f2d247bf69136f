package cleave.core.graphs;

import cleave.core.kernels.DType;

/** Return rows of an array, which is seen as rows of so many columns, whatever its shape is. */
public final class FetchOrder {
    public final long run;
    public final long array;
    public final long firstRow;
    public final long rows;
    public final long columns;

    /** The dtype of the result. */
    public final DType out;

    public FetchOrder(long run, long array, long firstRow, long rows, long columns, DType out) {
        this.run = run;
        this.array = array;
        this.firstRow = firstRow;
        this.rows = rows;
        this.columns = columns;
        this.out = out;
    }
}
