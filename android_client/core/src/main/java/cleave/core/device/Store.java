package cleave.core.device;

import cleave.core.protocol.ProtocolException;
import java.util.HashMap;
import java.util.Map;

/** Arrays by the names that the server gave them, and the memory that they and results take. */
final class Store {
    private final long memoryBytes;
    private final Map<Long, Stored> arrays = new HashMap<>();
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

    /** What is there under that name, or null. */
    Stored get(long id) {
        return arrays.get(id);
    }

    void put(long id, Stored stored) {
        arrays.put(id, stored);
        takenBytes += stored.bytes;
    }

    /** Forget an array or graph; returns it, or null where there was none. */
    Stored remove(long id) {
        Stored stored = arrays.remove(id);
        if (stored != null) {
            takenBytes -= stored.bytes;
        }
        return stored;
    }

    /** All arrays and graphs, by their names. */
    Map<Long, Stored> all() {
        return new HashMap<>(arrays);
    }

    /** Forget everything, also reserved results. */
    void clear() {
        arrays.clear();
        takenBytes = 0;
    }

    /**
     * Refuse an id that is taken, or what does not fit.
     *
     * @throws ProtocolException for either
     */
    void needRoom(long id, long bytes) throws ProtocolException {
        if (get(id) != null) {
            throw new ProtocolException("array " + id + " was sent twice");
        }
        if (!fits(bytes)) {
            throw new ProtocolException(
                    "array " + id + " needs " + bytes + " bytes, but " + takenBytes + " of "
                            + memoryBytes + " bytes are in use");
        }
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
