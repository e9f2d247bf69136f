package cleave.core.session;

import cleave.core.protocol.Message;

/** What the server said when it let the device in. */
public final class Welcome {
    /** The number of the session, for people. */
    public final long device;

    /** The longest the device may say nothing. */
    public final double heartbeatS;

    /** The server's id; empty for one that knows nobody again. */
    public final String server;

    /** The device's own credential, in exchange for a join code; else empty. */
    public final String credential;

    Welcome(long device, double heartbeatS, String server, String credential) {
        this.device = device;
        this.heartbeatS = heartbeatS;
        this.server = server;
        this.credential = credential;
    }

    static Welcome of(Message message) {
        return new Welcome(
                message.integer("device"),
                message.real("heartbeat_s"),
                message.text("server"),
                message.text("credential"));
    }
}
