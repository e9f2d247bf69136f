package cleave.core.kernels;

import java.nio.ByteBuffer;
import java.util.Arrays;

/**
 * A thread's room for one block of a result: some rows of c and at most PANEL columns, and what of
 * a and b is multiplied into it at a time, widened and laid out for the inner loop.
 */
final class Block {
    /** Most rows of a block: with PANEL columns it takes 256 KiB, as the second cache holds. */
    static final int MOST_ROWS = 256;

    /**
     * Rows that are multiplied with all of b's panel before the next: these stay in the first
     * cache.
     */
    private static final int ROWS_AT_ONCE = 16;

    /** Rows of a transposed b that are read before they are turned: a cache line of c. */
    private static final int TURNED_AT_ONCE = 16;

    private static final int PANEL = InnerLoop.PANEL;
    private static final int DEPTH = InnerLoop.DEPTH;

    private final InnerLoop loop;
    private final float[] c = new float[MOST_ROWS * PANEL];
    private final float[] a = new float[MOST_ROWS * DEPTH];
    private final float[] b = new float[DEPTH * PANEL];
    private final float[] turned = new float[Math.max(MOST_ROWS, TURNED_AT_ONCE * DEPTH)];

    Block(InnerLoop loop) {
        this.loop = loop;
    }

    /**
     * Compute one block.
     *
     * @param row where it begins in the result
     * @param rows of it, at most MOST_ROWS
     * @param columns of it, at most PANEL
     * @param result the whole result's elements, which other threads write to elsewhere
     */
    void compute(
            Product product, int row, int rows, int column, int columns, ByteBuffer result) {
        int padded = up(rows, loop.rows);
        Arrays.fill(c, 0, padded * PANEL, 0);
        for (Product.Pair pair : product.pairs) {
            int depth = (int) product.depth(pair);
            Elements left = new Elements(pair.a.payload(), pair.a.dtype);
            Elements right = new Elements(pair.b.payload(), pair.b.dtype);
            int wholeRows = (int) product.rows;
            int wholeColumns = (int) product.columns;
            for (int k = 0; k < depth; k += DEPTH) {
                int part = Math.min(DEPTH, depth - k);
                if (product.transposeA) {
                    readTurned(left, wholeRows, row, rows, k, part);
                } else {
                    read(left, depth, row, rows, k, part);
                }
                if (product.transposeB) {
                    readTurnedPanel(right, depth, k, part, column, columns);
                } else {
                    readPanel(right, wholeColumns, k, part, column, columns);
                }
                pad(rows, padded, part, columns);
                multiply(padded, up(part, loop.depth), columns);
            }
        }
        Elements out = new Elements(result, product.out);
        for (int i = 0; i < rows; i++) {
            out.write((row + i) * (int) product.columns + column, columns, c, i * PANEL);
        }
    }

    private void multiply(int rows, int depth, int columns) {
        for (int first = 0; first < rows; first += ROWS_AT_ONCE) {
            int last = Math.min(rows, first + ROWS_AT_ONCE);
            for (int k = 0; k < depth; k += loop.depth) {
                for (int i = first; i < last; i += loop.rows) {
                    loop.add(c, i * PANEL, b, k * PANEL, a, i * DEPTH + k, columns);
                }
            }
        }
    }

    /** Rows of a as it lies. */
    private void read(Elements from, int width, int row, int rows, int k, int part) {
        for (int i = 0; i < rows; i++) {
            from.read((row + i) * width + k, part, a, i * DEPTH);
        }
    }

    /** Rows of a, which is stored transposed. */
    private void readTurned(Elements from, int width, int row, int rows, int k, int part) {
        for (int p = 0; p < part; p++) {
            from.read((k + p) * width + row, rows, turned, 0);
            for (int i = 0; i < rows; i++) {
                a[i * DEPTH + p] = turned[i];
            }
        }
    }

    /** A panel of b as it lies. */
    private void readPanel(Elements from, int width, int k, int part, int column, int columns) {
        for (int p = 0; p < part; p++) {
            from.read((k + p) * width + column, columns, b, p * PANEL);
        }
    }

    /** A panel of b, which is stored transposed. */
    private void readTurnedPanel(
            Elements from, int width, int k, int part, int column, int columns) {
        for (int j = 0; j < columns; j += TURNED_AT_ONCE) {
            int some = Math.min(TURNED_AT_ONCE, columns - j);
            for (int r = 0; r < some; r++) {
                from.read((column + j + r) * width + k, part, turned, r * DEPTH);
            }
            for (int p = 0; p < part; p++) {
                for (int r = 0; r < some; r++) {
                    b[p * PANEL + j + r] = turned[r * DEPTH + p];
                }
            }
        }
    }

    /** Zeros where the inner loop goes on beyond what there is. */
    private void pad(int rows, int padded, int part, int columns) {
        int paddedDepth = up(part, loop.depth);
        for (int i = 0; i < rows; i++) {
            Arrays.fill(a, i * DEPTH + part, i * DEPTH + paddedDepth, 0);
        }
        for (int i = rows; i < padded; i++) {
            Arrays.fill(a, i * DEPTH, i * DEPTH + paddedDepth, 0);
        }
        for (int p = part; p < paddedDepth; p++) {
            Arrays.fill(b, p * PANEL, p * PANEL + columns, 0);
        }
    }

    private static int up(int value, int multiple) {
        return (value + multiple - 1) / multiple * multiple;
    }
}
