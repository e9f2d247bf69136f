package cleave.core;

/** Whether the device may work now, as its owner's conditions say. */
public final class Verdict {
    /** It may. */
    public static final Verdict WORK = new Verdict(null);

    private final String reason;

    private Verdict(String reason) {
        this.reason = reason;
    }

    /**
     * It may not: what it was given is answered, the session ends, and a new one begins when it may
     * again.
     *
     * @param reason for people: "it is not charging"
     */
    public static Verdict pause(String reason) {
        return new Verdict(reason);
    }

    public boolean mayWork() {
        return reason == null;
    }

    /** Why it may not; empty where it may. */
    public String reason() {
        return reason == null ? "" : reason;
    }
}
