package cleave.core.session;

import cleave.core.coding.Coded;
import cleave.core.protocol.Codec;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.nio.ByteBuffer;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.function.LongConsumer;

/**
 * Messages on their way to a wire, in a thread of its own. What a wire has taken cannot be
 * overtaken, so it is given little at a time, and signs of life go first.
 */
final class Outbox implements Runnable {
    /** What a wire may have waiting: so that a link has the next message at hand. */
    private static final long AHEAD_BYTES = 1 << 20;

    /** How often a wire that has enough is looked at: it does not tell when it has room. */
    private static final long LOOK_MS = 1;

    private final Wire wire;
    private final LongConsumer sent;
    private final Deque<Message> messages = new ArrayDeque<>();
    private volatile boolean codesResults;
    private boolean closing;
    private boolean closed;

    /** @param sent told of the bytes of each message that the wire took */
    Outbox(Wire wire, LongConsumer sent) {
        this.wire = wire;
        this.sent = sent;
    }

    /** Code results from now on, in this thread: nothing else then waits for it. */
    void codeResults() {
        codesResults = true;
    }

    /** Send it after all others. */
    synchronized void add(Message message) {
        if (!closing) {
            messages.addLast(message);
            notifyAll();
        }
    }

    /** Send a sign of life before all others, unless one waits already. */
    synchronized void addHeartbeat() {
        boolean waits =
                !messages.isEmpty() && messages.getFirst().type == MessageType.HEARTBEAT;
        if (!closing && !waits) {
            messages.addFirst(Message.of(MessageType.HEARTBEAT).build());
            notifyAll();
        }
    }

    /** Forget what is there. */
    synchronized void clear() {
        messages.clear();
    }

    /** Send what is there, then close the wire. */
    synchronized void close() {
        closing = true;
        notifyAll();
    }

    /** Send nothing more, and close the wire now. */
    synchronized void cancel() {
        closing = true;
        closed = true;
        messages.clear();
        notifyAll();
        wire.cancel();
    }

    @Override
    public void run() {
        try {
            for (Message next = take(); next != null; next = take()) {
                boolean codes = codesResults && next.type == MessageType.RESULT;
                Message message = codes ? Coded.result(next) : next;
                byte[] header = Codec.header(message);
                ByteBuffer payload = message.payload();
                wire.send(header, message.payload());
                sent.accept(header.length + (payload == null ? 0 : payload.remaining()));
            }
            wire.close();
        } catch (InterruptedException error) {
            wire.cancel(); // nobody waits for what is left
        }
    }

    /** The next message, once the wire has room for it; null when there will be none. */
    private synchronized Message take() throws InterruptedException {
        while (!closed) {
            boolean room = wire.waitingBytes() < AHEAD_BYTES;
            if (room && !messages.isEmpty()) {
                return messages.removeFirst();
            }
            if (messages.isEmpty()) {
                if (closing) {
                    return null;
                }
                wait();
            } else {
                wait(LOOK_MS);
            }
        }
        return null;
    }
}
