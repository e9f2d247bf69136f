package cleave.core.session;

import cleave.core.device.HeldArrays;

/** What a device keeps after its connection was lost: arrays, and what runs graphs on them. */
public final class Kept {
    /** The arrays. */
    public final HeldArrays arrays;

    final GraphThread graphs;

    Kept(HeldArrays arrays, GraphThread graphs) {
        this.arrays = arrays;
        this.graphs = graphs;
    }
}
