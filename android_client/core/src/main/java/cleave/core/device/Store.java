package cleave.core.device;

import cleave.core.kernels.Matrix;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Arrays by the names that the server gave them, and the memory that they and results take. */
final class Store {
    private final long memoryBytes;
    private final Map<Long, Matrix> arrays = new HashMap<>();
    private long takenBytes;

    Store(long memoryBytes) {
        this.memoryBytes = memoryBytes;
    }

    /** Bytes that count against what the device offered: arrays and reserved results. */
    long takenBytes() {
        return takenBytes;
    }

    long memoryBytes() {
        return memoryBytes;
    }

    /** The array of that name, or null. */
    Matrix get(long id) {
        return arrays.get(id);
    }

    void put(long id, Matrix matrix) {
        arrays.put(id, matrix);
        takenBytes += matrix.payloadBytes();
    }

    /** Forget an array; returns it, or null where there was none. */
    Matrix remove(long id) {
        Matrix matrix = arrays.remove(id);
        if (matrix != null) {
            takenBytes -= matrix.payloadBytes();
        }
        return matrix;
    }

    List<Long> ids() {
        return new ArrayList<>(arrays.keySet());
    }

    /** Whether so much more would fit. */
    boolean fits(long bytes) {
        return bytes <= memoryBytes - takenBytes;
    }

    /** Set memory aside for a result. */
    void reserve(long bytes) {
        takenBytes += bytes;
    }

    /** The result is answered, or not wanted any more. */
    void release(long bytes) {
        takenBytes -= bytes;
    }
}
