package cleave.core.device;

import cleave.core.kernels.Matrix;

/** What was put, or made, under an id. */
final class Stored {
    /** What it is. */
    enum Kind {
        ARRAY,
        INDICES,
        JOINED,
        OUTPUT,
        GRAPH
    }

    final Kind kind;
    final long bytes;
    final Matrix matrix; // of an array that was put; else null
    boolean held; // by the kernel
    boolean given; // to the graphs, also if it is no array that was put
    boolean made; // false for an output that no run has made

    private Stored(Kind kind, long bytes, Matrix matrix) {
        this.kind = kind;
        this.bytes = bytes;
        this.matrix = matrix;
        given = matrix == null;
        made = kind != Kind.OUTPUT;
    }

    static Stored array(Matrix matrix) {
        return new Stored(Kind.ARRAY, matrix.payloadBytes(), matrix);
    }

    static Stored of(Kind kind, long bytes) {
        return new Stored(kind, bytes, null);
    }
}
