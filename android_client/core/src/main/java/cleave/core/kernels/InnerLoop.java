package cleave.core.kernels;

/**
 * The innermost loops, in the forms that compilers turn into vector instructions: a row of c gets
 * multiples of rows of b. All offsets between rows are constants, so that one register addresses
 * them.
 *
 * <p>Which is faster depends on the compiler: HotSpot's does well with stores to several rows in
 * one loop; others may give up on vectors there. So both are tried, and the faster is used. They
 * sum in the same order, so that a result does not depend on which one was faster.
 */
enum InnerLoop {
    /** Four rows of c, four of b. */
    FOUR_BY_FOUR(4, 4) {
        @Override
        void add(float[] c, int ci, float[] b, int bi, float[] a, int ai, int columns) {
            fourByFour(c, ci, b, bi, a, ai, columns);
        }
    },
    /** One row of c, eight of b. */
    ONE_BY_EIGHT(1, 8) {
        @Override
        void add(float[] c, int ci, float[] b, int bi, float[] a, int ai, int columns) {
            oneByEight(c, ci, b, bi, a, ai, columns);
        }
    };

    /** Columns of a panel: the distance of rows of b, and of rows of c. 4 rows are 4 KiB. */
    static final int PANEL = 256;

    /** Depth of a panel: the distance of rows of a. */
    static final int DEPTH = 128;

    /** Rows of c, and of a, that one call takes. */
    final int rows;

    /** Rows of b, and columns of a, that one call takes. */
    final int depth;

    InnerLoop(int rows, int depth) {
        this.rows = rows;
        this.depth = depth;
    }

    /**
     * c += a b, for {@code rows} rows, {@code depth} and some columns.
     *
     * @param ci where c begins; its rows are PANEL apart
     * @param bi where b begins; its rows are PANEL apart
     * @param ai where a begins; its rows are DEPTH apart
     */
    abstract void add(float[] c, int ci, float[] b, int bi, float[] a, int ai, int columns);

    private static void fourByFour(
            float[] c, int ci, float[] b, int bi, float[] a, int ai, int columns) {
        float a00 = a[ai];
        float a01 = a[ai + 1];
        float a02 = a[ai + 2];
        float a03 = a[ai + 3];
        float a10 = a[ai + DEPTH];
        float a11 = a[ai + DEPTH + 1];
        float a12 = a[ai + DEPTH + 2];
        float a13 = a[ai + DEPTH + 3];
        float a20 = a[ai + 2 * DEPTH];
        float a21 = a[ai + 2 * DEPTH + 1];
        float a22 = a[ai + 2 * DEPTH + 2];
        float a23 = a[ai + 2 * DEPTH + 3];
        float a30 = a[ai + 3 * DEPTH];
        float a31 = a[ai + 3 * DEPTH + 1];
        float a32 = a[ai + 3 * DEPTH + 2];
        float a33 = a[ai + 3 * DEPTH + 3];
        for (int j = 0; j < columns; j++) {
            float b0 = b[bi + j];
            float b1 = b[bi + j + PANEL];
            float b2 = b[bi + j + 2 * PANEL];
            float b3 = b[bi + j + 3 * PANEL];
            c[ci + j] += a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3;
            c[ci + j + PANEL] += a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3;
            c[ci + j + 2 * PANEL] += a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3;
            c[ci + j + 3 * PANEL] += a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3;
        }
    }

    private static void oneByEight(
            float[] c, int ci, float[] b, int bi, float[] a, int ai, int columns) {
        float a0 = a[ai];
        float a1 = a[ai + 1];
        float a2 = a[ai + 2];
        float a3 = a[ai + 3];
        float a4 = a[ai + 4];
        float a5 = a[ai + 5];
        float a6 = a[ai + 6];
        float a7 = a[ai + 7];
        for (int j = 0; j < columns; j++) {
            float four =
                    a0 * b[bi + j]
                            + a1 * b[bi + j + PANEL]
                            + a2 * b[bi + j + 2 * PANEL]
                            + a3 * b[bi + j + 3 * PANEL];
            float more =
                    a4 * b[bi + j + 4 * PANEL]
                            + a5 * b[bi + j + 5 * PANEL]
                            + a6 * b[bi + j + 6 * PANEL]
                            + a7 * b[bi + j + 7 * PANEL];
            c[ci + j] = c[ci + j] + four + more;
        }
    }
}
