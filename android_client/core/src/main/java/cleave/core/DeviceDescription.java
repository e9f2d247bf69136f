package cleave.core;

import cleave.core.protocol.Limits;

/** What a device says of itself when it joins. */
public final class DeviceDescription {
    /** For people: shown in lists. */
    public final String name;

    /** What the server may fill; at least 16 MiB. Half of what is free is a safe choice. */
    public final long memoryBytes;

    /** The name of a device profile that fits, or empty. */
    public final String profile;

    /** What sort of thing it is, in the protocol's words, as {@code phone}; empty: unknown. */
    public final String kind;

    /**
     * @throws IllegalArgumentException for less memory than the protocol asks for
     */
    public DeviceDescription(String name, long memoryBytes, String profile, String kind) {
        if (memoryBytes < Limits.MIN_DEVICE_MEMORY_BYTES) {
            throw new IllegalArgumentException(
                    "a device offers 16777216 bytes of memory or more, not " + memoryBytes);
        }
        this.name = name;
        this.memoryBytes = memoryBytes;
        this.profile = profile;
        this.kind = kind;
    }
}
