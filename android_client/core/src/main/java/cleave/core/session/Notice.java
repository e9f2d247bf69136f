package cleave.core.session;

import cleave.core.protocol.ErrorCode;

/** A change of what a guest does. */
public final class Notice {
    public final State state;

    /** Why, for people; empty where there is nothing to say. */
    public final String reason;

    /** The server's code, if it refused the device for good; else null. */
    public final ErrorCode code;

    /** How the last session ended, where it ended for good or is to be tried again; else null. */
    public final End end;

    /** Seconds until the server is tried again; 0 in other states than waiting. */
    public final double retryS;

    /** Without an ending. */
    public Notice(State state, String reason) {
        this.state = state;
        this.reason = reason;
        code = null;
        end = null;
        retryS = 0;
    }

    /** After one. */
    Notice(State state, Ending ending, double retryS) {
        this.state = state;
        this.reason = ending.text;
        this.code = ending.code;
        this.end = ending.end;
        this.retryS = retryS;
    }

    /** Whether the server is away for long: nobody need stay awake for the next try. */
    public boolean waitsLong() {
        return retryS >= Guest.LONGEST_WAIT_S / 2;
    }
}
