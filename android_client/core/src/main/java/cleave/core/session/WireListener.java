package cleave.core.session;

import java.nio.ByteBuffer;

/** Told what happens on a wire, in a thread of its own; after {@code ended} nothing happens. */
public interface WireListener {
    /** Messages may be sent. */
    void opened();

    /** A message came: from position to limit, the listener's from now on. */
    void received(ByteBuffer message);

    /** It came as text, or larger than the protocol allows. */
    void receivedWrong(String text);

    /** The connection is gone, or never was. */
    void ended(Ending ending);
}
