package cleave.core.profile;

/** How long one block took. */
final class Sample {
    final Series series;
    final int rows;
    final int columns;
    final int depth;

    /** Strips a side of the tile that the block was part of. */
    final int strips;

    final double seconds;

    Sample(Series series, int rows, int columns, int depth, int strips, double seconds) {
        this.series = series;
        this.rows = rows;
        this.columns = columns;
        this.depth = depth;
        this.strips = strips;
        this.seconds = seconds;
    }

    double flopsPerS() {
        return 2.0 * rows * columns * depth / seconds;
    }
}
