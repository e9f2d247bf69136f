package cleave.core.session;

import cleave.core.protocol.Codec;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** A server in memory: its wire carries the very bytes that a socket would. */
final class FakeServer implements Transport, Wire {
    static final long PATIENCE_S = 20;

    final BlockingQueue<Message> received = new LinkedBlockingQueue<>();
    final BlockingQueue<Consumer<Boolean>> asked = new LinkedBlockingQueue<>();
    volatile long waitingBytes;
    volatile boolean closed;
    volatile Error onSend; // what sending throws, if anything
    private volatile WireListener listener;

    @Override
    public long mostSentBytes() {
        return 1 << 20;
    }

    @Override
    public Wire open(WireListener client) {
        listener = client;
        Thread opening = new Thread(client::opened);
        opening.start();
        return this;
    }

    @Override
    public void ask(Consumer<Boolean> answer) {
        asked.add(answer);
    }

    @Override
    public void send(byte[] header, ByteBuffer payload) {
        if (onSend != null) {
            throw onSend;
        }
        int length = payload == null ? 0 : payload.remaining();
        ByteBuffer whole = ByteBuffer.allocate(header.length + length);
        whole.put(header);
        if (payload != null) {
            whole.put(payload);
        }
        whole.flip();
        try {
            received.add(Codec.decode(whole));
        } catch (Exception error) {
            throw new AssertionError("the device sent what is no message", error);
        }
    }

    @Override
    public long waitingBytes() {
        return waitingBytes;
    }

    @Override
    public void close() {
        closed = true;
        listener.ended(Ending.lost("closed"));
    }

    @Override
    public void cancel() {
        closed = true;
    }

    /** The next message that is no heartbeat. */
    Message next() throws InterruptedException {
        while (true) {
            Message message = nextOfAll();
            if (message.type != MessageType.HEARTBEAT) {
                return message;
            }
        }
    }

    Message nextOfAll() throws InterruptedException {
        Message message = received.poll(PATIENCE_S, TimeUnit.SECONDS);
        if (message == null) {
            throw new AssertionError("the device sends nothing");
        }
        return message;
    }

    void say(Message message) {
        byte[] header = Codec.header(message);
        int length = message.payload() == null ? 0 : message.payload().remaining();
        ByteBuffer whole = ByteBuffer.allocate(header.length + length);
        whole.put(header);
        if (message.payload() != null) {
            whole.put(message.payload());
        }
        whole.flip();
        listener.received(whole.asReadOnlyBuffer());
    }

    void sayBytes(byte[] bytes) {
        listener.received(ByteBuffer.wrap(bytes));
    }

    void sayText() {
        listener.receivedWrong("a message is binary, not text");
    }

    void cut() {
        listener.ended(Ending.lost("cut"));
    }

    void welcome(double heartbeatS) {
        say(
                Message.of(MessageType.WELCOME)
                        .with("device", 7)
                        .with("heartbeat_s", heartbeatS)
                        .with("server", "S1")
                        .with("credential", "mine")
                        .build());
    }

    /** A square of ones under an id. */
    void put(long id, int side) {
        byte[] ones = new byte[2 * side * side];
        for (int i = 0; i < side * side; i++) {
            ones[2 * i] = (byte) 0x80;
            ones[2 * i + 1] = 0x3f;
        }
        say(
                Message.of(MessageType.PUT)
                        .with("id", id)
                        .with("rows", side)
                        .with("columns", side)
                        .with("dtype", "bf16")
                        .payload(ByteBuffer.wrap(ones))
                        .build());
    }

    void run(long id, long array) {
        say(
                Message.of(MessageType.RUN)
                        .with("id", id)
                        .with("op", "matmul")
                        .with("inputs", Arrays.asList(array, array))
                        .with("transpose_a", false)
                        .with("transpose_b", true)
                        .with("out", "fp32")
                        .build());
    }
}
