package cleave.core.session;

import cleave.core.protocol.ByeCode;
import cleave.core.protocol.ErrorCode;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;

/** How a session ended, for people, and the server's code if it refused. */
public final class Ending {
    public final End end;
    public final String text;

    /** Null unless the server refused, for a reason that is known here. */
    public final ErrorCode code;

    /** Whether trying again unchanged would change nothing. */
    public final boolean isForGood;

    /** Seconds to wait at least before coming back, a lost connection's wait aside. */
    public final double backS;

    /** The join URL of the server that this one sent the device to; empty where it did not. */
    public final String movesTo;

    private Ending(End end, String text, ErrorCode code, boolean isForGood) {
        this(end, text, code, isForGood, 0, "");
    }

    private Ending(
            End end,
            String text,
            ErrorCode code,
            boolean isForGood,
            double backS,
            String movesTo) {
        this.end = end;
        this.text = text;
        this.code = code;
        this.isForGood = isForGood;
        this.backS = Math.min(backS, Limits.MAX_RETRY_AFTER_S);
        this.movesTo = movesTo;
    }

    /** The server said goodbye: perhaps only for now, unless the device got what it wanted. */
    static Ending bye(Message bye) {
        String reason = bye.text("reason");
        String code = bye.text("code");
        boolean done =
                ByeCode.DRAINED.is(code) || ByeCode.MEASURED.is(code) || ByeCode.LEAVING.is(code);
        String text = reason.isEmpty() ? "the server ended the session" : reason;
        String movesTo = ByeCode.MOVED.is(code) ? bye.text("address") : "";
        return new Ending(End.BYE, text, null, done, bye.real("retry_after_s"), movesTo);
    }

    /** A refusal with a code that is perhaps not known here: then the server says when it passes. */
    static Ending refused(Message error) {
        ErrorCode code = ErrorCode.named(error.text("code"));
        double backS = error.real("retry_after_s");
        boolean passing = code == null ? backS > 0 : passes(code);
        return new Ending(End.REFUSED, error.text("message"), code, !passing, backS, "");
    }

    static Ending refused(ErrorCode code, String text) {
        return new Ending(End.REFUSED, text, code, !passes(code));
    }

    /** Silence or a garbled message may pass; who is refused for anything else stays refused. */
    private static boolean passes(ErrorCode code) {
        return code == ErrorCode.LIMIT || code == ErrorCode.PROTOCOL;
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
