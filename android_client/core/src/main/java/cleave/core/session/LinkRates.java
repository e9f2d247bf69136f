package cleave.core.session;

import cleave.core.protocol.Message;

/** What a link can do, as a server measured it. */
public final class LinkRates {
    /** Server to device. */
    public final double downlinkBytesPerS;

    /** Device to server. */
    public final double uplinkBytesPerS;

    /** Half of the shortest round trip. */
    public final double latencyS;

    public LinkRates(double downlinkBytesPerS, double uplinkBytesPerS, double latencyS) {
        this.downlinkBytesPerS = downlinkBytesPerS;
        this.uplinkBytesPerS = uplinkBytesPerS;
        this.latencyS = latencyS;
    }

    static LinkRates of(Message measured) {
        return new LinkRates(
                measured.real("downlink_bytes_per_s"),
                measured.real("uplink_bytes_per_s"),
                measured.real("latency_s"));
    }
}
