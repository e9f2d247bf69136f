package cleave.core.session;

import cleave.core.protocol.ErrorCode;

/** A change of what a guest does. */
public final class Notice {
    public final State state;

    /** Why, for people; empty where there is nothing to say. */
    public final String reason;

    /** The server's code, if it refused the device for good; else null. */
    public final ErrorCode code;

    /** Seconds until the server is tried again; 0 in other states than waiting. */
    public final double retryS;

    Notice(State state, String reason, ErrorCode code, double retryS) {
        this.state = state;
        this.reason = reason;
        this.code = code;
        this.retryS = retryS;
    }
}
