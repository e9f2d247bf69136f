package cleave.core.session;

import cleave.core.protocol.ErrorCode;

/** How a session ended, for people, and the server's code if it refused. */
public final class Ending {
    public final End end;
    public final String text;

    /** Null unless the server refused. */
    public final ErrorCode code;

    /** Whether trying again unchanged would change nothing. */
    public final boolean isForGood;

    private Ending(End end, String text, ErrorCode code, boolean isForGood) {
        this.end = end;
        this.text = text;
        this.code = code;
        this.isForGood = isForGood;
    }

    public static Ending bye(String reason) {
        return new Ending(End.BYE, reason.isEmpty() ? "the server said bye" : reason, null, true);
    }

    /** Silence or a garbled message may pass; who is refused for anything else stays refused. */
    public static Ending refused(ErrorCode code, String text) {
        boolean passing = code == ErrorCode.LIMIT || code == ErrorCode.PROTOCOL;
        return new Ending(End.REFUSED, text, code, !passing);
    }

    public static Ending lost(String text) {
        return new Ending(End.LOST, text, null, false);
    }

    public static Ending left(String text) {
        return new Ending(End.LEFT, text, null, false);
    }

    public static Ending stranger(String text) {
        return new Ending(End.STRANGER, text, null, false);
    }

    /** The device cannot do it, now or later. */
    public static Ending unable(String text) {
        return new Ending(End.LEFT, text, null, true);
    }
}
