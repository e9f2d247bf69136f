package cleave.core.device;

import java.util.Map;

/** The arrays and graphs that a device still has after its connection was lost. */
public final class HeldArrays {
    /** What the server called them. */
    public final String of;

    final Map<Long, Stored> store;

    HeldArrays(String of, Map<Long, Stored> store) {
        this.of = of;
        this.store = store;
    }
}
