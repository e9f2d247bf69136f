package cleave.core.kernels;

import java.util.Collections;
import java.util.List;

/**
 * A product to compute: the sum over all pairs of op(a) op(b), kept in fp32 or wider, rounded once
 * to {@code out}. op(X) is X or its transpose. All inputs have one dtype; {@code out} is that or
 * fp32.
 */
public final class Product {

    /** Two matrices to be multiplied. */
    public static final class Pair {
        public final Matrix a;
        public final Matrix b;

        public Pair(Matrix a, Matrix b) {
            this.a = a;
            this.b = b;
        }
    }

    /** One or more. */
    public final List<Pair> pairs;

    /** Every a is stored transposed. */
    public final boolean transposeA;

    /** Every b is stored transposed. */
    public final boolean transposeB;

    /** Of the result. */
    public final long rows;

    public final long columns;
    public final DType out;

    public Product(
            List<Pair> pairs,
            boolean transposeA,
            boolean transposeB,
            long rows,
            long columns,
            DType out) {
        this.pairs = Collections.unmodifiableList(pairs);
        this.transposeA = transposeA;
        this.transposeB = transposeB;
        this.rows = rows;
        this.columns = columns;
        this.out = out;
    }

    /** Dtype of the inputs. */
    public DType inputs() {
        return pairs.get(0).a.dtype;
    }

    /** Columns of op(a), which are the rows of op(b). */
    public long depth(Pair pair) {
        return transposeA ? pair.a.rows : pair.a.columns;
    }

    /** Whether the result has no element. */
    public boolean isEmpty() {
        return rows == 0 || columns == 0;
    }

    /** Size of the result; a device core has checked that it fits into an int. */
    public int resultBytes() {
        return (int) (rows * columns * out.itemBytes);
    }

    /** Floating-point operations, two for each multiply-add. */
    public double flops() {
        double depth = 0;
        for (Pair pair : pairs) {
            depth += depth(pair);
        }
        return 2.0 * rows * columns * depth;
    }
}
