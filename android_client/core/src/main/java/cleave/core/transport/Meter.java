package cleave.core.transport;

import java.io.IOException;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Counts what comes between two messages. OkHttp collects a message of any size before it hands it
 * over; this ends the connection of a server that would fill the memory so.
 */
final class Meter {
    /** More came than a message may have. */
    static final class ExceededException extends IOException {
        private static final long serialVersionUID = 1;

        ExceededException(long most) {
            super("the server sent a message of more than " + most + " bytes");
        }
    }

    /** What frames and TLS records add to a message's bytes: a sixteenth is far more than usual. */
    private static final int ADDED_SHARE = 16;

    private final long most;
    private final AtomicLong came = new AtomicLong();

    /** @param most the largest message, in bytes */
    Meter(long most) {
        this.most = most;
    }

    /** So many bytes came. */
    void add(long bytes) throws IOException {
        if (came.addAndGet(bytes) > most + most / ADDED_SHARE) {
            throw new ExceededException(most);
        }
    }

    /** A message is whole, or a connection begins: the next one counts from here. */
    void reset() {
        came.set(0);
    }
}
