package cleave.core;

/**
 * Where a device connects: to the server that its owner's link means, or to one that this sent it
 * to. It stays with the latter as long as that welcomes it. Where that does not answer, or has no
 * room, it goes back to the former, which knows what servers there are. One that refuses it for
 * good ends it, as the first one would.
 */
final class ServerSelection {
    private final JoinLink home;
    private JoinLink elsewhere; // null: it is at home

    ServerSelection(JoinLink home) {
        this.home = home;
    }

    /** The server that is due. */
    JoinLink due() {
        return elsewhere == null ? home : elsewhere;
    }

    /**
     * Note how a session with that server ended.
     *
     * @param welcomed whether the server had welcomed the device
     * @param movesTo the join URL of the server that it sent the device to; empty for none
     */
    void ended(boolean welcomed, String movesTo) {
        if (!welcomed) {
            elsewhere = null;
        }
        if (movesTo.isEmpty()) {
            return;
        }
        try {
            JoinLink moved = JoinLink.parse(movesTo);
            if (moved.isSecure || !home.isSecure) {
                elsewhere = moved;
            }
        } catch (InvalidLinkException error) {
            // What is no address moves nobody.
        }
    }
}
