package cleave.core.session;

import java.nio.ByteBuffer;

/** A connection that carries whole messages, in order. Its methods return at once. */
public interface Wire {
    /**
     * Hand over one message.
     *
     * @param payload from position to limit; null for a message without
     */
    void send(byte[] header, ByteBuffer payload);

    /** Bytes of messages that were handed over and have not left. */
    long waitingBytes();

    /** Close it once what was handed over has left. */
    void close();

    /** Close it now. */
    void cancel();
}
