package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * A matrix; a kernel that holds it knows it by its identity.
 *
 * <p>Rows and columns are longs: one of them may be huge where the other is 0. Of a matrix that has
 * elements, both fit into an int.
 */
public final class Matrix {
    public final long rows;
    public final long columns;
    public final DType dtype;
    private final ByteBuffer payload;

    /**
     * @param payload its elements, row by row, from position to limit, at any alignment; not copied
     */
    public Matrix(long rows, long columns, DType dtype, ByteBuffer payload) {
        this.rows = rows;
        this.columns = columns;
        this.dtype = dtype;
        this.payload = payload;
    }

    /** A view of its elements of its own: little-endian, read-only, from position to limit. */
    public ByteBuffer payload() {
        return payload.asReadOnlyBuffer().order(ByteOrder.LITTLE_ENDIAN);
    }

    /** Size of its elements. */
    public int payloadBytes() {
        return payload.remaining();
    }
}
