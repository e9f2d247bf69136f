package cleave.core.policy;

/** How much the system slows itself down for its heat, in Android's own steps. */
public enum Throttling {
    /** The system does not tell. */
    UNKNOWN,
    NONE,
    LIGHT,
    MODERATE,
    SEVERE,
    CRITICAL,
    EMERGENCY,
    SHUTDOWN;

    /** Android's thermal status, from 0 on; anything else is unknown. */
    public static Throttling ofStatus(int status) {
        return status >= 0 && status + 1 < values().length ? values()[status + 1] : UNKNOWN;
    }

    /** Whether the owner would notice. */
    boolean isSevere() {
        return compareTo(SEVERE) >= 0;
    }

    /** Whether it slows down at all. */
    public boolean slowsDown() {
        return compareTo(LIGHT) >= 0;
    }
}
