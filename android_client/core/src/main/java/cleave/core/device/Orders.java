package cleave.core.device;

import cleave.core.kernels.DType;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/** From a {@code run} and a store to the product that it asks for. */
final class Orders {
    /** Largest result: a message's payload, with room for its header. */
    private static final long MAX_RESULT_BYTES =
            Limits.MAX_MESSAGE_BYTES - Limits.MAX_HEADER_BYTES;

    /** Why one run cannot be done; the session goes on. */
    static final class CannotRunException extends Exception {
        private static final long serialVersionUID = 1;

        /** Outputs of earlier runs that this one was to replace. */
        final transient List<Long> lost;

        CannotRunException(String reason) {
            this(reason, Collections.emptyList());
        }

        CannotRunException(String reason, List<Long> lost) {
            super(reason);
            this.lost = lost;
        }
    }

    private Orders() {}

    /**
     * What a run asks for.
     *
     * @throws CannotRunException when it cannot be done with what is in the store
     */
    static Product product(Message run, DType out, Store store) throws CannotRunException {
        if (!run.text("op").equals(DeviceCore.MATMUL)) {
            throw new CannotRunException("this device has no op '" + run.text("op") + "'");
        }
        List<Long> inputs = run.ids("inputs");
        if (inputs.isEmpty() || inputs.size() % 2 != 0) {
            throw new CannotRunException("matmul needs pairs of arrays, not " + inputs.size());
        }
        boolean transposeA = run.flag("transpose_a");
        boolean transposeB = run.flag("transpose_b");
        List<Product.Pair> pairs = new ArrayList<>();
        long rows = 0;
        long columns = 0;
        for (int i = 0; i < inputs.size(); i += 2) {
            Matrix a = stored(store, inputs.get(i));
            Matrix b = stored(store, inputs.get(i + 1));
            long m = transposeA ? a.columns : a.rows;
            long depth = transposeA ? a.rows : a.columns;
            long depthOfB = transposeB ? b.columns : b.rows;
            long n = transposeB ? b.rows : b.columns;
            DType dtype = pairs.isEmpty() ? a.dtype : pairs.get(0).a.dtype;
            if (depth != depthOfB || a.dtype != dtype || b.dtype != dtype) {
                throw new CannotRunException(
                        "a " + m + "x" + depth + " " + a.dtype.wireName + " array cannot be "
                                + "multiplied by a " + depthOfB + "x" + n + " "
                                + b.dtype.wireName + " one");
            }
            if (i > 0 && (m != rows || n != columns)) {
                throw new CannotRunException(
                        "products of different shapes cannot be added: " + rows + "x" + columns
                                + " and " + m + "x" + n);
            }
            rows = m;
            columns = n;
            pairs.add(new Product.Pair(a, b));
        }
        if (out != DType.FP32 && out != pairs.get(0).a.dtype) {
            throw new CannotRunException(
                    "the result is asked for as " + out.wireName + ", which no input is");
        }
        checkResult(rows, columns, out, store);
        return new Product(pairs, transposeA, transposeB, rows, columns, out);
    }

    static void checkResult(long rows, long columns, DType out, Store store)
            throws CannotRunException {
        // Division first: a product of two counts may have more than 64 bits.
        long mostItems = MAX_RESULT_BYTES / out.itemBytes;
        if (rows != 0 && columns > mostItems / rows) {
            throw new CannotRunException(
                    "a result of " + rows + "x" + columns + " fits no message");
        }
        long bytes = rows * columns * out.itemBytes;
        if (!store.fits(bytes)) {
            throw new CannotRunException(
                    "the result needs " + bytes + " bytes, but " + store.takenBytes() + " of "
                            + store.memoryBytes() + " are in use");
        }
    }

    private static Matrix stored(Store store, long id) throws CannotRunException {
        Stored found = store.get(id);
        if (found == null || found.matrix == null) {
            throw new CannotRunException("array " + id + " is not here");
        }
        return found.matrix;
    }
}
